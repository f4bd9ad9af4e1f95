"""What the library says goes to Python's `logging`, logger "stagehand": INFO when a model is wrapped and when its plan
changes, DEBUG for plans that were looked at and stay. A program that sets up no logging prints none of it."""

from __future__ import annotations

import logging

from . import _core

log = logging.getLogger("stagehand")

_LEVELS = (logging.DEBUG, logging.INFO, logging.WARNING)


def _hear(level: int, message: str) -> None:
    log.log(_LEVELS[level], "stagehand: %s", message)


_core.set_log(_hear)
