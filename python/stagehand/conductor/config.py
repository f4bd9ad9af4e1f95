"""ConductorConfig: the settings of a ConductorRuntime."""

from __future__ import annotations

from dataclasses import dataclass

from .. import _core
from ..givenfields import BITS_31, Settings, remember_given
from ..telemetryfile import CONDUCTOR

MIB = 1 << 20


@remember_given
@dataclass
class ConductorConfig(Settings):
    """Settings of a ConductorRuntime. Raises ValueError or TypeError naming the field.

    enabled: False: nothing is made, and each call returns at once. vram_soft_cap_mb, vram_hard_cap_mb: MiB of device
    memory; reservations stay below the first, BURST and CRITICAL ones below the second. pinned_cap_mb: MiB of pinned
    host memory, what attached runtimes have pinned and what is reserved together; None: no cap. Memory that weights had
    pinned before stays pinned. h2d_slots, d2h_slots: transfer tokens of each direction at once.
    debug_event_trace: phases, reservations, tokens and what the link's order did are noted, and written with the
    telemetry. telemetry_enabled, telemetry_interval_steps, telemetry_file: a JSON object every so many steps is
    appended to the file; None: nothing is written. telemetry_enabled=True that is given without a file means
    conductor_telemetry.jsonl in the working folder.
    """

    enabled: bool = False
    vram_soft_cap_mb: int = 22000
    vram_hard_cap_mb: int = 23500
    h2d_slots: int = 2
    d2h_slots: int = 2
    debug_event_trace: bool = False
    telemetry_interval_steps: int = 1
    telemetry_file: str | None = None
    pinned_cap_mb: int | None = None
    telemetry_enabled: bool = True

    _TELEMETRY = CONDUCTOR
    _RANGES = {"vram_soft_cap_mb": (1, BITS_31), "vram_hard_cap_mb": (1, BITS_31), "pinned_cap_mb": (1, BITS_31),
               "h2d_slots": (1, _core.SLOTS_MOST), "d2h_slots": (1, _core.SLOTS_MOST),
               "telemetry_interval_steps": (1, BITS_31)}

    def validate(self) -> None:
        """Checks every field as it is now."""
        super().validate()
        if self.vram_hard_cap_mb < self.vram_soft_cap_mb:
            raise ValueError(f"ConductorConfig.vram_hard_cap_mb={self.vram_hard_cap_mb} must not be below "
                             f"vram_soft_cap_mb={self.vram_soft_cap_mb}")

    def options(self) -> dict:
        """Of `_core.Conductor`."""
        return {"soft_cap": self.vram_soft_cap_mb * MIB, "hard_cap": self.vram_hard_cap_mb * MIB,
                "pinned_cap": (self.pinned_cap_mb or 0) * MIB, "h2d_slots": self.h2d_slots,
                "d2h_slots": self.d2h_slots, "event_trace": self.debug_event_trace}
