"""Which device a model runs on: names, the simulated one, and streams."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from typing import TypeAlias

from . import _core
from ._torch import torch, unseen
from .errors import StagehandError
from .owning import NotCopied
from .sessions import members

DeviceLike: TypeAlias = "str | torch.device | _core.Device"  # as `resolve` takes it


def core_name(name: str) -> str:
    """What the core calls torch's device "cuda" or "cuda:1": torch built for ROCm calls AMD's cards "cuda", too."""
    before, plus, base = name.rpartition("+")
    return f"{before}{plus}hip{base[4:]}" if torch.version.hip and base.partition(":")[0] == "cuda" else name


def load_backend(path: str | os.PathLike) -> str:
    """Loads a back end from a shared object, for the life of the process, and returns its name: "own" stands for its
    first device and "own:1" for its second wherever a device is named. C's stagehand/backend.h says how one is
    written.

    path: with a "/" in it; nothing is looked for by name alone. The environment variable STAGEHAND_BACKENDS names
        absolute paths, with ":" between them, that are loaded when a device is asked for that is not known.
    Raises StagehandError with the reason: the loader's, the entry that its table lacks, a name that is taken.
    """
    return _core.load_backend(os.fspath(path))


def _card_of(info: dict) -> torch.device:
    """torch's name of a card. ROCm's cards are "cuda" there too."""
    if info["backend"] not in ("cuda", "hip"):
        raise StagehandError(f"PyTorch has no tensors on devices of the back end \"{info['backend']}\": only C "
                             f"programs can use it (a back end whose memory is the host's tells "
                             f"STH_CAP_HOST_IS_DEVICE)")
    if info["backend"] != core_name("cuda"):
        raise StagehandError(
            f"{info['backend']}:{info['index']} is no device of this PyTorch ({torch.__version__}), which was built "
            f"for {core_name('cuda')}: install the build for that card (see pytorch.org)", "UNSUPPORTED",
            info["backend"])
    return torch.device("cuda", info["index"])


class Target(NotCopied):
    """A device of the core beside the torch device that stands for it.

    core: stagehand._core.Device. torch: torch.device that the model's tensors live on ("cpu" when
    simulated). simulated: True where host memory stands for the device's (the simulated device, and back ends like it).
    """

    def __init__(self, core: _core.Device) -> None:
        info = core.info()
        self.core = core
        self.name = info["name"]
        self.simulated = bool(info["capabilities"] & _core.CAP_HOST_IS_DEVICE)
        with unseen():
            self.torch = torch.device("cpu") if self.simulated else _card_of(info)
        self.findings = weakref.WeakSet()  # finding.Finding of models whose budgets are found
        self._counts = {"failures": 0, "retries": 0}  # of torch's allocator that were our own doing

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

    def wait(self) -> None:
        """Until all work on the device is done."""
        if not self.simulated:
            torch.cuda.synchronize(self.torch)

    def tell_what_is_free(self) -> None:
        """The device's account counts with it, where the user gave no budget for all models."""
        finding = next((found for found in members(self.findings) if found.verdict), None)
        if finding is not None:
            finding.look()
        elif not self.simulated and self.core.budget is None:
            self.core.assume_free(self.free_bytes())

    # ------------------------------------------------------------------ for budgets that are found

    def memory(self) -> dict:
        """A reading for Device.find_budget: the device's memory, and torch's allocator on it. On the simulated device
        what lies outside of places stands for the allocator."""
        if self.simulated:
            info, fixed = self.core.info(), self.core.residency()["fixed"]
            return {"total": info["memory_total"], "free": info["memory_free"], "framework_reserved": fixed,
                    "framework_allocated": fixed, "framework_peak": fixed, **self._counts}
        free, total = torch.cuda.mem_get_info(self.torch)
        stats = torch.cuda.memory_stats_as_nested_dict(self.torch)
        if not stats:  # nothing was allocated yet
            return {"total": total, "free": free}
        allocated = stats["allocated_bytes"]["all"]
        counts = self._raw_counts(stats)
        return {"total": total, "free": free, "framework_reserved": stats["reserved_bytes"]["all"]["current"],
                "framework_allocated": allocated["current"], "framework_peak": allocated["peak"],
                **{name: max(0, counts[name] + self._counts[name]) for name in counts}}

    @staticmethod
    def _raw_counts(stats: dict) -> dict:
        return {"failures": stats.get("num_ooms", 0), "retries": stats.get("num_alloc_retries", 0)}

    def capturing(self) -> bool:
        """Whether work is being recorded for a CUDA graph: nothing is measured or moved then."""
        return not self.simulated and torch.cuda.is_current_stream_capturing()

    def begin_peak(self) -> None:
        """The allocator's peak begins again."""
        if not self.simulated and torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats(self.torch)

    def settle_counts(self, before: dict, refused: bool) -> None:
        """A budget was changed: failures and retries of the allocator since the reading `before` are not the
        rest of the process's. refused: less was had than was asked for; that counts as one failure."""
        now = self.memory()
        for name in self._counts:
            self._counts[name] -= now.get(name, 0) - before.get(name, 0)
        self._counts["failures"] += refused

    def trim(self) -> None:
        """The allocator gives back what it does not use."""
        if not self.simulated:
            torch.cuda.empty_cache()

    def obtainable_bytes(self) -> int:
        """What a new model could have: free, or of models that give way."""
        self.tell_what_is_free()
        account = self.core.residency()
        return min(self.free_bytes(), account["free"]) + account["yielding"]


_cards = threading.Lock()  # of threads that open one
os.register_at_fork(after_in_child=_cards._at_fork_reinit)
_shared = weakref.WeakValueDictionary()  # (process, "cuda:0") -> Target: models on one card know of each other


def _in_use(target: Target) -> bool:
    try:
        return target.core.residency()["runtimes"] > 0
    except StagehandError:  # closed by its owner
        return False


def _share(target: Target) -> Target:
    """The card's Target from now on, unless it has one."""
    if target.simulated:
        return target
    other = _shared.setdefault((os.getpid(), str(target.torch)), target)
    if other.core is not target.core and not _in_use(other):
        _shared[os.getpid(), str(target.torch)] = target
    elif other.core is not target.core:
        warnings.warn(
            f"stagehand: two Device objects for {target.torch} are in use: models on the one do not know of what those "
            f"on the other occupy. Make one stagehand.Device and pass it as device= to all of them", RuntimeWarning,
            stacklevel=5)
    return target


def _card(name: str) -> Target:
    """The Target of that card which other models have, or a new one."""
    with _cards:
        target = _shared.get((os.getpid(), name))
        if target is not None:
            try:
                target.core.info()
                return target
            except StagehandError:  # closed by its owner
                del _shared[os.getpid(), name]
        return _share(Target(_core.Device(core_name(name))))


def is_host(name: str) -> bool:
    """Whether torch means the host by it: "cpu", or "cpu:1", as accelerate calls it in its second process."""
    kind, _, number = name.partition(":")
    return kind == "cpu" and (not number or number.isdecimal())


def same(one: torch.device, other: torch.device) -> bool:
    """Whether tensors of both lie in the same memory."""
    return one == other or one.type == other.type == "cpu"


def resolve(device, budget: int | None) -> Target:
    """The device that a user means. None: CUDA where there is one, otherwise simulated. "cpu" and "sim": the
    simulated device, with `budget` bytes of memory, one for each call. "cuda", "cuda:1", torch.device: that card, as
    other models that are open use it; with a PyTorch for ROCm it may also be called "hip:1". "own:1": a device of
    another back end (load_backend). A stagehand._core.Device: itself. Raises StagehandError for a card that this
    PyTorch was not built for."""
    if isinstance(device, _core.Device):
        return _share(Target(device))
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "sim"
    name = str(device)
    before, plus, base = name.rpartition("+")  # decorators may stand before it
    if not before and is_host(base):
        name = base = "cpu"
    if base in ("cpu", "sim"):
        return Target(_core.Device(name, **({} if budget is None else {"memory_bytes": budget})))
    kind, _, number = base.partition(":")
    if kind == "cuda" or (kind == "hip" and torch.version.hip):
        name = f"{before}{plus}cuda:{number or (torch.cuda.current_device() if torch.cuda.is_available() else 0)}"
    return _card(name)


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

    def trim() -> None:
        torch.cuda.empty_cache()

    return {"alloc": alloc, "free": free, "trim": trim}
