"""Telemetry of a session: the last 100 steps, as the core recorded them."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

from .. import _core
from ..owning import NotCopied

if TYPE_CHECKING:
    from ..session.session import Session

StepMetrics = dataclasses.make_dataclass("StepMetrics", [(field[0], float, 0) for field in _core.METRICS])
StepMetrics.__module__ = __name__  # for pickle
StepMetrics.__doc__ = "One step: the fields of a telemetry JSON line, with their units in docs/telemetry.md."


class StagehandTelemetry(NotCopied):
    """Read-only view. A step appears once the device has finished it, one or two steps late on a GPU."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._frozen: list | None = None

    @property
    def path(self) -> str | None:
        """The file to which records are appended; None: none."""
        path = self._session.telemetry_path
        return None if path is None else os.fspath(path)

    @property
    def history(self) -> list:
        """StepMetrics of the last 100 steps, oldest first."""
        if self._frozen is not None:
            return list(self._frozen)
        self._session.steps.close_finished_step()
        found, i = [], 0
        while (record := self._session.core.metrics(i)) is not None:
            found.append(StepMetrics(**record))
            i += 1
        return found[::-1]

    def freeze(self) -> None:
        """Keeps what is there, for reading after shutdown."""
        if self._frozen is None and not self._session.closed:
            self._frozen = self.history

    def hit_rate(self) -> float:
        """Share of uses whose bytes were there in time; 0.0 without uses."""
        steps = self.history
        hits = sum(s.prefetch_hits for s in steps)
        uses = hits + sum(s.prefetch_misses for s in steps)
        return hits / uses if uses else 0.0

    def mean_stall_ms(self) -> float:
        """Mean stall of a step in ms; 0.0 without steps."""
        steps = self.history
        return sum(s.stall_time_ms for s in steps) / len(steps) if steps else 0.0

    def max_stall_ms(self) -> float:
        return max((s.stall_time_ms for s in self.history), default=0.0)

    def vram_trend(self) -> str:
        """"growing", "shrinking" or "stable": the second half of the window against the first, +-50 MiB."""
        used = [s.vram_used_mb for s in self.history]
        if len(used) < 3:
            return "stable"
        half = len(used) // 2
        change = sum(used[half:]) / len(used[half:]) - sum(used[:half]) / half
        return "growing" if change > 50 else "shrinking" if change < -50 else "stable"
