"""The sessions that are open in this process."""

from __future__ import annotations

import os
import threading
import weakref

_open: weakref.WeakSet = weakref.WeakSet()
_named: weakref.WeakSet = weakref.WeakSet()  # those, and sessions that are about to open
_lock = threading.Lock()  # of names


def _in_child() -> None:
    """A child runs none of them, and must not wait for their locks."""
    _lock._at_fork_reinit()
    _open.clear()
    _named.clear()


os.register_at_fork(after_in_child=_in_child)


def tell_apart(session) -> None:
    """Gives its name a number where another model that is open has that name."""
    with _lock:
        taken = {other.name for other in members(_named) if other is not session}
        name, number = session.name, 1
        while session.name in taken:
            number += 1
            session.name = f"{name} {number}"
        _named.add(session)


def add(session) -> None:
    _open.add(session)


def discard(session) -> None:
    """It has closed, or could not be opened. May be called again."""
    _open.discard(session)
    _named.discard(session)


def opened() -> list:
    """Those that are open now. Any thread."""
    return members(_open)


def members(weak: weakref.WeakSet) -> list:
    """What is in a set of weak references now. Any thread."""
    while True:
        try:
            return list(weak)
        except RuntimeError:  # another thread has added one meanwhile
            continue
