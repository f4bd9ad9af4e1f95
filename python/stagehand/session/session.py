"""A session: one managed model. It takes the weights over, builds the core's runtime and puts the
model back as it was. Layer mode and block mode choose what is managed and when steps begin.

Order of events, and the parts of a session that have a share in them:
    __init__   decides: units, weights that stay on the device and why (choice, needs); nothing is touched yet
    open       takes over: arena, wrappers (takeover), tensors that stay on the device (stay), the core's runtime (here)
    passes     steps begin and end (steps), forwards lease units from the core (here), backward leases them again
               (saved.py); changes of parameters are followed (writes, images, casts); compiled modules lease their
               weights together (regions); passes may be captured (captures)
    close      the model plain again on the host; safe to call twice

A part owns its attributes; docs/design.md lists them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
import weakref

from torch.utils import _pytree

from .. import _core, sessions, telemetryfile
from .. import device as devices
from .._torch import STORAGE_USES, aside, compiler, observed, raw, torch, unseen, apart_from_caller
from ..claims import taking_over
from ..errors import InvalidStateTransitionError, StagehandError, StagehandOOMError
from ..files.quantised import Quantised
from ..logs import log
from ..owning import NotCopied
from ..weights.casting import Casts
from ..weights.fileweight import make_plain
from ..weights.grads import Gradients
from ..weights.hooks import Frame, Local, ModulePlan, on_device_instead
from ..weights.images import Images
from ..weights.leased import MASTER, device_copy
from ..weights.listed import Listed
from ..weights.saved import SAVING
from ..weights.folded import address_of
from ..weights.units import DLPACK, Unit
from . import ending, optimizers, registrations
from .advice import advised
from .answers import Answer
from .captures import Captures
from .choosing import Choosing
from .compiled import Regions
from .finding import Finding, model_bytes
from .given import Given
from .needs import Needs
from .opening import Takeover
from .staying import Staying
from .steps import Steps
from .tables import Tables
from .trained import Trained
from .writes import Writes

nn = torch.nn


_NO_TENSORS = {type(None), bool, int, float, str, torch.dtype, torch.device}


def may_be_on_host(value) -> bool:
    """Whether a tensor in the value is on the host, or it is of a kind that may have such ones inside."""
    kind = type(value)
    if kind is tuple or kind is list:
        return any(map(may_be_on_host, value))
    if kind is dict:
        return any(map(may_be_on_host, value.values()))
    return value.is_cpu if isinstance(value, torch.Tensor) else kind not in _NO_TENSORS


class Session(NotCopied):
    """See the module's docstring.

    model: nn.Module. targets: list of (name, module, group) whose own parameters are to stream.
    budget: bytes on the device for parameters, buffers and places. target: device.Target.
    dtype: cast floating tensors to this dtype, None = keep each its own. inference_mode: weights are not
    written between steps unless `writing()` says so. options: passed on to the core's Runtime.
    source: None, or a filesource.FileSource: parameters bound in it are read from their files, and units of them
    stream from there; the others stream from the arena.
    transfer: None, or the encoding in which streamed weights cross the link (quantised.py).
    finding: finding.Finding that gave the budget and goes on changing it between steps, or None.
    trainables: where trained weights live: "auto", "device" or "host" (trained.py).
    name: of the model in errors; None: its class. With a number where another model that is open has it.
    """

    def __init__(self, model, targets, *, budget, target, dtype=None, inference_mode=False, options=None,
                 source=None, map_embeddings=True, transfer=None, name=None, finding=None,
                 trainables="host") -> None:
        self.model = model
        self.name = name or type(model).__name__
        self.finding = finding
        self.given = Given(self)
        self.budget = budget
        self.target = target
        self.simulated = target.simulated
        self.dtype = dtype
        self.inference_mode = inference_mode
        self.options = dict(options or {})
        self.source = source
        self.quantised = Quantised(transfer)
        self.local = Local()
        self.closed = True
        self.opened = False
        self.ending = False  # by a shutdown
        self.streaming = False  # the core has units
        self.core: _core.Runtime | None = None
        self.telemetry_path = None  # of the file that the core writes
        self.calls: _core.Calls | None = None  # from open on
        self.grads = None  # grads.Gradients, from open on
        self.answer = None  # answers.Answer, while it is open
        self.arbiter = None  # the ConductorRuntime that its copies go through
        self.last_stats: dict = {}  # kept at close
        self._trainables = trainables
        self._listed: dict[int, Listed] = {}  # by id(master), which they keep
        self._opening = False  # a thread is at it
        self._pid = os.getpid()
        self._warned_input = False
        make_plain(model, lambda weight: source is None or not source.holds(weight))
        self.choice = Choosing(self, targets, map_embeddings and target.core.capabilities & _core.CAP_MAPPED_HOST)
        self.units = self.choice.units
        self.plans = self.choice.plans
        self.plans_given: dict[int, ModulePlan] = {}  # in whose modules others stood in weights' places, once or now
        self.tables = Tables(self)
        self.needs = Needs(self)
        self.trained = Trained(self, trainables)
        self.takeover = Takeover(self)
        self.steps = Steps(self)
        self.stay = Staying(self)
        self.captures = Captures(self)
        self.regions = Regions(self)
        self.images = Images(self)
        self.casts = Casts(self)
        self.writes = Writes(self)
        if finding is not None:
            finding.attach(self)
        self.needs.settle()
        self.tables.settle()

    # ------------------------------------------------------------------ opening and closing

    @apart_from_caller
    def open(self) -> None:
        """Takes the model over. On failure the model is as it was before."""
        if self.opened:
            return
        with unseen(), taking_over(self.model):
            self._opening = True
            sessions.tell_apart(self)
            try:
                self._change_model()
            except BaseException:
                sessions.discard(self)
                raise
            finally:
                self._opening = False

    def _change_model(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            taken = self.takeover
            self.choice.check()
            self.trained.choose()
            self.needs.check()
            try:
                taken.replace_inference_tensors()
                taken.settle_file_weights()
                taken.cast()
                self._move_unmanaged()
                self.quantised.choose(self)
                taken.fill_arena()
                self._build_runtime()
                taken.wrap()
                sessions.add(self)
                registrations.watch(self)
                optimizers.watch()
                self.answer = Answer(self.model, self._answered)
                self.writes.begin()
                self.closed = False
                self.opened = True
                self.ending = False
            except BaseException:
                self.opened, self.closed = False, True
                self._forget()
                self._restore(failed=True)
                raise
        self.takeover.succeed()

    def _forget(self) -> None:
        """Nothing watches for it any more. May be called again."""
        sessions.discard(self)
        registrations.unwatch(self)
        optimizers.unwatch()
        if self.answer is not None:
            self.answer.end()

    def _answered(self):
        """The device that the model's modules name as theirs, or None."""
        return None if self.closed else self.target.torch

    def _move_unmanaged(self) -> None:
        """Parameters that stay and all buffers go to the device, once the core has room for them."""
        items = self.takeover.outside()
        self.stay.open_with(items)
        options = {**devices.allocator(self.target), **self.options}
        if options.get("ram_budget"):
            options["ram_budget"] -= self.tables.ram_share()
        self.core, self.telemetry_path = telemetryfile.open_with(
            options.pop("telemetry_path", None), lambda path: _core.Runtime(
                self.target.core, self.budget, reserved=0 if self.stay.away else self.stay.reserved,
                parked=self.stay.away,
                read_only=self.inference_mode, name=self.name, least_room=self.needs.least_room,
                stages=self.needs.stages, telemetry_path=path,
                **options))
        self.core.soften(self.trained.beside())
        if not self.stay.away:
            self.stay.place(items)

    def _build_runtime(self) -> None:
        streamed = self.takeover.add_units(self.core)
        if streamed:
            self.core.seal()
            self._warn_of_no_kernels()
        else:
            log.info("stagehand: '%s' streams nothing: all its weights, %s, stay on the device; budget %s", self.name,
                     _core.format_size(self.stay.reserved), _core.format_size(self.budget))
        if not streamed and self.telemetry_path is not None:
            warnings.warn(f"stagehand: {self.telemetry_path} stays empty: all weights of {self.name} stay "
                          "on the device, and steps without copies are not recorded", RuntimeWarning, stacklevel=5)
        self.grads = Gradients(self.target, self.units, self.core)
        self.calls = self._what_calls_need()
        for plan in self.plans.values():
            plan.find_single()
        self.streaming = bool(streamed)
        self.tables.begin()
        self.mark_trained()

    def mark_trained(self) -> None:
        """Steps know which weights that stream take a gradient."""
        self.steps.mark_trained([(u, e) for u in self.choice.streamed() if not u.in_file for e in u.entries
                                 if e.param.requires_grad])

    def _warn_of_no_kernels(self) -> None:
        reason = self.core.stats()["expand_error"]
        if reason:
            warnings.warn(
                f"stagehand: the device cannot expand weights that cross the link in few bits; they are expanded on "
                f"the host, which is right and slower: {reason}", RuntimeWarning, stacklevel=5)

    @apart_from_caller
    def close(self) -> None:
        """The model is plain again, on the host, with the values it has now. May be called again."""
        if not self.opened:
            return
        self.check_process()
        self.refuse_inside_call()
        self.ending = True
        with self.steps.pass_lock:
            with self.steps.lock:
                if self.steps.is_open:
                    self.steps.close_step()
            if not self.closed:  # else an interrupt came into an earlier call
                self.casts.make_last()
                self.writes.settle(closing=True)
                self.steps.flush_telemetry()
                self.last_stats = self.core.stats()
            self.closed = True
            self._forget()
            if self.finding is not None:
                self.target.findings.discard(self.finding)
            with torch.inference_mode(False), torch.no_grad():
                self._restore(failed=False)
            self.opened = False

    def wait_for_others(self) -> None:
        """For a call that finds it closed: until another thread has opened it, or has closed it, which moves weights
        that the call would read."""
        if self._opening:
            with taking_over(self.model):
                pass
        elif self.opened and not self.local.depth:
            with self.steps.pass_lock:
                pass

    def refuse_inside_call(self) -> None:
        if self.local.depth:
            raise InvalidStateTransitionError(
                "the runtime cannot be shut down inside a call of its model; do it after the call")

    def _restore(self, failed: bool) -> None:
        """Undoes as much of `open` as was done."""
        taken = self.takeover
        taken.remove_stands()
        with self.regions.lock:
            self.regions.clear()
        taken.remove_plans()
        if self.grads is not None:
            self.grads.close()
        self.tables.end()
        if self.core is not None:
            self.core.close()
        self.images.end_folding()
        if failed:
            taken.undo()
        else:
            taken.unmanaged_to_host()
            optimizers.left(self.model)
        taken.unwrap()
        self.stay.watch_no_calls()
        self.images.let_go()
        self.trained.let_go()

    # ------------------------------------------------------------------ leases

    def check_process(self) -> None:
        ending.hold_if_ending()
        if os.getpid() != self._pid:
            raise StagehandError(
                "a model under stagehand cannot run, and its runtime not be used, in a forked process: the device and "
                "the copies belong to the parent. Use spawn, or shut the runtime down before the fork")
        self.captures.refuse_foreign_capture()

    def lease_into(self, plan: ModulePlan, frame: Frame) -> None:
        """Leases what a module owns and fills its frame with tensors over the places. Those are normal tensors,
        also where results are inference tensors, so that writes to them count."""
        quiet = not torch.is_grad_enabled()
        self.local.outside.look()
        try:
            with torch.inference_mode(False) if torch.is_inference_mode_enabled() else _NOTHING:
                try:
                    self._lease(plan, frame, quiet)
                except StagehandOOMError:  # what is free for its units may lie apart
                    units = {id(unit): unit.nbytes for unit, _ in plan.managed.values()}
                    if len(units) == 1:
                        raise
                    frame.clear()
                    self.core.gather(sum(units.values()))
                    self._lease(plan, frame, quiet)
        except StagehandOOMError as error:
            raise self.refused(error) from None

    def refused(self, error: Exception) -> Exception:
        """What a lease raises that could not be had."""
        if not isinstance(error, StagehandOOMError):
            return error
        if self.finding is not None:
            self.finding.refused()
        return advised(self, error)

    def seen(self, capsule, master: nn.Parameter, plain: bool) -> torch.Tensor:
        """What a call in which no gradients are recorded sees of its seat's weight: a tensor over the leased place
        behind the capsule."""
        if observed():
            with aside():
                return self.seen(capsule, master, plain)
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else _NOTHING:
            return device_copy(raw(capsule), master, True, plain)

    def _what_calls_need(self) -> _core.Calls:
        return _core.Calls(
            session=self, runtime=self.core, steps=self.steps, grad_enabled=torch.is_grad_enabled, compiler=compiler,
            autocast=functools.partial(torch.is_autocast_enabled, self.target.torch.type),
            stream=None if self.simulated else self.target.stream, tensor=torch.Tensor, storage_uses=STORAGE_USES,
            weak_refs=weakref.getweakrefcount, frame=Frame, seen=self.seen, refused=self.refused, raw=raw,
            dtypes=DLPACK, **SAVING)

    def _lease(self, plan: ModulePlan, frame: Frame, quiet: bool) -> None:
        stream = 0 if self.simulated else self.target.stream()
        sitter, plain = plan.seat.sitter, plan.seat.plain
        # One weight that is all of its unit. Other threads change the seat, never the sitter.
        if sitter is not None and not sitter.entry.is_cast:
            unit, entry = sitter.unit, sitter.entry
            master = entry.param
            if master._version != entry.version or address_of(master) != entry.address or entry.written:
                self.images.renew(unit, entry)
            frame[sitter.key] = device_copy(
                raw(self.core.acquire(unit.index, stream, entry.view)), master, quiet, plain)
            return
        bases: dict[int, torch.Tensor] = {}
        try:
            for key, (unit, entry) in list(plan.managed.items()):
                base = None if entry.view is not None else bases.get(id(unit))
                if base is None:
                    base = self.acquire(unit, stream, entry.view)
                    if entry.view is None:
                        bases[id(unit)] = base
                frame[key] = entry.over(base, plan.master(key), quiet, plain)
        finally:
            base = None  # a traceback must not keep the place
            bases.clear()

    def lease_one(self, plan: ModulePlan, key: str) -> torch.Tensor:
        """A managed weight read from outside its module's forward: leased while the tensor is held."""
        unit, entry = plan.managed[key]
        quiet = not torch.is_grad_enabled()
        self.local.outside.look()
        try:
            with torch.inference_mode(False) if torch.is_inference_mode_enabled() else _NOTHING:
                base = self.acquire(unit, self.target.stream(), entry.view)
                return entry.over(base, plan.master(key), quiet, False)
        except StagehandOOMError as error:
            raise advised(self, error, (plan, key)) from None

    @apart_from_caller
    def listed(self, plan: ModulePlan, key: str, master) -> Listed:
        """The tensor without memory that stands for a master in lists; the same one each time."""
        found = self._listed.get(id(master))
        if found is None or found.__dict__[MASTER] is not master or not found.fits(plan.entry_of(key)):
            found = self._listed[id(master)] = Listed.of(plan, key, master)
        return found

    def unlist(self, ident: int) -> None:
        """The master with this id has gone."""
        self._listed.pop(ident, None)

    def lease_bytes(self, unit: Unit) -> torch.Tensor:
        """The unit for a backward that needs it, as bytes. Holds a lease."""
        if unit.index < 0:
            return raw(unit.arena.mapped_tensor(unit.base, unit.nbytes))
        if self.tables.is_aside(unit):
            self.tables.to_layers()
        try:
            return raw(self.core.acquire(unit.index, 0 if self.simulated else self.target.stream()))
        except StagehandOOMError as error:
            raise self.refused(error) from None

    def acquire(self, unit: Unit, stream: int, seen_as: bytes | None) -> torch.Tensor:
        """A tensor over the unit's place, as `seen_as` says or as bytes, that holds a lease of it."""
        for entry in unit.entries:
            if entry.changed():
                self.images.renew(unit, entry)
        if unit.index < 0:  # a mapped table read as a whole
            return raw(unit.arena.mapped_tensor(unit.base, unit.nbytes))
        if self.tables.is_aside(unit):
            self.tables.to_layers(for_good=not torch.is_grad_enabled())
        return raw(self.core.acquire(unit.index, stream, seen_as))

    def mark_written(self, unit: Unit) -> None:
        """The unit's image has other bytes now: copies on the device are renewed before their next use."""
        if unit.index >= 0:
            self.core.mark_written(unit.index)
            self.tables.written(unit)

    def refresh(self, unit: Unit, entry) -> None:
        """Before a table is read in place: it may have been given other memory."""
        with unseen():
            if entry.changed():
                self.images.renew(unit, entry)

    def looked_up(self, entry, indices: torch.Tensor, row_bytes: int) -> None:
        """Rows of a table were read in place by work that the stream has still to do."""
        if observed():
            with aside():
                return self.looked_up(entry, indices, row_bytes)
        if self.captures.capturing:
            self.captures.looked_up(entry.param.requires_grad and not self.inference_mode)
            return
        self.core.count_mapped(indices.numel() * row_bytes)
        if entry.param.requires_grad and not self.inference_mode and not self.target.simulated:
            self.steps.looked_up(torch.cuda.current_stream(self.target.torch))

    # ------------------------------------------------------------------ inputs

    def inputs_on_device(self, args, kwargs):
        """Inputs of a pass that are on the host go to the device."""
        if self.target.simulated:
            return args, kwargs
        if observed():
            with aside():
                return self.inputs_on_device(args, kwargs)
        if not may_be_on_host((args, kwargs)):  # each part that a backward computes again comes by here
            return args, kwargs

        def move(value):
            if isinstance(value, torch.Tensor) and value.is_cpu:
                return value.to(self.target.torch, non_blocking=True)
            return value

        return _pytree.tree_map(move, (args, kwargs))

    def given_on_device(self):
        """A context of a pass. Inside it tensors that functional_call was given on the host, in place of weights that
        stream, are on the device, wherever the pass reads them; and so are those that it was given in place of
        weights that stay there."""
        if self.simulated or not self.plans_given:  # each part that a backward computes again comes by here
            return _NOTHING
        given = [(plan.masters, plan.given_on_host()) for plan in list(self.plans_given.values()) if plan.replaced]
        given = [(parameters, found) for parameters, found in given if found]
        if not given:
            return _NOTHING
        for module in self.model.modules():
            plan = self.plans.get(id(module))
            beside = {key: value for key, value in dict.items(module._parameters) if value is not None and value.is_cpu
                      and not (plan is not None and (key in plan.managed or key in plan.replaced))}
            if beside:
                given.append((module._parameters, beside))
        moved = contextlib.ExitStack()
        for parameters, found in given:
            moved.enter_context(on_device_instead(parameters, found, self.target.torch))
        return moved

    def arguments_on_device(self, args: tuple, kwargs: dict):
        """Arguments that model code moved to the host, because a parked weight told it so, come back."""
        if observed():
            with aside():
                return self.arguments_on_device(args, kwargs)
        cpu = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor) and a.is_cpu]
        if not cpu:
            return args, kwargs
        if not self._warned_input:
            self._warned_input = True
            warnings.warn(
                "stagehand: a layer was given a CPU tensor and moved it to the device, which waits for the copy. "
                f"Model code that asks a parked weight for its device gets 'cpu'; pass inputs on {self.target.torch}",
                RuntimeWarning, stacklevel=5)
        return self.inputs_on_device(args, kwargs)

    def largest_unit(self) -> int:
        return max((unit.nbytes for unit in self.units), default=0)

    def arenas(self) -> list[_core.Arena]:
        """Host memory of weights in RAM, each once."""
        found = (*(unit.arena for unit in (*self.units, *self.trained.idle)), *self.quantised.arenas())
        return list({id(arena): arena for arena in found if arena is not None}.values())

    @apart_from_caller
    def set_budget(self, budget: int) -> None:
        """A new budget in bytes, between steps."""
        self.steps.close_finished_step()
        self.steps.between(lambda: self.trained.fit(budget))
        self.trained.budget_changed()
        self.stay.make_way()
        self.tables.fit(budget)
        try:
            self.core.set_budget(budget)
            self.budget = budget
        finally:
            self.tables.fill()
        self.regions.find()
        self.finding = None

    def find_budget(self) -> None:
        """The budget is found from the next step on, as if nothing had been seen yet."""
        if observed():
            with aside():
                return self.find_budget()
        if self.finding is None:
            with self.local.masters():  # also where a pass asks for it
                self.finding = Finding(self.target, model_bytes(self.model, trained=self._trainables != "host"))
            self.finding.session = self
        self.finding.renew()


_NOTHING = contextlib.nullcontext()
