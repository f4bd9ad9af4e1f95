"""Parts of spilling by their own names, for programs that spill tensors themselves. `stagehand.activation.offload` and
ActivationRuntime do it for what autograd saves, in the core; ActivationHookContext is that.

    backend = CPUSpillBackend(class_sizes_mb=(1, 4, 16), slabs_per_class=(64, 8, 2))
    engine = ActivationTransferEngine(backend)
    registry = ActivationRegistry()
    record = registry.create(tensor)
    engine.spill(record, tensor)                      # the copy to the host begins; drop `tensor`
    engine.finalize_all_spills(registry.iter_spilling())
    tensor = engine.restore(record)                   # as it was
"""

from __future__ import annotations

import enum
import threading
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from .. import _core
from .._torch import torch
from ..activation.config import ActivationStagehandConfig
from ..activation.runtime import ActivationRuntime
from ..errors import InvalidArgumentError, InvalidStateTransitionError, TransferError
from ..files.pool import PinnedPool
from ..owning import NotCopied, Owning
from .budget import BudgetManager
from .transfer import copy_behind

ActivationState = enum.Enum("ActivationState", {name.upper(): name for name in _core.ACTIVATION_STATES}, type=str)
ActivationState.__doc__ = "States of a record."
_S = ActivationState
_MOVES = {
    _S.KEPT: {_S.SPILLING, _S.RELEASED},
    _S.SPILLING: {_S.SPILLED, _S.RELEASED},
    _S.SPILLED: {_S.RESTORING, _S.RELEASED},
    _S.RESTORING: {_S.RESTORED},
    _S.RESTORED: {_S.RELEASED},
}


# ---------------------------------------------------------------------- records


@dataclass(eq=False)
class ActivationRecord:
    """One tensor. buffer: its bytes on the host, in pinned memory where size_class (bytes of a slab) is not None.
    completion: event behind the last copy, None: done. checksum: CRC32 of the bytes, where the engine makes them."""

    record_id: int
    shape: tuple
    stride: tuple
    dtype: torch.dtype
    device: torch.device
    nbytes: int
    step: int = 0
    state: ActivationState = ActivationState.KEPT
    buffer: torch.Tensor | None = None
    size_class: int | None = None
    completion: object = None
    checksum: int | None = None
    _source: torch.Tensor | None = field(default=None, repr=False)

    def move(self, to: ActivationState) -> None:
        """InvalidStateTransitionError for a move that there is not."""
        if to not in _MOVES.get(self.state, ()):
            raise InvalidStateTransitionError(f"record {self.record_id} cannot go from {self.state.name} to {to.name}",
                                              object=str(self.record_id))
        self.state = to


class ActivationRegistry:
    """Records by number. Threads: any."""

    def __init__(self) -> None:
        self._records: dict[int, ActivationRecord] = {}
        self._next = 0
        self._lock = threading.Lock()

    def create(self, tensor: torch.Tensor, step: int = 0) -> ActivationRecord:
        """A record of a tensor that is kept."""
        with self._lock:
            record = ActivationRecord(self._next, tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device,
                                      tensor.numel() * tensor.element_size(), step)
            self._records[self._next] = record
            self._next += 1
        return record

    def get(self, record_id: int) -> ActivationRecord:
        """KeyError where there is none."""
        return self._records[record_id]

    def iter_spilling(self) -> Iterator[ActivationRecord]:
        """Records whose copy to the host was not finished by finalize_all_spills yet."""
        return iter([record for record in list(self._records.values()) if record.state is ActivationState.SPILLING])

    def clear(self) -> None:
        """Forgets all of them. The backend frees their memory on the host."""
        with self._lock:
            self._records.clear()

    def __len__(self) -> int:
        return len(self._records)


# ---------------------------------------------------------------------- host memory


class CPUSpillBackend(Owning):
    """Slabs of host memory in classes. class_sizes_mb: sizes in MiB, growing; slabs_per_class: how many of each, one
    number for all or one for each. A class takes its memory when it is first needed, pinned where there is a card, and
    does not grow. hits, misses: requests that a slab was there for, and others. Raises ValueError, TypeError naming the
    argument. Threads: any."""

    def __init__(self, class_sizes_mb: Sequence[int] = (1, 4, 16, 64, 256),
                 slabs_per_class: Sequence[int] = (512, 2, 2, 2, 2)) -> None:
        if slabs_per_class is None:
            raise InvalidArgumentError("slabs_per_class is None: say how many there are", object="slabs_per_class")
        sizes, counts = ActivationStagehandConfig(pinned_pool_classes_mb=class_sizes_mb,
                                                  slabs_per_class=slabs_per_class).classes()
        self.classes = dict(zip(sizes, counts))  # bytes of a slab -> slabs
        self.hits = self.misses = 0
        self._pools: dict[int, PinnedPool] = {}
        self._taken: dict[int, tuple] = {}  # address -> (bytes of the class, slab)
        self._lock = threading.Lock()
        self._closed = False

    def allocate(self, nbytes: int) -> torch.Tensor:
        """A 1-D uint8 tensor of nbytes (> 0): in a free slab of the smallest class that fits, or of the next larger
        one; else ordinary memory of its own, which is a miss."""
        if nbytes <= 0:
            raise ValueError(f"nbytes must be positive, not {nbytes}")
        with self._lock:
            for size in self.classes:
                slab = self._free_slab(size) if size >= nbytes and not self._closed else None
                if slab is not None:
                    self.hits += 1
                    self._taken[slab.buffer.data_ptr()] = size, slab
                    return slab.buffer[:nbytes]
            self.misses += 1
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def _free_slab(self, size: int):
        pool = self._pools.get(size)
        if pool is None:
            mib = size >> 20
            pool = self._pools[size] = PinnedPool(mib * self.classes[size], mib)
        return pool.acquire(1) if pool.stats()["free"] else None

    def size_class(self, buffer: torch.Tensor) -> int | None:
        """Bytes of the slab that it lies in; None for memory of its own."""
        return self._taken.get(buffer.data_ptr(), (None,))[0]

    def release(self, buffer: torch.Tensor) -> None:
        """Gives its slab back; memory of its own goes with the tensor. No copy may use it any more."""
        with self._lock:
            size, slab = self._taken.pop(buffer.data_ptr(), (None, None))
            if slab is not None:
                self._pools[size].release(slab)

    def stats(self) -> dict:
        """hits, misses, and bytes of slabs in use."""
        with self._lock:
            return {"hits": self.hits, "misses": self.misses,
                    "bytes_in_use": sum(size for size, _ in self._taken.values())}

    def shutdown(self) -> None:
        """Later requests are misses; buffers that are out stay valid. May be called again."""
        with self._lock:
            self._closed = True
            for pool in self._pools.values():
                pool.shutdown()


# ---------------------------------------------------------------------- copies


class ActivationTransferEngine(NotCopied):
    """Copies records to a CPUSpillBackend's memory and back, on a stream for each direction. max_d2h: copies to the
    host under way at once, 0: nothing is spilled; max_h2d: copies back under way at once. debug_checksums:
    TransferError where a record comes back with other bytes. Threads: one."""

    def __init__(self, backend: CPUSpillBackend, max_d2h: int = 1, max_h2d: int = 1,
                 debug_checksums: bool = False) -> None:
        self.backend = backend
        self._max_d2h, self._max_h2d = max_d2h, max_h2d
        self._checks = debug_checksums
        cuda = torch.cuda.is_available()
        self._out, self._back = (torch.cuda.Stream() if cuda else None for _ in range(2))
        self._spilling: deque[ActivationRecord] = deque()
        self._restoring: deque[tuple] = deque()  # (event, buffer)

    def can_spill(self) -> bool:
        """Whether fewer copies to the host are under way than may be."""
        return self._spills_under_way() < self._max_d2h

    def _spills_under_way(self) -> int:
        self._spilling = deque(record for record in self._spilling if record.state is ActivationState.SPILLING
                               and record.completion is not None and not record.completion.query())
        return len(self._spilling)

    def spill(self, record: ActivationRecord, tensor: torch.Tensor) -> None:
        """Begins the copy to the host, behind what the current stream does so far; waits for the oldest one where too
        many are under way. The record keeps the tensor until it is finalized. InvalidStateTransitionError where it is
        not kept, or `_max_d2h` is 0."""
        if not self._max_d2h:
            raise InvalidStateTransitionError("nothing is spilled while _max_d2h is 0: ask can_spill() first")
        if (tuple(tensor.shape), tensor.dtype) != (record.shape, record.dtype):
            raise InvalidArgumentError(f"the record is of shape {record.shape} and {record.dtype}, and the "
                                       f"tensor must be, not {tuple(tensor.shape)} and {tensor.dtype}",
                                       object=str(record.record_id))
        record.move(ActivationState.SPILLING)
        while not self.can_spill():
            self._spilling[0].completion.synchronize()
        record._source = tensor.detach()
        if record.nbytes:
            record.buffer = self.backend.allocate(record.nbytes)
            record.size_class = self.backend.size_class(record.buffer)
            host = self._view(record, record.buffer)
            record.completion = copy_behind(self._out, host, record._source)
        if record.completion is not None:
            self._spilling.append(record)

    @staticmethod
    def _view(record: ActivationRecord, buffer: torch.Tensor) -> torch.Tensor:
        """The buffer with the record's dtype and shape, in the record's strides where these fill it."""
        flat = buffer.view(record.dtype)
        reach = 1 + sum((n - 1) * step for n, step in zip(record.shape, record.stride))
        if reach == flat.numel() and _apart(record):
            return flat.as_strided(record.shape, record.stride)
        return flat.view(record.shape)

    def finalize_all_spills(self, records: Iterable[ActivationRecord]) -> None:
        """Waits for each copy; then the tensor on the device is dropped."""
        for record in list(records):
            if record.state is not ActivationState.SPILLING:
                continue
            if record.completion is not None:
                record.completion.synchronize()
            if self._checks and record.buffer is not None:
                record.checksum = zlib.crc32(record.buffer.numpy())
            record.completion = record._source = None
            record.move(ActivationState.SPILLED)

    def restore(self, record: ActivationRecord) -> torch.Tensor:
        """The tensor with its shape, dtype and device, and its strides unless elements shared memory; the current
        stream waits for its copy. Its memory on the host goes back to the backend. TransferError where a checksum
        differs."""
        self.finalize_all_spills([record])
        record.move(ActivationState.RESTORING)
        if record.checksum is not None and zlib.crc32(record.buffer.numpy()) != record.checksum:
            raise TransferError(f"record {record.record_id} has other bytes on the host than were spilled",
                                object=str(record.record_id))
        strides = record.stride if _apart(record) else torch.empty(record.shape, device="meta").stride()
        tensor = torch.empty_strided(record.shape, strides, dtype=record.dtype, device=record.device)
        if record.nbytes:
            event = copy_behind(self._back, tensor, self._view(record, record.buffer))
            if event is not None:
                torch.cuda.current_stream(record.device).wait_event(event)
            self._give_back(event, record.buffer)
        record.buffer = record.size_class = None
        record.move(ActivationState.RESTORED)
        return tensor

    def _give_back(self, event, buffer: torch.Tensor) -> None:
        """The buffer, once its copy is over."""
        if event is None:
            self.backend.release(buffer)
            return
        self._restoring.append((event, buffer))
        self._reap(self._max_h2d)

    def _reap(self, most: int) -> None:
        """Gives back what is done, and waits until at most so many copies back are under way."""
        while self._restoring and (len(self._restoring) > most or self._restoring[0][0].query()):
            event, buffer = self._restoring.popleft()
            event.synchronize()
            self.backend.release(buffer)

    def drain(self) -> None:
        """Waits for all copies; what came back is off the host."""
        for record in self._spilling:
            if record.completion is not None:  # else it has been finalized since
                record.completion.synchronize()
        self._reap(0)


def _apart(record: ActivationRecord) -> bool:
    """Whether each element has memory of its own."""
    reach = 1
    for step, n in sorted((step, n) for step, n in zip(record.stride, record.shape) if n > 1):
        if step < reach:
            return False
        reach += (n - 1) * step
    return True


# ---------------------------------------------------------------------- decisions


class ActivationBudgetManager(BudgetManager):
    """Watermarks in MiB over what PyTorch has allocated on the card. peak_mb: the most that was seen."""

    def __init__(self, high_watermark_mb: int = 20000, low_watermark_mb: int = 16000) -> None:
        super().__init__(high_watermark_mb, low_watermark_mb)
        self.peak_mb = 0.0

    def vram_used_mb(self) -> float:
        used = super().vram_used_mb()
        self.peak_mb = max(self.peak_mb, used)
        return used

    def above_high(self) -> bool:
        return self.vram_used_mb() > self._high

    def below_low(self) -> bool:
        return self.vram_used_mb() < self._low

    def reset_peak(self) -> None:
        self.peak_mb = 0.0


class ActivationScheduler:
    """Keep or spill: above the high watermark tensors are to be spilled, until the low one is reached."""

    def __init__(self, budget: ActivationBudgetManager | None = None) -> None:
        self.budget = budget if budget is not None else ActivationBudgetManager()
        self.spilling = False

    def should_spill(self, tensor: torch.Tensor) -> bool:
        """Whether to spill a saved tensor. A tensor without bytes is kept, and so is a parameter."""
        if self.budget.above_high():
            self.spilling = True
        elif self.budget.below_low():
            self.spilling = False
        return self.spilling and tensor.numel() > 0 and not isinstance(tensor, torch.nn.Parameter)


class ActivationHookContext(NotCopied):
    """The pair of an ActivationRuntime for `torch.autograd.graph.saved_tensors_hooks`, and a context with both in
    force. Raises InvalidArgumentError where the runtime is not enabled."""

    def __init__(self, runtime: ActivationRuntime) -> None:
        if getattr(runtime, "saver", None) is None:
            raise InvalidArgumentError("an enabled ActivationRuntime is needed: set ActivationStagehandConfig.enabled",
                                       object="runtime")
        self.runtime = runtime
        self.pack, self.unpack = runtime.saver.pack, runtime.saver.unpack
        self._open: list = []

    def __enter__(self):
        context = self.runtime.managed_forward()
        context.__enter__()
        self._open.append(context)
        return self

    def __exit__(self, *error) -> None:
        self._open.pop().__exit__(*error)
