"""Weights that stay in their files: which tensor belongs to which parameter, and what a session streams from.

`match` checks everything and changes nothing; `bind` gives each parameter a view of its file, so that
state_dict, deepcopy and reads at rest see right values without a copy in RAM (what is stored with a scale goes there).
A parameter that is joined from several tensors (merged.py) is a FileWeight, which reads them each time, and so is each
parameter with map=False. Streaming never touches
either: the core reads the files by positioned reads.
"""

from __future__ import annotations

import ctypes
import warnings
from dataclasses import dataclass, field

from .. import _core
from .._torch import torch, view
from ..errors import CheckpointError, DtypeMismatchError, StagehandError, some_of
from ..weights import hostmem
from ..weights.fileweight import FileWeight, put
from ..weights.units import Storages, full_name, owned, plain_reason
from . import merged
from .checkpoint import Checkpoint, Record
from .names import ranks

nn = torch.nn
COMPARE_BYTES = 16 << 20
CODES = (".qweight", ".nvq")  # names of the codes of packed weights
WARNED_BYTES = 64 << 20  # of host memory for what does not stream from its file


@dataclass
class Wanted:
    """One parameter to be found: all Parameter objects with its bytes (tied ones), and who owns them."""

    names: list[str]
    params: list[nn.Parameter]
    owners: list[tuple]  # (module, key, parameter)
    dtype: torch.dtype
    shape: torch.Size


@dataclass
class Binding:
    """A parameter and its tensor in the file. address, version: of the view, to notice a later change."""

    wanted: Wanted
    record: Record
    address: int = 0
    versions: dict[int, int] = field(default_factory=dict)


def wanted_parameters(model, accept, dtype=None) -> list[Wanted]:
    """What to look for: every parameter for which accept(module, key, param) of any owner holds, once.
    dtype: what floating ones are to become; None: what they are."""
    everything = list(owned(model))
    storages = Storages(param for *_, param in everything)
    found: dict[int, Wanted] = {}
    for name, module, key, param in everything:
        if id(param) in found or not accept(module, key, param):
            continue
        target = dtype if dtype is not None and param.is_floating_point() else param.dtype
        wanted = Wanted([], [param, *storages.twins(param)], [], target, param.shape)
        for same in wanted.params:
            found[id(same)] = wanted
    for name, module, key, param in everything:
        if id(param) in found:
            found[id(param)].names.append(full_name(name, key))
            found[id(param)].owners.append((module, key, param))
    return list({id(w): w for w in found.values()}.values())


def convertible(model, modules, inference_mode: bool):
    """For wanted_parameters: parameters of `modules` that may stream from files: frozen ones (with inference_mode all)
    whose bytes can be moved as bytes."""
    inside = {id(module) for module in modules}
    storages = Storages(param for *_, param in owned(model))

    def accept(module, key, param) -> bool:
        return (id(module) in inside and not plain_reason(param) and not storages.entangled(param)
                and (inference_mode or not param.requires_grad))

    return accept


class Undo:
    """Puts the parameters, buffers and flags of a model back as they were."""

    def __init__(self, model: nn.Module) -> None:
        self._was = [(m, dict(m._parameters), dict(m._buffers)) for m in model.modules()]
        self._data = [(p, p.data, p.requires_grad) for p in model.parameters()
                      if not p.is_meta and not p.is_inference() and not isinstance(p, FileWeight)]

    def __call__(self) -> None:
        for module, params, buffers in self._was:
            module._parameters.update(params)
            module._buffers.update(buffers)
        for param, data, requires_grad in self._data:
            param.data = data
            param.requires_grad_(requires_grad)


class FileSource:
    """The files of one model. `close` when nothing streams from them any more. inference_mode: nothing of them trains.
    map: parameters may be views of mapped files."""

    def __init__(self, path, checkpoint: Checkpoint | None = None, *, inference_mode: bool = False,
                 map: bool = True) -> None:
        self.checkpoint = checkpoint or Checkpoint(path)
        self._inference_mode = inference_mode
        self._map_files = map
        self.records = self.checkpoint.records  # what parameters may be found in, by name
        self.decoded: dict[str, tuple[str, int]] = {}  # parameter -> why its values are in host memory, bytes
        self._maps: dict[int, hostmem.Block] = {}
        self._bound: dict[int, Binding] = {}  # id(parameter)
        self._params: dict[int, nn.Parameter] = {}  # the same, which this keeps alive
        self.used: set[str] = set()  # tensors that were matched
        self._reads_later = not map  # FileWeights read the checkpoint after close

    # ------------------------------------------------------------------ finding

    def match(self, wanted: list[Wanted], *, cast=False, strict=True) -> list[Binding]:
        """Finds and checks a tensor for each of `wanted`; nothing is changed.

        cast: the dtypes wanted are what the user asked for, not what the model has (for the error's text).
        strict: a missing tensor is an error; otherwise its parameter is left out.
        Raises CheckpointError naming parameter, file and both shapes, DtypeMismatchError.
        """
        self._refuse_codes_alone(wanted)
        bindings, missing, used = [], [], {}
        for want in wanted:
            record = self._find(want)
            if record is None:
                missing.append(want.names[0])
                continue
            other = used.setdefault(record.name, want)
            if other is not want:
                raise CheckpointError(
                    f"{other.names[0]} and {want.names[0]} would both be read from the tensor {record.name} of "
                    f"{self.checkpoint.file_of(record)}: tie them in the model, or rename the tensors",
                    object=want.names[0])
            self._check(want, record, cast)
            bindings.append(Binding(want, record))
        if missing and strict:
            raise CheckpointError(
                f"{self.checkpoint.path} has no tensor for {some_of(missing)}: give the file of this model, or build "
                "the model that the file is of", "NOT_FOUND", missing[0])
        return bindings

    def _refuse_codes_alone(self, wanted: list[Wanted]) -> None:
        """Where a packed file is read as a plain one, because nothing says that it is packed."""
        for want in wanted:
            names = [key for name in want.names for rank in ranks(name) for key in rank]
            bases = [key.removesuffix(".weight") for key in names if key.endswith(".weight")]
            found = [self.records[base + end] for base in bases for end in CODES if base + end in self.records]
            if not found or found[0].dtype_name not in ("I8", "U8") or any(name in self.records for name in names):
                continue
            path = self.checkpoint.file_of(found[0])
            manifest = f"{path.removesuffix('.safetensors')}.manifest.json"
            raise CheckpointError(
                f"{path} has no tensor for {want.names[0]}, but {found[0].name}, as packed files have, and nothing "
                f"that says how it is packed: put its manifest back to {manifest}, or, if the file is a shard of a "
                f"packed folder, give the folder with its index", "NOT_FOUND", want.names[0])

    def _find(self, want: Wanted) -> Record | None:
        for rank in zip(*(ranks(name) for name in want.names)):
            keys = dict.fromkeys(key for candidates in rank for key in candidates)
            hits = [self.records[key] for key in keys if key in self.records]
            for other in hits[1:]:
                if not self._equal(hits[0], other):
                    raise CheckpointError(
                        f"{' = '.join(want.names)} could be {hits[0].name} or {other.name} of "
                        f"{self.checkpoint.file_of(hits[0])}, which differ: remove or rename one of them",
                        object=want.names[0])
            if hits:
                self.used.update(hit.name for hit in hits)
                return hits[0]
        for name in want.names:
            joined = merged.find(self.records, name, want.shape, self.checkpoint.files)
            if joined is not None:
                self.used.update(part.name for part in joined.parts)
                return joined
        return None

    def _equal(self, a: Record, b: Record) -> bool:
        """Whether two tensors of the files are the same, as the two names of a tied one should be."""
        if a.packed or b.packed:
            return a is b or (a.shape == b.shape and torch.equal(a.value(self), b.value(self)))
        if (a.dtype_name, a.shape, a.scale) != (b.dtype_name, b.shape, b.scale):
            return False
        if (a.file, a.offset) == (b.file, b.offset):
            return True
        for at in range(0, a.nbytes, COMPARE_BYTES):
            nbytes = min(COMPARE_BYTES, a.nbytes - at)
            parts = [torch.empty(nbytes, dtype=torch.uint8, device="cpu") for _ in (a, b)]
            for record, part in zip((a, b), parts):
                self.checkpoint.core.read(record.file, record.offset + at, nbytes, part.data_ptr())
            if not torch.equal(*parts):
                return False
        return True

    def _check(self, want: Wanted, record: Record, cast: bool) -> None:
        name, path = want.names[0], self.checkpoint.file_of(record)
        if tuple(record.shape) != tuple(want.shape):
            raise CheckpointError(
                f"{name} has shape {tuple(want.shape)}, its tensor {record.name} in {path} has {record.shape}",
                "SHAPE_MISMATCH", name)
        if want.dtype.is_floating_point if record.scale != 1.0 else record.dtype == want.dtype:
            return
        if cast:
            raise DtypeMismatchError(
                f"{name} was asked for as {want.dtype}, but file-backed weights keep the file's dtype, and its "
                f"tensor {record.name} in {path} is {record.dtype} {record.shape}: convert the file, or leave "
                f"dtype= out", "DTYPE_MISMATCH", name)
        raise DtypeMismatchError(
            f"{name} is {want.dtype} {tuple(want.shape)}, its tensor {record.name} in {path} is {record.dtype} "
            f"{record.shape}: build the model in {record.dtype}, or convert the file", "DTYPE_MISMATCH", name)

    # ------------------------------------------------------------------ binding

    def bind(self, bindings: list[Binding]) -> None:
        """Gives the parameters views of their files; what they held is dropped. Parameters on the meta device
        are replaced by new objects under all their names."""
        for binding in bindings:
            record = binding.record
            if record.nbytes and self._may_map(record) and not self._why_decoded(binding):
                self._map(record.file)
        with torch.inference_mode(False), torch.no_grad():
            for binding in bindings:
                reason = self._why_decoded(binding)
                if reason:
                    self._decode_into_memory(binding, reason)
                elif self._may_map(binding.record):
                    self._bind_view(binding)
                else:
                    self._bind_unmapped(binding)
        self._warn_of_decoded()

    def _why_decoded(self, binding: Binding) -> str:
        return binding.record.why_decoded(binding.wanted, self._trains(binding.wanted))

    def _trains(self, want: Wanted) -> bool:
        return not self._inference_mode and any(param.requires_grad for param in want.params)

    def _may_map(self, record: Record) -> bool:
        """Whether a parameter may be a view of its file."""
        return self._map_files and record.one_range and not record.packed

    def _decode_into_memory(self, binding: Binding, reason: str) -> None:
        want = binding.wanted
        data = binding.record.value_for(self, want).to(want.dtype)
        for param in list(want.params):
            self._give(want, param, data)
        self.decoded[want.names[0]] = (reason, data.numel() * data.element_size())

    def _warn_of_decoded(self) -> None:
        nbytes = sum(nbytes for _, nbytes in self.decoded.values())
        if nbytes >= WARNED_BYTES:
            reason, _ = max(self.decoded.values(), key=lambda item: item[1])
            warnings.warn(
                f"stagehand: {len(self.decoded)} tensors of {self.checkpoint.path} cannot stream as the file holds "
                f"them and are decoded into {_core.format_size(nbytes)} of host memory (runtime.quantised names them); "
                f"of the largest, {reason}", RuntimeWarning, stacklevel=6)

    def _bind_view(self, binding: Binding) -> None:
        record, want = binding.record, binding.wanted
        if record.nbytes:
            data = self._maps[record.file].tensor(record.offset, record.nbytes)
        else:
            data = torch.empty(0, dtype=torch.uint8, device="cpu")
        strides = torch.empty(record.shape, dtype=record.dtype, device="meta").stride()
        for param in list(want.params):
            self._remember(binding, self._give(want, param, view(data, 0, record.dtype, record.shape, strides)))

    def _bind_unmapped(self, binding: Binding) -> None:
        """A FileWeight; what trains, and what is a Parameter of another class or empty, has its values in RAM."""
        record, want = binding.record, binding.wanted
        plain = not record.nbytes or any(type(param) not in (nn.Parameter, FileWeight) for param in want.params)
        if plain or self._trains(want):
            data = self.checkpoint.read(record)
            for param in list(want.params):
                self._give(want, param, data)
            return
        self._reads_later |= not record.packed
        self._stand_in(binding, FileWeight.over(want.names[0], want.shape, want.dtype, record.reader(self, want),
                                                unlock=record.unlock))

    def _stand_in(self, binding: Binding, weight: FileWeight) -> None:
        """`weight` in place of the parameter."""
        for param in list(binding.wanted.params):
            weight.__dict__.update(param.__dict__)
            weight.requires_grad_(param.requires_grad)
            replace(binding.wanted, param, weight)
        self._remember(binding, weight)

    @staticmethod
    def _give(want: Wanted, param, data: torch.Tensor):
        """The parameter has this data now. Returns it, or the one that stands in its place."""
        if param.is_meta or param.is_inference() or isinstance(param, FileWeight):
            return replace(want, param, _like(want, param, data))
        param.data = data
        param.grad = None
        return param

    def _remember(self, binding: Binding, param) -> None:
        binding.address = param.data_ptr()
        self._bound[id(param)] = binding
        self._params[id(param)] = param
        binding.versions[id(param)] = param._version

    def _map(self, file: int) -> None:
        """By the descriptor: another file may have come to the path since the headers were read."""
        if file not in self._maps:
            self._maps[file] = hostmem.map_file(self.checkpoint.core.descriptor(file), self.checkpoint.files[file])

    # ------------------------------------------------------------------ for the session

    def holds(self, param) -> bool:
        """Whether the parameter's bytes are still those of the file."""
        binding = self._bound.get(id(param))
        return (
            binding is not None
            and param.data_ptr() == binding.address
            and param._version == binding.versions[id(param)]
        )

    def written(self) -> list:
        """Bound parameters whose bytes in memory are not those of the file any more, however written."""
        pages = [pages for block in self._maps.values() for pages in block.written()]
        return [self._params[ident] for ident, binding in list(self._bound.items())
                if pages and binding.address and self._differs(binding, pages)]

    def _differs(self, binding: Binding, pages: list) -> bool:
        record, begin = binding.record, binding.address
        for low, high in pages:
            at, end = max(low, begin), min(high, begin + record.nbytes)
            while at < end:
                nbytes = min(COMPARE_BYTES, end - at)
                scratch = (ctypes.c_ubyte * nbytes)()
                self.checkpoint.core.read(record.file, record.offset + at - begin, nbytes, ctypes.addressof(scratch))
                if not _core.same_memory(ctypes.addressof(scratch), at, nbytes):
                    return True
                at += nbytes
        return False

    def same_as_file(self, param) -> bool:
        """Whether a bound parameter that was written in place has the bytes of the file. It stays bound then."""
        binding = self._bound.get(id(param))
        if binding is None or not binding.address or param.data_ptr() != binding.address:
            return False
        if self._differs(binding, [pages for block in self._maps.values() for pages in block.written()]):
            return False
        binding.versions[id(param)] = param._version
        return True

    def let_go(self, params) -> None:
        """They do not stream from the files any more."""
        for param in params:
            self._bound.pop(id(param), None)
            self._params.pop(id(param), None)

    def kind(self, param) -> str:
        """How a parameter streams from the files, "file" or "packed"; "": it does not."""
        if not self.holds(param):
            return ""
        return "packed" if self._bound[id(param)].record.packed else "file"

    def ranges(self, unit, piece_bytes: int) -> dict:
        """The keyword arguments of the core's add_unit. piece_bytes: most bytes that a packed unit is cut into."""
        ranges = []
        for entry in unit.entries:
            record = self._bound[id(entry.param)].record
            ranges += [(file, offset, nbytes, entry.offset + at) for file, offset, nbytes, at in record.pieces()]
        return {"checkpoint": self.checkpoint.core, "ranges": ranges}

    def read(self, param) -> torch.Tensor:
        """A bound parameter's values in the file, read into fresh host memory."""
        return param.now() if isinstance(param, FileWeight) else self.checkpoint.read(self._bound[id(param)].record)

    def close(self) -> None:
        """Closes the files; bound parameters stay readable: FileWeights keep them open. May be called again."""
        self._maps.clear()
        if not self._reads_later:
            self.checkpoint.close()

    def discard(self) -> None:
        """The same where what was bound is going to be undone."""
        self.close()
        self.checkpoint.close()


def _like(want: Wanted, param, data: torch.Tensor):
    """A parameter as `param` with values of its own."""
    if isinstance(param, nn.parameter.UninitializedTensorMixin):
        raise StagehandError(f"{want.names[0]} is not initialized: run the lazy module once first")
    differentiable = data.is_floating_point() or data.is_complex()
    kind = nn.Parameter if isinstance(param, FileWeight) else type(param)
    new = torch.Tensor._make_subclass(kind, data, param.requires_grad and differentiable)
    new.__dict__.update(param.__dict__)
    return new


def replace(want: Wanted, param, new):
    """`new` in place of a parameter, under every name. Returns it."""
    for module, key, owner in want.owners:
        if owner is param:
            put(module, key, new)
    want.owners = [(module, key, new if owner is param else owner) for module, key, owner in want.owners]
    want.params = list({id(p): p for p in (new if other is param else other for other in want.params)}.values())
    return new
