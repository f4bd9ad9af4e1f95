"""StagehandConfig: the settings of block mode, and the one table that says what each of them does."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import NamedTuple

from .. import _core
from ..files.quantised import check_encoding
from ..givenfields import BITS_31, Settings, defaults_of, remember_given
from ..session.trained import check_trainables
from ..telemetryfile import WEIGHTS

MIB = 1 << 20
NOTHING = "no effect"


class Setting(NamedTuple):
    """What a field does. unit: of its value. planned, static: its effect under either policy; NOTHING where
    it has none, and setting it then warns with `instead`."""

    name: str
    unit: str
    planned: str
    static: str
    instead: str = ""


_PLANNER = "the planner decides; it is for policy='static'"

# In the order of the fields. docs/config.md is checked against it.
SETTINGS = (
    Setting("stagehand_enabled", "", NOTHING, NOTHING, "to run without stagehand, do not make a runtime"),
    Setting("pinned_pool_mb", "MiB", "most that the staging slabs of file-backed weights may take together",
            "as for the planner"),
    Setting("pinned_slab_mb", "MiB", "size of one staging slab; None: sized by the runtime", "as for the planner"),
    Setting("pinned_slab_alignment", "bytes", "slab sizes are rounded up to it, when pinned_slab_mb is set",
            "as for the planner"),
    Setting("vram_budget", "bytes or size", "most that parameters, buffers and places take on the device; None: "
            "vram_high_watermark_mb if that was set, else it is found ([budget.md](budget.md))", "as for the planner"),
    Setting("vram_high_watermark_mb", "MiB", "the budget, where vram_budget is None; no other effect",
            "counted as the budget is: where the next unit would take more, units are evicted; also the budget, where "
            "vram_budget is None"),
    Setting("vram_low_watermark_mb", "MiB", NOTHING,
            "counted as the budget is: units are evicted down to it; 3/4 of the high one where only that is set; where "
            "neither is, units leave only as places are needed", _PLANNER),
    Setting("max_inflight_transfers", "count", NOTHING, NOTHING,
            "copies are ordered on the device and need no limit"),
    Setting("copy_stream_priority", "", "priority of the copy streams, lower is more urgent",
            "as for the planner"),
    Setting("policy", "", "'planned': resident set, places and copy order are planned from the recorded order",
            "'static': fixed lookahead, watermarks, eviction by distance to next use x size"),
    Setting("prefetch_window_blocks", "units", NOTHING, "units prefetched", _PLANNER),
    Setting("eviction_cooldown_steps", "steps", NOTHING, NOTHING,
            "eviction looks at the distance to the next use instead"),
    Setting("strict_bf16", "", "with dtype=torch.bfloat16: a block output of another floating dtype is an error",
            "as for the planner"),
    Setting("fail_on_dtype_promotion", "",
            "with dtype=torch.bfloat16: a block output more precise than its input is an error",
            "as for the planner"),
    Setting("nan_inf_check", "", "NaN and Inf in the outputs of bfloat16 blocks are counted and warned of",
            "as for the planner"),
    Setting("telemetry_enabled", "", "False: no telemetry file and no log lines; counters stay. True, given without "
            "telemetry_file: that is stagehand_telemetry.jsonl in the working folder",
            "as for the planner"),
    Setting("telemetry_interval_steps", "steps", "a log line (logger 'stagehand', INFO) every so many steps",
            "as for the planner"),
    Setting("telemetry_file", "path", "JSON lines are appended to it, one a step; None: nothing is written",
            "as for the planner"),
    Setting("debug_trace", "", NOTHING, NOTHING, "telemetry_file records every step"),
    Setting("transfer", "",
            "'lossless': streamed weights cross the link in fewer bytes with every bit kept; 'auto': so, or as they "
            "are where compute is the bound (docs/lossless.md); "
            "'int8', 'fp8' or 'int4': those of Linear and convolutions in so few bits (docs/quantised-transfer.md); "
            "None or 'plain': as they are", "as for the planner"),
    Setting("trainables", "", "'auto', 'device' or 'host': where weights that take a gradient live "
            "([training.md](training.md#where-trained-weights-live))", "as for the planner"),
)


@remember_given
@dataclass
class StagehandConfig(Settings):
    """Settings of a StagehandRuntime. docs/config.md says what each does under either policy; a field that was
    set and has no effect warns when the runtime is made. Raises ValueError or TypeError naming the field."""

    stagehand_enabled: bool = True
    pinned_pool_mb: int = 8192
    pinned_slab_mb: int | None = None
    pinned_slab_alignment: int = 512
    vram_budget: int | str | None = None
    vram_high_watermark_mb: int = 22000
    vram_low_watermark_mb: int = 18000
    max_inflight_transfers: int = 2
    copy_stream_priority: int = -1
    policy: str = "planned"
    prefetch_window_blocks: int = 3
    eviction_cooldown_steps: int = 2
    strict_bf16: bool = True
    fail_on_dtype_promotion: bool = True
    nan_inf_check: bool = True
    telemetry_enabled: bool = True
    telemetry_interval_steps: int = 10
    telemetry_file: str | None = None
    debug_trace: bool = False
    transfer: str | None = None
    trainables: str = "auto"

    _TELEMETRY = WEIGHTS
    _RANGES = {"pinned_pool_mb": (1, BITS_31), "pinned_slab_mb": (1, BITS_31), "pinned_slab_alignment": (1, BITS_31),
               "vram_high_watermark_mb": (1, BITS_31), "vram_low_watermark_mb": (0, BITS_31),
               "max_inflight_transfers": (1, BITS_31), "prefetch_window_blocks": (0, BITS_31),
               "eviction_cooldown_steps": (0, BITS_31), "telemetry_interval_steps": (1, BITS_31),
               "copy_stream_priority": (-BITS_31, BITS_31)}

    # ------------------------------------------------------------------ checks

    def validate(self) -> None:
        """Checks every field as it is now."""
        super().validate()
        check_encoding(self.transfer)
        check_trainables(self.trainables)
        self._relations()

    def _relations(self) -> None:
        if self.policy not in ("planned", "static"):
            raise ValueError(f"StagehandConfig.policy is 'planned' or 'static', not {self.policy!r}")
        alignment = self.pinned_slab_alignment
        if alignment & (alignment - 1):
            raise ValueError(f"StagehandConfig.pinned_slab_alignment must be a power of two, not {alignment}")
        if self.pinned_slab_mb is not None and self.pinned_pool_mb % self.pinned_slab_mb:
            raise ValueError(
                f"StagehandConfig.pinned_pool_mb={self.pinned_pool_mb} is not evenly divisible by "
                f"pinned_slab_mb={self.pinned_slab_mb}")
        if self.was_set("vram_low_watermark_mb") and self.vram_low_watermark_mb >= self.vram_high_watermark_mb:
            raise ValueError(
                f"StagehandConfig.vram_high_watermark_mb={self.vram_high_watermark_mb} must be greater than "
                f"vram_low_watermark_mb={self.vram_low_watermark_mb}")
        self.budget_bytes()

    # ------------------------------------------------------------------ reading

    def was_set(self, name: str) -> bool:
        """Whether the user gave the field, or changed it since."""
        return name in self.__dict__.get("_given", ()) or getattr(self, name) != _DEFAULTS[name]

    def budget_bytes(self) -> int | None:
        """The budget in bytes; None: it is to be found."""
        budget = self.vram_budget
        if budget is None:
            return self.vram_high_watermark_mb * MIB if self.was_set("vram_high_watermark_mb") else None
        if isinstance(budget, bool) or not isinstance(budget, (int, str)):
            raise TypeError(f"StagehandConfig.vram_budget is bytes or a size such as '8GB', not {budget!r}")
        if isinstance(budget, str):
            try:
                budget = _core.parse_size(budget)
            except ValueError as error:
                raise ValueError(f"StagehandConfig.vram_budget: {error}") from error
        if budget <= 0:
            raise ValueError(f"StagehandConfig.vram_budget must be positive, not {self.vram_budget!r}")
        return budget

    def without_effect(self) -> list[tuple[str, str]]:
        """(field, what to do instead) of each field that was set and does nothing under this policy."""
        found = []
        for setting in SETTINGS:
            if getattr(setting, self.policy) == NOTHING and self.was_set(setting.name):
                found.append((setting.name, setting.instead))
        if self.policy == "planned" and self.vram_budget is not None and self.was_set("vram_high_watermark_mb"):
            found.append(("vram_high_watermark_mb", "vram_budget was given and counts"))
        budget = self.budget_bytes()
        if self.policy == "static" and budget is not None and self.was_set("vram_low_watermark_mb") and (
                self.vram_low_watermark_mb * MIB >= budget):
            found.append(("vram_low_watermark_mb", "it is not below the budget, so that 3/4 of the high one counts"))
        if self.pinned_slab_mb is None and self.was_set("pinned_slab_alignment"):
            found.append(("pinned_slab_alignment", "set pinned_slab_mb as well"))
        return found

    def warn_without_effect(self, stacklevel: int = 3) -> None:
        for name, instead in self.without_effect():
            warnings.warn(f"stagehand: StagehandConfig.{name} was set and has no effect with policy="
                          f"{self.policy!r}: {instead}", RuntimeWarning, stacklevel=stacklevel)

    def options(self) -> dict:
        """The core runtime's options that come from here alone."""
        options = {
            "policy": self.policy,
            "copy_priority": self.copy_stream_priority,
            "telemetry_path": self.telemetry_file if self.telemetry_enabled else None,
        }
        if self.policy == "static":
            options["prefetch_window"] = self.prefetch_window_blocks
            for option, name in (("high_watermark", "vram_high_watermark_mb"),
                                 ("low_watermark", "vram_low_watermark_mb")):
                if self.was_set(name):
                    options[option] = getattr(self, name) * MIB
        return options


_DEFAULTS = defaults_of(StagehandConfig)


def describe() -> str:
    """The table of docs/config.md."""
    lines = ["| field | default | unit | planned (default) | static |", "| --- | --- | --- | --- | --- |"]
    for s in SETTINGS:
        lines.append(f"| `{s.name}` | `{_DEFAULTS[s.name]!r}` | {s.unit} | {s.planned} | {s.static} |")
    return "\n".join(lines) + "\n"
