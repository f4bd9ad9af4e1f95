"""What streams and what stays. Nothing of the model is touched here."""

from __future__ import annotations

from dataclasses import dataclass

from .._torch import torch
from ..errors import StagehandError
from ..weights.fileweight import Unheld
from ..weights.guarded import other_offloading
from ..weights.hooks import ManagedForward, ModulePlan
from ..weights.units import Storages, Unit, full_name, owned, plain_reason
from ..weights.wrapping import Wrapping, inside_of, wraps, wrapping_reason

nn = torch.nn


def will_cast(param, dtype: torch.dtype | None) -> bool:
    """Whether a model that is wrapped with this dtype has the parameter cast to it."""
    return (dtype is not None and not isinstance(param, Unheld) and param.is_floating_point()
            and param.dtype != dtype and type(param.data) is torch.Tensor)


@dataclass
class Weight:
    """A parameter that may stream. kind: how it streams from a file, "" where it does not. entry: of a unit of its own,
    of so many bytes."""

    name: str
    module: nn.Module  # in whose unit it is
    group: str
    param: torch.Tensor
    kind: str
    entry: object
    bytes: int


def is_list(module) -> bool:
    """Whether it has parameters and no forward: a loop reads them one by one, from outside."""
    return type(module).forward is nn.Module.forward


class Choosing:
    """A session's units and plans, made from its targets, and the names of weights that stay.

    What may stream is known at once (`weights`); which of it streams, and in which units, the core says (needs.py).
    """

    # Of its session.
    USES = """dtype inference_mode model source"""

    def __init__(self, session, targets: list, map_embeddings: bool) -> None:
        self._session = session
        self._model = session.model
        self._source = session.source
        self._targets = targets
        self._map_embeddings = map_embeddings
        self.weights: list[Weight] = []
        self.weight_of: dict[int, int] = {}  # id(parameter) -> number of its weight; twins have one
        self.units: list[Unit] = []
        self.plans: dict[int, ModulePlan] = {}  # id(module) -> plan
        self.kept: dict[str, str] = {}  # parameter name -> why it stays on the device
        self._refuse_overlap()
        if self._source is not None:
            self._source.let_go(self._source.written())
        self._find_weights(self.storages())

    def _find_weights(self, storages) -> None:
        """In the order of the targets."""
        for name, module, group in self._targets:
            for key, param in module._parameters.items():
                if param is None or id(param) in self.weight_of:
                    continue
                reason = self._stays(module, param, storages)
                if reason:
                    self.note(full_name(name, key), reason)
                    continue
                for owner in (param, *(() if wraps(param) else storages.twins(param))):
                    self.weight_of[id(owner)] = len(self.weights)
                kind = "" if self._source is None else self._source.kind(param)
                unit = Unit(full_name(name, key), group)
                entry = self._lay(unit, unit.name, param)
                self.weights.append(Weight(unit.name, module, group, param, kind, entry, unit.nbytes))

    def settle(self, numbers: list) -> None:
        """Makes units and plans. numbers: for each weight that of its unit, None where it stays."""
        storages, entry_of, named = self.storages(), [], set()  # named: ids of modules that have a unit of their name
        names = {id(module): name for name, module, _ in self._targets}
        for weight, number in zip(self.weights, numbers):
            if number is None:
                entry_of.append(None)
                continue
            if number == len(self.units):
                alone = is_list(weight.module) or id(weight.module) in named
                name = names[id(weight.module)] or type(weight.module).__name__
                named.add(id(weight.module))
                self.units.append(Unit(weight.name if alone else name, weight.group, in_file=weight.kind != "",
                                       packed=weight.kind == "packed"))
            entry = self._lay(self.units[number], weight.name, weight.param)
            if not wraps(weight.param):
                entry.twins = storages.twins(weight.param)
            entry_of.append((self.units[number], entry))
        self._note_small(numbers)
        self._plan_owners(entry_of)
        self.weights, self.weight_of, self._targets = [], {}, []  # parameters that others replace are not kept alive

    def _lay(self, unit: Unit, name: str, param):
        """The parameter's entry in a unit, with the dtype that it is going to have."""
        if wraps(param):
            return Wrapping(unit, name, param)
        return unit.add(name, param, dtype=self._session.dtype if will_cast(param, self._session.dtype) else None)

    def _note_small(self, numbers: list) -> None:
        for name, module, _ in self._targets:
            for key, param in module._parameters.items():
                number = self.weight_of.get(id(param))
                if number is not None and numbers[number] is None:
                    self.note(full_name(name, key), "it is small")

    def owners(self) -> list[tuple]:
        """(module, parameter name, number of the weight) of everything that owns one: the targets, and others that are
        tied to them (a head)."""
        return [(module, key, self.weight_of[id(param)]) for _, module, key, param in owned(self._model)
                if id(param) in self.weight_of]

    def set_aside(self, unit: Unit) -> None:
        """No plan has the unit any more."""
        self.units.remove(unit)
        for plan in self.plans.values():
            for key in [key for key, (other, _) in plan.managed.items() if other is unit]:
                del plan.managed[key]

    def take_in(self, unit: Unit, owners: list[tuple]) -> None:
        """Plans have the unit again. owners: (module, key, entry) of each weight in it. Modules that have no plan are
        left to the session's look at its model."""
        self.units.append(unit)
        for module, key, entry in owners:
            if id(module) in self.plans:
                self.plans[id(module)].managed[key] = unit, entry

    def note(self, name: str, reason: str) -> None:
        """A parameter or buffer stays. The first reason counts."""
        self.kept.setdefault(name, reason)

    def note_anew(self, name: str, reason: str | None) -> None:
        """It stays for another reason now; None: it streams."""
        if reason is None:
            self.kept.pop(name, None)
        else:
            self.kept[name] = reason

    def add_plan(self, name: str, module, managed: dict) -> ModulePlan:
        """A module came to own weights that stream: key -> (unit, entry)."""
        plan = ModulePlan(self._session, name, module)
        plan.managed.update(managed)
        self.plans[id(module)] = plan
        return plan

    def storages(self) -> Storages:
        """Of the model as it is now."""
        params = [p for _, _, _, p in owned(self._model)]
        return Storages(params, [*self._model.buffers(), *inside_of(params)])

    def _refuse_overlap(self) -> None:
        for name, module in self._model.named_modules():
            if isinstance(module.__dict__.get("forward"), ManagedForward):
                raise StagehandError(f"{name or 'this model'} is under stagehand already; call shutdown() on its "
                                     "runtime first", object=name)

    def _plan_owners(self, entry_of: list) -> None:
        """Every module that owns a managed parameter leases its unit. entry_of: (unit, entry) of each weight."""
        for name, module, key, param in owned(self._model):
            found = entry_of[self.weight_of[id(param)]] if id(param) in self.weight_of else None
            if found is not None:
                plan = self.plans.setdefault(id(module), ModulePlan(self._session, name, module))
                plan.managed[key] = found
        for plan in self.plans.values():
            for unit, entry in plan.managed.values():
                unit.mapped = unit.mapped or self.may_map(plan.module, unit)

    def _stays(self, module, param, storages) -> str:
        reason = wrapping_reason(param, storages, self._session.inference_mode) if wraps(param) else plain_reason(param)
        if not reason and not wraps(param) and storages.entangled(param):
            reason = "it shares memory with another tensor of the model"
        if not reason and isinstance(module, torch.jit.ScriptModule):
            reason = "its module is compiled by TorchScript"
        if not reason and getattr(module, "max_norm", None) is not None:
            reason = "its forward changes it (max_norm)"
        return reason

    def looks_up(self, module) -> bool:
        """Whether the module looks up rows of its weight in host memory, where that is all of a unit in RAM."""
        return bool(self._map_embeddings and type(module) is nn.Embedding and not module.sparse)

    def may_map(self, module, unit) -> bool:
        """Whether the module looks up rows of the unit in host memory."""
        return self.looks_up(module) and len(unit.entries) == 1 and not unit.in_file and not unit.wrapping

    def streamed(self) -> list:
        """Units that are used as a whole."""
        return [unit for unit in self.units if self.is_streamed(unit)]

    def is_streamed(self, unit: Unit) -> bool:
        """Whether a unit is ever used as a whole: not so a table of which embeddings alone look up rows."""
        if not unit.mapped:
            return True
        owners = [p for p in self.plans.values() if any(u is unit for u, _ in p.managed.values())]
        looked_up = all(self.may_map(p.module, unit) for p in owners)
        return not looked_up or (unit.writable and not self._session.inference_mode)

    def check(self) -> None:
        """What can be known before anything is touched: values, and the budget."""
        for name, module, key, param in owned(self._model):
            if param.is_meta:
                self._refuse_meta(full_name(name, key))
        for name, buffer in self._model.named_buffers():
            if buffer.is_meta:
                self._refuse_meta(name)

    def _refuse_meta(self, name: str) -> None:
        raise StagehandError(f"{name} is on the meta device: it has no values to run with"
                             f"{other_offloading(self._model)}", object=name)
