"""Fault loops over whole scenarios (fault_scenarios.py): the n-th allocation, registration, read, write, thread or call
of the device fails, once or for ever, n = 1, 2, 3, ... until a scenario passes without having met it. That is with
STH_TEST_FULL=1; else n is 1, 3, 9, ... for once, and 1, 2, 6, 18, ... for ever.

Whatever happens is an error with a status that fits, or the right result. Nothing hangs, leaks or stays open, the
device is used rightly and is empty in the end, and when the fault is over the same objects work, bit for bit.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import warnings

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import stagehand  # noqa: E402
from fault_scenarios import Facts, Guest, Load, Train, TrainFromFile  # noqa: E402
from stagehand import _core  # noqa: E402

FULL = bool(os.environ.get("STH_TEST_FULL"))

FITTING = {  # fault point -> statuses of errors that it may lead to
    "alloc": {"OUT_OF_HOST_MEMORY"},
    "pin": set(),  # pageable memory serves
    "read": {"IO"},
    "short_read": set(),  # the rest is read, too
    "direct": set(),  # another way of reading
    "uring": set(),
    "write": {"IO"},
    "thread": {"OUT_OF_HOST_MEMORY"},
    "device_alloc": {"OUT_OF_DEVICE_MEMORY", "BUDGET_TOO_SMALL"},
    "device_call": {"DEVICE_ERROR", "BUDGET_TOO_SMALL"},  # places of uses whose end is not known stay taken
}
MEETS = {  # which scenarios meet a point at all
    Load: ["alloc", "pin", "read", "short_read", "direct", "write", "thread", "device_alloc", "device_call"],
    Train: ["alloc", "pin", "thread", "device_alloc", "device_call"],
    TrainFromFile: ["alloc", "read", "write", "thread"],
    Guest: ["alloc", "pin", "thread", "device_alloc", "device_call"],
}


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made = Facts(tmp_path_factory.mktemp("faults"))
    gc.collect()
    gc.freeze()  # collections look at what the runs made alone
    yield made
    torch.set_num_threads(threads)


def census() -> dict:
    """What must be as before when a run is over."""
    files = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            files.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:  # that of the listing itself
            pass
    return {"blocks": _core._live_blocks(), "files": sorted(f for f in files if "/fd" not in f),
            "threads": len(os.listdir("/proc/self/task")), "python threads": threading.active_count()}


def settled(before: dict) -> dict:
    """The census now. A thread that was joined may be listed for a moment still."""
    after = census()
    for _ in range(100):
        if after["threads"] <= before["threads"]:
            break
        time.sleep(0.01)
        after = census()
    return after


class Run:
    """One run of a scenario, in which one call fails."""

    def __init__(self, kind, facts, log, point, n, forever) -> None:
        self.where = f"{kind.__name__}: {point} {n}{' and on' if forever else ''}"
        self.point, self.n, self.forever = point, n, forever
        self.kind, self.facts, self.log = kind, facts, log
        self.errors: list[str] = []

    def attempt(self, call, *args) -> bool:
        try:
            call(*args)
            return True
        except stagehand.StagehandError as error:
            name = getattr(call, "__name__", "")
            assert error.status in FITTING[self.point], f"{self.where}: {name}: {error.status}: {error}"
            assert str(error), self.where
            self.errors.append(f"{name}: {error}")
            return False

    def play(self, to_the_end: bool) -> bool:
        """True when the fault was met. to_the_end: calls fail until the scenario is closed; else what follows when they
        fail no more is tried before."""
        scenario = self.kind(self.facts, f"check(log={self.log})+sim")
        _core._fault_arm(self.point, self.n, self.forever)
        try:
            if self.attempt(scenario.open):
                for part in self.kind.parts:
                    self.attempt(part, scenario)
            if not to_the_end:
                _core._fault_disarm()
                self._again(scenario)
            self.attempt(scenario.close)
            met = _core._fault_seen(self.point) >= self.n
        finally:
            _core._fault_disarm()
        scenario.close()
        scenario.plain()
        device, scenario = scenario.device, None
        gc.collect()
        if device is not None:
            info, account = device.info(), device.residency()
            assert info["memory_free"] == info["memory_total"], self.where
            assert account["occupied"] == 0 and account["runtimes"] == 0, (self.where, account)
            assert account["peak"] <= account["cap"], (self.where, account)
        return met

    def _again(self, scenario) -> None:
        """The fault is over: what was not opened can be, and everything works."""
        if not scenario.opened:
            scenario.close()
            scenario.plain()
            scenario.open()
        for part in self.kind.parts:
            part(scenario)


def loop(kind, point, facts, log, forever):
    """Returns the first n that is not met any more."""
    n, to_the_end = 1, False
    stray = []
    hook, sys.unraisablehook = sys.unraisablehook, lambda what: stray.append(f"{what.object}: {what.exc_value}")
    try:
        while True:
            log.unlink(missing_ok=True)
            before = census()
            run = Run(kind, facts, log, point, n, forever)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                try:
                    met = run.play(to_the_end)
                except BaseException as error:
                    raise AssertionError(f"{run.where}: {run.errors}") from error
            gc.collect()
            after = settled(before)
            ended = before["threads"] - after["threads"]  # of what other tests left behind: not a leak
            assert {**after, "threads": after["threads"] + max(ended, 0)} == before, (run.where, run.errors)
            assert not stray, (run.where, stray)
            assert not log.exists() or not log.read_text(), (run.where, log.read_text())
            if met:
                n += 1 if FULL or (forever and n == 1) else 2 * n
                to_the_end = not to_the_end
            elif not to_the_end:  # it may be met by the end
                to_the_end = True
            else:
                assert not run.errors, run.errors
                return n
    finally:
        sys.unraisablehook = hook


@pytest.mark.combinations("a call that fails once and one that fails for ever are faults of their own")
@pytest.mark.parametrize("forever", [False, True], ids=["once", "for ever"])
@pytest.mark.parametrize(("kind", "point"), [(kind, point) for kind, points in MEETS.items() for point in points])
def test_any_call_may_fail(kind, point, forever, facts, tmp_path):
    assert loop(kind, point, facts, tmp_path / "check.log", forever) > 1
