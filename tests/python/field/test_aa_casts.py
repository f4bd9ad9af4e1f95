"""Section AA of docs/field-cases.md: weights that hooks cast or compute, and casts that autocast keeps."""

import contextlib

import pytest
import support as s
import torch
from torch import nn

import stagehand

FP8 = torch.float8_e4m3fn
SLOW = 1e8  # bytes/s: a missing wait shows


class Blocks(nn.Module):
    """Linears of one size under modules of their own, a norm with buffers, a table."""

    def __init__(self, d=48, blocks=3):
        super().__init__()
        self.table = nn.Embedding(40, d)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(d, 2 * d), nn.Tanh(), nn.Linear(2 * d, d)) for _ in range(blocks))
        self.norm = nn.BatchNorm1d(d)
        self.out = nn.Linear(d, d, bias=False)

    def forward(self, x):
        x = self.table(x).float()
        for block in self.blocks:
            x = x + block(x)
        return self.out(self.norm(x))

    def example(self):
        return (torch.randint(0, 40, (5,)),)


def leaves(model):
    return [m for m in model.modules() if isinstance(m, (nn.Linear, nn.Embedding))]


def cast_by_hooks(modules, storage, compute, way=nn.Module.to, now=True):
    """Hooks as diffusers' layerwise casting has them."""
    for module in modules:
        if now:
            way(module, storage)
        module.register_forward_pre_hook(lambda m, args: way(m, compute) and None)
        module.register_forward_hook(lambda m, args, out: way(m, storage) and None)


def by_data(module, dtype):
    for p in module.parameters():
        p.data = p.data.to(dtype)
    return module


def by_attribute(module, dtype):
    for part in module.modules():
        if isinstance(part, (nn.Linear, nn.Embedding)):
            part.weight.data = part.weight.data.to(dtype)
            if getattr(part, "bias", None) is not None:
                part.bias.data = part.bias.data.to(dtype)
    return module


WAYS = {
    "to": nn.Module.to,
    "type": nn.Module.type,
    "named": lambda m, dtype: {torch.float32: m.float, torch.bfloat16: m.bfloat16, torch.float16: m.half}[dtype](),
    "data": by_data,
    "attribute": by_attribute,
}


def managed(model, mode="layer", share=0.5, **options):
    budget = max(int(share * s.nbytes(model)), s.smallest_budget(model))
    if mode == "layer":
        return s.wrap(model, budget, SLOW, **options)
    config = stagehand.StagehandConfig(vram_budget=budget)
    stagehand.StagehandRuntime(model, config, block_pattern=r"^blocks\.\d+$", device=s.device(budget, SLOW),
                               **options).prepare()
    return model


def run(model):
    return model.__dict__.get("_stagehand_layer_runtime") or model._stagehand_runtime


def same_state(model, ref):
    got, want = model.state_dict(), ref.state_dict()
    assert list(got) == list(want)
    for name in want:
        assert got[name].dtype is want[name].dtype and s.same(got[name], want[name]), name


def same_passes(model, ref, passes=3):
    with torch.no_grad():
        for _ in range(passes):
            x = ref.example()
            assert s.same(model(*x), ref(*x))


def same_training(model, ref, steps=3, lr=0.1, passes=1):
    optimizers = [torch.optim.SGD(net.parameters(), lr=lr) for net in (model, ref)]
    for _ in range(steps):
        xs = [ref.example() for _ in range(passes)]
        for net, optimizer in zip((model, ref), optimizers):
            optimizer.zero_grad()
            sum(net(*x).pow(2).sum() for x in xs).backward()
        for (name, p), q in zip(model.named_parameters(), ref.parameters()):
            assert (p.grad is None) == (q.grad is None), name
            assert p.grad is None or (p.grad.dtype is q.grad.dtype and s.same(p.grad, q.grad)), name
        for optimizer in optimizers:
            optimizer.step()
    same_state(model, ref)


def both(prepare, build=Blocks, mode="layer", before=True, frozen=False, **options):
    """(model under stagehand, reference); prepare: done to both, to the model before it is wrapped or after."""
    model = s.made(build, frozen=frozen)
    ref = s.aligned_copy(model)
    prepare(ref)
    if before:
        prepare(model)
    managed(model, mode, **options)
    if not before:
        prepare(model)
    return model, ref


# ---------------------------------------------------------------------- 217


@pytest.mark.parametrize("mode", ["layer", "block"])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("way", ["to", "type", "data", "attribute"])
def test_217_layers_cast_by_hooks_run(way, before, mode):
    model, ref = both(lambda m: cast_by_hooks(leaves(m), FP8, torch.float32, WAYS[way]), mode=mode, before=before)
    same_passes(model, ref)
    same_state(model, ref)
    units = run(model).stats["units"]
    assert units and run(model).stats["h2d_bytes"] > 0


@pytest.mark.parametrize("mode", ["layer", "block"])
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float16])
def test_217_layers_cast_by_hooks_train(way, storage, mode):
    def prepare(m):
        cast_by_hooks(leaves(m), storage, torch.float32, WAYS[way])

    model, ref = both(prepare, mode=mode)
    same_training(model, ref)


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("train", [True, False])
def test_217_casts_that_round(way, train):
    def prepare(m):
        cast_by_hooks(leaves(m), torch.float32, torch.bfloat16, WAYS[way])

    class Half(Blocks):
        def forward(self, x):
            x = self.table(x)
            for block in self.blocks:
                x = block(x.to(torch.bfloat16))
            return x.float()

    model, ref = both(prepare, Half)
    (same_training if train else same_passes)(model, ref)
    same_state(model, ref)
