"""For all tests of the package."""

import gc
import os

import pytest

import card
import full


@pytest.fixture(autouse=card.ON_CARD)
def card_settings():
    """A card's kernels are deterministic, and its memory is given back behind each test: several workers share one."""
    import torch

    from stagehand import device

    card.settings()
    device._shared.clear()  # models that a failed test's traceback keeps are on a Device that is not this one's
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture
def tensors_there():
    """Tensors that the test makes, and its plain models, are on the device of the tests."""
    with card.TORCH:
        yield


def pytest_runtest_logreport(report) -> None:
    """STH_TEST_FAILURES=FILE: each failure as it comes, with the end of its traceback, for a run that may not reach
    its end."""
    path = os.environ.get("STH_TEST_FAILURES")
    if path and report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        trace = str(report.longrepr).splitlines()
        text = [line[1:].strip() for line in trace if line.startswith("E ")]
        with open(path, "a") as out:
            out.write(f"{report.nodeid} ({report.when}): {' | '.join(text[:4])[:400]}\n")
            out.writelines(f"    {line}\n" for line in trace[-12:] if line.strip())


def pytest_collection_modifyitems(config, items) -> None:
    if not os.environ.get("STH_TEST_FULL"):
        full.leave_out(config, items)


def pytest_collection_finish(session) -> None:
    """PyTorch and all the tests' modules stay for good. Some hundred tests collect garbage, which would look at them
    each time: that would be most of what those tests take."""
    gc.collect()
    gc.freeze()
