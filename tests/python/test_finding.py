"""Budgets that nobody gave: found from the memory of the simulated device, on which a stand-in for torch's allocator
and a neighbour take real room, so that whoever is over the limit fails."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
from support import Stack, aligned_copy, made, runtime, same
from torch import nn

import stagehand
from stagehand import _core
from stagehand.errors import StagehandOOMError

MEMORY = 4 << 20


class Allocator:
    """Stands for torch's on the simulated device: room for activations, taken from the device itself."""

    def __init__(self, target) -> None:
        self.core = target.core
        self.target = target
        self.held = self.peak = self.failures = 0
        target.memory, target.begin_peak = self.memory, self.begin_peak

    def begin_peak(self) -> None:
        self.peak = self.held

    def memory(self) -> dict:
        info, fixed = self.core.info(), self.core.residency()["fixed"]
        return {"total": info["memory_total"], "free": info["memory_free"], "framework_reserved": fixed + self.held,
                "framework_allocated": fixed + self.held, "framework_peak": fixed + self.peak,
                "failures": self.failures, "retries": 0}

    @contextlib.contextmanager
    def room(self, nbytes: int):
        try:
            taken = self.core.empty(max(nbytes, 1))
        except StagehandOOMError:
            self.failures += 1
            raise torch.OutOfMemoryError("simulated") from None
        self.held += nbytes
        self.peak = max(self.peak, self.held)
        try:
            yield
        finally:
            self.held -= nbytes
            del taken


class Busy(Stack):
    """Every row of its input takes `row` bytes while it runs."""

    allocator = None
    row = 10_000

    def forward(self, x):
        with self.allocator.room(self.row * len(x)) if self.allocator is not None else contextlib.nullcontext():
            return super().forward(x)


def weights(model) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


@pytest.fixture
def world():
    """(model, reference, allocator, device): a model of 6 MB on a device of 4."""
    device = stagehand.Device("sim", memory_bytes=MEMORY)
    model = made(Busy, 10, 128, 4)
    assert 5 << 20 < weights(model) < 6 << 20
    want = aligned_copy(model)
    stagehand.layer(model, device=device, inference_mode=True)
    model.allocator = Allocator(runtime(model).session.target)
    yield model, want, model.allocator, device
    runtime(model).shutdown()


def run(model, want, rows: int = 4, times: int = 1):
    for _ in range(times):
        x = torch.randn(rows, 128)
        with torch.no_grad():
            assert same(model(x), want(x))


def found(model) -> dict:
    return runtime(model).stats["budget_found"]


def budget(model) -> int:
    return runtime(model).stats["budget"]


def test_it_begins_with_half_and_grows_to_all_that_the_rest_leaves(world):
    model, want, allocator, device = world
    first = budget(model)
    assert MEMORY * 0.4 < first <= MEMORY // 2 and found(model)["why"] == "FIRST"
    run(model, want, rows=20, times=12)
    report = found(model)
    assert report["others"] == 200_000
    assert budget(model) > first * 1.5
    assert budget(model) + 200_000 <= MEMORY - report["reserve"] // 2
    assert budget(model) + 200_000 >= MEMORY - report["reserve"] - MEMORY // 16
    assert allocator.failures == 0 and report["text"] == _core.BUDGET_WHY[report["why"]]


def test_a_steady_run_does_not_change_its_budget(world):
    model, want, _, _ = world
    run(model, want, times=6)
    before = runtime(model).stats
    run(model, want, times=30)
    after = runtime(model).stats
    assert after["budget"] == before["budget"]
    assert after["budget_found"]["growths"] == before["budget_found"]["growths"]


def eager(model) -> None:
    """Looks before every step, whatever the clock says."""
    finding = runtime(model).session.finding
    finding.clock = lambda: finding._pace.looked_ns + 10**9


def test_activations_that_grow_by_and_by_take_room_between_steps(world):
    model, want, allocator, _ = world
    run(model, want, times=5)
    full = budget(model)
    for rows in range(4, 100, 6):
        eager(model)
        run(model, want, rows=rows)
    assert allocator.failures == 0
    assert budget(model) < full - 500_000
    assert found(model)["shrinks"] > 0


def test_a_larger_input_gets_room_before_it_runs(world):
    model, want, allocator, _ = world
    run(model, want, rows=40, times=6)
    full = budget(model)
    run(model, want, rows=160)
    assert allocator.failures == 0
    assert budget(model) < full - 1_000_000


def test_after_a_step_that_ran_out_of_memory_the_next_one_fits(world):
    model, want, allocator, _ = world
    run(model, want, times=6)
    model.row *= 20  # as large as before by its inputs
    with pytest.raises(torch.OutOfMemoryError):
        run(model, want)
    eager(model)
    run(model, want)
    assert found(model)["why"] == "FAILED"
    for _ in range(5):
        eager(model)
        run(model, want)


def test_a_neighbour_is_given_room_and_what_it_leaves_is_used_again(world):
    model, want, allocator, device = world
    run(model, want, times=6)
    full, taken = budget(model), []
    for _ in range(12):
        free = device.info()["memory_free"]
        taken.append(device.empty(max(1, free // 2)))
        eager(model)
        run(model, want)
    assert found(model)["why"] == "NEIGHBOUR"
    assert budget(model) < full - 500_000
    assert device.info()["memory_free"] >= found(model)["reserve"] // 2
    taken.clear()
    for _ in range(20):
        eager(model)
        run(model, want)
    assert budget(model) >= full * 15 // 16 and found(model)["why"] in ("FULL", "FITS")


def test_the_smallest_budget_that_works_is_kept_where_there_is_no_more(world):
    model, want, _, device = world
    model.row = 0
    run(model, want, times=6)
    neighbour = device.empty(device.info()["memory_free"] - 1024)
    for _ in range(3):
        eager(model)
        run(model, want)
    more = device.empty(max(1, device.info()["memory_free"] - 1024))
    for _ in range(12):
        eager(model)
        run(model, want)
        more = (more, device.empty(max(1, device.info()["memory_free"] * 9 // 10)))
    assert found(model)["why"] in ("LEAST", "NEIGHBOUR")
    assert budget(model) >= runtime(model).session.core.smallest_budget()
    del neighbour, more


def test_a_model_that_fits_is_all_there_from_the_start():
    model = made(Stack, 3, 32)
    want = aligned_copy(model)
    stagehand.layer(model, device=stagehand.Device("sim", memory_bytes=MEMORY))
    run_small = torch.randn(4, 32)
    for _ in range(4):
        assert same(model(run_small), want(run_small))
    assert found(model)["why"] == "FITS"
    streamed = [u for u in runtime(model).stats["units"] if not u["resident"]]
    assert not streamed
    runtime(model).shutdown()


def test_a_budget_that_is_given_later_counts_and_none_finds_it_again(world):
    model, want, _, _ = world
    run(model, want, times=5)
    runtime(model).set_vram_budget(2 << 20)
    assert runtime(model).stats["budget_found"] is None
    run(model, want, times=5)
    assert budget(model) == 2 << 20
    runtime(model).set_vram_budget(None)
    for _ in range(12):
        eager(model)
        run(model, want)
    assert budget(model) > 3 << 20 and found(model)["why"] == "FULL"


def test_the_users_limit_for_all_models_of_a_device_holds():
    device = stagehand.Device("sim", memory_bytes=MEMORY, budget=2 << 20)
    model = made(Stack, 10, 128, 4)
    want = aligned_copy(model)
    stagehand.layer(model, device=device, inference_mode=True)
    run(model, want, times=8)
    assert budget(model) == 2 << 20 and device.residency()["occupied"] <= 2 << 20
    runtime(model).shutdown()


def test_two_models_that_find_their_budgets_share_the_device():
    device = stagehand.Device("sim", memory_bytes=MEMORY)
    models = [made(Stack, 10, 128, 4) for _ in range(2)]
    wants = [aligned_copy(model) for model in models]
    for model in models:
        stagehand.layer(model, device=device, inference_mode=True)
    for _ in range(4):
        for model, want in zip(models, wants):
            for _ in range(3):
                eager(model)
                run(model, want)
                assert device.residency()["occupied"] <= MEMORY
    assert budget(models[1]) > 3 << 20
    for model in models:
        runtime(model).shutdown()


def test_training_with_a_budget_that_is_found_gives_the_same_gradients():
    device = stagehand.Device("sim", memory_bytes=MEMORY)
    model = made(Busy, 10, 128, 4, frozen=False)
    want = aligned_copy(model)
    stagehand.layer(model, device=device)
    model.allocator = Allocator(runtime(model).session.target)
    optimisers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, want)]
    for rows in (4, 4, 4, 4, 30, 30, 60, 4):
        x = torch.randn(rows, 128)
        for m, optimiser in zip((model, want), optimisers):
            optimiser.zero_grad()
            m(x).square().mean().backward()
            optimiser.step()
        assert all(same(a, b) for a, b in zip(model.parameters(), want.parameters()))
    assert model.allocator.failures == 0
    runtime(model).shutdown()


def test_block_mode_and_load_find_theirs_too(tmp_path):
    device = stagehand.Device("sim", memory_bytes=MEMORY)
    model = made(Stack, 10, 128, 4)
    want = aligned_copy(model)
    blocks = stagehand.StagehandRuntime(model, inference_mode=True, device=device)
    for _ in range(8):
        with blocks.managed_forward():
            run(model, want)
    assert blocks.stats["budget_found"]["why"] in ("FULL", "PEAK") and blocks.stats["budget"] > 3 << 20
    blocks.shutdown()
    assert nn.Module.state_dict(model)
    gc.collect()


def test_on_a_card_torchs_numbers_are_read_and_what_a_new_budget_did_to_them_is_left_out(monkeypatch):
    from stagehand.device import Target

    target = object.__new__(Target)
    target.simulated, target.torch, target._counts = False, torch.device("cuda", 0), {"failures": 0, "retries": 0}
    stats = {"allocated_bytes": {"all": {"current": 5, "peak": 9}},
             "reserved_bytes": {"all": {"current": 7, "peak": 8}}, "num_ooms": 2, "num_alloc_retries": 3}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 200))
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: stats)
    before = target.memory()
    assert before == {"total": 200, "free": 100, "framework_reserved": 7, "framework_allocated": 5, "framework_peak": 9,
                      "failures": 2, "retries": 3}
    stats["num_ooms"], stats["num_alloc_retries"] = 4, 5
    target.settle_counts(before, refused=False)
    assert target.memory() == before
    target.settle_counts(target.memory(), refused=True)
    assert target.memory() == {**before, "failures": 3}
    stats.clear()
    assert target.memory() == {"total": 200, "free": 100}


def test_reasons_have_texts():
    assert set(_core.BUDGET_WHY) == {"FIRST", "FITS", "FULL", "PEAK", "NEIGHBOUR", "FAILED", "EXPECTED", "LEAST"}
    assert all(_core.BUDGET_WHY.values())
