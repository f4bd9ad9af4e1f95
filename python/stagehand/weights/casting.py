"""Weights that are cast while calls are under way: `module.to(torch.float32)` in one hook and back in another, as
diffusers' layerwise casting does it.

PyTorch gives a Parameter other data then. Here the image keeps its dtype, and with it what crosses the link: a call
sees the place's values in the dtype that was asked for, cast on the device for as long as the call uses them. So that
this is the value that PyTorch has, the image holds values of both dtypes: a cast that rounds rounds the master, too.

    cast(D) in a hook      calls see D(place); the Parameter on the host stays as it is
    cast back              calls see the place
    at rest, not cast back  the Parameter has data of dtype D (`lasting`), the image goes on; where D is smaller, or
                            values were written that the image cannot hold, the next pass takes the model over again

Locks: as for images. The dtype of a weight is the same for all threads, as in PyTorch.
"""

from __future__ import annotations

import sys

from .._torch import same_bits, torch, transforming, undisturbed
from ..errors import StagehandError
from ..managed import runtime_of
from .fileweight import Unheld
from .saved import in_backward
from .units import Entry, Unit, refuse_data

nn = torch.nn

_everywhere = nn.modules.module
_CALL = nn.Module._call_impl.__code__


_FLOATS = {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype) and dtype.is_floating_point
           and dtype.itemsize and "float4" not in str(dtype)}


def holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether each value of dtype `narrow` is one of dtype `wide`."""
    if wide is narrow:
        return True
    a, b = torch.finfo(wide), torch.finfo(narrow)
    return a.eps <= b.eps and a.max >= b.max and a.smallest_normal * a.eps <= b.smallest_normal * b.eps


def calls_round(model: nn.Module) -> list[nn.Module]:
    """Modules of the model, or around it, that have hooks and whose calls this thread is in; inner ones first."""
    parts, found = {id(module) for module in model.modules()}, []
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL:
            module = frame.f_locals["self"]
            if _has_hooks(module) and (id(module) in parts or any(part is model for part in module.modules())):
                found.append(module)
        frame = frame.f_back
    return found


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_pre_hooks or _everywhere._global_forward_pre_hooks or _has_hooks_behind(module))


def _has_hooks_behind(module: nn.Module) -> bool:
    return bool(module._forward_hooks or _everywhere._global_forward_hooks)

SAMPLES = 4096


class Casts:
    """What a session knows about weights that calls see in another dtype than that of the image."""

    # Of its session.
    USES = """captures.capturing images.leave_files images.lock images.master_view images.renew
        images.write_image images.write_master local mark_written model plans source steps.graph_alive
        steps.pass_lock steps.under_way trained.outgrown writes.entry_of"""

    def __init__(self, session) -> None:
        self._session = session
        self._images = session.images
        self._local = session.local
        self._model = session.model
        self._plans = session.plans
        self.now: dict[int, tuple[Unit, Entry]] = {}  # by id(entry)

    def seen_dtype(self, param: torch.Tensor) -> torch.dtype:
        """What PyTorch would give as its dtype now."""
        found = self._session.writes.entry_of(param) if self.now else None
        return param.dtype if found is None or id(found[1]) not in self.now else found[1].shown_dtype

    def is_in_calls(self, module: nn.Module) -> bool:
        """Whether a cast of the module that is asked for now belongs to a call that is under way. One of all of the
        model in the middle of its forward does not."""
        calls = calls_round(self._model)
        if self._local.depth and module is self._model:
            return all(call is module for call in calls)
        return bool(self._local.depth or calls)

    def can_cast(self, module: nn.Module, dtypes: dict) -> bool:
        """Whether calls can see the module's weights in these dtypes. dtypes: as `converting.effect` gives them."""
        changes = [{before, dtype} for (before, *_), dtype in dtypes.items() if before is not dtype]
        if self._session.captures.capturing or transforming() or not all(change <= _FLOATS for change in changes):
            return False
        plans = [plan for plan in map(self._plans.get, map(id, module.modules())) if plan is not None]
        return all(type(entry) is Entry and not entry.twins and entry.dtype in _FLOATS
                   and not isinstance(entry.param, Unheld)
                   for plan in plans for _, entry in plan.managed.values())

    def makes_smaller(self, module: nn.Module, new_dtype) -> bool:
        """Whether the module is a part of the model of which no weight takes more bytes then. new_dtype: parameter ->
        its dtype."""
        plans = [plan for plan in map(self._plans.get, map(id, module.modules())) if plan is not None]
        return module is not self._model and all(
            new_dtype(entry.param).itemsize <= entry.dtype.itemsize for plan in plans for _, entry in
            plan.managed.values())

    # ------------------------------------------------------------------ one module

    def cast(self, module: nn.Module, fn, new_dtype) -> None:
        """As `module._apply(fn)`, which changes dtypes alone. new_dtype: parameter -> its dtype."""
        plan = self._plans.get(id(module))
        if plan is None or not plan.managed:
            type(module)._apply(module, fn)
            return
        for child in module.children():
            child._apply(fn)
        with torch.no_grad():
            for key, param in list(dict.items(plan.masters)):
                if param is None:
                    continue
                known = plan.managed.get(key)
                if known is None:
                    param.data = fn(param)
                else:
                    self.show_as(*known, new_dtype(param))
                if param.grad is not None:
                    param.grad.data = fn(param.grad)
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[key] = fn(buffer)

    def was_cast(self, master: nn.Parameter, before: torch.Tensor, value: torch.Tensor) -> bool:
        """`before`, which stands for the master, is given `value` as its data. Whether that is a cast and nothing else,
        which calls see then."""
        found = self._session.writes.entry_of(master)
        if found is None or type(found[1]) is not Entry or found[1].twins or value.shape != found[1].shape:
            return False
        dtypes = found[1].dtype, before.dtype, value.dtype
        if self._session.captures.capturing or transforming() or not _FLOATS.issuperset(dtypes):
            return False
        with undisturbed():
            if not same_bits(torch.Tensor.detach(before).to(value.dtype), torch.Tensor.detach(value)):
                return False
        self.show_as(*found, value.dtype)
        return True

    # ------------------------------------------------------------------ one weight

    def show_as(self, unit: Unit, entry: Entry, dtype: torch.dtype) -> None:
        """Calls see the weight in this dtype from now on."""
        if dtype is entry.shown_dtype:
            return
        seen = [(plan, key, frame) for plan, frame in list(self._local.frames.items()) for key in list(frame)
                if plan.entry_of(key) is entry]
        for plan, key, frame in seen:
            plan.write_early(key, frame)
        with self._images.lock, undisturbed():
            lasting = entry.is_lasting()
            if lasting and dtype is entry.dtype:
                self._bring_back(unit, entry)
            elif entry.changed():
                self._images.renew(unit, entry)
            self._round(unit, entry, dtype)
            entry.see_as(dtype)
            if entry.is_cast:
                self.now[id(entry)] = unit, entry
            else:
                self.now.pop(id(entry), None)
            if lasting:
                self._give_masters(entry)
        for plan, key, frame in seen:
            plan.show_anew(key, frame)

    def _bring_back(self, unit: Unit, entry: Entry) -> None:
        """The image gets what was written to a master in another dtype."""
        if not entry.changed():
            return
        if unit.in_file:
            self._images.leave_files([unit])
        self._images.write_image(unit, entry, entry.param.data)
        entry.at_home = self._images.master_view(unit, entry)
        self._session.mark_written(unit)

    def _round(self, unit: Unit, entry: Entry, dtype: torch.dtype) -> None:
        """The master's values become ones that both dtypes have."""
        if holds(dtype, entry.dtype):
            return
        values = entry.values()
        cast = values.to(dtype)
        back = cast.to(entry.dtype)
        if not same_bits(back.to(dtype), cast):
            raise StagehandError(
                f"{entry.name} has values in {entry.dtype} that {dtype} rounds to ones which {entry.dtype} does not "
                f"have: cast it to {dtype} before wrapping, or cast by way of a wider dtype", object=entry.name)
        if same_bits(back, values):
            return
        if unit.in_file:
            self._images.leave_files([unit])
        self._images.write_master(unit, entry, back)
        if not in_backward():
            torch.autograd.graph.increment_version(entry.param)
        entry.remember()
        self._session.mark_written(unit)

    def uncast(self, plan, entry: Entry, copy: torch.Tensor, rounds: bool) -> torch.Tensor:
        """What a call wrote into the weight that it saw in another dtype, in the master's. rounds: as a cast back."""
        with undisturbed():
            values = copy.detach()
            back = values.to(entry.dtype)
            if not rounds and not same_bits(back.to(values.dtype), values):
                raise StagehandError(
                    f"the forward of {plan.name} writes {entry.name}, which is cast to {entry.cast} for the time of "
                    f"the call, and {entry.dtype}, in which it is kept, does not have the values: write it when it is "
                    f"cast back", object=entry.name)
            return back

    # ------------------------------------------------------------------ at rest

    def settle(self) -> None:
        """What has not been cast back by now stays so, unless this thread is in a pass, or in a call behind which hooks
        come. Asked at the end of a pass and of a backward, and where Parameters are looked at."""
        if self.now and not (self._local.depth or any(map(_has_hooks_behind, calls_round(self._model)))):
            self.make_last()

    def make_last(self) -> None:
        """The Parameters have the dtype that calls see."""
        with self._images.lock, undisturbed():
            for _, entry in list(self.now.values()):
                if not entry.is_lasting():
                    self._give_masters(entry)

    def _give_masters(self, entry: Entry) -> None:
        """The Parameter has the image's values in the dtype that calls see."""
        if entry.at_home is None:
            entry.at_home = entry.param.data
        entry.param.data = entry.at_home.to(entry.shown_dtype) if entry.is_cast else entry.at_home
        if not entry.is_cast:
            entry.at_home = None
        entry.remember()

    def take_other_dtype(self, unit: Unit, entry: Entry) -> None:
        """The Parameter has data of another dtype than the image, or other values of the dtype in which calls see it.
        Those that the image can hold go there. Under the image lock."""
        data = entry.param.data
        back = data.detach().to(entry.dtype) if data.dtype.is_floating_point else data
        if data.shape != entry.shape or entry.twins or not same_bits(back.to(data.dtype), data):
            refuse_data(entry, data)
        home = entry.at_home
        if home is None and not unit.in_file and unit.arena is not None:
            home = self._images.master_view(unit, entry)
        if home is None or not same_bits(home, back):
            if unit.in_file:
                self._images.leave_files([unit])
            self._images.write_image(unit, entry, back)
            home = self._images.master_view(unit, entry)
        entry.at_home = home
        entry.see_as(data.dtype)
        self.now[id(entry)] = unit, entry

    def forget_cast(self, entry: Entry) -> None:
        """Calls see it in the image's dtype again, which its Parameter has."""
        entry.see_as(entry.dtype)
        entry.at_home = None
        self.now.pop(id(entry), None)

    def wants_again(self) -> bool:
        """Whether a pass that begins has to take the model over again first: it streams in more bytes than it has, or
        has values that its image cannot hold, or data of another dtype keeps a weight on the device."""
        self._look_for_silent_writes()
        steps = self._session.steps
        if steps.under_way or in_backward() or steps.graph_alive() or self._session.source is not None:
            return False
        if self._session.trained.outgrown:
            return True
        lasting = [entry for _, entry in self.now.values() if entry.is_lasting()]
        return any(entry.shown_dtype.itemsize < entry.dtype.itemsize or
                   (entry.changed() and not same_bits(entry.param.data.to(entry.dtype).to(entry.shown_dtype),
                                                      entry.param.data))
                   for entry in lasting)

    def _look_for_silent_writes(self) -> None:
        """A master in the dtype that a hook left has the image's values. Where it does not, and its
        version is the same, it was written without one."""
        with undisturbed():
            for _, entry in list(self.now.values()):
                if entry.is_lasting() and not entry.changed():
                    seen, home = _sample(entry.param.data), _sample(entry.at_home)
                    entry.written = not same_bits(home.to(seen.dtype), seen)

    def take_over_again(self) -> None:
        """The model is under a new session, with the same options and the dtypes that its weights have now."""
        runtime = runtime_of(self._model)
        with self._session.steps.pass_lock:
            runtime._pause()
            runtime._resume(dtype=None)


def _sample(data: torch.Tensor) -> torch.Tensor:
    """All of a small tensor, and of a larger one as many numbers, spread evenly."""
    return data.flatten()[::max(1, data.numel() // SAMPLES)]
