"""What streams and what stays: the first part of a session. Nothing of the model is touched here."""

from __future__ import annotations

from .._torch import torch
from ..errors import StagehandError
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


class Choosing:
    """Fills a session's units, plans and kept from its targets, and checks what can be known beforehand."""

    def _choose(self, targets) -> None:
        """Fills units and plans from the targets, in their order."""
        self._refuse_overlap()
        if self.source is not None:
            self.source.let_go(self.source.written())
        storages = self.storages()
        small = self._small = self._small_ones(targets)
        unit_of: dict[int, tuple[Unit, object]] = {}  # id(param) -> (unit, entry)
        for name, module, group in targets:
            one_each = type(module).forward is nn.Module.forward  # ParameterList: read one by one, from outside
            unit, kind = None, ""
            for key, param in module._parameters.items():
                if param is None or id(param) in unit_of:
                    continue
                reason = self._stays(module, param, storages) or small.get(id(param), "")
                if reason:
                    self.kept.setdefault(full_name(name, key), reason)
                    continue
                before, kind = kind, "" if self.source is None else self.source.kind(param)
                if unit is None or one_each or kind != before:
                    alone = one_each or unit is not None
                    unit = Unit(full_name(name, key) if alone else name or type(module).__name__, group)
                    unit.in_file, unit.packed = kind != "", kind == "packed"
                    self.units.append(unit)
                self._claim(unit, full_name(name, key), param, storages, unit_of)
        self._plan_owners(unit_of)

    def storages(self) -> Storages:
        """Of the model as it is now."""
        params = [p for _, _, _, p in owned(self.model)]
        return Storages(params, [*self.model.buffers(), *inside_of(params)])

    def _refuse_overlap(self) -> None:
        for name, module in self.model.named_modules():
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
        for name, module, key, param in owned(self.model):
            if id(param) in unit_of:
                plan = self.plans.setdefault(id(module), ModulePlan(self, name, module))
                plan.managed[key] = unit_of[id(param)]
        for plan in self.plans.values():
            for unit, entry in plan.managed.values():
                unit.mapped = unit.mapped or self._may_map(plan.module, unit)

    def _stays(self, module, param, storages) -> str:
        reason = wrapping_reason(param, storages, self.inference_mode) if wraps(param) else plain_reason(param)
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
            if total * SMALL_SHARE > self.budget:
                break
            small[ident] = "it is small"
        return small

    def _may_map(self, module, unit) -> bool:
        return bool(
            self._map_embeddings
            and type(module) is nn.Embedding
            and len(unit.entries) == 1
            and not module.sparse
            and not unit.in_file
            and not unit.wrapping
        )

    def _check(self) -> None:
        """What can be known before anything is touched: values, and the budget."""
        for name, module, key, param in owned(self.model):
            if param.is_meta:
                self._refuse_meta(full_name(name, key))
        for name, buffer in self.model.named_buffers():
            if buffer.is_meta:
                self._refuse_meta(name)
        self._check_budget()

    def _refuse_meta(self, name: str) -> None:
        raise StagehandError(f"{name} is on the meta device: it has no values to run with"
                             f"{other_offloading(self.model)}", object=name)
