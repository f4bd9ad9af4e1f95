"""The norm of gradients and clipping by it: gradients in host memory in the core, others by PyTorch."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable

import torch

from .. import _core
from .._torch import unseen
from . import flat

_shared: tuple[int, _core.AdamW] | None = None  # of this process


def shared_core() -> _core.AdamW:
    """Threads for callers without an optimizer; started at first use, once in a process."""
    global _shared
    if _shared is None or _shared[0] != os.getpid():  # threads do not survive a fork
        _shared = os.getpid(), _core.AdamW()
    return _shared[1]


def _parted(grads) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    host, others = [], []
    for grad in grads:
        if grad.layout is not torch.strided:
            raise RuntimeError("sparse gradients have no norm here; make them dense, or clip them with torch.nn.utils")
        (host if flat.on_host(grad) else others).append(grad)
    return host, others


def total_norm(core: _core.AdamW, grads) -> float:
    """The 2-norm of all elements of all gradients as a float. Waits for devices that hold some of them."""
    host, others = _parted(grads)
    total = core.sum_squares([flat.entry(grad) for grad in host]) if host else 0.0
    by_device: dict = {}
    for grad in others:
        real = torch.view_as_real(grad) if grad.is_complex() else grad
        wide = torch.float64 if real.dtype == torch.float64 else torch.float32
        by_device.setdefault(grad.device, []).append(torch.linalg.vector_norm(real, dtype=wide).double())
    for norms in by_device.values():
        total += float(torch.stack(norms).square().sum())
    return math.sqrt(total)


def coefficient(norm: float, max_norm: float) -> float:
    """What gradients are multiplied by, as torch.nn.utils.clip_grad_norm_ does it: NaN where the norm is NaN."""
    factor = max_norm / (norm + 1e-6)
    return 1.0 if factor >= 1.0 else factor


def clip(core: _core.AdamW, grads, max_norm: float, error_if_nonfinite: bool) -> torch.Tensor:
    norm = total_norm(core, grads)
    if error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(f"the total norm of the gradients is {norm}, so they cannot be clipped: call "
                           "zero_grad() and skip the step")
    factor = coefficient(norm, float(max_norm))
    if factor != 1.0:
        host, others = _parted(grads)
        core.scale([flat.entry(grad) for grad in host], factor)
        for grad in host:
            flat.mark_written(grad)
        for grad in others:
            grad.mul_(factor)
    wide = torch.float64 if any(grad.dtype == torch.float64 for grad in grads) else torch.float32
    return torch.tensor(norm, dtype=wide, device=grads[0].device if grads else None)


def clip_grad_norm_(parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float,
                    error_if_nonfinite: bool = False) -> torch.Tensor:
    """Scales gradients in place so that their 2-norm is at most max_norm, as torch.nn.utils.clip_grad_norm_ does.

    parameters: a tensor or an iterable of tensors; those without a gradient are passed over. Gradients may be of
    several devices and dtypes. Host gradients are summed in float64 by the library's threads, in an order that
    does not depend on their number. Returns the norm before, a scalar of float32 (float64 where a gradient is) on
    the first gradient's device. Waits for devices that hold gradients. Raises RuntimeError for sparse ones and,
    with error_if_nonfinite, for a norm that is NaN or Inf.
    """
    tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    with unseen(), torch.no_grad():
        grads = [p.grad for p in tensors if p.grad is not None]
        return clip(shared_core(), grads, max_norm, error_if_nonfinite)
