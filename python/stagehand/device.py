"""Which device a model runs on: names, the simulated one, and streams."""

from __future__ import annotations

from . import _core
from ._torch import torch


class Target:
    """A device of the core beside the torch device that stands for it.

    core: stagehand._core.Device. torch: torch.device that the model's tensors live on ("cpu" when
    simulated). simulated: True for the simulated device.
    """

    def __init__(self, core: _core.Device) -> None:
        info = core.info()
        self.core = core
        self.name = info["name"]
        self.simulated = info["backend"] == "sim"
        self.torch = torch.device("cpu") if self.simulated else torch.device("cuda", info["index"])

    def stream(self) -> int:
        """Raw handle of the caller's current stream on this device; 0 on the simulated one."""
        if self.simulated:
            return 0
        return torch._C._cuda_getCurrentRawStream(self.torch.index)

    def free_bytes(self) -> int:
        """Device memory that could be had now, what torch's allocator holds without using it included."""
        if self.simulated:
            return self.core.info()["memory_free"]
        free, _ = torch.cuda.mem_get_info(self.torch)
        unused = torch.cuda.memory_reserved(self.torch) - torch.cuda.memory_allocated(self.torch)
        return free + unused


def resolve(device, budget: int | None) -> Target:
    """The device that a user means. None: CUDA where there is one, otherwise simulated. "cpu" and "sim": the
    simulated device, with `budget` bytes of memory. "cuda", "cuda:1", torch.device: that card.
    A stagehand._core.Device: itself."""
    if isinstance(device, _core.Device):
        return Target(device)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "sim"
    name = str(device)
    if name in ("cpu", "sim"):
        return Target(_core.Device("sim", **({} if budget is None else {"memory_bytes": budget})))
    if name == "cuda":
        name = f"cuda:{torch.cuda.current_device()}"
    return Target(_core.Device(name))


def allocator(target: Target) -> dict:
    """Device memory from torch's caching allocator, so that its limits and statistics see the places.
    Nothing for the simulated device, which has its own."""
    if target.simulated:
        return {}
    index = target.torch.index

    def alloc(nbytes: int) -> int:
        try:
            return torch.cuda.caching_allocator_alloc(nbytes, index, 0)
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            return torch.cuda.caching_allocator_alloc(nbytes, index, 0)

    def free(address: int, nbytes: int) -> None:
        torch.cuda.caching_allocator_delete(address)

    return {"alloc": alloc, "free": free}
