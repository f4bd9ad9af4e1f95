"""Files that are mapped: who is about to write one is refused before its first byte.

A mapping sees each write to its file, and a read of a page that the file has lost is a SIGBUS. So the functions that
open files for writing look first: `open` (and with it numpy's `tofile`, `Path.write_bytes`), `os.open`, `os.truncate`,
safetensors and `torch.save`, which open files outside Python. A safetensors that writes another file and renames it may
go on. (An audit hook would hear of every `open`, but of every `id()` too, which would take five times as long.) A
writer that is not seen, such as another process, is found by the next read of a lost page (_core/mapping.c): the read
gives NaN, and the thread that read gets an error.
"""

from __future__ import annotations

import _io
import builtins
import ctypes
import functools
import importlib.util
import io
import os
import sys
import tempfile
import threading

from .. import _core
from .._torch import torch
from ..errors import InvalidStateTransitionError, TransferError

_LOOKS = "_stagehand_looks"  # attribute of a function that looks first
_READS = frozenset("rbtU")  # of a mode


def watch() -> None:
    """Before a file is mapped. May be called again: what has been imported since looks from now on, too."""
    for module in (builtins, io, _io):
        _look_first(module, "open", lambda file, mode="r", *rest, **named: file if _writes(mode) else None)
    _look_first(os, "open", lambda path, flags, mode=0o777, *, dir_fd=None: (
        path if dir_fd is None and flags & (os.O_WRONLY | os.O_RDWR | os.O_TRUNC) else None))
    for name in ("truncate", "ftruncate"):
        _look_first(os, name, lambda path, length: path)
    if importlib.util.find_spec("safetensors") is not None:
        import safetensors

        for name, module in [("safetensors", safetensors), *sys.modules.items()]:
            if name.partition(".")[0] == "safetensors":
                _look_first(module, "serialize_file", lambda tensors, filename, *rest, **named: filename,
                            lambda write, path: write({}, path, None))
    _look_first(torch.serialization, "_open_zipfile_writer",
                lambda name: name if isinstance(name, (str, bytes, os.PathLike)) else None)


def _writes(mode) -> bool:
    return isinstance(mode, str) and not _READS.issuperset(mode)


def _look_first(module, name: str, target_of, write=None) -> None:
    """module.name looks at the file that it is going to write: target_of(its arguments), None: it writes none.
    write(function, path): writes a file by it, where it may be that it makes another file and renames it, which no
    mapping minds."""
    original = getattr(module, name, None)
    if original is None or hasattr(original, _LOOKS):
        return

    @functools.wraps(original)
    def looks(*args, **kwargs):
        if _core.anything_mapped():
            try:
                target = target_of(*args, **kwargs)
            except TypeError:  # wrong arguments: the function says so itself
                target = None
            if target is not None:
                _refuse(target, original, write)
        return original(*args, **kwargs)

    setattr(looks, _LOOKS, True)
    for known in (os.supports_dir_fd, os.supports_fd):  # of functions, which programs look into
        if original in known:
            known.add(looks)
    setattr(module, name, looks)


def _refuse(target, original, write) -> None:
    try:
        _core.refuse_writes(target)
    except InvalidStateTransitionError:
        if write is None or not _replaces(lambda path: write(original, path)):
            raise


def _replaces(write) -> bool:
    """Whether write(path) leaves the file alone that is there, and puts another one in its place."""
    with tempfile.TemporaryDirectory() as folder, open(os.path.join(folder, "file"), "xb") as there:
        write(there.name)
        return not os.path.samestat(os.fstat(there.fileno()), os.stat(there.name))


def raise_mapped(path: str, target) -> None:
    """Called by the core: `target` is about to be opened for writing and is the file that was mapped as `path`."""
    name = path if isinstance(target, int) else os.fsdecode(target)
    loaded = "it" if name == path else path
    raise InvalidStateTransitionError(
        f"{name} is about to be written, and weights of a model that was loaded from {loaded} are "
        f"views of it: they would be lost. Write another file and os.replace() this one by it (the model goes on with "
        f"the old one), load with map=False, or drop the model first", "INVALID_STATE", path)


def raise_lost(path: str, thread: int, told: bool) -> None:
    """Called by the core on the main thread: `thread` has read pages that the file at `path` has lost. told: an error
    has been raised for the file before, which is enough for a thread that has ended since."""
    message = (f"{path} was cut off while weights are views of it: what was read is lost, and NaN stands in its place. "
               f"Load the model again; with map=False such a read fails before it gives a value")

    class Lost(TransferError):
        """For another thread, which makes the exception itself."""

        def __init__(self) -> None:
            super().__init__(message, "CHANGED_DATA", path)

    if thread == threading.main_thread().ident or not (_raise_in(thread, Lost) or told):
        raise TransferError(message, "CHANGED_DATA", path)


def _raise_in(thread: int, kind: type) -> bool:
    """Whether there is such a thread of Python's."""
    raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
    return raise_in(ctypes.c_ulong(thread), ctypes.py_object(kind)) == 1
