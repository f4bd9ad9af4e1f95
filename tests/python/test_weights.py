"""Weights read from outside their own forward, and every way of writing them."""

import card
import pytest
import torch
from support import (
    Adapted, AttentionNet, HostMasterGuard, NormedNet, RawNet, RecurrentNet, Stack, TinyLM, aligned_copy, made, nbytes,
    runtime, same, smallest_budget, tight_budget, wrap)
from torch import nn
from torch.nn import functional as F

import stagehand

SLOW = 1e8  # bytes/s


def check(model, ref, steps=3, guard=True):
    with torch.no_grad():
        for _ in range(steps):
            x = model.example()
            if guard:
                with HostMasterGuard(model):
                    got = model(*x)
            else:
                got = model(*x)
            assert same(got, ref(*x))


# ---------------------------------------------------------------------- reading


@pytest.mark.parametrize("head_first", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_tied_heads_and_sliced_positions(head_first, frozen):
    model = made(TinyLM, head_first=head_first, frozen=frozen)
    assert model.head.weight is model.embed.weight
    ref = aligned_copy(model)
    assert ref.head.weight is ref.embed.weight
    wrap(model, smallest_budget(model), SLOW)
    check(model, ref)
    assert model.head.weight is model.embed.weight


def test_a_tied_table_is_on_the_device_once():
    """Field case 22."""
    model = made(TinyLM, 20000, 64, 2)
    table = model.embed.weight.numel() * 4
    model.requires_grad_(False)
    budget = table + nbytes(model.blocks[0]) * 2 + 65536
    ref = aligned_copy(model)
    wrap(model, budget)
    check(model, ref)
    assert runtime(model).stats["device_peak"] < 2 * table


def test_two_parameters_over_one_memory_stay_one():
    class Twins(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)
            self.b.weight = nn.Parameter(self.a.weight.data)

        def forward(self, x):
            return self.b(torch.relu(self.a(x)))

        def example(self):
            return (torch.randn(2, 64),)

    model = made(Twins)
    ref = aligned_copy(model)
    wrap(model, smallest_budget(model, Twins))  # a deep copy's parameters have memory of their own
    check(model, ref)
    assert model.a.weight.data_ptr() == model.b.weight.data_ptr() and model.a.weight is not model.b.weight
    for net in (model, ref):
        with torch.no_grad():
            net.b.weight.mul_(2)
    check(model, ref)
    new = torch.randn(64, 64)
    model.a.weight.data = new
    with torch.no_grad(), pytest.raises(stagehand.StagehandError, match="a.weight"):
        model(*model.example())


@pytest.mark.parametrize("kind", [AttentionNet, RawNet, RecurrentNet, NormedNet])
def test_kinds_of_modules(kind):
    model = made(kind)
    ref = aligned_copy(model)
    wrap(model, smallest_budget(model), SLOW)
    check(model, ref)


def test_functional_use_of_other_modules_weights():
    class Borrower(nn.Module):
        def __init__(self, d=64):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(d, d), nn.Linear(d, d, bias=False), nn.Conv1d(d, d, 3)

        def forward(self, x):
            x = F.linear(x, self.a.weight, self.a.bias) @ self.b.weight.t()
            x = F.conv1d(x.t()[None], self.c.weight, padding=1)[0].t()
            x = x.to(self.b.weight.device, self.b.weight.dtype)
            for row in self.b.weight[:3]:
                x = x * (1 + row.mean())
            return x + self.a.weight.sum() + next(self.parameters()).mean()

        def example(self):
            return (torch.randn(8, 64),)

    model = made(Borrower)
    ref = aligned_copy(model)
    wrap(model, smallest_budget(model), SLOW)
    check(model, ref)
    assert runtime(model).mode == "scheduled"


def test_outputs_that_are_weights_keep_their_bytes():
    class Leaky(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(12))

        def forward(self, x):
            return [layer.weight[:2] for layer in self.layers[:2]] + [layer(x) for layer in self.layers]

    model = made(Leaky)
    ref = aligned_copy(model)
    wrap(model, 7 * 16384)
    x = torch.randn(2, 64)
    with torch.no_grad():
        kept = [model(x)]
        assert all(same(a, b) for a, b in zip(kept[0], ref(x)))
        del kept[0][2:]
        for layer in model.layers[2:]:
            layer(x)
        assert all(same(a, b) for a, b in zip(kept[0], ref(x)[:2]))
        view = kept[0][0]
        runtime(model).shutdown()
        assert same(view, ref(x)[0])


def test_at_rest_weights_are_the_same_parameters_on_the_host():
    model = made(Stack)
    before = {name: (param, param.clone()) for name, param in model.named_parameters()}
    tags = {name: object() for name in before}
    for name, (param, _) in before.items():
        param.tag = tags[name]
    wrap(model, tight_budget(model))
    seen = []
    model.blocks[1].up.register_forward_hook(lambda m, a, o: seen.append(m.weight.tag))
    with torch.no_grad():
        for _ in range(3):
            model(*model.example())
            for name, param in model.named_parameters():
                assert param is before[name][0] and same(param, before[name][1]) and param.tag is tags[name]
    assert seen == [tags["blocks.1.up.weight"]] * 3


def test_state_dict_inside_a_forward_holds_the_masters():
    """Field case 73."""
    model = made(Stack)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    wrap(model, tight_budget(model))
    states = []
    model.blocks[2].down.register_forward_hook(lambda m, a, o: states.append(model.state_dict()))
    with torch.no_grad():
        for _ in range(3):
            model(*model.example())
    states.append(model.state_dict())
    for state in states:
        assert list(state) == list(expected)
        assert all(same(state[name], expected[name]) for name in expected)
        assert state["inp.weight"].data_ptr() == model.inp.weight.data_ptr()


@card.on_the_host
def test_functional_call_gives_its_tensors_and_then_ours():
    model = made(Stack, 3)
    ref = aligned_copy(model)
    wrap(model, tight_budget(model))
    other = {name: torch.randn_like(param) for name, param in model.named_parameters() if "up" in name}
    with torch.no_grad():
        for _ in range(3):
            x = model.example()[0]
            assert same(torch.func.functional_call(model, other, (x,)), torch.func.functional_call(ref, other, (x,)))
            assert same(model(x), ref(x))
    params = dict(model.named_parameters())
    assert all(params[name] is not other[name] for name in other)


# ---------------------------------------------------------------------- writing


def _add_data(p):
    p.data.add_(0.25)


def _numpy(p):
    array = p.detach().cpu().numpy()
    array *= 1.5
    _take_back(p, array)


def _one_numpy(p):
    array = p.data.cpu().numpy()
    array.reshape(-1)[0] += 3.0
    _take_back(p, array)


def _take_back(p, array):
    """A reference on a card has no memory that numpy could write."""
    if not p.is_cpu:
        p.data.copy_(torch.from_numpy(array))


def _copy(p):
    p.copy_(torch.linspace(-1, 1, p.numel()).view(p.shape))


def _index(p):
    p[..., -1] = 0.125


def _mul(p):
    p.mul_(-0.5)


def _set_data(p):
    p.data = torch.linspace(-0.5, 0.5, p.numel()).view(p.shape)


def _set_strided(p):
    p.data = torch.linspace(-0.5, 0.5, p.numel()).view(p.shape[::-1]).t()


def _init(p):
    nn.init.constant_(p, 0.01)


def _zero(p):
    p.zero_()


def _foreach(p):
    torch._foreach_add_([p], 1.0)


def write_to_both(write, mine, theirs):
    write(mine)
    write(theirs)
    theirs.data = theirs.data.contiguous()  # a managed weight keeps the strides that it had


WAYS = [_add_data, _numpy, _one_numpy, _copy, _index, _mul, _set_data, _set_strided, _init, _zero, _foreach]


@pytest.mark.parametrize("budget", ["tight", "resident"])
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("write", WAYS)
def test_writes_reach_the_device_at_the_next_use(write, frozen, budget):
    """Field case 59, with a link so slow that copies are under way when the write comes."""
    model = made(Stack, 5, 40, frozen=frozen)
    ref = aligned_copy(model)
    wrap(model, tight_budget(model) if budget == "tight" else 2 * nbytes(model), 5e7)
    with torch.no_grad():
        for i in range(5):
            x = model.example()[0]
            assert same(model(x), ref(x))
            write_to_both(write, model.blocks[i].up.weight, ref.blocks[i].up.weight)
            write_to_both(write, model.blocks[(i + 2) % 5].down.weight, ref.blocks[(i + 2) % 5].down.weight)
            write_to_both(write, model.inp.weight, ref.inp.weight)
        assert same(model(x), ref(x))
    for (name, mine), theirs in zip(model.named_parameters(), ref.parameters()):
        assert same(mine, theirs), name
    assert type(model.inp.weight) is nn.Parameter and not model.inp.weight.is_inference()


@pytest.mark.parametrize("write", WAYS)
def test_writes_between_calls_of_parts(write):
    """No step begins or ends: each call of a part looks again."""
    model = made(Stack, 3, 40)
    ref = aligned_copy(model)
    wrap(model, 2 * nbytes(model), 5e7)
    with torch.no_grad():
        for _ in range(3):
            for mine, theirs in zip(model.blocks, ref.blocks):
                x = torch.randn(2, 40)
                assert same(mine(x), theirs(x))
                write_to_both(write, mine.up.weight, theirs.up.weight)
                assert same(mine(x), theirs(x))


@pytest.mark.parametrize("write", WAYS)
def test_writing_announces_writes_of_inference_models(write):
    model = made(Stack, 4, 40, frozen=False)
    ref = aligned_copy(model)
    wrap(model, 2 * nbytes(model), 5e7, inference_mode=True)
    own = runtime(model)
    with torch.no_grad():
        for _ in range(3):
            x = model.example()[0]
            assert same(model(x), ref(x))
            with own.writing():
                for mine, theirs in zip(model.blocks, ref.blocks):
                    write_to_both(write, mine.up.weight, theirs.up.weight)
            assert same(model(x), ref(x))
            own.synchronize()
            write_to_both(write, model.blocks[0].down.weight, ref.blocks[0].down.weight)
            assert same(model(x), ref(x))


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict(assign):
    model, other = made(Stack, 5, 40), made(Stack, 5, 40, seed=1)
    ref = aligned_copy(other)
    wrap(model, tight_budget(model), 5e7)
    with torch.no_grad():
        for _ in range(2):
            model(*model.example())
        model.load_state_dict({name: value.clone() for name, value in other.state_dict().items()}, assign=assign)
    check(model, ref, 4)
    assert len(runtime(model).report) == len(set(runtime(model).report))
    before = runtime(model).stats["h2d_bytes"]
    check(model, ref, 2)
    assert runtime(model).stats["h2d_bytes"] - before > nbytes(model) - tight_budget(model)
    assert all(same(a, b) for a, b in zip(model.state_dict().values(), ref.state_dict().values()))


def test_load_state_dict_with_assign_keeps_ties():
    model, other = made(TinyLM), made(TinyLM, seed=1)
    ref = aligned_copy(other)
    wrap(model, smallest_budget(model))
    check(model, aligned_copy(made(TinyLM)))
    model.load_state_dict(other.state_dict(), assign=True)
    check(model, ref, 4)
    assert model.head.weight.data_ptr() == model.embed.weight.data_ptr()


def test_a_failed_load_changes_nothing_but_what_torch_changes():
    """Field case 69."""
    model = made(Stack, 4, 40)
    ref = aligned_copy(model)
    wrap(model, tight_budget(model))
    check(model, ref)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    state["blocks.1.up.weight"] = torch.zeros(3, 3)
    with pytest.raises(RuntimeError, match="blocks.1.up.weight"):
        model.load_state_dict(state)
    check(model, ref)


def test_optimizers_step_on_the_host_masters():
    """Optimizers made before and after wrapping see the same parameters."""
    model = made(Stack, 4, 40, frozen=False)
    ref = aligned_copy(model)
    before = torch.optim.AdamW(model.blocks[:2].parameters(), lr=0.01)
    wrap(model, 3 * nbytes(model), 1e8)
    after = torch.optim.AdamW([*model.blocks[2:].parameters(), *model.inp.parameters()], lr=0.01)
    theirs = torch.optim.AdamW(
        [*ref.blocks[:2].parameters(), *ref.blocks[2:].parameters(), *ref.inp.parameters()], lr=0.01)
    for _ in range(4):
        x = model.example()[0]
        for net, optimizers in ((model, (before, after)), (ref, (theirs,))):
            loss = net(x).pow(2).sum()
            loss.backward()
            del loss
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            assert same(model(x), ref(x))
    for (name, mine), other in zip(model.named_parameters(), ref.parameters()):
        assert same(mine, other), name


def test_a_parameter_that_replaces_one_takes_its_place():
    model = made(Stack, 4, 40)
    ref = aligned_copy(model)
    wrap(model, tight_budget(model))
    check(model, ref)
    for net in (model, ref):
        torch.manual_seed(3)
        net.blocks[1].up.weight = nn.Parameter(torch.randn(120, 40), requires_grad=False)
        net.blocks[2].up.weight = net.blocks[1].up.weight  # tied anew
    check(model, ref)
    assert model.blocks[2].up.weight is model.blocks[1].up.weight
    with torch.no_grad():
        for net in (model, ref):
            net.blocks[1].up.weight.mul_(2)
    check(model, ref)
    for net in (model, ref):
        net.blocks[3].up.bias = None
        net.blocks[0].up.bias = None
        net.blocks[0].up.weight = nn.Parameter(torch.ones(120, 40, dtype=torch.float64), requires_grad=False)
    with torch.no_grad():
        x = torch.randn(2, 40, dtype=torch.float64)
        assert same(model.blocks[0].up(x), ref.blocks[0].up(x))


def test_data_of_another_shape_is_refused_by_name():
    model = made(Stack, 3, 40)
    wrap(model, tight_budget(model))
    model.blocks[1].up.weight.data = torch.randn(10, 40)
    with torch.no_grad(), pytest.raises(stagehand.StagehandError, match="blocks.1.up.weight"):
        model(*model.example())


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_what_a_forward_writes_into_its_weight_stays(context):
    """Field case 47 and its like: the write must not be lost when the layer leaves the device."""
    class Clamping(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.weight.mul_(0.9)
            return super().forward(x)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(500, 64, max_norm=0.7)
            self.layers = nn.ModuleList(Clamping(64, 64) for _ in range(6))

        def forward(self, ids):
            x = self.table(ids)
            for layer in self.layers:
                x = layer(x)
            return x

    model = made(Net)
    ref = aligned_copy(model)
    wrap(model, nbytes(model) // 2 + 500 * 256, inference_mode=True)
    assert "table.weight" in runtime(model).report
    with context():
        for _ in range(4):
            ids = torch.randint(500, (3,))
            assert same(model(ids), ref(ids))
    for (name, mine), theirs in zip(model.named_parameters(), ref.parameters()):
        assert same(mine, theirs), name


# ---------------------------------------------------------------------- adapters, and other changes of the model


class Merging(Adapted):
    """An adapter with a scale, which can be added to the weight and taken away from it."""

    def __init__(self, base):
        super().__init__(base)
        self.scale = 1.0
        self.merged = False

    def delta(self):
        return self.scale * self.up.weight @ self.down.weight

    def merge(self):
        self.base.weight.data += self.delta()
        self.merged = True

    def unmerge(self):
        self.base.weight.data -= self.delta()
        self.merged = False

    def forward(self, x):
        return self.base(x) if self.merged else self.base(x) + self.scale * self.up(self.down(x))


@card.on_the_host
def test_adapters_added_scaled_merged_and_removed_after_wrapping():
    model = made(Stack, 5, 40)
    ref = aligned_copy(model)
    wrap(model, tight_budget(model), 5e7)
    check(model, ref)
    for net in (model, ref):
        torch.manual_seed(5)
        for block in net.blocks:
            block.up = Merging(block.up)
        net.requires_grad_(False)
    check(model, ref)
    for change in ("scale", "merge", "unmerge", "merge"):
        for net in (model, ref):
            for block in net.blocks:
                block.up.scale = 0.5 if change == "scale" else block.up.scale
                if change != "scale":
                    getattr(block.up, change)()
        check(model, ref, 2)
    for net in (model, ref):
        for block in net.blocks:
            block.up = block.up.base
    check(model, ref)
    runtime(model).shutdown()
    assert all("forward" not in vars(module) for module in model.modules())


def test_adapters_train_while_frozen_weights_stream():
    model = made(Stack, 5, 40)
    wrap(model, 3 * nbytes(model), 1e8)
    ref = aligned_copy(made(Stack, 5, 40))
    for net in (model, ref):
        torch.manual_seed(5)
        for block in net.blocks:
            block.up = Adapted(block.up)
    optimizers = [torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.01) for net in (model, ref)]
    for _ in range(4):
        x = model.example()[0]
        for net, optimizer in zip((model, ref), optimizers):
            net(x).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, mine), theirs in zip(model.named_parameters(), ref.parameters()):
        assert same(mine, theirs), name


def test_a_parametrization_registered_after_wrapping():
    class Halved(nn.Module):
        def forward(self, w):
            return w / 2

    model = made(Stack, 4, 40)
    ref = aligned_copy(model)
    wrap(model, tight_budget(model), 5e7)
    check(model, ref)
    for net in (model, ref):
        nn.utils.parametrize.register_parametrization(net.blocks[1].up, "weight", Halved())
    check(model, ref)
    for net in (model, ref):
        nn.utils.parametrize.remove_parametrizations(net.blocks[1].up, "weight")
    check(model, ref)


def test_the_guard_sees_a_master_that_is_read():
    model = made(Stack, 4, 40)
    wrap(model, tight_budget(model))
    master = model.blocks[1].up.weight
    handle = model.blocks[1].register_forward_hook(lambda *args: master.sum())
    with torch.no_grad(), pytest.raises(AssertionError, match="blocks.1.up.weight"), HostMasterGuard(model):
        model(*model.example())
    handle.remove()
