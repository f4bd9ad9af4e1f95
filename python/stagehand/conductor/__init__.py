"""The conductor: one arbiter for the memory and the link of a device that weights, activations and others share.

    conductor = stagehand.conductor.ConductorRuntime(ConductorConfig(enabled=True, vram_hard_cap_mb=23500))
    conductor.attach(weights)        # what stagehand.layer or StagehandRuntime made
    conductor.attach(activations)    # an ActivationRuntime
    conductor.attach(optimizer)      # an OffloadedAdamW
    for step, batch in enumerate(batches):
        conductor.begin_step(step)
        conductor.enter_forward()
        with activations.managed_forward():
            loss = model(batch).loss
        loss.backward()              # BACKWARD is entered when it begins
        conductor.enter_optimizer()
        optimizer.step()
        conductor.end_step()

docs/conductor.md. `stagehand.session` puts all parts together from one configuration.
"""

from __future__ import annotations

from .adapters import (
    ActStagehandConductorAdapter,
    Adapter,
    OptimizerConductorAdapter,
    SquareQConductorAdapter,
    StagehandConductorAdapter,
)
from .budget import BudgetManager, Grant
from .config import ConductorConfig
from .names import AcquireStatus, DenialReason, Direction, GrantStatus, Mode, Phase, Priority, Resource
from .phases import PhaseCoordinator
from .policy import HeuristicPolicyBridgeV0, RuntimeLimitHints
from .runtime import ConductorRuntime
from .telemetry import TelemetryHub
from .transfer import AcquireResult, TransferManager

__all__ = ["AcquireResult", "AcquireStatus", "ActStagehandConductorAdapter", "Adapter", "BudgetManager",
           "ConductorConfig", "ConductorRuntime", "DenialReason", "Direction", "Grant", "GrantStatus",
           "HeuristicPolicyBridgeV0", "Mode", "OptimizerConductorAdapter", "Phase", "PhaseCoordinator", "Priority",
           "Resource", "RuntimeLimitHints", "SquareQConductorAdapter",
           "StagehandConductorAdapter", "TelemetryHub", "TransferManager"]
