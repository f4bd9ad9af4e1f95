"""AsyncTransferEngine: copies between slabs of a PinnedPool and tensors on a card, on a stream of their own. Models
under stagehand need none: the core issues their copies."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from dataclasses import dataclass, field

from .._torch import torch
from ..errors import InvalidArgumentError, StagehandOOMError
from ..files.pool import PinnedPool, PinnedSlab
from ..owning import NotCopied


def copy_behind(stream, to: torch.Tensor, source: torch.Tensor):
    """Copies behind what the current stream has to do so far. Returns an event behind the copy; None where it is done:
    without a card."""
    card = next((tensor.device for tensor in (to, source) if tensor.is_cuda), None)
    if card is None:
        to.copy_(source)
        return None
    stream = stream if stream is not None else torch.cuda.current_stream(card)
    stream.wait_stream(torch.cuda.current_stream(card))
    with torch.cuda.stream(stream):
        to.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record(stream)
    for tensor in (to, source):
        if tensor.is_cuda:
            tensor.record_stream(stream)
    return event


def as_bytes(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """Its memory as 1-D uint8. InvalidArgumentError where it does not lie in a row."""
    if not tensor.is_contiguous():
        raise InvalidArgumentError(f"{what} of shape {tuple(tensor.shape)} is not contiguous: give a contiguous one",
                                   object=what)
    return tensor.detach().reshape(-1).view(torch.uint8)


@dataclass(eq=False)
class TransferHandle:
    """A copy. direction: "h2d" or "d2h". event: behind it; None: done. submitted_at: seconds of time.monotonic()."""

    handle_id: int
    block_id: str
    direction: str
    event: object
    submitted_at: float
    size_bytes: int
    completed: bool = False
    _keeps: tuple = field(default=(), repr=False)


class AsyncTransferEngine(NotCopied):
    """pool: the PinnedPool that the slabs are of, or None; kept for the caller. max_inflight: copies under way at once,
    the next waits for the oldest. copy_stream: a torch.cuda.Stream; None: one of its own. Without a card copies are
    done when the call returns. Threads: any."""

    def __init__(self, pool: PinnedPool, max_inflight: int = 2, copy_stream: torch.cuda.Stream | None = None) -> None:
        if isinstance(max_inflight, bool) or not isinstance(max_inflight, int) or max_inflight < 1:
            raise InvalidArgumentError(f"max_inflight must be an int of at least 1, not {max_inflight!r}")
        self.pool = self._pool = pool
        self._max_inflight = max_inflight
        self._has_cuda = torch.cuda.is_available()
        self._copy_stream = copy_stream or (torch.cuda.Stream(priority=-1) if self._has_cuda else None)
        self._lock = threading.RLock()
        self._inflight: deque[TransferHandle] = deque()
        self._ids = itertools.count()

    def submit_h2d(self, block_id: str, host_slab: PinnedSlab, gpu_dest: torch.Tensor) -> TransferHandle:
        """Fills the tensor from the slab, or the list of slabs. StagehandOOMError where they hold less."""
        to = as_bytes(gpu_dest, "gpu_dest")
        pieces = self._pieces(host_slab, len(to))
        return self._submit(block_id, "h2d", [(to[at:at + len(host)], host) for at, host in pieces], (host_slab, to))

    def submit_d2h(self, block_id: str, gpu_src: torch.Tensor, host_slab: PinnedSlab) -> TransferHandle:
        """Copies the tensor to the begin of the slab, or over the list of slabs."""
        source = as_bytes(gpu_src, "gpu_src")
        pieces = self._pieces(host_slab, len(source))
        return self._submit(block_id, "d2h", [(host, source[at:at + len(host)]) for at, host in pieces],
                            (host_slab, source))

    @staticmethod
    def _pieces(slabs, nbytes: int) -> list[tuple[int, torch.Tensor]]:
        """(offset, host bytes) that come to nbytes."""
        slabs = slabs if isinstance(slabs, (list, tuple)) else [slabs]
        pieces, at = [], 0
        for slab in slabs:
            take = min(slab.size_bytes, nbytes - at)
            if take:
                pieces.append((at, slab.buffer[:take]))
            at += take
        if at < nbytes:
            raise StagehandOOMError(f"{nbytes} bytes do not fit into slabs of {at} bytes: acquire() so many of the "
                                    "pool", object="host_slab")
        return pieces

    def _submit(self, block_id: str, direction: str, pieces, keeps) -> TransferHandle:
        with self._lock:
            self._reap_completed()
            while len(self._inflight) >= self._max_inflight:
                self._inflight[0].event.synchronize()
                self._reap_completed()
            event = None
            for to, source in pieces:
                event = copy_behind(self._copy_stream, to, source)
            handle = TransferHandle(next(self._ids), block_id, direction, event, time.monotonic(),
                                    sum(len(to) for to, _ in pieces), event is None, keeps)
            if event is not None:
                self._inflight.append(handle)
            return handle

    def _reap_completed(self) -> int:
        with self._lock:
            count = 0
            while self._inflight and self._inflight[0].event.query():
                self._complete(self._inflight.popleft())
                count += 1
            return count

    @staticmethod
    def _complete(handle: TransferHandle) -> None:
        handle.completed, handle._keeps = True, ()

    def poll(self, handle: TransferHandle) -> bool:
        """Whether it is done."""
        self._reap_completed()
        return handle.completed

    def wait(self, handle: TransferHandle) -> None:
        """Waits for it; the current stream comes behind it, too."""
        if handle.event is not None:
            handle.event.synchronize()
            torch.cuda.current_stream().wait_event(handle.event)
        self._reap_completed()

    def inflight_count(self) -> int:
        self._reap_completed()
        return len(self._inflight)

    def reap(self) -> int:
        """Forgets what is done; how many these were."""
        return self._reap_completed()

    def drain(self) -> None:
        """Waits for all of them."""
        with self._lock:
            while self._inflight:
                self._inflight[0].event.synchronize()
                self._reap_completed()
