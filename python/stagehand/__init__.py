"""Stagehand: run PyTorch models that are larger than the GPU's memory.

    model = stagehand.layer(model, vram_budget="8GB")     # one line, no settings
    out = model(inputs)                                   # as before
    stagehand.runtime(model).stats                        # bytes, copies, times
    stagehand.shutdown(model)                             # a plain model again, on the host

Weights wait in pinned RAM (or in their files) and every layer's bytes are on the device just before it
runs. `layer` manages any module; `StagehandRuntime` manages the blocks that a pattern names and gives
control over steps; `load` streams from safetensors files without a copy in RAM. `device="sim"` runs all
of it on a simulated device, bit for bit.
"""

from __future__ import annotations

import importlib
import sys
import types

from ._clash import warn_of_clash
from ._core import Device, __version__, parse_size
from ._moved import MODULES as _MODULES
from ._moved import Moved
from .errors import (
    CheckpointError,
    DtypeMismatchError,
    InvalidStateTransitionError,
    StagehandError,
    StagehandOOMError,
    TransferError,
)

# Name -> module that defines it. Imported at first use, so that the tool and the errors work without torch.
_LAZY = {
    "layer": "modes.layer",
    "wrap": "modes.layer",
    "runtime": "managed",
    "shutdown": "managed",
    "Runtime": "modes.layer",
    "LayerRuntime": "modes.layer",
    "StagehandConfig": "modes.config",
    "StagehandRuntime": "modes.block",
    "load": "modes.load",
    "open_checkpoint": "files.checkpoint",
    "ResidentPriority": "modes.residency",
    "PinnedPool": "files.pool",
    "PinnedSlab": "files.pool",
    "BlockState": "report",
    "StepMetrics": "modes.telemetry",
    "StagehandTelemetry": "modes.telemetry",
    "NumericGuard": "modes.guards",
    "block_major": "modes.microbatches",
    "OffloadedAdamW": "optim",
    "session": "modes.memory",
    "capture": "modes.graphs",
    "trace": "tracing",
    "load_backend": "device",
    "BudgetManager": "compat.budget",
    "BlockEntry": "compat.registry",
    "BlockRegistry": "compat.registry",
    "ResidencyEntry": "compat.residency",
    "ResidencyMap": "compat.residency",
    "AsyncTransferEngine": "compat.transfer",
    "TransferHandle": "compat.transfer",
    "StaticLookaheadPolicy": "compat.scheduler",
    "StagehandScheduler": "compat.scheduler",
}
_LAZY_MODULES = ("activation", "amp", "conductor", "executor", "integrations", "optim")

__all__ = [
    "__version__",
    "Device",
    "parse_size",
    "CheckpointError",
    "DtypeMismatchError",
    "InvalidStateTransitionError",
    "StagehandError",
    "StagehandOOMError",
    "TransferError",
    *_LAZY,
    *_LAZY_MODULES,
]


def __getattr__(name: str):
    if name in _LAZY_MODULES or name not in _LAZY and name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name not in _LAZY:
        raise AttributeError(f"module 'stagehand' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    globals()[name] = value
    return value


class _Package(types.ModuleType):
    """`layer` and `load` are functions in modules of the same name, and `session` is one beside another module's.
    Importing a submodule puts it into the package under its name: the function goes there instead."""

    def __setattr__(self, name: str, value) -> None:
        if name in _LAZY and isinstance(value, types.ModuleType):
            if value.__name__ != f"{__name__}.{_LAZY[name]}":
                return  # found in the right module when it is asked for
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
sys.meta_path.append(Moved())


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_LAZY) | set(_LAZY_MODULES))


warn_of_clash()
del Moved, warn_of_clash
