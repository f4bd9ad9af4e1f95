"""Model files as tensors: `open_checkpoint`, a read-only mapping. (Streaming from files: filesource.py.)"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from .. import _core
from .._torch import torch, unseen
from ..arguments import Path
from ..errors import CheckpointError
from ..owning import NotCopied
from ..weights.fileweight import UNMAPPED

_TORCH_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "I64": "int64",
    "U64": "uint64",
    "F64": "float64",
    "C64": "complex64",
}


@dataclass(frozen=True)
class Record:
    """Where a tensor lies: `nbytes` at `offset` (from the start of the file) of file number `file`. Records of other
    kinds say how their parameters are read: `source` is a FileSource, `want` the parameter."""

    name: str
    dtype_name: str
    shape: tuple[int, ...]
    file: int
    offset: int
    nbytes: int
    scale: float = 1.0

    one_range: ClassVar[bool] = True  # its bytes lie together in the file, as they are in the parameter
    packed: ClassVar[bool] = False  # its bytes are not those of the parameter
    unlock: ClassVar[str] = UNMAPPED  # why a FileWeight of it cannot be written

    def why_decoded(self, want, trains: bool) -> str:
        """Why the parameter's bytes cannot be those of the file; "": they can."""
        if self.scale != 1.0:
            return "the file holds it with a scale"
        return "" if self.dtype == want.dtype else f"the file holds it as {self.dtype_name}"

    def value(self, source) -> torch.Tensor:
        """The numbers that the file means, in fresh host memory."""
        return source.checkpoint.value(self)

    def value_for(self, source, want) -> torch.Tensor:
        """The same, as a parameter of this shape has them."""
        return self.value(source)

    def reader(self, source, want):
        """A function that reads the values of a parameter whose bytes are in the file. It keeps the files open."""
        return functools.partial(source.checkpoint.read, self)

    def pieces(self) -> list[tuple[int, int, int, int]]:
        """(file, offset in it, bytes, offset in the tensor), in the order of the tensor."""
        return [(self.file, self.offset, self.nbytes, 0)]

    @property
    def dtype(self) -> torch.dtype:
        """CheckpointError when Stagehand does not know the dtype, or this version of PyTorch does not have it."""
        known = _TORCH_NAMES.get(self.dtype_name)
        dtype = None if known is None else getattr(torch, known, None)
        if dtype is None:
            who = "Stagehand does not know" if known is None else f"PyTorch {torch.__version__} does not have"
            raise CheckpointError(f"{self.name} is of the dtype {self.dtype_name}, which {who}: convert the file",
                                  "UNSUPPORTED", self.name)
        return dtype


class Records(Mapping):
    """name -> Record, in the order on disk; made when it is asked for."""

    def __init__(self, entries, scales: dict[str, float]) -> None:
        self._entries = {entry[0]: entry for entry in entries}
        self._scales = scales

    def __getitem__(self, name: str) -> Record:
        return Record(*self._entries[name], self._scales.get(name, 1.0))

    def __iter__(self):
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name) -> bool:
        return name in self._entries


class Checkpoint(NotCopied, Mapping):
    """name -> tensor over model files, in the order on disk. Headers are checked at opening, as for streaming.

    Each access reads the tensor again into memory of its own; nothing is mapped or cached. A context manager.
    Raises KeyError for a name that is not there, TransferError when a file was truncated or changed since.
    Threads: any.
    """

    _instead = "open it there by its path"

    def __init__(self, path, core=None) -> None:
        """core: a _core.Checkpoint that is open already, None: `path` is opened."""
        self.path = path
        self.core = _core.Checkpoint(path) if core is None else core
        self.records = Records(self.core.tensors(), self.core.scales())
        self.files = self.core.files()

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.value(self.records[name])

    def __iter__(self):
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)

    def __contains__(self, name) -> bool:
        return name in self.records

    def value(self, record: Record) -> torch.Tensor:
        """The numbers that one tensor means, `scale` applied, in fresh host memory."""
        with unseen():
            stored = self.read(record)
            return stored if record.scale == 1.0 else stored.to(torch.float32) * record.scale

    def read(self, record: Record) -> torch.Tensor:
        """The stored numbers of one tensor, contiguous, in fresh host memory; `scale` is not applied."""
        with unseen():
            data = torch.empty(record.nbytes, dtype=torch.uint8, device="cpu")
            for file, offset, nbytes, at in record.pieces() if record.nbytes else ():
                self.core.read(file, offset, nbytes, data.data_ptr() + at)
            return data.view(record.dtype).reshape(record.shape)

    def file_of(self, record: Record) -> str:
        """Path of the file that the tensor lies in."""
        return self.files[record.file]

    def close(self) -> None:
        """Closes the files once nothing streams from them. May be called again."""
        self.core.close()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<stagehand checkpoint {str(self.path)!r}: {len(self)} tensors in {len(self.files)} files>"


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a .safetensors file, an index JSON, or a folder with one of these.

    path: str or os.PathLike. Returns a read-only mapping from name to tensor. Raises NotFoundError,
    CheckpointError (a ValueError) naming file, tensor and byte, TransferError.
    """
    return Checkpoint(path)
