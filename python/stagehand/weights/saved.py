"""Weights that autograd saves: handles in place of leases.

Autograd keeps what backward needs, weights among it. A lease lasts as long as the storage of its tensor, so
without more every weight of a forward would stay on the device until backward. While a managed module's forward
runs, a pair of saved-tensor hooks turns each saved tensor that lies in a place of this call into a `Handle`,
and backward turns it into a new lease of whatever place the unit has then. Tensors of any other kind go to the
pair of hooks that was there before, or stay with autograd.

A pair of hooks switches autograd's check of versions off, so the check is made here. Threads: packed on the
thread of the forward, opened on autograd's.
"""

from __future__ import annotations

import contextlib
import threading
import weakref

from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as wraps
from torch.utils.checkpoint import _StopRecomputationError

from .. import _core
from .._torch import (
    hooks_enabled,
    not_to_be_compiled,
    observed,
    outside_transforms,
    pop_hooks,
    push_hooks,
    span_bytes,
    top_hooks,
    torch,
    undisturbed,
    view,
)
from ..errors import StagehandError
from . import savedmodes
from .leased import KINDS, put_data

_task = torch._C._current_graph_task_id  # of the calling thread
AVAILABLE = top_hooks is not None
OPT_OUT = "stagehand_saved_handles"  # attribute of a module; False: no hooks during its forward
PLAIN = {torch.Tensor, torch.nn.Parameter, *KINDS}  # and those of through.py


def in_backward() -> bool:
    """Whether the calling thread is inside a backward of autograd."""
    return _task() != -1


class Held:
    """What the handles of one Graph hold together."""

    __slots__ = ("graph", "__weakref__")

    def __init__(self, graph: Graph) -> None:
        self.graph = graph


class Graph:
    """Lives as long as autograd may run backward through what a step computed: handles hold it, and the nodes
    behind the model's outputs, of which it is a prehook that tells when backward begins. cut_off: the next pass ended
    the step before a backward came."""

    __slots__ = ("_session", "cut_off", "pending", "_task", "_held", "__weakref__")

    def __init__(self, session) -> None:
        self._session = weakref.ref(session)
        self.cut_off = False
        self.pending = 0  # passes that no backward has followed yet
        self._task = -1  # autograd's number of the last backward
        self._held = None  # weakref of what handles hold

    def hold(self) -> Held:
        """What handles hold from now on, as those of before are gone: it lives as long as one of them does."""
        held = Held(self)
        self._held = weakref.ref(held)
        return held

    def used_by(self, task: int) -> None:
        """A backward of autograd, by its number, goes through it."""
        if task != self._task:
            self._task = task
            self.pending -= 1

    def may_be_used(self) -> bool:
        """Whether a backward may still need weights: one is to come, or autograd kept what it saved."""
        return self.pending > 0 or self._held is not None and self._held() is not None

    def __call__(self, grads) -> None:
        session = self._session()
        if session is not None:
            session.steps.backward_through(self)


def modified(what: str, found: int, expected: int) -> RuntimeError:
    return RuntimeError(
        f"one of the variables needed for gradient computation has been modified by an inplace operation: {what} is "
        f"at version {found}; expected version {expected} instead. Write weights after backward, or detach() or "
        f"clone() what is kept")


class Handle(_core.Handle):
    """A saved tensor that lies in a unit's place, as autograd keeps it: where it lies and how it looks (`_core.Handle`,
    which makes and opens those that are as they usually are)."""

    __slots__ = ()

    @property
    def session(self):
        return self.calls.session

    def open(self) -> torch.Tensor:
        """A tensor over the place that the unit has now. It holds a lease."""
        entry, session = self.entry, self.session
        if self.overwritten is not None:
            raise modified(entry.name, self.overwritten, self.copy_version)
        if entry.param._version != self.version or entry.version != self.version:
            raise modified(entry.name, entry.param._version, self.version)
        if session.closed:
            return self._of_master()
        session.steps.backward_through(self.held.graph)
        base = session.lease_bytes(self.unit)
        if self.cast is not None:
            return self._of_cast(base)
        if not in_backward():  # somebody looks at a node's saved tensors
            session.steps.pause()
        return view(base, self.offset, self.dtype, self.shape, self.stride)

    def _of_cast(self, base: torch.Tensor) -> torch.Tensor:
        entry = self.entry
        place = view(base, entry.offset, entry.dtype, entry.shape, entry.stride)
        return view(entry.as_cast(place, self.cast), self.offset - entry.offset, self.dtype, self.shape, self.stride)

    def _of_master(self) -> torch.Tensor:
        """After shutdown the bytes are those of the parameter, on the host."""
        master = self.entry.values()
        if not self.session.simulated:
            raise StagehandError(
                f"{self.entry.name} is needed by a backward whose forward ran under stagehand, and the runtime has "
                f"been shut down since: run backward first", object=self.entry.name)
        if master.dtype != self.entry.dtype or master.stride() != self.entry.stride:
            raise StagehandError(f"{self.entry.name} was given other data since its forward: change it after backward",
                                 object=self.entry.name)
        if self.cast is not None:
            return view(self.entry.as_cast(master, self.cast), self.offset - self.entry.offset, self.dtype, self.shape,
                        self.stride)
        at = master.storage_offset() * master.element_size() + self.offset - self.entry.offset
        return view(master, at, self.dtype, self.shape, self.stride)


class CopiedByOthers(Handle):
    """One that hooks of the caller's would have been given, to keep the values of now: a write that leaves no version,
    as that of a fused optimizer, would show in it alone. image: the core's samples of the weight's image then."""

    __slots__ = ()

    def open(self) -> torch.Tensor:
        tensor = super().open()
        if not self.session.closed and _image(self) != self.image:
            raise RuntimeError(
                f"{self.entry.name} is needed for gradient computation and has been modified by an inplace operation "
                f"that leaves no version. Hooks of saved tensors are not given weights that stream, so that they could "
                f"not keep its values: write weights after backward")
        return tensor


def _image(handle: Handle) -> int:
    return handle.session.core.unit_stats(handle.unit.index)["image_hash"]


_nothing: dict[tuple, torch.Tensor] = {}


def empty_out(tensor) -> torch.Tensor:
    """Takes a tensor's memory away; the version that it shares with others stays. Returns the tensor."""
    key = tensor.dtype, tensor.device
    if key not in _nothing:
        with undisturbed():
            _nothing[key] = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    with outside_transforms():  # which have a rule of their own for `.data`
        put_data(tensor, _nothing[key])
    return tensor


class Kept:
    """A saved tensor that stays with autograd, where a pair of hooks has switched its check of versions off."""

    __slots__ = ("tensor", "version", "kind")

    def __init__(self, tensor) -> None:
        self.tensor = tensor.detach()  # shares the version; with its node there would be a cycle
        self.version = tensor._version
        self.kind = savedmodes.kind_of(tensor)

    def open(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise modified(f"[{self.tensor.type()} {list(self.tensor.shape)}]", self.tensor._version, self.version)
        return self.tensor


class Around:
    """A saved tensor that is one around others, of which some lie in places. pack: what makes of a plain tensor
    something that opens."""

    __slots__ = ("type", "context", "shape", "stride", "inner", "kind")

    def __init__(self, tensor, pack) -> None:
        self.kind = savedmodes.kind_of(tensor)
        names, self.context = tensor.__tensor_flatten__()
        self.type, self.shape, self.stride = type(tensor), tensor.shape, tensor.stride()
        parts = {name: getattr(tensor, name) for name in names}
        self.inner = {name: Around(part, pack) if wraps(part) else pack(part) for name, part in parts.items()}

    def holds_handles(self) -> bool:
        return any(isinstance(part, Handle) or (type(part) is Around and part.holds_handles())
                   for part in self.inner.values())

    def open(self) -> torch.Tensor:
        inner = {name: part.open() for name, part in self.inner.items()}
        return self.type.__tensor_unflatten__(inner, self.context, self.shape, self.stride)


_looking = threading.local()
with undisturbed():
    NOBODY = torch.empty(0, device="cpu")


def look(node, attribute: str):
    """What a pair of hooks that knows `looked_at` made of node's saved `attribute`; None where nothing was saved. It is
    not opened. Raises LookupError where another kind of hooks, or none, has it, and where a backward has freed it."""
    _looking.found = found = []
    _core.watch_unpack(1)
    try:
        saved = getattr(node, "_saved_" + attribute)
    except RuntimeError as error:
        raise LookupError(attribute) from error
    finally:
        _core.watch_unpack(-1)
        _looking.found = None
    if saved is None:
        return None
    if len(found) != 1:
        raise LookupError(attribute)
    return found[0]


def hook_of(node, attribute: str):
    """The unpack hook that has what node saved as `attribute`, below the pairs of managed calls; None where nothing was
    saved, no hook has it, or a backward has freed it. Nothing is called. Needs a PyTorch that tells, as 2.13 does."""
    raw = getattr(node, "_raw_saved_" + attribute)
    hook, packed = raw.unpack_hook, raw.data
    while hook is _core.unpack_saved and type(packed) is Below:
        hook, packed = packed.unpack, packed.packed
    return hook


def looked_at(saved) -> bool:
    """For an unpack hook: whether somebody only looks. It returns NOBODY then, in place of a tensor."""
    found = getattr(_looking, "found", None)
    if found is None:
        return False
    found.append(saved)
    return True


class Below:
    """A saved tensor that went to the pair of hooks below ours."""

    __slots__ = ("unpack", "packed")

    def __init__(self, unpack, packed) -> None:
        self.unpack = unpack
        self.packed = packed

    def open(self) -> torch.Tensor:
        return self.unpack(self.packed)


def _unpack(saved) -> torch.Tensor:
    if type(saved) is Below:
        return saved.open()
    if looked_at(saved):
        return NOBODY
    return savedmodes.opened(saved.open, saved.kind) if observed() else saved.open()


_core.know_unpack(_unpack)


class Saver(_core.Saver):
    """The pair of hooks for one call of a module: this object, which packs, and `_core.unpack_saved`. frame: the call's
    device copies. Without a plan all weights are those that this thread leases from outside."""

    __slots__ = ()

    def __init__(self, session, plan=None, frame=()) -> None:
        # Looked up, and held, before the forward can give a weight other memory, as cuDNN's layers do.
        super().__init__(session.calls, list(_places_apart(plan, frame) if frame and plan.wrapping
                                             else _places(plan, frame)))
        self.begin()

    @property
    def session(self):
        return self.calls.session

    def settle(self) -> None:
        """The call is over. A weight that it wrote after saving it cannot serve backward; one that it wrote before is
        what the master is going to be, which counts one write for it (`Writes.write_back`)."""
        again = in_backward()
        for handle in self.handles:
            for place in self.places:
                if place.entry is not handle.entry or place.cast is not handle.cast:
                    continue
                copy = place.copy
                if copy._version != handle.copy_version:
                    handle.overwritten = copy._version
                elif copy._version != handle.entry.fresh_version:
                    handle.__class__ = Handle  # samples were of the image before
                    if not again:
                        handle.version = handle.entry.version + 1

    def add(self, plan, key: str, copy: torch.Tensor) -> None:
        """The call sees its weight in another dtype from now on."""
        unit, entry = plan.managed.get(key) or plan.replaced[key]
        self.places.append(_place(unit, entry, copy, span_bytes(copy)))

    def pack_other(self, tensor):
        own = len(self.handles)
        packed = savedmodes.packed(self._packed, tensor) if observed() else self._packed(tensor)
        if packed is None:  # what their hooks do is for everybody to see
            pack, unpack = self.below
            packed = Below(unpack, pack(tensor))
        elif self.below is not None:
            if len(self.handles) == own:
                self._tell_checkpoint(tensor)
            self.note_copies(*(self.handles[own:] or [packed]))
        return packed

    def note_copies(self, *handles) -> None:
        """Of weights that hooks of the caller's are not given. Checkpointing's would keep nothing."""
        below = self._callers_below()
        where = "" if below is None else getattr(below[0], "__module__", None) or ""
        if below is None or where == "torch.utils.checkpoint" or where.startswith("stagehand."):
            return
        for handle in handles:
            if type(handle) is Handle:
                handle.__class__, handle.image = CopiedByOthers, _image(handle)

    def _callers_below(self):
        """The pair below ours and those of other models; None: there is none."""
        below = self.below
        while below is not None and type(below[0]) is Saver:
            below = below[0].below
        return below

    def _tell_checkpoint(self, tensor) -> None:
        """A weight that is leased from outside is saved. Checkpointing counts what is saved, and whether a pair of ours
        stands round that may differ between a part's forward and the one that computes it again."""
        below = self._callers_below()
        if below is not None and getattr(below[0], "__module__", "") == "torch.utils.checkpoint":
            below[0](tensor)

    def _packed(self, tensor):
        """None: the pair below has to pack it."""
        found = self._find(tensor) if type(tensor) in PLAIN else self._find_inside(tensor) if wraps(tensor) else None
        return Kept(tensor) if found is None and self.below is None else found

    def _find_inside(self, tensor) -> Around | None:
        """Of a tensor around others, if some of them lie in places."""
        around = Around(tensor, self._find_part)
        return around if around.holds_handles() else None

    def _find_part(self, tensor):
        return (self._find(tensor) if type(tensor) in PLAIN else None) or Kept(tensor)

    def _find(self, tensor) -> Handle | None:
        if tensor.layout is not torch.strided or not tensor.numel() or tensor.is_conj() or tensor.is_neg():
            return None
        address = tensor.data_ptr()
        for place in self.places:
            if not place.begin <= address < place.end:
                continue
            if address + span_bytes(tensor) > place.end:  # it reaches into the next weight
                return None
            offset = address - place.begin
            handle = Handle(self.calls, place.unit, place.entry, place.copy, tensor, offset, place.cast)
            self.handles.append(handle)
            return handle
        return self.session.local.outside.handle(self.session, tensor, address)


def _place(unit, entry, copy, nbytes: int) -> _core.Place:
    return _core.Place(copy.data_ptr(), nbytes, unit, entry, copy, copy.untyped_storage(),
                       copy.dtype if entry.is_cast else None)


def _places(plan, frame):
    """Those of the call's own weights."""
    for key, copy in frame.items() if frame else ():
        unit, entry = plan.managed.get(key) or plan.replaced[key]
        yield _place(unit, entry, copy, span_bytes(copy) if entry.is_cast else entry.nbytes)


def _places_apart(plan, frame):
    """As `_places`, where some weights are tensors around others."""
    for key, copy in frame.items():
        unit, entry = plan.managed.get(key) or plan.replaced[key]
        if entry.is_cast:
            yield _place(unit, entry, copy, span_bytes(copy))
            continue
        for part, tensor in entry.tensors(copy):
            seen = tensor if part is entry else _Inside(tensor, copy)
            yield _core.Place(tensor.data_ptr(), part.nbytes, unit, part, seen, tensor.untyped_storage())


class _Inside:
    """A tensor inside a weight that a call sees. Its version counts writes through the weight, too."""

    __slots__ = ("tensor", "weight")

    def __init__(self, tensor: torch.Tensor, weight: torch.Tensor) -> None:
        self.tensor = tensor
        self.weight = weight

    @property
    def _version(self) -> int:
        return self.tensor._version + self.weight._version


for _function in (Saver.pack_other, _unpack):  # what runs uncompiled under torch.compile calls them
    not_to_be_compiled(_function, nor_what_it_calls=True)


@contextlib.contextmanager
def hide_from_hooks():
    """What autograd saves inside is seen by no hook of the caller's, and operators by none of its modes."""
    hooks = hooks_stand() and hooks_enabled()
    if hooks:
        push_hooks(Kept, Kept.open)
    try:
        with _disable_current_modes():
            yield
    finally:
        if hooks:
            pop_hooks()


# What calls with gradients need in C.
SAVING = {"hooks_enabled": hooks_enabled, "top_hooks": top_hooks, "push_hooks": push_hooks, "pop_hooks": pop_hooks,
          "unpack": _core.unpack_saved, "stop": _StopRecomputationError, "saver": Saver, "handle": Handle,
          "kinds": PLAIN, "strided": torch.strided, "kind_of": savedmodes.kind_of, "task": _task}


def stale_hooks() -> bool:
    """Whether hooks of a call are in force, which are stale on a thread that is in none."""
    top = top_hooks(True) if AVAILABLE else None
    return top is not None and type(top[0]) is Saver


def drop_stale_hooks() -> None:
    """Hooks of calls that have ended, left by an interrupt, would stay in the way of all that autograd saves."""
    while stale_hooks() and not top_hooks(True)[0].session.local.depth:  # another model's pass may be round this one
        pop_hooks()


def saver(session, plan, frame) -> Saver | None:
    """Hooks for the call that begins, where autograd records and lets hooks be set, and the module does not say
    otherwise."""
    if not (AVAILABLE and torch.is_grad_enabled() and hooks_enabled() and getattr(plan.module, OPT_OUT, True)):
        return None
    return Saver(session, plan, frame)


def hooks_stand() -> bool:
    """Whether a pair of hooks is in force in this thread."""
    return AVAILABLE and top_hooks(True) is not None


def handles_stand(session) -> bool:
    """Whether the pair of hooks in force in this thread makes handles of the session's weights."""
    top = top_hooks(True) if AVAILABLE else None
    return top is not None and type(top[0]) is Saver and top[0].session is session


class around_operator:
    """A context for one operator that is given weights that are leased from outside. Hooks of the caller's do not keep
    these weights, as in calls."""

    __slots__ = ("session", "hooks")

    def __init__(self, session) -> None:
        self.session = session
        self.hooks = None

    def __enter__(self) -> None:
        if AVAILABLE and hooks_enabled() and not handles_stand(self.session):
            self.hooks = Saver(self.session)

    def __exit__(self, *error) -> None:
        if self.hooks is not None:
            self.hooks.end()


def advise(error: RuntimeError, name: str) -> RuntimeError | None:
    """torch.func inside a managed forward does not go with hooks: what to do, or None for other errors and for one that
    says it already."""
    if "saved tensor hooks" not in str(error) or OPT_OUT in str(error):
        return None
    return RuntimeError(
        f"{error}. Stagehand sets such hooks while {name or 'the model'} runs: with `module.{OPT_OUT} = False` on that "
        f"module it does not, and its weights stay on the device until backward")
