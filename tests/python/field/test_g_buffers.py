"""Field cases, section G: buffers and dtypes."""

import card
import pytest
import support as s
import torch
from file_support import save
from file_support import state as saved_state
from pairs import agree, blocks, both, cuda, ends, managed, pair, same_grads, same_weights, within  # noqa: F401
from torch import nn

import stagehand


class Rotary(nn.Module):
    """Each block has a table that is in no state dict, and a cache that each forward exchanges."""

    def __init__(self, d=48):
        super().__init__()
        self.lin, self.out = nn.Linear(d, d), nn.Linear(d, d)
        self.register_buffer("table", torch.randn(d), persistent=False)
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, x):
        self.cache = torch.full((len(self.cache) + 1,), float(x.sum()))
        return x + self.out(torch.tanh(self.lin(x) * self.table)) + self.cache.sum() / 1e3


class RotaryStack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Rotary() for _ in range(5))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def example(self):
        return (torch.randn(2, 48),)


@pytest.mark.parametrize("tier", ["ram", "disk"])
@pytest.mark.parametrize("mode", ["layer", "block"])
def test_45_buffers_that_are_not_saved(tmp_path, mode, tier):
    model = s.made(RotaryStack)
    ref = s.aligned_copy(model)
    save(tmp_path / "w.safetensors", saved_state(model))
    budget = s.tight_budget(model) + 4096
    if mode == "layer":
        managed(model, budget, 3e8, **({"source": tmp_path / "w.safetensors"} if tier == "disk" else {}))
        runtime = s.runtime(model)
    else:
        runtime = blocks(model, budget)
        if tier == "disk":
            runtime.convert_registry_to_file_backed(tmp_path / "w.safetensors")
    with torch.no_grad():
        for _ in range(4):
            x = model.example()[0]
            assert s.same(model(x), ref(x))
    assert not any("table" in name or "cache" in name for name in model.state_dict())
    for shut in (False, True):
        if shut:
            runtime.shutdown()
        for (name, mine), theirs in zip(model.named_buffers(), ref.buffers()):
            assert s.same(mine, theirs), name
        assert len(model.blocks[0].cache) == 6


class OneTable(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Embedding(5, 64, max_norm=0.7) for _ in range(4))

    def forward(self, ids):
        return sum(block(ids) for block in self.blocks)


@pytest.mark.parametrize("frozen", [False, True])
def test_47_an_embedding_that_renormalises_its_rows(frozen):
    model = s.made(OneTable, frozen=frozen)
    ref = s.aligned_copy(model)
    runtime = blocks(model, 4 * s.nbytes(model), inference_mode=True)
    with torch.no_grad():
        for ids in ([0, 1], [4, 4, 2], [3], [0, 1, 2, 3, 4]):
            assert s.same(model(torch.tensor(ids)), ref(torch.tensor(ids)))
            same_weights(model, ref)
    assert all("max_norm" in why for why in runtime.report.values())
    runtime.shutdown()
    same_weights(model, ref)


class Counting(s.Stack):
    """A buffer of the root, which each pass changes in place."""

    def __init__(self):
        super().__init__(4, 40)
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x):
        self.count += 1
        return super().forward(x) * self.count[0]


@card.on_the_host
def test_49_moves_of_the_whole_model_between_phases():
    model, ref = pair(Counting, frozen=True)
    for move in (lambda net: net.to("cpu"), lambda net: net.to(torch.device("cpu")), lambda net: net.cpu()):
        agree(model, ref, 2)
        assert move(model) is model
    agree(model, ref, 2)
    with pytest.raises(stagehand.StagehandError, match="under stagehand.*shutdown"):
        model.to("meta")
    agree(model, ref, 2)
    assert s.same(model.count, ref.count) and within(model, s.runtime(model).session.budget)


@cuda
@pytest.mark.alone
def test_49_on_a_card():
    model = s.made(Counting)
    ref = s.aligned_copy(model).cuda()
    stagehand.layer(model, vram_budget=s.tight_budget(model))
    with torch.no_grad():
        for move in ("cpu", "cuda", "cpu"):
            x = torch.randn(2, 40)
            assert torch.equal(model(x), ref(x.cuda()))
            try:
                model.to(move)
            except stagehand.StagehandError as error:
                assert "under stagehand" in str(error)
            assert model.count.is_cuda
    s.runtime(model).shutdown()


# ---------------------------------------------------------------------- own


@card.on_the_host
def test_own_another_default_device_while_it_is_wrapped_used_and_given_back(tmp_path):
    """`torch.set_default_device("cuda")` is common. "meta" stands for it here: host memory that is made there by
    mistake has no values."""
    model = s.made(Counting, frozen=False)
    ref = s.aligned_copy(model)
    save(tmp_path / "w.safetensors", saved_state(model))
    x, given = torch.randn(2, 40), torch.ones(2, 40)
    for source in (None, tmp_path / "w.safetensors"):
        with torch.device("meta"):
            managed(model, s.tight_budget(model) + 4096, inference_mode=source is not None,
                    **({"source": source} if source is not None else {}))
            if source is None:
                model(x).backward(given)
                optimizer = stagehand.optim.OffloadedAdamW(model.parameters(), lr=0.0)
                optimizer.step()
            else:
                with torch.no_grad():
                    got = model(x)
            s.runtime(model).shutdown()
        if source is None:
            ref(x).backward(given)
            same_grads(model, ref)
        else:
            assert s.same(got, ref(x))
        same_weights(model, ref)
        assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))


def test_own_another_default_dtype_changes_nothing():
    model = s.made(Counting, frozen=False)
    ref = s.aligned_copy(model)
    x = torch.randn(2, 40)
    torch.set_default_dtype(torch.float64)
    try:
        managed(model, s.tight_budget(model) + 4096)
        for net in (model, ref):
            net(x).pow(2).sum().backward()
        same_grads(model, ref)
        s.runtime(model).shutdown()
    finally:
        torch.set_default_dtype(torch.float32)
    same_weights(model, ref)
    assert all(t.dtype is torch.float32 for t in (*model.parameters(), *model.buffers()))


class Kinds(nn.Module):
    """Buffers of every kind: shared between blocks, in a state dict under one name and not under the other, views of
    each other, empty, complex, boolean, and one of a class of its own that torch knows since 2.5."""

    def __init__(self, d=48):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(d, d) for _ in range(4))
        whole = torch.zeros(8)
        self.register_buffer("whole", whole)
        self.register_buffer("part", whole[2:5], persistent=False)
        self.blocks[1].register_buffer("seen", whole)
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("turns", torch.randn(d // 2, dtype=torch.complex64))
        self.register_buffer("mask", torch.rand(d) > 0.3)
        self.register_buffer("none", None)
        self.bn = nn.BatchNorm1d(d, momentum=0.3)
        if hasattr(nn, "Buffer"):
            self.newer = nn.Buffer(torch.ones(d))

    def forward(self, x):
        self.part += 1
        for block in self.blocks:
            x = torch.tanh(block(x)) * self.mask
        x = torch.view_as_real(torch.view_as_complex(x.view(x.shape[0], -1, 2)) * self.turns).flatten(1)
        self.blocks[1].seen[0] += self.whole.sum()
        return self.bn(x) * self.blocks[1].seen.sum()

    def example(self):
        return (torch.randn(4, 48),)


@card.on_the_host
def test_own_buffers_that_share_memory_go_on_sharing_it():
    model, ref = s.made(Kinds), s.made(Kinds)
    for net in (model, ref):
        net.train()
        net.blocks.requires_grad_(True)
    managed(model, s.tight_budget(model) + 8192, 3e8)
    for step in range(4):
        x = model.example()[0]
        for net in (model, ref):
            net(x).pow(2).sum().backward()
        for (name, mine), theirs in zip(model.named_buffers(), ref.buffers()):
            assert torch.allclose(mine, theirs), (step, name)
        assert model.blocks[1].seen is model.whole and float(model.whole[3]) == float(model.part[1]) == step + 1
    state = {name: value.clone() for name, value in model.state_dict().items()}
    state["whole"].fill_(2)
    state["blocks.1.seen"].fill_(2)
    model.load_state_dict(state)
    assert bool((model.part == 2).all())
    s.runtime(model).shutdown()
    model.whole.fill_(3)
    assert bool((model.part == 3).all()) and model.blocks[1].seen is model.whole


def test_own_a_buffer_that_is_registered_removed_and_registered_again_while_it_runs():
    """A cache of keys that is made in the first forward and grows; reset between steps; never in the way of a
    shutdown."""
    class Cached(nn.Linear):
        def forward(self, x):
            if "keys" not in self._buffers:
                self.register_buffer("keys", x.detach().clone(), persistent=False)
            self.keys = torch.cat([self.keys, x.detach()])
            return super().forward(x) + self.keys.mean(0)

    model, ref = pair(lambda: nn.Sequential(*(Cached(48, 48) for _ in range(5))), frozen=True,
                      budget=lambda m: 3 * s.nbytes(m[0]))
    for turn in range(3):
        agree(model, ref, 3, inputs=(torch.randn(2, 48),))
        for net in (model, ref):
            for layer in net:
                del layer.keys
    agree(model, ref, 2, inputs=(torch.randn(2, 48),))
    s.runtime(model).shutdown()
    for mine, theirs in zip(model.buffers(), ref.buffers()):
        assert s.same(mine, theirs)


@card.on_the_host
def test_own_inputs_and_outputs_that_are_buffers_or_weights_themselves():
    """A pass that returns a buffer, and one that is given a weight of the model as its input."""
    model, ref = pair(Counting, frozen=True)
    with torch.no_grad():
        got, want = both(model, ref, lambda net: net(net.inp.weight))
        assert s.same(got, want)
        got, want = both(model, ref, lambda net: net(net.blocks[2].up.weight[:5].contiguous()))
        assert s.same(got, want)
        got, want = both(model, ref, lambda net: net.blocks[0].norm(net.inp.weight))
        assert s.same(got, want)
    agree(model, ref)


class Packed(nn.Module):
    """A layer as GPTQ's and AWQ's are: codes and scales are buffers."""

    def __init__(self, d=1024):
        super().__init__()
        self.register_buffer("codes", torch.randint(-127, 127, (d, d), dtype=torch.int8))
        self.register_buffer("scales", torch.rand(d, 1) / 1e4)

    def forward(self, x):
        return nn.functional.linear(x, self.codes.to(x.dtype) * self.scales)


def test_221_weights_in_buffers_stay_and_are_counted_and_the_rest_streams():
    def build():
        return nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024, bias=False), Packed()) for _ in range(3)))

    model = s.made(build)
    ref, x = s.aligned_copy(model), torch.randn(2, 1024)
    packed = sum(buffer.nbytes for buffer in model.buffers())
    s.wrap(model, packed + 2 * model[0][0].weight.nbytes + (1 << 16))
    with torch.no_grad():
        for _ in range(3):
            assert s.same(model(x), ref(x))
    stats = s.runtime(model).stats
    assert stats["reserved_bytes"] >= packed and stats["h2d_bytes"] >= 3 * model[0][0].weight.nbytes
    s.runtime(model).shutdown()


def test_221_a_model_whose_weights_are_all_in_buffers_is_told_so():
    model = s.made(lambda: nn.Sequential(Packed(), Packed()))
    held = sum(buffer.nbytes for buffer in model.buffers())
    with pytest.raises(ValueError, match=f"No eligible layers.* buffers hold {held} bytes, and buffers stay"):
        stagehand.layer(model, vram_budget="1MB", device=card.NAME)
