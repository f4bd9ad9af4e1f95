"""A budget that the user gave and of which the device refused a part, because others had the memory: the core plans for
less then (stats["budget_cuts"]), says when to ask for the rest, and asks once so much is free."""

from __future__ import annotations

import logging
import time

from .. import _core

log = logging.getLogger("stagehand")


class Given:
    """Of one session. Called by the thread that begins a step, under the session's step lock."""

    clock = staticmethod(time.monotonic_ns)

    def __init__(self, session) -> None:
        self.session = session

    def before_step(self) -> None:
        session, core = self.session, self.session.core
        missing = core.missing_budget(self.clock())
        if not missing or session.target.capturing() or session.target.free_bytes() < missing:
            return
        before = core.stats()["budget"]
        core.ask_again(self.clock())
        log.info("stagehand: %s has %s of its budget of %s again, after %s", session.name,
                 _core.format_size(core.stats()["budget"]), _core.format_size(session.budget),
                 _core.format_size(before))
