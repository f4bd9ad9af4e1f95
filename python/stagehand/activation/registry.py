"""A part of stagehand.compat.spill under the name that programs import it by: records of tensors."""

from ..compat.spill import ActivationRecord, ActivationRegistry, ActivationState

__all__ = ["ActivationRecord", "ActivationRegistry", "ActivationState"]
