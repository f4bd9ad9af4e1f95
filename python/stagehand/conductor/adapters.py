"""Adapters: what a conductor does to a runtime. attach() saves what it tunes, detach() puts it back.

A conductor calls `on_phase` when a step goes on, `on_hints` with its limits, `on_grant` when the adapter's reservation is
worth other bytes. All are calls from the thread that enters the phase or reserves, one at a time.
"""

from __future__ import annotations

import contextlib
import logging

from ..errors import InvalidArgumentError, StagehandError, StagehandOOMError
from .config import MIB
from .names import Direction, GrantStatus, Mode, Phase, Priority

log = logging.getLogger("stagehand")


class Adapter:
    """The protocol, which does nothing. `_conductor` and `name` are set while it is attached."""

    _conductor = None
    name = ""

    def attach(self, conductor, name: str) -> None:
        """Saves the runtime's knobs. Called by ConductorRuntime.register_adapter, with `name` as its owner."""
        self._conductor, self.name = conductor, name

    def detach(self) -> None:
        """Puts them back. Again is fine."""
        self._conductor = None

    def on_phase(self, phase: Phase) -> None: ...

    def on_hints(self, hints) -> None: ...

    def on_grant(self, ident: int, nbytes: int) -> None: ...

    def used_bytes(self) -> int:
        """Device memory that the runtime has now."""
        return 0

    def reserved_bytes(self) -> int:
        """How much of that its reservation stands for."""
        return self.used_bytes()

    def window(self) -> int | None:
        """Units that it fetches ahead; None where it does not say."""
        return None

    def snapshot(self) -> dict:
        """For telemetry: the knobs as they are."""
        return {}

    # ------------------------------------------------------------------ before a load that somebody else carries out

    def _request(self, priority: Priority, nbytes: int, block_id, step_id):
        conductor = self._conductor
        if conductor is None or conductor.transfer is None:
            return None
        return conductor.transfer.acquire(Direction.H2D, nbytes, priority, self.name, block_id, step_id)

    def request_prefetch(self, *, block_id, estimated_bytes: int, step_id: int = 0):
        """An AcquireResult for a speculative load, None where nothing is arranged: go on."""
        return self._request(Priority.SPECULATIVE, estimated_bytes, block_id, step_id)

    def request_block_load(self, *, block_id, estimated_bytes: int, step_id: int = 0):
        """The same for a load that is waited for: go on without a token too."""
        return self._request(Priority.REQUIRED, estimated_bytes, block_id, step_id)


class StagehandConductorAdapter(Adapter):
    """A weight runtime: what `stagehand.layer` or StagehandRuntime made. Its budget is reserved as long as it is attached;
    its copies, and those of gradients, pass through the conductor. Tuned: the prefetch window of policy="static"; the
    planned policy's places are fixed, so that fetching less would free nothing."""

    def __init__(self, runtime) -> None:
        self.runtime = runtime
        self.session = None
        self._reserved = self._ident = 0
        self._original = self._now = 0

    def attach(self, conductor, name: str) -> None:
        super().attach(conductor, name)
        self.session = session = self.runtime.prepare() if hasattr(self.runtime, "prepare") else self.runtime.session
        self._original = self._now = session.options.get("prefetch_window", 3)
        self._reserve()
        self._hold(session, True)  # the conductor's caps count with it
        session.core.set_conductor(conductor.core)
        session.grads.set_conductor(conductor.core)
        session.at_backward = conductor.backward_seen

    def detach(self) -> None:
        conductor, session = self._conductor, self.session
        super().detach()
        if conductor is None or session is None:
            return
        session.at_backward = None
        with contextlib.suppress(StagehandError):  # it was shut down before
            session.core.set_conductor(None)
            session.core.set_prefetch_window(self._original)
        session.grads.set_conductor(None)
        self._hold(session, False)
        self.session = None
        conductor.budget.release(self._ident)
        self._reserved = self._ident = 0

    @staticmethod
    def _hold(session, held: bool) -> None:
        if session.finding is not None:
            session.finding.held = held

    def _reserve(self) -> None:
        budget = self._conductor.budget
        if self._ident:
            budget.release(self._ident)
        grant = budget.reserve(self.name, self.session.budget, Mode.HARD, Priority.CRITICAL, adapter=True)
        self._ident, self._reserved = grant.id, self.session.budget
        if grant.status is not GrantStatus.GRANTED:
            raise StagehandOOMError(
                f"the weights of {self.name} have a budget of {self.session.budget} bytes, and below the hard cap "
                f"{budget.headroom(hard=True)} are left: lower vram_budget or raise vram_hard_cap_mb", object=self.name)

    def on_phase(self, phase: Phase) -> None:
        if phase is Phase.STEP_BEGIN and self.session.budget != self._reserved:
            self._reserve()  # set_vram_budget was called

    def on_hints(self, hints) -> None:
        window = min(self._original, hints.prefetch_window_cap)
        if hints.suppress_speculative:
            window = min(window, 1)
        if window != self._now and not self.session.closed:
            self._now = window
            self.session.core.set_prefetch_window(window)

    def used_bytes(self) -> int:
        return self.session.budget if self.session is not None and not self.session.closed else 0

    def reserved_bytes(self) -> int:
        return min(self.used_bytes(), self._conductor.budget.granted(self._ident))

    def window(self) -> int | None:
        return self._original if self.session.options.get("policy") == "static" else None

    def snapshot(self) -> dict:
        return {"prefetch_window": self._now, "budget_mb": self._reserved / MIB}


class ActStagehandConductorAdapter(Adapter):
    """An ActivationRuntime. What is left below the soft cap is reserved for it, as SPECULATIVE: when something stronger
    needs memory its watermarks come down and more is spilled. Its copies pass through the conductor. Tuned: watermarks,
    and copies under way in each direction."""

    def __init__(self, runtime) -> None:
        if runtime.saver is None:
            raise InvalidArgumentError("the ActivationRuntime is not enabled: set ActivationStagehandConfig.enabled",
                                       object="activations")
        self.runtime = runtime
        self.saver = runtime.saver
        self._ident = 0
        self._granted = 0
        self._phase = Phase.STEP_END

    def attach(self, conductor, name: str) -> None:
        super().attach(conductor, name)
        saver, transfer = self.saver, self.runtime.transfer
        self._marks = saver.high, saver.band, saver.budget, saver._ceiling
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
            saver.high, saver.band, saver.budget, saver._ceiling = self._marks
            saver.core.set_marks(saver.high, saver.high - saver.band)
        self._set_caps(*self._caps)
        conductor.budget.release(self._ident)
        self._ident = 0

    def on_grant(self, ident: int, nbytes: int) -> None:
        """New watermarks; what stands above them is spilled before this returns."""
        if ident == self._ident:
            self._granted = nbytes
        self._follow()

    def _follow(self) -> None:
        high, band, budget, _ = self._marks
        saver, most = self.saver, self._granted
        if not saver.target.simulated:  # there marks are of all that the allocator gave out
            most += self._conductor.in_use_beside(self)
        with saver._lock:
            new = min(high, most)
            if budget is not None:  # below it the saver finds the mark itself, from pass to pass
                saver.budget = min(budget, most)
                saver._ceiling = min(saver._ceiling, saver.budget)
                new = min(saver.high, saver.budget)
            if new == saver.high:
                return
            saver.high, saver.band = new, band * new // high if high else 0
            saver.core.set_marks(new, new - saver.band)
            if not saver.closed:
                saver._relieve(0)

    def on_phase(self, phase: Phase) -> None:
        self._phase = phase
        if not self._ident and phase is Phase.STEP_BEGIN:
            grant = self._conductor.budget.reserve(self.name, max(self._marks[0], 1), Mode.SOFT, Priority.SPECULATIVE,
                                                   adapter=True)
            self._ident, self._granted = grant.id, grant.granted_bytes
        self._follow()

    def on_hints(self, hints) -> None:
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

    def snapshot(self) -> dict:
        transfer = self.runtime.transfer
        return {"max_d2h": transfer._max_d2h, "max_h2d": transfer._max_h2d, "high_watermark_mb": self.saver.high / MIB}


class SquareQConductorAdapter(Adapter):
    """A runtime of quantised slabs: any object with an attribute `block_precision_map`, which is what there is to tune; a
    load that it plans or waits for asks here first. runtime=None: requests alone."""

    def __init__(self, runtime=None) -> None:
        self.runtime = runtime
        self._original: dict | None = None

    def attach(self, conductor, name: str) -> None:
        super().attach(conductor, name)
        if self.runtime is not None:
            self._original = self.runtime.block_precision_map

    def detach(self) -> None:
        attached, _ = self._conductor, super().detach()
        if attached is not None and self.runtime is not None:
            self.runtime.block_precision_map = self._original

    def on_hints(self, hints) -> None:
        if self.runtime is not None and hints.block_precision_map:
            self.runtime.block_precision_map = {**(self._original or {}), **hints.block_precision_map}

    request_lookahead = Adapter.request_prefetch
    request_slab_load = Adapter.request_block_load
