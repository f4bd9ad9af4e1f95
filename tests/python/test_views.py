"""The extension's views: how a capsule of a leased unit sees its place."""

import pytest
from core_support import Tensor, World
from stagehand import _core

FLOAT, BFLOAT, COMPLEX = 2, 4, 5


@pytest.fixture
def runtime():
    return World([4096] * 2, budget=16384).runtime


def test_a_view_gives_the_capsule_its_dtype_shape_and_strides(runtime):
    for code, bits, shape, strides in (
            (FLOAT, 32, (4, 5), (5, 1)), (BFLOAT, 16, (), ()), (COMPLEX, 64, (3, 2), (1, 3)),
            (FLOAT, 32, (9, 3), (0, 1)), (FLOAT, 64, (0, 7), (7, 1)), (FLOAT, 32, (1024,), (1,)),
            (FLOAT, 32, (1,) * 8, (1,) * 8)):
        tensor = Tensor(runtime.acquire(0, 0, _core.tensor_view(code, bits, shape, strides)))
        assert (tensor.dtype, tensor.shape, tensor.strides) == ((code, bits, 1), shape, strides)
        tensor.delete()
    plain = Tensor(runtime.acquire(0, 0, None))
    assert plain.dtype == (1, 8, 1) and plain.shape == (4096,)
    plain.delete()


@pytest.mark.parametrize("view", [
    (FLOAT, 32, (4,), (1, 2)), (FLOAT, 7, (1,), (1,)), (FLOAT, 0, (1,), (1,)), (FLOAT, 32, (-1,), (1,)),
    (FLOAT, 32, (1,) * 9, (1,) * 9), (FLOAT, 32, (1 << 40, 1 << 40), (1, 1 << 40)), (FLOAT, 32, (1 << 62,), (8,))])
def test_absurd_views_are_refused(view):
    with pytest.raises(ValueError):
        _core.tensor_view(*view)


def test_views_past_the_unit_and_other_bytes_are_refused(runtime):
    for view in (_core.tensor_view(FLOAT, 32, (1025,), (1,)), _core.tensor_view(FLOAT, 32, (2, 2), (1023, 1)), b"",
                 b"x" * 200):
        with pytest.raises(ValueError):
            runtime.acquire(0, 0, view)
    with pytest.raises(TypeError):
        runtime.acquire(0, 0, "view")
    runtime.set_budget(8192)  # nothing is leased
