"""Exceptions of Stagehand. Every failure of the library is a StagehandError; subclasses say what kind.

The library reports a status and a sentence; `for_status` is the one table from a status to a class, and `some_of`
names things in a sentence.
"""

from __future__ import annotations


class StagehandError(Exception):
    """A call failed. `str()` is a sentence that names the thing and says what to do.

    status: name of the library's status, such as "IO"; "" for errors raised by Python code.
    object: the file, tensor, unit or argument at fault; "" if there is none.
    native_code: errno or the driver's code; 0 if there is none.
    """

    def __init__(self, message: str = "", status: str = "", object: str = "", native_code: int = 0) -> None:
        super().__init__(message)
        self.status = status
        self.object = object
        self.native_code = native_code


class StagehandOOMError(StagehandError):
    """Host, pinned or device memory, or the budget, is too small for what was asked."""


class DtypeMismatchError(StagehandError):
    """A tensor has another dtype than the one expected."""


class InvalidStateTransitionError(StagehandError):
    """The object is in a state that does not allow this call."""


class TransferError(StagehandError):
    """Reading, writing or copying bytes failed."""


class CheckpointError(StagehandError, ValueError):
    """A model file contradicts itself, its format, or what was expected of it."""


class NotFoundError(StagehandError, FileNotFoundError):
    """The file, tensor or unit named does not exist."""


class InvalidArgumentError(StagehandError, ValueError):
    """An argument is out of its range."""


_CLASS_OF = {
    "INVALID_ARGUMENT": InvalidArgumentError,
    "INVALID_STATE": InvalidStateTransitionError,
    "NOT_FOUND": NotFoundError,
    "OUT_OF_HOST_MEMORY": StagehandOOMError,
    "OUT_OF_PINNED_MEMORY": StagehandOOMError,
    "OUT_OF_DEVICE_MEMORY": StagehandOOMError,
    "OUT_OF_ADDRESS_SPACE": StagehandOOMError,
    "BUDGET_TOO_SMALL": StagehandOOMError,
    "IO": TransferError,
    "CHANGED_DATA": TransferError,
    "DEVICE_ERROR": TransferError,
    "CORRUPT_DATA": CheckpointError,
    "SHAPE_MISMATCH": CheckpointError,
    "DTYPE_MISMATCH": DtypeMismatchError,
}


def for_status(status: str, message: str, object: str, native_code: int) -> StagehandError:
    """The exception for a status of the library, not yet raised. Unlisted ones are plain StagehandError."""
    return _CLASS_OF.get(status, StagehandError)(message, status, object, native_code)


def some_of(names: list[str], most: int = 5) -> str:
    """`names` for a message: "a, b and 7 more" where there are more than `most`."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
