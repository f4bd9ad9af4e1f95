"""Another dtype for a managed model: .half(), .to(torch.bfloat16) and the like, at any moment."""

import copy
import gc
import weakref

import card
import pytest
import torch
from file_support import BLOCKS, save, state
from support import (
    AttentionNet, ConvNet, HostMasterGuard, NormedNet, RecurrentNet, Stack, TinyLM, aligned_copy, device, made,
    nbytes, runtime, same, smallest_budget, tight_budget, wrap)
from torch import nn
from torch.nn import functional as F

import stagehand
from stagehand import InvalidStateTransitionError, StagehandConfig, StagehandError, StagehandOOMError, StagehandRuntime

SLOW = 2e8  # bytes/s
DTYPES = [torch.float16, torch.bfloat16, torch.float64]


def example(model, dtype):
    return tuple(x.to(dtype) if x.is_floating_point() else x for x in model.example())


def check(model, ref, dtype, steps=2):
    for (name, value), (_, expected) in zip(model.state_dict().items(), ref.state_dict().items()):
        assert same(value, expected), name
    with torch.no_grad():
        for _ in range(steps):
            x = example(model, dtype)
            with HostMasterGuard(model):
                got = model(*x)
            assert same(got, ref(*x))


def in_blocks(model, budget, **options):
    """The model in block mode."""
    return StagehandRuntime(model, StagehandConfig(vram_budget=budget), block_pattern=BLOCKS,
                            device=device(budget, SLOW), **options)


# ---------------------------------------------------------------------- values


@pytest.mark.parametrize("kind", [Stack, TinyLM, RecurrentNet, ConvNet, AttentionNet])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kinds_of_models(kind, dtype):
    model = made(kind)
    budget = 2 * smallest_budget(model)
    ref = aligned_copy(aligned_copy(model).to(dtype))
    wrap(model, budget, SLOW)
    with torch.no_grad():
        model(*model.example())
    objects, manager = dict(model.named_parameters()), runtime(model)
    assert model.to(dtype) is model
    assert runtime(model) is manager and all(p is objects[name] for name, p in model.named_parameters())
    check(model, ref, dtype)
    assert manager.stats["h2d_bytes"] > 0


def test_parametrized_models():
    model = made(NormedNet)
    ref = aligned_copy(aligned_copy(model).double())
    wrap(model, 3 * nbytes(model), SLOW)
    with torch.no_grad():
        model(*model.example())
    check(model.double(), ref, torch.float64)


def test_back_and_forth_rounds_once():
    model = made(Stack, 4, 40)
    ref = aligned_copy(aligned_copy(model).half().float())
    wrap(model, tight_budget(model), SLOW)
    check(model.half().float(), ref, torch.float32)
    assert runtime(model).session.budget == tight_budget(model)


@pytest.mark.parametrize("convert", [
    lambda m: m.half(), lambda m: m.bfloat16(), lambda m: m.double(), lambda m: m.to(torch.float16),
    lambda m: m.to(card.TORCH, torch.float16), lambda m: m.to(torch.empty(0, dtype=torch.float16, device=card.TORCH)),
    lambda m: m.type(torch.float16)])
def test_every_way_of_saying_it(convert):
    model = made(Stack, 4, 40)
    ref = aligned_copy(convert(aligned_copy(model)))
    wrap(model, 2 * tight_budget(model), SLOW)
    check(convert(model), ref, ref.inp.weight.dtype)


def test_a_part_of_a_model():
    class Mixed(Stack):
        def forward(self, x):
            x = self.inp(x)
            for block in self.blocks:
                x = block(x.to(block.up.weight.dtype))
            return self.out(x.to(self.out.weight.dtype))

    model = made(Mixed, 4, 40)
    ref = aligned_copy(model)
    wrap(model, tight_budget(model), SLOW)
    for part in (model, ref):
        part.blocks[1].half()
        part.blocks[2].up.to(torch.float32)  # what it is
        part.blocks[3].norm.to(torch.float32)
        part.out.bfloat16()
    check(model, aligned_copy(ref), torch.float32)
    assert model.blocks[1].up.weight.dtype is torch.float16 and model.inp.weight.dtype is torch.float32


def test_a_managed_model_inside_another():
    outer = nn.Sequential(nn.Linear(40, 40), made(Stack, 4, 40))
    ref = aligned_copy(aligned_copy(outer).half())
    wrap(outer[1], tight_budget(outer[1]), SLOW)
    outer.half()
    with torch.no_grad():
        x = torch.randn(3, 40).half()
        outer[0] = aligned_copy(outer[0])
        assert same(outer(x), ref(x))


def test_a_dtype_asked_for_when_wrapping_gives_way():
    model = made(Stack, 4, 40)
    ref = aligned_copy(aligned_copy(model).bfloat16().float())
    wrap(model, tight_budget(model), SLOW, dtype=torch.bfloat16)
    check(model.float(), ref, torch.float32)


def test_without_a_budget_all_that_the_new_dtype_needs():
    model = made(Stack, 4, 40)
    ref = aligned_copy(aligned_copy(model).double())
    stagehand.layer(model, device="sim")
    check(model.double(), ref, torch.float64)


def test_a_budget_set_later_is_kept():
    model = made(Stack, 4, 40)
    budget = tight_budget(model)
    stagehand.layer(model, vram_budget=2 * budget, device="sim")
    runtime(model).set_vram_budget(budget)
    assert runtime(model.half()).session.budget == budget


def test_modules_of_any_kind_that_streamed_go_on_streaming():
    """In half the size they would not have been chosen."""
    model = made(RecurrentNet)
    assert nbytes(model.lstm) > 1 << 20 > nbytes(model.lstm) // 2
    wrap(model, 2 * smallest_budget(model))
    names = [unit.name for unit in runtime(model).session.units]
    assert [unit.name for unit in runtime(model.half()).session.units] == names and "lstm" in names


# ---------------------------------------------------------------------- block mode


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_block_mode(dtype):
    model = made(Stack, 5, 40)
    ref = aligned_copy(aligned_copy(model).to(dtype))
    manager = in_blocks(model, 2 * tight_budget(model), inference_mode=True)
    with torch.no_grad():
        for _ in range(3):
            model(*model.example())
        manager.synchronize()
        telemetry, history = manager.telemetry, manager.telemetry.history
        assert model.to(dtype) is model and model._stagehand_runtime is manager
        assert telemetry.history[:len(history)] == history and history  # may be read on
        for _ in range(3):
            x = example(model, dtype)
            with manager.managed_forward():
                assert same(model(*x), ref(*x))
    manager.synchronize()
    assert len(manager.telemetry.history) >= 2
    manager.shutdown()
    assert "_stagehand_runtime" not in model.__dict__ and "_apply" not in model.__dict__


def test_block_mode_before_it_opens():
    model = made(Stack, 5, 40)
    ref = aligned_copy(aligned_copy(model).half())
    manager = in_blocks(model, tight_budget(model))
    model.half()
    with torch.no_grad():
        x = example(model, torch.float16)
        assert same(model(*x), ref(*x))
    manager.shutdown()


def test_block_mode_between_begin_and_end_is_refused():
    model = made(Stack, 4, 40)
    manager = in_blocks(model, tight_budget(model))
    manager.begin_step()
    with pytest.raises(InvalidStateTransitionError, match="under stagehand.*end_step"):
        model.half()
    manager.end_step()
    assert model.half().inp.weight.dtype is torch.float16
    manager.shutdown()


# ---------------------------------------------------------------------- training


def train(model, convert, steps=6):
    """Losses and weights of a model that is converted half way, with one optimizer and hooks throughout."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    calls = []
    model.blocks[1].up.weight.register_hook(lambda grad: calls.append(grad.dtype))
    model.blocks[1].register_forward_hook(lambda module, args, out: calls.append(out.dtype))
    losses = []
    for step in range(steps):
        if step == steps // 2:
            convert(model)
        x = example(model, model.inp.weight.dtype)[0]
        loss = (model(x) - card.there(x)).pow(2).mean()
        loss.backward()
        losses.append(loss.detach())
        del loss
        if step == 1:  # gradients of two steps, the second in the new dtype, are accumulated
            continue
        optimizer.step()
        optimizer.zero_grad()
    return losses, calls, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_training_goes_on_with_the_same_optimizer(dtype):
    model = made(Stack, 4, 40, frozen=False)

    def converted_ref(ref):
        ref.to(dtype)
        with torch.no_grad():
            for param, other in zip(ref.parameters(), aligned_copy(ref).parameters()):
                param.data = other.data

    wanted = train(aligned_copy(model), converted_ref)
    wrap(model, 4 * nbytes(model), SLOW)
    got = train(model, lambda m: m.to(dtype))
    assert same(got[0], wanted[0]) and got[1] == wanted[1] and same(got[2], wanted[2])


def test_gradients_are_converted_and_flags_stay():
    model = made(Stack, 3, 24, frozen=False)
    model.inp.weight.requires_grad_(False)
    model.out.weight.note = "kept"
    ref = aligned_copy(model)
    wrap(model, 4 * nbytes(model), SLOW)
    x = model.example()[0]
    for one in (model, ref):
        one(x).sum().backward()
        one.half()
    for param, other in zip(model.parameters(), ref.parameters()):
        assert param.requires_grad == other.requires_grad and (param.grad is None) == (other.grad is None)
        assert param.grad is None or same(param.grad, other.grad)
    assert model.out.weight.note == "kept"


def test_between_forward_and_backward_it_is_refused():
    model = made(Stack, 4, 40, frozen=False)
    ref = aligned_copy(model)
    wrap(model, 4 * nbytes(model), SLOW)
    x = model.example()[0]
    loss = model(x).sum()
    with pytest.raises(InvalidStateTransitionError, match="under stagehand.*backward"):
        model.half()
    loss.backward()
    ref(x).sum().backward()
    assert same(model.inp.weight.grad, ref.inp.weight.grad)
    model.half()


def test_after_a_forward_whose_result_is_dropped_it_works():
    model = made(Stack, 4, 40, frozen=False)
    wrap(model, 4 * nbytes(model), SLOW)
    model(*model.example())
    assert model.half().inp.weight.dtype is torch.float16


def test_inside_a_backward_it_is_refused():
    model = made(Stack, 4, 40, frozen=False)
    wrap(model, 4 * nbytes(model), SLOW)
    seen = []

    def convert(grad):
        with pytest.raises(InvalidStateTransitionError, match="under stagehand.*backward"):
            model.half()
        seen.append(grad)

    model.blocks[1].up.weight.register_hook(convert)
    for _ in range(2):
        model(*model.example()).sum().backward()
    assert len(seen) == 2


def test_a_second_backward_through_a_graph_from_before_is_an_error():
    model = made(Stack, 4, 40, frozen=False)
    wrap(model, 4 * nbytes(model), SLOW)
    loss = model(*model.example()).sum()
    loss.backward(retain_graph=True)
    model.half().float()
    with pytest.raises((RuntimeError, StagehandError), match="modified by an inplace|other data since"):
        loss.backward()
    model(*model.example()).sum().backward()


def test_inside_a_forward_it_is_refused():
    model = made(Stack, 4, 40)
    ref = aligned_copy(model)
    wrap(model, tight_budget(model), SLOW)
    seen = []

    def convert(module, args):
        with pytest.raises(InvalidStateTransitionError, match="under stagehand.*after the call"):
            model.half()
        seen.append(module)

    handle = model.blocks[2].register_forward_pre_hook(convert)
    check(model, ref, torch.float32)
    assert len(seen) == 2
    handle.remove()


# ---------------------------------------------------------------------- failure


@pytest.mark.parametrize("mode", ["layer", "block"])
def test_a_budget_too_small_for_the_new_dtype_leaves_the_model_as_it_was(mode):
    model = made(Stack, 4, 40, frozen=False)
    model.requires_grad_(True)
    ref = aligned_copy(model)
    budget = nbytes(model.blocks[0]) + 16384 if mode == "block" else smallest_budget(model)
    manager = runtime(wrap(model, budget, SLOW)) if mode == "layer" else in_blocks(model, budget)
    with torch.no_grad():
        model(*model.example())
    model.inp.weight.grad = torch.ones_like(model.inp.weight)
    model.register_buffer("late", torch.ones(3))
    ref.register_buffer("late", torch.ones(3))
    with pytest.raises(StagehandOOMError, match="smallest budget"):
        model.double()
    assert model.late.dtype is torch.float32 and same(model.inp.weight.grad, torch.ones(40, 40))
    with torch.no_grad():
        for _ in range(2):
            x = model.example()[0]
            assert same(model(x), ref(x))
    assert all(same(a, b) for a, b in zip(model.state_dict().values(), ref.state_dict().values()))
    assert model.half().inp.weight.grad.dtype is torch.float16
    manager.shutdown()


def test_a_failure_half_way_leaves_the_model_as_it_was(monkeypatch):
    model = made(RecurrentNet)
    ref = aligned_copy(model)
    wrap(model, 3 * nbytes(model), SLOW)
    apply, count = torch.Tensor.to, [0]

    def fail(tensor, *args, **kwargs):
        if tensor.numel() > 1000:
            count[0] += 1
            if count[0] == 7:
                raise MemoryError("on purpose")
        return apply(tensor, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "to", fail)
        with pytest.raises(MemoryError):
            model.half()
    assert count[0] == 7
    check(model, ref, torch.float32)


def test_files_hold_one_dtype(tmp_path):
    model = made(Stack, 4, 40)
    ref = aligned_copy(model)
    save(tmp_path / "model.safetensors", state(model))
    with torch.device("meta"):
        empty = Stack(4, 40).eval()
    stagehand.load(empty, tmp_path, vram_budget=tight_budget(model), device="sim")
    with pytest.raises(StagehandError, match="under stagehand.*files.*shutdown"):
        empty.half()
    with torch.no_grad():
        x = model.example()[0]
        assert same(empty(x), ref(x))
    runtime(empty).shutdown()


def test_nothing_of_the_old_session_stays():
    model = made(Stack, 4, 40)
    wrap(model, tight_budget(model))
    with torch.no_grad():
        model(*model.example())
    old = weakref.ref(runtime(model).session)
    arena = runtime(model).stats["host_bytes"]
    model.half()
    gc.collect()
    assert old() is None and runtime(model).stats["host_bytes"] < arena


def test_copies_and_shutdown_after_a_conversion():
    model = made(TinyLM)
    ref = aligned_copy(aligned_copy(model).half())
    wrap(model, 2 * smallest_budget(model))
    model.half()
    twin = copy.deepcopy(model)
    assert twin.head.weight is twin.embed.weight and twin.head.weight.dtype is torch.float16
    runtime(model).shutdown()
    assert "_apply" not in model.__dict__ and model.float().head.weight is model.embed.weight
    model.half()
    assert all(same(a, b) for a, b in zip(twin.state_dict().values(), ref.state_dict().values()))
    assert all(same(a, b) for a, b in zip(model.state_dict().values(), ref.state_dict().values()))
