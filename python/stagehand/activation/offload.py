"""The one line: a budget for the device's memory, and everything else found out."""

from __future__ import annotations

import functools
import threading

from .. import _core
from .. import device as devices
from .._torch import torch
from ..arguments import Size
from ..device import DeviceLike
from ..owning import NotCopied
from ..report import budget_bytes
from .config import ActivationStagehandConfig
from .runtime import SMALLEST, ActivationRuntime

_lock = threading.Lock()
_runtimes: dict[tuple, ActivationRuntime] = {}


def offload(vram_budget: Size, device: DeviceLike | None = None) -> _Offload:
    """Context in which what autograd saves is spilled to host memory so that the memory in use on the device stays
    below `vram_budget` (bytes, or a size such as "16GB"; on CUDA all that PyTorch has allocated), as far as saved
    tensors can help it. Round a forward, a step, or the whole loop; entered again it goes on with what it has
    learned. The second step is faster than the first. device: as for stagehand.layer. As a function decorator it
    works too. Raises StagehandError for a bad budget or device."""
    return _Offload(budget_bytes(vram_budget, "vram_budget"), device)


def shutdown() -> None:
    """Gives back the host memory of all `offload` contexts; graphs that are alive keep what they need."""
    with _lock:
        while _runtimes:
            _runtimes.popitem()[1].shutdown()


class _Offload(NotCopied):
    def __init__(self, budget: int, device) -> None:
        self.runtime = _runtime(budget, device)
        self._open: list = []

    def __enter__(self) -> ActivationRuntime:
        context = self.runtime.managed_forward()
        context.__enter__()
        self._open.append(context)
        return self.runtime

    def __exit__(self, *error) -> None:
        self._open.pop().__exit__(*error)

    def __call__(self, function):
        @functools.wraps(function)
        def inside(*args, **kwargs):
            with self:
                return function(*args, **kwargs)

        return inside


def _runtime(budget: int, device) -> ActivationRuntime:
    key = budget, _which(device)
    with _lock:
        found = _runtimes.get(key)
        if found is None or not found.enabled:
            found = _runtimes[key] = _new(budget, devices.resolve(key[1], None))
        return found


def _which(device):
    """What tells one device from another without opening it."""
    if isinstance(device, _core.Device):
        return device
    name = ("cuda" if torch.cuda.is_available() else "sim") if device is None else str(device)
    return f"cuda:{torch.cuda.current_device()}" if name == "cuda" else "sim" if name == "cpu" else name


def _new(budget: int, target) -> ActivationRuntime:
    config = ActivationStagehandConfig(enabled=True, slabs_per_class=None, max_inflight_d2h=64, max_inflight_h2d=16,
                                       telemetry_file=None)
    # On CUDA the allocator's peak between two hooks is above what hooks see: the first guess is a sixteenth.
    high = budget if target.simulated else budget - budget // 16
    return ActivationRuntime(config, target.core, smallest=min(SMALLEST, budget >> 12), budget=budget, high=high,
                             low=high - budget // 32, ahead_bytes=max(budget // 8, 1))
