"""Field cases W: modes of the caller's, and several threads at once."""

from __future__ import annotations

import contextlib
import copy

import children
import file_support as f
import pytest
import quant_models as q
import support as s
import torch
from pairs import ends as ends  # noqa: PLC0414: a fixture
from pairs import pair
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from worlds import BLOCKS, Checkpointed, managed, run

import stagehand
from stagehand import activation

# ---------------------------------------------------------------------- 209: what modes of the caller's see


class Operators(TorchDispatchMode):
    """Names of the operators that it sees, with the shapes that they are given."""

    supports_higher_order_operators = True

    def __init__(self):
        super().__init__()
        self.log = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.log.append((str(func), *(tuple(a.shape) for a in args if isinstance(a, torch.Tensor))))
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """Names of the functions that it sees; of attributes that are read, too."""

    def __init__(self):
        super().__init__()
        self.log = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__qualname__", str(func))
        self.log.append((func.__self__.__name__ if name.startswith("getset_descriptor") else name,))
        return func(*args, **(kwargs or {}))


def seen(do, *args):
    """(operators, functions) that modes round do(*args) see."""
    with Operators() as operators, Functions() as functions:
        do(*args)
    return operators.log, functions.log


def alike(got, want):
    """The same operators or functions in the same order. Gradients of one operator may be accumulated in any order."""
    assert want, "nothing was seen"
    assert [name for name, *_ in got] == [name for name, *_ in want]
    assert sorted(got) == sorted(want)


def same_seen(do, model, ref, *args):
    """Modes see the same of do(model, *args) and do(ref, *args)."""
    got, want = seen(do, model, *args), seen(do, ref, *args)
    alike(got[0], want[0])
    if not any(isinstance(part, nn.RNNBase) for part in ref.modules()):  # it looks at each weight that is new to it
        alike(got[1], want[1])


def infer(net, *inputs):
    with torch.no_grad():
        net(*inputs)


def train(net, *inputs):
    out = net(*inputs)
    out = out[0] if isinstance(out, tuple) else out
    out.float().pow(2).sum().backward()


def train_in_parts(net, *inputs):
    """Each part under modes of its own: what is begun under some may end under others, or none."""
    logs = []
    with Operators() as forward:
        out = net(*inputs)
    loss = out.float().pow(2).sum()
    with Operators() as backward, Functions() as functions:
        loss.backward()
    logs += [forward.log, backward.log, functions.log]
    return logs


def clear(*nets):
    for net in nets:
        for param in net.parameters():
            param.grad = None


class Strided(s.Stack):
    """Reads its parts' weights in unusual ways."""

    def forward(self, x):
        x = self.inp(x) + self.out.weight[0] * self.blocks[0].up.bias[: x.shape[-1]]
        for block in self.blocks:
            x = block(x) + block.down.weight.data.sum() * 1e-3
        return nn.functional.linear(x, self.out.weight.t(), self.out.bias.detach())


TIGHT = (s.Stack, s.TinyLM, Strided)
BUILDS = [*TIGHT, s.ConvNet, s.AttentionNet, s.NormedNet, s.Experts, s.RecurrentNet]


@pytest.mark.parametrize("mode", ["layer", "block"])
@pytest.mark.parametrize("build", BUILDS)
def test_209_modes_see_what_they_see_of_the_plain_model(build, mode):
    if mode == "block" and not hasattr(s.made(build), "blocks"):
        pytest.skip("it has no blocks")
    for frozen in (False, True):
        budget = None if build in TIGHT else s.nbytes(s.made(build)) + 65536
        model, ref = managed(build, frozen=frozen, mode=mode, link=None, budget=budget)
        x = model.example()
        for _ in range(3):
            same_seen(infer, model, ref, *x)
        if not frozen:
            for _ in range(2):
                same_seen(train, model, ref, *x)
                for got, want in zip(train_in_parts(model, *x), train_in_parts(ref, *x)):
                    alike(got, want)
                clear(model, ref)
        run(model).shutdown()
        same_seen(infer, model, ref, *x)


