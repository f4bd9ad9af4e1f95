"""The pair of saved-tensor hooks: what autograd saves becomes a handle, and backward turns it into a tensor.

A `Storage` is one saved storage under one record of the core; handles are the tensors that see it. The record
holds the tensor while it is on the device, then nothing, then the copy that came back; the core says which. It
lives as long as a handle does, and handles live as long as their graph.

Invariants: where `record.tensor` is set it has the bytes, whatever the core says: an interrupt between two steps
costs memory, never a value. A storage is copied out, or dropped, only while its record alone has it: an operator may
write to what it has saved already (rrelu's noise), and so may a tensor with another version counter (halves of
unsafe_chunk). `record.copy` is set before a copy to it is enqueued. Threads: pack on the forward's, open on autograd's,
under one lock; the end of a storage anywhere, without it.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
import threading
import time
import weakref

from torch.multiprocessing.reductions import StorageWeakRef

from .. import _core
from .._torch import observed, torch, unseen, view
from ..device import Target
from ..errors import StagehandError, StagehandOOMError, TransferError
from ..owning import NotCopied
from ..weights import savedmodes
from ..weights.saved import NOBODY, PLAIN, Kept, empty_out, in_backward, looked_at, modified
from .held import held
from .proof import Proof
from .recompute import Recipes, sequence

_SPILLED = _core.ACTIVATION_STATES.index("spilled")
_DROPPED = _core.ACTIVATION_STATES.index("dropped")
_SPILL, _LET_GO, _DROP = 1, 2, 3  # sth_relief
MANY_HELD = 64  # storages; of more, so many are looked at in each call
LATER = 16  # saves of a pass after which the last is tidied up: the device is not to wait for that with nothing to do
_wrapped = getattr(torch._C._functorch, "is_functorch_wrapped_tensor", lambda tensor: False)
_node = getattr(torch._C, "_current_autograd_node", None)
_open = weakref.WeakSet()


def _recomputing() -> bool:
    """Whether a backward computes a checkpointed region again; else it saves for a second backward. Regions that are
    not reentrant have hooks of their own, and nothing of them comes here but their inputs."""
    return _node is None or "CheckpointFunction" in type(_node()).__name__


def _in_child() -> None:
    for saver in list(_open):
        saver.closed = True
        saver._lock = threading.Lock()


os.register_at_fork(after_in_child=_in_child)


class Hooks(torch.autograd.graph.saved_tensors_hooks):
    """The context in which a saver's hooks are called. At its end what nobody else has any more may go."""

    def __init__(self, saver) -> None:
        super().__init__(saver.pack, saver.unpack)
        self._saver = saver

    def __exit__(self, *error) -> None:
        super().__exit__(*error)
        self._saver.leave()


class Handle:
    """A saved tensor as autograd keeps it: a storage, and how the tensor sees it."""

    __slots__ = ("storage", "witness", "version", "dtype", "shape", "stride", "offset", "contiguous", "lazy", "kind")

    def __init__(self, storage, tensor, witness) -> None:
        self.storage = storage
        self.version = tensor._version
        self.witness = witness  # shares the version of the tensor; the first handle's is the record's tensor
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset() * tensor.element_size()
        self.contiguous = tensor.is_contiguous()
        self.lazy = tensor.is_conj(), tensor.is_neg()
        self.kind = savedmodes.kind_of(tensor)

    def of(self, base):
        """The tensor, over the storage of `base`."""
        seen = view(base, self.offset, self.dtype, self.shape, self.stride)
        conjugate, negative = self.lazy
        seen = torch.conj(seen) if conjugate else seen
        return torch._neg_view(seen) if negative else seen

    def check(self) -> None:
        """What autograd checks where no hooks are set."""
        if self.witness._version != self.version:
            raise modified(f"[{self.dtype} {list(self.shape)}]", self.witness._version, self.version)


class Storage:
    """One saved storage. nbytes: of all of it, whatever part is seen."""

    __slots__ = ("record", "weak", "nbytes", "handles", "left", "recipe", "sample", "spilled", "dropped", "__weakref__")

    def __init__(self, record, storage) -> None:
        self.record = record
        self.weak = StorageWeakRef(storage)  # nobody else gets its address while it is there
        self.nbytes = storage.nbytes()
        self.handles = 0
        self.left = 0  # handles that have not asked for the copy that is there
        self.recipe = None  # how its bytes are computed again, where that is cheap
        self.sample = None  # some of them, when they were dropped
        self.spilled = self.dropped = False

    def held(self) -> bool:
        """Whether somebody besides the record has the storage, which is on the device."""
        return held(self.record.tensor)


class Saver(NotCopied):
    """The hooks of one runtime. target: the device. options: of `_core.Activations`. smallest: storages below so
    many bytes stay. budget: bytes; the watermarks follow what is used between the moments at which hooks look. None:
    they stay. recompute: what is cheap to compute again is dropped in place of being spilled."""

    def __init__(self, target: Target, smallest: int, budget: int | None = None, recompute: bool = True,
                 **options) -> None:
        self.target = target
        self.smallest = max(smallest, 1)
        self.mark = _core.Watermark(options["high"], options["low"], None if target.simulated else budget)
        self._peak: int | None = None  # of the allocator, as last seen
        self._top = 0  # of these in this pass, since it moved: it rose, or somebody has reset it
        self._unpacked = 0
        self.core = _core.Activations(target.core, **options)
        self.closed = False
        self.saved = self.spilled = self.dropped = self.restored = self.stalls = 0  # tensors
        self.stall_ns = 0
        self.saved_bytes = 0  # of records
        self.step = 0
        self.at_backward = None  # called when a pass is asked for something for the first time, without the lock
        self.vram_peak = 0
        self._lock = threading.Lock()
        self._records: dict[int, weakref.ref] = {}
        self._storages: dict[int, weakref.ref] = {}  # by the address of the storage's record in torch
        self._lasting: dict[int, StorageWeakRef] | None = None  # parameters and the like: others hold them
        self._seen: dict[int, StorageWeakRef] = {}  # of the pass before
        self._seen_now: dict[int, StorageWeakRef] = {}
        self._asked = False  # in this pass
        self._before: dict[int, StorageWeakRef] = {}  # of the pass before that one: to be forgotten
        self._many = 256  # entries of the tables above at which they are looked through
        self._recipes = Recipes(type(self).unpack) if recompute and sequence is not None else None
        self._proof = Proof(pinned=not target.simulated)
        self._new_ones = 0  # records of this pass
        self._search = 3  # passes in which recipes are looked for; more when something goes
        self._spent: list[weakref.ref] = []  # storages whose handles have all asked
        self._held: list[weakref.ref] = []  # storages that were chosen to go, and that others have
        _open.add(self)

    # ------------------------------------------------------------------ hooks

    def pack(self, tensor):
        """For torch.autograd.graph.saved_tensors_hooks."""
        self.saved += 1
        if self._recipes is not None and self._search:
            with unseen():
                self._recipes.saves(tensor, sys._getframe().f_back)
        return savedmodes.packed(self._pack, tensor) if observed() else self._pack(tensor)

    def _pack(self, tensor):
        if not self.closed and self._may_go(tensor):
            with self._lock:
                if not self.closed and not self._lasts(tensor.untyped_storage()._cdata):
                    return self._packed(tensor)
        return Kept(tensor)

    def unpack(self, saved):
        """For torch.autograd.graph.saved_tensors_hooks."""
        if looked_at(saved):
            return NOBODY
        if observed():
            return savedmodes.opened(functools.partial(self._unpack, saved), saved.kind)
        return self._unpack(saved)

    def _unpack(self, saved):
        if type(saved) is Kept:
            return saved.open()
        saved.check()
        if self.at_backward is not None and not self._asked:
            self.at_backward()
        with self._lock:
            try:
                base = self._bring(saved.storage)
            except TransferError as error:  # the core knows a number; this is what the user knows it by
                error.args = f"{error}; saved as {saved.dtype} {list(saved.shape)}",
                raise
            self._bring_ahead()
            self._unpacked += 1
            if self._unpacked % 8 == 0:
                self.used()  # for its peak
            if base is saved.witness:  # who uses it keeps the memory, also when another thread empties the record's
                return base.detach()
            return saved.of(base)

    def _may_go(self, tensor) -> bool:
        """Whether a tensor is one for the store, unless its storage lasts."""
        if type(tensor) not in PLAIN or tensor.device != self.target.torch or tensor.layout is not torch.strided:
            return False
        if tensor.is_leaf and tensor.requires_grad or _wrapped(tensor):
            return False
        if tensor.is_quantized or tensor._is_zerotensor():
            return False
        if not self.target.simulated and torch.cuda.is_current_stream_capturing():
            return False
        return tensor.untyped_storage().nbytes() >= self.smallest

    def _lasts(self, key: int) -> bool:
        """Whether something besides the graph keeps a storage: a parameter, or what an earlier pass saved too."""
        if self._lasting is None:
            self._lasting = _of_models()
        if key in self._lasting:
            return True
        seen = self._seen.get(key)
        if seen is None or seen.expired():
            return False
        self._lasting[key] = seen
        return True

    # ------------------------------------------------------------------ out

    def _packed(self, tensor) -> Handle:
        storage = tensor.untyped_storage()
        known = self._storages.get(storage._cdata)
        shared = known() if known is not None else None
        if shared is None or shared.record.tensor is None:
            return self._new(tensor, storage)
        shared.handles += 1
        shared.left += 1
        self.spilled += shared.spilled
        self.dropped += shared.dropped
        return Handle(shared, tensor, empty_out(tensor.detach()))

    def _new(self, tensor, storage) -> Handle:
        inside = in_backward()
        if self._asked and not inside:
            self.begin(self.step)
        elif len(self._records) >= self._many:
            self._tidy()
            if not self._records:  # forwards that no backward follows
                self.begin(self.step)
        passing = inside and _recomputing()
        ordinal, self._new_ones = self._new_ones, self._new_ones + 1
        if ordinal == LATER:
            self._tidy()
        recipe = None
        if self._recipes is not None and not inside and self._search:
            recipe = self._recipes.find(ordinal, tensor, storage, self._open_now)
        # detach: with its node there would be a cycle
        record = self.core.save(tensor.detach(), storage.nbytes(), passing, self.target.stream())
        shared = Storage(record, storage)
        self.saved_bytes += shared.nbytes
        self._storages[shared.weak.cdata] = self._records[record.number] = weakref.ref(shared)
        self._seen_now[shared.weak.cdata] = shared.weak
        shared.handles = shared.left = 1
        handle = Handle(shared, tensor, record.tensor)
        if recipe is not None:
            shared.recipe = recipe
            self.core.recomputable(record.number)
        self._relieve(0)
        return handle

    def _let_go(self, shared: Storage) -> None:
        """The device's copy goes: the host has it, or it can be computed again."""
        self._search = 2
        record = shared.record
        if record.copy is not None:
            record.copy = None
            return
        if shared.recipe is not None:
            shared.dropped = True
            self.dropped += shared.handles
            if self.target.stream() == record.stream:  # on another it might not be there yet
                shared.sample = self._proof.expect(record.tensor)
        tensor, record.tensor = record.tensor, None
        empty_out(tensor)  # its handle has it as its witness

    def _spill(self, shared: Storage) -> None:
        record = shared.record
        try:
            self.core.spill(record.number, record.tensor.untyped_storage().data_ptr(), record.stream)
        except StagehandOOMError:
            return  # no host memory: it stays, and the core does not choose it again
        shared.spilled = True
        self.spilled += shared.handles

    def _hold(self, shared: Storage) -> None:
        self.core.set_held(shared.record.number, True)
        self._held.append(weakref.ref(shared))

    def _let_loose(self) -> None:
        """What others had and have no more may go."""
        some, self._held = self._held[:MANY_HELD], self._held[MANY_HELD:]
        for reference in some:
            shared = reference()
            if shared is None:
                continue
            if shared.held():
                self._held.append(reference)
            else:
                self.core.set_held(shared.record.number, False)

    def _relieve(self, need: int) -> None:
        """Makes room for `need` bytes as far as that can be done."""
        stream = self.target.stream()
        begin = 0
        if self._held:
            self._let_loose()
        while True:
            what, record = self.core.relieve(self.used(), need, stream)
            if not what:
                break
            begin = begin or time.perf_counter_ns()
            reference = self._records.get(record)
            shared = reference() if reference is not None else None
            if shared is None:
                break  # it is dying: what it holds goes with it
            if what == _LET_GO:
                self._let_go(shared)
            elif shared.held():
                self._hold(shared)
            elif what == _SPILL:
                self._spill(shared)
            else:
                self.core.drop(record)
                self._let_go(shared)
        if begin:
            self.stall_ns += time.perf_counter_ns() - begin

    def used(self) -> int:
        """Bytes in use on the device; 0: the core counts those of its records."""
        if self.target.simulated:
            return 0
        bytes_now = torch._C._cuda_memoryStats(self.target.torch.index)["allocated_bytes"]["all"]
        used, peak = bytes_now["current"], bytes_now["peak"]
        if self._peak is not None and peak != self._peak:
            self._top = max(self._top, peak)
        self._peak = peak
        self.vram_peak = max(self.vram_peak, used)
        return used

    def _follow(self) -> None:
        """What is used between two hooks is not seen; the allocator's peak tells, where it moved in the last pass."""
        top, self._top = self._top, 0
        if self.mark.follow(top, self.spilled or self.dropped):
            self.set_mark()

    @property
    def high(self) -> int:
        """Bytes in use above which something is spilled."""
        return self.mark.high

    def set_mark(self) -> None:
        """The watermark is another one. Under the lock."""
        self.core.set_marks(self.mark.high, self.mark.low)

    def leave(self) -> None:
        """No more is saved for now."""
        if self._held and not self.closed:
            with unseen(), self._lock:
                self._relieve(0)

    # ------------------------------------------------------------------ back

    def _open(self, packed):
        """The tensor of a handle, for the current stream, and no more questions of autograd than before."""
        if type(packed) is Kept:
            return packed.open()
        packed.check()
        packed.storage.left += 1
        base = self._bring(packed.storage)
        return packed.of(base)

    def _open_now(self, packed):
        """The tensor of a handle if it is on the device, in forward."""
        if type(packed) is Kept:
            return packed.tensor
        base = packed.storage.record.tensor
        if base is None:
            return None
        return packed.of(base)

    def _bring(self, shared: Storage):
        """Something over the storage's bytes, for the current stream. A copy stays until each handle has asked."""
        self._let_go_of_spent()
        record = shared.record
        state = self.core.ask(record.number)
        if not self._asked:
            self._asked = True
            if self._recipes is not None:
                self._recipes.begin()  # now: the device has more to do than when the next pass begins
            if self._held:
                self._relieve(0)  # the forward is over
        base = record.tensor if record.tensor is not None else self._come_back(shared, state)
        shared.left -= 1
        if shared.left <= 0:
            self._spent.append(weakref.ref(shared))
        return base

    def _come_back(self, shared: Storage, state: int):
        record = shared.record
        begin, stream = time.perf_counter_ns(), self.target.stream()
        if state == _SPILLED:
            self.stalls += 1
            self._relieve(shared.nbytes)
            self._restore(shared, stream)
        elif state == _DROPPED:
            self._compute(shared, stream)
        self.core.arrive(record.number, stream)
        self.stall_ns += time.perf_counter_ns() - begin
        self.restored += 1
        if stream != record.stream and not self.target.simulated:
            record.copy.record_stream(torch.cuda.current_stream(self.target.torch))
        return record.copy

    def _let_go_of_spent(self) -> None:
        """What every handle has asked for, where the graph lives on: another backward brings it again."""
        while self._spent:
            shared = self._spent.pop()()
            if shared is None or shared.left > 0:
                continue
            shared.left = shared.handles
            self.core.let_go(shared.record.number, shared.record.stream)
            shared.record.copy = None

    def _restore(self, shared: Storage, stream: int) -> None:
        record = shared.record
        if record.copy is None:
            record.copy = self._empty(shared.nbytes)
            record.stream = stream
        try:
            self.core.restore(record.number, record.copy.data_ptr(), stream)
        except StagehandError as error:
            if error.status == "DEVICE_ERROR":  # it may still be written to: the device could not be waited for
                self.core.hold(record.copy)
            record.copy = None
            raise

    def _compute(self, shared: Storage, stream: int) -> None:
        tensors = [None if packed is None else self._open(packed) for packed in shared.recipe.inputs]
        self._relieve(shared.nbytes)
        record = shared.record
        try:
            record.copy = shared.recipe.run(tensors)
        except torch.cuda.OutOfMemoryError:
            self._relieve(1 << 62)
            record.copy = shared.recipe.run(tensors)
        record.stream = stream
        self.core.recomputed(record.number)
        if shared.sample is not None:
            self._proof.compare(record.copy, shared.sample, str(shared.recipe))
            self._look(self._proof.look)

    def _empty(self, nbytes: int):
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.target.torch)
        except torch.cuda.OutOfMemoryError:
            self._relieve(1 << 62)
            return torch.empty(nbytes, dtype=torch.uint8, device=self.target.torch)

    def _bring_ahead(self) -> None:
        stream = self.target.stream()
        while self.core.ahead(0) and (record := self.core.ahead(self.used())):
            reference = self._records.get(record)
            shared = reference() if reference is not None else None
            if shared is None or shared.record.tensor is not None:
                return
            try:
                self._restore(shared, stream)
            except (StagehandError, torch.cuda.OutOfMemoryError):
                return  # later, on demand, where it is raised to whom it concerns

    # ------------------------------------------------------------------ passes and ends

    def look(self) -> None:
        """Raises where something was not computed again as it was, as far as that is known."""
        self._look(self._proof.look)

    def _look(self, ask) -> None:
        """Where something was not computed again as it was, nothing more is dropped to be so."""
        try:
            ask()
        except StagehandError:
            self._recipes.end()
            raise

    def begin(self, step: int) -> None:
        """A new pass: what the last one did is what this one is expected to do. Under the lock, or where no
        hook runs."""
        self.step = step
        self._asked = False
        self._follow()
        self.core.begin(step)
        if self._recipes is not None:
            self._recipes.begin()
        self._before, self._seen, self._seen_now = self._seen, self._seen_now, {}
        if self._new_ones <= LATER:
            self._tidy()
        self._new_ones = 0
        self._search -= self._search > 0
        self._look(self._proof.begin)

    def _tidy(self) -> None:
        """Forgets what has died."""
        self._before = {}
        if self._lasting is not None:
            for key in [key for key, weak in self._lasting.items() if weak.expired()]:
                del self._lasting[key]
        for table in (self._records, self._storages):
            for key in [key for key, reference in table.items() if reference() is None]:
                del table[key]
        for key in [key for key, weak in self._seen_now.items() if weak.expired()]:
            del self._seen_now[key]
        self._many = 256 + 2 * len(self._records)

    def stats(self) -> dict:
        return self.core.stats()

    def close(self) -> None:
        """Nothing is spilled any more. Graphs that live keep what they need."""
        if not self.closed:
            self.closed = True
            with self._lock:
                self.core.close()


def _of_models() -> dict[int, StorageWeakRef]:
    """Storages of parameters, buffers and leaves that are there: they outlive the graph, so spilling them frees
    nothing. What comes later is recognized when a second pass saves it."""
    found = {}
    for thing in gc.get_objects():
        kind = type(thing)
        try:
            if kind in PLAIN:
                tensors = (thing,) if thing.is_leaf and thing.requires_grad else ()
            elif isinstance(kind, type) and issubclass(kind, torch.nn.Module):
                members = vars(thing)
                tensors = (*(members.get("_parameters") or {}).values(), *(members.get("_buffers") or {}).values())
            else:
                continue
            for tensor in tensors:
                if type(tensor) in PLAIN and tensor.layout is torch.strided and not _wrapped(tensor):
                    storage = tensor.untyped_storage()
                    found[storage._cdata] = StorageWeakRef(storage)
        except RuntimeError:  # its tensor has ended: in older versions a graph ends one while others hold the object
            continue
    return found
