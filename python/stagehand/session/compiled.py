"""Modules that torch.compile has compiled: their weights are leased before the compiled code runs (docs/compile.md)."""

from __future__ import annotations

import contextlib
import threading
import warnings

from .. import _core
from .._torch import graphs_keep_weights, torch
from ..errors import StagehandOOMError, some_of
from ..weights.hooks import Leases, ManagedForward, on_device_instead
from ..weights.leased import as_plain

nn = torch.nn
_CALL = "_compiled_call_impl"  # what Module.compile() sets
_ORIGINAL = "_orig_mod"  # of torch.compile(module)
_FUNCTION = "_torchdynamo_orig_callable"  # of torch.compile(function)


def _plainly(plan, key: str) -> torch.Tensor:
    """The managed weight `key` on the device, without classes of ours."""
    copy = plan.on_device(key)
    for _, tensor in plan.entry_of(key).tensors(copy):
        as_plain(tensor)
    return copy


def _together(plans: list) -> int:
    """Bytes of places when all of them are leased."""
    return sum({id(unit): unit.nbytes for plan in plans for unit, _ in list(plan.managed.values())}.values())


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of the module go through torch.compile; not so one that it was told to leave alone."""
    if module.__dict__.get(_CALL) is not None or _compiled_forward(module):
        return True
    context = module.__dict__.get("dynamo_ctx")
    return context is not None and _ORIGINAL in module._modules and type(context).__name__ != "DisableContext"


def _compiled_forward(module: nn.Module) -> bool:
    """Whether its forward was compiled by itself: `module.forward = torch.compile(module.forward)`."""
    own, forward = _bare(module.__dict__.get("forward"), [])
    of = getattr(getattr(forward, _FUNCTION, None), "__self__", None) if own else None
    return of is module


def _largest_of_plan(plan) -> int:
    """Bytes of its largest unit."""
    return max((unit.nbytes for unit, _ in list(plan.managed.values())), default=0)


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
        inside = module if self.slot == _CALL else module._modules.get(_ORIGINAL, module)
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
                self._bring_given(leases)
                return self._run(args, kwargs)

    def _lease(self, leases: contextlib.ExitStack) -> None:
        for plan in self.plans:
            if plan.managed:
                leases.enter_context(Leases(self.session, plan))

    def _bring_given(self, leases: contextlib.ExitStack) -> None:
        """Weights that functional_call was given on the host are on the device for the call, as in calls that are not
        compiled (`ManagedForward._call`)."""
        for plan in self.plans:
            given = plan.given_on_host()
            if given:
                leases.enter_context(on_device_instead(plan.masters, given, self.session.target.torch))

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
        May be called again, also for a call that an interrupt has ended here."""
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

    def in_place(self) -> bool:
        """Whether it stands, under others of ours or not. A module that is compiled again has lost it."""
        above = self.module.__dict__.get(self.slot)
        while above is not self and isinstance(above, ManagedForward):
            above = above.inner
        return above is self

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


class Regions:
    """What a session knows about compiled modules."""

    # Of its session.
    USES = """budget model needs.budget_with needs.stage_bytes plans stay.reserved takeover.add takeover.drop"""

    def __init__(self, session) -> None:
        self._session = session
        self.lock = threading.Lock()  # of threads that look for regions
        self.clear()

    def clear(self) -> None:
        """There are none. Under the lock, once the session is open."""
        self.found: list[Region] = []
        self._in_regions: dict[int, list[Region]] = {}  # by id(module): those that it is inside, in their order
        self._uncompiled: dict[str, str] = {}  # name of a compiled module that is none -> why
        self._due = False  # compiled modules are to be looked for, or to be looked at
        self._warned_compiling = False
        self._met = self._met_in_vain = 0  # calls of the compiler since the model was walked, walks that found nothing

    def look_again(self, compiled: bool = False) -> None:
        """What the budget has room for has changed, or modules have come: regions are looked at when they are looked
        for next. compiled: some of those are compiled."""
        self._due |= compiled or bool(self.found or self._uncompiled)

    def put_back_left(self) -> None:
        """What an interrupt has left in calls of regions is put back."""
        for region in self.found:
            region.put_back_if_left()

    def find(self) -> None:
        """Takes over compiled modules that are new: the outermost that can be regions. Those that the budget does not
        hold any more run uncompiled; those that were recompiled are new. Not under the step lock: a region's lock is
        taken. While another thread is at it, that one does it once more: it may wait for a region that this one is
        in."""
        self._due = True
        self.find_due()

    def find_due(self) -> None:
        """As `find`, where they are to be looked for."""
        while self._due and self.lock.acquire(blocking=False):
            try:
                while self._due:
                    self._due = False
                    self._find_regions()
            finally:
                self.lock.release()

    def _find_regions(self) -> None:
        session = self._session
        self._met = 0
        for region in [region for region in self.found
                       if not region.in_place() or self._no_region(region.module, region.plans)]:
            if region.in_place():
                region.remove()
            self.found.remove(region)
            session.takeover.drop(region)
            self._know_regions()
        refused, large = {}, {}
        for name, module in session.model.named_modules():
            if id(module) in self._in_regions or not is_compiled(module):
                continue
            inside = {id(part) for part in module.modules()}
            plans = [plan for plan in list(session.plans.values()) if id(plan.module) in inside]
            reason = self._no_region(module, plans)
            name = name or type(session.model).__name__
            if reason:
                refused[name] = reason
                if reason == self._no_room(plans):
                    large[name] = _together(plans)
            elif plans:
                region = Region(session, module, plans)
                self.found.append(region)
                session.takeover.add(region)
                self._know_regions()
        news = {name: why for name, why in refused.items() if name not in self._uncompiled}
        self._uncompiled = refused
        for why in dict.fromkeys(news.values()):
            names = [name for name in news if news[name] == why]
            advice = self._region_advice({name: large[name] for name in names if name in large})
            warnings.warn(f"stagehand: torch.compile has no effect on {some_of(names)}: {why}. What is named runs "
                          f"as it would without{advice}", RuntimeWarning, stacklevel=6)

    def _know_regions(self) -> None:
        inside: dict[int, list[Region]] = {}
        for region in self.found:
            for part in region.module.modules():
                inside.setdefault(id(part), []).append(region)
        self._in_regions = inside

    @contextlib.contextmanager
    def no_region_runs(self, module: nn.Module):
        """Inside it no other thread runs compiled code that shows leased tensors in place of the module's weights."""
        with contextlib.ExitStack() as locks:
            for region in self._in_regions.get(id(module), ()):
                locks.enter_context(region.lock)
            yield

    def names(self) -> list[str]:
        """Of modules that run compiled."""
        regions = {id(region.module) for region in self.found}
        return [name or type(self._session.model).__name__
                for name, module in self._session.model.named_modules() if id(module) in regions]

    def _region_room(self) -> int:
        return self._session.budget - self._session.stay.reserved - self._session.needs.stage_bytes

    def _region_advice(self, large: dict[str, int]) -> str:
        """large: name -> bytes of what the budget does not hold."""
        if not large:
            return ""
        name = max(large, key=large.get)
        least = self._session.needs.budget_with(large[name])
        return (f". The largest, {name}, needs {_core.format_size(large[name])}: a budget of {least} bytes "
                f"({_core.format_size(least)}) has room for it. Or compile smaller parts instead of it "
                f"(for part in module.children(): part.compile())")

    def holding(self, plans: list) -> tuple[int, int]:
        """(bytes of room in which the plans' weights find places together, a budget that has it), where they are leased
        one by one: as the free room may lie in pieces, once more of the largest."""
        need = _together(plans) + max((_largest_of_plan(plan) for plan in plans), default=0)
        return need, self._session.needs.budget_with(need)

    def holding_all(self) -> int:
        """A budget with which all weights are on the device together."""
        return self._session.needs.budget_with(_together(list(self._session.plans.values())))

    def _no_region(self, module: nn.Module, plans: list) -> str:
        """Why it cannot be one, or ""."""
        if any(plan.flat_names is not None for plan in plans):
            return "it contains an RNN, which PyTorch does not compile"
        if graphs_keep_weights():
            return ("graphs of this compiler keep the weights that they were made with. PyTorch 2.5 and newer make "
                    "others, unless torch._dynamo.config.inline_inbuilt_nn_modules is off")
        for part in list(module._modules.get(_ORIGINAL, module).modules())[1:]:
            if watches(part.__dict__.get("forward")):
                return "blocks inside it are watched (nan_inf_check, strict_bf16). Compile these instead"
        return self._no_room(plans)

    def _no_room(self, plans: list) -> str:
        room = self._region_room()
        if _together(plans) <= room:
            return ""
        return (f"what is compiled has its weights on the device together, and the budget has "
                f"{_core.format_size(room)} for them")

    def met_compiler(self, module: nn.Module) -> None:
        """torch.compile has come to a managed module from outside: it was compiled after it was wrapped, or with more
        around it than the model."""
        self._met += 1
        if self._met >= 1 << min(self._met_in_vain, 10):  # a walk over the model costs more than a call
            known = len(self.found)
            self.find()
            self._met_in_vain = 0 if len(self.found) > known else self._met_in_vain + 1
        if not (self._warned_compiling or self._uncompiled or id(module) in self._in_regions):
            self._warned_compiling = True
            warnings.warn(
                "stagehand: torch.compile has no effect on a model whose weights stream as a whole: its layers run as "
                "they would without. Compile its blocks (block.compile())", RuntimeWarning, stacklevel=5)
