"""What keeps a managed model a good citizen: copies and pickles of it are plain, it can be converted to another
dtype, and calls that would move all of it at once are refused."""

from __future__ import annotations

from .._torch import torch, unseen
from ..errors import StagehandError, some_of
from ..managed import RUNTIMES
from ..weights.fileweight import flat
from ..weights.hooks import ManagedForward, Opener
from ..weights.masters import Masters
from ..weights.units import full_name
from . import converting

nn = torch.nn

GETSTATE, DEEPCOPY, SAVE, LOAD, APPLY, COMPILE = (
    "__getstate__", "__deepcopy__", "_save_to_state_dict", "_load_from_state_dict", "_apply", "compile")
NAMES = (GETSTATE, DEEPCOPY, SAVE, LOAD, APPLY, COMPILE)


def plain_state(state: dict) -> dict:
    """A copy of a module's `__dict__` without anything of ours."""
    state = dict(state)
    for name in NAMES:
        if isinstance(state.get(name), _Stand):
            del state[name]
    for name in RUNTIMES:
        state.pop(name, None)
    forward = state.get("forward")
    while isinstance(forward, (ManagedForward, Opener)):
        own, forward = forward.own, forward.inner
        if own:
            state["forward"] = forward
        else:
            state.pop("forward", None)
    masters = state.get("_parameters")
    if isinstance(masters, Masters):
        state["_parameters"] = params = masters.plain()
        if masters.plan.flat_names is not None:
            state["_flat_weights"] = flat(masters.plan.flat_names, state["_flat_weights"], params)
    return state


class _Stand:
    """An attribute of a managed module's instance that stands in front of one of its class."""

    name = ""

    def __init__(self, session, module: nn.Module) -> None:
        self.session = session
        self.module = module

    def install(self) -> None:
        self.module.__dict__.setdefault(self.name, self)

    def remove(self) -> None:
        if self.module.__dict__.get(self.name) is self:
            del self.module.__dict__[self.name]

    def of_class(self, module):
        """The class's own attribute, bound to `module`."""
        return getattr(type(module), self.name).__get__(module)

    def __deepcopy__(self, memo):
        return self.of_class(memo.get(id(self.module), self.module))


class PlainState(_Stand):
    """`__getstate__`: pickle, torch.save and deepcopy see a plain module."""

    name = GETSTATE

    def __call__(self):
        own = getattr(type(self.module), GETSTATE, None)
        if own is None or own is getattr(object, GETSTATE, None):
            return plain_state(self.module.__dict__)
        state = own(self.module)
        return plain_state(state) if isinstance(state, dict) else state


class PlainDeepcopy(_Stand):
    """`__deepcopy__` of a class that has one of its own: it runs on the plain module."""

    name = DEEPCOPY

    def __call__(self, memo):
        module = self.module
        managed = dict(module.__dict__)
        plain = plain_state(managed)
        module.__dict__.clear()
        module.__dict__.update(plain)
        try:
            return type(module).__deepcopy__(module, memo)
        finally:
            module.__dict__.clear()
            module.__dict__.update(managed)


class MastersSaved(_Stand):
    """`_save_to_state_dict`: also inside a forward a state dict holds the masters."""

    name = SAVE

    def __call__(self, *args, **kwargs):
        with self.session.local.masters(), self.session.regions.no_region_runs(self.module):
            return self.of_class(self.module)(*args, **kwargs)


class RefusedInFiles(_Stand):
    """`_load_from_state_dict`: what cannot be loaded, because its bytes stream from a file, is refused before anything
    is. An outer module comes first, and has the names of all that is inside it."""

    name = LOAD

    def __call__(self, state_dict, prefix, local_metadata, *args, **kwargs):
        if not local_metadata.get("assign_to_params_buffers", False):
            self._refuse(state_dict, prefix)
        return self.of_class(self.module)(state_dict, prefix, local_metadata, *args, **kwargs)

    def _refuse(self, state_dict, prefix: str) -> None:
        plans = self.session.plans
        modules = self.module.named_modules(prefix=prefix[:-1], remove_duplicate=False)
        names = [full_name(name, key) for name, part in modules
                 if id(part) in plans for key, (unit, _) in plans[id(part)].managed.items() if unit.in_file]
        names = [name for name in names if name in state_dict]
        if names:
            raise StagehandError(
                f"{some_of(names)} cannot be written, because their bytes are streamed from a file; nothing "
                f"of the state dict has been loaded. Leave them out of it (strict=False), or keep the model in RAM "
                f"(wrap it without a file) to change its weights", object=names[0])


class Applied(_Stand):
    """`_apply`, which .to(), .cuda(), .half() and the like call. What would change nothing passes, another dtype
    or memory format is given, all else is refused."""

    name = APPLY

    def __call__(self, fn, *args, **kwargs):
        session, module = self.session, self.module
        if session.closed:
            session.wait_for_others()
        if session.closed:
            return self.of_class(module)(fn, *args, **kwargs)
        with session.local.masters(), unseen():
            does, dtypes, layouts = converting.effect(fn, session, module)
        if does == converting.ELSE:
            raise StagehandError(
                "this model is under stagehand: its weights stay on the host and are on "
                f"{session.target.torch} when they are used, where its inputs belong. It can be converted to another "
                "dtype or memory format; to move it or change it in another way, call shutdown() on its runtime first")
        if does == converting.CONVERTS:
            with unseen():
                done = (not layouts and converting.cast(session, module, fn, dtypes)) or converting.convert(
                    session, module, dtypes, layouts)
            if not done:
                return self.of_class(module)(fn, *args, **kwargs)
        return module


class CompiledLater(_Stand):
    """`compile`: a module that is compiled after it was wrapped is a region from its first call on."""

    name = COMPILE

    def __call__(self, *args, **kwargs):
        self.of_class(self.module)(*args, **kwargs)
        if not self.session.closed:
            self.session.regions.find()


def stands_for_copies(session, module: nn.Module) -> list[_Stand]:
    """What makes copies and pickles of a module plain. session: None before it is open."""
    stands: list[_Stand] = [PlainState(session, module)]
    if hasattr(type(module), DEEPCOPY):
        stands.append(PlainDeepcopy(session, module))
    return stands


def stands_for(session, module: nn.Module, managed: bool) -> list[_Stand]:
    """What a module needs whose forward is wrapped. managed: it has weights of its own that stream."""
    stands = [*stands_for_copies(session, module), Applied(session, module), CompiledLater(session, module)]
    if managed:
        stands.append(MastersSaved(session, module))
    if session.source is not None:
        stands.append(RefusedInFiles(session, module))
    return stands
