"""Field cases, section F: strides, offsets and sizes."""

import card
import pytest
import support as s
import torch
from pairs import Row, agree, blocks, both, ends, managed, pair, same_grads, same_weights  # noqa: F401
from torch import nn

import stagehand

FP8 = getattr(torch, "float8_e4m3fn", None)


def small(kind):
    return {
        "bytes": lambda: torch.arange(13, dtype=torch.uint8), "seven": lambda: torch.randn(7),
        "three": lambda: torch.randn(3).bfloat16(), "one": lambda: torch.randn(1, dtype=torch.float64),
        "two": lambda: torch.randn(2, dtype=torch.complex64), "five": lambda: torch.randn(5).to(FP8),
    }[kind]()


KINDS = ["bytes", "seven", "three", "one", "two"] + (["five"] if FP8 is not None else [])


class Odd(nn.Module):
    """Small tensors of every item size between each other, in an order that is given, and a Linear."""

    def __init__(self, order, d=48):
        super().__init__()
        for kind in order:
            setattr(self, kind, nn.Parameter(small(kind), requires_grad=False))
        self.main = nn.Parameter(torch.randn(d, d))
        self.lin = nn.Linear(d, d)
        self.addresses = {}

    def forward(self, x):
        self.addresses = {name: p.data_ptr() for name, p in self._parameters.items()}
        total = sum(getattr(self, kind).to(torch.complex64).abs().sum() if kind == "two" else
                    getattr(self, kind).float().sum() for kind in KINDS)
        return self.lin(torch.tanh(x @ self.main)) + total

    def example(self):
        return (torch.randn(2, 48),)


class OddStack(nn.Module):
    def __init__(self):
        super().__init__()
        orders = [KINDS, KINDS[::-1], KINDS[1::2] + KINDS[::2], KINDS[2:] + KINDS[:2], KINDS]
        self.blocks = nn.ModuleList(Odd(order) for order in orders)

    def forward(self, x):
        for block in self.blocks:
            x = block(x) / 50
        return x

    def example(self):
        return (torch.randn(2, 48),)


def test_39_tensors_of_every_item_size_beside_each_other():
    model = s.made(OddStack)
    ref = s.aligned_copy(model)
    budget = s.tight_budget(model)
    runtime = blocks(model, budget, device=s.device(budget, 1e8))
    with torch.no_grad():
        for _ in range(4):
            x = model.example()[0]
            assert s.same(model(x), ref(x))
            for block in model.blocks:
                assert len(block.addresses) == len(KINDS) + 1
                assert all(address % 512 == 0 for address in block.addresses.values())
    tensors = list(model.parameters())
    assert runtime.stats["host_bytes"] <= sum(p.nbytes for p in tensors) + 512 * len(tensors)
    runtime.shutdown()
    same_weights(model, ref)


# ---------------------------------------------------------------------- 41: views of one flat storage


class Flat(Row):
    """Three parameters that are slices of one flat tensor, at odd offsets."""

    def __init__(self, d=48):
        super().__init__([], 2, d)
        self.flat = [torch.randn(3 * d * d + 16)]
        for i in range(3):
            lin = nn.Linear(d, d, bias=False)
            begin = 1 + i * (d * d + 3)
            lin.weight = nn.Parameter(self.flat[0][begin : begin + d * d].view(d, d))
            self.blocks.append(lin)


def test_41_slices_of_one_flat_tensor():
    """Each has memory of its own from wrapping on, so that what is written to the flat tensor shows no more: that is
    the limit; what is written to the parameters does, and host memory does not grow with the number of views."""
    model, ref = pair(Flat, budget=lambda m: 2 * s.nbytes(m.blocks[0]) + 1024, link=1e8)
    own = sum(p.nbytes for p in model.parameters())
    assert s.runtime(model).stats["host_bytes"] < 1.2 * own
    agree(model, ref)
    for _ in range(2):
        x = model.example()[0]
        for net in (model, ref):
            net(x).pow(2).sum().backward()
        same_grads(model, ref)
    before = model.blocks[1].weight.clone()
    model.flat[0].fill_(7)
    assert s.same(model.blocks[1].weight, before)
    with torch.no_grad():
        for net in (model, ref):
            net.blocks[1].weight.mul_(2)
    agree(model, ref)


def test_41_flattened_recurrent_weights():
    model, ref = pair(s.RecurrentNet, budget=lambda m: s.smallest_budget(m) + (1 << 20), frozen=True)
    agree(model, ref, 2)
    for net in (model, ref):
        net.lstm.flatten_parameters()
        net.gru.flatten_parameters()
    agree(model, ref, 2)
    assert all(a is b for a, b in zip(model.lstm._flat_weights, model.lstm.parameters()))


# ---------------------------------------------------------------------- 43: scalars


class Scalars(nn.Module):
    def __init__(self, d=48):
        super().__init__()
        self.scalar, self.one = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(1))
        self.lin = nn.Linear(d, d)
        self.shapes = []

    def forward(self, x):
        self.shapes.append((self.scalar.shape, self.one.shape))
        return self.lin(x) * self.scalar * self.one


def test_43_scalars_keep_their_rank():
    """Small ones stay on the device where its budget has room; here it has none, so they stream."""
    model = s.made(lambda: nn.Sequential(*(Scalars() for _ in range(5))), frozen=False)
    ref = s.aligned_copy(model)
    budget = 2 * s.nbytes(model[0])
    runtime = blocks(model, budget, r"^\d+$", s.device(budget, 1e8))
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in (model, ref)]
    for _ in range(3):
        x = torch.randn(2, 48)
        for net, optimizer in zip((model, ref), optimizers):
            optimizer.zero_grad()
            net(x).pow(2).mean().backward()
            optimizer.step()
        same_grads(model, ref)
    assert set(model[2].shapes) == {(torch.Size([]), torch.Size([1]))}
    for name, value in model.state_dict().items():
        assert value.shape == ref.state_dict()[name].shape
    for mine, theirs in zip(model.parameters(), ref.parameters()):
        assert mine.shape == theirs.shape == mine.grad.shape
        state, other = (o.state[p] for o, p in zip(optimizers, (mine, theirs)))
        assert {k: v.shape for k, v in state.items()} == {k: v.shape for k, v in other.items()}
    runtime.shutdown()
    same_weights(model, ref)


# ---------------------------------------------------------------------- own


class Nine(nn.Module):
    """More dimensions than a view of the core has, each in an order of its own; size-1 dimensions with odd strides."""

    def __init__(self, i=0):
        super().__init__()
        self.deep = nn.Parameter(torch.randn(2, 3, 1, 2, 2, 3, 1, 2, 5).permute(8, 0, 7, 1, 6, 2, 5, 3, 4))
        odd = torch.randn(600).as_strided((20, 1, 30), (30, 997, 1))
        self.odd = nn.Parameter(odd)
        self.turned = nn.Parameter(torch.randn(30, 40).t())

    def forward(self, x):
        return x @ self.odd.squeeze(1).t() @ torch.ones(20, 30) * self.deep.sum() + (x @ self.turned.t()) @ self.turned

    def example(self):
        return (torch.randn(2, 30),)


@card.on_the_host
def test_own_nine_dimensions_and_odd_strides_train_and_keep_their_layout():
    model = s.made(lambda: nn.Sequential(*(Nine(i) for i in range(5))), frozen=False)
    ref = s.aligned_copy(model)
    strides = [p.stride() for p in ref.parameters()]
    budget = 2 * s.nbytes(model[0]) + 2048
    runtime = blocks(model, budget, r"^\d+$", s.device(budget, 1e8))
    for _ in range(3):
        x = torch.randn(2, 30) / 1000
        for net in (model, ref):
            net(x).pow(2).mean().backward()
        same_grads(model, ref)
        assert [p.grad.stride() for p in model.parameters()] == [p.grad.stride() for p in ref.parameters()]
    runtime.shutdown()
    assert [p.stride() for p in model.parameters()] == strides
    same_weights(model, ref)


def test_own_layers_of_very_different_sizes():
    """From 4 bytes to 300 times the next: what is streamed round what, and whether each place fits."""
    sizes = [1, 300, 2, 120, 1, 60, 250, 3, 1, 200, 17]
    model = s.made(lambda: Row([nn.Linear(a, b) for a, b in zip(sizes, sizes[1:])], 2, 1), frozen=False)
    ref = s.aligned_copy(model)
    largest = max(s.nbytes(block) for block in model.blocks)
    for share in (0, 20_000, 200_000):
        managed(model, s.nbytes(model) - sum(map(s.nbytes, model.blocks)) + 2 * largest + 8192 + share, 3e8)
        for _ in range(3):
            x = model.example()[0]
            for net in (model, ref):
                net(x).pow(2).sum().backward()
            same_grads(model, ref)
        s.runtime(model).shutdown()
        same_weights(model, ref)


def rounded(net):
    return net.to(torch.bfloat16, memory_format=torch.channels_last).float()


@pytest.mark.parametrize("move", [lambda n: n.to(memory_format=torch.channels_last), lambda n: n.requires_grad_(True),
                                  rounded])
def test_own_layouts_that_are_asked_for_after_wrapping(move):
    """And the other one again. What has that layout already is left alone."""
    def convs():
        return Row([nn.Conv2d(16, 16, 3, padding=1) for _ in range(5)], 1, 16, 6, 6)

    model, ref = pair(convs, frozen=True, budget=lambda m: 3 * s.nbytes(m.blocks[0]))
    for change in (lambda n: n, move, move, lambda n: n.to(memory_format=torch.contiguous_format), move):
        before = [p.data_ptr() for p in model.parameters()], [p.stride() for p in model.parameters()]
        both(model, ref, change)
        ref = s.aligned_copy(ref)
        agree(model, ref, 2)
        now = [p.data_ptr() for p in model.parameters()], [p.stride() for p in model.parameters()]
        assert now[1] == [p.stride() for p in ref.parameters()]
        assert now[0] == before[0] or now[1] != before[1] or change is rounded
    assert s.runtime(model).stats["h2d_bytes"] > 0


def test_own_another_layout_of_files_is_refused_by_name(tmp_path):
    import file_support as f

    model = s.made(lambda: Row([nn.Conv2d(16, 16, 3, padding=1) for _ in range(5)], 1, 16, 6, 6))
    ref = s.aligned_copy(model)
    f.save(tmp_path / "model.safetensors", model.state_dict())
    budget = 3 * s.nbytes(model.blocks[0])
    stagehand.layer(model, vram_budget=budget, device=s.device(budget), source=tmp_path / "model.safetensors")
    with pytest.raises(stagehand.StagehandError, match="stream from files"):
        model.to(memory_format=torch.channels_last)
    agree(model, ref, 2)


def test_own_strange_names_go_through_errors_records_and_files(tmp_path):
    """Quotes, newlines, control characters, other scripts and 5000 letters, in telemetry and in statistics."""
    import json

    names = ['a "quoted\\ one', "new\nline\tand\x01", "é😀名", "x" * 5000, "%s%n{}"]
    model = nn.ModuleDict({name: nn.Linear(48, 48) for name in names}).requires_grad_(False)
    path = tmp_path / "steps.jsonl"
    managed(model, 30_000, telemetry=str(path))
    with torch.no_grad():
        for _ in range(3):
            for name in names:
                model[name](torch.ones(1, 48))
    assert [unit["name"] for unit in s.runtime(model).stats["units"]] == names
    with pytest.raises(stagehand.StagehandOOMError):
        s.runtime(model).set_vram_budget(100)
    s.runtime(model).shutdown()
    for line in path.read_text().splitlines():
        json.loads(line)


def test_own_a_name_that_is_no_text():
    """A lone surrogate, which a string of Python may hold and UTF-8 may not."""
    model = nn.ModuleDict({"\udcff": nn.Linear(48, 48), "b": nn.Linear(48, 48)}).requires_grad_(False)
    ref = s.aligned_copy(model)
    managed(model, 20_000)
    with torch.no_grad():
        x = torch.ones(1, 48)
        assert s.same(model["\udcff"](x), ref["\udcff"](x))
    assert len(s.runtime(model).stats["units"]) == 2


def test_own_memory_that_processes_share_is_named_when_it_is_left():
    """Programs that train in several processes call share_memory() first; a managed weight is one process's."""
    model = s.made(s.Stack, 4, 40, frozen=False)
    model.share_memory()
    ref = s.aligned_copy(model)
    with pytest.warns(RuntimeWarning, match=r"inp\.weight and \d+ more were in memory that is shared"):
        managed(model, s.tight_budget(model))
    agree(model, ref, 2)
