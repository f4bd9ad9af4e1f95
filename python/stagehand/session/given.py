"""A budget that the user gave and of which the device refused a part, because others had the memory: the core plans for
less then (stats["budget_cuts"]), and here all of it is asked for again once so much is free."""

from __future__ import annotations

import logging
import time

from .. import _core
from ..errors import StagehandOOMError

log = logging.getLogger("stagehand")

LOOK_S = 0.5  # between looks, and twice as long after each time that the device said no again
MOST_S = 64.0


class Given:
    """Of one session. Called by the thread that begins a step, under the session's step lock."""

    def __init__(self, session) -> None:
        self.session = session
        self._next = 0.0
        self._wait = LOOK_S

    def before_step(self) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self._wait
        session, core = self.session, self.session.core
        if core.parked or session.target.capturing():
            return
        stats = core.stats()
        missing = session.budget - stats["budget"]
        if missing <= 0:
            self._wait = LOOK_S
        elif not stats["leased_bytes"] and session.target.free_bytes() >= missing:
            self._ask(stats["budget"])

    def _ask(self, before: int) -> None:
        core, budget = self.session.core, self.session.budget
        try:
            core.set_budget(budget)
        except StagehandOOMError:  # the budget that was in force is again
            pass
        found = core.stats()["budget"]
        self._wait = LOOK_S if found == budget else min(2 * self._wait, MOST_S)
        self._next = time.monotonic() + self._wait
        log.info("stagehand: %s has %s of its budget of %s again, after %s", self.session.name,
                 _core.format_size(found), _core.format_size(budget), _core.format_size(before))
