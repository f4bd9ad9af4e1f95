"""stagehand.compat.transfer under the name that programs import it by."""

from .compat.transfer import AsyncTransferEngine, TransferHandle

__all__ = ["AsyncTransferEngine", "TransferHandle"]
