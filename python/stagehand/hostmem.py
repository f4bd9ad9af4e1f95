"""Tensors over host memory that torch did not allocate."""

from __future__ import annotations

import ctypes
import ctypes.util
import errno
import mmap
import os
import weakref

from . import _core
from ._torch import torch
from .errors import StagehandOOMError, TransferError

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


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


class _Mapping:
    """Unmaps when it dies."""


def map_file(descriptor: int, path: str) -> Block:
    """A private mapping of a whole open file: reading it costs no anonymous memory, a write copies the page and
    never reaches the file. The descriptor stays the caller's and may be closed after. The file must not be empty.
    Raises StagehandOOMError where the address space is used up, TransferError.

    A file that is truncated later makes reads of the missing pages fatal (SIGBUS), as with every mapping:
    this is for tensors at rest, never for the hot path.
    """
    nbytes = os.fstat(descriptor).st_size
    address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _NO_RESERVE, descriptor, 0)
    if address == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        kind, status = ((StagehandOOMError, "OUT_OF_ADDRESS_SPACE") if code == errno.ENOMEM else (TransferError, "IO"))
        raise kind(f"{path}: {nbytes} bytes of it cannot be mapped: {os.strerror(code)}", status, path, code)
    mapping = _Mapping()
    weakref.finalize(mapping, _libc.munmap, address, nbytes).atexit = False
    return Block(address, nbytes, mapping)
