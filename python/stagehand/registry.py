"""stagehand.compat.registry under the name that programs import it by."""

from .compat.registry import BlockEntry, BlockRegistry

__all__ = ["BlockEntry", "BlockRegistry"]
