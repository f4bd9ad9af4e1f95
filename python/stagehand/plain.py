"""What keeps a managed model a good citizen: copies and pickles of it are plain, and calls that would move
all of it at once are refused."""

from __future__ import annotations

import copy

from ._torch import torch
from .errors import StagehandError
from .hooks import ManagedForward, Masters

nn = torch.nn

GETSTATE, DEEPCOPY, SAVE, APPLY = "__getstate__", "__deepcopy__", "_save_to_state_dict", "_apply"
RUNTIMES = ("_stagehand_layer_runtime", "_stagehand_runtime")


def plain_state(state: dict) -> dict:
    """A copy of a module's `__dict__` without anything of ours."""
    state = dict(state)
    for name in (GETSTATE, DEEPCOPY, SAVE, APPLY):
        if isinstance(state.get(name), _Stand):
            del state[name]
    for name in RUNTIMES:
        state.pop(name, None)
    forward = state.get("forward")
    while isinstance(forward, ManagedForward):
        own, forward = forward.own, forward.inner
        if own:
            state["forward"] = forward
        else:
            state.pop("forward", None)
    masters = state.get("_parameters")
    if isinstance(masters, Masters):
        state["_parameters"] = params = masters.plain()
        if masters.plan.flat_names is not None:
            state["_flat_weights"] = [params.get(name) for name in masters.plan.flat_names]
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
        local = self.session.local
        before = local.saving
        try:
            local.saving = before + 1
            return self.of_class(self.module)(*args, **kwargs)
        finally:
            local.saving = before


class RefuseToMove(_Stand):
    """`_apply`, which .to(), .cuda(), .half() and the like call. What would change nothing passes."""

    name = APPLY

    def __call__(self, fn, *args, **kwargs):
        session = self.session
        if session.closed:
            return self.of_class(self.module)(fn, *args, **kwargs)
        if all(self._keeps(fn, probe) for probe in self._probes()):
            return self.module
        raise StagehandError(
            "this model is under stagehand: .to(), .cuda(), .half() and the like would load all of it at once. Its "
            f"inputs belong on {session.target.torch}. To convert or move it, call shutdown() on its runtime "
            "first, or pass dtype= when wrapping")

    def _probes(self):
        """Small stand-ins for the model's tensors, one of each kind."""
        kinds = {(t.dtype, t.dim(), t.requires_grad) for t in (*self.module.parameters(), *self.module.buffers())}
        for dtype, dim, requires_grad in sorted(kinds, key=str):
            probe = torch.ones((2,) * dim, dtype=torch.uint8).to(dtype)
            yield probe.requires_grad_(requires_grad and (dtype.is_floating_point or dtype.is_complex))

    def _keeps(self, fn, probe: torch.Tensor) -> bool:
        with torch.no_grad():
            before = copy.deepcopy(probe)
            after = fn(probe)
        if not isinstance(after, torch.Tensor) or after.dtype != before.dtype or after.stride() != before.stride():
            return False
        if after.is_shared() != before.is_shared() and after.device.type == "cpu":
            return False
        arrived = after is probe or after.device == self.session.target.torch != probe.device
        return arrived and _values(after) == _values(before)


def _values(tensor: torch.Tensor) -> list:
    tensor = tensor.detach().cpu()
    wide = torch.complex128 if tensor.dtype.is_complex else torch.float64
    return tensor.to(wide).flatten().tolist()


def stands_for(session, module: nn.Module, managed: bool) -> list[_Stand]:
    """What a module needs whose forward is wrapped. managed: it has weights of its own that stream."""
    stands: list[_Stand] = [PlainState(session, module), RefuseToMove(session, module)]
    if hasattr(type(module), DEEPCOPY):
        stands.append(PlainDeepcopy(session, module))
    if managed:
        stands.append(MastersSaved(session, module))
    return stands
