"""For the cases here: a wrapped model beside its reference, what must be the same of the two, and what needs a card."""

import contextlib
import weakref

import pytest
import support as s
import torch
from torch import nn

import stagehand

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
_wrapped = []  # weakrefs of models


def pair(build, *args, budget=s.tight_budget, link=None, frozen=False, prepare=None, options=None, **kwargs):
    """(model, reference). The model is wrapped in layer mode with budget(model) bytes, or a number. prepare: done to
    both before."""
    model = s.made(build, *args, frozen=frozen, **kwargs)
    if prepare is not None:
        prepare(model)
    ref = s.aligned_copy(model)
    managed(model, budget(model) if callable(budget) else budget, link, **(options or {}))
    return model, ref


class Row(nn.Module):
    """Blocks one after the other, with tanh behind each. shape: of an input."""

    def __init__(self, blocks, *shape):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.shape = shape

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x

    def example(self):
        return (torch.randn(self.shape),)


class Shrinking(nn.Linear):
    """Writes its weight before it uses it."""

    factor = 0.9

    def forward(self, x):
        with torch.no_grad():
            self.weight.mul_(self.factor)
        return super().forward(x)


class ShrinkingData(nn.Linear):
    """The same by `.data`, which has a version of its own in PyTorch."""

    def forward(self, x):
        self.weight.data.mul_(0.9)
        return super().forward(x)


def managed(model, budget, link=None, **options):
    """`support.wrap`, shut down at the end of the test by the fixture `ends`."""
    _wrapped.append(weakref.ref(s.wrap(model, budget, link, **options)))
    return model


@pytest.fixture(autouse=True)
def ends():
    """Shuts down what a test has wrapped, also where the test failed."""
    yield
    while _wrapped:
        model = _wrapped.pop()()
        if model is not None and "_stagehand_layer_runtime" in model.__dict__:
            s.runtime(model).shutdown()


def blocks(model, budget=None, pattern=r"^blocks\.\d+$", device=None, config=None, **options):
    """A StagehandRuntime over the model, on a simulated device of exactly the budget."""
    budget = s.tight_budget(model) if budget is None else budget
    device = device if device is not None else s.device(budget)
    config = stagehand.StagehandConfig(vram_budget=budget, **(config or {}))
    return stagehand.StagehandRuntime(model, config, block_pattern=pattern, device=device, **options)


def within(model, budget):
    """Whether places and what stays have kept within the budget since wrapping."""
    stats = s.runtime(model).stats
    return stats["device_peak"] + stats["reserved_bytes"] <= budget


def agree(model, ref, steps=3, guard=True, inputs=None):
    """Outputs without gradients are bit-equal, and no operator reads a host master."""
    with torch.no_grad():
        for _ in range(steps):
            x = model.example() if inputs is None else inputs
            with s.HostMasterGuard(model) if guard else contextlib.nullcontext():
                got = model(*x)
            assert s.same(got, ref(*x))


def same_grads(model, ref):
    for (name, mine), (_, theirs) in zip(model.named_parameters(), ref.named_parameters()):
        assert (mine.grad is None) == (theirs.grad is None), name
        assert mine.grad is None or s.same(mine.grad, theirs.grad), name


def same_weights(model, ref):
    ours, theirs = model.state_dict(), ref.state_dict()
    assert list(ours) == list(theirs)
    for name, value in ours.items():
        assert s.same(value, theirs[name]), name


def both(model, ref, do):
    """[do(model), do(ref)]: a value each, or the exception."""
    results = []
    for net in (model, ref):
        try:
            results.append(do(net))
        except Exception as error:  # noqa: BLE001: the reference says what is right, errors too
            results.append(error)
    return results


def close(got, want, absolute=1e-5, relative=1e-4):
    """Tolerance of float32 on a card with TF32 off."""
    error = (got - want).abs().max().item()
    assert error <= absolute + relative * want.abs().max().item(), f"largest error {error}"
