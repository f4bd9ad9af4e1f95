"""Masters that are written, replaced or tied anew while a model is managed: the third part of a session.

Whatever way a weight is changed, the device has it at the next use: here the host image follows the
parameter, and the core is told. Writes into the image itself that leave no trace in a version counter are
found by the core's fingerprints.
"""

from __future__ import annotations

import contextlib
import functools
import warnings

from .._torch import aside, observed, torch, transformed, undisturbed, unseen
from ..errors import InvalidStateTransitionError, StagehandError, StagehandOOMError, some_of
from ..managed import runtime_of
from ..weights import relocate
from ..weights.guarded import other_offloading
from ..weights.hooks import ModulePlan
from ..weights.images import Images
from ..weights.saved import in_backward
from ..weights.units import ADDED, Unit, full_name, owned, plain_reason
from ..weights.wrapping import Wrapping, inside, part_reason, wrapping_reason
from . import registrations, tuners
from .compiled import is_compiled
from .resized import open_anew

nn = torch.nn

AGAIN = "with shutdown() of its runtime and the call that wrapped the model"


class Writes(Images):
    """What a session does about changes of the model's parameters."""

    _masters: dict | None = None  # id(parameter) -> (unit, entry), made when it is asked for

    def stepped(self, written: set[int]) -> None:
        """An optimizer updated the parameters with these ids."""
        for unit in self.units:
            for entry in unit.entries:
                if id(entry.param) in written or any(id(twin) in written for twin in entry.twins):
                    entry.written = True

    def _refuse_captured_write(self, module: str, weight: str) -> None:
        if self.capturing:
            raise StagehandError(f"the forward of {module} writes {weight}, and the host takes part in that: it cannot "
                                 "be captured", object=weight)

    def write_back(self, plan: ModulePlan, key: str, copy: torch.Tensor, rounds: bool = False) -> None:
        """A forward wrote into its weight: the master gets the values, and counts one write, so that graphs of before
        do not take them for the old ones. rounds: those of a copy in another dtype are on their way back to the
        master's."""
        unit, entry = plan.managed.get(key) or plan.replaced[key]
        self._refuse_captured_write(plan.name, entry.name)
        if entry.is_cast and copy.dtype is entry.cast and copy.shape == entry.shape:
            copy = self.uncast(plan, entry, copy, rounds)
        if copy.shape != entry.shape or copy.dtype != entry.dtype:
            raise StagehandError(
                f"the forward of {plan.name} gave {entry.name} data of another shape or dtype ({tuple(copy.shape)}, "
                f"{copy.dtype}; it was {tuple(entry.shape)}, {entry.dtype}): do that before wrapping",
                object=entry.name)
        if unit.in_file:
            raise StagehandError(f"the forward of {plan.name} writes {entry.name}, whose bytes are streamed from a "
                                 "file: keep the model in RAM", object=entry.name)
        with undisturbed():
            self._write_master(unit, entry, copy.detach())
        # Not for a region that is computed again: its first run saved the weight, and takes what is there.
        if not in_backward():
            for param in (entry.param, *entry.twins):
                torch.autograd.graph.increment_version(param)
        entry.remember()

    def write_back_parts(self, module: str, unit: Unit, parts: list, through: bool) -> None:
        """As `write_back`, of a weight whose parts stream. parts: (part, what is there at the end of the forward).
        through: the weight itself was written."""
        self._refuse_captured_write(module, parts[0][0].whole.name)
        for part, tensor in parts:
            why = part_reason(tensor)
            if why:
                raise StagehandError(
                    f"the forward of {module} gave {part.name} data whose bytes cannot be moved: {why}",
                    object=part.name)
            if tensor.shape != part.shape or tensor.dtype != part.dtype:
                raise StagehandError(
                    f"the forward of {module} gave {part.name} data of another shape or dtype ({tuple(tensor.shape)}, "
                    f"{tensor.dtype}; it was {tuple(part.shape)}, {part.dtype}): do that before wrapping",
                    object=part.name)
        with undisturbed():
            for part, tensor in parts:
                self._write_master(unit, part, tensor.detach())
        if not in_backward():
            for part, _ in parts:
                torch.autograd.graph.increment_version(part.param)
            if through:
                torch.autograd.graph.increment_version(parts[0][0].whole.param)
        for part, _ in parts:
            part.remember()

    def written_back(self, unit: Unit, refused: bool) -> None:
        """After the use that wrote it. The place has the new values; what was read ahead of the image, or made of it
        for the way over the link, has not. refused: the master does not have them, and the place must not."""
        ahead = (self.inference_mode or self.quantised.of(unit) is not None or unit.pageable()
                 or any(entry.is_cast for entry in unit.entries))
        if unit.index >= 0 and (refused or ahead):
            self.core.mark_written(unit.index)

    def undo_lost_writes(self) -> list[str]:
        """Names of weights that this thread's pass wrote from outside their own modules' forwards. Their places are
        filled again before the next use."""
        self.local.outside.look(end=True)
        lost = self.local.outside.take_lost()
        for unit, _ in lost:
            if unit.index >= 0:
                self.core.mark_written(unit.index)
        return [name for _, name in lost]

    def refuse_lost_writes(self) -> None:
        """At the end of a pass."""
        if observed():
            with aside():
                return self.refuse_lost_writes()
        for name in self.undo_lost_writes():
            raise StagehandError(
                f"{name} was written during a pass, by a hook or by another module than its own, and the write is "
                f"lost: write it before the pass, or inside `with runtime.writing():`"
                f"{other_offloading(self.model)}", object=name)

    def noticed(self, plan: ModulePlan, key: str, value) -> None:
        """A module was given another tensor under a name: looked at when the next step begins. One that was not
        registered, and can be used where it is, only at the one after that: it may belong to another model."""
        if isinstance(value, nn.Parameter):
            stays = registrations.comes_by_registration(plan.module, key, value)
            usable = self.simulated or value.device == self.target.torch
            self._noticed[plan, key] = 0 if stays or not usable else 1

    def unnoticed(self, plan: ModulePlan, key: str) -> None:
        """It has a weight that streams again."""
        self._noticed.pop((plan, key), None)

    def _settle(self, closing: bool = False, inside: int = 0) -> None:
        """Parameters that replaced managed ones since the last step: the same shape and dtype takes the old one's
        place and streams, anything else moves to the device and stays there, counted. Under the step lock. inside:
        calls of parts of the model that this thread is in."""
        count, noticed = registrations.count, self._noticed
        looked = self._registrations != count
        if not looked and not noticed:
            return
        if not closing and any(transformed(param) for _, _, _, param in owned(self.model)):
            return  # inside functional_call, which puts the model's own back
        self._registrations, self._noticed = count, {}
        with torch.inference_mode(False), torch.no_grad():
            if looked:
                self._look_around()
            lost, settled = self._take_over(noticed)
            if closing or not (looked or settled):
                return
            try:
                self._count_anew()
            except BaseException as error:
                self._registrations = -1  # the next step asks again
                self._noticed.update(dict.fromkeys(lost, 0))
                if not isinstance(error, InvalidStateTransitionError) or self._passing <= inside:
                    raise
                return  # a part that another thread is in goes on with the step
        self._warn_of_lost([full_name(plan.name, key) for plan, key in lost])

    def gives_way_to_another(self, casts: bool = True) -> bool:
        """Before a pass: whether another session stands for this one now, because weights were resized, or cast for
        good. casts: the latter may be looked at."""
        if self._opens_anew():
            return True
        if casts and self._cast_now and self.wants_again():
            self.take_over_again()
            return True
        return False

    def _opens_anew(self) -> bool:
        if self._registrations == registrations.count:
            return False
        runtime = runtime_of(self.model)
        if runtime is not None and runtime.session is self:
            open_anew(self, runtime)
        return self.closed

    def _take_over(self, noticed: dict) -> tuple[list, int]:
        """The (plan, key) of weights that streamed and do so no more, and how many were settled in all."""
        owners, lost, settled = _Owners(self), [], 0
        for (plan, key), later in noticed.items():
            value = dict.get(plan.masters, key)
            if key in plan.managed or not isinstance(value, nn.Parameter):
                continue
            if later:
                self._noticed[plan, key] = later - 1
                continue
            settled += 1
            name, known = full_name(plan.name, key), self.entry_of(value) or self._succeed(plan, key, value, owners)
            if known is not None:
                plan.replaced.pop(key, None)
                plan.managed[key] = known
                owners.managed.add(id(known[1]))
                self.kept.pop(name, None)
            elif key in plan.replaced:
                self.kept[name] = "it was replaced after wrapping by one of another dtype, shape or class"
                lost.append((plan, key))
            else:
                self.kept[name] = ADDED
        for plan, _ in noticed:
            plan.find_single()
        return lost, settled

    def _count_anew(self) -> None:
        """What is outside the places now is on the device, and counted: `reserved`. One that is away counts when it
        comes back."""
        if self._away:
            return
        items = self._outside()
        self._reserve(items)
        if not self.simulated:
            self._place(items)

    def _outside(self) -> list[relocate.Item]:
        """What is outside the places, but for what may be gone after a call, as what functional_call puts in place of a
        weight that streams."""
        passing = [(plan, key) for plan in self.plans.values() for key in plan.replaced
                   if not isinstance(dict.get(plan.masters, key), nn.Parameter)]
        return self._unmanaged({(id(plan.module), key) for plan, key in (*passing, *self._noticed)})

    def _reserve(self, items: list[relocate.Item]) -> None:
        nbytes = relocate.total_bytes(items)
        if nbytes == self.reserved and not self._away:
            return
        if self._open and self._streaming:
            self.core.step_pause()
        try:
            self._asking(self.core.set_reserved, nbytes)
        except StagehandOOMError as error:
            if nbytes <= self.reserved:
                raise
            raise self._no_room_for(items, nbytes, error) from None
        if nbytes != self.reserved:
            self._regions_due |= bool(self._regions or self._uncompiled)
        self._count(items, nbytes)

    def _count(self, items: list[relocate.Item], nbytes: int) -> None:
        self.reserved = nbytes
        self._counted = {item.name: relocate.held_bytes(item.data) for item in items}

    def _no_room_for(self, items: list[relocate.Item], nbytes: int, error: StagehandOOMError) -> StagehandOOMError:
        came = [item.name for item in items if item.name not in self._counted]
        grew = [item.name for item in items if relocate.held_bytes(item.data) > self._counted.get(item.name, nbytes)]
        what = [f"{some_of(names, 1)} {verb} after wrapping" for names, verb in ((came, "came"), (grew, "grew"))
                if names]
        return StagehandOOMError(
            f"{' and '.join(what) or 'tensors that shared their memory do so no more'}: what stays on the device takes "
            f"{nbytes} bytes there, and took {self.reserved}. Raise the "
            f"budget{f', or wrap again, {AGAIN}' if came else ''}: {error}", error.status,
            (came + grew + ["budget"])[0], error.native_code)

    def _warn_of_lost(self, names: list[str]) -> None:
        if names:
            warnings.warn(
                f"stagehand: {some_of(names, 1)} streamed and was replaced after wrapping by one of another dtype, "
                f"shape or class: it stays on the device now, and the budget counts it. To have it stream "
                f"wrap again, {AGAIN}",
                RuntimeWarning, stacklevel=6)

    def entry_of(self, param):
        """The unit and entry of a parameter that streams already (tied anew), or None."""
        if self._masters is None:
            self._masters = {id(p): (unit, entry) for unit in self.units for entry in unit.weights()
                             for p in (entry.param, *entry.twins)}
        return self._masters.get(id(param))

    def _succeed(self, plan: ModulePlan, key: str, value, owners: "_Owners"):
        """The new parameter in the place of the one that it replaced, if nobody else uses that one and the bytes
        fit; or None."""
        unit, entry = plan.replaced.get(key, (None, None))
        if type(entry) is Wrapping:
            return self._succeed_around(unit, entry, value, owners)
        if entry is None or unit.in_file or plain_reason(value) or value.is_meta:
            return None
        if value.shape != entry.shape or value.dtype != entry.dtype:
            return None
        if id(entry) in owners.managed:
            return None
        left = owners.replaced.get(id(entry), ())
        twins = [dict.get(other.masters, name) for other, name in left]
        twins = [t for t in twins if isinstance(t, nn.Parameter) and t is not value and t.data_ptr() == value.data_ptr()
                 and t.shape == value.shape and t.dtype == value.dtype and t.stride() == value.stride()]
        for known in [id(old) for old in (entry.param, *entry.twins)]:  # nobody may hold the old ones below
            self._masters.pop(known, None)
            self._listed.pop(known, None)
        entry.param, entry.twins = value, list({id(t): t for t in twins}.values())
        self._masters.update({id(new): (unit, entry) for new in (value, *entry.twins)})
        for other, name in left:  # lets go of the old one
            other.original.pop(name, None)
        self._put(unit, entry)
        entry.remember()
        if unit.index >= 0:
            self.core.mark_written(unit.index)
        return unit, entry

    def _succeed_around(self, unit: Unit, weight: Wrapping, value, owners: "_Owners"):
        """As `_succeed`, of a weight around tensors and another of its class."""
        if id(weight) in owners.managed or not weight.is_like(value):
            return None
        if wrapping_reason(value, owners.storages, self.inference_mode):
            return None
        for parameters in (self._masters, self._listed):
            parameters.pop(id(weight.param), None)
        weight.param = value
        self._masters[id(value)] = unit, weight
        for other, name in owners.replaced.get(id(weight), ()):
            other.original.pop(name, None)
        for part, (_, tensor) in zip(weight.parts, inside(value)):
            part.param = tensor
            self._put(unit, part)
            part.remember()
        if unit.index >= 0:
            self.core.mark_written(unit.index)
        return unit, weight

    def _look_around(self) -> None:
        """Something was registered somewhere: modules that are new here may own weights that stream, or be compiled;
        others of theirs (adapters) belong on the device."""
        compiled = bool(self._regions or self._uncompiled)
        tuners.stand_in(self.model.modules())
        for name, module in list(self.model.named_modules()):
            compiled = compiled or is_compiled(module)
            if id(module) not in self.plans:
                self._take_up(name, module)
        self._regions_due |= compiled  # once `reserved` is counted, without the step lock

    def _take_up(self, name: str, module) -> None:
        """Puts a module under management that came to own weights that stream."""
        managed = {key: self.entry_of(p) for key, p in module._parameters.items() if self.entry_of(p) is not None}
        if not managed:
            return
        plan = ModulePlan(self, name, module)
        plan.managed.update(managed)
        self.plans[id(module)] = plan
        plan.install()
        plan.find_single()
        self._wrap_module(module, plan)

    @contextlib.contextmanager
    def writing(self):
        """For inference_mode=True, and inside a pass: weights may be written inside, which are the masters there; the
        device sees it at the next use."""
        self.synchronize()
        try:
            with self.local.masters():
                yield self
        finally:
            with unseen():
                self._mark_all()

    def synchronize(self) -> None:
        """Waits until every copy issued so far has read its master. Whatever is written after it, in whatever
        way, is seen at the next use."""
        if self._streaming:
            self.core.synchronize()
            with unseen():
                self._mark_all()

    def _mark_all(self) -> None:
        self.follow_masters()
        for unit in self.units:
            for entry in unit.entries:
                if entry.changed():
                    self.renew(unit, entry)
            if unit.index >= 0 and not unit.in_file:
                self.core.mark_written(unit.index)


class _Owners:
    """Who uses entries, by their ids: managed ones, and those of which a module was given another Parameter."""

    def __init__(self, session) -> None:
        plans = session.plans.values()
        self._storages = session.storages
        self.managed = {id(entry) for plan in plans for _, entry in plan.managed.values()}
        self.replaced: dict[int, list[tuple]] = {}
        for plan in plans:
            for key, (_, entry) in plan.replaced.items():
                self.replaced.setdefault(id(entry), []).append((plan, key))

    @functools.cached_property
    def storages(self):
        return self._storages()
