"""For the tests on a CUDA device."""

import gc

import pytest
import stagehand
import torch


def size_of(model) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


@pytest.fixture
def wrapped():
    """wrap(model, **kwargs) -> model; shut down at the end."""
    models = []

    def wrap(model, **kwargs):
        models.append(stagehand.layer(model, **kwargs))
        return model

    yield wrap
    for model in models:
        runtime = getattr(model, "_stagehand_layer_runtime", None)
        if runtime is not None:
            runtime.shutdown()
    gc.collect()
    torch.cuda.empty_cache()
