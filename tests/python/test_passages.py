"""Parts that a backward computes again: what the pass of such a part looks at when it begins and ends."""

from collections import OrderedDict, namedtuple

import card
import pytest
import torch
from support import aligned_copy, nbytes, runtime, same, torch_at_least, wrap
from torch import nn
from torch.utils.checkpoint import checkpoint

import stagehand
from stagehand._torch import top_hooks
from stagehand.session.session import may_be_on_host
from stagehand.weights.hooks import Frame
from stagehand.weights.saved import Saver, in_backward

WIDTH = 32


class Part(nn.Module):
    """before: called with the part where a backward computes it again."""

    before = None

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH, bias=False)
        self.b = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        if self.before is not None and in_backward():
            self.before()
        return self.b(torch.tanh(self.a(x)))


class Model(nn.Module):
    """What its checkpoints compute again is a function, which calls a part: each call of a part is a pass."""

    def __init__(self, count=6):
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(count))
        self.at = None

    def forward(self, x):
        for i, part in enumerate(self.parts):
            x = checkpoint(self.run, part, i, x, use_reentrant=False)
        return x

    def run(self, part, i, x):
        if self.at is not None and in_backward():
            self.at(i)
        return torch.sin(part(x)) + x


@pytest.fixture
def pair():
    torch.manual_seed(5)
    model = Model().requires_grad_(False)
    ref = aligned_copy(model)
    wrap(model, nbytes(model) // 2)
    return model, ref


def trained(model):
    x = torch.ones(3, WIDTH, requires_grad=True, device=card.TORCH)
    out = model(x)
    out.square().sum().backward()
    return [out, x.grad]


def steps_of(model, monkeypatch):
    """A list that gets an item where a pass begins with nothing to look at."""
    steps, quiet = runtime(model).session.steps, []
    before = steps._computes_again
    monkeypatch.setattr(type(steps), "_computes_again", lambda self: (quiet.append(before()), quiet[-1])[1])
    return quiet


def test_most_parts_that_are_computed_again_have_nothing_to_look_at(pair, monkeypatch):
    model, ref = pair
    quiet = steps_of(model, monkeypatch)
    for _ in range(3):
        assert same(trained(model), trained(ref))
    assert quiet.count(True) >= 15 and len(quiet) == 18, quiet


def test_a_write_from_outside_in_a_part_that_is_computed_again_is_refused(pair):
    model, _ = pair

    def write():
        with torch.no_grad():
            model.parts[4].a.weight.mul_(2.0)

    trained(model)
    model.parts[2].before = write
    with pytest.raises(stagehand.StagehandError, match=r"parts\.4\.a\.weight was written during a pass"):
        trained(model)
    model.parts[2].before = None
    assert same(trained(model), trained(pair[1]))


def test_what_an_interrupt_has_left_is_gone_in_a_part_that_is_computed_again(pair):
    model, ref = pair
    session = runtime(model).session
    plan = session.plans[id(model.parts[3].a)]
    found = []

    def leave(i):
        if i == 3:
            frame = Frame()
            frame["weight"] = nn.Parameter(torch.full((WIDTH, WIDTH), 7.0), requires_grad=False)
            session.local.frames[plan] = frame

    model.parts[3].before = lambda: found.append(dict(session.local.frames))
    model.at = leave
    assert same(trained(model), trained(ref))
    assert found == [{}]


def test_hooks_that_an_interrupt_has_left_are_gone_in_a_part_that_is_computed_again(pair):
    model, ref = pair
    session, found = runtime(model).session, []

    def leave(i):
        if i == 3:
            Saver(session)

    model.parts[3].before = lambda: found.append(type(top_hooks(True)[0]) is Saver)
    model.at = leave
    assert same(trained(model), trained(ref))
    assert found == [False]


@torch_at_least("2.13", "Tensor.detach() is two operators, and modes see `detach` at other times")
def test_a_dispatch_mode_sees_the_operators_of_the_plain_model_in_a_part_that_is_computed_again(pair):
    class Names(torch.utils._python_dispatch.TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    seen = []
    for one in pair:
        trained(one)
        with Names() as mode:
            trained(one)
        seen.append(mode.names)
    assert seen[0] == seen[1]


def test_inputs_are_walked_through_where_a_tensor_may_be_on_the_host():
    away, here, named = torch.empty(2, device="meta"), torch.empty(2), namedtuple("Named", "x")
    for value in (away, None, 3, "text", torch.float16, (away, [away, {"x": away}]), ((), {}), nn.Parameter(away)):
        assert not may_be_on_host(value), value
    for value in (here, nn.Parameter(here), (away, here), [away, {"x": (here,)}], ((away,), {"x": here}),
                  named(away), {1}, object(), OrderedDict(x=away)):
        assert may_be_on_host(value), value
