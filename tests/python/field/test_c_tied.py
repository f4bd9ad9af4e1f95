"""Field cases, section C: tied and shared weights."""

import card
import pytest
import support as s
import torch
from file_support import save
from pairs import agree, both, cuda, ends, managed, pair, same_grads, same_weights  # noqa: F401
from torch import nn
from torch.nn import functional as F

import stagehand


# ---------------------------------------------------------------------- 21: told apart, though at one address


class Lookalikes(nn.Module):
    """Equal shapes, a tied pair, empty parameters that share an address, two slices that begin at one address."""

    def __init__(self, d=48):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(d, d) for _ in range(5))
        self.blocks[4].weight = self.blocks[1].weight
        self.empty = nn.ParameterList(nn.Parameter(torch.zeros(0, n)) for n in (4, 7))

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x + sum(p.sum() for p in self.empty)

    def example(self):
        return (torch.randn(3, self.blocks[0].in_features),)


def test_21_a_model_on_meta_gets_the_values_of_its_file(tmp_path):
    ref = s.made(Lookalikes, seed=5)
    tensors = {name: value for name, value in ref.state_dict().items() if name != "blocks.4.weight"}
    save(tmp_path / "w.safetensors", tensors)
    ref = s.aligned_copy(ref)
    model = stagehand.load(Lookalikes, tmp_path / "w.safetensors", vram_budget=2 * s.nbytes(ref.blocks[0]) + 4096,
                           device="sim")
    assert model.blocks[4].weight is model.blocks[1].weight
    assert len({id(block.weight) for block in model.blocks}) == 4
    with torch.no_grad():
        for _ in range(3):
            x = ref.example()[0]
            assert s.same(model(x), ref(x))
    same_weights(model, ref)


class SameStart(nn.Module):
    """A row and a table that begin at the same byte; empty parameters; all of one module."""

    def __init__(self, d=48):
        super().__init__()
        flat = torch.randn(d * d)
        self.table = nn.Linear(d, d, bias=False)
        self.table.weight = nn.Parameter(flat.view(d, d))
        self.row = nn.Parameter(flat[:d])
        self.none, self.nothing = nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(3, 0))
        self.blocks = nn.ModuleList(nn.Linear(d, d) for _ in range(3))

    def forward(self, x):
        x = self.table(x) * self.row
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x + self.none.sum() + self.nothing.sum()

    def example(self):
        return (torch.randn(3, self.row.numel()),)


def test_21_slices_that_begin_at_one_address_are_not_taken_for_tied():
    model, ref = pair(SameStart, budget=lambda m: s.nbytes(m.table) + 2 * s.nbytes(m.blocks[0]) + 4096, frozen=True)
    assert model.row.shape == (48,) and model.table.weight.shape == (48, 48)
    agree(model, ref)
    with torch.no_grad():
        for net in (model, ref):
            net.row.mul_(2)
    ref.table.weight[0] = ref.row.detach()  # an aligned copy has parted them; here they still share
    agree(model, ref)


# ---------------------------------------------------------------------- 22: a tied table once


def test_22_a_tied_table_is_on_the_device_once():
    """Also while a gradient is asked for: the table is used at both ends of the pass."""
    model = s.made(s.TinyLM, 20000, 64, 2)
    table, block = model.embed.weight.nbytes, s.nbytes(model.blocks[0])
    for other in model.blocks:
        other.requires_grad_()
    ref = s.aligned_copy(model)
    budget = s.nbytes(model) - s.nbytes(model.blocks) + block + 4096
    managed(model, budget)
    for _ in range(2):
        ids = model.example()[0]
        for net in (model, ref):
            net(ids).pow(2).mean().backward()
        same_grads(model, ref)
    assert s.runtime(model).stats["device_peak"] < table + 2 * block + 65536


@cuda
@pytest.mark.alone
def test_22_on_a_card():
    model = s.made(s.TinyLM, 200_000, 64, 2)
    table = model.embed.weight.nbytes
    stagehand.layer(model, vram_budget=table + 4 * s.nbytes(model.blocks[0]))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        for _ in range(3):
            model(model.example()[0].cuda())
    outputs = 2 * 7 * 200_000 * 4
    assert torch.cuda.max_memory_allocated() - before < 2 * table + outputs
    s.runtime(model).shutdown()


# ---------------------------------------------------------------------- 24: functional calls and bare attributes


class WithTable(s.TinyLM):
    """Has a tensor that is neither parameter nor buffer."""

    def __init__(self):
        super().__init__(300, 32, 3)
        self.blocks[1].table = torch.arange(32.0)

    def forward(self, ids):
        x = self.embed(ids) + self.pos.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x) + (block.table if hasattr(block, "table") else 0)
        return self.head(self.norm(x))


@card.on_the_host
def test_24_a_functional_call_of_a_tied_model_with_a_bare_tensor():
    model, ref = pair(WithTable, budget=s.nbytes, frozen=True)
    agree(model, ref)
    other = {"embed.weight": torch.randn(300, 32), "blocks.0.up.weight": torch.randn(96, 32)}
    with torch.no_grad():
        ids = model.example()[0]
        for tie in (True, False):
            got, want = both(model, ref, lambda net: torch.func.functional_call(net, other, (ids,), tie_weights=tie))
            assert s.same(got, want)
        everything = dict(ref.named_parameters())
        assert s.same(torch.func.functional_call(model, everything, (ids,)), ref(ids))
    agree(model, ref)


@cuda
@pytest.mark.alone
def test_24_a_bare_tensor_is_named_on_a_card():
    model = s.made(WithTable)
    with pytest.warns(RuntimeWarning, match=r"blocks\.1\.table"):
        stagehand.layer(model, vram_budget=s.nbytes(model))
    s.runtime(model).shutdown()


# ---------------------------------------------------------------------- own


class Retied(nn.Module):
    """Ties its head to its table anew in every forward, as some models do."""

    def __init__(self, d=48):
        super().__init__()
        self.table, self.head = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(d, d) for _ in range(4))
        self.head.weight = self.table.weight

    def forward(self, x):
        self.head.weight = self.table.weight
        x = self.table(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)

    def example(self):
        return (torch.randn(3, self.head.in_features),)


@pytest.mark.parametrize("frozen", [True, False])
def test_own_a_head_that_is_tied_again_inside_the_forward(frozen):
    model, ref = pair(Retied, frozen=frozen, budget=lambda m: 3 * s.nbytes(m.table) + 4096)
    for _ in range(3):
        agree(model, ref, 2)
        with torch.no_grad():
            for net in (model, ref):
                net.table.weight.mul_(1.5)
    assert model.head.weight is model.table.weight and type(model.head.weight) is nn.Parameter
    assert len(list(model.parameters())) == len(list(ref.parameters()))


def test_own_tied_again_while_it_takes_a_gradient():
    model, ref = pair(Retied, budget=s.nbytes)
    for _ in range(3):
        x = model.example()[0]
        for net in (model, ref):
            net.zero_grad()
            net(x).square().sum().backward()
        assert s.same([p.grad for p in model.parameters()], [p.grad for p in ref.parameters()])
    assert model.head.weight is model.table.weight and type(model.head.weight) is nn.Parameter
    agree(model, ref)


class Keeping(nn.Linear):
    def forward(self, x):
        self.kept = self.weight
        return F.linear(x, self.kept, self.bias)


def test_own_a_weight_kept_under_another_name_is_the_same_weight_and_keeps_no_place():
    model, ref = pair(lambda: nn.Sequential(*(Keeping(48, 48) for _ in range(6))), frozen=True,
                      budget=lambda m: 2 * s.nbytes(m[0]) + 4096)
    for _ in range(2):
        agree(model, ref, 2, inputs=(torch.randn(2, 48),))
        for net in (model, ref):
            net[3].weight.data.mul_(0.5)
    assert all(layer.kept is layer.weight for layer in model)
    assert s.runtime(model).stats["leased_bytes"] == 0
    s.runtime(model).shutdown()
    same_weights(model, ref)


class Half(nn.Module):
    """One of two models with a table in common."""

    def __init__(self, table=None, d=48):
        super().__init__()
        self.table = nn.Linear(d, d, bias=False)
        if table is not None:
            self.table.weight = table
        self.blocks = nn.ModuleList(nn.Linear(d, d) for _ in range(4))

    def forward(self, x):
        x = self.table(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.table(x)

    def example(self):
        return (torch.randn(3, 48),)


def test_own_one_parameter_in_two_models_under_two_runtimes():
    """Each has an image of it; the image follows whoever wrote last, and memory does not grow."""
    one = s.made(Half, frozen=False)
    two = s.made(Half, one.table.weight, seed=1, frozen=False)
    refs = [s.aligned_copy(one), s.aligned_copy(two)]
    refs[1].table.weight = refs[0].table.weight
    for model in (one, two):
        managed(model, 3 * s.nbytes(model.table) + 4096, 3e8)
    for turn in range(6):
        for model, ref in zip((one, two), refs):
            agree(model, ref, 1, guard=False)
            x = model.example()[0]
            for net in (model, ref):
                net(x).pow(2).mean().backward()
            with torch.no_grad():
                for net in (model, ref):
                    net.table.weight.sub_(net.table.weight.grad)
                    net.table.weight.data.mul_(1.01)
    assert one.table.weight is two.table.weight
    s.runtime(one).shutdown()
    agree(two, refs[1], 2)
    s.runtime(two).shutdown()
    same_weights(one, refs[0])
    same_weights(two, refs[1])


def test_own_data_of_another_weight_follows_its_writes():
    """`q.data = p.data` makes one memory of two in PyTorch. A copy would part them at the first write."""
    model, ref = pair(s.Stack, 5, 40, frozen=True)
    agree(model, ref, 1)
    before = [net.blocks[1].up.weight.data for net in (model, ref)]
    for net in (model, ref):
        net.blocks[1].up.weight.data = net.blocks[0].up.weight.data
    agree(model, ref, 2, guard=False)
    with torch.no_grad():
        for net in (model, ref):
            net.blocks[0].up.weight.mul_(2)
    agree(model, ref, 2, guard=False)
    for net, data in zip((model, ref), before):
        net.blocks[1].up.weight.data = data
    agree(model, ref, 2, guard=False)
    for net in (model, ref):
        net.blocks[1].up.weight = net.blocks[0].up.weight
    agree(model, ref)
    with torch.no_grad():
        for net in (model, ref):
            net.blocks[0].up.weight.mul_(3)
    agree(model, ref)


def test_own_two_weights_exchange_their_data():
    """No moment at which two weights are one, so this works: each takes the other's bytes."""
    model, ref = pair(s.Stack, 5, 40, frozen=True)
    agree(model, ref, 1)
    for _ in range(3):
        for net in (model, ref):
            a, b = net.blocks[0].up.weight, net.blocks[3].up.weight
            a.data, b.data = b.data, a.data
        agree(model, ref, 2)
        with torch.no_grad():
            for net in (model, ref):
                net.blocks[3].up.weight.mul_(1.5)
        agree(model, ref, 2)


def test_own_a_tie_is_loosened_and_each_end_goes_its_own_way():
    model, ref = pair(s.TinyLM, budget=lambda m: s.nbytes(m) + 2 * m.embed.weight.nbytes)
    for net in (model, ref):
        net.head.weight = nn.Parameter(net.head.weight.detach().clone())
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, ref)]
    for _ in range(3):
        ids = model.example()[0]
        for net, optimizer in zip((model, ref), optimizers):
            optimizer.zero_grad()
            net(ids).pow(2).mean().backward()
            optimizer.step()
        same_grads(model, ref)
        same_weights(model, ref)
    assert not s.same(model.head.weight, model.embed.weight)


@pytest.mark.parametrize("kind", [s.TinyLM, s.RawNet, s.RecurrentNet])
def test_own_a_functional_call_with_the_parameters_of_another_model_leaves_both_alone(kind):
    """A student that runs once with its teacher's Parameters: they are the teacher's before, meanwhile and after."""
    model, ref = pair(kind, frozen=True, budget=s.nbytes)
    teacher = s.made(kind, seed=7)
    was = {name: (param, param.data_ptr(), param.clone()) for name, param in teacher.named_parameters()}
    agree(model, ref, 2)
    moved = s.runtime(model).stats["h2d_bytes"]
    given = dict(teacher.named_parameters())
    with torch.no_grad():
        for _ in range(3):
            x = model.example()
            assert s.same(torch.func.functional_call(model, given, x), s.aligned_copy(teacher)(*x))
    agree(model, ref, 2)
    for name, param in teacher.named_parameters():
        assert param is was[name][0] and param.data_ptr() == was[name][1] and s.same(param, was[name][2]), name
    assert s.runtime(model).stats["h2d_bytes"] - moved < 6 * s.nbytes(model)
    s.runtime(model).shutdown()
    same_weights(model, ref)
