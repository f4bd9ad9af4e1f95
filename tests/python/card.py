"""The device of the tests: the simulated one, or with STH_TEST_DEVICE=cuda:0 a card.

    STH_TEST_DEVICE=cuda:0 python -m pytest -n 8 tests/python/test_block.py tests/python/field

On a card the masters lie in host memory and kernels run elsewhere, so a tensor on the wrong device is an error there.
The reference runs on the card as well. PyTorch's kernels for a card may add in another order than their twins do:
`close` says what counts as equal. Tests about the simulated device itself are skipped (`simulated_only`).
"""

from __future__ import annotations

import os

import pytest
import torch

from stagehand import _core

NAME = os.environ.get("STH_TEST_DEVICE", "sim")
ON_CARD = NAME != "sim"
# Where tensors of models and references are used.
TORCH = torch.device(NAME if ON_CARD else "cpu")

on_the_host = pytest.mark.skipif(ON_CARD, reason="the plain twin, or what writes to it, works on the host")
simulated_only = pytest.mark.skipif(ON_CARD, reason="about the simulated device")
forks = pytest.mark.skipif(ON_CARD, reason="forks a process that has used the device: CUDA does not work in its child")

if ON_CARD:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS is not deterministic


def open_device(memory_bytes: int, **options) -> _core.Device:
    """A simulated device with so much memory, or the card, whose memory and link are what they are."""
    return _core.Device(NAME) if ON_CARD else _core.Device("sim", memory_bytes=memory_bytes, **options)


def settings() -> None:
    """Makes a card's kernels as deterministic as PyTorch can."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True, warn_only=True)


def there(value):
    """A tensor on the device of the tests; what is no tensor as it is."""
    return value.to(TORCH) if isinstance(value, torch.Tensor) and value.device != TORCH else value


def finish() -> None:
    """Waits until the card has done what was enqueued; the simulated device's stream 0 is the caller."""
    if ON_CARD:
        torch.cuda.synchronize()


def settle_autograd() -> None:
    """A backward that failed leaves its last gradients in PyTorch's queues, the calling thread's and the card's, until
    they are asked for the next one."""
    if ON_CARD:
        torch.ones(1, device=TORCH, requires_grad=True).sum().backward()
        torch.ones(1, device="cpu", requires_grad=True).sum().backward()
        finish()


def others_mb() -> int:
    """MiB on the card that a cap of the conductor's counts and that are not of managed models: what the process has
    there, and room for what its references and PyTorch's kernels take later. The simulated device has no such."""
    if not ON_CARD:
        return 0
    x = torch.ones(8, 8, device=TORCH, requires_grad=True)
    (x @ x).sum().backward()  # cuBLAS takes 32 MiB for each thread that multiplies
    return torch.cuda.memory_allocated() // 2**20 + 65


def peak(metrics, stats: dict) -> int:
    """Most bytes of a step's saved tensors on the device. A card's own figure counts all that PyTorch has there."""
    return stats["peak_bytes"] if ON_CARD else int(metrics.vram_peak_mb * 2**20)


def _take_there(module, args: tuple, kwargs: dict) -> tuple:
    for param in module.parameters():
        if param.device != TORCH:
            param.data = param.data.to(TORCH)
    return tuple(map(there, args)), {name: there(value) for name, value in kwargs.items()}


def as_managed(ref: torch.nn.Module) -> torch.nn.Module:
    """On a card the reference takes arguments, and weights that it was given, from the host, as a managed model does.
    On the simulated device it is left as it is."""
    if ON_CARD:
        for module in ref.modules():
            module.register_forward_pre_hook(_take_there, with_kwargs=True)
    return ref


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two results of a card, which differ in some bits, differ by rounding alone."""
    if not (a.is_floating_point() or a.is_complex()):
        return False
    a, b = a.detach().cpu(), b.detach().cpu()
    if a.dtype.itemsize < 2:
        a, b = a.float(), b.float()
    rounding = min(torch.finfo(a.dtype).eps * 256, 0.125)
    largest = b.abs().nan_to_num().max().item() if b.numel() else 0.0
    return torch.allclose(a, b, rtol=rounding, atol=rounding * largest, equal_nan=True)
