"""Field cases, section D: weights used outside of their own module's forward."""

import card
import pytest
import support as s
import torch
from pairs import Row, agree, blocks, both, cuda, ends, managed, pair, same_grads, same_weights  # noqa: F401
from torch import nn
from torch.nn import functional as F

import stagehand


class Positions(nn.Module):
    """A table whose forward is never called."""

    def __init__(self, d=48):
        super().__init__()
        self.pos = nn.Embedding(16, d)
        self.blocks = nn.ModuleList(nn.Linear(d, d) for _ in range(4))

    def forward(self, x):
        x = x + self.pos.weight[: x.shape[1]]
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x @ self.pos.weight[3]

    def example(self):
        return (torch.randn(2, 7, 48),)


def test_26_a_table_that_is_sliced_from_outside():
    model, ref = pair(Positions, budget=lambda m: 2 * s.nbytes(m.blocks[0]) + s.nbytes(m.pos) + 4096, link=3e8)
    agree(model, ref)
    for _ in range(2):
        x = model.example()[0]
        for net in (model, ref):
            net(x).pow(2).sum().backward()
        same_grads(model, ref)


def test_26_in_block_mode_where_the_table_is_a_unit_of_its_own():
    model = s.made(Positions, frozen=False)
    ref = s.aligned_copy(model)
    runtime = blocks(model, 2 * s.nbytes(model.blocks[0]) + s.nbytes(model.pos) + 4096, r"^(pos|blocks\.\d+)$")
    for _ in range(3):
        x = model.example()[0]
        for net in (model, ref):
            net(x).pow(2).sum().backward()
        same_grads(model, ref)
        with torch.no_grad():
            assert s.same(model(x), ref(x))
    assert "pos" in [unit["name"] for unit in runtime.stats["units"]]
    runtime.shutdown()


# ---------------------------------------------------------------------- 27: raw parameters


class Registers(nn.Module):
    """Tokens and tables held by a block beside its children."""

    def __init__(self, d=48):
        super().__init__()
        self.shift = nn.Parameter(torch.randn(2, d))
        self.wide = nn.Parameter(torch.randn(d, 96) / d)
        self.lin = nn.Linear(96, d)

    def forward(self, x):
        scale, shift = self.shift
        return x + self.lin(torch.tanh((x * scale + shift) @ self.wide))


class Raw(nn.Module):
    def __init__(self, d=48):
        super().__init__()
        self.tokens = nn.Parameter(torch.randn(1, 2, d))
        self.tables = nn.ParameterList(nn.Parameter(torch.randn(d, d) / d) for _ in range(3))
        self.named = nn.ParameterDict({"scale": torch.randn(d), "turn": torch.randn(d, d) / d})
        self.blocks = nn.ModuleList(Registers(d) for _ in range(4))

    def forward(self, x):
        x = torch.cat([self.tokens.expand(x.shape[0], -1, -1), x], 1)
        for table in self.tables:
            x = x + x @ table
        x = x * self.named["scale"] + x @ self.named["turn"]
        for block in self.blocks:
            x = block(x)
        return x

    def example(self):
        return (torch.randn(2, 3, 48),)


@pytest.mark.parametrize("mode", ["layer", "block"])
def test_27_parameters_on_modules_that_have_children(mode):
    model = s.made(Raw, frozen=False)
    ref = s.aligned_copy(model)
    budget = s.nbytes(model) - s.nbytes(model.blocks) + 2 * s.nbytes(model.blocks[0]) + 4096
    runtime = None
    if mode == "layer":
        managed(model, s.nbytes(model) - s.nbytes(model.blocks[0].lin), 3e8)
    else:
        runtime = blocks(model, budget)
    for _ in range(3):
        x = model.example()[0]
        for net in (model, ref):
            net(x).pow(2).sum().backward()
        same_grads(model, ref)
        assert all(bool(p.grad.any()) for p in model.parameters())
        with torch.no_grad():
            assert s.same(model(x), ref(x))
    if runtime is not None:
        runtime.shutdown()


# ---------------------------------------------------------------------- 30: code that asks a parameter


class Asking(nn.Module):
    def __init__(self, d=48):
        super().__init__()
        self.proj, self.out = nn.Linear(d, d), nn.Linear(d, d)
        self.seen = []

    def forward(self, x):
        self.seen.append((self.proj.weight.device, self.proj.weight.dtype, next(self.parameters()).shape))
        x = x.to(self.proj.weight.device, self.proj.weight.dtype)
        return x + self.out(torch.tanh(self.proj(x)))


class AskingNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Asking() for _ in range(6))

    def forward(self, x):
        first = next(self.parameters())
        assert not first.is_meta and first.numel()
        x = x.to(first.device, first.dtype)
        del first  # held, it would keep its layer on the device
        for block in self.blocks:
            x = block(x)
        return x

    def example(self):
        return (torch.randn(3, 48, dtype=torch.float64),)


@pytest.mark.parametrize("grad", [False, True])
def test_30_device_and_dtype_of_a_parked_weight(grad):
    model, ref = pair(AskingNet, frozen=not grad, budget=lambda m: 3 * s.nbytes(m.blocks[0]) + 1024, link=3e8)
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            x = model.example()[0]
            got, want = both(model, ref, lambda net: net(x))
            assert got.dtype is torch.float32 and s.same(got, want)
            if grad:
                got.sum().backward(), want.sum().backward()
    same_grads(model, ref)
    assert [block.seen for block in model.blocks] == [block.seen for block in ref.blocks]


@cuda
@pytest.mark.alone
def test_30_on_a_card():
    model = s.made(AskingNet)
    ref = s.aligned_copy(model).cuda()
    stagehand.layer(model, vram_budget=3 * s.nbytes(model.blocks[0]))
    with torch.no_grad():
        for _ in range(3):
            x = model.example()[0]
            got = model(x)
            assert got.is_cuda and torch.equal(got, ref(x.cuda()))
    assert all(seen[0].type == "cuda" for block in model.blocks for seen in block.seen)
    s.runtime(model).shutdown()


# ---------------------------------------------------------------------- own


class Direct(nn.Linear):
    """Reads its parameters through the dictionaries that modules keep them in."""

    def forward(self, x):
        first, second = dict(self._parameters), {**self._parameters}
        third = self._parameters.copy()
        assert first.keys() == second.keys() == third.keys() == {"weight", "bias"}
        (_, weight), (_, bias) = self._parameters.items()
        return (F.linear(x, first["weight"], second["bias"]) + third["weight"].sum() + weight.mean() + bias.mean()
                + sum(p.sum() for p in self._parameters.values()) + self.__dict__["_parameters"]["bias"])


@pytest.mark.parametrize("frozen", [True, False])
def test_own_parameters_read_through_copies_of_their_dictionary(frozen):
    """dict() and ** of a subclass of dict take its items without asking: they must not be those of the host."""
    model, ref = pair(lambda: nn.Sequential(*(Direct(48, 48) for _ in range(5))), frozen=frozen,
                      budget=lambda m: 3 * s.nbytes(m[0]) + 4096)
    agree(model, ref, 3, inputs=(torch.randn(2, 48),))
    if not frozen:
        x = torch.randn(2, 48)
        with s.HostMasterGuard(model):
            model(x).sum().backward()
        ref(x).sum().backward()
        same_grads(model, ref)


def test_own_all_of_a_layers_weights_through_another_modules_closure():
    """A block that calls its neighbour's layers by function, in an order of its own, and by `functional_call`."""
    class Nosy(nn.Module):
        def __init__(self, d=48):
            super().__init__()
            self.lin = nn.Linear(d, d)
            self.other = None

        def forward(self, x):
            if self.other is None:
                return self.lin(x)
            near = self.other()
            x = F.linear(x, near.lin.weight.t().contiguous(), near.lin.bias)
            x = torch.func.functional_call(near.lin, {"bias": self.lin.bias}, (x,))
            return x + self.lin(x)

    class Net(Row):
        def __init__(self):
            super().__init__([Nosy() for _ in range(5)], 3, 48)
            self.link()

        def link(self):
            for i in range(1, 5):
                self.blocks[i].other = lambda blocks=self.blocks, i=i: blocks[i - 1]

    model = s.made(Net, frozen=False)
    ref = s.aligned_copy(model)
    ref.link()
    managed(model, 4 * s.nbytes(model.blocks[0]) + 4096, 3e8)
    agree(model, ref)
    for _ in range(2):
        x = model.example()[0]
        for net in (model, ref):
            net(x).pow(2).sum().backward()
        same_grads(model, ref)


def test_own_a_forward_that_is_a_generator_reads_its_weights_when_it_is_asked():
    """Its body runs after the call has returned: between passes, and inside another module's pass."""
    class Lazily(nn.Linear):
        def forward(self, x):
            for _ in range(3):
                x = F.linear(x, self.weight, self.bias)
                yield x

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Lazily(48, 48) for _ in range(5))

        def forward(self, x):
            for block in self.blocks:
                *_, x = block(x)
            return x

        def example(self):
            return (torch.randn(2, 48),)

    model, ref = pair(Net, frozen=True, budget=lambda m: 3 * s.nbytes(m.blocks[0]) + 4096, link=3e8)
    agree(model, ref)
    with torch.no_grad():
        x = model.example()[0]
        for mine, theirs in zip(model.blocks, ref.blocks):
            if not card.ON_CARD:  # the body of one that is called alone runs at rest, and its input was moved
                assert s.same(list(mine(x)), list(theirs(x)))


def test_own_another_method_than_forward_is_called_from_outside():
    """encode() and decode() of an autoencoder are no calls of the model; what they call is managed all the same."""
    class Coder(nn.Module):
        def __init__(self, d=48):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(d, d) for _ in range(6))
            self.scale = nn.Parameter(torch.tensor(0.5))

        def encode(self, x):
            for block in self.blocks[:3]:
                x = torch.tanh(block(x))
            return x * self.scale

        def decode(self, x):
            for block in self.blocks[3:]:
                x = torch.tanh(block(x / self.scale))
            return x

        def forward(self, x):
            return self.decode(self.encode(x))

        def example(self):
            return (torch.randn(3, 48),)

    model, ref = pair(Coder, budget=lambda m: 2 * s.nbytes(m.blocks[0]) + 4096, link=3e8)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, ref)]
    for turn in range(4):
        x = model.example()[0]
        for net, optimizer in zip((model, ref), optimizers):
            optimizer.zero_grad()
            (net.decode(net.encode(x)) - net(x).detach()).pow(2).sum().add(net.encode(x).sum()).backward()
            optimizer.step()
        same_grads(model, ref)
    agree(model, ref)


class Listing(s.TinyLM):
    """Counts, names, measures and compares its parameters in its forward."""

    def forward(self, ids):
        every = list(self.parameters())
        self.count = sum(p.numel() for p in every), [name for name, _ in self.named_parameters()]
        first = next(self.parameters())
        self.first = first.device, first.dtype, first.shape, first.stride(), first.requires_grad, first.is_leaf
        assert isinstance(first, nn.Parameter) and first is every[0] and self.head.weight.shape == first.shape
        with torch.no_grad():
            size = torch.stack([p.abs().sum() for p in every]).sum() + sum(p.data.norm() for p in every)
        return super().forward(ids).to(first) * size


@pytest.mark.parametrize("frozen", [True, False])
def test_own_all_parameters_listed_inside_a_forward(frozen):
    """A list holds no places, so it needs no more than one at a time; tied weights are in it once."""
    model, ref = pair(Listing, 300, 32, 6, frozen=frozen, link=3e8,
                      budget=lambda m: s.nbytes(m) - s.nbytes(m.blocks) + 3 * s.nbytes(m.blocks[0]))
    agree(model, ref, 3, guard=False)
    assert model.count == ref.count and model.first == ref.first
    assert s.runtime(model).stats["leased_bytes"] == 0
    if not frozen:
        ids = model.example()[0]
        for net in (model, ref):
            net(ids).pow(2).mean().backward()
        same_grads(model, ref)


class Inner(s.Stack):
    """Takes gradients of all its parameters in its forward, and gives one of them an attribute."""

    def forward(self, x):
        y = super().forward(x)
        grads = torch.autograd.grad(y.pow(2).mean(), list(self.parameters()), retain_graph=True)
        for param, grad in zip(self.parameters(), grads):
            param.noise = float(grad.norm())
        return y * sum(param.noise for param in self.parameters())


def test_own_gradients_of_all_listed_parameters_inside_a_forward():
    model, ref = pair(Inner, 4, 32, budget=lambda m: 2 * s.nbytes(m))
    for _ in range(2):
        x = model.example()[0]
        for net in (model, ref):
            net(x).pow(2).mean().backward()
        same_grads(model, ref)
    noises = [[p.noise for p in net.parameters()] for net in (model, ref)]
    assert noises[0] == pytest.approx(noises[1], rel=card.ON_CARD * 1e-5)


def test_own_a_term_over_all_parameters_brings_them_back_for_backward():
    """What a forward computes of all weights at the root, autograd saves: under a tight budget as handles."""
    class Decayed(s.Stack):
        def forward(self, x):
            return super().forward(x) + sum(p.pow(2).sum() for p in self.parameters())

    model, ref = pair(Decayed, 4, 32, budget=lambda m: 2 * s.nbytes(m))
    x = model.example()[0]
    for net in (model, ref):
        net(x).pow(2).mean().backward()
    same_grads(model, ref)
    tight, ref = pair(Decayed, 6, 40)
    x = tight.example()[0]
    for net in (tight, ref):
        net(x).pow(2).mean().backward()
    same_grads(tight, ref)
    with torch.no_grad():
        assert s.same(tight(x), ref(x))
