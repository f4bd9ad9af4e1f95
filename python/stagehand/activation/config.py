"""ActivationStagehandConfig: the settings of an ActivationRuntime."""

from __future__ import annotations

from dataclasses import dataclass

from ..arguments import MOST
from ..givenfields import BITS_31, Settings, remember_given, whole
from ..telemetryfile import ACTIVATIONS

MIB = 1 << 20


@remember_given
@dataclass
class ActivationStagehandConfig(Settings):
    """Settings of an ActivationRuntime. Raises ValueError or TypeError naming the field.

    enabled: False: nothing is installed. vram_high_watermark_mb, vram_low_watermark_mb: MiB in use on the device;
    above the first tensors are spilled until the second is reached. pinned_pool_classes_mb: sizes of host slabs in
    MiB, growing. slabs_per_class: how many of each at most, one number for all or one for each; None: the pool
    finds sizes and counts itself and grows. Slabs are taken when first needed. max_inflight_d2h: copies to the host
    at once, 0: nothing is spilled. max_inflight_h2d: tensors brought back ahead of need, 0: on demand only.
    debug_checksums: a sum of each spilled tensor is checked when it comes back; waits for every copy.
    telemetry_enabled, telemetry_file: one JSON object a step is appended to the file; None: nothing is written.
    telemetry_enabled=True that is given without a file means activation_telemetry.jsonl in the working folder.
    recompute_threshold_bytes: a region called by `ActivationRuntime.region` that saves at most so many bytes is
    computed again in backward, in place of being moved; 0: none. recompute_cheap: outputs of activation functions,
    products and layer norms are dropped before anything is moved, and computed again from what else is saved.
    """

    enabled: bool = False
    vram_high_watermark_mb: int = 20000
    vram_low_watermark_mb: int = 16000
    pinned_pool_classes_mb: tuple = (1, 4, 16, 64, 256)
    slabs_per_class: int | tuple | None = (512, 2, 2, 2, 2)
    max_inflight_d2h: int = 1
    max_inflight_h2d: int = 1
    debug_checksums: bool = False
    telemetry_enabled: bool = True
    telemetry_file: str | None = None
    recompute_threshold_bytes: int = 0
    recompute_cheap: bool = True

    _TELEMETRY = ACTIVATIONS
    _RANGES = {"vram_high_watermark_mb": (0, BITS_31), "vram_low_watermark_mb": (0, BITS_31),
               "max_inflight_d2h": (0, BITS_31), "max_inflight_h2d": (0, BITS_31),
               "recompute_threshold_bytes": (0, MOST)}

    def validate(self) -> None:
        """Checks every field as it is now."""
        super().validate()
        if self.vram_low_watermark_mb > self.vram_high_watermark_mb:
            raise ValueError(
                f"ActivationStagehandConfig.vram_low_watermark_mb={self.vram_low_watermark_mb} must not be above "
                f"vram_high_watermark_mb={self.vram_high_watermark_mb}")
        self.classes()

    def classes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(bytes of a slab, slabs) of each class; empty where the pool sizes itself."""
        sizes = self.pinned_pool_classes_mb
        if not isinstance(sizes, (tuple, list)):
            raise TypeError(f"ActivationStagehandConfig.pinned_pool_classes_mb must be a tuple, not {sizes!r}")
        for size in sizes:
            whole("ActivationStagehandConfig.pinned_pool_classes_mb", size, 1, BITS_31)
        if list(sizes) != sorted(set(sizes)) or not 1 <= len(sizes) <= 16:
            raise ValueError(f"ActivationStagehandConfig.pinned_pool_classes_mb must be 1 to 16 growing sizes, "
                             f"not {sizes!r}")
        counts = self.slabs_per_class
        if counts is None:
            return (), ()
        if isinstance(counts, int) and not isinstance(counts, bool):
            counts = (counts,) * len(sizes)
        if not isinstance(counts, (tuple, list)):
            raise TypeError(f"ActivationStagehandConfig.slabs_per_class must be an int, a tuple or None, "
                            f"not {counts!r}")
        for count in counts:
            whole("ActivationStagehandConfig.slabs_per_class", count, 1, BITS_31)
        if len(counts) != len(sizes):
            raise ValueError(f"ActivationStagehandConfig.slabs_per_class has {len(counts)} counts for {len(sizes)} "
                             f"pinned_pool_classes_mb")
        return tuple(size * MIB for size in sizes), tuple(counts)
