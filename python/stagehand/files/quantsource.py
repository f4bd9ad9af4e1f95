"""Packed files as sources, quantised or lossless: which of their tensors stream as the bytes that the file holds, and
what becomes of the others.

    packed   a layer that the device can expand as it lies in the file (int8; int4 and NVFP4 with their factors; a
             tensor that is losslessly packed): its parameter is a FileWeight
    file     a tensor that the file holds as it is, of the parameter's dtype: as from a plain file
    decoded  anything else (another dtype, sizes that no kernel has; what trains): its values go into host memory,
             once, and stream from there like those of a model in RAM; named with the reason

What is wanted is settled by `match`; `bind` makes it so.
"""

from __future__ import annotations

import functools
import math
import warnings
from dataclasses import dataclass

from .. import _core
from .._torch import torch
from ..arguments import switches
from ..errors import CheckpointError, DtypeMismatchError, StagehandError, some_of
from ..weights.fileweight import UNPACK, FileWeight
from .checkpoint import Checkpoint, Record
from .filesource import FileSource, convertible, wanted_parameters

LOSSLESS = "stagehand_lossless_v1"
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(frozen=True)
class LayerRecord(Record):
    """The weight of a quantised layer, as a tensor of [out, in], or a tensor that is losslessly packed, with its own
    dtype and shape; file, offset and nbytes are those of its codes."""

    layer: dict | None = None
    packed = True
    unlock = UNPACK

    @property
    def lossless(self) -> bool:
        return self.layer["tensor"] is not None

    def why_decoded(self, want, trains: bool) -> str:
        if trains:
            return "it trains"
        if any(type(param) not in (torch.nn.Parameter, FileWeight) for param in want.params):
            return "it is a Parameter of a class of its own"
        return self.layer["unfit"]

    def value(self, source) -> torch.Tensor:
        return _decode(source.quant, self.layer["name"], self.shape, self.dtype if self.lossless else torch.float32)

    def value_for(self, source, want) -> torch.Tensor:
        return self.reader(source, want)()

    def reader(self, source, want):
        return functools.partial(_decode, source.quant, self.layer["name"], tuple(want.shape), want.dtype)


@dataclass
class Layout:
    """What the core needs to stream a unit as its file holds it."""

    segments: bytes
    ranges: list
    nbytes: int  # of the packed image
    largest: int  # of its segments, in bytes


def open_source(path, inference_mode: bool, map: bool = True) -> FileSource:
    """The files at `path`, packed or not. inference_mode: nothing of them trains. map: as for `load`."""
    switches(map=map)
    quant = _core.QuantFile.open_if_slab(path)
    if quant is None:
        return FileSource(path, inference_mode=inference_mode, map=map)
    return QuantSource(path, quant, inference_mode, map)


def stream_from_files(model, modules, path, dtype, inference_mode: bool, map: bool = True, strict: bool = False,
                      stacklevel: int = 3) -> tuple[FileSource, list]:
    """(source, bindings): parameters of `modules` that may stream from files are bound to those at `path`; what they
    held is dropped. strict: one without a tensor is an error; otherwise it stays in RAM, with a warning. On failure
    the model may be half done: an Undo made before puts it back."""
    wanted = wanted_parameters(model, convertible(model, modules, inference_mode), dtype)
    if not wanted:
        raise StagehandError(
            "the source has nothing to do: every parameter that could stream is trainable or cannot be moved as bytes. "
            "Freeze them with requires_grad_(False), or pass inference_mode=True")
    source = open_source(path, inference_mode, map)
    try:
        bindings = source.match(wanted, cast=dtype is not None, strict=strict)
        if not bindings:
            source.match(wanted, cast=dtype is not None)  # says which names were looked for
        source.bind(bindings)
    except BaseException:
        source.discard()
        raise
    found = {id(binding.wanted) for binding in bindings}
    names = [want.names[0] for want in wanted if id(want) not in found]
    if names:
        warnings.warn(f"stagehand: {some_of(names)} have no tensor in {path} and stay in RAM", RuntimeWarning,
                      stacklevel=stacklevel)
    return source, bindings


class QuantSource(FileSource):
    """The file or folder of one packed model. FileWeights keep the files open."""

    def __init__(self, path, quant, inference_mode: bool, map: bool = True) -> None:
        super().__init__(path, Checkpoint(path, quant.checkpoint()), inference_mode=inference_mode, map=map)
        self.quant = quant
        self._layouts: dict[tuple, Layout] = {}  # by the size of pieces, and what of the bound parameters lies where
        self._lossless = quant.format() == LOSSLESS  # all is as in the file that was packed
        tensors = self.checkpoint.records
        self.records = {name: tensors[name] for name in quant.plain()}
        for layer in quant.layers():
            self._add_layer(layer, tensors)

    def _add_layer(self, layer: dict, tensors: dict[str, Record]) -> None:
        codes = tensors[layer["parts"]["codes"]]
        if layer["tensor"] is not None:
            self.records[layer["name"]] = LayerRecord(layer["name"], *layer["tensor"], codes.file, codes.offset,
                                                      codes.nbytes, 1.0, layer)
            return
        found = [LayerRecord(f"{layer['name']}.weight", codes.dtype_name, (layer["out"], layer["in"]), codes.file,
                             codes.offset, codes.nbytes, 1.0, layer)]
        if "bias" in layer["parts"]:
            bias = tensors[layer["parts"]["bias"]]
            found.append(Record(f"{layer['name']}.bias", bias.dtype_name, bias.shape, bias.file, bias.offset,
                                bias.nbytes))
        for record in found:
            if record.name in self.records:
                raise CheckpointError(
                    f"{self.checkpoint.path} holds {record.name} twice: as a tensor, and as a part of the quantised "
                    f"layer {layer['name']}: remove one of the two", object=record.name)
            self.records[record.name] = record

    # ------------------------------------------------------------------ finding

    def _check(self, want, record: Record, cast: bool) -> None:
        if not record.packed or record.lossless:
            converts = not self._lossless and _converts(record, want)
            if tuple(record.shape) != tuple(want.shape) or not converts:
                super()._check(want, record, cast)
            return
        name, path = want.names[0], self.checkpoint.file_of(record)
        rows, rest = want.shape[0] if want.shape else 0, math.prod(want.shape[1:])
        if len(want.shape) < 2 or (rows, rest) != record.shape:  # a convolution's is flattened in the file
            raise CheckpointError(
                f"{name} has shape {tuple(want.shape)}, its quantised layer {record.layer['name']} in {path} has "
                f"{record.shape}", "SHAPE_MISMATCH", name)
        if want.dtype not in DTYPES:
            raise DtypeMismatchError(
                f"{name} is {want.dtype}; the quantised layer {record.layer['name']} in {path} decodes to float32, "
                f"bfloat16 or float16: build the model in one of these, or say dtype=", "DTYPE_MISMATCH", name)

    # ------------------------------------------------------------------ for the session

    def encoding(self, param) -> str:
        """How the file holds a packed parameter, such as "int8-row"."""
        return self._bound[id(param)].record.layer["encoding"]

    def segment(self, param, dtype: torch.dtype) -> bytes:
        """Of a packed parameter, as one piece or its largest one, for the core's budget_advice."""
        return self.quant.segment(self._bound[id(param)].record.layer["name"], DTYPES[dtype])

    def layout(self, unit, piece_bytes: int) -> Layout:
        """Of a unit of packed parameters. piece_bytes: most bytes of a segment that can be so small."""
        key = piece_bytes, *((id(entry.param), entry.offset) for entry in unit.entries)
        if key not in self._layouts:
            at, segments, ranges, largest = 0, b"", [], 0
            for entry in unit.entries:
                layer = self._bound[id(entry.param)].record.layer
                more, where, at, most = self.quant.segments(
                    layer["name"], DTYPES[entry.dtype], entry.offset, at, piece_bytes)
                segments, ranges, largest = segments + more, ranges + where, max(largest, most)
            self._layouts[key] = Layout(segments, ranges, at, largest)
        return self._layouts[key]

    def ranges(self, unit, piece_bytes: int) -> dict:
        if not unit.packed:
            return super().ranges(unit, piece_bytes)
        layout = self.layout(unit, piece_bytes)
        return {"checkpoint": self.checkpoint.core, "ranges": layout.ranges, "segments": layout.segments,
                "packed_bytes": layout.nbytes}

    def close(self) -> None:
        super().close()
        self.quant = None  # FileWeights that are left have it

    def discard(self) -> None:
        quant = self.quant
        self.close()
        if quant is not None:
            quant.close()


def _converts(record: Record, want) -> bool:
    """Whether a plain tensor's dtype is another one than the model's, and both are numbers of the same kind."""
    return record.scale == 1.0 and record.dtype in DTYPES and want.dtype in DTYPES


def _decode(quant, name: str, shape, dtype: torch.dtype) -> torch.Tensor:
    data = torch.empty(shape, dtype=dtype, device="cpu")
    quant.decode(name, DTYPES[dtype], data.data_ptr())
    return data
