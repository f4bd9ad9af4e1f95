"""Masters that are written, replaced or tied again while a model is managed.

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
from ..weights.hooks import ModulePlan, is_for_a_call
from ..weights.saved import in_backward
from ..weights.units import ADDED, Unit, full_name, owned, plain_reason
from ..weights.wrapping import Wrapping, inside, part_reason, wrapping_reason
from . import registrations, tuners
from .compiled import is_compiled
from .resized import open_anew
from .staying import AGAIN

nn = torch.nn


class Writes:
    """What a session does about changes of the model's parameters."""

    # Of its session.
    USES = """captures.capturing casts.uncast choice.add_plan choice.note_anew closed core images.follow_masters
        images.put images.renew images.unfold images.write_master inference_mode local mark_written model plans
        quantised regions.look_again simulated stay.away stay.has_data_on_host stay.place stay.outside_bytes
        stay.reserve steps.passing streaming tables.stays tables.synchronize takeover.unmanaged takeover.wrap_module
        trained.give_way trained.outgrown units unlist"""

    def __init__(self, session) -> None:
        self._session = session
        self._steps = session.steps
        self._masters: dict | None = None  # id(parameter) -> (unit, entry), made when it is asked for
        self._noticed: dict[tuple, int] = {}  # (plan, key) that was given another Parameter -> steps to wait
        self._registrations = 0  # of modules and parameters, anywhere, that have been looked at
        self._modules: set[int] = set()  # ids of the model's modules when they were looked at

    def begin(self) -> None:
        """The session opens, with the parameters that the model has now."""
        self._registrations = registrations.count
        self._modules = set(map(id, self._session.model.modules()))
        self._masters = None

    def knows(self, module) -> bool:
        """Whether the model had this module when its modules were looked at."""
        return id(module) in self._modules

    def behind_registrations(self) -> bool:
        """Whether something was registered, anywhere, since that was looked at."""
        return self._registrations != registrations.count

    def stepped(self, written: set[int]) -> None:
        """An optimizer updated the parameters with these ids."""
        for unit in self._session.units:
            for entry in unit.entries:
                if id(entry.param) in written or any(id(twin) in written for twin in entry.twins):
                    entry.written = True

    def _refuse_captured_write(self, module: str, weight: str) -> None:
        if self._session.captures.capturing:
            raise StagehandError(f"the forward of {module} writes {weight}, and the host takes part in that: it cannot "
                                 "be captured. Write it between passes", object=weight)

    def write_back(self, plan: ModulePlan, key: str, copy: torch.Tensor, rounds: bool = False) -> None:
        """A forward wrote into its weight: the master gets the values, and counts one write, so that graphs of before
        do not take them for the old ones. rounds: those of a copy in another dtype are on their way back to the
        master's."""
        unit, entry = plan.managed.get(key) or plan.replaced[key]
        self._refuse_captured_write(plan.name, entry.name)
        if entry.is_cast and copy.dtype is entry.cast and copy.shape == entry.shape:
            copy = self._session.casts.uncast(plan, entry, copy, rounds)
        if copy.shape != entry.shape or copy.dtype != entry.dtype:
            raise StagehandError(
                f"the forward of {plan.name} gave {entry.name} data of another shape or dtype ({tuple(copy.shape)}, "
                f"{copy.dtype}; it was {tuple(entry.shape)}, {entry.dtype}): do that before wrapping",
                object=entry.name)
        if unit.in_file:
            raise StagehandError(f"the forward of {plan.name} writes {entry.name}, whose bytes are streamed from a "
                                 "file: keep the model in RAM", object=entry.name)
        with undisturbed():
            self._session.images.write_master(unit, entry, copy.detach())
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
                self._session.images.write_master(unit, part, tensor.detach())
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
        session = self._session
        ahead = (session.inference_mode or session.quantised.of(unit) is not None or unit.pageable()
                 or any(entry.is_cast for entry in unit.entries))
        if refused or ahead:
            session.mark_written(unit)

    def undo_lost_writes(self) -> list[str]:
        """Names of weights that this thread's pass wrote from outside their own modules' forwards. Their places are
        filled again before the next use."""
        outside = self._session.local.outside
        outside.look(end=True)
        lost = outside.take_lost()
        for unit, _ in lost:
            self._session.mark_written(unit)
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
                f"{other_offloading(self._session.model)}", object=name)

    def noticed(self, plan: ModulePlan, key: str, value) -> None:
        """A module was given another tensor under a name: looked at when the next step begins. One that was not
        registered only at the one after that: it may belong to another model."""
        if isinstance(value, nn.Parameter):
            stays = registrations.comes_by_registration(plan.module, key, value)
            self._noticed[plan, key] = 0 if stays else 1

    def unnoticed(self, plan: ModulePlan, key: str) -> None:
        """It has a weight that streams again."""
        self._noticed.pop((plan, key), None)

    def settle(self, closing: bool = False, inside: int = 0) -> None:
        """Parameters that replaced managed ones since the last step: the same shape and dtype takes the old one's
        place and streams, anything else moves to the device and stays there, counted. Under the step lock. inside:
        calls of parts of the model that this thread is in."""
        count, noticed = registrations.count, self._noticed
        looked = self._registrations != count or self._session.stay.has_data_on_host()
        if not looked and not noticed:
            return
        if not closing and any(transformed(param) for _, _, _, param in owned(self._session.model)):
            return  # inside functional_call, which puts the model's own back
        self._registrations, self._noticed = count, {}
        with torch.inference_mode(False), torch.no_grad():
            if looked:
                self._look_around()
            lost, settled = self._take_over(noticed)
            if closing or not (looked or settled):
                return
            try:
                self.count_anew()
            except BaseException as error:
                self._registrations = -1  # the next step asks again
                self._noticed.update(dict.fromkeys(lost, 0))
                if not isinstance(error, InvalidStateTransitionError) or self._steps.passing <= inside:
                    raise
                return  # a part that another thread is in goes on with the step
        self._warn_of_lost([full_name(plan.name, key) for plan, key in lost])

    def gives_way_to_another(self, casts: bool = True) -> bool:
        """Before a pass: whether another session stands for this one now, because weights were resized, or cast for
        good. casts: the latter may be looked at."""
        if self._opens_anew():
            return True
        casting = self._session.casts
        if casts and (casting.now or self._session.trained.outgrown) and casting.wants_again():
            casting.take_over_again()
            return True
        return False

    def _opens_anew(self) -> bool:
        if self._registrations == registrations.count:
            return False
        session = self._session
        runtime = runtime_of(session.model)
        if runtime is not None and runtime.session is session:
            open_anew(session, runtime)
        return session.closed

    def _take_over(self, noticed: dict) -> tuple[list, int]:
        """The (plan, key) of weights that streamed and do so no more, and how many were settled in all."""
        session = self._session
        owners, lost, settled = _Owners(session), [], 0
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
                session.choice.note_anew(name, None)
            elif key in plan.replaced:
                session.choice.note_anew(
                    name, "it was replaced after wrapping by one of another dtype, shape or class")
                lost.append((plan, key))
            else:
                session.choice.note_anew(name, ADDED)
        for plan, _ in noticed:
            plan.find_single()
        return lost, settled

    def look_at_owners(self) -> None:
        """Weights came to stream, or do so no more, without another Parameter."""
        self._masters = None
        for name, module in list(self._session.model.named_modules()):
            if id(module) not in self._session.plans:
                self._take_up(name, module)
        for plan in self._session.plans.values():
            plan.find_single()

    def count_anew(self) -> None:
        """What is outside the places now is on the device, and counted: `reserved`. One that is away counts when it
        comes back."""
        session = self._session
        if session.stay.away:
            return
        items = self.outside()
        try:
            session.stay.reserve(items)
        except StagehandOOMError:
            session.tables.stays(session.stay.outside_bytes(items))
            if not session.trained.give_way():
                session.stay.reserve(items)
            items = self.outside()
        if not session.simulated:
            session.stay.place(items)

    def outside(self) -> list[relocate.Item]:
        """What is outside the places, but for what may be gone after a call, as what functional_call puts in place of a
        weight that streams."""
        passing = [(plan, key) for plan in self._session.plans.values() for key in plan.replaced
                   if is_for_a_call(plan.masters, key)]
        return self._session.takeover.unmanaged({(id(plan.module), key) for plan, key in (*passing, *self._noticed)})

    def _warn_of_lost(self, names: list[str]) -> None:
        if names:
            warnings.warn(
                f"stagehand: {some_of(names, 1)} streamed and was replaced after wrapping by one of another dtype, "
                f"shape or class: it stays on the device now, and the budget counts it. To have it stream "
                f"wrap again, {AGAIN}",
                RuntimeWarning, stacklevel=6)

    def entry_of(self, param):
        """The unit and entry of a parameter that streams already (tied again), or None."""
        if self._masters is None:
            self._masters = {id(p): (unit, entry) for unit in self._session.units for entry in unit.weights()
                             for p in (entry.param, *entry.twins)}
        return self._masters.get(id(param))

    def _succeed(self, plan: ModulePlan, key: str, value, owners: "_Owners"):
        """The new parameter in the place of the one that it replaced, if nobody else uses that one and the bytes
        fit; or None."""
        session = self._session
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
        session.images.unfold(unit)
        for known in [id(old) for old in (entry.param, *entry.twins)]:  # nobody may hold the old ones below
            self._masters.pop(known, None)
            session.unlist(known)
        entry.param, entry.twins = value, list({id(t): t for t in twins}.values())
        self._masters.update({id(new): (unit, entry) for new in (value, *entry.twins)})
        for other, name in left:  # drops the old one
            other.original.pop(name, None)
        session.images.put(unit, entry)
        entry.remember()
        session.mark_written(unit)
        return unit, entry

    def _succeed_around(self, unit: Unit, weight: Wrapping, value, owners: "_Owners"):
        """As `_succeed`, of a weight around tensors and another of its class."""
        session = self._session
        if id(weight) in owners.managed or not weight.is_like(value):
            return None
        if wrapping_reason(value, owners.storages, session.inference_mode):
            return None
        self._masters.pop(id(weight.param), None)
        session.unlist(id(weight.param))
        weight.param = value
        self._masters[id(value)] = unit, weight
        for other, name in owners.replaced.get(id(weight), ()):
            other.original.pop(name, None)
        for part, (_, tensor) in zip(weight.parts, inside(value)):
            part.param = tensor
            session.images.put(unit, part)
            part.remember()
        session.mark_written(unit)
        return unit, weight

    def _look_around(self) -> None:
        """Something was registered somewhere: modules that are new here may own weights that stream, or be compiled;
        others of theirs (adapters) belong on the device."""
        session = self._session
        compiled, found = False, list(session.model.named_modules())
        self._modules = {id(module) for _, module in found}
        tuners.stand_in(module for _, module in found)
        for name, module in found:
            compiled = compiled or is_compiled(module)
            if id(module) not in session.plans:
                self._take_up(name, module)
        session.regions.look_again(compiled)  # once `reserved` is counted, without the step lock

    def _take_up(self, name: str, module) -> None:
        """Manages a module that came to own weights that stream."""
        session = self._session
        managed = {key: self.entry_of(p) for key, p in module._parameters.items() if self.entry_of(p) is not None}
        if not managed:
            return
        plan = session.choice.add_plan(name, module, managed)
        plan.install()
        plan.find_single()
        session.takeover.wrap_module(module, plan)

    @contextlib.contextmanager
    def writing(self):
        """For inference_mode=True, and inside a pass: weights may be written inside, which are the masters there; the
        device sees it at the next use."""
        self.synchronize()
        try:
            with self._session.local.masters():
                yield self._session
        finally:
            with unseen():
                self._mark_all()

    def synchronize(self) -> None:
        """Waits until every copy issued so far has read its master. Whatever is written after it, in whatever
        way, is seen at the next use."""
        if self._session.streaming:
            self._session.core.synchronize()
            self._session.tables.synchronize()
            with unseen():
                self._mark_all()

    def _mark_all(self) -> None:
        session = self._session
        session.images.follow_masters()
        for unit in session.units:
            for entry in unit.entries:
                if entry.changed():
                    session.images.renew(unit, entry)
            if not (unit.in_file or unit.common):  # which were looked at: the image of these is not written
                session.mark_written(unit)


class _Owners:
    """Who uses entries, by their ids: managed ones, and those of which a module was given another Parameter."""

    def __init__(self, session) -> None:
        plans = session.plans.values()
        self._storages = session.choice.storages
        self.managed = {id(entry) for plan in plans for _, entry in plan.managed.values()}
        self.replaced: dict[int, list[tuple]] = {}
        for plan in plans:
            for key, (_, entry) in plan.replaced.items():
                self.replaced.setdefault(id(entry), []).append((plan, key))

    @functools.cached_property
    def storages(self):
        return self._storages()
