"""What a run says of itself: the log, a runtime's repr, progress."""

import logging
import sys

import children
import pytest
import stagehand
import torch
from stagehand import _core, progress
from support import Stack, made, runtime
from torch import nn


def stack():
    return made(lambda: nn.Sequential(*[nn.Linear(128, 128) for _ in range(8)]))


BUDGET = 4 * 128 * 129 * 4


def steps(model, count):
    with torch.inference_mode():
        for _ in range(count):
            model(torch.randn(2, 128))


def lines(caplog, level):
    return [r.getMessage() for r in caplog.records if r.name == "stagehand" and r.levelno == level]


def test_wrapping_says_what_streams_and_what_stays(caplog):
    caplog.set_level(logging.INFO, "stagehand")
    model = stagehand.layer(stack(), vram_budget=BUDGET, device="sim")
    own = runtime(model)
    said, = lines(caplog, logging.INFO)
    streams = [unit for unit in own.stats["units"] if not unit["resident"]]
    assert f"'{own.name}' streams: {len(streams)} of 8 units" in said
    assert _core.format_size(sum(unit["bytes"] for unit in streams)) in said
    assert f"budget {_core.format_size(BUDGET)}" in said


def test_a_model_that_stays_whole_says_so(caplog):
    caplog.set_level(logging.INFO, "stagehand")
    model = made(lambda: nn.Sequential(nn.Linear(8, 8)))
    model[0].weight = nn.Parameter(model[0].weight.t())  # not contiguous: it stays
    stagehand.layer(model, vram_budget="1MB", device="sim")
    said, = lines(caplog, logging.INFO)
    assert "0 of 1 units" in said or "streams nothing" in said


def test_a_change_of_plan_names_its_reason(caplog):
    model = stagehand.layer(stack(), vram_budget=BUDGET, device="sim")
    steps(model, 3)
    caplog.set_level(logging.INFO, "stagehand")
    runtime(model).set_vram_budget(BUDGET + 128 * 129 * 4)
    said = lines(caplog, logging.INFO)
    assert f"'{runtime(model).name}' has a new plan, because the budget changed: " in said[0] and "bound by" in said[0]


def test_another_order_is_a_reason(caplog):
    model = stagehand.layer(made(Stack), vram_budget="150KB", device="sim")
    x, = model.example()
    with torch.inference_mode():
        model(x)
        model(x)
        caplog.set_level(logging.INFO, "stagehand")
        for _ in range(4):
            model(x, list(model.blocks)[::-1])
    runtime(model).end_step()
    assert any("steps use its units in another order" in said for said in lines(caplog, logging.INFO))


def test_a_handler_may_ask_the_runtime(caplog):
    """No lock of the library's is held while it runs."""
    model = stagehand.layer(stack(), vram_budget=BUDGET, device="sim")
    steps(model, 2)
    seen = []

    class Asks(logging.Handler):
        def emit(self, record):
            seen.append(runtime(model).session.core.stats()["budget"])

    handler = Asks()
    logging.getLogger("stagehand").addHandler(handler)
    try:
        caplog.set_level(logging.INFO, "stagehand")
        runtime(model).set_vram_budget(2 * BUDGET)
    finally:
        logging.getLogger("stagehand").removeHandler(handler)
    assert seen and set(seen) == {2 * BUDGET}


def test_a_script_that_sets_up_no_logging_prints_nothing():
    code = ("import stagehand, torch; from torch import nn\n"
            "m = stagehand.layer(nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]), vram_budget='40KB', "
            "device='sim')\n"
            "for _ in range(4): m(torch.randn(2, 64))\n"
            "stagehand.runtime(m).set_vram_budget('60KB'); stagehand.shutdown(m)")
    done = children.run_bare(code)
    assert (done.status, done.stdout, done.stderr) == (0, "", "")


def test_a_runtime_says_what_it_is():
    model = stagehand.layer(stack(), vram_budget=BUDGET, device="sim")
    own = runtime(model)
    streams = sum(not unit["resident"] for unit in own.stats["units"])
    assert repr(own).startswith(f"<LayerRuntime of '{own.name}' on cpu: {streams} of 8 units stream, ")
    assert f"of {_core.format_size(BUDGET)} on the device" in repr(own)
    steps(model, 4)
    own.end_step()
    assert "ms a step, " in repr(own)
    stagehand.shutdown(model)
    assert repr(own) == f"<LayerRuntime of '{own.name}', shut down>"


def test_a_runtime_that_is_not_open_yet_says_so():
    own = stagehand.StagehandRuntime(made(Stack), stagehand.StagehandConfig(), r"^blocks\.\d+$", device="sim")
    assert repr(own) == "<StagehandRuntime of 'Stack', not opened yet>"
    own.shutdown()


def test_repr_ends_no_step():
    model = stagehand.layer(stack(), vram_budget=BUDGET, device="sim")
    steps(model, 2)
    before = runtime(model).session.core.stats()["steps"]
    repr(runtime(model))
    assert runtime(model).session.core.stats()["steps"] == before


class Shown:
    """In place of tqdm's bar."""

    made: list = []

    def __init__(self, **options):
        self.options, self.done, self.closed = options, options["initial"], False
        Shown.made.append(self)

    def update(self, n):
        self.done += n

    def close(self):
        self.closed = True


def bar(monkeypatch, seconds, items):
    """Bars shown while items take `seconds` each, by a clock of the test's."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress, "_wanted", lambda: True)
    monkeypatch.setattr(progress, "_tqdm", lambda: Shown)
    Shown.made = []
    for _ in progress.over("loading", items, lambda n: n):
        now[0] += seconds
    return Shown.made


def test_progress_appears_after_a_second_with_what_is_done_by_then(monkeypatch):
    assert bar(monkeypatch, 0.1, [10] * 9) == []
    shown, = bar(monkeypatch, 0.4, [10] * 5)
    assert shown.options["total"] == 50 and shown.options["initial"] == 30
    assert shown.done == 50 and shown.closed


def test_nobody_who_looks_sees_no_progress(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    assert not progress._wanted()


def test_an_interrupt_while_a_line_is_logged_is_raised_again():
    """Ctrl-C comes at any line of Python: also in the function that the library calls with what it has to say."""
    class Interrupted(logging.Handler):
        def emit(self, record):
            raise KeyboardInterrupt

    log, handler = logging.getLogger("stagehand"), Interrupted()
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        with pytest.raises(KeyboardInterrupt):
            stagehand.layer(stack(), vram_budget=BUDGET, device="sim")
            for _ in range(1000):  # the signal's handler runs between two instructions
                pass
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
