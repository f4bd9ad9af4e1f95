"""The policy's hints: what the three rules made of the phase, the memory in use and the slots."""

from __future__ import annotations

from dataclasses import dataclass, field

from .. import _core
from ..owning import NotCopied


@dataclass
class RuntimeLimitHints:
    """Limits for the runtimes. Within a step numbers only fall, and suppress_speculative only becomes True.
    block_precision_map: block -> precision, handed on as the policy has it."""

    max_inflight_h2d: int
    max_inflight_d2h: int
    prefetch_window_cap: int
    suppress_speculative: bool = False
    block_precision_map: dict = field(default_factory=dict)


class HeuristicPolicyBridgeV0(NotCopied):
    """Hints from three rules, in the core: in BACKWARD above 80 % of the soft cap speculation stops and windows are 1;
    in OPTIMIZER speculation stops and one copy to the device is under way at once; where more than three checks in a
    row find every slot taken, windows shrink by one a check, down to 1."""

    def __init__(self, core: _core.Conductor) -> None:
        self._core = core
        self.block_precision_map: dict = {}

    def hints(self) -> RuntimeLimitHints:
        return RuntimeLimitHints(**self._core.hints(), block_precision_map=dict(self.block_precision_map))

    def set_window(self, units: int) -> None:
        """The prefetch window that hints start a step with."""
        self._core.set_window(units)
