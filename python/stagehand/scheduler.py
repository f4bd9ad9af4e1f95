"""stagehand.compat.scheduler under the name that programs import it by."""

from .compat.scheduler import StagehandScheduler, StaticLookaheadPolicy

__all__ = ["StagehandScheduler", "StaticLookaheadPolicy"]
