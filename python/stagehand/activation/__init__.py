"""Activation Stagehand: what autograd saves goes to host memory, and comes back before backward needs it.

    with stagehand.activation.offload(vram_budget="16GB"):   # round forward and backward, or the whole loop
        loss = model(batch).loss
        loss.backward()

`ActivationRuntime` has the settings of `ActivationStagehandConfig`, steps and telemetry. docs/activation.md.
"""

from __future__ import annotations

from .. import _core
from .._moved import NAMES, attribute
from .config import ActivationStagehandConfig
from .offload import offload, shutdown
from .runtime import ActivationRuntime
from .telemetry import ActivationStepMetrics, ActivationTelemetry

STATES = _core.ACTIVATION_STATES
"""Names of the states of a record."""

__all__ = ["ActivationRuntime", "ActivationStagehandConfig", "ActivationStepMetrics", "ActivationTelemetry", "STATES",
           "offload", "shutdown", *NAMES["activation"]]


def __getattr__(name: str):
    return attribute(__name__, name)
