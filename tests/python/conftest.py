"""For all tests of the package."""

import gc

import pytest

import card


@pytest.fixture(autouse=card.ON_CARD)
def card_settings():
    """A card's kernels are deterministic, and its memory is given back behind each test: several workers share one."""
    import torch

    card.settings()
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture
def tensors_there():
    """Tensors that the test makes, and its plain models, are on the device of the tests."""
    with card.TORCH:
        yield


def pytest_collection_finish(session) -> None:
    """PyTorch and all the tests' modules stay for good. Some hundred tests collect garbage, which would look at them
    each time: that would be most of what those tests take."""
    gc.collect()
    gc.freeze()
