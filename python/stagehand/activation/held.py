"""Whether somebody else has a tensor's storage: another tensor, the graph of one, or a Python object of the storage.

Counted twice: the references that PyTorch's core has to the storage, and those that Python has to the storage's object.
PyTorch's own of each kind, which differ from version to version, are counted once, on a tensor that nobody else has."""

from __future__ import annotations

import sys

from .._torch import torch, undisturbed

_use_count = torch._C._storage_Use_Count  # by the storage's address


def _counts(tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return _use_count(storage._cdata), sys.getrefcount(storage)


def _alone() -> tuple[int, int]:
    with undisturbed():
        tensor = torch.empty(1, device="cpu")
        kept = tensor.detach()
        tensor.untyped_storage()
        del tensor
        return _counts(kept)


_USES, _REFERENCES = _alone()


def held(tensor) -> bool:
    """Whether the storage would outlive the tensor. The tensor is the only one that the caller has of it. Memory that
    PyTorch did not allocate counts as held, as for weights (`held_elsewhere` in units.py): its owner is unknown."""
    if not tensor.untyped_storage().resizable():
        return True
    uses, references = _counts(tensor)
    return uses > _USES or references > _REFERENCES
