"""What the adapters share: models that stream under the smallest budget that works, and lists of tests that do not
apply, each with its reason."""

from __future__ import annotations

import fnmatch
import functools

import pytest
import torch

import stagehand
from stagehand.errors import StagehandOOMError

DEVICE = "cuda" if torch.cuda.is_available() else "sim"


def stream(model, budget=1, **options):
    """Streams a model with the smallest budget from `budget` on that wraps it, and a quarter more."""
    for _ in range(20):
        try:
            stagehand.layer(model, vram_budget=budget, device=DEVICE, **options)
            return model._stagehand_layer_runtime
        except StagehandOOMError as error:
            numbers = [int(word) for word in str(error).replace("(", " ").split() if word.isdigit()]
            budget = max(budget + 512, numbers[-1] * 5 // 4)
    raise AssertionError(f"no budget up to {budget} bytes works")


def shut_down(model) -> None:
    """Ends what `stream` began, in any module of the model. Again is fine."""
    for module in model.modules():
        runtime = module.__dict__.get("_stagehand_layer_runtime")
        if runtime is not None:
            runtime.shutdown()


def sort_out(items, skipped: dict, failing: dict, drop=()) -> None:
    """Marks the collected tests. skipped, failing: pattern of fnmatch for a test's id from "::" on -> reason. drop:
    reasons of their own skips that do not hold here. A pattern that fits nothing is an error: tests change."""
    for item in items:
        for node in (item, *item.listchain()):
            node.own_markers = [mark for mark in node.own_markers if not (
                mark.name == "skipif" and any(word in str(mark.kwargs.get("reason", "")) for word in drop))]
    unused = {*skipped, *failing}
    for item in items:
        name = item.nodeid.split("::", 1)[1]
        for table, mark in ((skipped, pytest.mark.skip), (failing, functools.partial(pytest.mark.xfail, strict=True))):
            pattern = next((pattern for pattern in table if fnmatch.fnmatchcase(name, pattern)), None)
            if pattern is not None:
                unused.discard(pattern)
                item.add_marker(mark(reason=table[pattern]))
    if unused:
        raise pytest.UsageError(f"the adapter names tests that are not there: {sorted(unused)}")
