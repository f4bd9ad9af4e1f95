"""For all tests of the package."""

import gc


def pytest_collection_finish(session) -> None:
    """PyTorch and all the tests' modules stay for good. Some hundred tests collect garbage, which would look at them
    each time: that would be most of what those tests take."""
    gc.collect()
    gc.freeze()
