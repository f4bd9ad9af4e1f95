"""The interpreter's end while daemon threads run managed models."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time

from .. import _core, sessions

EXIT_WAIT_S = 2.0  # at most, of its own processor time, for a thread to get where it can stay
MOST_S = 20.0  # for all of them, on a machine that others use
REST_S = 0.1  # a thread that sleeps in one place for so long is not on its way
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
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
    opened, watched, begin = sessions.opened(), _Watched(), time.monotonic()
    locks = [session.steps.pass_lock for session in opened]
    while True:
        locks = [lock for lock in locks if not lock.acquire(blocking=False)]  # and kept
        runners = {ident for session in opened for ident in session.steps.runners}
        threads = [thread for thread in threading.enumerate() if thread.ident in runners and thread.daemon]
        busy, waited = watched.busy(threads), time.monotonic() - begin
        inside = bool(locks) or (any(session.steps.backwards for session in opened)  # operators may take any time
                                 and not all(thread.ident in _parked for thread in threads))
        if not busy and (not inside or waited > EXIT_WAIT_S) or waited > MOST_S:
            return
        time.sleep(0.002)


class _Watched:
    """Threads until each has ended, is parked, or rests: between its passes there are backwards, steps of optimizers
    and other operators of torch. Where it rests it waits for something that does not come any more. A thread that
    waits for a processor does not rest, and how long it may take counts in its own time."""

    def __init__(self) -> None:
        self._first: dict = {}  # thread -> its processor time at first
        self._seen: dict = {}  # thread -> its place, since when

    def busy(self, threads: list) -> bool:
        now, frames, found = time.monotonic(), sys._current_frames(), False
        for thread in threads:
            frame, (state, used) = frames.get(thread.ident), _task(thread)
            if frame is None or thread.ident in _parked:
                continue
            if used - self._first.setdefault(thread, used) > EXIT_WAIT_S * TICKS_PER_S:
                continue
            place = id(frame), frame.f_lasti
            before, since = self._seen.get(thread, (None, now))
            if place != before or state != "S":
                self._seen[thread] = place, now
            found = found or place != before or state != "S" or now - since < REST_S
        return found


def _task(thread) -> tuple[str, int]:
    """The system's letter for its state, "S" for one that sleeps, and its processor time in ticks."""
    try:
        with open(f"/proc/self/task/{thread.native_id}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:  # it has ended
        return "S", 0
    return fields[0], int(fields[11]) + int(fields[12])


def _park() -> None:
    _parked.add(threading.get_ident())
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
