"""Tensors that programs put on the host or on a card, and the tensors on the other side that follow."""

from __future__ import annotations

import contextlib
import copy

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)

import torch.nn as nn  # noqa: E402
import torch.nn.utils.prune  # noqa: E402

import stagehand  # noqa: E402
from cuda_support import size_of, wrapped  # noqa: E402, F401

pytestmark = pytest.mark.alone


def stack(d=64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(d, d), nn.LayerNorm(d), nn.Tanh())))


def test_a_weight_on_the_card_whose_memory_has_gaps(wrapped):
    """`.cpu()` packs such a tensor, and its master keeps the strides."""
    model = nn.Sequential(nn.Linear(512, 256), stack(256))
    model[0].weight.data = torch.randn(256, 768, device="cuda")[:, 3:515]
    ref, x = copy.deepcopy(model).cuda(), torch.randn(8, 512, device="cuda")
    wrapped(model, vram_budget=2 * size_of(model))
    with torch.no_grad():
        out, want = model(x), ref(x)  # whose weight is aligned otherwise
        assert torch.allclose(out, want, rtol=0, atol=1e-4 * want.abs().max().item())
    assert model[0].weight.is_cpu and model[0].weight.stride() == (768, 1)
    assert torch.equal(model[0].weight, ref[0].weight.cpu())


@pytest.mark.parametrize("make", [
    lambda ps: torch.optim.Adagrad(ps, lr=0.01), lambda ps: torch.optim.AdamW(ps, lr=0.01),
    lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True), lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9)])
def test_an_optimizers_state_follows_weights_that_move(wrapped, make):
    """Made before the model is wrapped; it steps under management, after that, and under it again."""
    model, x = stack(), torch.randn(8, 64)
    ref = copy.deepcopy(model)
    optimizers = [make(list(net.parameters())) for net in (model, ref)]

    def steps(here):
        for _ in range(2):
            for net, optimizer, on in zip((model, ref), optimizers, (here, "cpu")):
                optimizer.zero_grad()
                net(x.to(on)).square().mean().backward()
                optimizer.step()
            for mine, theirs in zip(model.parameters(), ref.parameters()):
                assert torch.allclose(mine.cpu(), theirs, rtol=1e-3, atol=1e-4)

    for _ in range(2):
        wrapped(model, vram_budget=size_of(model))
        assert {param.device.type for param in model.parameters()} == {"cpu", "cuda"}
        steps("cuda")
        model._stagehand_layer_runtime.shutdown()
        steps("cpu")


def test_functional_calls_are_given_tensors_that_were_made_from_masters(wrapped):
    model, x = stack(), torch.randn(8, 64, device="cuda")
    ref = copy.deepcopy(model).cuda()
    wrapped(model, vram_budget=size_of(model))
    outs, grads = [], []
    for net in (model, ref):
        halves = {name: (param.detach() * 0.5).requires_grad_() for name, param in net.named_parameters()}
        given = dict(halves)
        devices = [value.device for value in given.values()]
        outs.append(torch.func.functional_call(net, halves, (x,)))
        outs[-1].square().mean().backward()
        assert all(halves[name] is value for name, value in given.items())
        assert [value.device for value in given.values()] == devices == [value.grad.device for value in given.values()]
        grads.append([value.grad.cpu() for value in given.values()])
    assert torch.equal(*outs)
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(*grads))
    assert torch.equal(model(x), ref(x))


def in_place(param):
    with torch.no_grad():
        param.mul_(0.5)


def without_a_trace(param):
    param.data.copy_(param.data * 0.5)


def given(param):
    param.data = param.data * 0.5


@pytest.mark.parametrize("write", [in_place, without_a_trace, given])
@pytest.mark.parametrize("mode", ["layer", "block", "parts"])
@pytest.mark.parametrize("frozen", [True, False])
def test_weights_that_are_written_behind_a_pass_are_not_in_it(wrapped, write, mode, frozen):
    """The host runs ahead: the pass's copies are still to come when its call returns, and the write is on the host."""
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(12))).requires_grad_(not frozen)
    ref, x = copy.deepcopy(model).cuda(), torch.randn(4, 512, device="cuda")
    runtime = None
    if mode == "block":
        config = stagehand.StagehandConfig(vram_budget=size_of(model) // 3)
        runtime = stagehand.StagehandRuntime(model, config, block_pattern=r"^\d+$")
    else:
        wrapped(model, vram_budget=size_of(model) // 3)
    for _ in range(4):
        outs = []
        for net in (model, ref):
            with torch.no_grad():
                torch.cuda._sleep(20_000_000)
                if mode == "parts":
                    out = x
                    for layer in net:
                        out = layer(out)
                else:
                    out = net(x)
            for param in net.parameters():
                write(param)
            outs.append(out)
        assert torch.equal(*outs)
    if runtime is not None:
        runtime.shutdown()


def pruned(layer) -> None:
    nn.utils.prune.l1_unstructured(layer, "weight", 0.3)


@pytest.mark.parametrize("put", [nn.utils.weight_norm, nn.utils.spectral_norm, pruned])
def test_norms_and_masks_are_removed_where_masters_are(wrapped, put):
    """Some of what they compute a weight from streams, and some stays on the card."""
    nets = []
    for _ in range(2):
        torch.manual_seed(0)
        nets.append(nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))))
        for layer in nets[-1][1:3]:
            put(layer)
    model, ref, x = nets[0], nets[1].cuda(), torch.randn(4, 256, device="cuda")
    wrapped(model, vram_budget=size_of(model) * 2 // 3)
    for remove in (lambda layer: None, _removed, lambda layer: None):
        for net in (model, ref):
            net.eval()
            remove(net[1])
        with torch.no_grad():
            assert torch.allclose(model(x), ref(x), rtol=1e-4, atol=1e-5)


def _removed(layer) -> None:
    for name in ("weight_norm", "spectral_norm"):
        with contextlib.suppress(ValueError):
            getattr(nn.utils, "remove_" + name)(layer)
    if nn.utils.prune.is_pruned(layer):
        nn.utils.prune.remove(layer, "weight")


@pytest.mark.parametrize("block", [False, True])
def test_averages_that_were_taken_before_wrapping_are_swapped_in_and_out(wrapped, block):
    """Their tensors are on the host, and some of the weights that they replace stay on the card."""
    model, x = stack(256), torch.randn(4, 256, device="cuda")
    ref, halves = copy.deepcopy(model).cuda(), [param.detach() * 0.5 for param in model.parameters()]
    runtime = None
    if block:
        config = stagehand.StagehandConfig(vram_budget=size_of(model))
        runtime = stagehand.StagehandRuntime(model, config, block_pattern=r"^(0|3|6)$")
    else:
        wrapped(model, vram_budget=size_of(model) * 2 // 3)
    for _ in range(3):
        kept = [[param.data for param in net.parameters()] for net in (model, ref)]
        outs = []
        for net in (model, ref):
            for param, half in zip(net.parameters(), halves):
                param.data = half.clone() if net is model else half.cuda()
            with torch.no_grad():
                outs.append(net(x))
        for net, data in zip((model, ref), kept):
            for param, mine in zip(net.parameters(), data):
                param.data = mine
            with torch.no_grad():
                outs.append(net(x))
        assert torch.equal(*outs[:2]) and torch.equal(*outs[2:])
    if runtime is not None:
        runtime.shutdown()
