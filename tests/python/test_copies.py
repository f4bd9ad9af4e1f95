"""A managed model copies, saves, converts and unwraps as a plain one."""

import copy
import gc
import io
import os
import pickle

import card
import pytest
import torch
from support import (
    AttentionNet, ConvNet, Experts, NormedNet, RawNet, RecurrentNet, Stack, TinyLM, aligned_copy, made, nbytes,
    runtime, same, smallest_budget, tight_budget, wrap)

import stagehand

KINDS = [Stack, TinyLM, RecurrentNet, ConvNet, AttentionNet, RawNet, Experts]


def plain(model, twin):
    """Compares vars, types and hooks of a model with those of one that was never wrapped."""
    for (name, mine), (other_name, theirs) in zip(model.named_modules(), twin.named_modules(), strict=True):
        assert name == other_name and type(mine) is type(theirs)
        assert sorted(vars(mine)) == sorted(vars(theirs)), name
        assert type(mine._parameters) is type(theirs._parameters) and list(mine._parameters) == list(theirs._parameters)
        assert type(mine._buffers) is type(theirs._buffers) and list(mine._buffers) == list(theirs._buffers)
        for key, value in vars(theirs).items():
            if key.endswith("_hooks") or key.endswith("_kwargs"):
                assert len(vars(mine)[key]) == len(value)
        for (key, a), (_, b) in zip(mine._parameters.items(), theirs._parameters.items()):
            assert type(a) is type(b) and (a is None or (same(a, b) and a.stride() == b.stride())), (name, key)
        for (key, a), (_, b) in zip(mine._buffers.items(), theirs._buffers.items()):
            assert type(a) is type(b) and (a is None or same(a, b)), (name, key)


@pytest.mark.parametrize("kind", KINDS + [NormedNet])
def test_shutdown_leaves_a_plain_model(kind):
    """Field case 77."""
    model = made(kind)
    twin = copy.deepcopy(model)
    params = list(model.parameters())
    wrap(model, smallest_budget(model))
    x = model.example()
    with torch.no_grad():
        for _ in range(3):
            model(*x)
    own = runtime(model)
    own.shutdown()
    own.shutdown()
    if kind is NormedNet:  # old spectral norm keeps the last weight it computed
        twin(*x)
        return
    if kind is Experts:
        twin.used = model.used
    plain(model, twin)
    assert all(a is b for a, b in zip(params, model.parameters()))
    ref = aligned_copy(twin)
    with torch.no_grad():
        assert same(aligned_copy(model)(*x), ref(*x))
    model.to("cpu").double().float()
    plain(copy.deepcopy(model), twin)
    plain(pickle.loads(pickle.dumps(model)), twin)
    optimizer = torch.optim.SGD(model.requires_grad_().parameters(), lr=0.1)
    model(*x).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
def test_copies_of_a_managed_model_are_plain(kind):
    model = made(kind)
    twin = copy.deepcopy(model)
    wrap(model, smallest_budget(model))
    x = model.example()
    with torch.no_grad():
        for _ in range(2):
            model(*x)
    if kind is Experts:
        twin.used = model.used
    buffer = io.BytesIO()
    torch.save(model, buffer)
    assert len(buffer.getvalue()) < 1.5 * nbytes(model) + 100_000
    buffer.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)]
    for other in copies:
        plain(other, twin)
        assert all(p.untyped_storage().nbytes() == p.numel() * p.element_size() for p in other.parameters())
        with torch.no_grad():
            assert same(aligned_copy(other)(*x), model(*x))
    part = copy.deepcopy(next(model.children()))
    plain(part, next(twin.children()))
    assert runtime(model).mode != "shutdown"


def test_parametrized_models_can_be_copied():
    model = made(NormedNet)
    wrap(model, smallest_budget(model))
    x = model.example()
    with torch.no_grad():
        wanted = model(*x)
        other = copy.deepcopy(model)
        assert same(aligned_copy(other)(*x), wanted)
        assert same(model(*x), wanted)
    assert "_stagehand_layer_runtime" not in vars(other) and "forward" not in vars(other.symmetric)


def test_saved_files_hold_the_values_and_no_more(tmp_path):
    model = made(Stack, 4, 64)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    wrap(model, tight_budget(model))
    with torch.no_grad():
        model(*model.example())
    torch.save(model.state_dict(), tmp_path / "state.pt")
    torch.save(model.blocks[1].up.weight, tmp_path / "weight.pt")
    assert os.path.getsize(tmp_path / "weight.pt") < 1.2 * model.blocks[1].up.weight.numel() * 4 + 2000
    assert os.path.getsize(tmp_path / "state.pt") < 1.5 * nbytes(model) + 20_000
    state = torch.load(tmp_path / "state.pt")
    assert all(same(state[name], expected[name]) for name in expected)
    other = Stack(4, 64)
    other.load_state_dict(state)
    assert same(torch.load(tmp_path / "weight.pt", weights_only=False), model.blocks[1].up.weight)


def test_ties_survive_copies_and_shutdown():
    model = made(TinyLM)
    wrap(model, smallest_budget(model))
    other = copy.deepcopy(model)
    assert other.head.weight is other.embed.weight
    runtime(model).shutdown()
    assert model.head.weight is model.embed.weight


# ---------------------------------------------------------------------- moving


@pytest.mark.parametrize("move", [
    lambda m: m.to("meta"), lambda m: m.to("meta", torch.float16), lambda m: m.to_empty(device="cpu"),
    lambda m: m.share_memory(), lambda m: m.blocks[1].to("meta"), lambda m: m.blocks[1].up.to("meta"),
    lambda m: m._apply(lambda t: t * 2), lambda m: m._apply(lambda t: t.mul_(2)), lambda m: m._apply(torch.clone),
    lambda m: m._apply(lambda t: (t * 2).half()), lambda m: m._apply(lambda t: t.half().double()),
    lambda m: m._apply(lambda t: t.half().share_memory_())])
def test_moves_are_refused_by_name_and_change_nothing(move):
    """Field case 61."""
    model = made(Stack, 4, 40)
    ref = aligned_copy(model)
    wrap(model, tight_budget(model))
    with pytest.raises(stagehand.StagehandError, match="under stagehand"):
        move(model)
    with torch.no_grad():
        for _ in range(2):
            x = model.example()[0]
            assert same(model(x), ref(x))


def test_what_changes_nothing_passes():
    model = made(Stack, 4, 40)
    ref = aligned_copy(model)
    wrap(model, tight_budget(model))
    assert model.to(runtime(model).session.target.torch) is model
    assert model.float() is model and model.to(torch.float32) is model
    assert model.blocks[0].to(runtime(model).session.target.torch) is model.blocks[0]
    if card.ON_CARD:  # whose weights belong elsewhere when they are used
        with pytest.raises(stagehand.StagehandError, match="its weights stay on the host and are on cuda:0 when"):
            model.cpu()
    else:
        assert model.cpu() is model and model.blocks[0].to("cpu") is model.blocks[0]
        assert model.to("cpu:1") is model  # the host, as accelerate calls it in its second process
    assert model.eval() is model and model.train() is model and model.requires_grad_(False) is model
    seen = []
    model.apply(lambda module: seen.append(module))
    assert len(seen) == len(list(model.modules()))
    with torch.no_grad():
        x = model.example()[0]
        assert same(model(x), ref(x))


def test_modules_can_be_called_with_their_old_signature():
    import inspect

    model = made(Stack)
    before = inspect.signature(model.forward)
    wrap(model, tight_budget(model))
    assert inspect.signature(model.forward) == before
    assert model.forward.__name__ == "forward"


def test_dropping_a_managed_model_frees_everything():
    """Model, wrapper, session and model again are a cycle: the collector must free it, arena and all."""
    import weakref

    before = len([o for o in gc.get_objects() if type(o).__name__ in ("Session", "ModulePlan")])
    model = made(Stack, 4, 64)
    wrap(model, tight_budget(model))
    with torch.no_grad():
        model(*model.example())
    gone = weakref.ref(model), weakref.ref(runtime(model).session), weakref.ref(model.blocks[0].up.weight)
    del model
    gc.collect()
    assert [ref() for ref in gone] == [None, None, None]
    after = len([o for o in gc.get_objects() if type(o).__name__ in ("Session", "ModulePlan")])
    assert after <= before
