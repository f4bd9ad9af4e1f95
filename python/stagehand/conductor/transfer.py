"""TransferManager: tokens for transfers that others carry out, and the measured rate of the link."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, NamedTuple

from .. import _core
from ..owning import NotCopied
from .names import AcquireStatus, DenialReason, Direction, Priority, number_of

if TYPE_CHECKING:
    from .budget import BudgetManager

_LATER = (DenialReason.H2D_SLOTS_EXHAUSTED, DenialReason.D2H_SLOTS_EXHAUSTED, DenialReason.PRIORITY_TOO_LOW)


class AcquireResult(NamedTuple):
    """status: compare by `.value`. token: None unless ACQUIRED. reason: a DenialReason."""

    status: AcquireStatus
    token: int | None
    reason: DenialReason


class TransferManager(NotCopied):
    """Slots of each direction. Every token that is acquired is released once; to release it again does nothing."""

    def __init__(self, core: _core.Conductor, budget: BudgetManager) -> None:
        self._core = core
        self._budget = budget

    def acquire(self, direction: Direction, nbytes: int, priority: Priority = Priority.REQUIRED, owner: str = "",
                block_id: int | str = 0, step_id: int = 0) -> AcquireResult:
        """A token for a transfer of nbytes by an owner. block_id: an int or a name, for the trace. step_id: taken for
        callers that give it; the trace has the step's own number."""
        number = block_id if isinstance(block_id, int) and block_id >= 0 else zlib.crc32(str(block_id).encode())
        token, reason = self._core.acquire(self._budget.number(owner), number_of(Direction, direction, "direction"),
                                           nbytes, number_of(Priority, priority, "priority"), number)
        reason = DenialReason(reason)
        if reason is DenialReason.NONE:
            return AcquireResult(AcquireStatus.ACQUIRED, token, reason)
        return AcquireResult(AcquireStatus.DEFERRED if reason in _LATER else AcquireStatus.DENIED, None, reason)

    def complete_transfer(self, token: int, actual_bytes: int, duration_ms: float) -> None:
        """It is over: its rate goes into the estimate. StagehandError (STALE) after release."""
        self._core.complete(token, actual_bytes, duration_ms)

    def release_token(self, token: int | None) -> None:
        """Frees the slot. Again, and None, is fine."""
        if token is not None:
            self._core.release_token(token)

    def bandwidth(self, direction: Direction) -> float:
        """Bytes per second, measured from tokens and from the copies of attached runtimes; 0.0: not yet."""
        return self._core.stats()[f"bytes_per_s_{number_of(Direction, direction, 'direction').name}"]

    def inflight(self, direction: Direction) -> int:
        """Tokens out."""
        return self._core.stats()[f"{number_of(Direction, direction, 'direction').name.lower()}_inflight"]
