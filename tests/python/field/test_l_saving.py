"""Field cases L: state dicts, saving, copying, unwrapping."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import pickle
import threading

import card
import pytest
import support as s
import torch
from torch import nn
from worlds import Checkpointed, infer, managed, needs_cuda, run, state, train

import stagehand


def saved(model, path):
    torch.save(model.state_dict(), path)
    return torch.load(path, weights_only=True)


@card.on_the_host
def test_73_a_saved_state_dict_holds_the_values_at_every_moment(tmp_path):
    model, ref = managed(Checkpointed, 6, 32, frozen=False)
    x, seen = model.example()[0], []

    def look(*_):
        seen.append(saved(model, tmp_path / "inside"))

    values = {name: value.clone() for name, value in ref.state_dict().items()}

    def check(found):
        assert list(found) == list(values)
        for name, value in found.items():
            assert value.device.type == "cpu" and s.same(value, values[name]), name

    path = tmp_path / "file"
    check(saved(model, path))  # fresh
    assert os.path.getsize(path) < 1.5 * s.nbytes(ref) + 20000  # a header for each tensor
    handles = [model.blocks[3].register_forward_hook(look), model.blocks[3].up.register_forward_pre_hook(look),
               model.register_forward_hook(look)]
    model.zero_grad()
    out = model(x)
    check(saved(model, path))  # between forward and backward
    out.pow(2).sum().backward()
    check(saved(model, path))
    assert len(seen) == 4  # block, its part in forward and recomputation, model
    for found in seen:
        check(found)
    for handle in handles:
        handle.remove()
    for _ in range(2):
        assert s.same(train(model, x), train(ref, x))
        values = ref.state_dict()
        check(saved(model, path))
    plain = s.made(s.Stack, 6, 32, seed=5)
    plain.load_state_dict(torch.load(path, weights_only=True))
    assert s.same(state(plain), state(ref))


def test_75_state_that_is_written_while_copies_are_under_way_is_final(tmp_path):
    """Gradients come over a slow link, the update runs beside the next forward; the file has what they will be."""
    model, ref = managed(s.Stack, 6, 48, frozen=False, link=5e6)
    ours = stagehand.OffloadedAdamW(model.parameters(), lr=0.01)
    theirs = stagehand.OffloadedAdamW(ref.parameters(), lr=0.01)
    for _ in range(3):
        x = model.example()[0]
        files = []
        for net, optimizer in ((model, ours), (ref, theirs)):
            optimizer.zero_grad()
            net(x).pow(2).sum().backward()
            grads = {name: p.grad for name, p in net.named_parameters()}
            torch.save(grads, tmp_path / "grads")
            optimizer.step()
            file = io.BytesIO()
            torch.save([net.state_dict(), optimizer.state_dict()["state"], torch.load(tmp_path / "grads")], file)
            file.seek(0)
            files.append(torch.load(file))
        (a, b, c), (d, e, f) = files
        assert s.same(list(a.values()), list(d.values())) and s.same(list(c.values()), list(f.values()))
        for key, moments in b.items():
            assert s.same([moments[name] for name in ("exp_avg", "exp_avg_sq")],
                          [e[key][name] for name in ("exp_avg", "exp_avg_sq")])


@needs_cuda
def test_75_on_cuda_weights_that_a_late_kernel_fills():
    model = s.Stack(6, 256).requires_grad_(False)
    stagehand.layer(model, vram_budget=s.tight_budget(model) + (4 << 20), device="cuda")
    x = torch.randn(4, 256, device="cuda")
    infer(model, x)
    for i in range(20):
        late = torch.zeros(256, device="cuda")
        torch.cuda._sleep(20_000_000)
        late += i
        with torch.no_grad():
            model.blocks[3].down.bias.copy_(late, non_blocking=False)
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        assert (torch.load(file)["blocks.3.down.bias"] == i).all()
    run(model).shutdown()


def anatomy(model):
    """What a program can see of a module: types, attributes, hooks."""
    found = []
    for name, module in model.named_modules():
        found.append((name, type(module), type(module._parameters), sorted(vars(module)), type(module.forward),
                      [len(v) for k, v in sorted(vars(module).items()) if k.endswith("_hooks")],
                      [(k, type(p), type(p.data), p.requires_grad, p.device, sorted(vars(p)), p.is_leaf)
                       for k, p in module._parameters.items()]))
    return found


@card.on_the_host
@pytest.mark.parametrize("mode", ["layer", "block"])
def test_77_after_shutdown_the_model_is_as_one_that_was_never_wrapped(mode):
    model, ref = managed(s.Stack, 6, 32, frozen=False, mode=mode, link=None)
    x = model.example()[0]
    for _ in range(2):
        assert s.same(train(model, x), train(ref, x))
    run(model).shutdown()
    assert anatomy(model) == anatomy(ref) and s.same(state(model), state(ref))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    ways = [model.to("cpu"), copy.deepcopy(model), pickle.loads(pickle.dumps(model)),
            torch.load(file, weights_only=False)]
    grads = [p.grad.clone() for p in ref.parameters()]
    for net in ways[1:]:
        assert anatomy(net) == anatomy(ref)
    for net in ways:
        other = s.aligned_copy(ref)
        net = s.aligned_copy(net)
        for _ in range(2):
            assert s.same(train(net, x), train(other, x))
    assert s.same([p.grad for p in ref.parameters()], grads)
    assert model.half() is model and model.inp.weight.dtype is torch.float16


# ---------------------------------------------------------------------- own cases


@card.on_the_host
def test_own_a_pickle_of_a_managed_model_knows_nothing_of_stagehand():
    """It is read where stagehand is not installed. Whole, by parts, and a shallow copy."""
    model, ref = managed(s.TinyLM, frozen=False, budget=1 << 20, link=None)
    x = model.example()[0]
    train(model, x), train(ref, x)
    for thing in (model, model.blocks, model.blocks[1].up, model.embed, list(model.parameters()), model.state_dict()):
        text = pickle.dumps(thing)
        assert b"stagehand" not in text
    loaded = pickle.loads(pickle.dumps(model))
    assert loaded.head.weight is loaded.embed.weight
    shallow = copy.copy(model)
    assert "_stagehand_layer_runtime" not in vars(shallow)
    for net in (shallow, model):
        assert s.same(infer(net, x), infer(ref, x))


@card.on_the_host
def test_own_shared_memory_and_vectors_of_parameters():
    """Other ways in which programs take hold of all parameters at once: right, or refused by name."""
    model, ref = managed(s.Stack, 5, 32, frozen=False)
    x = model.example()[0]
    with contextlib.suppress(stagehand.StagehandError):
        model.share_memory()
    assert s.same(train(model, x), train(ref, x))
    for net in (model, ref):  # one vector, of which every parameter becomes a view
        vector = nn.utils.parameters_to_vector(net.parameters()).detach() * 0.5
        nn.utils.vector_to_parameters(vector, net.parameters())
    for mine, theirs in zip(infer(model, x), infer(ref, x)):
        torch.testing.assert_close(mine, theirs)  # views of the vector start anywhere
    torch.testing.assert_close(train(model, x), train(ref, x))
    run(model).shutdown()
    torch.testing.assert_close(state(model), state(ref))


@card.on_the_host
@pytest.mark.parametrize("assign", [False, True])
def test_own_loading_with_swapped_tensors(assign):
    """torch.__future__.set_swap_module_params_on_conversion: load_state_dict and .to() exchange the tensors'
    insides."""
    model, ref = managed(s.Stack, 5, 32, frozen=False, link=None)
    x = model.example()[0]
    values = {name: torch.randn_like(value) * 0.1 for name, value in ref.state_dict().items()}
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for _ in range(2):
            for net in (model, ref):
                net.load_state_dict({name: value.clone() for name, value in values.items()}, assign=assign)
            torch.testing.assert_close(infer(model, x), infer(ref, x))
            torch.testing.assert_close(train(model, x), train(ref, x))
        model.to("cpu"), ref.to("cpu")
        torch.testing.assert_close(train(model, x), train(ref, x))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    run(model).shutdown()
    torch.testing.assert_close(state(model), state(ref))


def test_own_a_state_dict_that_is_kept_is_a_snapshot_of_no_place():
    """With keep_vars and without, taken inside forward: what is kept does not change when places are filled anew, and
    holds none of them."""
    model, ref = managed(s.Stack, 8, 32)
    x, kept = model.example()[0], []
    handle = model.blocks[2].register_forward_hook(
        lambda *_: kept.extend((model.state_dict(), model.state_dict(keep_vars=True))))
    for _ in range(3):
        infer(model, x)
    handle.remove()
    assert run(model).stats["leased_bytes"] == 0
    run(model).shutdown()
    for found in kept:
        assert s.same(list(found.values()), state(ref))


@card.on_the_host
def test_own_a_model_may_be_saved_while_it_is_trained_by_another_thread(tmp_path):
    """A snapshot thread calls state_dict() all the time: each has the values of before or after a step, weight by
    weight."""
    model, ref = managed(s.Stack, 4, 32, frozen=False)
    x, stop, seen, failures = model.example()[0], threading.Event(), [], []

    def save():
        try:
            while not stop.is_set():
                seen.append({name: value.clone() for name, value in model.state_dict().items()})
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=save)
    versions = [[v.clone() for v in state(ref)]]
    thread.start()
    for _ in range(6):
        assert s.same(train(model, x), train(ref, x))
        versions.append([v.clone() for v in state(ref)])
    stop.set()
    thread.join(20)
    assert not failures and seen
    for found in seen[:: max(1, len(seen) // 20)]:
        for i, value in enumerate(found.values()):
            low = torch.stack([v[i] for v in versions]).amin(0)
            high = torch.stack([v[i] for v in versions]).amax(0)
            assert ((value >= low) & (value <= high)).all()
