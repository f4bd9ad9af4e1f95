"""PinnedPool: equal slabs of pinned host memory, shared by runtimes whose weights come from files."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from .. import _core
from .._torch import torch
from ..device import core_name
from ..errors import StagehandOOMError
from ..owning import NotCopied, Owning
from ..weights.hostmem import Block

MIB = 1 << 20
_ids = itertools.count(1)


@dataclass
class PinnedSlab(NotCopied):
    """A slab in the caller's hands. buffer: 1-D uint8 tensor of size_bytes, the caller's until release."""

    slab_id: int
    buffer: torch.Tensor
    size_bytes: int
    pool_id: int


MOST_SLAB_MB = 16  # what is read at once is smaller
NEXT_SLABS = 7  # as many as a runtime takes by itself


def _device():
    """The card whose driver pins the memory; None without one: then it is ordinary memory."""
    return _core.Device(core_name(f"cuda:{torch.cuda.current_device()}")) if torch.cuda.is_available() else None


class PinnedPool(Owning):
    """total_mb / slab_mb slabs of slab_mb MiB, each rounded up to `alignment` bytes, all taken now.

    The memory is page-locked where there is a CUDA device that allows it (`pinned` tells). It lives as long
    as the pool or any buffer of it. Raises ValueError for sizes that do not fit together, StagehandOOMError
    when the memory is not there. Threads: any.
    """

    def __init__(self, total_mb: int = 8192, slab_mb: int = 256, alignment: int = 512) -> None:
        for name, value in (("total_mb", total_mb), ("slab_mb", slab_mb), ("alignment", alignment)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an int, not {value!r}")
            if value <= 0:
                raise ValueError(f"{name} must be positive, not {value}")
        if total_mb % slab_mb:
            raise ValueError(f"total_mb={total_mb} is not evenly divisible by slab_mb={slab_mb}")
        slab = -(-slab_mb * MIB // alignment) * alignment
        self._core = _core.Pool(total_mb // slab_mb * slab, slab, alignment, device=_device())
        self._pool_id = next(_ids)
        self._buffers: dict[int, torch.Tensor] = {}  # address -> buffer

    @property
    def slab_bytes(self) -> int:
        """Bytes of one slab."""
        return self._core.slab_bytes

    @property
    def num_slabs(self) -> int:
        return self._core.slab_count

    @property
    def pinned(self) -> bool:
        """Whether the memory is page-locked."""
        return self._core.pinned

    def acquire(self, size_bytes: int) -> PinnedSlab | list[PinnedSlab]:
        """Takes ceil(size_bytes / slab_bytes) slabs together: one bare, several as a list (they are not
        neighbors). Waits until they are free and warns after 100 ms. Raises StagehandOOMError for more than
        the pool has, ValueError unless size_bytes is positive, StagehandError after shutdown."""
        if size_bytes <= 0:
            raise ValueError(f"size_bytes must be positive, not {size_bytes}")
        needed = -(-size_bytes // self.slab_bytes)
        if needed > self.num_slabs:
            raise StagehandOOMError(
                f"{size_bytes} bytes need {needed} slabs of {self.slab_bytes} bytes, the pool has "
                f"{self.num_slabs}: make it larger", object="pool")
        slabs = [self._slab(ident, address) for ident, address in self._core.acquire(size_bytes)]
        return slabs[0] if len(slabs) == 1 else slabs

    def _slab(self, ident: int, address: int) -> PinnedSlab:
        buffer = self._buffers.get(address)
        if buffer is None:
            buffer = Block(address, self.slab_bytes, self._core).tensor(0, self.slab_bytes)
            self._buffers[address] = buffer
        return PinnedSlab(ident, buffer, self.slab_bytes, self._pool_id)

    def release(self, slabs: PinnedSlab | list[PinnedSlab]) -> None:
        """Gives slabs back: all of them or, on an error, none. AssertionError for a slab of another pool,
        StagehandError for one that was released already."""
        slabs = [slabs] if isinstance(slabs, PinnedSlab) else list(slabs)
        for slab in slabs:
            if slab.pool_id != self._pool_id:
                raise AssertionError(f"slab {slab.slab_id} belongs to pool {slab.pool_id}, not to {self._pool_id}")
        self._core.release([slab.slab_id for slab in slabs])

    def stats(self) -> dict:
        """total, free, in_use, peak_in_use (slabs), wait_count (acquires that waited), total_wait_ms."""
        stats = dict(self._core.stats())
        stats["total_wait_ms"] = stats.pop("total_wait_ns") / 1e6
        return stats

    def shutdown(self) -> None:
        """Waiting and later acquires raise StagehandError. Held slabs stay valid. May be called again."""
        self._core.shutdown()


def pool_for_next(largest: int) -> PinnedPool:
    """A pool to hand to the next model, where the one before had none: for units of at most `largest` bytes, smaller
    slabs where these would be large."""
    slab_mb = 1
    while slab_mb < MOST_SLAB_MB and slab_mb * MIB < largest:
        slab_mb *= 2
    return PinnedPool(NEXT_SLABS * slab_mb, slab_mb)
