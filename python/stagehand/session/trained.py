"""Where trained weights live: the small ones on the device, as plain parameters (docs/training.md).

The core prices each (stagehand/trainables.h). One that lives on the device has a unit that is idle: room in the host
image and a number in the core, so that it can stream when the budget has no room for it any more. It changes its home
before a pass, and while no backward can reach it.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from .. import _core
from .._torch import torch
from ..errors import StagehandOOMError
from ..weights import relocate
from ..weights.hooks import is_for_a_call
from ..weights.units import Entry, Unit, full_name, round_up

MODES = ("auto", "device", "host")
MEASURED = 8 << 20  # bytes of a copy that tells the link's rate


@dataclass
class _Owner:
    """A module that has one of these weights as its own, under `key`. place: the dictionary of modules that it is in,
    and its name there; None of the model itself."""

    name: str
    module: torch.nn.Module
    place: tuple | None
    key: str
    entry: Entry

    def has_it(self) -> bool:
        """Whether the weight is still there, as far as the module and its place tell."""
        there = self.place is None or self.place[0].get(self.place[1]) is self.module
        return there and dict.get(self.module._parameters, self.key) is self.entry.param

    def lends_it(self) -> bool:
        """Whether something else is there for the time of a call."""
        return is_for_a_call(self.module._parameters, self.key)


def check_trainables(value) -> str:
    """ValueError for what says nowhere to live."""
    if value not in MODES:
        raise ValueError(f"trainables must be one of {', '.join(map(repr, MODES))}, not {value!r:.200}")
    return value


class Trained:
    """A session's trained weights: which of them live on the device, and their ways between there and the host."""

    # Of its session.
    USES = """budget choice.note_anew choice.set_aside choice.take_in core images.is_shared images.put inference_mode
        mark_trained model needs.room_for plans quantised regions.look_again stay.away stay.reserved steps.backwards
        steps.graphs_alive steps.passing streaming tables.has takeover.leave_plans_without_weights takeover.to_device
        takeover.to_host target units unlist writes.count_anew writes.look_at_owners"""

    def __init__(self, session, mode: str) -> None:
        self._session = session
        self._mode = mode
        self.idle: list[Unit] = []  # units whose weights live on the device
        self._owners: dict[int, list[_Owner]] = {}  # id(unit) -> those of its weights
        self._homes: dict[str, str] = {}  # name of a trained weight -> key of _core.HOMES
        self._due = False  # it is to be decided again
        self.outgrown = False  # one of them is kept there: its data has another dtype or shape than its unit
        self._lacked = 0  # the budget in which leases needed the room of gradients and states
        self._link = 0.0  # bytes/s, measured; 0: not known
        self._reducers: weakref.WeakSet = weakref.WeakSet()  # DistributedDataParallel that has buckets for them

    # ------------------------------------------------------------------ deciding

    def choose(self) -> None:
        """The session is about to open: weights that are to live on the device leave its plans."""
        units = self._candidates()
        there = self._decide(units, self._session.budget)
        for unit in units:
            if id(unit) in there:
                self._leave(unit)

    def seen(self, entry) -> None:
        """A weight that streams is used with a gradient, for the first time."""
        self._due = self._due or entry.name not in self._homes

    def stay_for(self, reducer) -> None:
        """No weight changes its home while this object lives."""
        self._reducers.add(reducer)

    def bring_home(self, params: list) -> None:
        """Weights, of these, that live on the device live on the host from now on, if no backward can reach them. Under
        the step lock."""
        wanted = {id(param) for param in params}
        units = [unit for unit in self.idle if any(id(entry.param) in wanted for entry in unit.entries)]
        if units and not self._session.stay.away and not self._is_reached():
            self._to_host(units)
            self._homes.update((entry.name, "ROOM") for unit in units for entry in unit.entries)

    def budget_changed(self) -> None:
        """The session's budget is another one."""
        self._due = True

    def settle(self) -> None:
        """Before a pass: weights change their homes, if there is a reason and no backward can reach them. Those that
        the model has no more are forgotten. Under the step lock."""
        session = self._session
        if self.idle and not session.stay.away:
            if session.core.reserved < session.stay.reserved:
                self._lacked, self._due = session.budget, True
            self._due = self._due or not all(owner.has_it() for unit in self.idle for owner in self._owners[id(unit)])
        if self._due and session.streaming and not self._is_reached():
            self._due = False
            if self._forget_those_that_are_gone():
                session.writes.count_anew()
            units = self._candidates()
            self._move(units, self._decide(units, session.budget))

    def fit(self, budget: int) -> None:
        """The budget is about to be this one: weights that it has no room for go to the host. Under the step lock."""
        if self.idle and budget < self._session.budget and self._session.streaming and not self._is_reached():
            self._forget_those_that_are_gone()
            there = self._decide(list(self.idle), budget)
            self._to_host([unit for unit in self.idle if id(unit) not in there])

    def give_way(self) -> bool:
        """What stays on the device has no room beside these weights in the budget: they go to the host, until the
        budget grows. False: there are none, or a backward can reach them. Under the step lock."""
        session = self._session
        if not self.idle or not session.streaming or self._is_reached():
            return False
        self._lacked = session.budget
        self._forget_those_that_are_gone()
        units = self._candidates()
        self._move(units, self._decide(units, session.budget))
        return True

    def let_go(self) -> None:
        """The session has ended: nothing of the host's memory is kept for weights that lived on the device."""
        for unit in self.idle:
            unit.arena = None

    def homes(self) -> dict[str, dict]:
        """For each trained weight of what is managed: {"home": "device" or "host", "why": text}."""
        return {name: {"home": "device" if home == "DEVICE" else "host", "why": _core.HOMES[home]}
                for name, home in self._homes.items()}

    def _is_reached(self) -> bool:
        """Whether a graph can reach the weights, DistributedDataParallel has buckets for them, or functional_call has
        others in their places."""
        steps, plans = self._session.steps, self._session.plans.values()
        return bool(self._reducers or steps.passing or steps.backwards or steps.graphs_alive()
                    or any(owner.lends_it() for owners in self._owners.values() for owner in owners)
                    or any(is_for_a_call(plan.masters, key) for plan in plans for key in plan.replaced))

    def _candidates(self) -> list[Unit]:
        """Units that are trained as a whole, those whose weights live on the device among them."""
        session = self._session
        if self._mode == "host" or session.inference_mode:
            return []
        replaced = {id(unit) for plan in session.plans.values() for unit, _ in plan.replaced.values()}
        found = self.idle + [unit for unit in session.units if id(unit) not in replaced and self._may_live_there(unit)]
        # Where nothing is frozen all of the model is trained, or it only runs: nobody says so.
        if self._mode == "auto" and found and all(param.requires_grad for param in session.model.parameters()):
            return list(self.idle)
        return found

    def _may_live_there(self, unit: Unit) -> bool:
        session = self._session
        plain = not (unit.in_file or unit.mapped or unit.wrapping or session.quantised.of(unit)
                     or session.tables.has(unit))
        return plain and all(type(entry) is Entry and entry.param.requires_grad and not entry.twins
                             and not entry.is_cast and not entry.is_lasting()
                             and not session.images.is_shared(unit, entry) for entry in unit.entries)

    def _decide(self, units: list[Unit], budget: int) -> set[int]:
        """The ids of units, of these, whose weights are to live on the device."""
        if not units:
            self._homes = {}
            return set()
        if budget <= self._lacked:
            homes = ["ROOM"] * len(units)
        else:
            room, slack = self._session.needs.room_for(units, budget, self._mode == "auto")
            homes, _ = _core.choose_trainables([_sizes(unit) for unit in units], room=room, slack=slack,
                                               link_bytes_per_s=self._link_rate(), wanted=self._mode == "device")
        self._homes = {entry.name: home for unit, home in zip(units, homes) for entry in unit.entries}
        return {id(unit) for unit, home in zip(units, homes) if home == "DEVICE"}

    def _link_rate(self) -> float:
        target = self._session.target
        if not self._link and not target.simulated:
            try:
                self._link = target.core.measure_h2d(MEASURED, repeats=3)
            except StagehandOOMError:  # the core's default
                return 0.0
        return self._link

    def taken(self) -> int:
        """Bytes on the device of weights that live there, their gradients and their states."""
        return sum(sum(_sizes(unit)) for unit in self.idle)

    def beside(self) -> int:
        """Bytes on the device of gradients and states of weights that live there."""
        return sum(sum(_sizes(unit)[1:]) for unit in self.idle)

    def could_take(self) -> int:
        """Bytes that weights on the host would take on the device with a larger budget."""
        idle = {id(unit) for unit in self.idle}
        return sum(sum(_sizes(unit)) for unit in self._candidates() if id(unit) not in idle)

    # ------------------------------------------------------------------ between the device and the host

    def _move(self, units: list[Unit], there: set[int]) -> None:
        idle = {id(unit) for unit in self.idle}
        self._to_host([unit for unit in self.idle if id(unit) not in there])
        self._to_device([unit for unit in units if id(unit) in there and id(unit) not in idle])

    def _to_host(self, units: list[Unit]) -> None:
        """Those whose data the program has exchanged for data of another dtype or shape stay, until the model is taken
        over again."""
        session = self._session
        asked, units = len(units), list(filter(_fits, units))
        self.outgrown = self.outgrown or len(units) < asked
        if not units:
            return
        with torch.inference_mode(False), torch.no_grad():
            params = [entry.param for unit in units for entry in unit.entries]
            session.takeover.to_host(params)
            for unit in units:
                self._join(unit)
                for entry in unit.entries:
                    session.images.put(unit, entry)
                session.core.mark_written(unit.index)
            self._settle_in()

    def _to_device(self, units: list[Unit]) -> None:
        session = self._session
        if not units:
            return
        with torch.inference_mode(False), torch.no_grad():
            for unit in units:
                self._leave(unit)
            try:
                self._settle_in()
                session.takeover.to_device([entry.param for unit in self._idle_of(units) for entry in unit.entries])
            except StagehandOOMError:  # others have the memory
                self._to_host(self._idle_of(units))

    def _idle_of(self, units: list[Unit]) -> list[Unit]:
        """Those of them that have not given way meanwhile."""
        idle = {id(unit) for unit in self.idle}
        return [unit for unit in units if id(unit) in idle]

    def _settle_in(self) -> None:
        """After moves: what else of the session knows where weights live."""
        session = self._session
        session.writes.look_at_owners()
        session.mark_trained()
        session.writes.count_anew()
        session.regions.look_again(True)

    def _leave(self, unit: Unit) -> None:
        """Its modules have its weights as their own. Nothing is moved."""
        session = self._session
        owners = self._owners[id(unit)] = []
        for plan in session.plans.values():
            for key in [key for key, (other, _) in plan.managed.items() if other is unit]:
                owners.append(_Owner(plan.name, plan.module, self._place_of(plan), key, plan.managed[key][1]))
                session.choice.note_anew(full_name(plan.name, key), _core.HOMES["DEVICE"])
        session.choice.set_aside(unit)
        session.takeover.leave_plans_without_weights()
        for entry in unit.entries:
            session.unlist(id(entry.param))
        self.idle.append(unit)

    def _place_of(self, plan) -> tuple | None:
        above, _, name = plan.name.rpartition(".")
        return (self._session.model.get_submodule(above)._modules, name) if name else None

    def _join(self, unit: Unit) -> None:
        """Its weights stream. Nothing is moved."""
        self.idle.remove(unit)
        owners = self._owners.pop(id(unit))
        for owner in owners:
            self._session.choice.note_anew(full_name(owner.name, owner.key), None)
        self._session.choice.take_in(unit, [(owner.module, owner.key, owner.entry) for owner in owners])

    def _forget_those_that_are_gone(self) -> bool:
        """Of adapters that were deleted or replaced: the core keeps a number for each, and nothing more."""
        gone = [unit for unit in self.idle if not all(owner.has_it() for owner in self._owners[id(unit)])]
        for unit in gone:
            self.idle.remove(unit)
            for owner in self._owners.pop(id(unit)):
                self._session.choice.note_anew(full_name(owner.name, owner.key), None)
        return bool(gone)


def _fits(unit: Unit) -> bool:
    """Whether its weights are those that it was made for."""
    return all(entry.param.dtype is entry.dtype and entry.param.shape == entry.shape for entry in unit.entries)


def _sizes(unit: Unit) -> tuple[int, int, int]:
    """Bytes on the device of its weights, of their gradients and of an optimizer's state."""
    elements = sum(entry.param.numel() for entry in unit.entries)
    return unit.nbytes, unit.nbytes, round_up(_core.TRAINABLE_STATE_BYTES * elements)
