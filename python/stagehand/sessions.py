"""The sessions that are open in this process."""

from __future__ import annotations

import os
import weakref

_open: weakref.WeakSet = weakref.WeakSet()
os.register_at_fork(after_in_child=_open.clear)  # a child runs none of them, and must not wait for their locks


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
