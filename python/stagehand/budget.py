"""stagehand.compat.budget under the name that programs import it by."""

from .compat.budget import BudgetManager

__all__ = ["BudgetManager"]
