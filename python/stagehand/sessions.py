"""The sessions that are open in this process."""

from __future__ import annotations

import weakref

_open: weakref.WeakSet = weakref.WeakSet()


def add(session) -> None:
    _open.add(session)


def discard(session) -> None:
    """It has closed. Again is fine."""
    _open.discard(session)


def opened() -> list:
    """Those that are open now. Any thread."""
    while True:
        try:
            return list(_open)
        except RuntimeError:  # another thread has opened one meanwhile
            continue
