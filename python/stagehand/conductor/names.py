"""The numbers of the core as enums: one list, in stagehand/conductor.h."""

from __future__ import annotations

import enum

from .. import _core


def _numbers(name: str, key: str, doc: str):
    made = enum.IntEnum(name, {text: i for i, text in enumerate(_core.CONDUCTOR[key])}, module=__name__)
    made.__doc__ = doc
    return made


Phase = _numbers("Phase", "phases", "Phases of a step, in their order. STEP_END also stands for no step.")
Mode = _numbers("Mode", "modes", "Kinds of reservation; stagehand/conductor.h describes each.")
Priority = _numbers("Priority", "priorities", "The strongest first.")
Resource = _numbers("Resource", "resources", "Resources to reserve.")
Direction = _numbers("Direction", "directions", "Directions of the link.")
GrantStatus = _numbers("GrantStatus", "statuses", "The answer to a request for memory.")
DenialReason = _numbers("DenialReason", "denials", "Why a request was denied, or granted in part.")


class AcquireStatus(str, enum.Enum):
    """The answer to a request for a transfer. DEFERRED: no slot is free now; DENIED: not in this phase, or never."""

    ACQUIRED = "acquired"
    DENIED = "denied"
    DEFERRED = "deferred"


def number_of(kind, value, what: str):
    """A member of the enum, from itself or from its name. Raises ValueError that lists them."""
    if isinstance(value, kind):
        return value
    if isinstance(value, str) and value.upper() in kind.__members__:
        return kind[value.upper()]
    raise ValueError(f"{what} is one of {', '.join(kind.__members__)}, not {value!r}")
