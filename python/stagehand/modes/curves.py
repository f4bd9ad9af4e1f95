"""Step times over budgets, before anything runs."""

from __future__ import annotations

import json

from ..arguments import check
from ..errors import StagehandError


class Curve(list):
    """One dict for each budget, ascending: "budget" in bytes; "step_ms", "compute_ms", "link_ms" and "stall_ms";
    "bytes_per_step", "resident_bytes", "ring_bytes"; "bound_by"; and "present", of the budget in force. Printed it is
    a table; in a notebook, a picture. svg: that picture, str."""

    def __init__(self, text: str, points: list[dict], svg: str) -> None:
        super().__init__(points)
        self._text, self.svg = text, svg

    def __str__(self) -> str:
        return self._text

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.svg

    def json(self) -> str:
        """The points as a JSON array."""
        return json.dumps(list(self))


def curve_of(session, points: int) -> Curve:
    check("points", points, "integer")
    if not session.streaming:
        raise StagehandError(f"all weights of {session.name} stay on the device: a larger budget changes nothing; "
                             "give a smaller one")
    session.steps.close_finished_step()
    text, found, svg = session.core.curve(points)
    return Curve(text, json.loads(found), svg)
