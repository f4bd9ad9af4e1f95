"""Modules that torch.compile has compiled: their weights are leased before the compiled code runs (docs/compile.md)."""

from __future__ import annotations

import contextlib
import threading
import warnings

from . import _core
from ._torch import torch
from .errors import StagehandOOMError
from .hooks import Leases, ManagedForward
from .leased import as_plain

nn = torch.nn
_CALL = "_compiled_call_impl"  # what Module.compile() sets
_ORIGINAL = "_orig_mod"  # of torch.compile(module)


def _plainly(plan, key: str) -> torch.Tensor:
    """The managed weight `key` on the device, without classes of ours."""
    copy = plan.on_device(key)
    for _, tensor in plan.entry_of(key).tensors(copy):
        as_plain(tensor)
    return copy


def _together(plans: list) -> int:
    """Bytes of places when all of them are leased."""
    return sum({id(unit): unit.nbytes for plan in plans for unit, _ in plan.managed.values()}.values())


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of the module go through torch.compile; not so one that it was told to leave alone."""
    if module.__dict__.get(_CALL) is not None:
        return True
    context = module.__dict__.get("dynamo_ctx")
    return context is not None and _ORIGINAL in module._modules and type(context).__name__ != "DisableContext"


class Region(ManagedForward):
    """Stands as the compiled call of a module."""

    def __init__(self, session, module: nn.Module, plans: list) -> None:
        self.session = session
        self.module = module
        self.plans = plans
        self.root = module is session.model or module._modules.get(_ORIGINAL) is session.model
        self.slot = _CALL if module.__dict__.get(_CALL) is not None else "forward"
        self.before = module.__dict__[self.slot]
        self.own = True
        self.watchers = []  # those below this one, which their module's call does not reach
        self.compiled = _bare(self.before, self.watchers)[1]  # it may be wrapped as a container of managed modules
        inside = module if self.slot == _CALL else module._modules[_ORIGINAL]
        self.modules = list(inside.modules())
        self.lock = threading.RLock()
        self._out = None  # while compiled code runs: [(module, its wrapper)], {plan: what its module was shown}

    @property
    def inner(self):
        return self.compiled

    def _call(self, args, kwargs):
        session = self.session
        if not session.simulated:
            args, kwargs = session.arguments_on_device(args, kwargs)
        with self.lock:
            self.put_back()
            if session.closed:  # by another thread, while this one waited
                return self.compiled(*args, **kwargs)
            with contextlib.ExitStack() as leases:
                try:
                    self._lease(leases)
                except StagehandOOMError:  # what is free may lie apart
                    leases.close()
                    session.core.gather(_together(self.plans))
                    self._lease(leases)
                return self._run(args, kwargs)

    def _lease(self, leases: contextlib.ExitStack) -> None:
        for plan in self.plans:
            if plan.managed:
                leases.enter_context(Leases(self.session, plan))

    def _run(self, args, kwargs):
        """The compiled code, which sees plain modules with plain dictionaries."""
        watchers = list(self.watchers)
        self._out = wrappers, seen = [], {}
        try:
            for module in self.modules:
                wrapper = module.__dict__.get("forward")
                if isinstance(wrapper, ManagedForward):
                    wrappers.append((module, wrapper))
                    own, forward = _bare(wrapper, watchers)
                    if own:
                        module.__dict__["forward"] = forward
                    else:
                        del module.__dict__["forward"]
            for plan in self.plans:
                shown = {key: _plainly(plan, key) if key in plan.managed else value
                         for key, value in dict.items(plan.masters)}
                seen[plan] = dict(shown)
                plan.module.__dict__["_parameters"] = shown
            out = self.compiled(*args, **kwargs)
        finally:
            self.put_back()
        for watcher in watchers:
            watcher.observed(args, kwargs, out)
        return out

    def put_back(self) -> None:
        """Wrappers and masters stand where they stood. Parameters that were assigned meanwhile are assigned to them.
        Again is fine, also for a call that an interrupt has ended here."""
        if self._out is None:
            return
        wrappers, seen = self._out
        assigned = []
        for plan, shown in seen.items():
            now = plan.module.__dict__["_parameters"]
            if now is not plan.masters:
                plan.module.__dict__["_parameters"] = plan.masters
                assigned += [(plan, key, value) for key, value in now.items() if value is not shown.get(key)]
        for module, wrapper in wrappers:
            module.__dict__["forward"] = wrapper
        self._out = None
        for plan, key, value in assigned:
            plan.masters[key] = value

    def put_back_if_left(self) -> None:
        """Where no thread is inside."""
        if self._out is not None and self.lock.acquire(blocking=False):
            try:
                self.put_back()
            finally:
                self.lock.release()

    def remove(self) -> None:
        with self.lock:
            self.put_back()
            above = self.module.__dict__[self.slot]
            if above is self:
                self.module.__dict__[self.slot] = self.before
                return
            while above.inner is not self:  # a block that is watched
                above = above.inner
            above.stand_over(self.before)


def watches(wrapper) -> bool:
    """Whether it is a block's that is watched (guards.py)."""
    return hasattr(type(wrapper), "observed")


def _bare(wrapper: ManagedForward, watchers: list) -> tuple:
    """(whether the instance has a forward of its own, that forward) below our wrappers."""
    own = True
    while isinstance(wrapper, ManagedForward):
        if watches(wrapper):
            watchers.append(wrapper)
        own, wrapper = wrapper.own, wrapper.inner
    return own, wrapper


class Compiled:
    """The part of a session that knows regions."""

    def _no_regions(self) -> None:
        self._regions: list[Region] = []
        self._in_regions: dict[int, list[Region]] = {}  # by id(module): those that it is inside, in their order
        self._uncompiled: dict[str, str] = {}  # name of a compiled module that is none -> why
        self._warned_compiling = False
        self._met = self._met_in_vain = 0  # calls of the compiler since the model was walked, walks that found nothing

    def find_regions(self) -> None:
        """Takes over compiled modules that are new: the outermost that can be regions. Those that the budget does not
        hold any more run uncompiled."""
        self._met = 0
        for region in [region for region in self._regions if self._no_region(region.module, region.plans)]:
            region.remove()
            self._regions.remove(region)
            self._wrappers.remove(region)
            self._know_regions()
        refused = {}
        for name, module in self.model.named_modules():
            if id(module) in self._in_regions or not is_compiled(module):
                continue
            inside = {id(part) for part in module.modules()}
            plans = [plan for plan in self.plans.values() if id(plan.module) in inside]
            reason = self._no_region(module, plans)
            name = name or type(self.model).__name__
            if reason:
                refused[name] = reason
            elif plans:
                region = Region(self, module, plans)
                self._regions.append(region)
                self._wrappers.append(region)  # noted before it stands, so that an interrupt leaves none behind
                region.install()
                self._know_regions()
        news = {name: why for name, why in refused.items() if name not in self._uncompiled}
        self._uncompiled = refused
        for name, why in news.items():
            warnings.warn(f"stagehand: torch.compile has no effect on {name}: {why}. It runs as it would without",
                          RuntimeWarning, stacklevel=6)

    def _know_regions(self) -> None:
        self._in_regions = {}
        for region in self._regions:
            for part in region.module.modules():
                self._in_regions.setdefault(id(part), []).append(region)

    @contextlib.contextmanager
    def no_region_runs(self, module: nn.Module):
        """Inside it no other thread runs compiled code that shows leased tensors in place of the module's weights."""
        with contextlib.ExitStack() as locks:
            for region in self._in_regions.get(id(module), ()):
                locks.enter_context(region.lock)
            yield

    def compiled_names(self) -> list[str]:
        regions = {id(region.module) for region in self._regions}
        return [name or type(self.model).__name__
                for name, module in self.model.named_modules() if id(module) in regions]

    def _no_region(self, module: nn.Module, plans: list) -> str:
        """Why it cannot be one, or ""."""
        if any(plan.flat_names is not None for plan in plans):
            return "it contains an RNN, which PyTorch does not compile"
        together = _together(plans)
        room = self.budget - self.reserved - self.quantised.stage_bytes(self, self._streamed())
        if together > room:
            return (f"its weights would be on the device together, {_core.format_size(together)}, and the "
                    f"budget has {_core.format_size(room)} for them. Compile its blocks one by one (block.compile()), "
                    f"or raise the budget")
        for part in list(module._modules.get(_ORIGINAL, module).modules())[1:]:
            if watches(part.__dict__.get("forward")):
                return "blocks inside it are watched (nan_inf_check, strict_bf16). Compile these instead"
        return ""

    def met_compiler(self, module: nn.Module) -> None:
        """torch.compile has come to a managed module from outside: it was compiled after it was wrapped, or with more
        around it than the model."""
        self._met += 1
        if self._met >= 1 << min(self._met_in_vain, 10):  # a walk over the model costs more than a call
            known = len(self._regions)
            self.find_regions()
            self._met_in_vain = 0 if len(self._regions) > known else self._met_in_vain + 1
        if not (self._warned_compiling or self._uncompiled or id(module) in self._in_regions):
            self._warned_compiling = True
            warnings.warn(
                "stagehand: torch.compile has no effect on a model whose weights stream as a whole: its layers run as "
                "they would without. Compile its blocks (block.compile())", RuntimeWarning, stacklevel=5)
