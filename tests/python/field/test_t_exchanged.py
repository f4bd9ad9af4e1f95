"""Weights that are exchanged during a pass, and put back: the module has its Parameter again, which streams."""

from __future__ import annotations

import contextlib
import gc

import pytest
import support as s
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrize, stateless

import stagehand

D = 64


class Ways:
    """What a parent does to its child `l` in a forward; each puts back what was there."""

    @staticmethod
    def functional(l, x):
        return functional_call(l, {"weight": l.weight * 0.5}, (x,))

    @staticmethod
    def functional_of_both(l, x):
        return functional_call(l, {name: p * 0.5 for name, p in l.named_parameters()}, (x,))

    @staticmethod
    def functional_inside_functional(l, x):
        return functional_call(l, {"weight": l.weight * 0.5}, (Ways.functional(l, x),))

    @staticmethod
    def with_the_same(l, x):
        return functional_call(l, {"weight": l.weight}, (x,))

    @staticmethod
    def stateless(l, x):
        return stateless.functional_call(l, {"bias": l.bias * 3}, (x,))

    @staticmethod
    def item(l, x):
        kept = l._parameters["weight"]
        l._parameters["weight"] = nn.Parameter(torch.ones_like(kept) / D, requires_grad=False)
        y = l(x)
        l._parameters["weight"] = kept
        return y + l(x)

    @staticmethod
    def update(l, x):
        kept = dict(l._parameters.items())
        l._parameters.update(weight=l.weight.detach() * 0.25)
        y = l(x)
        l._parameters.update(kept)
        return y

    @staticmethod
    def delete(l, x):
        kept, half = l.weight, l.weight * 0.5
        del l.weight
        l.weight = half
        y = l(x)
        del l.weight
        l.weight = kept
        return y + l(x)

    @staticmethod
    def registered(l, x):
        kept = l.weight
        del l.weight
        l.register_parameter("weight", kept)
        return l(x)


WAYS = [name for name in vars(Ways) if not name.startswith("_")]


class Exchanging(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.l = nn.Linear(D, D)
        self.way = way

    def forward(self, x):
        return x + getattr(Ways, self.way)(self.l, x)


def row(way, trained=True):
    torch.manual_seed(0)
    with torch.device("cpu"):
        model = nn.Sequential(nn.Linear(D, D), Exchanging(way), Exchanging(way), nn.Linear(D, D))
    return model.requires_grad_(trained)


def at_rest(model, params: dict) -> None:
    """The same Parameters are in place; deleting one and setting it again moves it to the end."""
    found = dict(model.named_parameters())
    assert found.keys() == params.keys() and all(found[name] is params[name] for name in found)
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert all(p.is_cpu for p in model.parameters() if p.dim() > 1)  # biases are on the device


def step(net, x, optimizer):
    out = net(x)
    loss = (out - x.to(out)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach().clone()


@pytest.mark.combinations("each may be the only test of a fault")
@pytest.mark.parametrize("budget", [100_000, 1_000_000])
@pytest.mark.parametrize("way", WAYS)
def test_201_a_weight_that_is_taken_out_and_put_back_trains(way, budget):
    model = row(way)
    ref, params = s.aligned_copy(model), dict(model.named_parameters())
    s.wrap(model, budget)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.5) for net in (model, ref)]
    for _ in range(4):
        x = torch.randn(3, D)
        assert s.same(step(model, x, optimizers[0]), step(ref, x, optimizers[1]))
        at_rest(model, params)
    s.runtime(model).shutdown()
    at_rest(model, params)
    assert s.same(list(model.parameters()), list(ref.parameters()))


@pytest.mark.combinations("each may be the only test of a fault")
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("way", WAYS)
def test_201_leases_of_such_weights_end_in_inference(way, context):
    model = row(way, trained=False)
    ref, params = s.aligned_copy(model), dict(model.named_parameters())
    s.wrap(model, 60_000)  # a lease that did not end would be in the way of later passes
    for _ in range(6):
        x = torch.randn(3, D)
        with context():
            assert s.same(model(x), ref(x))
        at_rest(model, params)


@pytest.mark.parametrize("way", WAYS)
def test_201_an_exception_while_it_is_out_leaves_the_model_as_it_was(way):
    model = row(way, trained=False)
    ref, params = s.aligned_copy(model), dict(model.named_parameters())
    s.wrap(model, 100_000)
    x = torch.randn(3, D)
    for net in (model, ref):
        hook = net[2].l.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError), torch.no_grad():
            net(x)
        hook.remove()
    if way in ("functional", "functional_of_both", "functional_inside_functional", "with_the_same", "stateless"):
        at_rest(model, params)  # the others do not put back what they took
        with torch.no_grad():
            assert s.same(model(x), ref(x))


class Parametrizing(nn.Module):
    """As PEFT's adapters of `target_parameters` do. delta: what is added to the child's frozen weight."""

    class Add(nn.Module):
        def __init__(self, delta):
            super().__init__()
            self.delta = delta

        def forward(self, weight):
            return weight + self.delta

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(D, D).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(4, D) / 9), nn.Parameter(torch.randn(D, 4) / 9)

    def forward(self, x):
        parametrize.register_parametrization(self.base, "weight", self.Add(self.b @ self.a))
        try:
            return torch.tanh(self.base(x))
        finally:
            parametrize.remove_parametrizations(self.base, "weight", leave_parametrized=False)


@pytest.mark.parametrize("trained", [True, False])
def test_216_a_parent_parametrizes_its_childs_frozen_weight_in_each_forward(trained):
    torch.manual_seed(0)
    with torch.device("cpu"):
        model = nn.Sequential(*[Parametrizing() for _ in range(4)])
    ref = s.aligned_copy(model)
    s.wrap(model, 100_000)
    for _ in range(3):
        x = torch.randn(3, D)
        with contextlib.nullcontext() if trained else torch.no_grad():
            mine, theirs = model(x), ref(x)
            assert s.same(mine, theirs)
        if trained:
            for net, out in ((model, mine), (ref, theirs)):
                net.zero_grad()
                out.square().sum().backward()
            assert s.same([p.grad for p in model.parameters() if p.requires_grad],
                          [p.grad for p in ref.parameters() if p.requires_grad])
        del mine, theirs
    assert type(model[0].base.weight) is nn.Parameter and type(model[0].base) is nn.Linear


class Writing(nn.Module):
    """Writes its child's weight in its forward: the same bits, or others."""

    def __init__(self, factor):
        super().__init__()
        self.l = nn.Linear(D, D).requires_grad_(False)
        self.factor = factor

    def forward(self, x):
        with torch.no_grad():
            self.l.weight.copy_(self.l.weight * self.factor)
        return self.l(x)


def test_216_the_same_bits_are_no_write_and_others_are_an_error():
    for factor in (1.0, 2.0):
        torch.manual_seed(0)
        with torch.device("cpu"):
            model = nn.Sequential(Writing(factor), nn.Linear(D, D), nn.Linear(D, D)).requires_grad_(False)
        ref = s.aligned_copy(model)
        s.wrap(model, 60_000)
        x = torch.randn(3, D)
        with torch.no_grad():
            if factor == 1.0:
                for _ in range(3):
                    assert s.same(model(x), ref(x))
            else:
                with pytest.raises(stagehand.StagehandError, match="0.l.weight was written during a pass"):
                    model(x)
        gc.collect()
