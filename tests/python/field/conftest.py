"""The cases of docs/field-cases.md use the helpers of the tests above."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))


@pytest.fixture
def ending():
    """A list of runtimes that the end of the test shuts down."""
    runtimes = []
    yield runtimes
    for runtime in runtimes:
        runtime.shutdown()
