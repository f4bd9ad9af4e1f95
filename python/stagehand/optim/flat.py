"""Tensors as flat memory for the core: which ones are, and their addresses."""

from __future__ import annotations

import torch

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
HALVES = (torch.bfloat16, torch.float16)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one range of memory, each place once, in whatever order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((st, si) for st, si in zip(tensor.stride(), tensor.shape) if si != 1):
        if size and stride != expected:
            return False
        expected *= size
    return True


def on_host(tensor: torch.Tensor) -> bool:
    """Whether the core can work on this tensor's memory: strided, dense, in host memory, of a dtype it knows."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.dtype in DTYPES
        # What a subclass keeps elsewhere is not at data_ptr.
        and (type(tensor) is torch.nn.Parameter or type(tensor.data) is torch.Tensor)
        and is_dense(tensor)
    )


def laid_out_like(tensor: torch.Tensor, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values in `dtype`, with the strides and on the device of `like`; the tensor itself where it is so."""
    if tensor.dtype == dtype and tensor.device == like.device and tensor.stride() == like.stride():
        return tensor
    return torch.empty_like(like, dtype=dtype, requires_grad=False).copy_(tensor)


def entry(tensor: torch.Tensor) -> tuple[int, int, str]:
    """A dense tensor as the core's gradient functions take it."""
    return tensor.data_ptr(), tensor.numel(), DTYPES[tensor.dtype]


if hasattr(torch.autograd.graph, "increment_version"):

    def mark_written(tensor: torch.Tensor) -> None:
        """Moves the version counter, as a write by PyTorch would."""
        torch.autograd.graph.increment_version(tensor)

else:

    def mark_written(tensor: torch.Tensor) -> None:
        """Moves the version counter, as a write by PyTorch would: writes nothing to a part of no elements."""
        with torch.no_grad():
            tensor.as_strided((0,), (1,)).zero_()
