"""ConductorRuntime: the conductor as a trainer sees it."""

from __future__ import annotations

import logging
import threading

from .. import _core
from .._torch import torch
from ..errors import InvalidArgumentError, InvalidStateTransitionError, StagehandOOMError
from ..managed import arbiters
from ..owning import Owning
from .adapters import ActStagehandConductorAdapter, Adapter, OptimizerConductorAdapter, StagehandConductorAdapter
from .budget import BudgetManager
from .config import MIB, ConductorConfig
from .names import Phase
from .phases import PhaseCoordinator
from .policy import HeuristicPolicyBridgeV0
from .telemetry import TelemetryHub
from .transfer import TransferManager

log = logging.getLogger("stagehand")


class ConductorRuntime(Owning):
    """One arbiter for what runs on one device.

    config: a ConductorConfig; not enabled: nothing is made, `phases`, `budget`, `transfer`, `policy` and `telemetry`
    are None, and each call returns at once. Adapters are told of phases and limits in the order in which they were
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
        self._visits: dict[int, list] = {}  # id of a runtime that is here for a while: [how often, its name]
        self._said_pinned = False
        arbiters.add(self)
        self.phases = PhaseCoordinator(core)
        self.budget = BudgetManager(core, self._refresh, self._settle)
        self.transfer = TransferManager(core, self.budget)
        self.policy = HeuristicPolicyBridgeV0(core)
        self.telemetry = TelemetryHub(core, config.telemetry_interval_steps,
                                      config.telemetry_file if config.telemetry_enabled else None)

    @property
    def enabled(self) -> bool:
        return self.core is not None

    # ------------------------------------------------------------------ adapters

    def attach(self, runtime: object, name: str | None = None) -> Adapter | None:
        """Registers an adapter for a weight runtime, a model under one, an ActivationRuntime, or an OffloadedAdamW.
        name: "stagehand", "activation_stagehand" and "optimizer" where none is given, with a number when taken. Other
        weight runtimes on the device need no call: as guests, kept or reserved they are attached meanwhile."""
        if self.core is None:
            return None
        for attribute in ("_stagehand_layer_runtime", "_stagehand_runtime"):
            runtime = getattr(runtime, "__dict__", {}).get(attribute) or runtime
        if hasattr(runtime, "managed_forward") and hasattr(runtime, "saver"):
            adapter, kind = ActStagehandConductorAdapter(runtime), "activation_stagehand"
        elif hasattr(runtime, "session"):
            adapter, kind = StagehandConductorAdapter(runtime), "stagehand"
        elif hasattr(runtime, "device_bytes_needed"):
            adapter, kind = OptimizerConductorAdapter(runtime), "optimizer"
        else:
            raise InvalidArgumentError(f"{type(runtime).__name__} is no weight runtime, no ActivationRuntime and no "
                                       "OffloadedAdamW: give register_adapter an adapter for it", object="runtime")
        with self._lock:
            self._refuse_twice(runtime)
            self.register_adapter(name or self._free_name(kind), adapter)
        return adapter

    def _refuse_twice(self, runtime) -> None:
        for name, other in self._adapters.items():
            if runtime in (getattr(other, "runtime", None), getattr(other, "optimizer", None)):
                raise InvalidStateTransitionError(f"it is attached to this conductor already, as {name!r}: use that")

    def _free_name(self, kind: str) -> str:
        found, number = kind, 0
        while self.budget.has(found):
            number += 1
            found = f"{kind}_{number}"
        return found

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
        """Detaches it: its runtime is as it was. May be called again."""
        if self.core is None:
            return
        with self._lock:
            if name in self._adapters:
                self._drop(name)

    # ------------------------------------------------------------------ several models on one device

    def weights_on(self, core: _core.Device) -> list[StagehandConductorAdapter]:
        """Adapters of weight runtimes on a device of the core."""
        return [adapter for adapter in self._adapters.values()
                if isinstance(adapter, StagehandConductorAdapter) and adapter.session is not None
                and adapter.session.target.core is core]

    def rules(self, core: _core.Device) -> bool:
        """Whether it has a runtime on the device."""
        if self.core is None:
            return False
        with self._lock:
            return any(target.core is core for adapter in self._adapters.values() if (target := adapter.target()))

    def visit(self, runtime: object) -> None:
        """A weight runtime comes to the device for a while: it is attached, if it was not, until as many `left`. Raises
        StagehandOOMError where the caps do not allow it."""
        with self._lock:
            if id(runtime) not in self._visits:
                if any(getattr(adapter, "runtime", None) is runtime for adapter in self._adapters.values()):
                    return
                self._visits[id(runtime)] = [0, self.attach(runtime).name]
            self._visits[id(runtime)][0] += 1

    def left(self, runtime: object) -> None:
        with self._lock:
            visit = self._visits.get(id(runtime))
            if visit is None:
                return
            visit[0] -= 1
            if not visit[0]:
                del self._visits[id(runtime)]
                self.unregister_adapter(visit[1])

    def share_anew(self, core: _core.Device) -> None:
        """A weight runtime has left the device, or its budget is another: what the others reserve changes."""
        with self._lock:
            for adapter in self.weights_on(core):
                try:
                    adapter.budget_changed()
                except StagehandOOMError as error:  # others took the room first
                    log.warning("stagehand: %s", error)

    def budget_changed(self, session: object) -> None:
        """A model's budget is another. Raises StagehandOOMError where the caps do not allow it: it must be what it was
        again, and this told again."""
        with self._lock:
            for adapter in self.weights_on(session.target.core):
                if adapter.session is session:
                    adapter.budget_changed()

    def look(self) -> None:
        """Something has come to the device, or left it: what is speculative makes room."""
        with self._lock:
            self._refresh()
            self._settle()

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
            for ident, (_, name) in list(self._visits.items()):
                if name not in self._adapters or self._adapters[name].ended():
                    del self._visits[ident]
                    self.unregister_adapter(name)
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
            used = sum(adapter.used_bytes() for adapter in adapters) + self._of_others()
            allocated = max(used, self._allocated())
            reserved = sum(adapter.reserved_bytes() for adapter in adapters) + self.budget.of_others()
            self.core.set_allocated(allocated)
            self.core.set_unmanaged(max(0, allocated - reserved))
            self._count_pinned()

    def _count_pinned(self) -> None:
        """Tells the core what the runtimes have pinned, and them what is left of the cap."""
        if self.config.pinned_cap_mb is None:
            return
        each = {name: adapter.pinned() for name, adapter in self._adapters.items()}
        self.core.set_unmanaged_pinned(sum({key: n for own in each.values() for key, n in own.items()}.values()))
        left = self.core.stats()["pinned_headroom"]
        for name, adapter in self._adapters.items():
            adapter.on_pinned(sum(each[name].values()) + left)
        over = self.core.stats()["pinned_unmanaged"] - self.config.pinned_cap_mb * MIB
        if over > 0 and not self._said_pinned:
            self._said_pinned = True
            log.warning("stagehand: %s of host memory are pinned above pinned_cap_mb=%d (%s): ram_budget bounds what "
                        "weights pin, and slabs_per_class what activations do", _core.format_size(over),
                        self.config.pinned_cap_mb, ", ".join(f"{name} {_core.format_size(sum(own.values()))}"
                                                             for name, own in each.items() if sum(own.values())))

    def _of_others(self) -> int:
        """Bytes of models on simulated devices that are not attached; those on a card are in torch's own count."""
        targets = [target for adapter in self._adapters.values() if (target := adapter.target())]
        cores = {id(target.core): target.core for target in targets if target.simulated}
        return sum(max(0, core.residency()["occupied"] - sum(adapter.used_bytes() for adapter in self.weights_on(core)))
                   for core in cores.values())

    def _card(self):
        """The torch device of the adapters' runtimes; None where it is simulated, or there is none."""
        for adapter in self._adapters.values():
            target = adapter.target()
            if target is not None and not target.simulated:
                return target.torch
        return None

    def _allocated(self) -> int:
        card = self._card()
        return torch.cuda.memory_allocated(card) if card is not None else 0

    def in_use_beside(self, adapter: Adapter) -> int:
        """Device bytes in use by all but the adapter's runtime."""
        return max(0, self._allocated() - adapter.used_bytes())

    # ------------------------------------------------------------------ the end

    def shutdown(self) -> None:
        """Detaches all adapters; every setting is as before. Later reservations are denied. May be called again."""
        if self.core is None:
            return
        with self._lock:
            self._visits.clear()
            for name in reversed(list(self._adapters)):
                self._drop(name)
            self.core.shutdown()
            self.telemetry.release()
