"""`trace`: what a run does when, as a file for Perfetto (ui.perfetto.dev) and chrome://tracing."""

from __future__ import annotations

import warnings

from . import _core, sessions
from .arguments import Path, check


class trace:  # noqa: N801 - reads as a function
    """Records all runtimes, downloads, spills and optimizers of the process while its block lasts:

        with stagehand.trace("run.json.gz"):
            for _ in range(3):
                model(x)

    path: of the file, which is written at the end; one that ends in ".gz" is compressed. A file that holds something
    else than a trace is refused. events: that the ring in memory holds, 64 bytes each, 1024 to 2**24; the oldest give
    way, and a warning says how many. Steps that are open when the block begins or ends are ended there. The clock is
    torch.profiler's: a trace of the same run by it lies beside this one. docs/trace.md says what the tracks show.

    Raises InvalidStateTransitionError inside another trace, and TransferError for a file that cannot be written.
    lost: events that gave way, from the end of the block on.
    """

    def __init__(self, path: Path, *, events: int = 1 << 18) -> None:
        check("path", path, "path")
        check("events", events, "integer")
        self._path, self._events = path, events
        self.lost = 0

    def __enter__(self) -> trace:
        _settle()
        _core.timeline_begin(self._path, self._events)
        return self

    def __exit__(self, *error) -> None:
        try:
            _settle()
        finally:
            self.lost = _core.timeline_end()
        if self.lost:
            warnings.warn(f"stagehand: the trace lacks its first {self.lost} events: record fewer steps, or give a "
                          f"larger `events`", RuntimeWarning, stacklevel=2)


def _settle() -> None:
    """All steps that have ended are seen: what was before belongs to no recording that comes."""
    for session in sessions.opened():
        if session.streaming and not session.closed:
            session.steps.close_finished_step()
            session.steps.flush_telemetry()
