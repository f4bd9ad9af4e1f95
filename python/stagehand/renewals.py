"""Copies that stay on the device for the next step are made anew while an optimizer works on: docs/optim.md."""

from __future__ import annotations

from . import sessions


class Renewals:
    """Which units of the sessions that are open wait for which updates.

    params: those that an optimizer is updating. mastered: tells of one whether its bytes are those of a master of the
        optimizer's; a unit with an update of another kind is left alone.
    """

    def __init__(self, params, mastered) -> None:
        self._waiting: dict[int, list[tuple]] = {}  # id(parameter) -> (session, unit, ids whose updates are not done)
        for session in sessions.opened():
            found: dict[int, tuple] = {}  # id(unit) -> (session, unit, ids)
            for param in params:
                unit = session.unit_of(param)
                if unit is None:
                    continue
                waits = found.setdefault(id(unit), (session, unit, set()))
                waits[2].add(id(param) if mastered(param) else None)  # None is never done
                self._waiting.setdefault(id(param), []).append(waits)

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def updated(self, param) -> None:
        """Its update is done, and no unit of it is written before its next use."""
        for session, unit, ids in self._waiting.get(id(param), ()):
            ids.discard(id(param))
            if not ids:
                session.renew_at_once(unit)
