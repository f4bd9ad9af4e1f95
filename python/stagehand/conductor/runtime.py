"""ConductorRuntime: the conductor as a trainer sees it."""

from __future__ import annotations

import logging
import threading

from .. import _core
from .._torch import torch
from ..errors import InvalidArgumentError, InvalidStateTransitionError
from .adapters import ActStagehandConductorAdapter, Adapter, StagehandConductorAdapter
from .budget import BudgetManager
from .config import ConductorConfig
from .names import Phase
from .phases import PhaseCoordinator
from .policy import HeuristicPolicyBridgeV0
from .telemetry import TelemetryHub
from .transfer import TransferManager

log = logging.getLogger("stagehand")


class ConductorRuntime:
    """One arbiter for what runs on one device.

    config: a ConductorConfig; not enabled: nothing is made, `phases`, `budget`, `transfer`, `policy` and `telemetry` are
    None, and each call returns at once. Adapters are told of phases and limits in the order in which they were
    registered. Threads: any; adapters are called one at a time.
    """

    def __init__(self, config: ConductorConfig | None = None) -> None:
        self.config = config = config or ConductorConfig()
        config.validate()
        self.core = None
        self.phases = self.budget = self.transfer = self.policy = self.telemetry = None
        if config.enabled:
            self._make(config)

    def _make(self, config: ConductorConfig) -> None:
        self.core = core = _core.Conductor(**config.options())
        self._lock = threading.RLock()
        self._adapters: dict[str, Adapter] = {}
        self.phases = PhaseCoordinator(core)
        self.budget = BudgetManager(core, self._refresh, self._settle)
        self.transfer = TransferManager(core, self.budget)
        self.policy = HeuristicPolicyBridgeV0(core)
        self.telemetry = TelemetryHub(core, config.telemetry_interval_steps, config.telemetry_file)

    @property
    def enabled(self) -> bool:
        return self.core is not None

    # ------------------------------------------------------------------ adapters

    def attach(self, runtime, name: str | None = None) -> Adapter | None:
        """Registers an adapter for a weight runtime, a model under one, or an ActivationRuntime. name: "stagehand" and
        "activation_stagehand" where none is given, with a number when taken."""
        if self.core is None:
            return None
        for attribute in ("_stagehand_layer_runtime", "_stagehand_runtime"):
            runtime = getattr(runtime, "__dict__", {}).get(attribute) or runtime
        if hasattr(runtime, "managed_forward") and hasattr(runtime, "saver"):
            adapter, kind = ActStagehandConductorAdapter(runtime), "activation_stagehand"
        elif hasattr(runtime, "session"):
            adapter, kind = StagehandConductorAdapter(runtime), "stagehand"
        else:
            raise InvalidArgumentError(f"{type(runtime).__name__} is no weight runtime and no ActivationRuntime: give "
                                       "register_adapter an adapter for it", object="runtime")
        taken = [other for other in self._adapters if other.split("_")[0] == kind.split("_")[0]]
        self.register_adapter(name or (f"{kind}_{len(taken)}" if kind in self._adapters else kind), adapter)
        return adapter

    def register_adapter(self, name: str, adapter: Adapter) -> None:
        """Attaches an adapter under a name of its own. On failure everything is as before. A step that is open goes on
        with it."""
        if self.core is None:
            return
        with self._lock:
            self.budget.register(name)
            try:
                self._adapters[name] = adapter
                adapter.attach(self, name)
            except BaseException:
                self._drop(name)
                raise
            self.phases.listeners.append(adapter)
            window = max((w for a in self._adapters.values() if (w := a.window()) is not None), default=None)
            if window is not None:
                self.policy.set_window(window)
            self._push()

    def unregister_adapter(self, name: str) -> None:
        """Detaches it: its runtime is as it was. Again is fine."""
        if self.core is None:
            return
        with self._lock:
            if name in self._adapters:
                self._drop(name)

    def _drop(self, name: str) -> None:
        adapter = self._adapters.pop(name)
        if adapter in self.phases.listeners:
            self.phases.listeners.remove(adapter)
        try:
            adapter.detach()
        finally:
            self.budget.unregister(name)

    # ------------------------------------------------------------------ steps

    def begin_step(self, step: int) -> None:
        """A step begins; one that an exception left open ends."""
        if self.core is None:
            return
        with self._lock:
            self._refresh()
            self.phases.begin(step)
            self._pushed()

    def enter_forward(self) -> None:
        if self.core is not None:
            self._enter(Phase.FORWARD)

    def enter_backward(self) -> None:
        """Not needed where a weight runtime streams or activations are spilled: they see when a backward begins."""
        if self.core is not None:
            self._enter(Phase.BACKWARD)

    def enter_optimizer(self) -> None:
        if self.core is not None:
            self._enter(Phase.OPTIMIZER)

    def end_step(self) -> None:
        """Ends the step; its record goes to `telemetry`. InvalidStateTransitionError without one."""
        if self.core is None:
            return
        with self._lock:
            self._refresh()
            self.phases.end()
            self._pushed()
            self.telemetry.step_ended(self.phases.durations,
                                      {name: adapter.snapshot() for name, adapter in self._adapters.items()})

    def backward_seen(self) -> None:
        """The first sign of a backward, on any thread. Outside of a step, and after OPTIMIZER, it means nothing."""
        if self.core is not None and self.core.phase() in (Phase.STEP_BEGIN, Phase.FORWARD):
            try:
                self._enter(Phase.BACKWARD)
            except InvalidStateTransitionError:
                pass  # the step went on meanwhile

    def _enter(self, phase: Phase) -> None:
        with self._lock:
            if self.core.phase() != phase:
                self._refresh()
                if self.phases.enter(phase):
                    self._pushed()
            else:
                self.phases.enter(phase)

    # ------------------------------------------------------------------ what adapters are told

    def _pushed(self) -> None:
        self._settle()
        self._push()

    def _push(self) -> None:
        hints = self.policy.hints()
        for name, adapter in list(self._adapters.items()):
            try:
                adapter.on_hints(hints)
            except Exception:
                log.exception("stagehand: adapter %r failed to take its limits", name)

    def _settle(self) -> None:
        """Tells adapters whose reservations are worth other bytes."""
        with self._lock:
            while True:
                ident, nbytes = self.core.changed()
                if not ident:
                    return
                if not nbytes:
                    self.budget.forget_ended(ident)
                for name, adapter in list(self._adapters.items()):
                    if getattr(adapter, "_ident", None) != ident:
                        continue
                    try:
                        adapter.on_grant(ident, nbytes)
                    except Exception:
                        log.exception("stagehand: adapter %r failed to follow its reservation", name)

    def _refresh(self) -> None:
        """Tells the core what is in use on the device, and how much of it nobody has reserved."""
        with self._lock:
            adapters = self._adapters.values()
            allocated = max(sum(adapter.used_bytes() for adapter in adapters), self._allocated())
            reserved = sum(adapter.reserved_bytes() for adapter in adapters) + self.budget.of_others()
            self.core.set_allocated(allocated)
            self.core.set_unmanaged(max(0, allocated - reserved))

    def _card(self):
        """The torch device of the adapters' runtimes; None where it is simulated, or there is none."""
        for adapter in self._adapters.values():
            holder = getattr(adapter, "session", None) or getattr(adapter, "saver", None)
            if holder is not None and not holder.target.simulated:
                return holder.target.torch
        return None

    def _allocated(self) -> int:
        card = self._card()
        return torch.cuda.memory_allocated(card) if card is not None else 0

    def in_use_beside(self, adapter: Adapter) -> int:
        """Device bytes in use by all but the adapter's runtime."""
        return max(0, self._allocated() - adapter.used_bytes())

    # ------------------------------------------------------------------ the end

    def shutdown(self) -> None:
        """Detaches all adapters; every knob is what it was. Reservations are denied from now on. Again is fine."""
        if self.core is None:
            return
        with self._lock:
            for name in reversed(list(self._adapters)):
                self._drop(name)
            self.core.shutdown()

    def __enter__(self) -> ConductorRuntime:
        return self

    def __exit__(self, *error) -> None:
        self.shutdown()
