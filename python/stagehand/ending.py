"""The interpreter's end while threads run managed models."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref

_open: weakref.WeakSet = weakref.WeakSet()  # sessions
EXIT_WAIT_S, PARK_WAIT_S = 2.0, 0.1
_parked = threading.Event()
_exiting = False


def watch(session) -> None:
    """`session` is open; its passes are to be stopped when the interpreter ends."""
    _open.add(session)


def open_sessions() -> list:
    """Those that are open now. Any thread."""
    while True:
        try:
            return list(_open)
        except RuntimeError:  # another thread has opened one meanwhile
            continue


def hold_if_ending() -> None:
    """Before a pass. Once the interpreter ends, a thread other than the main one stays here for good."""
    if _exiting and threading.current_thread() is not threading.main_thread():
        _park()


os.register_at_fork(after_in_child=_open.clear)  # a child runs none of them, and must not wait for their locks


@atexit.register
def _stop_passes() -> None:
    """At the interpreter's end: a pass that a daemon thread is in may finish, another does not begin. The thread
    would otherwise die inside an operator of torch, which aborts the process."""
    global _exiting
    _exiting = True
    end = time.monotonic() + EXIT_WAIT_S
    for session in open_sessions():
        session._pass_lock.acquire(timeout=max(0.0, end - time.monotonic()))  # and kept
    runners = {ident for session in open_sessions() for ident in session._runners}
    if any(thread.ident in runners and thread.daemon for thread in threading.enumerate()):
        _parked.wait(PARK_WAIT_S)  # it is on its way from the end of its pass to the begin of the next


def _park() -> None:
    _parked.set()
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
