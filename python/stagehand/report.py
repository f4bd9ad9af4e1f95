"""What runtimes tell: sizes from the user, statistics for the user."""

from __future__ import annotations

import enum

from . import _core
from .arguments import MOST, check
from .errors import InvalidArgumentError, StagehandError

BlockState = enum.Enum("BlockState", {name.upper(): name for name in _core.UNIT_STATES}, type=str)
BlockState.__doc__ = "States of a unit, as in unit_stats()['state']."


def budget_bytes(value, name: str) -> int | None:
    """Bytes from an int or a size string; ValueError names the argument."""
    if value is None:
        return None
    check(name, value, "size", none=True)
    try:
        size = _core.parse_size(value) if isinstance(value, str) else value
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{name}: {error}", "INVALID_ARGUMENT", name) from error
    if not 0 < size <= MOST:
        raise ValueError(f"{name} must be positive and of 63 bits, not {value!r}")
    return size


def runtime_stats(session) -> dict:
    """Counters of the core, the units' records, and the newest step's metrics."""
    if session.core is None:
        raise StagehandError("the runtime was never opened: run a step, or call prepare(), first")
    stats = session.core.stats() if not session.closed else dict(session.last_stats)
    if not session.closed:
        stats["units"] = [session.core.unit_stats(u.index) for u in session.units if u.index >= 0]
        stats["files"] = session.core.files()
        stats["last_step"] = session.core.metrics(0)
        arenas = session.arenas()
        stats["host_bytes"] = sum(arena.bytes for arena in arenas)
        stats["host_found_bytes"] = sum(arena.found_bytes for arena in arenas)
        stats["pinned_bytes"] = (sum(arena.pinned_bytes for arena in arenas) + stats["staging_bytes"]
                                 + stats["ram_pinned_bytes"])
        stats["quantised"] = session.quantised.report(session)
        stats["moved_to_ram"] = dict(session.images.moved_to_ram)
        stats["reserved_bytes"] = session.stay.reserved
        stats["trained_bytes"] = session.trained.taken()
        stats["budget"] = session.budget
        stats["experts"] = experts = session.tables.report()
        if experts is not None:
            stats["file_bytes"] += experts["file_bytes"]
            stats["ram_bytes"] += experts["ram_bytes"]
            stats["pinned_bytes"] += experts["ram_pinned_bytes"]
        stats["budget_found"] = session.finding.report() if session.finding is not None else None
    return stats
