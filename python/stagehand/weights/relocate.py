"""Moves tensors that are not streamed between the host and the device, byte for byte: strides are kept, and
tensors that share memory go on sharing it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from torch.utils._python_dispatch import is_traceable_wrapper_subclass as wraps

from .._torch import raw, span_bytes, torch, transformed, view
from ..errors import StagehandOOMError
from .units import round_up


moves = 0  # times that tensors have been moved


@dataclass
class Item:
    """A tensor to move. `put` gives its owner the new one."""

    name: str
    data: torch.Tensor
    put: object  # callable(tensor)


def plain(data: torch.Tensor) -> bool:
    """Whether a tensor is bytes with strides over them."""
    return (type(data) is torch.Tensor or type(data) is torch.nn.Parameter) and data.layout is torch.strided and (
        not data.is_meta and data.numel() > 0 and not data.is_quantized and not data.is_conj() and not data.is_neg()
        and not transformed(data))


def clusters(items: list[Item]) -> list[list[Item]]:
    """Plain items, those whose bytes overlap together."""
    by_storage: dict[int, list[Item]] = {}
    for item in items:
        by_storage.setdefault(item.data.untyped_storage()._cdata, []).append(item)
    found = []
    for group in by_storage.values():
        group.sort(key=lambda item: item.data.data_ptr())
        end = -1
        for item in group:
            if item.data.data_ptr() >= end:
                found.append([])
            found[-1].append(item)
            end = max(end, item.data.data_ptr() + span_bytes(item.data))
    return found


def extent(cluster: list[Item]) -> tuple[int, int]:
    """First address and bytes of a cluster. Where a tensor would not start at a multiple of its item size,
    some bytes in front of the first come along."""
    begin = cluster[0].data.data_ptr()
    if any((item.data.data_ptr() - begin) % item.data.element_size() for item in cluster):
        begin -= begin % 16
    return begin, max(item.data.data_ptr() + span_bytes(item.data) for item in cluster) - begin


def held_bytes(data: torch.Tensor) -> int:
    """What a tensor takes in memory. One that stands for others (those of torchao and quanto) takes what they take;
    where its class does not tell, what its shape and dtype say."""
    if wraps(data):
        with contextlib.suppress(Exception):  # of another library's code
            inner = [getattr(data, name) for name in data.__tensor_flatten__()[0]]
            return sum(held_bytes(part) for part in inner if isinstance(part, torch.Tensor))
    return round_up(data.numel() * data.element_size())


def total_bytes(items: list[Item]) -> int:
    """What the items take on the device."""
    movable = [item for item in items if plain(item.data)]
    rest = sum(held_bytes(item.data) for item in items if not plain(item.data) and not item.data.is_meta)
    return rest + sum(round_up(extent(cluster)[1]) for cluster in clusters(movable))


def move(items: list[Item], allocate) -> int:
    """Gives each item's owner a copy in memory from allocate(name, nbytes) -> 1-D uint8 tensor. Returns the bytes
    taken. Only plain items."""
    global moves
    taken, moves = 0, moves + 1
    for cluster in clusters(items):
        begin, nbytes = extent(cluster)
        first = cluster[0].data
        base = allocate(cluster[0].name, nbytes)
        source = torch.empty(0, dtype=torch.uint8, device=first.device)
        source.set_(first.untyped_storage(), begin - first.untyped_storage().data_ptr(), (nbytes,), (1,))
        base.copy_(source)
        for item in cluster:
            data = item.data
            item.put(view(base, data.data_ptr() - begin, data.dtype, data.shape, data.stride()))
        taken += round_up(nbytes)
    return taken


def give(param: torch.nn.Parameter, data: torch.Tensor) -> None:
    """The parameter has this data, and its gradient goes to the same device: autograd adds to it there."""
    grad = param.grad
    param.data = data
    if grad is not None and grad.device != data.device:
        param.grad = None
        param.grad = grad.to(data.device)


def to_host(data: torch.Tensor) -> torch.Tensor:
    """A plain tensor with the same strides in host memory. (`data.cpu()` packs a tensor that has gaps.)"""
    moved: list[torch.Tensor] = []
    move([Item("", data, moved.append)], on_host)
    return moved[0]


def on_device(target):
    """An `allocate` for `move`: memory of the device."""

    def allocate(name: str, nbytes: int) -> torch.Tensor:
        if not target.simulated:
            return torch.empty(nbytes, dtype=torch.uint8, device=target.torch)
        try:
            return raw(target.core.empty(nbytes))
        except StagehandOOMError as error:
            raise StagehandOOMError(f"no room on the device for {name}, which stays there: {error}",
                                    error.status, name, error.native_code) from error

    return allocate


def on_host(name: str, nbytes: int) -> torch.Tensor:
    """An `allocate` for `move`: ordinary host memory, 64-byte aligned as torch does it."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
