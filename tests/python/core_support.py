"""For the tests of stagehand._core: a consumer of DLPack capsules in ctypes, checkpoints, small worlds."""

import ctypes
import json
import random
import struct
import time

from stagehand import _core

ALIGN = 512


def wait_until(holds, limit=240):
    """Until `holds()`; for `limit` seconds at most, after which the caller's test fails by what is missing."""
    end = time.monotonic() + limit
    while not holds() and time.monotonic() < end:
        time.sleep(0.001)


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("index", ctypes.c_int32)]


class _Dtype(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Managed(ctypes.Structure):
    """DLManagedTensor of DLPack before 1.0."""


_DELETER = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))  # called with the GIL released
_Managed._fields_ = [
    ("data", ctypes.c_void_p),
    ("device", _Device),
    ("rank", ctypes.c_int32),
    ("dtype", _Dtype),
    ("shape", ctypes.POINTER(ctypes.c_int64)),
    ("strides", ctypes.POINTER(ctypes.c_int64)),
    ("byte_offset", ctypes.c_uint64),
    ("context", ctypes.c_void_p),
    ("deleter", _DELETER),
]

_api = ctypes.pythonapi
_api.PyCapsule_GetPointer.restype = ctypes.c_void_p
_api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_api.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]
_USED = b"used_dltensor"


class Tensor:
    """Consumes a capsule as a framework does. `delete()` calls the deleter, once."""

    def __init__(self, capsule):
        pointer = _api.PyCapsule_GetPointer(capsule, b"dltensor")
        self._managed = ctypes.cast(pointer, ctypes.POINTER(_Managed))
        _api.PyCapsule_SetName(capsule, _USED)
        managed = self._managed.contents
        self.address = managed.data
        self.shape = tuple(managed.shape[i] for i in range(managed.rank))
        self.strides = tuple(managed.strides[i] for i in range(managed.rank))
        self.dtype = (managed.dtype.code, managed.dtype.bits, managed.dtype.lanes)
        self.device = (managed.device.type, managed.device.index)

    def bytes(self):
        return ctypes.string_at(self.address, self.shape[0])

    def fill(self, value):
        ctypes.memset(self.address, value, self.shape[0])

    def delete(self):
        managed, self._managed = self._managed, None
        managed.contents.deleter(managed)


def peek(capsule):
    """The bytes of a capsule, which stays unconsumed."""
    managed = ctypes.cast(_api.PyCapsule_GetPointer(capsule, b"dltensor"), ctypes.POINTER(_Managed)).contents
    return ctypes.string_at(managed.data, managed.shape[0])


def noise(nbytes, seed=0):
    return random.Random(seed).randbytes(nbytes)


class World:
    """A runtime on the simulated device whose units have images in an arena, copied from where they are or,
    with `staged`, by way of pinned slabs."""

    def __init__(self, sizes, budget, device=None, seal=True, flags=0, staged=False, **options):
        self.device = device or _core.Device(memory_bytes=64 << 20)
        self.arena = _core.Arena(self.device, sum(size + ALIGN for size in sizes))
        self.images = [noise(size, seed) for seed, size in enumerate(sizes)]
        self.addresses = [self.arena.reserve(len(image)) for image in self.images]
        for address, image in zip(self.addresses, self.images):
            self.arena.write(address, address_of(image), len(image))
        self.arena.finish()
        self.runtime = _core.Runtime(self.device, budget, link_bytes_per_s=1e9, **options)
        for i, (address, image) in enumerate(zip(self.addresses, self.images)):
            arena = None if staged else self.arena
            self.runtime.add_unit(
                f"unit{i}", len(image), group="all", flags=flags, host=address, arena=arena
            )
        if seal:
            self.runtime.seal()


def address_of(data):
    """Address of the bytes of a bytes object, which must stay alive."""
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value


def write_safetensors(path, tensors):
    """tensors: {name: (dtype, shape, bytes)}. Returns {name: offset in the file}."""
    header, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values()))
    return {name: 8 + len(text) + entry["data_offsets"][0] for name, entry in header.items()}
