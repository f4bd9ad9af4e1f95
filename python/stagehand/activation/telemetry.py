"""What a step of an ActivationRuntime did: a record, and the JSON line that it becomes."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass

from ..jsonlines import Appending, JsonLines


@dataclass
class ActivationStepMetrics:
    """One step. Counts are of tensors that autograd saved; saved = kept + spilled + dropped, the last to be computed
    again. bytes are those of copies: a storage that many tensors see is copied once. stall_time_ms: the host's time in
    backward's waits and in those that made room. stall_count: tensors that had to be brought back on demand, and waits
    for room. pool_hits, pool_misses: slabs found and not found. vram_peak_mb: most MiB in use (CUDA: of the allocator;
    simulated: of saved tensors on the device)."""

    step: int = 0
    activations_saved: int = 0
    activations_kept: int = 0
    activations_spilled: int = 0
    activations_dropped: int = 0
    activations_restored: int = 0
    activations_recomputed: int = 0
    spill_bytes: int = 0
    restore_bytes: int = 0
    stall_time_ms: float = 0.0
    stall_count: int = 0
    pool_hits: int = 0
    pool_misses: int = 0
    vram_peak_mb: float = 0.0


class ActivationTelemetry(Appending):
    """The last 100 steps in `history`, oldest first. path: a file to which each is appended as a JSON line, by the
    rules of docs/telemetry.md; None: none. Raises OSError from `add` when it cannot be written; nothing is tried after
    that."""

    def __init__(self, path: str | None = None) -> None:
        self._file = JsonLines(path)
        self.history: deque[ActivationStepMetrics] = deque(maxlen=100)

    def add(self, metrics: ActivationStepMetrics) -> None:
        self.history.append(metrics)
        self._file.append([asdict(metrics)])

    def hit_rate(self) -> float:
        """Share of slabs that the pool had, over the history; 1.0 where none was asked for."""
        hits = sum(m.pool_hits for m in self.history)
        asked = hits + sum(m.pool_misses for m in self.history)
        return hits / asked if asked else 1.0
