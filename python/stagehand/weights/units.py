"""Units: what is leased together. A unit is one module's own large parameters; this file decides which
parameters stream and which stay on the device. (What a module sees in place of them: leased.py.)"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, field

from torch.multiprocessing.reductions import StorageWeakRef

from .. import _core
from .._torch import (
    STORAGE_USES,
    USES_OF_ONE,
    VIEW_VERSION,
    outside_transforms,
    same_bytes,
    span_bytes,
    torch,
    transforming,
    undisturbed,
    view,
)
from ..errors import StagehandError
from .fileweight import Unheld
from .folded import Home, address_of
from .leased import device_copy

nn = torch.nn

ADDED = "it was added after wrapping"  # why a parameter stays on the device


def round_up(nbytes: int) -> int:
    """What so many bytes take on the host and on the device."""
    return -(-nbytes // _core.ALIGN) * _core.ALIGN


@dataclass
class Entry(_core.Mark):
    """One parameter of a unit: where it lies in the unit's place, and (`version`, `address`, `written` of the base)
    what its host master looked like when its bytes were last known to be the ones that get copied."""

    name: str  # full name, for errors
    param: nn.Parameter
    offset: int = 0  # bytes from the start of the place
    nbytes: int = 0
    dtype: torch.dtype | None = None
    shape: torch.Size | None = None
    stride: tuple[int, ...] = ()
    twins: list = field(default_factory=list)  # other Parameter objects with the same bytes
    twin_marks: list = field(default_factory=list)
    storage: StorageWeakRef | None = None  # of the host master in the arena
    view: bytes | None = None  # for the core, where the entry is all of its unit: how it sees the place
    fresh_version: int = VIEW_VERSION  # of a tensor over the place that nobody has written
    cast: torch.dtype | None = None  # in which calls see it, where that is not the image's (casting.py)
    writes: int = 0  # by optimizers, that were seen
    at_home: torch.Tensor | None = None  # the image's data of a master that has data of another dtype
    inside = ()  # names of tensors that it is around (wrapping.py)
    whole = None  # the weight of which it is a part (wrapping.py)

    def state(self) -> tuple:
        """Another one after each write that was seen."""
        return self.version, self.address, self.writes

    def remember(self) -> None:
        self.writes += self.written
        self.written = False
        self.address = address_of(self.param)
        self.version = self.param._version
        self.twin_marks = [(address_of(twin), twin._version) for twin in self.twins]

    def changed(self) -> bool:
        """Whether a master was written, as far as version counters tell, or given other memory."""
        param = self.param
        if param._version != self.version or address_of(param) != self.address or self.written:
            return True
        return bool(self.twins) and self.twin_marks != [(address_of(twin), twin._version) for twin in self.twins]

    def over(self, base: torch.Tensor, master: nn.Parameter, quiet: bool, plain: bool) -> nn.Parameter:
        """What a call sees in place of `master`, which has these bytes. base: a tensor over the unit's place, or, where
        the core makes it (`view`), over the entry's; the rest as for `device_copy`."""
        if self.view is None:
            base = view(base, self.offset, self.dtype, self.shape, self.stride)
        return self.shown(base, master, quiet, plain)

    def shown(self, place: torch.Tensor, master: nn.Parameter, quiet: bool, plain: bool) -> nn.Parameter:
        """As `over`, of a tensor over the entry's own place."""
        return device_copy(self.as_cast(place, self.cast) if self.is_cast else place, master, quiet, plain)

    # ------------------------------------------------------------------ in another dtype

    @property
    def shown_dtype(self) -> torch.dtype:
        """In which calls see it."""
        return self.cast or self.dtype

    def see_as(self, dtype: torch.dtype) -> None:
        self.cast = None if dtype is self.dtype else dtype
        self.is_cast = self.cast is not None

    def is_lasting(self) -> bool:
        """Whether the master has data of another dtype than the image."""
        return self.at_home is not None

    def as_cast(self, place: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The place's values in memory of their own, as fresh as a tensor over the place."""
        with undisturbed(), outside_transforms() if transforming() else contextlib.nullcontext():
            cast = place.to(dtype)
            return cast if cast._version == self.fresh_version else view(cast, 0, dtype, cast.shape, cast.stride())

    def tensors(self, copy: torch.Tensor) -> list[tuple]:
        """(entry, tensor over its place) of what a call sees."""
        return [(self, copy)]

    def note(self, local, unit: Unit, copy: torch.Tensor) -> None:
        """The thread leases `copy` from outside its own module's forward."""
        local.outside.note(unit, self, copy, local.depth > 0)

    def values(self) -> torch.Tensor:
        """The master's, in host memory and the image's dtype."""
        if isinstance(self.param, Unheld):
            return self.param.now()
        return self.param.data if self.at_home is None else self.param.data.to(self.dtype)

    def shown_values(self) -> torch.Tensor:
        """As `values`, in the dtype that calls see."""
        return self.values().to(self.shown_dtype)

    def lay(self, offset: int, dtype: torch.dtype | None = None) -> None:
        """Where it lies in the place. dtype: what the parameter is going to be cast to, if it is."""
        data = self.param if dtype is None else torch.empty_like(self.param, dtype=dtype, device="meta")
        self.offset, self.nbytes = offset, span_bytes(data)
        self.dtype, self.shape, self.stride = data.dtype, data.shape, data.stride()


def held_elsewhere(param: torch.Tensor, mates: int, ours: bool = False) -> bool:
    """Whether somebody may write the memory of `param` who is none of the `mates` tensors over its storage (itself
    among them). Memory that PyTorch did not allocate counts as held: its owner is unknown, unless it is `ours`."""
    if STORAGE_USES is None or not (ours or param.untyped_storage().resizable()):
        return True
    # As USES_OF_ONE was counted: in older versions Python's object for the storage is one more user while it lives.
    return STORAGE_USES(param.untyped_storage()._cdata) >= USES_OF_ONE + mates


def storage_of(tensor: torch.Tensor) -> StorageWeakRef:
    """Tells, by expired(), whether a tensor over this storage is still alive."""
    return StorageWeakRef(tensor.untyped_storage())


NO_BOUND = (1 << 64) - 1  # of pinned bytes


@dataclass
class Unit:
    """Parameters that are on the device together. `index` is the unit's number in the core's runtime."""

    name: str
    group: str
    entries: list[Entry] = field(default_factory=list)
    wrapping: list = field(default_factory=list)  # weights of which some of the entries are parts (wrapping.py)
    nbytes: int = 0
    index: int = -1
    mapped: bool = False  # embeddings read its rows in place over the link
    base: int = 0  # address of the host image, 0 when file-backed
    arena: _core.Arena | None = None  # that holds it
    in_file: bool = False  # its bytes come from a checkpoint's files, not from the arena
    packed: bool = False  # and they are fewer than those of the place
    folded: Home | None = None  # its packed image is all that its weights have (folded.py)

    def add(self, name: str, param: torch.Tensor, kind=Entry, dtype: torch.dtype | None = None) -> Entry:
        """dtype: as for `Entry.lay`."""
        entry = kind(name, param)
        entry.lay(self.nbytes, dtype)
        self.entries.append(entry)
        self.nbytes = round_up(self.nbytes + entry.nbytes)
        return entry

    def weights(self) -> list:
        """Its entries as the model has them: not parts of a weight, but that."""
        return [entry for entry in self.entries if entry.whole is None] + self.wrapping

    def masters(self) -> list[tuple]:
        """(entry, Parameter) of all that have its bytes."""
        return [(entry, param) for entry in self.entries for param in (entry.param, *entry.twins)]

    def pageable(self) -> bool:
        """Whether it may have to be staged: a part of its arena is not pinned."""
        return self.arena is not None and self.arena.pinned_bytes < self.arena.bytes

    @property
    def common(self) -> bool:
        """Whether other processes may hold its image. Masters lie in a view of it, where writes stay in this one."""
        return self.arena is not None and self.arena.common

    @property
    def writable(self) -> bool:
        return any(entry.param.requires_grad for entry in self.entries)


def refuse_data(entry: Entry, data: torch.Tensor) -> None:
    """Raises: the entry's image cannot take this data, of another shape or dtype."""
    raise StagehandError(
        f"{entry.name} was given data of another shape or dtype ({tuple(data.shape)}, {data.dtype}; it was "
        f"{tuple(entry.shape)}, {entry.dtype}): shut stagehand down before the change and wrap again",
        object=entry.name)


def owned(model: nn.Module):
    """(module name, module, parameter name, parameter) for every parameter, in the order of modules; a tied
    parameter appears under each of its owners."""
    for name, module in model.named_modules(remove_duplicate=True):
        for key, param in module._parameters.items():
            if param is not None:
                yield name, module, key, param


def refuse_uninitialised(model: nn.Module) -> None:
    for name, _, key, param in owned(model):
        if isinstance(param, nn.parameter.UninitializedTensorMixin):
            raise StagehandError(f"{full_name(name, key)} has no values yet: call the model once before wrapping it",
                                 object=full_name(name, key))


def full_name(module: str, key: str) -> str:
    return f"{module}.{key}" if module else key


def as_text(name: str) -> str:
    """A module's name, which may be any string of Python's, for the core: half of a surrogate pair is spelt out."""
    return name.encode("utf-8", "backslashreplace").decode()


def plain_reason(param: nn.Parameter) -> str:
    """Why a parameter's bytes cannot be moved as bytes; "" when they can."""
    if isinstance(param, Unheld):
        return ""
    data = param.data
    if type(data) is not torch.Tensor:
        return f"it is a {type(data).__name__}, a tensor subclass"
    if type(param) is not nn.Parameter:
        return f"it is a {type(param).__name__}, not a plain Parameter"
    return bytes_reason(data)


def bytes_reason(data: torch.Tensor) -> str:
    """As `plain_reason`, of a plain tensor."""
    if data.layout is not torch.strided:
        return f"its layout is {data.layout}"
    if data.is_quantized:
        return "it is quantized by torch"
    if data.is_conj() or data.is_neg():
        return "it is a lazily conjugated or negated view"
    if data.numel() == 0:
        return "it is empty"
    return ""


class Storages:
    """Which parameters lie in the same memory. Keyed by storage, not by name or address: tied parameters are
    one, views of one storage that differ are told apart. others: tensors that are no parameters (buffers, those inside
    tensor subclasses), each as often as it has owners."""

    def __init__(self, params, others=()) -> None:
        self._by_storage: dict[int, list[torch.Tensor]] = {}
        params, others = list(params), list(others)
        self._others = {id(tensor) for tensor in others}
        owners = Counter([*map(id, others), *{id(param) for param in params}])
        self._owned_twice = {ident for ident, count in owners.items() if count > 1}
        params += others
        seen = set()
        for param in params:
            if id(param) in seen or param.is_meta or isinstance(param, Unheld):
                continue
            if type(param.data) is not torch.Tensor:
                continue
            if param.layout is not torch.strided or param.numel() == 0:
                continue
            seen.add(id(param))
            self._by_storage.setdefault(param.untyped_storage()._cdata, []).append(param)

    def twins(self, param: nn.Parameter) -> list[nn.Parameter]:
        """Other Parameter objects with exactly the same bytes."""
        mates = self._mates(param)
        return [p for p in mates if p is not param and id(p) not in self._others and same_bytes(p, param)]

    def entangled(self, param: nn.Parameter) -> bool:
        """Whether another tensor lies in the same storage and shares bytes, and is not a twin."""
        if id(param) in self._owned_twice:
            return True
        lo = param.data_ptr()
        hi = lo + span_bytes(param)
        for other in self._mates(param):
            if other is param:
                continue
            if not {id(other), id(param)} & self._others and same_bytes(other, param):
                continue
            if other.data_ptr() < hi and lo < other.data_ptr() + span_bytes(other):
                return True
        return False

    def _mates(self, param: nn.Parameter) -> list[nn.Parameter]:
        if param.is_meta or isinstance(param, Unheld):
            return []
        return self._by_storage.get(param.untyped_storage()._cdata, [])


DLPACK = {
    torch.float16: (2, 16), torch.float32: (2, 32), torch.float64: (2, 64), torch.bfloat16: (4, 16),
    torch.int8: (0, 8), torch.int16: (0, 16), torch.int32: (0, 32), torch.int64: (0, 64), torch.uint8: (1, 8),
}


def see_directly(entry: Entry) -> None:
    """The core makes the tensor over the place of an entry that is all of its unit, where it knows the dtype."""
    if entry.offset == 0 and entry.dtype in DLPACK and len(entry.shape) <= 8:
        entry.view = _core.tensor_view(*DLPACK[entry.dtype], tuple(entry.shape), entry.stride)
        entry.fresh_version = 0
