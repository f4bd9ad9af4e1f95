"""torch.compile over blocks whose weights stream: one graph for all of them, and the values of the unwrapped model."""

from __future__ import annotations

import copy
import re
import threading
import warnings

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import card  # noqa: E402
import stagehand  # noqa: E402
from stagehand import _core  # noqa: E402
from stagehand._core import LEAST_PIECE, STAGES  # noqa: E402
from support import (  # noqa: E402
    Stack, aligned_copy, autocast_keeps_gradients, made, nbytes, needs_regions, runtime, same, thinned, wrap)
from torch import nn  # noqa: E402
from torch.func import functional_call  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

pytest.importorskip("torch._dynamo.testing", reason="this PyTorch has no compiler to test with")
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402


@pytest.fixture(autouse=True)
def fresh_compiler():
    needs_regions()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def compiled(model, backend, way):
    for i, block in enumerate(model.blocks):
        if way == "method":
            block.compile(backend=backend)
        else:
            model.blocks[i] = torch.compile(block, backend=backend)


def budget_of(model):
    """Most of the blocks stream: what stays, and two blocks and a half."""
    blocks = sum(nbytes(block) for block in model.blocks)
    return nbytes(model) - blocks + int(2.5 * blocks / len(model.blocks)) + 16384


def only(counter, frames=1):
    assert counter.frame_count == frames
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("way", ["method", "module"])
def test_equal_blocks_share_one_graph(way, mode):
    model = made(Stack, 6, 48)
    ref = aligned_copy(model)
    counter = CompileCounterWithBackend("aot_eager")
    compiled(model, counter, way)
    budget = budget_of(model)
    wrap(model, budget)
    with mode():
        for _ in range(4):
            x = model.example()[0]
            assert same(model(x), ref(x))
    only(counter)
    assert runtime(model).compiled == [f"blocks.{i}" for i in range(6)]
    stats = runtime(model).stats
    assert stats["copies"] > 30 and stats["device_peak"] + stats["reserved_bytes"] <= budget


def test_a_state_dict_of_what_compiled_blocks_share_holds_masters():
    """Taken by another thread while the first of the blocks runs."""
    running, taken = threading.Event(), threading.Event()
    shown, shared = [], nn.Linear(48, 48)

    def backend(graph, inputs):
        def run(*args):
            running.set()
            taken.wait(0.2)
            return graph(*args)

        return run

    class Sharing(nn.Module):
        def __init__(self):
            super().__init__()
            self.own, self.shared = nn.Linear(48, 48), shared

        def forward(self, x):
            return self.shared(self.own(x))

    def other():
        running.wait(60)
        shown.extend(value.data_ptr() for value in shared.state_dict().values())
        taken.set()

    model = nn.Sequential(*(Sharing() for _ in range(4))).requires_grad_(False)
    for block in model:
        block.compile(backend=backend)
    wrap(model, nbytes(model) * 3 // 4)
    masters = [param.data_ptr() for param in shared.parameters()]
    thread = threading.Thread(target=other)
    thread.start()
    with torch.no_grad():
        model(torch.randn(2, 48))
    thread.join(60)
    assert shown == masters


def test_plans_count_with_what_a_region_holds_together():
    """A budget of 40 % and no time but that of the link: once the plan knows what is held, nothing comes on demand, and
    steps take what was predicted."""
    model = made(Stack, 12, 48)
    compiled(model, CompileCounterWithBackend("eager"), "method")
    budget = int(0.4 * nbytes(model))
    device = _core.Device("sim", memory_bytes=2 * budget, link_bytes_per_s=10**9, virtual_time=True)
    stagehand.layer(model, vram_budget=budget, device=device, inference_mode=True)
    with torch.no_grad():
        for step in range(12):
            model(model.example()[0])
            if step == 5:
                early = runtime(model).stats["demand_loads"]
    stats = runtime(model).stats
    assert stats["demand_loads"] == early
    assert stats["last_step"]["step_time_ms"] == pytest.approx(stats["last_step"]["predicted_ms"], rel=0.01)


def train(model, steps, optimizer, checkpointed=None):
    """checkpointed: None, or what torch.utils.checkpoint's use_reentrant is."""
    losses = []
    for step in range(steps):
        x = card.there(torch.randn(4, 48, generator=torch.Generator().manual_seed(step)))
        h = model.inp(x)
        for block in model.blocks:
            h = block(h) if checkpointed is None else checkpoint(block, h, use_reentrant=checkpointed)
        loss = model.out(h).pow(2).mean()
        loss.backward()
        losses.append(loss.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("checkpointed", [None, False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_training_is_that_of_the_compiled_model_without_stagehand(frozen, checkpointed):
    """frozen: the blocks' weights stream and only what is outside trains."""
    model = made(Stack, 6, 48, frozen=False)
    if frozen:
        model.blocks.requires_grad_(False)
    ref = aligned_copy(model)
    compiled(ref, "aot_eager", "method")
    counter = CompileCounterWithBackend("aot_eager")
    compiled(model, counter, "method")
    wrap(model, budget_of(model) + 40000)
    wanted = train(ref, 4, torch.optim.AdamW([p for p in ref.parameters() if p.requires_grad], lr=1e-2), checkpointed)
    torch._dynamo.utils.counters.clear()
    got = train(model, 4, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2), checkpointed)
    assert all(same(a, b) for a, b in zip(got, wanted, strict=True))
    for (name, mine), theirs in zip(model.named_parameters(), ref.parameters()):
        assert same(mine, theirs), name
    only(counter, frames=2 if checkpointed else 1)  # those of use_reentrant=True run first without gradients
    assert runtime(model).stats["h2d_bytes"] > 4 * sum(nbytes(block) for block in model.blocks)


def test_a_block_that_is_compiled_later_runs_so_from_its_second_call_on():
    model = made(Stack, 4, 48)
    ref = aligned_copy(model)
    wrap(model, budget_of(model))
    counter = CompileCounterWithBackend("aot_eager")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(5):
            x = model.example()[0]
            if step == 1:
                compiled(model, counter, "method")
            assert same(model(x), ref(x))
            if step == 2:
                after = counter.frame_count
    assert counter.frame_count == after and len(runtime(model).compiled) == 4


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(32, 64)
        self.out = nn.Linear(64, 32)

    def forward(self, x):
        return self.out(self.rnn(x)[0])


def test_what_cannot_be_compiled_is_named_and_right():
    model = nn.Sequential(Recurrent(), nn.Linear(32, 32)).requires_grad_(False)
    ref = aligned_copy(model)
    model[0].compile(backend="eager")
    own = stagehand.StagehandRuntime(model, stagehand.StagehandConfig(vram_budget=nbytes(model)), r"^0$",
                                     inference_mode=True, device="sim")
    with pytest.warns(RuntimeWarning, match="no effect on 0: it contains an RNN"):
        own.prepare()
    x = torch.randn(3, 2, 32)
    with torch.no_grad():
        for _ in range(3):
            assert same(model(x), ref(x))
    assert own.compiled == []
    own.shutdown()


@pytest.mark.parametrize("when", ["wrapped", "run", "run compiled otherwise"])
@pytest.mark.parametrize("way", ["method", "module"])
def test_blocks_that_are_compiled_after_wrapping_run_so_from_the_first_call_on(way, when):
    """By the number of graphs, and by the bits of a compiler that gives others than torch does."""
    def backend(graph, inputs):
        graphs.append(graph)
        return lambda *args: [value + 1 for value in graph(*args)]

    graphs, model = [], made(Stack, 4, 48)
    ref, (x,) = aligned_copy(model), model.example()
    compiled(ref, backend, way)
    with torch.no_grad():
        want = ref(x)
        if when == "run compiled otherwise":
            compiled(model, "eager", "method")
        wrap(model, budget_of(model), inference_mode=True)
        if when != "wrapped":
            model(x)
        torch._dynamo.reset()
        graphs.clear()
        compiled(model, backend, way if when != "run compiled otherwise" else "method")
        assert same([model(x) for _ in range(4)], [want] * 4)
    assert len(graphs) == 1 and len(runtime(model).compiled) == 4
    copied = copy.deepcopy(model.blocks[0])
    assert "compile" not in vars(copied) and "compile" in vars(model.blocks[0] if way == "method" else model)
    runtime(model).shutdown()
    assert "compile" not in vars(model)
    with torch.no_grad():
        assert same(model(x), want)


def test_a_whole_model_is_refused_with_the_reason_and_its_blocks_are_not():
    model = made(Stack, 6, 48)
    ref = aligned_copy(model)
    counter = CompileCounterWithBackend("aot_eager")
    compiled(model, counter, "method")
    model.compile(backend="eager")
    with pytest.warns(RuntimeWarning, match="no effect on Stack: .*on the device together"):
        wrap(model, budget_of(model))
    with torch.no_grad():
        for _ in range(3):
            x = model.example()[0]
            assert same(model(x), ref(x))
    assert len(runtime(model).compiled) == 6 and counter.frame_count >= 1


def blocks_of_sizes(widths):
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(48, width), nn.Tanh(), nn.Linear(width, 48)) for width in widths)
    return nn.Sequential(*blocks).requires_grad_(False)


def wrapped_with(budget, transfer, build):
    """A model of compiled blocks, and what was said of them."""
    model = build()
    for block in model:
        block.compile(backend="eager")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        wrap(model, budget, transfer=transfer, inference_mode=True)
    return model, [str(warning.message) for warning in seen if "torch.compile" in str(warning.message)]


@pytest.mark.parametrize("transfer", [None, "int8", "int4"])
@pytest.mark.parametrize("widths, largest", [
    ((400,) * 7, r"\d"), ((64, 64, 400, 64, 64, 64, 64), "2"), ((400,) * 40, r"\d+")])  # biases of 40 do not all stay
def test_blocks_that_do_not_fit_are_said_once_with_a_budget_that_holds_them(widths, largest, transfer):
    def build():
        return blocks_of_sizes(widths)

    budget = int(0.9 * max(nbytes(block) for block in build())) + (STAGES * LEAST_PIECE if transfer else 0)
    x = torch.randn(2, 48)
    model, said = wrapped_with(budget, transfer, build)
    refused = [str(i) for i in range(len(widths)) if str(i) not in runtime(model).compiled]
    more = f" and {len(refused) - 5} more" if len(refused) > 5 else ""
    assert len(said) == 1 and refused and f"no effect on {', '.join(refused[:5])}{more}: " in said[0]
    least = int(re.search(rf"The largest, {largest}, needs .* a budget of (\d+) bytes .* has room", said[0]).group(1))
    with torch.no_grad():
        want = model(x)
    runtime(model).shutdown()
    model, said = wrapped_with(least, transfer, build)
    assert not said and runtime(model).compiled == [str(i) for i in range(len(widths))]
    with torch.no_grad():
        for _ in range(4):
            got = model(x)
    assert transfer is not None or same(got, want)
    runtime(model).shutdown()
    if transfer is None and largest == "2":  # nothing stays that does not with less
        model, said = wrapped_with(least - 1, transfer, build)
        assert said and largest not in runtime(model).compiled
        runtime(model).shutdown()


@pytest.mark.parametrize("widths", [(48, 100, 100, 400, 48), (48, 48, 48, 64, 400, 400, 48), (64, 192, 64, 256, 64)])
def test_a_block_that_counts_as_fitting_runs(widths):
    """Of several layers, from the least budget on: until the plan knows of them, room lies in pieces."""
    def build():
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(*(nn.Linear(a, b) for a, b in zip(widths, widths[1:]))) for _ in range(4)))

    x, block = torch.randn(2, widths[0]), nbytes(build()[0])
    model, said = wrapped_with(int(0.97 * block), None, build)
    runtime(model).shutdown()
    least = int(re.search(r"a budget of (\d+) bytes", said[0]).group(1))
    with torch.no_grad():
        want = build()(x)
        for share in range(0, 60, 4):
            model, said = wrapped_with(least + share * block // 100, None, build)
            assert not said and same([model(x) for _ in range(4)], [want] * 4)
            runtime(model).shutdown()


def test_parts_of_a_block_that_does_not_fit_are_compiled_instead():
    """As the warning says."""
    model = blocks_of_sizes((400,) * 5)
    ref, x = aligned_copy(model), torch.randn(2, 48)
    for block in model:
        for part in block.children():
            part.compile(backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrap(model, int(0.9 * nbytes(model[0])))
    assert len(runtime(model).compiled) == 10
    with torch.no_grad():
        for _ in range(3):
            assert same(model(x), ref(x))


def test_a_whole_model_that_fits_is_one_region():
    model = made(Stack, 3, 48)
    ref = aligned_copy(model)
    counter = CompileCounterWithBackend("aot_eager")
    model.compile(backend=counter)
    wrap(model, nbytes(model) + 65536)
    with torch.no_grad():
        for _ in range(3):
            x = model.example()[0]
            assert same(model(x), ref(x))
    only(counter)
    assert runtime(model).compiled == ["Stack"]


def test_a_budget_that_becomes_too_small_ends_regions_and_a_larger_one_makes_them():
    model = made(Stack, 4, 48)
    ref = aligned_copy(model)
    compiled(model, "aot_eager", "method")
    wrap(model, budget_of(model))
    small = runtime(model).stats["reserved_bytes"] + int(0.9 * nbytes(model.blocks[0]))
    assert len(runtime(model).compiled) == 4
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for budget, regions in ((small, 0), (budget_of(model), 4)):
            runtime(model).set_vram_budget(budget)
            assert len(runtime(model).compiled) == regions
            for _ in range(2):
                x = model.example()[0]
                assert same(model(x), ref(x))


class Moody(Stack):
    """Its blocks raise when told to, in compiled code."""

    class Block(nn.Module):
        def __init__(self, d):
            super().__init__()
            self.lin = nn.Linear(d, d)
            self.fail = None

        def forward(self, x):
            if self.fail is not None:
                raise self.fail("on purpose")
            return self.lin(x)

    def __init__(self, n=4, d=64):
        super().__init__(1, d)
        self.blocks = nn.ModuleList(Moody.Block(d) for _ in range(n))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_after_an_exception_in_compiled_code_everything_is_as_it_was(error):
    model = made(Moody)
    ref = aligned_copy(model)
    compiled(model, "aot_eager", "method")
    wrap(model, budget_of(model) + 8192)
    x = model.example()[0]
    with torch.no_grad():
        assert same(model(x), ref(x))
        model.blocks[2].fail = error
        for _ in range(2):
            with pytest.raises(error):
                model(x)
            for (name, mine), theirs in zip(model.state_dict().items(), ref.state_dict().values()):
                assert same(mine, theirs), name
            assert runtime(model).stats["leased_bytes"] == 0
        model.blocks[2].fail = None
        for _ in range(2):
            assert same(model(x), ref(x))


class Resets(nn.Module):
    """Compiled code that writes to its weight, and gives it another one."""

    def __init__(self, d=96):
        super().__init__()
        self.lin = nn.Linear(d, d, bias=False)

    def forward(self, x):
        with torch.no_grad():
            self.lin.weight.mul_(0.5)
        return self.lin(x)


def test_what_compiled_code_writes_to_its_weights_stays():
    model = nn.Sequential(*[Resets() for _ in range(4)])
    model.requires_grad_(False)
    ref = aligned_copy(model)
    for block in model:
        block.compile(backend="aot_eager")
    wrap(model, nbytes(model) // 2)
    x = torch.randn(2, 96)
    with torch.no_grad():
        for _ in range(3):
            assert same(model(x), ref(x))
    for mine, theirs in zip(model.parameters(), ref.parameters()):
        assert same(mine, theirs)


def test_shutdown_and_copies_are_plain():
    model = made(Stack, 4, 48)
    ref = aligned_copy(model)
    compiled(model, "aot_eager", "method")
    before = [block._compiled_call_impl for block in model.blocks]
    wrap(model, budget_of(model))
    x = model.example()[0]
    with torch.no_grad():
        assert same(model(x), ref(x))
        twin = copy.deepcopy(model)
        assert same(aligned_copy(twin)(x), ref(x)) and all(block._compiled_call_impl is None for block in twin.blocks)
        runtime(model).shutdown()
        assert [block._compiled_call_impl for block in model.blocks] == before
        assert same(model(x), ref(x))


def test_shutdown_leaves_an_optimized_module_as_it_was():
    model = made(Stack, 3, 48)
    ref = aligned_copy(model)
    compiled(model, "aot_eager", "module")
    before = [dict(block.__dict__) for block in model.blocks]
    wrap(model, budget_of(model))
    x = model.example()[0]
    with torch.no_grad():
        assert same(model(x), ref(x)) and same(aligned_copy(model)(x), ref(x))
        runtime(model).shutdown()
        assert [dict(block.__dict__) for block in model.blocks] == before
        assert same(model(x), ref(x))


@pytest.mark.parametrize("way", ["method", "module"])
def test_blocks_that_are_watched_are_still_watched(way):
    model = made(Stack, 4, 48).to(torch.bfloat16)
    compiled(model, "aot_eager", way)
    before = [dict(block.__dict__) for block in model.blocks]
    own = stagehand.StagehandRuntime(model, stagehand.StagehandConfig(vram_budget=budget_of(model) + 30000),
                                     inference_mode=True, device="sim")
    with torch.no_grad(), pytest.warns(RuntimeWarning, match=r"output of blocks\.\d has \d+ NaN"):
        for _ in range(2):
            with own.managed_forward():
                x = model.example()[0].to(torch.bfloat16)
                x[0, 0] = float("nan")
                model(x)
        assert len(own.compiled) == 4
        own.shutdown()
    assert [dict(block.__dict__) for block in model.blocks] == before


@pytest.mark.parametrize("way", ["method", "module"])
def test_blocks_are_watched_when_budgets_have_ended_regions_and_made_them_again(way):
    model = made(Stack, 4, 48).to(torch.bfloat16)
    compiled(model, "aot_eager", way)
    before = [dict(block.__dict__) for block in model.blocks]
    budget = budget_of(model) + 30000
    own = stagehand.StagehandRuntime(model, stagehand.StagehandConfig(vram_budget=budget), inference_mode=True,
                                     device="sim")
    own.prepare()
    small = own.stats["reserved_bytes"] + int(0.9 * nbytes(model.blocks[0]))
    for budget, regions in ((small, 0), (budget, 4)):
        own.session.set_budget(budget)
        assert len(own.compiled) == regions
        with torch.no_grad(), warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(2):
                with own.managed_forward():
                    x = model.example()[0].to(torch.bfloat16)
                    x[0, 0] = float("nan")
                    model(x)
            own._watch.flush()
        counted = [str(w.message).split(": ")[-1] for w in seen if "NaN" in str(w.message)]
        assert len(counted) == 2 * 4, (budget, counted)
    own.shutdown()
    assert [dict(block.__dict__) for block in model.blocks] == before


def test_a_parameter_that_compiled_code_assigns_is_the_modules():
    class Swaps(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(96, 96, bias=False)
            self.other = None

        def forward(self, x):
            if self.other is not None:
                self.lin.weight = self.other
            return self.lin(x)

    model = nn.Sequential(*[Swaps() for _ in range(4)]).requires_grad_(False)
    fresh = nn.Parameter(card.there(torch.randn(96, 96)), requires_grad=False)
    for block in model:
        block.compile(backend="eager")
    wrap(model, nbytes(model) // 2)
    x = card.there(torch.randn(2, 96))
    with torch.no_grad():
        model(x)
        model[2].other = fresh
        model(x)
        assert model[2].lin.weight is fresh
        model[2].other = None
        want = model[3].lin(nn.functional.linear(model[1].lin(model[0].lin(x)), card.there(fresh)))
        assert same(model(x), want)


def test_threads_take_turns_in_a_region():
    model = made(Stack, 4, 48)
    ref = aligned_copy(model)
    compiled(model, "aot_eager", "method")
    wrap(model, budget_of(model))
    x = model.example()[0]
    with torch.no_grad():
        want = ref(x)
        assert same(model(x), want)
    wrong = []

    def work():
        with torch.no_grad():
            for _ in range(5):
                if not same(model(x), want):
                    wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and not any(thread.is_alive() for thread in threads)


def test_a_state_dict_that_is_being_made_when_compiled_code_begins_holds_masters():
    reading, running = threading.Event(), threading.Event()

    class Slow(nn.Linear):
        def _save_to_state_dict(self, *args):
            reading.set()
            running.wait(0.3)
            super()._save_to_state_dict(*args)

    def backend(graph, inputs):
        def run(*args):
            running.set()
            thread.join(30 if reading.is_set() else 0)
            return graph(*args)

        return run

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = Slow(96, 96)

        def forward(self, x):
            return self.lin(x)

    model = nn.Sequential(*[Block() for _ in range(4)]).requires_grad_(False)
    for block in model:
        block.compile(backend=backend)
    wrap(model, nbytes(model) // 2)
    masters = [p.data_ptr() for p in model.parameters()]
    shown = []
    thread = threading.Thread(target=lambda: shown.append(model[0].state_dict()))
    x = torch.randn(2, 96)
    with torch.no_grad():
        thread.start()
        assert reading.wait(30)
        model(x)
        thread.join(30)
    assert [value.data_ptr() for value in shown[0].values()] == masters[:2] and running.is_set()


def pair(way, frozen):
    """A model under stagehand and its like without, compiled both, and what counts their graphs."""
    model = made(Stack, 4, 48, frozen=False)
    model.blocks.requires_grad_(not frozen)
    ref = aligned_copy(model)
    counters = [CompileCounterWithBackend("aot_eager") for _ in range(2)]
    for each, counter in zip((model, ref), counters):
        compiled(each, counter, way)
    wrap(model, budget_of(model) + 40000)
    return model, ref, counters


def gradients(call, parameters):
    return torch.autograd.grad(call().float().pow(2).mean(), [p for p in parameters if p.requires_grad])


def all_same(got, wanted):
    return all(same(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("way", ["method", "module"])
@pytest.mark.parametrize("frozen", [False, True])
def test_regions_under_autocast(way, frozen):
    model, ref, (mine, theirs) = pair(way, frozen)
    x = model.example()[0]
    for cached in (True, False) if autocast_keeps_gradients() else (False,):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
            with torch.no_grad():
                for _ in range(2):
                    assert same(model(x), ref(x))
            for _ in range(2):
                got, wanted = (gradients(lambda m=m: m(x), m.parameters()) for m in (model, ref))
                assert all_same(got, wanted)
    with torch.no_grad():
        assert same(model(x), ref(x))  # and without it again
    assert mine.frame_count == theirs.frame_count and not torch._dynamo.utils.counters["graph_break"]
    assert runtime(model).compiled and runtime(model).stats["copies"] > 8


@pytest.mark.parametrize("way", ["method", "module"])
@pytest.mark.parametrize("frozen", [False, True])
def test_regions_under_functional_call(way, frozen):
    """One weight is replaced, by way of the model and of its block; with a gradient too."""
    model, ref, _ = pair(way, frozen)
    x = model.example()[0]
    (name,) = (n for n, _ in model.named_parameters() if n.startswith("blocks.2.") and n.endswith("up.weight"))
    other = torch.randn(dict(ref.named_parameters())[name].shape)
    with torch.no_grad():
        for _ in range(2):
            assert same(model(x), ref(x))
            assert same(functional_call(model, {name: other}, x), functional_call(ref, {name: other}, x))
            inner = {name.removeprefix("blocks.2."): other}
            assert same(functional_call(model.blocks[2], inner, x), functional_call(ref.blocks[2], inner, x))
    leaf = other.clone().requires_grad_()
    got, wanted = (gradients(lambda m=m: functional_call(m, {name: leaf}, x), [leaf]) for m in (model, ref))
    assert all_same(got, wanted) and got[0].any()
    with torch.no_grad():
        assert same(model(x), ref(x))
    assert runtime(model).stats["leased_bytes"] == 0


class Adapted(nn.Module):
    def __init__(self, base, rank=4):
        super().__init__()
        g = torch.Generator().manual_seed(base.in_features)
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features, generator=g) / 8)
        self.up = nn.Parameter(torch.randn(base.out_features, rank, generator=g) / 8)

    def forward(self, x):
        return self.base(x) + x @ self.down.t() @ self.up.t()


@pytest.mark.parametrize("way, frozen", thinned([
    ("method", False), ("method", True), ("module", True), ("module", False)], 2))
def test_adapters_that_are_added_to_regions(way, frozen):
    model, ref, (mine, theirs) = pair(way, frozen)
    x = model.example()[0]
    with torch.no_grad():
        assert same(model(x), ref(x))
    for each in (model, ref):
        for block in each.blocks:
            block = getattr(block, "_orig_mod", block)
            block.up, block.down = Adapted(block.up), Adapted(block.down)
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2) for m in (model, ref)]
    for _ in range(3):
        for each, optimizer in zip((model, ref), optimizers):
            optimizer.zero_grad()
            each(x).pow(2).mean().backward()
            optimizer.step()
        with torch.no_grad():
            assert same(model(x), ref(x))
    assert all_same(model.parameters(), ref.parameters())
    assert mine.frame_count == theirs.frame_count and len(runtime(model).compiled) == 4
