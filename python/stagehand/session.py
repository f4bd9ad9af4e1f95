"""A session: one model under management. It takes the weights over, builds the core's runtime and puts the
model back as it was. Layer mode and block mode choose what is managed and when steps begin.

Order of events, and where they stand:
    __init__   decides: units, what stays on the device and why; nothing is touched yet (choosing.py, needs.py)
    open       takes over: arena, runtime, wrappers (opening.py)
    step/...   steps begin and end (steps.py), forwards lease units from the core (here), backward leases them
               again (saved.py); changes of parameters are followed (writes.py)
    close      the model plain again on the host; safe to call twice (opening.py)
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import warnings
import weakref

from torch.utils import _pytree

from . import _core, ending
from ._torch import STORAGE_USES, aside, compiler, observed, raw, torch, unseen, apart_from_caller
from .advice import advised
from .captures import Captures
from .casting import Casts
from .choosing import Choosing
from .compiled import Compiled
from .errors import StagehandError, StagehandOOMError
from .finding import Finding, model_bytes
from .given import Given
from .hooks import Frame, Local, ModulePlan
from .leased import MASTER, device_copy
from .listed import Listed
from .needs import Needs
from .owning import NotCopied
from .opening import Opening
from .fileweight import make_plain
from .quantised import Quantised
from .staying import Staying
from .steps import Steps
from .units import Unit
from .writes import Writes

nn = torch.nn


class Session(Captures, Casts, Choosing, Compiled, Needs, Opening, Staying, Steps, Writes, NotCopied):
    """See the module's docstring.

    model: nn.Module. targets: list of (name, module, group) whose own parameters are to stream.
    budget: bytes on the device for parameters, buffers and places. target: device.Target.
    dtype: cast floating tensors to this dtype, None = keep each its own. inference_mode: weights are not
    written between steps unless `writing()` says so. options: passed on to the core's Runtime.
    source: None, or a filesource.FileSource: parameters bound in it are read from their files, and units of them
    stream from there; the others stream from the arena.
    transfer: None, or the encoding in which streamed weights cross the link (quantised.py).
    finding: finding.Finding that gave the budget and goes on changing it between steps, or None.
    name: of the model in errors; None: its class. With a number where another model that is open has it.
    """

    def __init__(self, model, targets, *, budget, target, dtype=None, inference_mode=False, options=None,
                 source=None, map_embeddings=True, transfer=None, name=None, finding=None) -> None:
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
        self.kept: dict[str, str] = {}  # parameter name -> why it stays on the device
        self.units: list[Unit] = []
        self.plans: dict[int, ModulePlan] = {}  # id(module) -> plan
        self.core: _core.Runtime | None = None
        self.telemetry_path = None  # of the file that the core writes
        self.calls: _core.Calls | None = None  # from open on
        self.arena: _core.Arena | None = None
        self.grads = None  # grads.Gradients, from open on
        self._map_embeddings = map_embeddings and target.core.capabilities & _core.CAP_MAPPED_HOST
        self._wrappers: list = []
        self._stands: list = []
        self._watching: list = []  # stands at modules whose tensors have left the device
        self._no_regions()
        self._no_images()
        self._no_casts()
        self._cast_from: list[tuple] = []  # (parameter, dtype before), until open has succeeded
        self._moved: list[tuple] = []  # (how to put it, tensor before), until open has succeeded
        self._replaced: list[tuple] = []  # (module, key, parameter before), until open has succeeded
        self._placed: list = []  # StorageWeakRef of what stands on the device outside the core's places
        self._noticed: dict[tuple, int] = {}  # (plan, key) that was given another Parameter -> steps to wait
        self._listed: dict[int, Listed] = {}  # by id(master), which they keep
        self._registrations = 0  # of modules and parameters, anywhere, that have been looked at
        self._trained: list[tuple] = []  # (unit, entry) of weights that took a gradient when the session opened
        self.answer = None  # answers.Answer, while it is open
        self.arbiter = None  # the ConductorRuntime that its copies go through
        self.before_end = None  # called with each step that ends, while it is still open
        self._pass_lock = threading.RLock()  # passes of several threads go one after the other
        self._regions_lock = threading.Lock()  # of whoever looks for regions
        self._runners: set[int] = set()  # threads that have run passes
        self._pid = os.getpid()
        self.reserved = 0  # bytes on the device outside the core's places
        self._counted: dict[str, int] = {}  # name -> bytes of what these are of
        self.last_stats: dict = {}  # kept at close
        self._warned_input = False
        self._streaming = False
        self._lookup = None  # event behind the last lookup in a table that may be written
        self._no_step()
        make_plain(model, lambda weight: source is None or not source.holds(weight))
        self._targets = targets
        self._choose(targets)
        if finding is not None:
            finding.attach(self)

    def again(self, budget: int) -> "Session":
        """What it would be with another budget, as open() would check it; not to be opened."""
        other = Session(self.model, self._targets, budget=budget, target=self.target, dtype=self.dtype,
                        inference_mode=self.inference_mode, options=self.options, source=self.source,
                        map_embeddings=self._map_embeddings, transfer=self.quantised.encoding)
        other._cast_units()
        return other

    # ------------------------------------------------------------------ leases

    def _check_process(self) -> None:
        ending.hold_if_ending()
        if os.getpid() != self._pid:
            raise StagehandError(
                "a model under stagehand cannot run, and its runtime not be used, in a forked process: the device and "
                "the copies belong to the parent. Use spawn, or shut the runtime down before the fork")
        self.refuse_foreign_capture()

    def lease_into(self, plan: ModulePlan, frame: Frame) -> None:
        """Leases what a module owns and fills its frame with tensors over the places. Those are normal tensors,
        also where results are inference tensors, so that writes to them count."""
        quiet = not torch.is_grad_enabled()
        self.local.outside.look()
        try:
            if torch.is_inference_mode_enabled():
                with torch.inference_mode(False):
                    self._lease(plan, frame, quiet)
            else:
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
            runtime=self.core, grad_enabled=torch.is_grad_enabled, compiler=compiler,
            autocast=functools.partial(torch.is_autocast_enabled, self.target.torch.type),
            stream=None if self.simulated else self.target.stream, tensor=torch.Tensor, storage_uses=STORAGE_USES,
            weak_refs=weakref.getweakrefcount, frame=Frame, seen=self.seen, refused=self.refused)

    def _lease(self, plan: ModulePlan, frame: Frame, quiet: bool) -> None:
        stream = 0 if self.simulated else self.target.stream()
        sitter, plain = plan.seat.sitter, plan.seat.plain
        # One weight that is all of its unit. Other threads change the seat, never the sitter.
        if sitter is not None and not sitter.entry.is_cast:
            unit, entry = sitter.unit, sitter.entry
            master = entry.param
            if master._version != entry.version or master.data_ptr() != entry.address or entry.written:
                self.renew(unit, entry)
            frame[sitter.key] = device_copy(
                raw(self.core.acquire(unit.index, stream, entry.view)), master, quiet, plain)
            return
        bases: dict[int, torch.Tensor] = {}
        try:
            for key, (unit, entry) in list(plan.managed.items()):
                base = None if entry.view is not None else bases.get(id(unit))
                if base is None:
                    base = self._acquire(unit, stream, entry.view)
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
                base = self._acquire(unit, self.target.stream(), entry.view)
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

    def lease_bytes(self, unit: Unit, seen_as: bytes | None) -> torch.Tensor:
        """The unit for a backward that needs it: as bytes, or as `seen_as` says. Holds a lease."""
        if unit.index < 0:
            return raw(unit.arena.mapped_tensor(unit.base, unit.nbytes))
        try:
            return raw(self.core.acquire(unit.index, 0 if self.simulated else self.target.stream(), seen_as))
        except StagehandOOMError as error:
            raise advised(self, error) from None

    def _acquire(self, unit: Unit, stream: int, seen_as: bytes | None) -> torch.Tensor:
        """A tensor over the unit's place, as `seen_as` says or as bytes, that holds a lease of it."""
        for entry in unit.entries:
            if entry.changed():
                self.renew(unit, entry)
        if unit.index < 0:  # a mapped table read as a whole
            return raw(unit.arena.mapped_tensor(unit.base, unit.nbytes))
        return raw(self.core.acquire(unit.index, stream, seen_as))

    def refresh(self, unit: Unit, entry) -> None:
        """Before a table is read in place: it may have been given other memory."""
        with unseen():
            if entry.changed():
                self.renew(unit, entry)

    def looked_up(self, entry, indices: torch.Tensor, row_bytes: int) -> None:
        """Rows of a table were read in place by work that the stream has still to do."""
        if observed():
            with aside():
                return self.looked_up(entry, indices, row_bytes)
        if self.capturing:
            self._captured_lookups |= entry.param.requires_grad and not self.inference_mode
            return
        self.core.count_mapped(indices.numel() * row_bytes)
        if entry.param.requires_grad and not self.inference_mode and not self.target.simulated:
            if self._lookup is None:
                self._lookup = torch.cuda.Event()
            self._lookup.record(torch.cuda.current_stream(self.target.torch))

    # ------------------------------------------------------------------ inputs

    def inputs_on_device(self, args, kwargs):
        """Inputs of a pass that are on the host go to the device."""
        if self.target.simulated:
            return args, kwargs
        if observed():
            with aside():
                return self.inputs_on_device(args, kwargs)

        def move(value):
            if isinstance(value, torch.Tensor) and value.is_cpu:
                return value.to(self.target.torch, non_blocking=True)
            return value

        return _pytree.tree_map(move, (args, kwargs))

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
        found = (*(unit.arena for unit in self.units), self.quantised.arena)
        return list({id(arena): arena for arena in found if arena is not None}.values())

    @apart_from_caller
    def set_budget(self, budget: int) -> None:
        """A new budget in bytes, between steps."""
        self.close_finished_step()
        self.make_way()
        self.core.set_budget(budget)
        self.budget = budget
        self.find_regions()
        self.finding = None

    def find_budget(self) -> None:
        """The budget is found from the next step on, as if nothing had been seen yet."""
        if observed():
            with aside():
                return self.find_budget()
        if self.finding is None:
            with self.local.masters():  # also where a pass asks for it
                self.finding = Finding(self.target, model_bytes(self.model))
            self.finding.session = self
        self.finding.renew()


_NOTHING = contextlib.nullcontext()
