"""PinnedPool: slabs, waiting, ownership."""

import gc
import threading
import warnings

import pytest

torch = pytest.importorskip("torch")

from core_support import wait_until  # noqa: E402

import stagehand  # noqa: E402
from stagehand import PinnedPool, PinnedSlab, StagehandError, StagehandOOMError  # noqa: E402

MIB = 1 << 20


@pytest.fixture
def pool():
    return PinnedPool(total_mb=4, slab_mb=1)


@pytest.mark.parametrize("sizes", [(0, 1, 512), (4, 0, 512), (4, -1, 512), (4, 1, 0)])
def test_sizes_must_be_positive(sizes):
    with pytest.raises(ValueError, match="positive"):
        PinnedPool(*sizes)


def test_slabs_must_divide_the_pool():
    with pytest.raises(ValueError, match="evenly divisible"):
        PinnedPool(total_mb=5, slab_mb=2)


def test_one_slab_is_bare_and_several_are_a_list(pool):
    one = pool.acquire(MIB)
    more = pool.acquire(MIB + 1)
    assert isinstance(one, PinnedSlab) and isinstance(more, list) and len(more) == 2
    assert one.buffer.dtype == torch.uint8 and one.buffer.shape == (MIB,) and one.size_bytes == pool.slab_bytes
    assert one.buffer.data_ptr() % 512 == 0
    assert len({slab.buffer.data_ptr() for slab in [one, *more]}) == 3
    pool.release(one)
    pool.release(more)


def test_counts(pool):
    slabs = pool.acquire(3 * MIB)
    pool.release(slabs)
    slab = pool.acquire(1)
    expected = {"total": 4, "free": 3, "in_use": 1, "peak_in_use": 3, "wait_count": 0, "total_wait_ms": 0.0}
    assert pool.stats() == expected
    pool.release(slab)


def test_more_than_the_pool_has_is_refused_at_once(pool):
    with pytest.raises(StagehandOOMError, match="5 slabs"):
        pool.acquire(4 * MIB + 1)
    with pytest.raises(ValueError, match="positive"):
        pool.acquire(0)


@pytest.mark.alone
def test_acquire_waits_for_a_release_and_warns(pool):
    held = pool.acquire(4 * MIB)
    with pytest.warns(RuntimeWarning, match="100 ms") as warned:
        releaser = threading.Thread(target=lambda: (wait_until(lambda: len(warned)), pool.release(held[0])))
        releaser.start()
        slab = pool.acquire(1)
    releaser.join()
    assert slab.buffer.data_ptr() == held[0].buffer.data_ptr()
    stats = pool.stats()
    assert stats["wait_count"] == 1 and stats["total_wait_ms"] >= 100
    pool.release([slab, *held[1:]])


def test_double_release_and_foreign_slabs_change_nothing(pool):
    slab = pool.acquire(1)
    other = PinnedPool(total_mb=1, slab_mb=1)
    with pytest.raises(AssertionError, match="belongs to pool"):
        other.release(slab)
    pool.release(slab)
    with pytest.raises(StagehandError, match="released"):
        pool.release(slab)
    assert pool.stats()["free"] == 4 and other.stats()["free"] == 1


def test_shutdown_wakes_who_waits(pool):
    held = pool.acquire(4 * MIB)
    timer = threading.Timer(0.05, pool.shutdown)
    timer.start()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(StagehandError, match="shut down"):
            pool.acquire(1)
    timer.join()
    held[0].buffer.fill_(7)  # still valid
    pool.shutdown()


def test_no_tensor_is_allocated_for_a_slab(pool, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("allocated")

    monkeypatch.setattr(torch, "empty", refuse)
    pool.release(pool.acquire(2 * MIB))


def test_a_buffer_keeps_the_memory():
    pool = PinnedPool(total_mb=1, slab_mb=1)
    buffer = pool.acquire(1).buffer
    pool.shutdown()
    del pool
    gc.collect()
    assert buffer.fill_(3).sum() == 3 * MIB


def test_it_is_a_public_name():
    assert stagehand.PinnedPool is PinnedPool and stagehand.PinnedSlab is PinnedSlab
