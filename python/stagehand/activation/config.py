"""ActivationStagehandConfig: the settings of an ActivationRuntime."""

from __future__ import annotations

from dataclasses import dataclass

from ..arguments import MOST, check
from ..givenfields import remember_given
from ..telemetryfile import ACTIVATIONS, fill_in

MIB = 1 << 20


@remember_given
@dataclass
class ActivationStagehandConfig:
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

    def __post_init__(self) -> None:
        fill_in(self, ACTIVATIONS)
        self.validate()

    def validate(self) -> None:
        """Checks every field as it is now."""
        for name in ("enabled", "debug_checksums", "telemetry_enabled", "recompute_cheap"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"ActivationStagehandConfig.{name} must be True or False, not {getattr(self, name)!r}")
        for name, least in (("vram_high_watermark_mb", 0), ("vram_low_watermark_mb", 0), ("max_inflight_d2h", 0),
                            ("max_inflight_h2d", 0), ("recompute_threshold_bytes", 0)):
            _integer(name, getattr(self, name), least)
        check("ActivationStagehandConfig.telemetry_file", self.telemetry_file, "path", none=True)
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
            _integer("pinned_pool_classes_mb", size, 1)
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
            _integer("slabs_per_class", count, 1)
        if len(counts) != len(sizes):
            raise ValueError(f"ActivationStagehandConfig.slabs_per_class has {len(counts)} counts for {len(sizes)} "
                             f"pinned_pool_classes_mb")
        return tuple(size * MIB for size in sizes), tuple(counts)


def _integer(name: str, value, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"ActivationStagehandConfig.{name} must be an int, not {value!r}")
    most = MOST if name.endswith("_bytes") else MOST >> 32
    if not least <= value <= most:
        raise ValueError(f"ActivationStagehandConfig.{name} must be at least {least} and at most {most}, not {value}")
