"""Parameters that a model has as one and its files as many: all experts of a layer, [experts, rows, columns], where the
files hold a tensor or two for each expert, as models on the hub do.

transformers joins such tensors in RAM when it loads a model. Here the joined parameter is a list of byte ranges of the
files: expert after expert, and of each expert its tensors one behind the other. Nothing is copied to join them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .. import _core
from .._torch import torch
from ..errors import CheckpointError
from .checkpoint import Record
from .names import ranks

# The last two components of a joined parameter's name -> the names of an expert's tensors, in the order in which they
# are joined; one set for each code base that writes them.
_PARTS = {
    "experts.gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3"), ("fc1", "fc3")),
    "experts.up_proj": (("up_proj",),),
    "experts.down_proj": (("down_proj",), ("w2",), ("fc2",)),
}
READ_ONLY = ("is joined from the tensors of its experts, reads its file and cannot be written: build the model with "
             "its values in RAM and call stagehand.layer without source= to change its weights")


@dataclass(frozen=True)
class MergedRecord(Record):
    """The tensors of all experts as one. file, offset: of the first of them. parts: in the order of the parameter."""

    parts: tuple[Record, ...] = ()
    one_range = False
    unlock = READ_ONLY

    def why_decoded(self, want, trains: bool) -> str:
        if any(part.packed or not part.one_range or part.scale != 1.0 for part in self.parts):
            return "the file holds the tensors of its experts packed, or with a scale"
        if any(at % _core.ALIGN for *_, at in self.pieces()):  # where the core cannot read to
            return f"its experts' tensors are no multiple of {_core.ALIGN} bytes"
        return super().why_decoded(want, trains)

    def value(self, source) -> torch.Tensor:
        return torch.cat([part.value(source).reshape(-1) for part in self.parts]).reshape(self.shape)

    def pieces(self) -> list[tuple[int, int, int, int]]:
        at, pieces = 0, []
        for part in self.parts:
            pieces += [(file, offset, nbytes, at + begin) for file, offset, nbytes, begin in part.pieces()]
            at += part.nbytes
        return pieces


def _sets(key: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(the name of the list of experts, the names of an expert's tensors) for a joined parameter's name."""
    for end, sets in _PARTS.items():
        if key == end or key.endswith(f".{end}"):
            for names in sets:
                yield key[: len(key) - len(end)] + "experts", names


def find(records: Mapping, name: str, shape, files) -> MergedRecord | None:
    """The tensors that make up the parameter of this name and shape; None: there are none. files: paths, by number.
    Raises CheckpointError where some of the experts' tensors are missing, or have sizes that do not add up."""
    if len(shape) != 3:
        return None
    for key in dict.fromkeys(key for rank in ranks(name) for key in rank):
        for base, parts in _sets(key):
            if f"{base}.0.{parts[0]}.weight" in records:
                names = [f"{base}.{expert}.{part}.weight" for expert in range(shape[0]) for part in parts]
                return _joined(records, name, tuple(shape), names, files)
    return None


def _joined(records: Mapping, name: str, shape: tuple, names: list[str], files) -> MergedRecord:
    for other in names:
        if other not in records:
            raise CheckpointError(f"{name} has {shape[0]} experts, and the files have no tensor {other}: give the "
                                  f"files of this model, or build the model that they are of", "NOT_FOUND", name)
    found = [records[other] for other in names]
    each = len(found) // shape[0]
    first = found[0]
    for number, record in enumerate(found):
        like = found[number % each]
        sizes_fit = len(record.shape) == 2 and record.shape == like.shape and record.shape[1] == first.shape[1]
        if not sizes_fit or record.dtype_name != first.dtype_name:
            raise CheckpointError(
                f"{name} is joined from the tensors of its experts, and {record.name} in {files[record.file]} is "
                f"{record.dtype_name} {record.shape}, where {first.name} is {first.dtype_name} {first.shape}: give the "
                f"files of one model",
                "SHAPE_MISMATCH", name)
    rows = sum(record.shape[0] for record in found[:each])
    return MergedRecord(name, first.dtype_name, (shape[0], rows, first.shape[1]), first.file, first.offset,
                        sum(record.nbytes for record in found), 1.0, tuple(found))
