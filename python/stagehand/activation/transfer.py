"""A part of stagehand.compat.spill under the name that programs import it by: copies to the host and back."""

from ..compat.spill import ActivationTransferEngine

__all__ = ["ActivationTransferEngine"]
