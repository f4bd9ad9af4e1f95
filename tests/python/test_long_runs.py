"""Thousands of steps: what a process holds does not grow, and the results of the last step are those of the first.

A few hundred steps as a rule, 10,000 with STH_TEST_FULL=1, in the virtual time of a simulated device. With
STH_TEST_DEVICE=cuda:0 the same on a card:

    STH_TEST_DEVICE=cuda:0 STH_TEST_STEPS=1000 python -m pytest -s tests/python/test_long_runs.py

-s shows the figures.
"""

from __future__ import annotations

import copy
import gc
import os
import random
import threading
import time

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import stagehand  # noqa: E402
from stagehand import _core  # noqa: E402
from stagehand.activation import ActivationRuntime, ActivationStagehandConfig  # noqa: E402
from stagehand.optim import OffloadedAdamW  # noqa: E402
from support import Stack, aligned_copy, made, nbytes, runtime, same, tight_budget  # noqa: E402

DEVICE = os.environ.get("STH_TEST_DEVICE", "sim")
FULL = bool(os.environ.get("STH_TEST_FULL"))
STEPS = int(os.environ.get("STH_TEST_STEPS", 10000 if FULL else 250))
CYCLE = 25  # training steps after which weights and state are put back, so that all cycles give the same bits
SAMPLES = 8 if FULL else 3
ROUNDS = 20 if FULL else 1
RUNTIMES = 20
WIDTH = 32 if DEVICE == "sim" else 256
SPILLED_FROM = 256 if DEVICE == "sim" else 4096

if DEVICE != "sim" and not torch.cuda.is_available():
    pytest.skip(f"STH_TEST_DEVICE={DEVICE}, and there is no CUDA device on this machine", allow_module_level=True)

pytestmark = pytest.mark.alone  # the memory of the process, and of the card, is measured


@pytest.fixture(autouse=True)
def settings():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    if DEVICE != "sim":
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.ones(1, device=DEVICE, requires_grad=True).sum().backward()  # autograd's thread for the card stays
    gc.collect()
    gc.freeze()  # what is there already is not counted each time
    yield
    torch.set_num_threads(threads)


def open_device(memory=64 << 20):
    if DEVICE == "sim":
        return _core.Device("sim", memory_bytes=memory, link_bytes_per_s=10**9, virtual_time=True)
    return _core.Device(DEVICE)


def on_device(tensor):
    return tensor if DEVICE == "sim" else tensor.to(DEVICE)


def reference(model):
    """The model as it runs without stagehand."""
    return aligned_copy(model) if DEVICE == "sim" else copy.deepcopy(model).to(DEVICE)


def status(name: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name + ":"))


def holds(device=None, *more) -> dict:
    """What the process holds now, and the device. more: (name, callable) of what else is to be looked at."""
    gc.collect()
    if DEVICE != "sim":
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()  # which PyTorch keeps for each stream that multiplied
    info = device.info() if device is not None else {"memory_total": 0, "memory_free": 0}
    things = gc.get_objects()
    return {
        "device bytes": info["memory_total"] - info["memory_free"] if DEVICE == "sim"
        else torch.cuda.memory_allocated(),
        "blocks of the core": _core._live_blocks(),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "python threads": threading.active_count(),
        "mappings": sum(1 for _ in open("/proc/self/maps")),
        "python objects": len(things),
        "tensors": sum(1 for thing in things if issubclass(type(thing), torch.Tensor)),
        "RSS KiB": status("VmRSS"),
        **{name: ask() for name, ask in more},
    }


# Allowed growth from the first sample behind the warm-up to the last; what is not named is 0. Python's caches of small
# objects and the C library's free lists move a little with any work.
SLACK = {"blocks of the core": 16, "mappings": 12, "python objects": 200, "RSS KiB": 3072}


def assert_flat(samples: list[dict], slack=None) -> None:
    slack = {**SLACK, **(slack or {})}
    print()
    for name in samples[0]:
        print(f"  {name}: {' '.join(str(sample[name]) for sample in samples)}")
    for name, first in samples[0].items():
        grown = samples[-1][name] - first
        assert grown <= slack.get(name, 0), f"{name} grew by {grown}: {[sample[name] for sample in samples]}"


class Inference:
    def __init__(self, device, folder) -> None:
        self.model = made(Stack, 4, WIDTH)
        ref = reference(self.model)
        self.x = [on_device(torch.randn(4, WIDTH)) for _ in range(3)]
        with torch.no_grad():
            self.want = [ref(x) for x in self.x]
        self.file = folder / "inference.jsonl"
        stagehand.layer(self.model, vram_budget=tight_budget(self.model), device=device, inference_mode=True,
                        telemetry=str(self.file))

    def step(self, number: int) -> None:
        with torch.no_grad():
            assert same(self.model(self.x[number % 3]), self.want[number % 3]), number


class Training:
    """Cycles of the same steps. `losses` and `weights` are those of the first cycle."""

    def __init__(self, device, folder) -> None:
        self.model = made(Stack, 3, WIDTH, seed=1, frozen=False)
        ref = reference(self.model)
        self.xs = [on_device(torch.randn(8, WIDTH)) for _ in range(CYCLE)]
        self.first_loss = ref(self.xs[0]).pow(2).mean().detach()
        stagehand.layer(self.model, vram_budget=tight_budget(self.model), device=device)
        self.optimizer = OffloadedAdamW(self.model.parameters(), lr=1e-3, threads=1)
        config = ActivationStagehandConfig(enabled=True, slabs_per_class=None, recompute_cheap=False,
                                           telemetry_file=str(folder / "activations.jsonl"))
        self.spiller = ActivationRuntime(config, device, smallest=SPILLED_FROM, high=16 << 10, low=8 << 10)
        self.begin = copy.deepcopy(self.model.state_dict()), copy.deepcopy(self.optimizer.state_dict())
        self.losses, self.weights, self.spilled = [], None, 0

    def step(self, number: int) -> None:
        place = number % CYCLE
        if number and place == 0:
            self._end_cycle()
        self.optimizer.zero_grad()
        self.spiller.step_begin(number)
        with self.spiller.managed_forward():
            loss = self.model(self.xs[place]).pow(2).mean()
            loss.backward()
        self.spilled += self.spiller.step_end().spill_bytes
        self.optimizer.step()
        if number == 0:
            assert same(loss.detach(), self.first_loss)
        if number < CYCLE:
            self.losses.append(loss.detach())
        assert same(loss.detach(), self.losses[place]), number

    def _end_cycle(self) -> None:
        weights = self.model.state_dict()
        if self.weights is None:
            self.weights = {name: value.clone() for name, value in weights.items()}
        assert all(same(value, self.weights[name]) for name, value in weights.items())
        self.model.load_state_dict(self.begin[0])
        self.optimizer.load_state_dict(self.begin[1])

    def pinned(self) -> int:
        session = runtime(self.model).session
        return (self.spiller.stats["pinned_bytes"] + session.grads.stats()["pinned_bytes"]
                + sum(arena.pinned_bytes for arena in session.arenas()) + session.core.stats()["staging_bytes"])


def test_what_is_held_does_not_grow_over_thousands_of_steps(tmp_path):
    """A step is a step of inference of one model and one of training of another on the same device, by turns."""
    start = time.perf_counter()
    before = holds()
    device = open_device()
    infers, trains = Inference(device, tmp_path), Training(device, tmp_path)

    def histories():
        return len(runtime(infers.model).telemetry.history) + len(trains.spiller.telemetry.history)

    more = ("pinned bytes", trains.pinned), ("records of steps", histories)
    warm, samples = max(STEPS // 4, 210), []
    for number in range(STEPS):
        (infers if number % 2 else trains).step(number // 2)
        if number >= warm and (number - warm) % max((STEPS - 1 - warm) // SAMPLES, 1) == 0:
            samples.append(holds(device, *more))
    assert trains.spilled > 0
    lines = infers.file.read_bytes().count(b"\n")
    assert infers.file.stat().st_size <= 1024 * (lines + 1) and lines <= STEPS
    runtime(infers.model).shutdown()
    trains.spiller.shutdown()
    runtime(trains.model).shutdown()
    print(f"\n{STEPS} steps in {time.perf_counter() - start:.0f} s, {lines} records, on {device.info()['name']}")
    assert_flat(samples)
    if DEVICE == "sim":
        assert device.info()["memory_free"] == device.info()["memory_total"]
    del trains, infers, histories, more, device
    after = holds()
    for name in ("device bytes", "files", "threads", "python threads", "blocks of the core"):
        assert after[name] <= before[name], (name, before[name], after[name])


def test_a_step_file_stops_at_its_limit(tmp_path):
    """However long a run is, the file of its steps does not pass its limit, and every line in it is whole."""
    device = open_device()
    most, path = 16 << 10, tmp_path / "steps.jsonl"
    core = _core.Runtime(device, 1 << 20, telemetry_path=str(path), telemetry_max_bytes=most)
    arena = _core.Arena(device, 1 << 16)
    core.add_unit("a", 4096, host=arena.reserve(4096), arena=arena)
    arena.finish()
    core.seal()
    for _ in range(400):
        core.step_begin()
        core.acquire(0)
        core.step_end()
    core.close()
    text = path.read_text()
    assert most // 2 < len(text) <= most and text.endswith("\n")


def test_runtimes_come_and_go_in_any_order(tmp_path):
    """Models of several sizes on one device are wrapped, run and shut down in an order that a seed gives."""
    rng = random.Random(7)
    blocks = _core._live_blocks()
    device = open_device(4 << 20)
    models = [made(Stack, 2 + i % 3, WIDTH, seed=i) for i in range(RUNTIMES)]
    x = on_device(torch.randn(4, WIDTH))
    wants = []
    with torch.no_grad():
        for model in models:
            wants.append(reference(model)(x))
    open_ones, samples = [], []

    def check(i):
        with torch.no_grad():
            assert same(models[i](x), wants[i]), i

    for turn in range(ROUNDS + 1):
        order = [("open", i) for i in range(RUNTIMES)]
        while order or open_ones:
            if order and (len(open_ones) < 3 or rng.random() < 0.55):
                _, i = order.pop(rng.randrange(len(order)))
                stagehand.layer(models[i], vram_budget=max(tight_budget(models[i]), nbytes(models[i]) // 2),
                                device=device, inference_mode=True)
                open_ones.append(i)
                check(i)
            elif rng.random() < 0.5:
                check(rng.choice(open_ones))
            else:
                i = open_ones.pop(rng.randrange(len(open_ones)))
                runtime(models[i]).shutdown()
        account = device.residency()
        assert account["runtimes"] == 0 and account["occupied"] == 0 and account["peak"] <= account["cap"]
        if turn >= min(1, ROUNDS - 1):
            samples.append(holds(device))
    print(f"\n{RUNTIMES * (ROUNDS + 1)} runtimes")
    # The simulated device keeps records for the most that was under way.
    assert_flat(samples, {"blocks of the core": 1000})
    models.clear()
    del model, device
    gc.collect()
    assert _core._live_blocks() == blocks
