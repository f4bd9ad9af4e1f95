"""Field cases, section E: order of calls, repetition, branches."""

import random
import warnings

import pytest
import support as s
import torch
from pairs import agree, ends, managed, pair, same_grads, same_weights, within  # noqa: F401
from torch import nn
from torch.nn import functional as F

import stagehand

LINK = 3e8  # bytes/s


def test_33_another_order_than_that_of_registration_trains_too():
    """test_layer.py has the same without gradients."""
    model, ref = pair(s.Crossed, budget=lambda m: s.nbytes(m) // 3, link=LINK)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.05) for net in (model, ref)]
    for step in range(5):
        x = model.example()[0]
        for net, optimizer in zip((model, ref), optimizers):
            optimizer.zero_grad()
            net(x).pow(2).sum().backward()
            optimizer.step()
        same_grads(model, ref)
        stats = s.runtime(model).stats
        if step > 1:  # the order has been seen: nothing is fetched because it is asked for
            assert (stats["demand_loads"], stats["deviations"]) == before
        before = stats["demand_loads"], stats["deviations"]
    same_weights(model, ref)


@pytest.mark.parametrize("unit", ["expert", "layer"])
def test_35_experts_that_depend_on_the_data(unit):
    """Idle experts keep no gradient, and a step fetches no more than it uses: forward and backward may each fetch."""
    model = s.made(s.Experts, 32, 4, 6, frozen=False)
    ref = s.aligned_copy(model)
    if unit == "expert":
        managed(model, s.nbytes(model) // 3, LINK)
        runtime = s.runtime(model)
    else:
        budget = s.nbytes(model) // 2
        runtime = stagehand.StagehandRuntime(model, stagehand.StagehandConfig(vram_budget=budget),
                                             block_pattern=r"^layers\.\d+$", device=s.device(budget, LINK))
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in (model, ref)]
    costs = []
    for step in range(8):
        x = model.example(3)[0]
        before = runtime.stats["copies"] if step else 0
        for net, optimizer in zip((model, ref), optimizers):
            optimizer.zero_grad()
            net(x).pow(2).sum().backward()
            optimizer.step()
        same_grads(model, ref)
        assert any(p.grad is None for p in model.layers.parameters())
        costs.append((runtime.stats["copies"] - before, 2 * (model.used + len(model.layers))))
    same_weights(model, ref)
    if unit == "expert":
        assert all(copies <= bound for copies, bound in costs[4:]), costs
    runtime.shutdown()


def test_241_experts_that_data_picks_fill_the_budget():
    """32 experts in a list, a few of them called: the budget is used, and those called most stay."""
    model, ref = pair(s.Experts, 32, 4, 32, frozen=True, budget=lambda m: s.nbytes(m) // 2, link=LINK)
    budget, rng, copies = s.nbytes(ref) // 2, torch.Generator().manual_seed(0), []
    often = torch.randn(3, 32, generator=rng)
    for step in range(60):
        agree(model, ref, 1, inputs=(often if step % 4 else torch.randn(3, 32, generator=rng),))
        stats = s.runtime(model).stats
        assert stats["device_bytes"] + stats["reserved_bytes"] <= budget
        copies.append(stats["copies"])
    assert stats["device_bytes"] + stats["reserved_bytes"] > 0.85 * budget
    assert copies[-1] - copies[19] < 40 * model.used / 4


class Scaled(nn.Module):
    """One parameter, no children."""

    def __init__(self, d):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(d))

    def forward(self, x):
        return x * self.scale


class OwnNorm(nn.LayerNorm):
    pass


class OwnEmbedding(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) * 2


class BufferOnly(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.register_buffer("turn", torch.randn(d, d) / d)

    def forward(self, x):
        return x @ self.turn


class Functional(nn.Module):
    """A bias that is given to a function of another module's weight."""

    def __init__(self, lin):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(lin.out_features))
        self.lin = [lin]

    def forward(self, x):
        return F.linear(x, self.lin[0].weight, self.bias)


class Leaves(nn.Module):
    def __init__(self, d=48):
        super().__init__()
        self.embed = OwnEmbedding(50, d)
        self.norm, self.own = nn.LayerNorm(d), OwnNorm(d)
        self.lin = nn.Linear(d, d)
        self.group = nn.GroupNorm(4, d)
        self.scaled, self.buffer = Scaled(d), BufferOnly(d)
        self.bilinear = nn.Bilinear(d, d, 8)
        self.prelu = nn.PReLU(8)
        self.functional = Functional(self.lin)
        with torch.no_grad():
            for param in self.parameters():
                param.normal_(0, 0.2)

    def forward(self, ids):
        x = self.norm(self.embed(ids))
        x = self.own(self.lin(x))
        x = self.group(x.transpose(1, 2)).transpose(1, 2)
        x = self.buffer(self.scaled(x)) + self.functional(x)
        return self.prelu(self.bilinear(x, x).transpose(1, 2))

    def example(self):
        return (torch.randint(50, (2, 5)),)


@pytest.mark.parametrize("pattern", [r"^(norm|own|lin|group|scaled|bilinear|prelu|embed|functional)$", None])
def test_37_every_class_of_leaf_is_served(pattern):
    """pattern: each leaf is a block; None: layer mode, which streams some classes and keeps the rest on the device."""
    model = s.made(Leaves, frozen=False)
    ref = s.aligned_copy(model)
    ref.functional.lin = [ref.lin]
    if pattern is None:
        managed(model, s.smallest_budget(model) + s.nbytes(model), LINK)
        runtime = s.runtime(model)
    else:
        budget = s.nbytes(model)
        runtime = stagehand.StagehandRuntime(model, stagehand.StagehandConfig(vram_budget=budget),
                                             block_pattern=pattern, device=s.device(budget, LINK))
    for _ in range(3):
        ids = model.example()[0]
        for net in (model, ref):
            net(ids).pow(2).sum().backward()
        same_grads(model, ref)
        assert all(p.grad is not None for p in model.parameters())
        with torch.no_grad():
            assert s.same(model(ids), ref(ids))
    runtime.shutdown()


# ---------------------------------------------------------------------- own


class Scheduled(nn.Module):
    """Each call of its blocks is named from outside: any program of calls, with loops and calls inside calls."""

    def __init__(self, n=7, d=40):
        super().__init__()
        self.blocks = nn.ModuleList(s.Block(d, 0.3 + 0.1 * i) for i in range(n))

    def forward(self, x, program):
        for step in program:
            if isinstance(step, list):
                x = x + self(x, step)
            else:
                x = self.blocks[step](x)
        return x


def program_of(rng, depth=0):
    return [program_of(rng, depth + 1) if depth < 2 and rng.random() < 0.2 else rng.randrange(7)
            for _ in range(rng.randint(0, 7))]


@pytest.mark.parametrize("seed", range(4))
def test_own_programs_that_repeat_with_changes_train_to_the_same_bits(seed):
    """A program is run some times, so that it is planned, then one step of it is changed; forward passes between."""
    rng = random.Random(seed)
    model, ref = pair(Scheduled, 7, 40, budget=lambda m: s.tight_budget(m) + s.nbytes(m.blocks[0]), link=LINK)
    optimizers = [torch.optim.SGD(net.parameters(), lr=1e-3) for net in (model, ref)]
    program = program_of(rng) or [0]
    for _ in range(4):
        for _ in range(3):
            x = torch.randn(2, 40)
            for net, optimizer in zip((model, ref), optimizers):
                optimizer.zero_grad()
                net(x.clone().requires_grad_(), program).mean().backward()
                optimizer.step()
            same_grads(model, ref)
        with torch.no_grad():
            other = program_of(rng)
            assert s.same(model(x, other), ref(x, other))
        program[rng.randrange(len(program))] = rng.randrange(7)
    same_weights(model, ref)


def test_own_a_block_that_is_taken_out_and_put_back():
    """A list of modules that changes between steps: shorter, longer, another order, the same block twice."""
    model, ref = pair(s.Stack, 6, 40, frozen=True, link=LINK)
    lists = [list(net.blocks) for net in (model, ref)]
    for order in ([0, 1, 2], [5, 4, 3, 2, 1, 0], [0, 0, 1, 1], [0, 1, 2, 3, 4, 5], [2]):
        for net, every in zip((model, ref), lists):
            net.blocks = nn.ModuleList(every[i] for i in order)
        agree(model, ref, 3)
        with torch.no_grad():
            for every in lists:
                every[order[-1]].up.weight.mul_(1.1)
    assert within(model, s.runtime(model).session.budget)


def test_own_a_thousand_uses_of_one_layer_in_a_step():
    """More uses than a plan records: right, and bounded in time and in memory."""
    class Recurrent(nn.Module):
        def __init__(self, d=40):
            super().__init__()
            self.cell, self.out = nn.Linear(d, d), nn.Linear(d, d)
            self.others = nn.ModuleList(nn.Linear(d, d) for _ in range(4))

        def forward(self, x):
            for i in range(160):
                x = torch.tanh(self.cell(x)) + x / 2
                if i % 40 == 0:
                    x = self.others[i // 40 % 4](x)
            return self.out(x)

        def example(self):
            return (torch.randn(2, 40),)

    model, ref = pair(Recurrent, budget=lambda m: 3 * s.nbytes(m.cell) + 4096, link=LINK)
    agree(model, ref, 3)
    for _ in range(2):
        x = model.example()[0]
        for net in (model, ref):
            net(x).pow(2).sum().backward()
        same_grads(model, ref)
    assert within(model, 3 * s.nbytes(model.cell) + 4096)


def test_own_passes_of_two_kinds_in_turns():
    """A discriminator's step and a generator's: another order each, never twice the same in a row."""
    model, ref = pair(s.Router, 8, 40, link=LINK)
    optimizers = [torch.optim.SGD(net.parameters(), lr=1e-3) for net in (model, ref)]
    orders = ([0, 1, 2, 3], [7, 6, 5, 4, 3])
    for turn in range(10):
        x = model.example()[0]
        for net, optimizer in zip((model, ref), optimizers):
            optimizer.zero_grad()
            net(x, order=orders[turn % 2]).pow(2).sum().backward()
            optimizer.step()
        same_grads(model, ref)
    same_weights(model, ref)


def test_own_a_model_that_runs_itself_from_a_hook():
    """A forward hook of a block that calls the whole model again, once: the inner pass joins the outer one."""
    model, ref = pair(s.Stack, 6, 40, frozen=True, link=LINK,
                      budget=lambda m: s.tight_budget(m) + s.nbytes(m.blocks[0]))
    for net in (model, ref):
        state = {"inside": False}

        def again(module, args, out, net=net, state=state):
            if state["inside"]:
                return None
            state["inside"] = True
            try:
                return out + net(args[0] * 0.5)
            finally:
                state["inside"] = False

        net.blocks[2].register_forward_hook(again)
    agree(model, ref, 4)


def test_own_a_model_that_runs_inside_another_ones_hook():
    """Two models under two runtimes on one device; the pass of the one lies in the middle of the other's."""
    first, first_ref = pair(s.Stack, 4, 40, frozen=True, link=LINK)
    second, second_ref = pair(s.Stack, 4, 40, seed=2, frozen=True, link=LINK)
    for outer, inner in ((first, second), (first_ref, second_ref)):
        outer.blocks[1].register_forward_hook(lambda m, a, out, inner=inner: out + inner(m.up.weight[:3]).mean())
    agree(first, first_ref, 3)
    agree(second, second_ref, 2)


def test_own_every_weight_of_many_layers_is_exchanged_between_two_steps():
    """load_state_dict(assign=True) of 150 layers: each new Parameter takes the place of its old one, in one walk."""
    def build():
        net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(150)))
        net.example = lambda: (torch.randn(2, 8),)
        return net

    model, ref = pair(build, frozen=True, budget=lambda m: s.nbytes(m) // 2)
    other = s.made(build, seed=3)
    agree(model, ref, 1, guard=False)
    for net in (model, ref):
        net.load_state_dict({name: value.clone() for name, value in other.state_dict().items()}, assign=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nobody holds the old ones
        agree(model, ref, 2, guard=False)
    same_weights(model, ref)
    assert len(s.runtime(model).session.units) > 100 and within(model, s.nbytes(model) // 2)
