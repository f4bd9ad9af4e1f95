"""Weights that are tensor subclasses around tensors stream as the bytes inside them (stagehand/wrapping.py)."""

from __future__ import annotations

import copy
import gc
import io
import threading

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import stagehand  # noqa: E402
from stagehand.wrapping import inside  # noqa: E402
from support import device, made, runtime, same, wrap  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from wrapping_support import Raised, Rows, aligned, held, quantised, stack  # noqa: E402


def three_blocks(model) -> int:
    """A budget that holds three of the model's blocks and what is outside them."""
    return held(model) - sum(held(block) for block in model.blocks) + 3 * held(model.blocks[0]) + 8192


def kept(model) -> dict:
    return {name: why for name, why in runtime(model).report.items() if "subclass" in str(why)}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("inference_mode", [False, True])
def test_the_bytes_inside_stream_and_results_are_the_same(nested, inference_mode):
    model = stack(nested=nested)
    ref, weights, x = aligned(model), list(model.parameters()), model.example()
    budget = three_blocks(model)
    wrap(model, budget, link=1e9, inference_mode=inference_mode)
    with torch.no_grad():
        for _ in range(4):
            assert same(model(*x), ref(*x))
    stats = runtime(model).stats
    assert not kept(model) and stats["copies"] >= 8
    assert stats["device_peak"] + stats["reserved_bytes"] <= budget < held(model)
    assert all(a is b for a, b in zip(weights, model.parameters()))
    runtime(model).shutdown()
    with torch.no_grad():
        assert same(model(*x), ref(*x))
    assert all(a is b for a, b in zip(weights, model.parameters()))
