"""What a session cannot do without on the device, and so the smallest budget: known before anything is touched.

    needs = what stays there + stages, where bytes cross the link packed + places
    places: units that a module holds while modules inside it use theirs, kept on the device, and the largest of the
        rest; or, where that is less, room for a unit beside those that are held, wherever they lie

All of it depends on the budget: small weights stay as far as a share of it holds them, packed bytes come in pieces that
are a share of it. So the smallest budget is found by asking again with what the one before was short of.
"""

from __future__ import annotations

from .. import _core
from .._torch import torch
from ..errors import StagehandOOMError
from ..weights import relocate
from ..weights.relocate import held_bytes
from ..weights.units import round_up
from .choosing import will_cast

nn = torch.nn

HELD_SHARE = 4  # weights held while others are used stay on the device if they take at most 1/4 of the budget


class Needs:
    """What a session cannot do without on the device."""

    # Of its session.
    USES = """again budget choice.small choice.streamed dtype needs.least options plans quantised
        tables.beside tables.layer_bytes tables.least_bytes tables.nbytes tables.take_share
        takeover.unmanaged"""

    def __init__(self, session) -> None:
        self._session = session
        self._choice = session.choice
        self._plans = session.plans
        self._quantised = session.quantised
        self._tables = session.tables
        self.least_room = 0  # bytes that units need which are leased while others are held; 0: the largest is enough
        self.keeps: frozenset = frozenset()  # ids of units that are kept on the device

    @property
    def _static(self) -> bool:
        return self._session.options.get("policy") == "static"

    def _streamed(self) -> list:
        """Units that are used as a whole, and so have places."""
        return self._tables.beside(self._choice.streamed())

    def comfortable(self) -> int:
        """A budget that lets it work: what stays, stages, and three of the largest unit."""
        stays, streamed = self._stays_bytes(), self._streamed()
        stages = self._quantised.stage_bytes(self._session, streamed)
        units = max(self._places(streamed), 3 * _largest_of_units(streamed))
        return stays + stages + units + self._tables.layer_bytes()

    def check(self) -> None:
        """StagehandOOMError with the smallest budget that works; or settles what is kept, and what the core is
        asked."""
        stays, streamed = self._stays_bytes(), self._streamed()
        if self._least(stays, streamed) > self._session.budget:
            self._refuse_budget(stays, streamed)
        beside = stays + self._quantised.stage_bytes(self._session, streamed)
        self._tables.take_share(_total(streamed), self._places(streamed), beside)
        room = self._session.budget - beside - self._tables.nbytes
        outer, whole, apart = self._ways(streamed)
        keeps = whole <= room and (_total(outer) * HELD_SHARE <= room or apart > room)
        self.keeps = frozenset(map(id, outer if keeps else ()))
        self.least_room = min(whole if keeps else apart, _total(streamed))

    def _refuse_budget(self, stays: int, streamed: list) -> None:
        budget, largest = self._session.budget, max(streamed, key=lambda unit: unit.nbytes, default=None)
        what = f"unit '{largest.name}' needs {largest.nbytes} bytes there, and " if largest else ""
        raise StagehandOOMError(
            f"the budget of {_core.format_size(budget)} ({budget} bytes) on the device is too small: "
            f"{what}{stays} bytes stay there all the time; the smallest budget that can work is "
            f"{self._smallest()} bytes", "BUDGET_TOO_SMALL", largest.name if largest else "budget")

    def _smallest(self) -> int:
        budget, needs = self._enough(self._session)
        while needs < budget:  # with more of it small weights stay, which nothing is held for then
            less, needs = self._enough(self._session.again(needs))
            if less >= budget:
                break
            budget = less
        return budget

    @staticmethod
    def _enough(session) -> tuple[int, int]:
        """A budget that is enough, from the session's upwards, and what it then needs."""
        needs = session.needs.least()
        while needs > session.budget:
            session = session.again(needs)
            needs = session.needs.least()
        return session.budget, needs

    def least(self) -> int:
        """The least budget with the units as they are."""
        return self._least(self._stays_bytes(), self._streamed())

    def _least(self, stays: int, streamed: list) -> int:
        places = self._places(streamed)
        stays += self._tables.least_bytes
        least = stays + self._quantised.stage_bytes(self._session, streamed) + places
        if not any(unit.packed for unit in streamed):  # where all fits nothing crosses packed
            least = min(least, stays + _total(streamed))
        return max(least, stays + 1)

    def _places(self, streamed: list) -> int:
        _, whole, apart = self._ways(streamed)
        return min(whole, apart, _total(streamed))

    def _ways(self, streamed: list) -> tuple[list, int, int]:
        """Units that a module holds while modules inside it use theirs; bytes of places when these are kept on the
        device, for one that is held in the middle of the ring is in the way of what streams round it; when they are
        not."""
        around = [plan for plan in self._plans.values() if next(self._inside(plan), None) is not None]
        ids = {id(unit) for plan in around for unit, _ in plan.managed.values()}
        outer = [unit for unit in streamed if id(unit) in ids]
        apart = self._room(streamed)
        if self._static:  # which keeps nothing, and has one extent
            return outer, apart, apart
        return outer, _total(outer) + self._room([unit for unit in streamed if id(unit) not in ids]), apart

    def _inside(self, plan):
        """Plans of modules inside the plan's."""
        parts = (part for part in plan.module.modules() if part is not plan.module)
        return (self._plans[id(part)] for part in parts if id(part) in self._plans)

    def _room(self, units: list) -> int:
        """In which the largest finds a place, and each one beside those that are held round it, wherever they lie: a
        held one parts what is free in two, and, where there are several, its extent of memory from the rest."""
        there = {id(unit): unit.nbytes for unit in units}
        held: dict[int, list[int]] = {}  # id(plan) -> bytes of each round it
        for plan in self._plans.values():
            nbytes = self._leased_by(plan, there)
            for inner in self._inside(plan) if nbytes else ():
                held.setdefault(id(inner), []).append(nbytes)
        most, apart = _largest_of_units(units), 1 if self._static else 2
        for plan in self._plans.values():
            around, nbytes = held.get(id(plan), ()), self._leased_by(plan, there)
            parts = 1 + apart * len(around)
            if _is_list(plan.module):  # a loop over it has the next before it lets go of one, and keeps the last
                parts += 2  # they are mostly of one size: a place of one serves another
            most = max(most, sum(around) + parts * nbytes if parts > 1 else 0)
        return most

    def _leased_by(self, plan, there: dict[int, int]) -> int:
        """Bytes that a module leases, with those of its small weights, whether these stay or not."""
        sizes = {id(unit): there[id(unit)] for unit, _ in plan.managed.values() if id(unit) in there}
        if not sizes or _is_list(plan.module):  # whose weights are read one by one, from outside
            return max(sizes.values(), default=0)
        return sum(sizes.values()) + sum(self._held_bytes(param) for param in plan.module._parameters.values()
                                         if id(param) in self._choice.small)

    def _stays_bytes(self) -> int:
        """Of what is outside the places, with the dtypes that it is going to have."""
        items, cast = [], {}
        for item in self._session.takeover.unmanaged():
            param = getattr(item.put, "param", None)  # buffers keep their dtypes
            if param is not None and will_cast(param, self._session.dtype):
                cast[param.data_ptr(), param.shape, param.stride(), param.dtype] = self._held_bytes(param)
            else:
                items.append(item)
        return relocate.total_bytes(items) + sum(cast.values())

    def _held_bytes(self, param) -> int:
        dtype = self._session.dtype
        return round_up(param.numel() * dtype.itemsize) if will_cast(param, dtype) else held_bytes(param)


def _is_list(module) -> bool:
    """Whether it has parameters and no forward."""
    return type(module).forward is nn.Module.forward


def _largest_of_units(units: list) -> int:
    return max((unit.nbytes for unit in units), default=0)


def _total(units: list) -> int:
    return sum(unit.nbytes for unit in units)
