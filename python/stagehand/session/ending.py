"""The interpreter's end while daemon threads run managed models."""

from __future__ import annotations

import atexit
import sys
import threading
import time

from .. import _core, sessions

EXIT_WAIT_S = 2.0  # at most, for threads to get where they can stay
REST_S = 0.1  # a thread that is in one place for so long is not on its way
_parked: set[int] = set()  # threads
_exiting = False


def hold_if_ending(foreign: bool = True) -> None:
    """Before a pass, and inside of a backward. Once the interpreter ends, a thread other than the main one stays here
    for good. foreign: also one that Python has not made, as autograd's; somebody may be waiting for it."""
    if not _exiting:
        return
    thread = threading.current_thread()
    if thread is not threading.main_thread() and (foreign or not isinstance(thread, threading._DummyThread)):
        _park()


@atexit.register
def _stop_passes() -> None:
    """At the interpreter's end: a pass that a daemon thread is in may finish, another does not begin. The thread
    would otherwise die inside an operator of torch, which aborts the process."""
    global _exiting
    _exiting = True
    _core.watch_unpack(1)  # a backward that is under way comes by here with its next weight
    end = time.monotonic() + EXIT_WAIT_S
    for session in sessions.opened():
        session.steps.pass_lock.acquire(timeout=max(0.0, end - time.monotonic()))  # and kept
    runners = {ident for session in sessions.opened() for ident in session.steps.runners}
    _wait_for([thread for thread in threading.enumerate() if thread.ident in runners and thread.daemon], end)


def _wait_for(threads: list, end: float) -> None:
    """Until each has ended, is parked, or rests: between its passes there are backwards, steps of optimizers and
    other operators of torch. Where it rests it waits for something that does not come any more."""
    seen: dict[int, tuple] = {}  # thread -> its place, since when
    while (now := time.monotonic()) < end:
        frames, busy = sys._current_frames(), False
        for thread in threads:
            frame = frames.get(thread.ident)
            if frame is None or thread.ident in _parked:
                continue
            place = id(frame), frame.f_lasti
            before, since = seen.get(thread.ident, (None, now))
            if place != before:
                seen[thread.ident] = place, now
            busy = busy or place != before or now - since < REST_S
        if any(session.steps.backwards for session in sessions.opened()):  # whose operators may take any time
            busy = busy or not all(thread.ident in _parked for thread in threads)
        if not busy:
            return
        del frames, frame  # and what its locals hold
        time.sleep(0.002)


def _park() -> None:
    _parked.add(threading.get_ident())
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
