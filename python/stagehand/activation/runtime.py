"""ActivationRuntime: steps, the context in which tensors are spilled, and what was done."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from .. import device as devices
from .._torch import unseen
from ..device import DeviceLike
from ..errors import InvalidStateTransitionError
from ..owning import NotCopied, Owning
from .checkpoint import CheckpointCoordinator
from .config import MIB, ActivationStagehandConfig
from .saver import Hooks, Saver
from .telemetry import ActivationStepMetrics, ActivationTelemetry

SMALLEST = 256 << 10  # bytes; what is smaller costs more to move than it frees


class Transfer(NotCopied):
    """The caps of transfers, which a conductor may write. _max_d2h: 0: nothing is spilled."""

    def __init__(self, saver: Saver | None, max_d2h: int, max_h2d: int) -> None:
        self._saver = saver
        self._d2h, self._h2d = max_d2h, max_h2d

    def _set(self, d2h: int, h2d: int) -> None:
        self._d2h, self._h2d = d2h, h2d
        if self._saver is not None:
            self._saver.core.set_caps(d2h, h2d)

    _max_d2h = property(lambda self: self._d2h, lambda self, value: self._set(value, self._h2d))
    _max_h2d = property(lambda self: self._h2d, lambda self, value: self._set(self._d2h, value))


class ActivationRuntime(Owning):
    """Spills what autograd saves while `managed_forward()` is open, and brings it back for backward.

        runtime.step_begin(step)
        with runtime.managed_forward():
            loss = model(x)
            loss.backward()          # inside or outside
        metrics = runtime.step_end()

    config: an ActivationStagehandConfig. device: as for stagehand.layer. smallest: storages of fewer bytes stay.
    budget: of `offload`: the watermarks follow it. Graphs may outlive steps, and the runtime. Threads: hooks run on
    any; steps on one."""

    def __init__(self, config: ActivationStagehandConfig | None = None, device: DeviceLike | None = None, *,
                 smallest: int | None = None, budget: int | None = None, **options: object) -> None:
        self.config = config = config or ActivationStagehandConfig()
        config.validate()
        self.saver: Saver | None = None
        self.telemetry = ActivationTelemetry(
            config.telemetry_file if config.enabled and config.telemetry_enabled else None)
        self._step: int | None = None
        self._before: dict = {}
        if config.enabled:
            sizes, counts = config.classes()
            self.saver = Saver(devices.resolve(device, None), SMALLEST if smallest is None else smallest, budget,
                               config.recompute_cheap, **{
                "high": config.vram_high_watermark_mb * MIB, "low": config.vram_low_watermark_mb * MIB,
                "class_bytes": sizes, "class_slabs": counts, "max_d2h": config.max_inflight_d2h,
                "max_h2d": config.max_inflight_h2d, "checksums": config.debug_checksums, **options})
        self.checkpoint = CheckpointCoordinator(self.saver, config.recompute_threshold_bytes)
        self.transfer = Transfer(self.saver, config.max_inflight_d2h, config.max_inflight_h2d)

    @property
    def enabled(self) -> bool:
        return self.saver is not None and not self.saver.closed

    def managed_forward(self):
        """Context in which what autograd saves may be spilled. May be nested and entered by several threads."""
        if not self.enabled:
            return contextlib.nullcontext()
        return Hooks(self.saver)

    def region(self, function: Callable, *args: object, **kwargs: object):
        """Calls a part of the model, such as a block, in place of `torch.utils.checkpoint.checkpoint`: it is computed
        again in backward where the bytes that its first run saved are at most `recompute_threshold_bytes`, else what
        it saves is kept or spilled. Inside `managed_forward()`."""
        return self.checkpoint.run(function, *args, **kwargs)

    # ------------------------------------------------------------------ steps

    def step_begin(self, step: int) -> None:
        """A step begins: a forward and its backward, or several. A step that was left open (an exception) ends
        without a record."""
        self._step = step
        if self.enabled:
            with unseen(), self.saver._lock:
                self.saver.begin(step)
                self.saver.vram_peak = 0
            self._before = self._now()

    def step_end(self) -> ActivationStepMetrics:
        """The step's record, which also goes to `telemetry`. Raises InvalidStateTransitionError without a
        step_begin, StagehandError where gradients are known to be wrong (docs/activation.md, Failure)."""
        if self._step is None:
            raise InvalidStateTransitionError("step_end without step_begin: call step_begin(step) first")
        step, self._step = self._step, None
        if self.saver is not None:
            with unseen():
                self.saver.look()
        metrics = ActivationStepMetrics(step=step)
        if self.saver is not None:
            self._fill(metrics, self._before, self._now())
        self.telemetry.add(metrics)
        return metrics

    def _now(self) -> dict:
        saver = self.saver
        return {**saver.stats(), "tensors": saver.saved, "tensors_spilled": saver.spilled,
                "tensors_dropped": saver.dropped,
                "tensors_restored": saver.restored, "stalls": saver.stalls, "stall_ns": saver.stall_ns}

    def _fill(self, metrics: ActivationStepMetrics, before: dict, now: dict) -> None:
        since = {key: now[key] - before.get(key, 0) for key in now}
        metrics.activations_saved = since["tensors"]
        metrics.activations_spilled = since["tensors_spilled"]
        metrics.activations_dropped = since["tensors_dropped"]
        metrics.activations_kept = since["tensors"] - since["tensors_spilled"] - since["tensors_dropped"]
        metrics.activations_recomputed = since["recomputed"]
        metrics.activations_restored = since["tensors_restored"]
        metrics.spill_bytes = since["spill_bytes"]
        metrics.restore_bytes = since["restore_bytes"]
        metrics.stall_time_ms = since["stall_ns"] / 1e6
        metrics.stall_count = since["stalls"] + since["waits"]
        metrics.pool_hits = since["pool_hits"]
        metrics.pool_misses = since["pool_misses"]
        metrics.vram_peak_mb = (now["peak_bytes"] if self.saver.target.simulated else self.saver.vram_peak) / MIB

    # ------------------------------------------------------------------ the rest

    @property
    def stats(self) -> dict:
        """Counters since the start (docs/activation.md): records, bytes, pool, and what is on the device now."""
        return self._now() if self.saver is not None else {}

    def shutdown(self) -> None:
        """Nothing is spilled any more; graphs that are alive go on and may be run backward. May be called again."""
        if self.saver is not None:
            self.saver.close()
        self.telemetry.release()
