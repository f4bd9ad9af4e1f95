"""Tensors over host memory that torch did not allocate."""

from __future__ import annotations

import ctypes

from .. import _core
from .._torch import torch
from . import mapped


class Block:
    """`nbytes` of host memory at `address`. Tensors made from it keep `owner`, and so the memory, alive."""

    def __init__(self, address: int, nbytes: int, owner) -> None:
        self._array = (ctypes.c_ubyte * nbytes).from_address(address)
        self._array.owner = owner

    def written(self) -> list[tuple[int, int]]:
        """Ranges (begin, end) of addresses of a mapping that were written. Empty where the system does not tell."""
        return _core.written_pages(ctypes.addressof(self._array), len(self._array)) or []

    def tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        """1-D uint8 over a part of the block, with a storage of its own. nbytes > 0."""
        return torch.frombuffer(self._array, dtype=torch.uint8, count=nbytes, offset=offset)


def map_file(descriptor: int, path: str) -> Block:
    """A private mapping of a whole open file: reading it costs no anonymous memory, a write copies the page and
    never reaches the file. The descriptor stays the caller's and may be closed after. The file must not be empty.
    Raises StagehandOOMError where the address space is used up, TransferError.

    This is for tensors at rest, never for the hot path: mapped.py says what becomes of a file that is written.
    """
    mapped.watch()
    mapping = _core.Mapping(descriptor, path)
    return Block(mapping.address, mapping.nbytes, mapping)
