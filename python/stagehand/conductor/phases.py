"""PhaseCoordinator: where a step is, and who is told when it goes on."""

from __future__ import annotations

import logging

from .. import _core
from ..owning import NotCopied
from .names import Phase

log = logging.getLogger("stagehand")


class PhaseCoordinator(NotCopied):
    """Phases of a step: STEP_BEGIN -> FORWARD -> BACKWARD -> OPTIMIZER -> STEP_END. Each may be left out; back goes
    only BACKWARD -> FORWARD. Raises InvalidStateTransitionError. The same phase again is nothing.

    listeners: objects with `on_phase(phase)`, called in their order; one that raises is logged, the rest are called.
    """

    def __init__(self, core: _core.Conductor) -> None:
        self._core = core
        self.listeners: list = []

    @property
    def phase(self) -> Phase:
        return Phase(self._core.phase())

    @property
    def durations(self) -> dict[str, float]:
        """Seconds in each phase of this step, or of the last one."""
        stats = self._core.stats()
        return {name: stats[f"ns_{name.upper()}"] / 1e9 for name in ("forward", "backward", "optimizer")}

    def begin(self, step: int) -> None:
        self._core.begin_step(step)
        self._tell(Phase.STEP_BEGIN)

    def enter(self, phase: Phase) -> bool:
        """True when it is another phase now."""
        changed = self._core.enter(phase)
        if changed:
            self._tell(phase)
        return changed

    def end(self) -> None:
        self._core.end_step()
        self._tell(Phase.STEP_END)

    def _tell(self, phase: Phase) -> None:
        for listener in list(self.listeners):
            try:
                listener.on_phase(phase)
            except Exception:
                log.exception("stagehand: %r failed when the step entered %s", listener, phase.name)
