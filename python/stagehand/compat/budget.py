"""BudgetManager: watermarks over what PyTorch has allocated on the card, for programs that decide by themselves.
A model under stagehand needs none: its budget is the runtime's."""

from __future__ import annotations

import threading

from .._torch import torch

MIB = 1 << 20


class BudgetManager:
    """Watermarks in MiB over torch.cuda.memory_allocated(), asked at each call; 0 is in use where there is no card.
    ValueError unless the high one is greater. Threads: any."""

    def __init__(self, high_watermark_mb: int = 22000, low_watermark_mb: int = 18000) -> None:
        if high_watermark_mb <= low_watermark_mb:
            raise ValueError(f"high_watermark_mb={high_watermark_mb} must be greater than "
                             f"low_watermark_mb={low_watermark_mb}")
        self._high, self._low = high_watermark_mb, low_watermark_mb
        self._reserved = 0
        self._lock = threading.Lock()

    @property
    def high_watermark_mb(self) -> int:
        return self._high

    @property
    def low_watermark_mb(self) -> int:
        return self._low

    def vram_used_mb(self) -> float:
        return torch.cuda.memory_allocated() / MIB if torch.cuda.is_available() else 0.0

    def vram_reserved_mb(self) -> float:
        """Memory that PyTorch's allocator has reserved, in use or not."""
        return torch.cuda.memory_reserved() / MIB if torch.cuda.is_available() else 0.0

    def above_high_watermark(self) -> bool:
        return self.vram_used_mb() >= self._high

    def below_low_watermark(self) -> bool:
        return self.vram_used_mb() < self._low

    def headroom_mb(self) -> float:
        return self._high - self.vram_used_mb()

    def should_evict(self) -> bool:
        return self.above_high_watermark()

    def can_prefetch(self) -> bool:
        return not self.above_high_watermark()

    # ------------------------------------------------------------------ reservations

    @property
    def reserved_bytes(self) -> int:
        return self._reserved

    def reserve_bytes(self, amount: int, label: str = "") -> None:
        """Sets bytes aside, which guests do not get. label: for messages. ValueError for a negative amount."""
        if amount < 0:
            raise ValueError(f"cannot reserve {amount} bytes{f' for {label}' if label else ''}: give 0 or more")
        with self._lock:
            self._reserved += amount

    def release_reserved_bytes(self, amount: int) -> None:
        """Gives bytes back; never below nothing."""
        with self._lock:
            self._reserved = max(0, self._reserved - amount)

    def can_guest_allocate(self, requested_bytes: int, safety_margin_mb: int = 500) -> bool:
        """Whether so much fits below the high watermark, beside what is in use and reserved."""
        return requested_bytes <= (self.headroom_mb() - safety_margin_mb) * MIB - self._reserved

    def __repr__(self) -> str:
        return (f"BudgetManager(high={self._high}MB, low={self._low}MB, used={self.vram_used_mb():.0f}MB, "
                f"reserved={self._reserved})")
