"""How a module comes to see its weights on the device.

The `_parameters` of a managed module is a `Masters`: at rest a dictionary of the Parameters on the host, as
before. Inside a call of the model it answers with tensors over leased places: those of the call that is being
made (a `Frame`), or, for a weight that is read from outside its own module's forward (`pos.weight[:n]`, a
tied head, `attn.out_proj.weight`), one that is leased while it is held. Frames belong to a thread, so that
threads and recursion do not see each other's. Neither the Parameter objects nor their data are exchanged: with
them optimizers and state_dict stay as they were. A lease is the life of the tensors' storage: whatever still
holds a view of the weight holds the place.

A call is seen by a wrapper of `forward` with try/finally, not by module hooks: those miss exceptions that are
not Exception, recomputation under checkpointing, and calls compiled before they were added.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import types
import weakref

from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.checkpoint import _StopRecomputationError

from .. import _core
from .._torch import aside, compiler, exporting, not_to_be_compiled, observed, torch, tracing_fx, unseen
from ..errors import StagehandError
from . import autocast, grads, reading
from .fileweight import list_flat
from .leased import as_upload, carry_attributes, follow_data, has_attributes, is_torchs_own, refuse_recorded_write
from .masters import Masters
from .outside import Outside
from .saved import advise, drop_stale_hooks, empty_out, handles_stand, in_backward, saver, stale_hooks
from .through import tell_uses
from .wrapping import SHOWN, Wrapping, master_behind


class Pass:
    """Token of a pass that is under way. held: by a context of the user's, which may end in any order; others are
    calls."""

    __slots__ = ("held",)

    def __init__(self, held: bool) -> None:
        self.held = held


class Local(threading.local):
    """Of each thread: how deep it is in calls of the managed model, 0 = at rest, and the frames of the
    managed modules whose forward it is in."""

    def __init__(self) -> None:
        self.depth = 0  # len(passes)
        self.failed_backwards = 0  # of the session, whose leftovers this thread has looked for
        self.passes: dict[Pass, None] = {}  # in the order in which they began
        self.strays: list[Pass] = []  # passes that another thread left: this one has their lock
        self.frames: dict[ModulePlan, Frame] = {}
        self.outside = Outside()
        self.lent: list[tuple] = []  # (weakref of a module, name): has a leased copy until the pass ends
        # these, as calls see them; they stay the same objects
        self.here = _core.Here(self.passes, self.strays, self.frames, self.outside.held, self.outside.look)

    @contextlib.contextmanager
    def masters(self):
        """Inside it this thread sees masters, in a call too."""
        here = self.here
        before = here.saving  # state_dict and the like are inside
        here.saving = before + 1
        try:
            yield
        finally:
            here.saving = before

    def idle(self) -> bool:
        """Whether no pass is under way on this thread."""
        self.depth = len(self.passes)
        return not self.depth

    def enter(self, token: Pass) -> None:
        """A pass begins on this thread. Passes need not nest: those of two tasks of an event loop end in any order."""
        self.passes[token] = None
        self.depth = len(self.passes)

    def left(self, calls: list[Pass]) -> None:
        """A pass has ended. calls: those under way when it began; others were left by an interrupt, if it was a
        call."""
        for token in [token for token in self.passes if not token.held and token not in calls]:
            del self.passes[token]
        self.depth = len(self.passes)

    def quiet(self) -> bool:
        """Whether a pass that begins or ends has nothing to recover or to take back."""
        return not (self.frames or self.lent or stale_hooks()) and self.outside.quiet()

    def recover(self) -> None:
        """At the start of a pass: what an interrupt in the middle of a call's end has left."""
        self.frames.clear()
        self.ended()
        self.outside.forget()
        drop_stale_hooks()

    def master_of(self, value):
        """The master that `value` stands for inside calls, None: it stands for none."""
        master = master_behind(value)
        if master is not None or not isinstance(value, torch.Tensor):
            return master
        for plan, frame in self.frames.items():  # copies for PyTorch's own forwards do not say it themselves
            for key, copy in frame.items():
                if copy is value or frame.uploads.get(key) is value:
                    return plan.master(key)
        return None

    def lend(self, module, name: str) -> None:
        """A module without a dictionary of ours was given a leased copy: it has it until the pass ends, since the
        master is not on the device."""
        self.lent.append((weakref.ref(module), name))

    def ended(self) -> None:
        """The last pass of the thread is over: leased copies do not outlive it."""
        if observed():
            with aside():
                return self.ended()
        self.outside.look(end=True)
        self._take_back()

    def _take_back(self) -> None:
        """An owner that was lent a copy gets the master."""
        lent, self.lent = self.lent, []
        for ref, name in lent:
            module = ref()
            params = None if module is None else module._parameters
            master = self.master_of(None if params is None else dict.get(params, name))
            if master is not None:
                params[name] = master


def recomputing() -> bool:
    """Whether model code runs inside a backward: a checkpointed part that is no call of a module. Hooks and custom
    backwards run with gradients off and see masters, unless create_graph turns them on."""
    return in_backward() and torch.is_grad_enabled()


def plain_forward(module):
    """`module.forward` as its class defines it, for copies of a managed module."""
    return types.MethodType(type(module).forward, module)


class Frame(dict):
    """The device copies of one call: key -> tensor. uploads: key -> the same with a gradient. uncast: key -> the copy
    over the place, while the call sees another (casting.py). saver: the hooks of the call, if it has any."""

    __slots__ = ("uploads", "uncast", "saver")

    def __init__(self) -> None:
        self.uploads: dict[str, torch.Tensor] = {}
        self.uncast: dict[str, torch.Tensor] = {}
        self.saver = None


def is_for_a_call(params: dict, key: str) -> bool:
    """Whether functional_call has put a tensor there, which is no Parameter and may be gone after the call."""
    return not isinstance(dict.get(params, key), torch.nn.Parameter | None)


@contextlib.contextmanager
def on_device_instead(parameters: dict, given: dict, device: torch.device):
    """Inside it these tensors of a module's `_parameters`, by their names, are on the device. What a call writes into
    them stays."""
    moved = {key: (value, value.to(device)) for key, value in given.items()}
    try:
        for key, (_, copy) in moved.items():
            dict.__setitem__(parameters, key, copy)
        yield
    finally:
        for key, (value, copy) in moved.items():
            if copy._version:
                with torch.no_grad():
                    value.copy_(copy)
            if dict.get(parameters, key) is copy:
                dict.__setitem__(parameters, key, value)


class ModulePlan:
    """What one module needs for a call. managed: key -> (unit, entry); replaced: the same for keys whose
    Parameter was exchanged for something else, which is used as it is."""

    def __init__(self, session, name: str, module) -> None:
        self.session = session
        self.local = session.local
        self.name = name
        self.module = module
        self.managed: dict[str, tuple] = {}
        self.replaced: dict[str, tuple] = {}
        # taken if one weight is all and the core makes the tensor
        self.seat = _core.Seat(self, session.local, self.managed)
        # Under autocast: whether the module's forward may cast its weights, and whether it is one that casts them all.
        self.may_cast, self.casts = True, False
        self.wrapping = False  # whether one of them is, or was, a tensor around others
        self.masters: Masters | None = None
        self.original = None  # the `_parameters` object to put back
        # parameter names behind an RNN's `_flat_weights`
        self.flat_names = list(module._flat_weights_names) if module.__dict__.get("_flat_weights") is not None else None
        self.flat_lock = None if self.flat_names is None else threading.RLock()

    def install(self) -> None:
        module = self.module
        self.original = module._parameters
        self.masters = Masters(self.original.items(), self)
        module.__dict__["_parameters"] = self.masters

    def remove(self) -> None:
        self.original.clear()
        self.original.update(self.masters.plain())
        self.module.__dict__["_parameters"] = self.original
        list_flat(self.module, self.original)
        self.masters = None

    def find_single(self) -> None:
        self.seat.empty()
        self.wrapping = self.wrapping or any(type(entry) is Wrapping for _, entry in self.managed.values())
        if len(self.managed) == 1 and self.flat_names is None:
            ((key, (unit, entry)),) = self.managed.items()
            if entry.view is not None and not entry.twins:
                self.seat.take(self.session.calls, key, unit, unit.index, entry, entry.view)

    def master(self, key: str):
        """What the module has under `key` at rest."""
        masters = self.masters
        if masters is None:
            raise StagehandError(f"{self.name}: another thread shut the runtime down in the middle of a call. End the "
                                 "calls of other threads first", object=self.name)
        return dict.__getitem__(masters, key)

    def entry_of(self, key: str):
        return (self.managed.get(key) or self.replaced[key])[1]

    def at_rest(self) -> bool:
        local = self.local
        if local.strays:
            self.session.steps.take_back_strays()
        return not (local.depth or recomputing()) or local.here.saving > 0

    def lists_masters(self) -> bool:
        """Whether a walk over parameters gives masters."""
        return self.at_rest() or (self.session.steps.between_calls() and not recomputing())

    # ------------------------------------------------------------------ reading

    def on_device(self, key: str) -> torch.Tensor:
        """The managed weight `key` as code inside a call sees it."""
        if observed():
            with aside():
                return self.on_device(key)
        master = self.master(key)  # refuses where the runtime was shut down meanwhile
        frame = self.local.frames.get(self)
        copy = frame.get(key) if frame is not None else None
        kept = copy is not None
        if not kept:
            self.local.here.save_outside()
            copy = self.session.lease_one(self, key)
            unit, entry = self.managed[key]
            entry.note(self.local, unit, copy)
            if torch.is_grad_enabled():
                reading.learn(self.session)
        if not master.requires_grad or not torch.is_grad_enabled():
            return copy
        upload = frame.uploads.get(key) if kept else None
        if upload is None:
            self.session.quantised.refuse_training(*self.managed[key])
            region = autocast.region(self.session.target.torch) if self.may_cast or not kept else None
            if region is not None and not autocast.kept(master):
                region = None
            if region is not None and kept and self.casts:
                upload = autocast.upload(region, self.session, self.entry_of(key), master, copy)
                if upload is None:
                    return copy
            else:
                upload = as_upload(grads.upload(self.session, self.entry_of(key), master, copy), copy)
                if region is not None:
                    autocast.use(region, self.session, self.entry_of(key))
                if region is not None or not (kept or handles_stand(self.session)):
                    tell_uses(upload, self, key)
            if master.__dict__:
                upload.__dict__.update(master.__dict__)
            if kept:
                frame.uploads[key] = upload
        else:
            follow_data(upload, copy)
        # PyTorch uses a view of a projection's weight, of which autocast keeps no cast.
        if kept and self.flat_names is not None and not key.startswith("weight_hr") and autocast.kept(master):
            return autocast.cast_for_steps(upload, self.session.target.torch)
        return upload

    def listed(self, key: str):
        """What a walk over the model's parameters gives inside a call; see listed.py."""
        master = self.master(key)
        if key not in self.managed:
            return master
        with unseen():
            return self.session.listed(self, key, master)

    # ------------------------------------------------------------------ writing

    def assigned(self, key: str, value):
        """A name is given another value, or the one that it had before. Returns the value to keep: of a leased copy,
        which would not outlive the pass, that is the master."""
        if observed():
            with aside():
                return self.assigned(key, value)
        owner = self.managed.get(key) or self.replaced.get(key)
        self.seat.empty()
        value = self._to_keep(key, value)
        known = self.session.writes.entry_of(value)
        if known is not None:
            if owner is not None and known[1] is not owner[1]:
                self._let_go_of(key)
            self.session.writes.unnoticed(self, key)
            self.managed[key] = known  # a key is always in one of the two: calls of other threads end meanwhile
            self.replaced.pop(key, None)
            self.find_single()
            return value
        if owner is not None:
            self.replaced[key] = owner
            self.session.plans_given[id(self)] = self
            self.managed.pop(key, None)
        self.session.writes.noticed(self, key, value)
        return value

    def _to_keep(self, key: str, value):
        master = self.local.master_of(value)
        if master is None:
            return value
        if self.session.writes.entry_of(master) is None and not self.at_rest():  # another model's
            self.local.lend(self.module, key)
            return value
        return master

    def _let_go_of(self, key: str) -> None:
        """The call that is under way loses its weight to another one; what it wrote goes to the master."""
        frame = self.local.frames.get(self)
        if frame is None or key not in frame:
            return
        lost = Frame()
        lost[key] = frame.pop(key)
        if key in frame.uploads:
            lost.uploads[key] = frame.uploads.pop(key)
        self.leave(lost, False)

    def given_on_host(self) -> dict:
        """What stands in place of weights that stream, where it is on the host: functional_call is given tensors that
        were made from masters. {} where the device is the host."""
        if not self.replaced or self.session.simulated:
            return {}
        given = {key: dict.get(self.masters, key) for key in self.replaced}
        return {key: value for key, value in given.items() if isinstance(value, torch.Tensor) and value.is_cpu}

    # ------------------------------------------------------------------ casts

    def used_quietly(self) -> None:
        """A call in which autocast casts, and no gradients are recorded, sees its weights."""
        region = autocast.region(self.session.target.torch) if self.may_cast else None
        if region is not None:
            for _, entry in list(self.managed.values()):
                if autocast.kept(entry.param):
                    autocast.use_quietly(region, self.session, entry)

    def write_early(self, key: str, frame: Frame) -> None:
        """The call that is under way is going to see its weight in another dtype: what it wrote goes to the master."""
        copy, (unit, entry) = frame[key], self.managed.get(key) or self.replaced[key]
        if copy._version == entry.fresh_version:
            return
        refuse_recorded_write(frame.uploads.get(key), entry.name)
        self.session.writes.write_back(self, key, copy, rounds=True)
        if entry.is_cast:
            frame.uncast.pop(key, None)
            self.session.writes.written_back(unit, True)

    def show_anew(self, key: str, frame: Frame) -> None:
        """The call that is under way sees its weight in another dtype from now on."""
        session, copy, entry = self.session, frame[key], self.entry_of(key)
        frame.uploads.pop(key, None)
        over = copy if copy.dtype is entry.dtype else frame.uncast.pop(key, None)
        quiet, plain = not torch.is_grad_enabled(), self.seat.plain
        if over is None:
            unit, _ = self.managed.get(key) or self.replaced[key]
            base = session.acquire(unit, session.target.stream(), entry.view)
            frame[key] = entry.over(base, self.master(key), quiet, plain)
        elif entry.is_cast:
            frame.uncast[key] = over
            frame[key] = entry.shown(torch.Tensor.detach(over), self.master(key), quiet, plain)
        else:
            frame[key] = over
        if frame.saver is not None:
            frame.saver.add(self, key, frame[key])

    # ------------------------------------------------------------------ the end of a call

    def leave(self, frame: Frame, failed: bool) -> None:
        """Releases the places. What the call wrote into its weights goes back to the masters."""
        if observed():
            with aside():
                return self.leave(frame, failed)
        written, refused = [], None
        if self.wrapping:
            refused = self._leave_wrapping(frame, failed, written)
        for key, copy in frame.items():
            version = copy._version
            if version and version != self.entry_of(key).fresh_version:
                try:
                    refuse_recorded_write(frame.uploads.get(key), self.entry_of(key).name)
                    self.session.writes.write_back(self, key, copy)
                except (RuntimeError, StagehandError) as error:
                    refused = error
                written.append((self.managed.get(key) or self.replaced[key])[0])
            if self.seat.plain:  # gives its weight no attributes
                continue
            for tensor in (copy, frame.uploads.get(key)):
                if tensor is not None and has_attributes(tensor):
                    carry_attributes(tensor, self.master(key))
        if failed or refused is not None:
            # A traceback may keep the tensors for long: the place is not theirs any more.
            for tensor in (*frame.values(), *frame.uploads.values(), *frame.uncast.values()):
                empty_out(tensor)
        frame.uploads.clear()
        frame.uncast.clear()
        frame.saver = None
        frame.clear()
        for unit in written:
            self.session.writes.written_back(unit, refused is not None)
        if refused is not None:
            raise refused

    def explain(self, error: RuntimeError) -> None:
        """A call under hooks for saved tensors has failed. Raises what to do, where these are the reason."""
        advice = advise(error, self.name)
        if advice is not None:
            raise advice from error

    def _leave_wrapping(self, frame: Frame, failed: bool, written: list):
        """As `leave`, of weights that are tensors around others, which the frame has no more then. Returns the error of
        a write that the masters cannot take. The units that were written are added to `written`."""
        refused, empty = None, []
        for key in [key for key in frame if type(self.entry_of(key)) is Wrapping]:
            copy = frame.pop(key)
            unit, weight = self.managed.get(key) or self.replaced[key]
            shown = copy.__dict__.pop(SHOWN)
            try:
                parts = weight.written(copy, shown)
                if parts:
                    written.append(unit)
                    self.session.writes.write_back_parts(self.name, unit, parts, copy._version != weight.fresh_version)
            except (RuntimeError, StagehandError) as error:
                refused = error
            if shown.given is not None:
                weight.carry_attributes(copy, shown)
            empty += shown.tensors
        if failed or refused is not None:
            for tensor in empty:
                empty_out(tensor)
        return refused

    # ------------------------------------------------------------------ RNNs

    def call_flat(self, inner, args, kwargs):
        """An RNN reads its weights from a list of its own, which the module's threads share."""
        with self.flat_lock:
            before = self.module.__dict__["_flat_weights"]
            list_flat(self.module, self.masters)
            try:
                return inner(*args, **kwargs)
            finally:
                self.module.__dict__["_flat_weights"] = before


def _refuse_tracers() -> None:
    """A graph that torch.jit.trace, torch.export or make_fx makes of a pass would hold its tensors over places for
    ever."""
    if tracing_fx():
        raise StagehandError(
            "a model under stagehand cannot be traced or exported, nor by make_fx, as torch.func.linearize does: the "
            "graph would keep weights on the device, and never see later ones. Use torch.func.jvp instead of "
            "linearize, or call shutdown() on its runtime first, and wrap it again after it")
    if torch._C._get_tracing_state() is not None or exporting():
        raise StagehandError(
            "a model under stagehand cannot be traced or exported: the graph would keep weights on the device, and "
            "never see later ones. Call shutdown() on its runtime first, and wrap it again after it")


def _of_one_graph(error: Exception) -> StagehandError | None:
    """What to do where torch.compile was told to make one graph of code that calls managed modules; None for other
    errors."""
    if type(error).__name__ != "Unsupported" or "ManagedForward" not in str(error):
        return None
    return StagehandError(
        "torch.compile(fullgraph=True) was given code with modules under stagehand inside it, whose weights are leased "
        "outside of graphs: compile blocks by block.compile(fullgraph=True), before or after the model is wrapped, or "
        "their forwards before it is wrapped, or leave fullgraph out")


_uncompiled = None  # _met outside of graphs; made when it is needed


def _met(wrapper, args, kwargs):
    wrapper.session.regions.met_compiler(wrapper.module)
    return wrapper._enter(args, kwargs)


def _outside_of_graphs(wrapper, args, kwargs):
    """torch.compile sees a call of a managed module as one that it must not look into: leases end with the
    tensors' lives, which a graph would not follow. What is compiled by itself is leased around it (compiled.py)."""
    global _uncompiled
    _refuse_tracers()
    if _uncompiled is None:
        _uncompiled = torch.compiler.disable(_met)
    return _uncompiled(wrapper, args, kwargs)


def _function_of(wrapper, own):
    @functools.wraps(own)
    def forward(module, *args, **kwargs):
        return (wrapper if module is wrapper.module else own.__get__(module))(*args, **kwargs)

    forward.own, forward.__wrapped__ = own, wrapper
    with contextlib.suppress(TypeError, ValueError):  # one that tells no signature
        forward.__signature__ = inspect.signature(own)
    return forward

class Opener:
    """Stands as the forward of a module whose model opens at its first call, until the session's stands in its place.
    own: whether the instance had a forward of its own; inner: the module's forward before."""

    own, inner = False, None


def forward_below(module) -> tuple:
    """(whether the instance has a forward of its own, the module's forward); not one that opens the session."""
    stands = module.__dict__.get("forward")
    if not isinstance(stands, Opener):
        return stands is not None, module.forward
    return stands.own, stands.inner


def forward_of_class(module):
    found = type(module).forward
    return found.__get__(module) if hasattr(found, "__get__") else found


class Leases:
    """Inside it this thread sees the plan's weights on the device."""

    __slots__ = ("session", "plan", "frame", "before", "hooks")

    def __init__(self, session, plan: ModulePlan) -> None:
        self.session = session
        self.plan = plan

    def __enter__(self) -> None:
        if observed():
            with aside():
                return self.__enter__()
        session, plan = self.session, self.plan
        frames = session.local.frames
        self.before, self.hooks, self.frame = frames.get(plan), None, Frame()
        try:
            session.lease_into(plan, self.frame)
            frames[plan] = self.frame
            self.hooks = self.frame.saver = saver(session, plan, self.frame)
        except BaseException:
            self._end(True)
            raise

    def __exit__(self, kind, error, traceback) -> None:
        saved = self.hooks is not None
        # Checkpointing ends a part that it computes again in this way, with all that it needs.
        self._end(kind is not None and kind is not _StopRecomputationError)
        if saved and kind is not None and issubclass(kind, RuntimeError):
            self.plan.explain(error)

    def _end(self, failed: bool) -> None:
        if observed():
            with aside():
                return self._end(failed)
        session, plan, before = self.session, self.plan, self.before
        frames = session.local.frames
        try:
            if before is None:
                frames.pop(plan, None)
            else:
                frames[plan] = before
        finally:  # also where Ctrl-C comes here; `recover` does what is left
            if self.hooks is not None:
                self.hooks.end()
            plan.leave(self.frame, failed)
        if not session.closed:
            session.core.poll()  # ended leases make room: issue what has become possible


class ManagedForward(_core.Forward):
    """Stands as `module.forward`: of a module with weights of its own to lease, of one that contains such modules (plan
    None), or of the model itself (root), whose call is a step. Usual calls of modules of the first two kinds are made
    by the base (_core/call.c), which `managed_call` and `_call` do not see."""

    slot = "forward"  # the attribute of the instance
    _torchdynamo_disable = True
    _torchdynamo_disable_msg = "stagehand leases its weights for the time of the call"

    def __init__(self, session, module, plan: ModulePlan | None, root: bool) -> None:
        self.session = session
        self.module = module
        self.plan = plan
        self.root = root
        self.own, self._inner = forward_below(module)
        self._of_class = None if self.own else getattr(type(module), "forward", None)
        self._look()
        self.quick = not root and type(self)._call is ManagedForward._call
        if plan is not None:
            self.seat = plan.seat
        else:
            self.container = session.calls
        functools.update_wrapper(self, self._inner, updated=())

    @property
    def inner(self):
        """What is called: the instance's own forward, or that of its class as it is now. Programs patch classes
        (`nn.Linear.forward = ...`), and give a module another class."""
        if self._of_class is not None:
            found = getattr(type(self.module), "forward", None)
            if found is not self._of_class and found is not None:
                self._of_class = found
                self._inner = forward_of_class(self.module)
                self._look()
        return self._inner

    def _look(self) -> None:
        if self.plan is not None:
            own = is_torchs_own(self.module, self._inner)
            # Not so attention: its operator says what it casts.
            self.plan.seat.plain = own and type(self.module) is not autocast.MIXED
            self.plan.casts = self.plan.seat.plain and type(self.module) in autocast.MODULES
            self.plan.may_cast = not (self.plan.seat.plain and type(self.module) in autocast.NEVER)

    def __getattr__(self, name):  # `__code__`, what decorators have set: that of the forward
        if name in ("_inner", "_of_class", "module", "_function"):
            raise AttributeError(name)
        found = getattr(self.inner, name)
        return self._managed_function(found) if name == "__func__" else found

    def _managed_function(self, own):
        """For `forward.__func__`, which accelerate wraps and binds to the module as its new forward: the function that
        makes a managed call of this module. own: the forward's, for other modules."""
        if "_function" not in self.__dict__ or self._function.own is not own:
            self._function = _function_of(self, own)
        return self._function

    def managed_call(self, *args, **kwargs):
        session = self.session
        if session.closed:
            session.wait_for_others()
            if session.closed:
                return self.inner(*args, **kwargs)
        if compiler():
            return _outside_of_graphs(self, args, kwargs)
        local = session.local
        if local.strays:
            session.steps.take_back_strays()
        if local.depth and not (self.root and local.idle()):
            if not self.root:
                return self._call(args, kwargs)
            return self._call_root(*session.inputs_on_device(args, kwargs))
        return self._enter(args, kwargs)

    def _enter(self, args, kwargs):
        session = self.session
        if session.local.depth:
            return self._call_root(args, kwargs) if self.root else self._call(args, kwargs)
        if isinstance(self.module, ParametrizationList) and not recomputing():
            return self.inner(*args, **kwargs)  # a weight is read between passes: on the host, as others are
        _refuse_tracers()
        session.check_process()  # before inputs are moved: CUDA's own words in a forked child name nothing of ours
        if session.writes.gives_way_to_another(casts=self.stands()):
            return getattr(self.module, self.slot)(*args, **kwargs)
        given = args, kwargs
        args, kwargs = session.inputs_on_device(args, kwargs)
        if session.finding is not None and (self.root or session.finding.turns is not None):
            session.finding.coming(args, kwargs)
        try:
            with session.steps.step() if self.root else session.steps.passage():
                if session.closed:  # by another thread meanwhile: the weights are on the host
                    args, kwargs = given
                with session.given_on_device():
                    return self._call_root(args, kwargs) if self.root else self._call(args, kwargs)
        except Exception as error:
            advice = _of_one_graph(error)
            if advice is None:
                raise
            raise advice from error

    def _call_root(self, args, kwargs):
        session = self.session
        session.captures.refuse_foreign_capture()  # also in a step that was begun before the capture
        session.steps.called_inside()
        out = self._call(args, kwargs)
        if torch.is_grad_enabled():
            session.steps.watch_outputs(out)
        return out

    def _call(self, args, kwargs):
        plan, session = self.plan, self.session
        if session.steps.after_backward:
            session.steps.call_begins()
        given = plan.given_on_host() if plan is not None and plan.replaced else None
        if given:
            with on_device_instead(plan.masters, given, session.target.torch):
                return self._call(args, kwargs)
        if plan is None or not plan.managed or session.closed:
            return self.call_inner(args, kwargs)
        if not session.simulated:
            args, kwargs = session.arguments_on_device(args, kwargs)
        inner = self.inner  # says what the frame's tensors have to be
        with Leases(session, plan):
            if not torch.is_grad_enabled() and torch.is_autocast_enabled(session.target.torch.type):
                plan.used_quietly()
            if plan.flat_names is not None:
                return plan.call_flat(inner, args, kwargs)
            return self.inside(session.calls, inner, args, kwargs)

    def call_inner(self, args, kwargs):
        """Calls the module's own forward."""
        return self.inside(self.session.calls, self.inner, args, kwargs)

    def explain(self, error: RuntimeError) -> None:
        """A reader's call, in which hooks for saved tensors stood, has failed. As `ModulePlan.explain`."""
        advice = advise(error, type(self.module).__name__)
        if advice is not None:
            raise advice from error

    def install(self) -> None:
        self.module.__dict__[self.slot] = self

    def stands(self) -> bool:
        return self.module.__dict__.get(self.slot) is self

    def stand_over(self, inner) -> None:
        """What stood below is gone, and this did."""
        self._inner = inner

    def remove(self) -> None:
        if self.own:
            self.module.__dict__["forward"] = self.inner
        else:
            self.module.__dict__.pop("forward", None)

    def __deepcopy__(self, memo):
        return plain_forward(memo.get(id(self.module), self.module))

    def __reduce__(self):
        return plain_forward, (self.module,)


not_to_be_compiled(ManagedForward.managed_call)
not_to_be_compiled(_outside_of_graphs)
not_to_be_compiled(_refuse_tracers)


class MappedEmbedding(ManagedForward):
    """Stands as `forward` of an embedding whose table stays in host memory: the lookup reads only the rows
    it needs, over the link where there is one. A table that takes a gradient is leased like other weights."""

    def __init__(self, session, module, plan: ModulePlan, table, root: bool) -> None:
        super().__init__(session, module, plan, root)
        self.table = table
        self.row_bytes = table.shape[1] * table.element_size()

    def _call(self, args, kwargs):
        session, plan = self.session, self.plan
        if "weight" not in plan.managed:
            return super()._call(args, kwargs)
        with unseen():
            cast = plan.managed["weight"][1].is_cast
            trains = torch.is_grad_enabled() and plan.master("weight").requires_grad
        if cast or trains:
            return super()._call(args, kwargs)
        if not session.simulated:
            args, kwargs = session.arguments_on_device(args, kwargs)
        session.refresh(*plan.managed["weight"])
        frames = session.local.frames
        before = frames.get(plan)
        frame = Frame()
        frame["weight"] = self.table
        try:
            frames[plan] = frame
            return self.inner(*args, **kwargs)
        finally:
            if before is None:
                frames.pop(plan, None)
            else:
                frames[plan] = before
            indices = args[0] if args else kwargs.get("input")
            if isinstance(indices, torch.Tensor):
                session.looked_up(plan.managed["weight"][1], indices, self.row_bytes)
