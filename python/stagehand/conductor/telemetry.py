"""TelemetryHub: what a step of the conductor came to, and the trace of its events."""

from __future__ import annotations

from collections import deque

from .. import _core
from ..jsonlines import Appending, JsonLines
from ..owning import NotCopied
from .config import MIB
from .names import DenialReason, Direction, Phase

_EVENTS = _core.CONDUCTOR["events"]
_FIELDS = [what.split(", ") for what in _core.CONDUCTOR["event_fields"]]
_SPELT = {"phase": Phase, "reason": DenialReason, "direction": Direction}


def _event(ns: int, kind: int, *values: int) -> dict:
    """An event as the trace has it: numbers under their names, and those of an enum by name."""
    event = {"event": _EVENTS[kind], "ns": ns}
    for name, value in zip(_FIELDS[kind], values):
        if name != "0":
            event[name.replace(" ", "_")] = _SPELT[name](value).name if name in _SPELT else value
    return event


class TelemetryHub(NotCopied, Appending):
    """The last 100 records in `history`, oldest first, and the events of the last ones in `events`. path: a file to
    which both are appended as JSON lines, by the rules of docs/telemetry.md; None: none. Raises OSError when it cannot
    be written; nothing is tried after that. interval: steps from one record to the next.

    A record: step_id; vram_allocated_mb, vram_headroom_mb, pinned_granted_mb, pinned_in_use_mb (MiB); h2d_inflight,
    d2h_inflight (tokens); grant_count, deny_count, partial_count, shrink_count; phase_durations {forward, backward,
    optimizer} (s); h2d_gb_s, d2h_gb_s (measured); copies_ordered, copies_split, copies_deferred since the start;
    runtime_snapshots, one for each adapter."""

    def __init__(self, core: _core.Conductor, interval: int, path: str | None) -> None:
        self._core = core
        self._interval = interval
        self._steps = 0
        self._file = JsonLines(path)
        self.history: deque[dict] = deque(maxlen=100)
        self.events: deque[dict] = deque(maxlen=4096)

    def step_ended(self, durations: dict[str, float], snapshots: dict[str, dict]) -> None:
        self._steps += 1
        events = [_event(*event) for event in self._core.events()]
        self.events.extend(events)
        record = None
        if self._steps % self._interval == 0:
            record = self._record(durations, snapshots)
            self.history.append(record)
        self._file.append([*events, *([record] if record else [])])

    def _record(self, durations: dict[str, float], snapshots: dict[str, dict]) -> dict:
        stats = self._core.stats()
        return {
            "step_id": stats["step"],
            "vram_allocated_mb": stats["vram_allocated"] / MIB,
            "vram_headroom_mb": stats["vram_headroom"] / MIB,
            "pinned_granted_mb": stats["pinned_granted"] / MIB,
            "pinned_in_use_mb": stats["pinned_unmanaged"] / MIB,
            "h2d_inflight": stats["h2d_inflight"],
            "d2h_inflight": stats["d2h_inflight"],
            "grant_count": stats["grants"],
            "deny_count": stats["denials"],
            "partial_count": stats["partials"],
            "shrink_count": stats["shrinks"],
            "phase_durations": durations,
            "h2d_gb_s": stats["bytes_per_s_H2D"] / 1e9,
            "d2h_gb_s": stats["bytes_per_s_D2H"] / 1e9,
            "copies_ordered": stats["ordered"],
            "copies_split": stats["split"],
            "copies_deferred": stats["deferred"],
            "runtime_snapshots": snapshots,
        }
