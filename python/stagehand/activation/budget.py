"""A part of stagehand.compat.spill under the name that programs import it by: watermarks."""

from ..compat.spill import ActivationBudgetManager

__all__ = ["ActivationBudgetManager"]
