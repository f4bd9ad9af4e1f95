"""Modules that may read weights of modules inside them: when hooks for saved tensors stand round their calls."""

import contextlib

import pytest
import torch
from support import aligned_copy, nbytes, runtime, same, wrap
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from stagehand._torch import top_hooks
from stagehand.weights.saved import Saver

WIDTH = 32


class Reader(nn.Module):
    """what: a function of the module and its input. Its code reads the weight as PEFT's do when they merge."""

    what = None

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False)
        self.add = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.what(x) if self.what is not None else self.add(self.base(x))

    def merge(self):
        return self.base.weight + self.add.weight


class Model(nn.Module):
    def __init__(self, count=6):
        super().__init__()
        self.parts = nn.ModuleList(Reader() for _ in range(count))
        self.end = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        for part in self.parts:
            x = torch.tanh(part(x)) + x
        return self.end(x)


@pytest.fixture
def pair():
    """A managed model with room for half of its weights, and a plain twin."""
    torch.manual_seed(5)
    model = Model().requires_grad_(False)
    ref = aligned_copy(model)
    wrap(model, nbytes(model) // 2)
    for part in model.parts:
        part.forward.reads = 1
    return model, ref


def trained(model, x):
    x = x.clone().requires_grad_()
    out = model(x)
    out.square().sum().backward()
    return [out, x.grad]


def saves() -> bool:
    """Whether a pair of ours is in force here."""
    top = top_hooks(True)
    return top is not None and type(top[0]) is Saver


def each(models, what) -> None:
    for model in models:
        for part in model.parts:
            part.what = what.__get__(part)


def leased(model) -> int:
    return runtime(model).stats["leased_bytes"]


def test_a_module_that_may_read_and_does_not_has_no_hooks(pair):
    model, x, stood = pair[0], torch.randn(3, WIDTH), []

    def no_read(self, x):
        stood.append(saves())
        return self.add(torch.sin(self.base(x)))

    each(pair, no_read)
    for _ in range(3):
        assert same(trained(model, x), trained(pair[1], x))
    assert not any(stood)


def test_hooks_stand_from_the_first_read_to_the_end_of_the_call(pair):
    model, x, stood = pair[0], torch.randn(3, WIDTH), []

    def read(self, x):
        before = saves()
        x = F.linear(x, self.base.weight)
        stood.append((before, saves()))
        return torch.tanh(F.linear(x, self.add.weight))

    each([model], read)
    x.requires_grad_()
    out = model(x)
    assert not saves() and stood == [(False, True)] * 6
    assert leased(model) == 0, "saved weights are leases"
    each([pair[1]], read)
    assert same(out, pair[1](x))
    assert same(trained(model, x.detach()), trained(pair[1], x.detach()))


def test_a_weight_that_was_read_without_gradients_is_a_handle(pair):
    model, x = pair[0], torch.randn(3, WIDTH, requires_grad=True)

    def read(self, x):
        with torch.no_grad():
            weight = self.base.weight
        return F.linear(x, weight)

    each(pair, read)
    out = model(x)
    assert leased(model) == 0
    assert same(out, pair[1](x)) and same(trained(model, x.detach()), trained(pair[1], x.detach()))


def test_hooks_that_end_before_the_call_are_not_lost(pair):
    """The pair is not put up on top of another one that the forward takes away; later calls have it from the begin."""
    model, x, packed = pair[0], torch.randn(3, WIDTH), []

    def pack(tensor):
        packed.append(tensor.shape)
        return tensor.clone()

    def read(self, x):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            weight = self.base.weight
            x = torch.sin(x)
        return torch.tanh(F.linear(x, weight))

    each(pair, read)
    for number in range(3):
        packed.clear()
        ours, count = trained(model, x), len(packed)
        packed.clear()
        assert same(ours, trained(pair[1], x)) and count == len(packed) == 6
        assert top_hooks(True) is None
        assert 2 in {part.forward.reads for part in model.parts}
    for part in model.parts:
        part.forward.reads = 2
    out = model(x.requires_grad_())
    assert leased(model) == 0
    del out


def test_a_weight_that_was_leased_before_is_a_handle_in_a_reader(pair):
    model, x, held = pair[0], torch.randn(3, WIDTH, requires_grad=True), []
    first = pair[0].parts[0], pair[1].parts[0]

    def begin(self, x):
        held.append(self.base.weight)
        return self.base(x)

    each(pair, lambda self, x: F.linear(x, held[-1]))
    for part in first:
        part.what = begin.__get__(part)
    outs = []
    for one in pair:
        outs.append(one(x))
        held.clear()
    with torch.no_grad():
        model.end(x)  # notices leases that have ended
    assert same(*outs) and leased(model) == 0
    assert same(*(torch.autograd.grad(out.sum(), x)[0] for out in outs))


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_hooks_are_gone_behind_a_call_that_failed(pair, error):
    model, x = pair[0], torch.randn(3, WIDTH, requires_grad=True)

    def fails(self, x):
        x = F.linear(x, self.base.weight)
        raise error("as told")

    each([model], fails)
    with pytest.raises(error, match="as told"):
        model(x)
    assert top_hooks(True) is None
    each(pair, Reader.forward)
    for part in [*model.parts, *pair[1].parts]:
        part.what = None
    assert same(trained(model, x.detach()), trained(pair[1], x.detach()))


def test_a_module_that_opts_out_has_no_hooks(pair):
    model, x, stood = pair[0], torch.randn(3, WIDTH, requires_grad=True), []
    each([model], lambda self, x: (x @ self.base.weight, stood.append(saves()))[0])
    for part in model.parts:
        part.stagehand_saved_handles = False
    with contextlib.suppress(Exception):  # leases need not fit
        model(x)
    assert stood and not any(stood)


def test_an_error_of_hooks_says_what_to_do(pair):
    model, x = pair[0], torch.randn(3, WIDTH, requires_grad=True)

    def disables(self, x):
        x = F.linear(x, self.base.weight)
        with torch.autograd.graph.disable_saved_tensors_hooks("no saved tensor hooks here"):
            return x

    each([model], disables)
    with pytest.raises(RuntimeError, match="stagehand_saved_handles = False"):
        model(x)
    assert top_hooks(True) is None


def test_readers_inside_checkpoints_give_the_plain_models_numbers(pair):
    model, x = pair[0], torch.randn(3, WIDTH)

    def read(self, x):
        return torch.tanh(self.base(x)) @ self.add.weight

    each(pair, read)

    def run(one):
        inp, out = x.clone().requires_grad_(), None
        for part in one.parts:
            out = checkpoint(part, inp if out is None else out, use_reentrant=False)
        out.square().sum().backward()
        return [out, inp.grad]

    for _ in range(3):
        assert same(run(model), run(pair[1]))
