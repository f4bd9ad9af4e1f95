"""Field case 226: `ram_budget` of weights in RAM bounds how much of them is pinned."""

from __future__ import annotations

import warnings

import pytest
import stagehand
import support as s
from worlds import infer, managed, run, state, train

BOUNDS = [1, 4096, 50_000, 120_000, "1GB", None]


def pinned(model) -> int:
    """Bytes of pinned host memory, slabs left out."""
    stats = run(model).stats
    return stats["pinned_bytes"] - stats["staging_bytes"]


@pytest.mark.combinations("each mode bounds pins by itself")
@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("mode", ["layer", "block"])
def test_226_no_more_of_the_weights_is_pinned_than_ram_budget_says(mode, bound):
    model = s.made(s.Stack, frozen=False)
    ref, x = s.aligned_copy(model), model.example()[0]
    budget = s.tight_budget(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if mode == "layer":
            s.wrap(model, budget, ram_budget=bound)
        else:
            stagehand.StagehandRuntime(model, stagehand.StagehandConfig(vram_budget=budget), r"^blocks\.\d+$",
                                       device=s.device(budget), ram_budget=bound).prepare()
    stats = run(model).stats
    most = stagehand.parse_size(bound) if isinstance(bound, str) else bound
    if most is None or most > stats["host_bytes"]:
        assert pinned(model) == stats["host_bytes"]
    else:
        assert pinned(model) <= most
        assert pinned(model) > most - 60_000  # it is used, but for what no weight fits into
        assert stats["staging_bytes"] > 0
    for _ in range(3):
        assert s.same(infer(model, x), infer(ref, x)) and s.same(train(model, x), train(ref, x))
    run(model).shutdown()
    assert s.same(state(model), state(ref))


@pytest.mark.parametrize("bound", [1, 20_000])
def test_226_the_bound_holds_with_packed_weights(bound):
    wanted, _ = managed(s.Stack, 6, 64, transfer="int8")
    model, _ = managed(s.Stack, 6, 64, transfer="int8", ram_budget=bound)
    assert pinned(model) <= bound < pinned(wanted)
    x = model.example()[0]
    assert all(s.same(infer(model, x), infer(wanted, x)) for _ in range(3))


@pytest.mark.parametrize("bound", [1, 60_000, None])
def test_226_weights_that_are_given_other_data_keep_the_bound(bound):
    model, ref = managed(ram_budget=bound)
    x, before = model.example()[0], pinned(model)
    held = [p.data for p in model.parameters()]
    for net in (model, ref):
        for p in net.parameters():
            p.data = p.data * 0.5
    for _ in range(3):
        assert s.same(infer(model, x), infer(ref, x))
    assert bound is None or pinned(model) <= max(before, bound)
    assert len(held) == len(list(model.parameters()))
    for value, p in zip(held, ref.parameters()):
        assert s.same(value * 0.5, p.data)


def test_226_a_bound_that_is_no_size_is_refused_and_the_model_stays_plain():
    for bound in (0, -1, "many"):
        model = s.made(s.Stack)
        with pytest.raises(ValueError):
            stagehand.layer(model, vram_budget="1MB", device="sim", ram_budget=bound)
        assert "_stagehand_layer_runtime" not in vars(model)
