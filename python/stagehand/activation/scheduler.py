"""A part of stagehand.compat.spill under the name that programs import it by: keep or spill."""

from ..compat.spill import ActivationScheduler

__all__ = ["ActivationScheduler"]
