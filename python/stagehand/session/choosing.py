"""What streams and what stays. Nothing of the model is touched here."""

from __future__ import annotations

from .._torch import torch
from ..errors import StagehandError
from ..weights.fileweight import FileWeight
from ..weights.guarded import other_offloading
from ..weights.hooks import ManagedForward, ModulePlan
from ..weights.relocate import held_bytes
from ..weights.units import Storages, Unit, full_name, owned, plain_reason
from ..weights.wrapping import Wrapping, inside_of, wraps, wrapping_reason

nn = torch.nn

SMALL_SHARE = 8  # vectors and scalars stay on the device as far as 1/8 of the budget holds them
SMALL_BYTES = 4096


def stays_if_it_can(param: torch.Tensor) -> bool:
    """Whether it is small: kept on the device where the share of the budget for such ones holds it."""
    return param.dim() <= 1 or held_bytes(param) <= SMALL_BYTES


def will_cast(param, dtype: torch.dtype | None) -> bool:
    """Whether a model that is wrapped with this dtype has the parameter cast to it."""
    return (dtype is not None and not isinstance(param, FileWeight) and param.is_floating_point()
            and param.dtype != dtype and type(param.data) is torch.Tensor)


class Choosing:
    """A session's units and plans, made from its targets, and the names of weights that stay."""

    # Of its session.
    USES = """budget inference_mode model source"""

    def __init__(self, session, targets: list, map_embeddings: bool) -> None:
        self._session = session
        self._model = session.model
        self._source = session.source
        self._map_embeddings = map_embeddings
        self.units: list[Unit] = []
        self.plans: dict[int, ModulePlan] = {}  # id(module) -> plan
        self.kept: dict[str, str] = {}  # parameter name -> why it stays on the device
        self.small: dict[int, str] = {}  # id(parameter) -> why it stays, of those that stay for their size
        self._choose(targets)

    def _choose(self, targets: list) -> None:
        """Fills units and plans from the targets, in their order."""
        self._refuse_overlap()
        if self._source is not None:
            self._source.let_go(self._source.written())
        storages = self.storages()
        small = self.small = self._small_ones(targets)
        unit_of: dict[int, tuple[Unit, object]] = {}  # id(param) -> (unit, entry)
        for name, module, group in targets:
            one_each = type(module).forward is nn.Module.forward  # ParameterList: read one by one, from outside
            unit, kind = None, None
            for key, param in module._parameters.items():
                if param is None or id(param) in unit_of:
                    continue
                reason = self._stays(module, param, storages) or small.get(id(param), "")
                if reason:
                    self.note(full_name(name, key), reason)
                    continue
                before, kind = kind, self._kind(param)
                if unit is None or one_each or kind != before:
                    alone = one_each or unit is not None
                    unit = Unit(full_name(name, key) if alone else name or type(module).__name__, group)
                    unit.in_file, unit.packed = kind[0] != "", kind[0] == "packed"
                    self.units.append(unit)
                self._claim(unit, full_name(name, key), param, storages, unit_of)
        self._plan_owners(unit_of)

    def _kind(self, param) -> tuple:
        """Weights of one kind are a unit together: how their source has them, and whether they are trained."""
        return "" if self._source is None else self._source.kind(param), param.requires_grad

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

    def put_in_order(self, units: list[Unit]) -> None:
        """As they were: these are the session's units, in another order."""
        self.units[:] = units

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

    def _claim(self, unit, name, param, storages, unit_of) -> None:
        if wraps(param):
            unit_of[id(param)] = (unit, Wrapping(unit, name, param))
            return
        entry = unit.add(name, param)
        entry.twins = storages.twins(param)
        for owner in (param, *entry.twins):
            unit_of[id(owner)] = (unit, entry)

    def _plan_owners(self, unit_of) -> None:
        """Every module that owns a managed parameter leases its unit: the targets, and others that are tied to
        them (a head)."""
        for name, module, key, param in owned(self._model):
            if id(param) in unit_of:
                plan = self.plans.setdefault(id(module), ModulePlan(self._session, name, module))
                plan.managed[key] = unit_of[id(param)]
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

    def _small_ones(self, targets) -> dict[int, str]:
        """What stays on the device for its size, as much as its share of the budget holds. First come those
        of modules that call other modules: their lease would lie between those of their children."""
        found: dict[int, tuple] = {}
        for _, module, _ in targets:
            leaf = next(module.children(), None) is None
            for param in module._parameters.values():
                if param is None:
                    continue
                if stays_if_it_can(param):
                    found.setdefault(id(param), (leaf, held_bytes(param)))
        small, total = {}, 0
        for ident, (_, nbytes) in sorted(found.items(), key=lambda item: item[1]):
            total += nbytes
            if total * SMALL_SHARE > self._session.budget:
                break
            small[ident] = "it is small"
        return small

    def may_map(self, module, unit) -> bool:
        """Whether the module looks up rows of the unit in host memory."""
        return bool(
            self._map_embeddings
            and type(module) is nn.Embedding
            and len(unit.entries) == 1
            and not module.sparse
            and not unit.in_file
            and not unit.wrapping
        )

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
