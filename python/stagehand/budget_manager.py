"""stagehand.compat.budget under the other name that programs import it by."""

from .compat.budget import BudgetManager

__all__ = ["BudgetManager"]
