"""StagehandScheduler: a loop over blocks that says itself which one comes. A StagehandRuntime with policy="static" is
behind it: what `before_block` brings to the device stays there until `after_block`.

    scheduler = StagehandScheduler(registry, residency, engine, BudgetManager(8000, 6000), StaticLookaheadPolicy(3))
    scheduler.begin_step(0)
    for name, block in blocks:
        scheduler.before_block(name)
        x = block(x)
        scheduler.after_block(name, x)
    scheduler.end_step()
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from .._torch import torch
from ..device import DeviceLike
from ..errors import InvalidArgumentError
from ..modes.block import StagehandRuntime
from ..modes.config import StagehandConfig
from ..modes.guards import NumericGuard, first_tensor
from ..owning import Owning
from ..report import BlockState
from .transfer import AsyncTransferEngine

if TYPE_CHECKING:
    from .budget import BudgetManager
    from .registry import BlockRegistry
    from .residency import ResidencyMap

_RANK = [BlockState.UNLOADED, BlockState.GPU_FREEING, BlockState.EVICTING, BlockState.HOST_STAGED,
         BlockState.PREFETCHING, BlockState.GPU_READY]


class StaticLookaheadPolicy:
    """prefetch_window: blocks prefetched. eviction_cooldown_steps: for `should_evict`. Both may be changed."""

    def __init__(self, prefetch_window: int = 3, eviction_cooldown_steps: int = 2) -> None:
        self.prefetch_window = prefetch_window
        self.eviction_cooldown_steps = eviction_cooldown_steps

    def blocks_to_prefetch(self, cursor: int, total_blocks: int, residency_states: object = None) -> list[int]:
        """Indexes behind the cursor, up to the last block."""
        return list(range(cursor + 1, min(cursor + self.prefetch_window + 1, total_blocks)))

    def score_for_eviction(self, block_id: str, current_cursor: int, entry_exec_order: int, total_blocks: int,
                           size_bytes: int) -> float:
        """Distance to the next use times the size: the highest goes first."""
        distance = (entry_exec_order - current_cursor) % total_blocks or total_blocks
        return float(distance * size_bytes)

    def should_evict(self, last_used_step: int, current_step: int) -> bool:
        return current_step - last_used_step > self.eviction_cooldown_steps


class StagehandScheduler(Owning):
    """registry: a BlockRegistry that was built from a model. residency: a ResidencyMap, which shows the blocks' states
    from now on; None: one of its own. transfer_engine: an AsyncTransferEngine, whose max_inflight bounds the loads
    ahead; None: nothing does. budget: a BudgetManager: its watermarks; None: the config's. policy: its
    prefetch_window counts, also when it changes. guards: a NumericGuard that sees the outputs given to after_block.
    telemetry: an object that is told of steps, hits, misses and stalls by the methods that it has; `scheduler.runtime`
    has records of its own. config: a StagehandConfig. device: as for stagehand.layer."""

    _instead = "leave the scheduler out: it belongs to one model in one process"

    def __init__(self, registry: BlockRegistry, residency: ResidencyMap | None = None,
                 transfer_engine: AsyncTransferEngine | None = None, budget: BudgetManager | None = None,
                 policy: StaticLookaheadPolicy | None = None, guards: NumericGuard | None = None,
                 telemetry: object = None, config: StagehandConfig | None = None, inference_mode: bool = False, *,
                 device: DeviceLike | None = None) -> None:
        model = registry.model
        if model is None:
            raise InvalidArgumentError("the registry has no model: make it with build_from_model", object="registry")
        from .residency import ResidencyMap

        self._registry = registry
        self._residency = residency if residency is not None else ResidencyMap(registry)
        self._engine, self._guards, self._telemetry = transfer_engine, guards, telemetry
        self._policy = policy if policy is not None else StaticLookaheadPolicy()
        self._step = -1
        self._held: dict[str, list] = {}  # block -> leases of its uses that have begun
        self._protected: dict[str, list] = {}  # block -> leases; of trained weights inside of steps alone
        self.config = self._settings(config or StagehandConfig(), budget)
        pattern = f"^({'|'.join(re.escape(block) for block in registry)})$"
        self.runtime = StagehandRuntime(model, self.config, pattern, inference_mode=inference_mode, device=device)
        try:
            self.runtime.prepare()
            self._units: dict[str, list] = {block: [] for block in registry}
            for unit in self.runtime.session.units:
                if unit.index >= 0:
                    self._units[unit.group].append(unit)
            if transfer_engine is not None:
                self.runtime.session.core.set_max_inflight(transfer_engine._max_inflight)
        except BaseException:
            self.runtime.shutdown()
            raise
        self._window = self._policy.prefetch_window
        self._residency.follow(self)

    def _settings(self, config: StagehandConfig, budget) -> StagehandConfig:
        given = {"policy": "static", "prefetch_window_blocks": self._policy.prefetch_window}
        if budget is not None:
            given["vram_high_watermark_mb"] = budget.high_watermark_mb
            given["vram_low_watermark_mb"] = budget.low_watermark_mb
        return dataclasses.replace(config, **given)

    def state(self, block_id: str) -> BlockState:
        """The state of its unit that is furthest from the device. A unit that never leaves the device is GPU_READY."""
        core = self.runtime.session.core
        states = [BlockState(core.unit_stats(unit.index)["state"]) for unit in self._units[block_id]]
        return min(states, key=_RANK.index, default=BlockState.GPU_READY)

    def _tell(self, method: str, *args) -> None:
        call = getattr(self._telemetry, method, None)
        if call is not None:
            call(*args)

    # ------------------------------------------------------------------ steps

    def begin_step(self, step: int) -> None:
        self._step = step
        self.runtime.begin_step(step)
        for block_id in self._protected:
            if not self._protected[block_id]:
                self._protected[block_id] = self._leases(block_id)
        self._tell("begin_step", step)

    def end_step(self) -> None:
        """Uses that were not ended, after an exception, end with it."""
        for block_id in list(self._held):
            self._let_go(block_id)
        for block_id in filter(self._is_trained, self._protected):
            self._protected[block_id] = []  # their masters may be written now
        self.runtime.end_step()
        self._tell("end_step")

    # ------------------------------------------------------------------ blocks

    def before_block(self, block_id: str) -> None:
        """The block's weights are on the device, or on their way before what the current stream does next, and stay
        until after_block. KeyError for a block that there is not; StagehandOOMError where it does not fit."""
        self._follow_policy()
        there = self.state(block_id) is BlockState.GPU_READY
        began = time.monotonic()
        self._held.setdefault(block_id, []).append(self._leases(block_id))
        self._residency.increment_ref(block_id)
        self._residency.get_entry(block_id).last_used_step = self._step
        self._tell("record_prefetch_hit" if there else "record_prefetch_miss")
        if not there:
            self._tell("record_stall", (time.monotonic() - began) * 1e3)

    def after_block(self, block_id: str, output: object = None) -> None:
        """The use has ended. output: for the guard. ValueError where none had begun."""
        self._residency.decrement_ref(block_id)
        self._held[block_id].pop()
        if not self._held[block_id]:
            del self._held[block_id]
        tensor = first_tensor(output)
        if self._guards is not None and tensor is not None:
            nans, infs = self._guards.check_output(tensor, block_id, self._step)
            self._tell("record_nan_inf", nans, infs)

    def _leases(self, block_id: str) -> list:
        session = self.runtime.session
        stream = 0 if session.simulated else session.target.stream()
        with torch.inference_mode(False):
            return [session.acquire(unit, stream, None) for unit in self._units[block_id]]

    # ------------------------------------------------------------------ blocks that are protected

    def protect_blocks(self, block_ids: Iterable[str]) -> None:
        """They come to the device and stay there until as many unprotect_blocks."""
        self._residency.protect_blocks(block_ids)

    def unprotect_blocks(self, block_ids: Iterable[str]) -> None:
        self._residency.unprotect_blocks(block_ids)

    def hold(self, block_id: str) -> None:
        """For the ResidencyMap, as `state` and `let_go`."""
        self._protected[block_id] = self._leases(block_id)

    def let_go(self, block_id: str) -> None:
        self._protected.pop(block_id, None)

    def _is_trained(self, block_id: str) -> bool:
        return any(unit.writable for unit in self._units[block_id])

    def _follow_policy(self) -> None:
        if self._policy.prefetch_window != self._window:
            self._window = self._policy.prefetch_window
            self.runtime.session.core.set_prefetch_window(self._window)

    def _let_go(self, block_id: str) -> None:
        for _ in self._held.pop(block_id):
            self._residency.decrement_ref(block_id)

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """The model is plain again, on the host. May be called again."""
        for block_id in list(self._held):
            self._let_go(block_id)
        if self.runtime.session is not None and not self.runtime.session.closed:
            self._residency.follow(None)
        self._protected.clear()
        self.runtime.shutdown()

    shutdown = close
