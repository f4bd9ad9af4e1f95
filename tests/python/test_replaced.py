"""Weights that are replaced, or added, after wrapping: what does not stream is counted in the budget, and said."""

import copy
import warnings

import pytest
import stagehand
import torch
from support import Stack, aligned_copy, device, made, nbytes, runtime, same, smallest_budget, wrap
from torch import nn
from wrapping_support import Rows

D = 256
WEIGHT = D * D * 4


def stack(frozen=True):
    return made(Stack, 6, D, 1, frozen=frozen)


class Wide(nn.Linear):
    """Takes weights of any dtype and height."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype))[..., :D]


def wide():
    model = stack()
    for block in model.blocks:
        block.up = Wide(D, D, bias=False).requires_grad_(False)
    return model


def parameter(data):
    return nn.Parameter(data, requires_grad=False)


CHANGES = {
    "dtype": lambda weight: parameter(weight.detach().bfloat16()),
    "shape": lambda weight: parameter(torch.cat([weight.detach(), weight.detach()])),
    "class": lambda weight: parameter(Rows.of(weight.detach())),
}


def kept_within(model, budget):
    stats = runtime(model).stats
    assert stats["device_bytes"] + stats["reserved_bytes"] <= budget
    return stats


@pytest.mark.parametrize("change", CHANGES)
def test_a_weight_of_another_kind_is_counted_and_said(change):
    model, x = wide(), torch.randn(2, D)
    ref, budget = aligned_copy(model), nbytes(model) * 2 // 3
    wrap(model, budget)
    own = runtime(model)
    with torch.no_grad():
        assert same(model(x), ref(x))
        before = own.stats["reserved_bytes"]
        for net in (model, ref):
            net.blocks[2].up.weight = CHANGES[change](net.blocks[2].up.weight)
        with pytest.warns(RuntimeWarning, match=r"blocks\.2\.up\.weight streamed and was replaced.*wrap again, with"):
            assert same(model(x), ref(x))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(4):
                assert same(model(x), ref(x))
                grown = kept_within(model, budget)["reserved_bytes"] - before
        assert grown == {"dtype": WEIGHT // 2, "shape": 2 * WEIGHT}.get(change, grown) and grown >= D * D
        assert "replaced after wrapping" in own.report["blocks.2.up.weight"]
        for net in (model, ref):
            net.blocks[2].up.weight = parameter(torch.full((D, D), 0.25))
        for _ in range(3):
            assert same(model(x), ref(x))
        assert kept_within(model, budget)["reserved_bytes"] == before and "blocks.2.up.weight" not in own.report
    own.shutdown()
    assert same(model(x), ref(x))


def test_many_are_said_in_one_warning():
    model, x = wide(), torch.randn(2, D)
    ref, budget = aligned_copy(model), nbytes(model)
    wrap(model, budget)
    for net in (model, ref):
        for block in net.blocks:
            block.up.weight = CHANGES["class"](block.up.weight)
    with torch.no_grad():
        with pytest.warns(RuntimeWarning, match=r"blocks\.\d\.up\.weight and 5 more streamed and was replaced") as seen:
            for _ in range(3):
                assert same(model(x), ref(x))
        assert len([warning for warning in seen if "replaced" in str(warning.message)]) == 1
        kept_within(model, budget)
        runtime(model).shutdown()  # what the warning says
        wrap(model, budget // 2)
        assert not any("up.weight" in name for name in runtime(model).report)
        for _ in range(3):
            assert same(model(x), ref(x))
    runtime(model).shutdown()


def test_without_room_it_is_an_error_and_never_more_than_the_budget():
    model, x = wide(), torch.randn(2, D)
    model.example = lambda: (x,)
    budget = smallest_budget(model)
    del model.example
    stagehand.layer(model, vram_budget=budget, device=device(1 << 30))
    ref = aligned_copy(copy.deepcopy(model))
    with torch.no_grad():
        want = ref(x)
        assert same(model(x), want)
        streams = model.blocks[1].up.weight
        model.blocks[1].up.weight = CHANGES["dtype"](streams)
        for _ in range(3):
            with pytest.raises(stagehand.StagehandOOMError, match=r"\.1\.up\.weight came after wrapping.*wrap again"):
                model(x)
            kept_within(model, budget)
        model.blocks[1].up.weight = streams
        assert same(model(x), want)
        model.blocks[1].up.weight = CHANGES["dtype"](streams)
        with pytest.raises(stagehand.StagehandOOMError, match=r"blocks\.1\.up\.weight"):
            model(x)
        runtime(model).set_vram_budget(budget + WEIGHT)
        ref.blocks[1].up.weight = CHANGES["dtype"](ref.blocks[1].up.weight)
        with pytest.warns(RuntimeWarning, match="replaced after wrapping"):
            assert same(model(x), ref(x))
        kept_within(model, budget + WEIGHT)
    runtime(model).shutdown()


def test_between_two_forwards_of_one_step():
    model, x = wide(), torch.randn(2, D)
    ref, budget = aligned_copy(model), nbytes(model) * 2 // 3
    wrap(model, budget)
    own = runtime(model)
    with torch.no_grad():
        for _ in range(2):
            assert same(model(x), ref(x))
        own.begin_step()
        assert same(model(x), ref(x))
        for net in (model, ref):
            net.blocks[3].up.weight = CHANGES["dtype"](net.blocks[3].up.weight)
        assert same(model(x), ref(x))
        own.end_step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(3):
                assert same(model(x), ref(x))
        kept_within(model, budget)
        assert "replaced" in own.report["blocks.3.up.weight"]
    own.shutdown()


def test_adapters_that_are_added_are_counted():
    class Adapted(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.a, self.b = base, nn.Linear(D, 8, bias=False), nn.Linear(8, D, bias=False)

        def forward(self, x):
            return self.base(x) + self.b(self.a(x))

    model, x = stack(), torch.randn(2, D)
    budget = nbytes(model) * 2 // 3
    ref = aligned_copy(model)
    wrap(model, budget)
    with torch.no_grad():
        assert same(model(x), ref(x))
    before = runtime(model).stats["reserved_bytes"]
    for i in range(6):
        torch.manual_seed(i)
        adapter = Adapted(None)
        for net in (model, ref):
            mine = copy.deepcopy(adapter)
            mine.base, net.blocks[i].up = net.blocks[i].up, mine
    ref = aligned_copy(ref)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            for net in (model, ref):
                net(x).square().mean().backward()
            assert all(same(a.grad, b.grad) for a, b in zip(model.parameters(), ref.parameters()) if b.grad is not None)
    stats = kept_within(model, budget)
    assert stats["reserved_bytes"] - before == 6 * 2 * 8 * D * 4
    assert runtime(model).report["blocks.0.up.a.weight"] == "it was added after wrapping"
    runtime(model).shutdown()


class Sliced(nn.Module):
    """Runs a slice of its layers, as models of transformers do, which makes a list of modules in each pass."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(4))

    def forward(self, x):
        for layer in self.layers[:3]:
            x = layer(x)
        return x


def test_lists_made_in_a_pass_are_no_news_and_modules_put_in_by_hand_are(monkeypatch):
    from stagehand.session.writes import Writes

    looks, look = [], Writes._look_around
    monkeypatch.setattr(Writes, "_look_around", lambda self: (looks.append(1), look(self)))
    torch.manual_seed(0)
    model, x = Sliced(), torch.randn(2, D)
    ref = aligned_copy(model)
    wrap(model, 3 * WEIGHT)
    with torch.no_grad():
        for _ in range(3):
            assert same(model(x), ref(x))
        assert not looks
        layer = nn.Linear(D, D)
        for net in (model, ref):
            net.layers._modules["1"] = copy.deepcopy(layer)
        ref = aligned_copy(ref)
        for _ in range(2):
            assert same(model(x), ref(x))
    assert len(looks) == 1
    assert runtime(model).report["layers.1.weight"] == "it was added after wrapping"
    runtime(model).shutdown()


def test_one_module_in_another_dtype_streams_on():
    """.half() and the like of a part: the model is taken over again."""
    model, x = wide(), torch.randn(2, D)
    ref, budget = aligned_copy(model), nbytes(model) // 2
    wrap(model, budget)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same(model(x), ref(x))
        model.blocks[2].up.bfloat16()
        ref.blocks[2].up.bfloat16()
        ref = aligned_copy(ref)
        for _ in range(3):
            assert same(model(x), ref(x))
        assert "blocks.2.up.weight" not in runtime(model).report
        assert any(unit["name"] == "blocks.2.up" for unit in runtime(model).stats["units"])
        kept_within(model, budget)
    runtime(model).shutdown()
