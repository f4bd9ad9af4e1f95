"""Adapters: what a conductor does to a runtime. attach() saves what it tunes, detach() puts it back.

A conductor calls `on_phase` when a step goes on, `on_hints` with its limits, `on_grant` when the adapter's reservation
is worth other bytes. All are calls from the thread that enters the phase or reserves, one at a time.
"""

from __future__ import annotations

import contextlib
import enum
import logging
from typing import TYPE_CHECKING

from .._torch import torch
from ..errors import InvalidArgumentError, StagehandError, StagehandOOMError
from ..owning import NotCopied
from .config import MIB
from .names import Direction, GrantStatus, Mode, Phase, Priority
from .policy import RuntimeLimitHints

if TYPE_CHECKING:
    from .runtime import ConductorRuntime

log = logging.getLogger("stagehand")


class Adapter(NotCopied):
    """The protocol, which does nothing. `_conductor` and `name` are set while it is attached."""

    _conductor = None
    name = ""
    _reserved = _ident = 0  # bytes, and the reservation, of one that holds device memory for good

    def attach(self, conductor: ConductorRuntime, name: str) -> None:
        """Saves the runtime's settings. Called by ConductorRuntime.register_adapter, with `name` as its owner."""
        self._conductor, self.name = conductor, name

    def detach(self) -> None:
        """Puts them back. May be called again."""
        self._conductor = None

    def on_phase(self, phase: Phase) -> None: ...

    def on_hints(self, hints: RuntimeLimitHints) -> None: ...

    def on_grant(self, ident: int, nbytes: int) -> None: ...

    def used_bytes(self) -> int:
        """Device memory that the runtime has now."""
        return 0

    def reserved_bytes(self) -> int:
        """How much of that its reservation stands for."""
        return self.used_bytes()

    def pinned(self) -> dict[int, int]:
        """Pinned host memory that its runtime has now: bytes of each thing, by its id."""
        return {}

    def on_pinned(self, nbytes: int) -> None:
        """Sets the most host memory, in bytes, to pin for its runtime; called if there is a cap."""

    def target(self):
        """The device.Target of its runtime; None where there is none."""
        return None

    def window(self) -> int | None:
        """Units that it prefetches; None where it does not say."""
        return None

    def snapshot(self) -> dict:
        """For telemetry: the settings as they are."""
        return {}

    # ------------------------------------------------------------------ before a load that somebody else carries out

    def _release(self, conductor: ConductorRuntime) -> None:
        conductor.budget.release(self._ident)
        self._reserved = self._ident = 0

    def _reserve_in_place(self, wanted: int, what: str, remedy: str) -> None:
        """Reserves `wanted` bytes, 0: none; it has released what it had. StagehandOOMError says what they are for, and
        what to do."""
        if not wanted:
            return
        budget = self._conductor.budget
        self._reserved = wanted  # what it has on the device already is part of it, and not somebody else's
        grant = budget.reserve(self.name, wanted, Mode.HARD, Priority.CRITICAL, adapter=True)
        if grant.status is not GrantStatus.GRANTED:
            self._reserved = 0
            raise StagehandOOMError(f"{what}, and below the hard cap {budget.headroom(hard=True)} are left: {remedy}",
                                    object=self.name)
        self._ident = grant.id

    def _request(self, priority: Priority, nbytes: int, block_id, step_id):
        conductor = self._conductor
        if conductor is None or conductor.transfer is None:
            return None
        return conductor.transfer.acquire(Direction.H2D, nbytes, priority, self.name, block_id, step_id)

    def request_prefetch(self, *, block_id: int | str, estimated_bytes: int, step_id: int = 0):
        """An AcquireResult for a speculative load, None where nothing is arranged: go on."""
        return self._request(Priority.SPECULATIVE, estimated_bytes, block_id, step_id)

    def request_block_load(self, *, block_id: int | str, estimated_bytes: int, step_id: int = 0):
        """The same for a load that is waited for: go on without a token too."""
        return self._request(Priority.REQUIRED, estimated_bytes, block_id, step_id)


class StagehandConductorAdapter(Adapter):
    """A weight runtime: what `stagehand.layer` or StagehandRuntime made. Its budget is reserved as long as it is
    attached; runtimes on one Device reserve together at most what that has (docs/residency.md), for they never take
    more. Its copies, and those of gradients, pass through the conductor. Its pinned memory counts. Tuned: the prefetch
    window of policy="static", and its loads ahead that are under way at once. Loads of the planned policy are no
    speculation: each has its use and its place, so that fetching less would free nothing; `snapshot` names the hints
    that have no effect."""

    def __init__(self, runtime: object) -> None:
        self.runtime = runtime
        self.session = None
        self._original = self._now = 0
        self._inflight = 0  # loads ahead under way at once; 0: no limit

    def attach(self, conductor: ConductorRuntime, name: str) -> None:
        super().attach(conductor, name)
        self.session = session = self.runtime._residency_session()
        self._original = self._now = session.options.get("prefetch_window", 3)
        self._reserve()
        self._hold(session, True)  # the conductor's caps count with it
        if session.arbiter is None:  # another conductor counts it, and leaves its copies to the first
            session.arbiter = conductor
            session.core.set_conductor(conductor.core)
            session.grads.set_conductor(conductor.core)
            session.steps.at_backward = conductor.backward_seen

    def detach(self) -> None:
        conductor, session = self._conductor, self.session
        if conductor is not None and session is not None:
            self._let_go()
        super().detach()
        if conductor is None or session is None:
            return
        self._hold(session, False)
        self.session = None
        self._release(conductor)
        conductor.share_anew(session.target.core)

    def _let_go(self) -> None:
        session = self.session
        if session.arbiter is not self._conductor:
            return
        session.arbiter = session.steps.at_backward = None
        with contextlib.suppress(StagehandError):  # it was shut down before
            session.core.set_conductor(None)
            session.core.set_prefetch_window(self._original)
            session.core.set_max_inflight(0)
        self._inflight = 0
        session.grads.set_conductor(None)

    @staticmethod
    def _hold(session, held: bool) -> None:
        if session.finding is not None:
            session.finding.held = held

    def _wanted(self) -> int:
        """Its budget, or what the others leave of what the device has for all of them."""
        if self.session.closed:
            return 0
        target = self.session.target
        most = target.core.budget or (target.core.residency()["cap"] if target.simulated else None)
        if most is None:
            return self.session.budget
        others = sum(peer._reserved for peer in self._conductor.weights_on(target.core) if peer is not self)
        return max(0, min(self.session.budget, most - others))

    def _reserve(self) -> None:
        self._release(self._conductor)
        wanted = self._wanted()
        self._reserve_in_place(
            wanted, f"the weights of '{self.session.name}' want {wanted} bytes",
            "lower vram_budget, raise vram_hard_cap_mb, or give the models a stagehand.Device(budget=...) that they "
            "share")

    def budget_changed(self) -> None:
        """Raises StagehandOOMError, with nothing reserved, where the caps do not allow it."""
        if self._wanted() != self._reserved:
            self._reserve()

    def ended(self) -> bool:
        """The runtime was shut down."""
        return self.session.closed and (self.runtime.session is None or self.runtime.session.closed)

    def on_phase(self, phase: Phase) -> None:
        if phase is not Phase.STEP_BEGIN:
            return
        if self.ended():
            self._release(self._conductor)
        elif self.session.closed:  # converted to another dtype: the model has a new session
            conductor = self._conductor
            self._let_go()
            self._release(conductor)
            self.attach(conductor, self.name)
        else:
            self.budget_changed()  # of another model that it shares the device's budget with

    def on_hints(self, hints: RuntimeLimitHints) -> None:
        window = min(self._original, hints.prefetch_window_cap)
        if hints.suppress_speculative:
            window = min(window, 1)
        if window != self._now and self._takes_hints():
            self._now = window
            self.session.core.set_prefetch_window(window)
        if hints.max_inflight_h2d != self._inflight and self._takes_hints():
            self._inflight = hints.max_inflight_h2d
            self.session.core.set_max_inflight(self._inflight)

    def _takes_hints(self) -> bool:
        session = self.session
        return session is not None and not session.closed and session.arbiter is self._conductor

    def _static(self) -> bool:
        return self.session is not None and self.session.options.get("policy") == "static"

    def pinned(self) -> dict[int, int]:
        session = self.session
        if session is None or session.closed:
            return {}
        found = {id(arena): arena.pinned_bytes for arena in session.arenas()}
        stats = session.core.stats()
        pool = session.options.get("pool")
        found[id(session)] = stats["ram_pinned_bytes"] + session.grads.stats().get("pinned_bytes", 0)
        found[id(pool or session.core)] = stats["staging_bytes"] if stats["staging_pinned"] else 0
        return found

    def used_bytes(self) -> int:
        return self._reserved if self.session is not None and not self.session.closed else 0

    def target(self):
        return self.session.target if self.session is not None else None

    def window(self) -> int | None:
        return self._original if self._static() else None

    def snapshot(self) -> dict:
        hints = {"prefetch_window": self._now, "max_inflight": self._inflight}
        ignored = {} if self._static() and self._takes_hints() else {"without_effect": list(hints)}
        return {**hints, "budget_mb": self._reserved / MIB, **ignored}


class OptimizerConductorAdapter(Adapter):
    """An OffloadedAdamW. The state of parameters in host memory is there; that of parameters on the device (norms)
    lies beside them, and a step takes some memory for a moment. Both are reserved as long as it is attached,
    state that does not exist yet included, and again when a step begins, for parameters come and go."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._params: list = []  # on a device

    def attach(self, conductor: ConductorRuntime, name: str) -> None:
        super().attach(conductor, name)
        self._reserve()

    def detach(self) -> None:
        conductor = self._conductor
        super().detach()
        if conductor is not None:
            self._release(conductor)

    def _reserve(self) -> None:
        self._params = self.optimizer.params_on_device()
        wanted = sum(self.optimizer.device_bytes_needed())
        if wanted == self._reserved:
            return
        self._release(self._conductor)
        self._reserve_in_place(
            wanted, f"the optimizer needs {wanted} bytes on the device, for {len(self._params)} parameters that stay "
            "there", "lower vram_budget or raise vram_hard_cap_mb")

    def on_phase(self, phase: Phase) -> None:
        if phase is Phase.STEP_BEGIN:
            self._reserve()

    def used_bytes(self) -> int:
        return self.optimizer.state_bytes_of(self._params)

    def reserved_bytes(self) -> int:
        return min(self.used_bytes(), self._reserved)

    def snapshot(self) -> dict:
        return {"reserved_mb": self._reserved / MIB}


class ActStagehandConductorAdapter(Adapter):
    """An ActivationRuntime. The room left below the soft cap is reserved for it, as SPECULATIVE: when something
    stronger needs memory its watermarks come down and more is spilled. Its copies pass through the conductor. Tuned:
    watermarks, and copies under way in each direction."""

    def __init__(self, runtime: object) -> None:
        if runtime.saver is None:
            raise InvalidArgumentError("the ActivationRuntime is not enabled: set ActivationStagehandConfig.enabled",
                                       object="activations")
        self.runtime = runtime
        self.saver = runtime.saver
        self._granted = 0
        self._phase = Phase.STEP_END

    def attach(self, conductor: ConductorRuntime, name: str) -> None:
        super().attach(conductor, name)
        saver, transfer = self.saver, self.runtime.transfer
        self._given = saver.mark.copy()
        self._caps = transfer._max_d2h, transfer._max_h2d
        grant = conductor.budget.reserve(name, max(saver.high, 1), Mode.SOFT, Priority.SPECULATIVE, adapter=True)
        if not grant.id:  # something, so that it grows when there is room
            log.warning("stagehand: no device memory is left for the activations of %s: all are spilled", name)
        self._ident = grant.id
        saver.core.set_conductor(conductor.core)
        saver.at_backward = conductor.backward_seen
        self.on_grant(grant.id, grant.granted_bytes)

    def detach(self) -> None:
        conductor = self._conductor
        super().detach()
        if conductor is None:
            return
        saver = self.saver
        saver.at_backward = None
        saver.core.set_conductor(None)
        with saver._lock:
            saver.mark = self._given
            saver.set_mark()
        saver.core.set_pinned_limit(0)
        self._set_caps(*self._caps)
        self._release(conductor)

    def on_grant(self, ident: int, nbytes: int) -> None:
        """New watermarks; what stands above them is spilled before this returns."""
        if ident == self._ident:
            self._granted = nbytes
        self._follow()

    def _follow(self) -> None:
        saver, most = self.saver, self._granted
        if not saver.target.simulated:  # there marks are of all that the allocator gave out
            most += self._conductor.in_use_beside(self)
        with saver._lock:
            if not saver.mark.limit(self._given, most):
                return
            saver.set_mark()
            if not saver.closed:
                saver._relieve(0)

    def on_phase(self, phase: Phase) -> None:
        self._phase = phase
        if not self._ident and phase is Phase.STEP_BEGIN:
            grant = self._conductor.budget.reserve(self.name, max(self._given.high, 1), Mode.SOFT, Priority.SPECULATIVE,
                                                   adapter=True)
            self._ident, self._granted = grant.id, grant.granted_bytes
        self._follow()

    def on_hints(self, hints: RuntimeLimitHints) -> None:
        d2h = min(self._caps[0], hints.max_inflight_d2h)
        if hints.suppress_speculative and self._phase is Phase.OPTIMIZER:
            d2h = 0
        self._set_caps(d2h, min(self._caps[1], hints.max_inflight_h2d))

    def _set_caps(self, d2h: int, h2d: int) -> None:
        transfer = self.runtime.transfer
        if (transfer._max_d2h, transfer._max_h2d) != (d2h, h2d):
            transfer._set(d2h, h2d)

    def used_bytes(self) -> int:
        return self.saver.core.stats()["kept_bytes"]

    def pinned(self) -> dict[int, int]:
        return {id(self.saver): self.saver.core.stats()["pinned_bytes"]}

    def on_pinned(self, nbytes: int) -> None:
        self.saver.core.set_pinned_limit(max(nbytes, 1))  # 0 would be no limit

    def target(self):
        return self.saver.target

    def snapshot(self) -> dict:
        transfer = self.runtime.transfer
        return {"max_d2h": transfer._max_d2h, "max_h2d": transfer._max_h2d, "high_watermark_mb": self.saver.high / MIB}


class SquareQConductorAdapter(Adapter):
    """A runtime of quantised slabs: any object with an attribute `block_precision_map`, which is what there is to tune;
    a load that it plans or waits for asks here first. runtime=None: requests alone."""

    def __init__(self, runtime: object = None) -> None:
        self.runtime = runtime
        self._original: dict | None = None
        self._asked = {Priority.SPECULATIVE: 0, Priority.REQUIRED: 0}
        self._refused = 0

    def attach(self, conductor: ConductorRuntime, name: str) -> None:
        super().attach(conductor, name)
        if self.runtime is not None:
            self._original = self.runtime.block_precision_map

    def detach(self) -> None:
        attached, _ = self._conductor, super().detach()
        if attached is not None and self.runtime is not None:
            self.runtime.block_precision_map = self._original

    def on_hints(self, hints: RuntimeLimitHints) -> None:
        if self.runtime is not None and hints.block_precision_map:
            self.runtime.block_precision_map = {**(self._original or {}), **hints.block_precision_map}

    def _request(self, priority: Priority, nbytes: int, block_id, step_id):
        result = super()._request(priority, nbytes, block_id, step_id)
        if result is not None:
            self._asked[priority] += 1
            self._refused += result.token is None
        return result

    def snapshot(self) -> dict:
        """Precisions as they are, by block, and requests since it was made."""
        precisions = self.runtime.block_precision_map if self.runtime is not None else None
        return {"block_precision_map": {str(block): _plain(value) for block, value in (precisions or {}).items()},
                "lookaheads": self._asked[Priority.SPECULATIVE], "slab_loads": self._asked[Priority.REQUIRED],
                "refused": self._refused}

    request_lookahead = Adapter.request_prefetch
    request_slab_load = Adapter.request_block_load


def _plain(value):
    """For JSON: an enum's value, a number or text as it is, else its text."""
    value = value.value if isinstance(value, enum.Enum) else value
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
