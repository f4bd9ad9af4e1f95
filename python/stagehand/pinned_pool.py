"""stagehand.pool under the other name that programs import it by."""

from .pool import PinnedPool, PinnedSlab

__all__ = ["PinnedPool", "PinnedSlab"]
