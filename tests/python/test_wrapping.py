"""Weights that are tensor subclasses around tensors stream as the bytes inside them (stagehand/wrapping.py)."""

from __future__ import annotations

import copy
import functools
import gc
import io
import random
import re
import threading

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import card  # noqa: E402
import stagehand  # noqa: E402
from stagehand.weights.wrapping import inside  # noqa: E402
from support import Stack, device, made, near, needs_regions, runtime, same, with_adapters, wrap  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from wrapping_support import Raised, Rows, aligned, aligned_around, held, quantised, stack  # noqa: E402


def three_blocks(model) -> int:
    """A budget that holds three of the model's blocks and what is outside them."""
    return held(model) - sum(held(block) for block in model.blocks) + 3 * held(model.blocks[0]) + 8192


def kept(model) -> dict:
    return {name: why for name, why in runtime(model).report.items() if "subclass" in str(why)}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("inference_mode", [False, True])
def test_the_bytes_inside_stream_and_results_are_the_same(nested, inference_mode):
    model = stack(nested=nested)
    ref, weights, x = aligned(model), list(model.parameters()), model.example()
    budget = three_blocks(model)
    wrap(model, budget, link=1e9, inference_mode=inference_mode)
    with torch.no_grad():
        for _ in range(4):
            assert same(model(*x), ref(*x))
    stats = runtime(model).stats
    assert not kept(model) and stats["copies"] >= 8
    assert stats["device_peak"] + stats["reserved_bytes"] <= budget < held(model)
    assert all(a is b for a, b in zip(weights, model.parameters()))
    runtime(model).shutdown()
    with torch.no_grad():
        assert same(model(*x), ref(*x))
    assert all(a is b for a, b in zip(weights, model.parameters()))


@pytest.mark.parametrize("nested", [False, True])
def test_no_forward_reads_the_host(nested):
    model = stack(nested=nested)
    (x,) = model.example()
    wrap(model, three_blocks(model))
    masters = {tensor.data_ptr() for param in model.parameters() if isinstance(param, Rows)
               for _, tensor in inside(param)}
    Rows.read_at = set()
    try:
        with torch.no_grad():
            model(x)
            F.linear(x, model.inp.weight)  # at rest it is the master
        read = Rows.read_at
    finally:
        Rows.read_at = None
    assert read & masters == {tensor.data_ptr() for _, tensor in inside(model.inp.weight)}
    assert len(read) > len(masters) / 2


def test_host_memory_holds_them_once():
    model = stack()
    wrap(model, three_blocks(model))
    session = runtime(model).session
    for unit in session.units:
        for part in unit.entries:
            assert unit.base <= part.param.data_ptr() < unit.base + unit.nbytes
    assert sum(unit.nbytes for unit in session.units) >= sum(
        tensor.numel() * tensor.element_size() for param in model.parameters() if isinstance(param, Rows)
        for _, tensor in inside(param))


def train(model, steps, x, accumulate=1):
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    losses = []
    for step in range(steps):
        for micro in range(accumulate):
            loss = model(x + step + micro).square().mean()
            loss.backward()
            losses.append(loss.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    return losses, [p.detach().clone() for p in params]


@pytest.mark.parametrize("mode", ["layer", "block"])
@pytest.mark.parametrize("nested, accumulate", [(False, 1), (True, 2)])
def test_adapters_train_over_them(mode, nested, accumulate):
    model = with_adapters(stack(nested=nested))
    ref, (x,) = aligned(model), model.example()
    budget = three_blocks(model)
    want = train(ref, 5, x, accumulate)
    if mode == "layer":
        wrap(model, budget, link=1e9)
        ours = runtime(model)
    else:
        config = stagehand.StagehandConfig(vram_budget=budget)
        ours = stagehand.StagehandRuntime(model, config, device=device(budget, 1e9))
        ours.prepare()
    got = train(model, 5, x, accumulate)
    stats = ours.stats
    assert same(got[0], want[0]) and same(got[1], want[1])
    assert stats["copies"] > 20 and stats["device_peak"] + stats["reserved_bytes"] <= budget
    ours.shutdown()


def test_backward_leases_anew_what_autograd_saved():
    """The weight's transpose is what it saves: without a handle all of the model would stay until backward."""
    model = with_adapters(stack())
    (x,) = model.example()
    budget = three_blocks(model)
    wrap(model, budget)
    session = runtime(model).session
    out = model(x)
    assert session.core.stats()["leased_bytes"] == 0
    out.sum().backward()
    assert session.core.stats()["leased_bytes"] == 0
    del out


@pytest.mark.parametrize("seed", range(8))
def test_random_models_and_budgets(seed):
    """Down to the smallest budget, where biases that train and frozen weights lie in one unit."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    width, depth = rng.choice([64, 96, 130]), rng.randint(2, 5)
    model = made(Stack, depth, width, seed=seed)
    quantised(model, rng.random() < 0.5, only=lambda name: rng.random() < 0.8)
    for name, param in model.named_parameters():
        param.requires_grad_("bias" in name or "gain" in name)
    ref, (x,) = aligned(model), model.example()
    for attempt in range(20):
        try:
            wrap(model, budget := 4096 + 1500 * attempt * attempt)
        except stagehand.StagehandOOMError:
            continue
        try:
            want = got = None
            got = train(model, 3, x)
            break
        except stagehand.StagehandOOMError:
            runtime(model).shutdown()
            model.zero_grad()
    want = train(ref, 3, x)
    assert same(got, want), attempt
    stats = runtime(model).stats
    assert stats["copies"] > 2 * depth and stats["device_peak"] + stats["reserved_bytes"] <= budget


def test_lists_of_them():
    class Listing(nn.Module):
        def __init__(self):
            super().__init__()
            self.tables = nn.ParameterList([nn.Parameter(Rows.of(torch.randn(512, 512)), False) for _ in range(6)])

        def forward(self, x):
            for table in self.tables:
                x = torch.tanh(F.linear(x, table))
            return x

    model = made(Listing)
    ref = aligned(model)
    wrap(model, 3 * 270_000)
    x = torch.randn(2, 512)
    with torch.no_grad():
        for _ in range(3):
            assert same(model(x), ref(x))
    assert not kept(model) and runtime(model).stats["copies"] > 6


def test_several_threads():
    model = stack(nested=True)
    ref = aligned(model)
    wrap(model, three_blocks(model), link=1e9)
    inputs = [torch.randn(2, 64) for _ in range(4)]
    with torch.no_grad():
        wants = [ref(x) for x in inputs]
    wrong = []

    def run(i):
        with torch.no_grad():
            for _ in range(6):
                if not same(model(inputs[i]), wants[i]):
                    wrong.append(i)

    workers = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


# ---------------------------------------------------------------------- writes


@torch.no_grad()
def scale_of(weight):
    weight.scale.mul_(2)


def data_of_scale(weight):
    weight.scale.data.mul_(2)


def new_data_of_scale(weight):
    weight.scale.data = weight.scale.detach() * 2


@torch.no_grad()
def through_the_weight(weight):
    weight.mul_(2)


@torch.no_grad()
def through_data(weight):
    weight.data.mul_(2)


@torch.no_grad()
def another_tensor(weight):
    weight.scale = weight.scale * 2


@torch.no_grad()
def other_strides(weight):
    weight.codes = weight.codes.t().contiguous().t()


def by_copy(weight):
    with torch.no_grad():
        weight.copy_(Rows.of(torch.full(weight.shape, 0.25, device=weight.device)))


def other_codes(weight):
    codes = torch.randint(-100, 100, weight.shape, dtype=torch.int8)
    weight.codes = codes.to(weight.device)


@pytest.mark.parametrize("inference_mode", [False, True])
@pytest.mark.parametrize("write", [scale_of, through_the_weight, through_data, another_tensor, by_copy,
                                   other_strides, other_codes])
def test_writes_at_rest_are_seen(write, inference_mode):
    model = stack()
    (x,) = model.example()
    ref = aligned(model)
    wrap(model, three_blocks(model), link=1e9, inference_mode=inference_mode)
    with torch.no_grad():
        for i in (1, 4):
            assert same(model(x), ref(x))
            torch.manual_seed(i)
            write(ref.blocks[i].up.weight)
            torch.manual_seed(i)
            if inference_mode:
                with runtime(model).writing():
                    write(model.blocks[i].up.weight)
            else:
                write(model.blocks[i].up.weight)
            for _ in range(3):
                assert same(model(x), ref(x))
    runtime(model).shutdown()
    with torch.no_grad():
        assert same(model(x), ref(x))


def test_another_tensor_of_another_shape_is_refused_by_name():
    model = stack()
    (x,) = model.example()
    wrap(model, three_blocks(model))
    model.blocks[2].up.weight.scale = torch.ones(3)
    with torch.no_grad(), pytest.raises(stagehand.StagehandError, match=r"2\.up\.weight\.scale was given data of"):
        model(x)
    model.blocks[2].up.weight.scale = None
    with torch.no_grad(), pytest.raises(stagehand.StagehandError, match=r"weight\.scale was given .*it is a NoneType"):
        model(x)


class Writer(nn.Linear):
    """Its forward writes its weight."""

    write = None

    def forward(self, x):
        if self.write is not None:
            self.write(self.weight)
        return super().forward(x)


def writers(write, at=(1, 3)):
    model = quantised(made(lambda: nn.Sequential(*(Writer(64, 64) for _ in range(6)))))
    for i in at:
        model[i].write = write
    return model


@pytest.mark.parametrize("write", [scale_of, data_of_scale, new_data_of_scale, through_the_weight, another_tensor])
@pytest.mark.parametrize("grad", [False, True])
def test_writes_of_a_forward_reach_the_weight(write, grad):
    model = writers(write)
    ref = aligned(model)
    x = torch.randn(2, 64, requires_grad=grad)
    wrap(model, 3 * held(model[0]) + 4096, link=1e9)
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            got, want = model(x), ref(x)
            assert same(got, want)
            if grad:
                assert same(torch.autograd.grad(got.sum(), x), torch.autograd.grad(want.sum(), x))
    for a, b in zip(model, ref):
        assert same(a.weight.codes, b.weight.codes) and same(a.weight.scale, b.weight.scale)


@pytest.mark.parametrize("other, why", [
    (torch.zeros(1, 64, dtype=torch.int8), "data of another shape"),
    (Raised.of(torch.zeros(64, 64, dtype=torch.int8)), "it is a Raised"),
    (torch.zeros(64, 64, dtype=torch.int8).to_sparse(), "its layout is torch.sparse")])
def test_a_forward_that_gives_a_weight_what_cannot_stream_is_refused_and_changes_nothing(other, why):
    def wrong(weight):
        weight.scale.mul_(2)
        weight.codes = other

    class Writes(Writer):
        def forward(self, x):
            self.write and self.write(self.weight)
            return super(Writer, self).forward(x) if self.write is None else x

    model = quantised(made(lambda: nn.Sequential(*(Writes(64, 64) for _ in range(6)))))
    for i in (1, 3):
        model[i].write = wrong
    ref = aligned(model)
    wrap(model, 3 * held(model[0]) + 4096)
    with torch.no_grad(), pytest.raises(stagehand.StagehandError, match=r"gave 1\.weight\.codes .*" + why):
        model(torch.randn(2, 64))
    for net in (model, ref):
        for i in (1, 3):
            net[i].write = None
    x = torch.randn(2, 64)
    with torch.no_grad():
        assert same(model(x), ref(x))


def test_a_write_between_forward_and_backward_is_not_taken_for_the_old_value():
    for write in (through_the_weight, scale_of):
        model = with_adapters(stack())
        (x,) = model.example()
        wrap(model, three_blocks(model))
        out = model(x.requires_grad_())
        write(model.blocks[3].up.base.weight)
        with pytest.raises(RuntimeError, match=r"blocks\.3\.up\.base\.weight\."):
            out.sum().backward()
        model(x).sum().backward()
        runtime(model).shutdown()


def test_a_write_from_outside_in_a_pass_is_refused():
    for write, mode in ((through_the_weight, torch.no_grad), (scale_of, torch.no_grad),
                        (scale_of, torch.inference_mode)):
        model = stack()
        ref = aligned(model)
        (x,) = model.example()
        wrap(model, three_blocks(model))
        hook = model.out.register_forward_pre_hook(lambda module, args: write(model.blocks[1].up.weight))
        with mode(), pytest.raises(stagehand.StagehandError, match=r"blocks\.1\.up\.weight.* is lost"):
            model(x)
        hook.remove()
        with torch.no_grad():
            assert same(model(x), ref(x))


def test_one_that_comes_to_hold_another_tensor_is_refused_by_name():
    model = quantised(made(lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))))
    model[1].weight = nn.Parameter(made_of(More)[0], requires_grad=False)
    wrap(model, 3 * held(model[0]) + 4096)
    x = torch.randn(2, 64)
    with torch.no_grad():
        want = model(x)
        model[1].weight.more = torch.ones(64, 64)
        with pytest.raises(stagehand.StagehandError, match=r"1\.weight holds another tensor .*more"):
            model(x)
        model[1].weight.more = None
        assert same(model(x), want)


# ---------------------------------------------------------------------- what others see


def test_state_dicts_copies_and_pickles_hold_the_class():
    model = stack(nested=True)
    (x,) = model.example()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    wrap(model, three_blocks(model))
    with torch.no_grad():
        want = model(x)
    twin = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    inner = []
    hook = model.out.register_forward_hook(lambda *args: inner.append((model.state_dict(), copy.deepcopy(model))))
    with torch.no_grad():
        assert same(model(x), want)
    hook.remove()
    state, within = inner[0]
    for net in (twin, loaded, within):
        assert type(net.blocks[0].up.weight) is Rows and type(net.blocks[0].up.weight.codes) is Raised
        assert not any("stagehand" in name for name in vars(net.blocks[0].up.weight))
        with torch.no_grad():
            assert same(aligned(net)(x), want)
    for found in (state, model.state_dict()):
        for name, value in found.items():
            assert type(value) is type(before[name])
            assert same((value + 0), (before[name] + 0))
    model.load_state_dict(before)
    with torch.no_grad():
        assert same(model(x), want)


class Curious(nn.Linear):
    def forward(self, x):
        weight = self.weight
        assert isinstance(weight, nn.Parameter) and isinstance(weight, Rows) and weight is self.weight
        assert weight.tag == "mine" and weight.codes.data_ptr() != self.host
        weight.seen = getattr(weight, "seen", 0) + 1
        weight.kept = weight.codes
        twin = copy.deepcopy(weight)
        assert type(twin) is Rows and same(twin + 0, weight + 0)
        return super().forward(x)


def test_a_forward_sees_the_class_and_the_attributes():
    model = quantised(made(lambda: nn.Sequential(*(Curious(64, 64) for _ in range(4)))))
    for layer in model:
        layer.weight.tag = "mine"
    wrap(model, 3 * held(model[0]) + 4096)
    for layer in model:
        layer.host = layer.weight.codes.data_ptr()
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(2, 64))
    for layer in model:
        assert layer.weight.seen == 3 and layer.weight.codes.data_ptr() == layer.host
        assert "kept" not in vars(layer.weight) and not any("stagehand" in name for name in vars(layer.weight))
    assert runtime(model).session.core.stats()["leased_bytes"] == 0


class Copier(nn.Linear):
    """Its forward copies its weight and writes it to a file."""

    def forward(self, x):
        out = super().forward(x)
        if "copies" not in self.__dict__:
            file = io.BytesIO()
            torch.save(self.weight, file)
            file.seek(0)
            self.copies = [copy.deepcopy(self.weight), torch.load(file, weights_only=False)]
        return out


def test_copies_that_a_forward_makes_are_weights_of_their_own():
    model = quantised(made(lambda: nn.Sequential(*(Copier(64, 64) for _ in range(5)))))
    wrap(model, 3 * held(model[0]) + 4096, link=1e9)
    ref, x = aligned(model), torch.randn(2, 64)
    with torch.no_grad():
        for _ in range(3):
            assert same(model(x), ref(x))
    for layer, plain in zip(model, ref):
        for made_there in layer.copies:
            assert type(made_there) is Rows and same(made_there.values(), plain.weight.values())
            assert all(type(tensor) is torch.Tensor for _, tensor in inside(made_there))
            assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for _, tensor in inside(made_there))
        if card.ON_CARD:  # where it would stay: a copy of what a call saw is on the device
            made_there = nn.Parameter(made_there.cpu(), requires_grad=False)
        layer.weight = made_there
        assert not any("stagehand" in name for name in vars(made_there))
    with torch.no_grad():
        for _ in range(2):
            assert same(model(x), ref(x))


class Reader(nn.Module):
    """Uses a weight from outside its module, lists parameters, and ties one by another name."""

    def __init__(self, d=64):
        super().__init__()
        self.a, self.b = nn.Linear(d, d), nn.Linear(d, d)
        self.c = nn.Linear(d, d)
        self.late = None

    def forward(self, x):
        x = F.linear(self.a(x), self.b.weight) + self.c(self.b(x))
        for param in self.parameters():
            if param.dim() == 2:
                x = x + F.linear(x, param) * 1e-3
                x = x + param.scale.sum() * 1e-3
        return x


@pytest.mark.parametrize("grad", [False, True, None])
def test_weights_read_from_outside_their_module(grad):
    """grad: None stands for inference_mode."""
    model = quantised(made(Reader))
    model.c.weight = model.a.weight
    ref = aligned(model)
    wrap(model, 4 * held(model.a))
    x = torch.randn(2, 64, requires_grad=bool(grad))
    with torch.inference_mode() if grad is None else torch.set_grad_enabled(grad):
        for _ in range(3):
            got, want = model(x), ref(x)
            assert same(got, want)
            if grad:
                assert same(torch.autograd.grad(got.sum(), x), torch.autograd.grad(want.sum(), x))
    del got
    gc.collect()
    assert runtime(model).session.core.stats()["leased_bytes"] == 0
    assert len(runtime(model).session.units) == 2  # a tied one has one image


def test_a_weight_that_a_forward_registers_elsewhere_is_the_master():
    class Ties(nn.Linear):
        def forward(self, x):
            self.again = self.weight
            return super().forward(x)

    model = quantised(made(lambda: nn.Sequential(*(Ties(64, 64) for _ in range(4)))))
    wrap(model, 3 * held(model[0]) + 4096)
    ref = aligned(model)
    x = torch.randn(2, 64)
    with torch.no_grad():
        for _ in range(3):
            assert same(model(x), ref(x))
    assert all(layer._parameters["again"] is layer._parameters["weight"] for layer in model)


def test_functional_calls_and_transforms():
    model = stack()
    (x,) = model.example()
    ref = aligned(model)
    wrap(model, three_blocks(model))
    other = {"blocks.1.up.weight": nn.Parameter(Rows.of(torch.randn(192, 64)), requires_grad=False)}
    theirs = {name: nn.Parameter(aligned_around(value.data), requires_grad=False) for name, value in other.items()}
    with torch.no_grad():
        for _ in range(2):
            assert same(torch.func.functional_call(model, other, (x,)), torch.func.functional_call(ref, theirs, (x,)))
            assert same(model(x), ref(x))


def test_one_that_replaces_another_of_its_class_streams_in_its_place():
    """As of load_state_dict(assign=True), and of what is quantised anew."""
    model = stack(nested=True)
    (x,) = model.example()
    wrap(model, three_blocks(model))
    held, copies = sum(arena.bytes for arena in runtime(model).session.arenas()), 0
    for seed in (3, 4):
        other = stack(nested=True, seed=seed)
        ref = aligned(other)
        model.load_state_dict(other.state_dict(), assign=True)
        del other
        with torch.no_grad():
            for _ in range(3):
                assert same(model(x), ref(x))
        now = runtime(model).stats["copies"]
        assert now - copies > 20 and not kept(model)
        copies = now
    scale_of(model.blocks[4].up.weight)
    scale_of(ref.blocks[4].up.weight)
    with torch.no_grad():
        assert same(model(x), ref(x))
    assert sum(arena.bytes for arena in runtime(model).session.arenas()) == held
    for unit in runtime(model).session.units:
        assert all(unit.base <= part.param.data_ptr() < unit.base + unit.nbytes for part in unit.entries)
    runtime(model).shutdown()
    with torch.no_grad():
        assert same(model(x), ref(x))


def test_tied_ones_that_are_replaced_by_two_of_one_memory_stay():
    model = stack(nested=True)
    (x,) = model.example()
    model.blocks[5].up.weight = model.blocks[4].up.weight
    wrap(model, three_blocks(model))
    for seed in (3, 4):
        other = stack(nested=True, seed=seed)
        other.blocks[5].up.weight = other.blocks[4].up.weight
        ref = aligned(other)
        model.load_state_dict(other.state_dict(), assign=True)
        del other
        with torch.no_grad():
            for _ in range(3):
                assert same(model(x), ref(x))


def test_a_weight_that_is_replaced():
    model = stack()
    (x,) = model.example()
    wrap(model, three_blocks(model))
    new = nn.Parameter(Rows.of(torch.randn(192, 64)), requires_grad=False)
    plain = nn.Parameter(torch.randn(64, 192), requires_grad=False)
    model.blocks[1].up.weight, model.blocks[2].down.weight = new, plain
    ref = aligned(model)
    with torch.no_grad():
        for _ in range(3):
            assert same(model(x), ref(x))
    model.load_state_dict(stack(seed=3).state_dict(), assign=True)
    ref = aligned(model)
    with torch.no_grad():
        for _ in range(3):
            assert same(model(x), ref(x))
    runtime(model).shutdown()
    with torch.no_grad():
        assert same(model(x), ref(x))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_blocks_and_autocast(use_reentrant):
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner
            self.blocks = inner.blocks

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=use_reentrant)
            return x

    model = Checkpointed(with_adapters(stack()))
    ref = aligned(model)
    wrap(model, three_blocks(model))
    for _ in range(3):
        grads = []
        for net in (model, ref):
            x = torch.ones(2, 64, requires_grad=True)
            with torch.autocast(card.TORCH.type, torch.bfloat16):
                out = net(x)
            out.float().sum().backward()
            grads.append([x.grad] + [p.grad for p in net.parameters() if p.grad is not None])
        assert same(*grads)
    assert runtime(model).session.core.stats()["leased_bytes"] == 0


def test_an_error_in_a_forward_lets_go():
    class Fails(nn.Linear):
        def forward(self, x):
            self.mine = self.weight
            raise ValueError("on purpose")

    model = quantised(made(lambda: nn.Sequential(nn.Linear(64, 64), Fails(64, 64), nn.Linear(64, 64))))
    wrap(model, 2 * held(model[0]) + 4096)
    model[1].__dict__["mine"] = None
    with torch.no_grad(), pytest.raises(ValueError) as error:
        model(torch.randn(2, 64))
    assert runtime(model).session.core.stats()["leased_bytes"] == 0
    del error


def test_dtype_and_transfer_leave_them_alone():
    for options in ({"dtype": torch.bfloat16}, {"transfer": "int8"}):
        model = quantised(made(lambda: nn.Sequential(*(nn.Linear(2048, 64, bias=False) if i % 2 == 0 else
                                                       nn.Linear(64, 2048, bias=False) for i in range(6)))))
        model[2].weight = nn.Parameter(Rows(model[2].weight.codes, torch.rand(64, 2048)), requires_grad=False)
        ref = aligned(model)
        wrap(model, 4 * held(model[0]) + held(model[2]), inference_mode=True, **options)
        x = torch.randn(2, 2048)
        with torch.no_grad():
            for _ in range(2):
                assert same(model(x), ref(x))
        if "transfer" in options:
            assert runtime(model).quantised["error"] == {}


def test_a_model_is_converted_and_goes_on():
    model = stack()
    weight = model.blocks[1].up.weight
    ref = aligned(model)
    (x,) = model.example()
    wrap(model, three_blocks(model) * 4)
    ref.to(torch.float64)
    with torch.no_grad():
        model(x)
        model.to(torch.float64)
        assert model.blocks[1].up.weight is weight and weight.dtype is weight.scale.dtype is torch.float64
        for _ in range(2):
            assert same(model(x.double()), ref(x.double()))
    assert not kept(model)


def test_other_models_are_converted_while_one_streams():
    """torch swaps such a weight for its converted form, which it cannot where a weak reference to it was left."""
    model = stack()
    wrap(model, three_blocks(model))
    other = quantised(nn.Sequential(nn.Linear(64, 64)))
    assert other.to(torch.float64)[0].weight.dtype is torch.float64


# ---------------------------------------------------------------------- what stays


class Copying(Rows):
    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Copying(inner["codes"].clone(), inner["scale"], context["turned"])


class Stubborn(Rows):
    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        scale = torch.ones(inner["scale"].shape)
        return Stubborn(inner["codes"].cpu(), scale, context["turned"])


class Other(Rows):
    """Comes out as its base class."""


class Cautious(Rows):
    """Will not be taken apart by its own names."""

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        raise KeyError("not today")


class Silent(Rows):
    """Will not tell what is in it while `silent`."""

    silent = True

    def __tensor_flatten__(self):
        if Silent.silent:
            raise ValueError("no parts today")
        return super().__tensor_flatten__()

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Silent(inner["codes"], inner["scale"], context["turned"])


class Lying(Rows):
    """Tells of a tensor that it has not."""

    def __tensor_flatten__(self):
        return ["codes", "zeros"], {"turned": self.turned}


def two_of_one_memory():
    weight = Rows.of(torch.randn(64, 64))
    return weight, Rows(weight.codes, weight.scale)


def made_of(kind):
    rows = Rows.of(torch.randn(64, 64))
    return [kind(rows.codes, rows.scale)]


class More(Rows):
    """Holds a third tensor, which it does not need."""

    more = None

    def __tensor_flatten__(self):
        return ["codes", "scale"] + ["more"] * (self.more is not None), {"turned": self.turned}

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        self = More(inner["codes"], inner["scale"], context["turned"])
        self.more = inner.get("more")
        return self


def holding(more):
    weight = nn.Parameter(made_of(More)[0], requires_grad=False)
    weight.more = more
    return [weight]


@pytest.mark.parametrize("build, why", [
    (lambda: made_of(Copying), "has other tensors in it"),
    (lambda: made_of(Stubborn), "other tensors in it|keeps to its device"),
    (lambda: made_of(Other), "is another one"), (lambda: made_of(Cautious), "KeyError: .not today"),
    (lambda: made_of(Silent), "cannot be taken apart.*ValueError: no parts today"),
    (lambda: made_of(Lying), "cannot be taken apart.*AttributeError.*zeros"),
    (two_of_one_memory, "holds codes, which shares memory"),
    (lambda: holding(torch.ones(64, 1).to_sparse()), "holds more: its layout is torch.sparse_coo"),
    (lambda: holding(nn.Parameter(torch.ones(64, 1))), "holds more, which takes a gradient"),
    (lambda: holding(torch.ones(64, 0)), "holds more: it is empty")])
def test_what_cannot_stream_stays_and_is_named(build, why):
    model = quantised(made(lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))))
    weights = build()
    for i, weight in enumerate(weights):
        given = isinstance(weight, nn.Parameter)
        model[2 * i + 1].weight = weight if given else nn.Parameter(weight, requires_grad=False)
    ref, x = model, torch.randn(2, 64)
    with torch.no_grad():
        want = ref(x)
    wrap(model, 8 * held(model[0]))
    report = kept(model)
    assert sorted(report) == [f"{2 * i + 1}.weight" for i in range(len(weights))]
    assert all(re.search(why, str(reason)) for reason in report.values()), report
    with torch.no_grad():
        for _ in range(3):
            assert near(model(x), want, atol=1e-5)


@pytest.mark.parametrize("budget", [None, "1MB"])
@pytest.mark.parametrize("kind", [Silent, Lying, Cautious])
def test_what_cannot_be_taken_apart_keeps_no_model_out(kind, budget):
    model = quantised(made(lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))))
    model[1].weight = nn.Parameter(made_of(kind)[0], requires_grad=False)
    x = torch.randn(2, 64)
    with torch.no_grad():
        want = model(x)
        stagehand.layer(model, vram_budget=budget, device="sim", dtype=torch.float32)
        assert same(model(x), want)
    assert list(kept(model)) == ["1.weight"]
    runtime(model).shutdown()


def test_one_that_is_not_taken_apart_any_more_is_named(monkeypatch):
    monkeypatch.setattr(Silent, "silent", False)
    model = quantised(made(lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))))
    model[1].weight = nn.Parameter(made_of(Silent)[0], requires_grad=False)
    x = torch.randn(2, 64)
    wrap(model, 3 * held(model[0]) + 4096)
    with torch.no_grad():
        want = model(x)
        monkeypatch.setattr(Silent, "silent", True)
        with pytest.raises(stagehand.StagehandError, match=r"1\.weight .*taken apart.*ValueError: no parts today"):
            model(x)
        monkeypatch.setattr(Silent, "silent", False)
        assert same(model(x), want)
    assert not kept(model)


def test_one_that_takes_a_gradient_stays_and_one_that_is_unfrozen_is_refused():
    model = stack()
    (x,) = model.example()
    model.blocks[1].up.weight.requires_grad_(True)
    wrap(model, three_blocks(model))
    assert "takes a gradient" in str(kept(model)["blocks.1.up.weight"])
    with torch.no_grad():
        model(x)
    model.blocks[2].up.weight.requires_grad_(True)
    with torch.no_grad():
        model(x)
    with pytest.raises(stagehand.StagehandError, match=r"blocks\.2\.up\.weight takes a gradient"):
        model(x)


@pytest.mark.parametrize("autocast", [False, True])
def test_those_that_take_a_gradient_stream_where_the_model_is_for_inference(autocast):
    model = stack().requires_grad_(True)
    x = torch.randn(3, 5, 64)
    ref = aligned(model)
    wrap(model, three_blocks(model), inference_mode=True)
    assert not kept(model)
    with torch.no_grad(), torch.autocast(card.TORCH.type, torch.bfloat16, enabled=autocast):
        for _ in range(3):
            assert same(model(x), ref(x))
        assert runtime(model).session.core.stats()["leased_bytes"] == 0
    with pytest.raises(stagehand.StagehandError, match="run under torch.no_grad"):
        model(x)


@functools.cache
def takes_such_tensors() -> bool:
    (block,), (x,) = stack(n=1).blocks, stack(n=1).example()
    try:
        with torch.no_grad():
            torch.compile(block, backend="aot_eager")(x)
    except torch._dynamo.exc.TorchDynamoException:
        return False
    return True


@pytest.fixture
def compiler():
    pytest.importorskip("torch._dynamo.testing", reason="this PyTorch has no compiler to test with")
    needs_regions()
    torch._dynamo.reset()
    if not takes_such_tensors():
        pytest.skip("torch.compile of this PyTorch fails on the unwrapped model, too: it does not know such tensors")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("nested", [False, True])
def test_compiled_blocks(nested, compiler):
    model = stack(n=4, nested=nested)
    (x,) = model.example()
    wrap(model, three_blocks(model))
    with torch.no_grad():
        want = model(x)
        for block in model.blocks:
            block.compile(backend="aot_eager")
        for _ in range(3):
            assert near(model(x), want, atol=1e-5)
    assert len(runtime(model).compiled) == 4
    assert runtime(model).session.core.stats()["leased_bytes"] == 0


@pytest.mark.parametrize("limit", [None, 1])
def test_compiled_blocks_with_adapters(limit, compiler):
    """limit: of graphs for one function; what is beyond it runs uncompiled under the compiler."""
    if limit is None:
        return trains_compiled()
    name = "recompile_limit" if hasattr(torch._dynamo.config, "recompile_limit") else "cache_size_limit"
    with torch._dynamo.config.patch({name: limit}):
        trains_compiled()


def trains_compiled():
    model = with_adapters(stack())
    ref, (x,) = aligned(model), model.example()
    wrap(model, three_blocks(model))
    for net in (model, ref):
        for block in net.blocks:
            block.compile(backend="aot_eager")
    want, got = train(ref, 3, x), train(model, 3, x)
    for a, b in zip(got[1], want[1]):
        assert near(a, b, atol=1e-5)
    assert len(runtime(model).compiled) == 6 and runtime(model).session.core.stats()["leased_bytes"] == 0
