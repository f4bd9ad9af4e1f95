"""Activation Stagehand: what autograd saves goes to host memory, and comes back before backward needs it.

    with stagehand.activation.offload(vram_budget="16GB"):   # round forward and backward, or the whole loop
        loss = model(batch).loss
        loss.backward()

`ActivationRuntime` has the knobs of `ActivationStagehandConfig`, steps and telemetry. docs/activation.md.
"""

from __future__ import annotations

import importlib

from .. import _core
from .config import ActivationStagehandConfig
from .offload import offload, shutdown
from .runtime import ActivationRuntime
from .telemetry import ActivationStepMetrics, ActivationTelemetry

STATES = _core.ACTIVATION_STATES
"""Names of the states of a record."""

_PARTS = ("ActivationBudgetManager", "ActivationHookContext", "ActivationRecord", "ActivationRegistry",
          "ActivationScheduler", "ActivationState", "ActivationTransferEngine", "CPUSpillBackend")

__all__ = ["ActivationRuntime", "ActivationStagehandConfig", "ActivationStepMetrics", "ActivationTelemetry", "STATES",
           "offload", "shutdown", *_PARTS]


def __getattr__(name: str):
    if name not in _PARTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("stagehand.compat.spill"), name)
