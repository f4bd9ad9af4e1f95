"""Memory that others take while models run: device memory, pinned memory, address space, files. There is a smaller plan
or a clear error, never a wrong number, and what was given up comes back when the others are gone."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
import resource
import sys
import traceback
import warnings

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import stagehand  # noqa: E402
from card import forks, simulated_only  # noqa: E402
from endings import wait_for  # noqa: E402
from file_support import save, state  # noqa: E402
from stagehand import _core  # noqa: E402
from stagehand.activation import ActivationRuntime, ActivationStagehandConfig  # noqa: E402
from stagehand.optim import OffloadedAdamW  # noqa: E402
from stagehand.session import finding, given  # noqa: E402
from support import Stack, aligned_copy, device, made, nbytes, runtime, same, tight_budget  # noqa: E402

FULL = bool(os.environ.get("STH_TEST_FULL"))


@pytest.fixture(autouse=True)
def look_before_every_step(monkeypatch):
    for part in (finding.Finding, given.Given):
        monkeypatch.setattr(part, "clock", lambda self, seconds=itertools.count(): next(seconds) * 10**9)


class Wrapped:
    def __init__(self, device, budget, **options) -> None:
        self.model = made(Stack, 6, 48)
        self.ref = aligned_copy(self.model)
        stagehand.layer(self.model, vram_budget=budget, device=device, **options)

    def run(self, steps=1) -> None:
        with torch.no_grad():
            for _ in range(steps):
                x = self.model.example()[0]
                assert same(self.model(x), self.ref(x))

    @property
    def core(self):
        return runtime(self.model).session.core

    @property
    def streams(self) -> int:
        """Bytes that cross the link in a step."""
        return self.core.prediction()["bytes_per_step"]


SIZE = nbytes(made(Stack, 6, 48))
small = simulated_only  # the device's memory, or what it may pin, is so little that a neighbour takes most of it


# ---------------------------------------------------------------------- device memory


@small
@pytest.mark.parametrize("share", [0.2, 0.4, 0.6])
def test_a_budget_that_others_have_taken_a_part_of_comes_back(share):
    card = device(SIZE + 8192, virtual_time=True)
    neighbour = card.empty(int(SIZE * share))
    it = Wrapped(card, SIZE, inference_mode=True)
    it.run(3)
    assert it.core.stats()["budget_cuts"] and it.core.stats()["budget"] < SIZE and it.streams > 0
    some = card.info()["memory_free"]
    it.run(5)
    assert card.info()["memory_free"] == some  # it does not try while there is no room
    del neighbour
    it.run(3)
    assert it.core.stats()["budget"] == SIZE and it.streams == 0
    assert it.core.stats()["device_bytes"] + runtime(it.model).session.stay.reserved <= SIZE
    runtime(it.model).shutdown()
    assert card.info()["memory_free"] == card.info()["memory_total"]


@small
def test_a_device_that_says_no_again_is_asked_less_and_less_often(monkeypatch):
    seconds = itertools.count(step=0.5)
    monkeypatch.setattr(given.Given, "clock", lambda self: int(next(seconds) * 1e9))
    card = device(SIZE + 8192, virtual_time=True)
    neighbour = card.empty(SIZE // 2)
    it = Wrapped(card, SIZE, inference_mode=True)
    session = runtime(it.model).session
    # An allocator in pieces has it and cannot give it.
    monkeypatch.setattr(session.target, "free_bytes", lambda: 1 << 40)
    it.run(100)
    cuts = it.core.stats()["budget_cuts"]
    assert 2 <= cuts < 12
    del neighbour
    it.run(2 * 64)
    assert it.core.stats()["budget"] == SIZE and it.streams == 0


@small
def test_too_little_is_an_error_that_says_how_much_and_the_model_is_plain():
    card = device(SIZE + 8192, virtual_time=True)
    neighbour = card.empty(int(SIZE * 0.97))
    model = made(Stack, 6, 48)
    x = model.example()[0]
    with torch.no_grad():
        want = model(x)
        with pytest.raises(stagehand.StagehandOOMError, match=r"\d+ bytes of device memory were asked for and \d+ of"):
            stagehand.layer(model, vram_budget=SIZE, device=card)
        assert same(model(x), want)
    del neighbour
    assert card.info()["memory_free"] == card.info()["memory_total"]
    stagehand.layer(model, vram_budget=SIZE, device=card)
    with torch.no_grad():
        model(x)


@small
@pytest.mark.parametrize("budget", [None, SIZE, SIZE // 2], ids=["found", "all", "half"])
def test_neighbours_come_and_go_between_steps(budget):
    """Amounts from a seed, up to all that is free; two models take turns, so that places are made and let go of,
    too."""
    rng = random.Random(3)
    card = device(2 * SIZE, virtual_time=True)
    models = [Wrapped(card, budget, inference_mode=True) for _ in range(2)]
    neighbours = []
    for step in range(300 if FULL else 40):
        free = card.info()["memory_free"]
        if free > 1024 and rng.random() < 0.6:
            neighbours.append(card.empty(rng.randint(1, free)))
        while neighbours and rng.random() < 0.35:
            neighbours.pop(rng.randrange(len(neighbours)))
        it = rng.choice(models)
        try:
            with contextlib.ExitStack() as stack:
                if rng.random() < 0.2:
                    stack.enter_context(runtime(it.model).as_guest())
                it.run()
        except stagehand.StagehandOOMError as error:
            assert error.status in ("OUT_OF_DEVICE_MEMORY", "BUDGET_TOO_SMALL")
        account = card.residency()
        assert account["occupied"] <= account["cap"] or budget is None  # a cap that is found falls before they can go
    neighbours.clear()
    for _ in range(20):
        for it in models:
            it.run()
    for it in models:
        if budget is not None:
            assert it.core.stats()["budget"] == budget
        runtime(it.model).shutdown()
    assert card.info()["memory_free"] == card.info()["memory_total"]


# ---------------------------------------------------------------------- pinned memory


class Pins:
    """Pinned memory of somebody else: a pool on the same device."""

    def __init__(self, device, nbytes) -> None:
        self.pool = _core.Pool(nbytes, nbytes, device=device)


@small
@pytest.mark.parametrize("room", [0, 4096, 65536])
def test_a_limit_of_pinned_memory_that_others_reach(room):
    """Masters, gradients and activations are pageable then, and right; what is opened when the pins are gone is
    pinned."""
    limit = 1 << 20
    card = device(4 << 20, virtual_time=True, pin_limit_bytes=limit)
    model = made(Stack, 3, 48, frozen=False)
    ref = aligned_copy(model)
    taken = Pins(card, limit - room)
    config = ActivationStagehandConfig(enabled=True, slabs_per_class=None, recompute_cheap=False)

    def train(pinned):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if not pinned else "error", RuntimeWarning)
            stagehand.layer(model, vram_budget=tight_budget(model), device=card)
        session = runtime(model).session
        assert all((arena.pinned_bytes == arena.bytes) is pinned for arena in session.arenas())
        spiller = ActivationRuntime(config, card, smallest=256, high=8 << 10, low=4 << 10)
        for step in range(2):
            x = model.example(8)[0]
            for one in (model, ref):
                one.zero_grad()
                with spiller.managed_forward() if one is model else contextlib.nullcontext():
                    one(x).pow(2).mean().backward()
            assert all(same(p.grad, q.grad) for p, q in zip(model.parameters(), ref.parameters()))
        assert spiller.stats["spill_bytes"] > 0
        model.zero_grad()
        spiller.shutdown()
        runtime(model).shutdown()

    train(False)
    del taken
    gc.collect()
    train(True)


# ---------------------------------------------------------------------- limits of the process


def in_child(work) -> None:
    """Runs `work` in a forked child, whose limits are its own."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    code = wait_for(pid)
    assert code == 0, f"the child ended with {code}"


@contextlib.contextmanager
def limited(which, value):
    soft, hard = resource.getrlimit(which)
    resource.setrlimit(which, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(which, (soft, hard))


def address_space() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


class Whole:
    """Opens, runs, trains and shuts down, on a device of its own. `failed`: what was refused, by name."""

    def __init__(self, folder) -> None:
        self.folder = folder
        self.file = str(folder / "weights.safetensors")
        self.frozen = made(Stack, 3, 96)
        save(folder / "weights.safetensors", state(self.frozen))
        self.trained = made(Stack, 3, 96, seed=1, frozen=False)
        self.x = torch.randn(8, 96)
        ref = aligned_copy(self.frozen)
        with torch.no_grad():
            self.want = ref(self.x)
        ref = aligned_copy(self.trained)
        ref(self.x).pow(2).mean().backward()
        self.grads = [p.grad for p in ref.parameters()]
        self.failed: list[str] = []

    def load(self) -> None:
        model = stagehand.load(lambda: Stack(3, 96).eval().requires_grad_(False), self.file, device=device(1 << 20),
                               vram_budget=tight_budget(self.frozen), inference_mode=True,
                               telemetry=str(self.folder / "t"))
        with torch.no_grad():
            for _ in range(2):
                assert same(model(self.x), self.want)
        runtime(model).shutdown()

    def train(self) -> None:
        model = self.trained
        card = device(4 << 20)
        try:
            stagehand.layer(model, vram_budget=tight_budget(model), device=card)
            optimizer = OffloadedAdamW(model.parameters(), lr=0.0, weight_decay=0.0, threads=2)
            config = ActivationStagehandConfig(enabled=True, slabs_per_class=None, recompute_cheap=False)
            with ActivationRuntime(config, card, smallest=256, high=8 << 10, low=4 << 10) as spiller:
                model.zero_grad()
                with spiller.managed_forward():
                    model(self.x).pow(2).mean().backward()
                assert same([p.grad for p in model.parameters()], self.grads)
                optimizer.step()
        finally:
            if "_stagehand_layer_runtime" in model.__dict__:
                runtime(model).shutdown()
            model.zero_grad()

    def attempt(self, part) -> None:
        """Errors of memory, ours, Python's or torch's, are what may come."""
        try:
            part()
        except (stagehand.StagehandError, MemoryError) as error:
            if isinstance(error, stagehand.StagehandError):
                assert error.status in ("OUT_OF_HOST_MEMORY", "OUT_OF_PINNED_MEMORY", "OUT_OF_ADDRESS_SPACE", "IO",
                                        "OUT_OF_DEVICE_MEMORY"), (error.status, error)
            self.failed.append(str(error))
        except RuntimeError as error:
            if "memory" not in str(error) and "bad_alloc" not in str(error) and "thread" not in str(error):
                raise
            self.failed.append(str(error))

    def both(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.attempt(self.load)
            self.attempt(self.train)

    def works(self) -> None:
        self.load()
        self.train()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made_once = Whole(tmp_path_factory.mktemp("limits"))
    made_once.works()  # what is imported and allocated at first use is there
    yield made_once
    torch.set_num_threads(threads)


MIB = 1 << 20


@forks
def test_address_space_that_ends(whole):
    rooms = [0, MIB // 4, MIB, 3 * MIB, 9 * MIB, 20 * MIB, 64 * MIB, 600 * MIB][::1 if FULL else 3] + [800 * MIB]

    def work():
        refused = []
        for room in rooms:
            whole.failed.clear()
            with limited(resource.RLIMIT_AS, address_space() + room):
                whole.both()
            refused.append(len(whole.failed))
            gc.collect()
            whole.works()
        assert refused[0] and not refused[-1], refused

    in_child(work)


@forks
def test_no_memory_may_be_locked(whole):
    """io_uring and pins of other systems live by it."""
    in_child(lambda: (resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0)), whole.works()))


@forks
def test_files_that_cannot_be_opened(whole):
    """The load fails by name with too few, and works with enough; nothing stays open."""

    def work():
        # The limit is one of numbers: those that others have left free would be opened all the same.
        highest = max(map(int, os.listdir("/proc/self/fd")))
        while os.open(os.devnull, os.O_RDONLY) < highest:
            pass
        before = sorted(os.listdir("/proc/self/fd"))
        outcomes = []
        for more in range(0, 13, 1 if FULL else 4):
            whole.failed.clear()
            with limited(resource.RLIMIT_NOFILE, len(before) + more):
                whole.both()
            outcomes.append(bool(whole.failed))
            assert all("Too many open files" in error or "memory" in error for error in whole.failed), whole.failed
            gc.collect()
            assert sorted(os.listdir("/proc/self/fd")) == before
        whole.works()
        assert outcomes[0] and not outcomes[-1], outcomes

    in_child(work)
