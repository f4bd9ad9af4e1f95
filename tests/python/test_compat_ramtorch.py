"""Programs written for RamTorch's layers, over Stagehand: the same results as plain PyTorch, bit for bit."""

import copy
import io

import card
import pytest
import torch
from support import AttentionNet, Stack, aligned_copy, device, made, near, runtime, same, tight_budget
from torch import nn
from torch.nn import functional as F

import stagehand
import stagehand.compat
from stagehand.compat import ramtorch
from stagehand.compat.ramtorch import (
    add_custom_hooks, move_model_to_device, reattach_is_ramtorch_flags, register_ramtorch_grad_hook,
    register_ramtorch_hook, register_ramtorch_post_accumulate_grad_hook, replace_linear_with_ramtorch)

SLOW = 2e8  # bytes/s


def streamed(model, **options):
    """replace_linear_with_ramtorch over a simulated device so small that the blocks stream."""
    budget = options.pop("vram_budget", None) or tight_budget(model)
    return replace_linear_with_ramtorch(model, device(budget, SLOW), vram_budget=budget, **options)


class Checkpointed(Stack):
    """Its blocks are recomputed in backward, so that a tight budget is enough."""

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return self.out(x)


# ---------------------------------------------------------------------- a program


def program(model, wrap, add_hooks, steps=4):
    """A training loop as RamTorch's users write it. Returns losses, what hooks saw, and the weights at the end."""
    torch.manual_seed(3)
    model = wrap(model)
    seen, handles = add_hooks(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        for _ in range(2):  # gradients of two batches are accumulated
            x, y = torch.randn(4, model.inp.in_features), torch.randn(4, model.out.out_features)
            out = model(x)
            loss = F.mse_loss(out, y.to(out.device))
            loss.backward()
            losses.append(loss.detach())
        if step == 2:
            handles[0].remove()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses, seen, {name: value.clone() for name, value in model.state_dict().items()}


def on_ramtorch(model):
    def wrap(model):
        model = streamed(model)
        return move_model_to_device(model, "sim")

    def add_hooks(model):
        seen = []

        def count(grad):
            seen.append(grad.sum())
            return grad * 0.5

        def clip(tensor):
            assert tensor.ramtorch_grad is tensor.grad
            tensor.ramtorch_grad.clamp_(-0.01, 0.01)

        handles = register_ramtorch_grad_hook(model, count, ["blocks.0.up.weight", "blocks.2.down.bias"])
        return seen, handles + register_ramtorch_post_accumulate_grad_hook(model, clip, ["blocks.1.up.weight"])

    return program(model, wrap, add_hooks)


def on_pytorch(model):
    def add_hooks(model):
        seen = []

        def count(grad):
            seen.append(grad.sum())
            return grad * 0.5

        def clip(tensor):
            tensor.grad.clamp_(-0.01, 0.01)

        params = dict(model.named_parameters())
        handles = [params[name].register_hook(count) for name in ("blocks.0.up.weight", "blocks.2.down.bias")]
        return seen, [*handles, params["blocks.1.up.weight"].register_post_accumulate_grad_hook(clip)]

    return program(model, lambda model: model, add_hooks)


def test_a_training_program_gives_what_pytorch_gives():
    model = made(Checkpointed, 6, 48, frozen=False)
    losses, seen, weights = on_pytorch(aligned_copy(model))
    got_losses, got_seen, got_weights = on_ramtorch(model)
    assert same(got_losses, losses)
    assert len(seen) == 2 * 4 * 2 - 2 * 1 and len(got_seen) == len(seen)
    sums_agree = (lambda a, b: near(a, b, atol=1e-5)) if card.ON_CARD else same  # some are next to nothing
    assert all(map(sums_agree, got_seen, seen))
    assert got_weights.keys() == weights.keys()
    assert all(same(got_weights[name], weights[name]) for name in weights)
    assert runtime(model).stats["h2d_bytes"] > 0 and runtime(model).stats["evictions"] > 0


def test_inference_in_another_dtype():
    model = made(Stack, 4, 40)
    ref = aligned_copy(model.bfloat16())
    model.float()
    with torch.no_grad():
        for param, other in zip(model.parameters(), ref.parameters()):
            param.copy_(other)
    streamed(model, dtype=torch.bfloat16, inference_mode=True)
    with torch.inference_mode():
        for _ in range(3):
            x = torch.randn(4, 40, dtype=torch.bfloat16)
            assert same(model(x), ref(x))


# ---------------------------------------------------------------------- wrapping


def test_wrapping_flags_what_streams_and_keeps_the_objects():
    model = made(AttentionNet, frozen=False)
    params = dict(model.named_parameters())
    layers = dict(model.named_modules())
    out = replace_linear_with_ramtorch(model, "sim", vram_budget="8MB")
    assert out is model and dict(model.named_parameters()) == params
    assert all(part is layers[name] for name, part in model.named_modules())
    managed = {id(plan.module) for plan in runtime(model).session.plans.values()}
    assert managed
    for part in model.modules():
        assert getattr(part, "is_ramtorch", False) == (id(part) in managed)
        for param in part._parameters.values():
            assert param is None or getattr(param, "is_ramtorch", False) == (id(part) in managed)


def test_the_defaults_run_where_there_is_no_card():
    if torch.cuda.is_available():
        pytest.skip("there is a card")
    model = made(Stack, 3, 24)
    ref = aligned_copy(model)
    assert move_model_to_device(replace_linear_with_ramtorch(model)) is model
    with torch.no_grad():
        x = model.example()[0]
        assert same(model(x), ref(x))
    assert runtime(model).session.simulated


@pytest.mark.parametrize("where", ["sim", "cpu", torch.device("cpu"), None])
def test_a_device_may_be_named_in_several_ways(where):
    model = replace_linear_with_ramtorch(made(Stack, 3, 24), where, vram_budget="1MB")
    on_card = torch.cuda.is_available() and where is None
    assert runtime(model).session.target.torch == (torch.device("cuda", 0) if on_card else torch.device("cpu"))


def test_a_device_that_is_not_there_is_refused_and_the_model_stays():
    model = made(Stack, 3, 24)
    with pytest.raises(stagehand.StagehandError, match="no-such-device"):
        replace_linear_with_ramtorch(model, "no-such-device")
    assert "_stagehand_layer_runtime" not in model.__dict__
    assert not any(getattr(p, "is_ramtorch", False) for p in model.parameters())


def test_wrapping_again_flags_again():
    model = streamed(made(Stack, 4, 40))
    first = runtime(model)
    del model.inp.weight.is_ramtorch
    assert replace_linear_with_ramtorch(model, "sim") is model
    assert runtime(model) is first and model.inp.weight.is_ramtorch


def test_a_part_of_a_model_streams_and_the_rest_moves():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(40, 8)
            self.stack = Stack(4, 40)
            self.register_buffer("scale", torch.ones(8))

        def forward(self, x):
            return self.head(self.stack(x)) * self.scale

    model = made(Outer)
    ref = aligned_copy(model)
    streamed(model.stack)
    move_model_to_device(model, card.NAME)
    model.to(card.TORCH)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(4, 40)
            assert same(model(x), ref(x))
    inside = {name: value for name, value in model.stack.state_dict().items()}
    move_model_to_device(model, "meta")
    assert model.head.weight.is_meta and model.scale.is_meta
    assert all(same(value, inside[name]) for name, value in model.stack.state_dict().items())


# ---------------------------------------------------------------------- moving and flags


def test_moving_takes_gradients_and_keeps_flagged_tensors():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    model[3].running_mean = model[2].running_mean
    model[1].bias.is_ramtorch = True
    model[3].running_var.is_ramtorch = True
    model(torch.randn(3, 4)).sum().backward()
    assert move_model_to_device(model, "meta") is model
    assert model[0].weight.is_meta and model[0].weight.grad.is_meta
    assert model[2].running_mean.is_meta and model[3].running_mean is model[2].running_mean
    assert not model[1].bias.is_meta and not model[1].bias.grad.is_meta and not model[3].running_var.is_meta


def test_copies_lose_the_flags_of_tensors_and_get_them_again():
    model = streamed(made(Stack, 4, 40))
    twin = copy.deepcopy(model)
    assert twin.inp.is_ramtorch and not hasattr(twin.inp.weight, "is_ramtorch")
    reattach_is_ramtorch_flags(twin)
    assert twin.inp.weight.is_ramtorch and twin.inp.bias.is_ramtorch
    assert not hasattr(twin.blocks[0].norm.weight, "is_ramtorch")
    replace_linear_with_ramtorch(twin, "sim", vram_budget=tight_budget(twin))
    with torch.no_grad():
        x = model.example()[0]
        assert same(model(x), twin(x))


def test_a_loaded_model_is_flagged_again():
    file = io.BytesIO()
    torch.save(streamed(made(Stack, 3, 24)), file)
    file.seek(0)
    model = torch.load(file, weights_only=False)
    reattach_is_ramtorch_flags(model)
    assert model.blocks[1].up.weight.is_ramtorch


# ---------------------------------------------------------------------- Linear


def test_linear_is_a_linear_with_a_flag():
    torch.manual_seed(0)
    ours = ramtorch.Linear(6, 5, device="cuda")
    torch.manual_seed(0)
    plain = nn.Linear(6, 5)
    assert isinstance(ours, nn.Linear) and ramtorch.Linear.is_ramtorch and ours.weight.is_ramtorch
    assert ours.weight.device.type == "cpu" and same(ours.weight, plain.weight) and same(ours.bias, plain.bias)
    x = torch.randn(3, 6)
    assert same(ours(x), plain(x))
    assert ramtorch.Linear(6, 5, False, torch.float16, "cuda").bias is None
    torch.manual_seed(0)
    before = torch.get_rng_state()
    ramtorch.Linear(6, 5, skip_init=True)
    assert torch.equal(torch.get_rng_state(), before)


def test_linear_keeps_its_place_and_changes_its_dtype():
    layer = ramtorch.Linear(6, 5)
    weight = layer.weight
    assert layer.to("meta") is layer and layer.weight is weight and not weight.is_meta
    layer.to("meta", torch.bfloat16)
    assert layer.weight is weight and weight.dtype is torch.bfloat16 and not weight.is_meta
    assert weight.is_ramtorch and layer.float().weight.dtype is torch.float32
    with torch.device("meta"):
        parked = nn.Linear(2, 2)
    parked.__class__ = ramtorch.Linear
    assert not parked.to_empty(device="cpu").weight.is_meta


def test_a_model_of_such_layers_streams():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(ramtorch.Linear(48, 48, device="cuda") for _ in range(6))

        def forward(self, x):
            for block in self.blocks:
                x = F.gelu(block(x))
            return x

    model = made(Net)
    ref = aligned_copy(model)
    streamed(model, vram_budget=40000)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(4, 48)
            assert same(model(x), ref(x))
    assert runtime(model).stats["evictions"] > 0


# ---------------------------------------------------------------------- hooks


def test_custom_hooks_are_kept_in_order_and_numbered():
    tensor = torch.zeros(3)
    assert add_custom_hooks(tensor) is tensor and add_custom_hooks(tensor)._custom_hooks_counter == 0
    first = register_ramtorch_hook(tensor, "a", "_custom_hooks")
    second = register_ramtorch_hook(tensor, "b", "_custom_hooks")
    assert (first, second) == (0, 1) and isinstance(first, int)
    assert list(tensor._custom_hooks.items()) == [(0, "a"), (1, "b")]
    first.remove()
    first.remove()
    assert register_ramtorch_hook(tensor, "c", "_custom_hooks") == 2 and list(tensor._custom_hooks) == [1, 2]
    assert register_ramtorch_hook(tensor, "d", "_other") == 0


def test_gradient_hooks_fire_in_order_once_and_can_be_removed_by_number():
    model = streamed(made(Checkpointed, 4, 40, frozen=False))
    weight, calls = model.blocks[1].up.weight, []
    x = torch.randn(4, 40)
    model(x).sum().backward()
    plain, weight.grad = weight.grad, None

    def twice(grad):
        calls.append("twice")
        return 2 * grad

    def look(grad):
        calls.append("look")
        assert same(grad, 2 * plain)

    first = register_ramtorch_hook(weight, twice, "_ramtorch_backward_hooks")
    register_ramtorch_hook(weight, look, "_ramtorch_backward_hooks")
    register_ramtorch_hook(weight, lambda tensor: calls.append("after"), "_ramtorch_post_accumulate_grad_hooks")
    model(x).sum().backward()
    assert calls == ["twice", "look", "after"] and same(weight.grad, 2 * plain)
    weight._ramtorch_backward_hooks.pop(first)
    weight._ramtorch_backward_hooks.pop(1)
    weight.grad = None
    model(x).sum().backward()
    assert calls == ["twice", "look", "after", "after"] and same(weight.grad, plain)
    assert not hasattr(weight, "ramtorch_grad")


def test_hooks_on_all_parameters_flagged_or_not():
    model = streamed(made(Checkpointed, 4, 40, frozen=False))
    model.blocks[0].up.weight.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    flags = {getattr(p, "is_ramtorch", False) for p in trained}
    assert flags == {True, False}
    calls = []
    handles = register_ramtorch_grad_hook(model, lambda grad: calls.append("grad"))
    handles += register_ramtorch_post_accumulate_grad_hook(model, lambda tensor: calls.append("after"))
    assert len(handles) == 2 * len(trained)
    model(torch.randn(4, 40)).sum().backward()
    assert calls.count("grad") == calls.count("after") == len(trained)
    for handle in handles:
        handle.remove()
    model(torch.randn(4, 40)).sum().backward()
    assert len(calls) == 2 * len(trained)
    assert register_ramtorch_grad_hook(model, calls.append, ["no.such.name", "blocks.0.up.weight"]) == []


def test_a_failing_hook_fails_backward_and_leaves_nothing_behind():
    model = streamed(made(Checkpointed, 4, 40, frozen=False))
    weight = model.blocks[1].up.weight

    def fail(tensor):
        raise ValueError("on purpose")

    (handle,) = register_ramtorch_post_accumulate_grad_hook(model, fail, ["blocks.1.up.weight"])
    with pytest.raises(ValueError, match="on purpose"):
        model(torch.randn(4, 40)).sum().backward()
    assert not hasattr(weight, "ramtorch_grad")
    handle.remove()
    model(torch.randn(4, 40)).sum().backward()


def test_the_names_are_in_the_package_too():
    assert all(getattr(stagehand.compat, name) is getattr(ramtorch, name) for name in stagehand.compat.__all__)
