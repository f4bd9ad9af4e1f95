"""A session: one model under management. It takes the weights over, builds the core's runtime and puts the
model back as it was. Layer mode and block mode choose what is managed and when steps begin; all else is here.

Order of events:
    __init__   decides: units, what stays on the device and why (nothing is touched yet)
    open       arena filled unit by unit, unmanaged tensors moved, runtime sealed, forwards wrapped
    step/...   forwards lease units from the core
    close      forwards unwrapped, the model plain again on the host; safe to call twice
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings

from . import _core
from . import device as devices
from ._torch import raw, same_bytes, span_bytes, torch, view
from .errors import StagehandError, StagehandOOMError
from .hooks import Local, ManagedForward, MappedEmbedding, ModulePlan
from .units import Storages, Unit, device_tensor, full_name, owned, plain_reason, round_up

nn = torch.nn

SMALL_SHARE = 8  # vectors and scalars stay on the device if they take at most 1/8 of the budget
SMALL_BYTES = 4096


class Session:
    """See the module's docstring.

    model: nn.Module. targets: list of (name, module, group) whose own parameters are to stream.
    budget: bytes on the device for parameters, buffers and places. target: device.Target.
    dtype: cast floating tensors to this dtype, None = keep each its own. inference_mode: weights are not
    written between steps unless `writing()` says so. options: passed on to the core's Runtime.
    source: None, or a checkpoint.FileSource: parameters bound in it are read from their files; a unit of
    which every parameter is bound streams from there, the others from the arena.
    """

    def __init__(self, model, targets, *, budget, target, dtype=None, inference_mode=False, options=None,
                 source=None, map_embeddings=True) -> None:
        self.model = model
        self.budget = budget
        self.target = target
        self.dtype = dtype
        self.inference_mode = inference_mode
        self.options = dict(options or {})
        self.source = source
        self.local = Local()
        self.closed = True
        self.opened = False
        self.kept: dict[str, str] = {}  # parameter name -> why it stays on the device
        self.units: list[Unit] = []
        self.plans: dict[int, ModulePlan] = {}  # id(module) -> plan
        self.core: _core.Runtime | None = None
        self.arena: _core.Arena | None = None
        self._map_embeddings = map_embeddings and target.core.capabilities & _core.CAP_MAPPED_HOST
        self._wrappers: list = []
        self._resident: dict[int, torch.Tensor] = {}  # id(param) -> host copy's owner, for close
        self._steps_open = 0
        self.before_end = None  # called with each step that ends, while it is still open
        self._step_lock = threading.Lock()
        self._pid = os.getpid()
        self.reserved = 0  # bytes on the device outside the core's places
        self.last_stats: dict = {}  # kept at close
        self._warned_input = False
        self._choose(targets)

    # ------------------------------------------------------------------ deciding

    def _choose(self, targets) -> None:
        """Fills units and plans from the targets, in their order."""
        params = [p for _, _, _, p in owned(self.model)]
        storages = Storages(params)
        small = self._small_ones(targets)
        unit_of: dict[int, tuple[Unit, object]] = {}  # id(param) -> (unit, entry)
        for name, module, group in targets:
            unit = Unit(name or type(module).__name__, group)
            plan = ModulePlan(self, name, module)
            for key, param in module._parameters.items():
                if param is None:
                    continue
                reason = self._stays(module, param, storages) or small.get(id(param), "")
                if reason:
                    self.kept.setdefault(full_name(name, key), reason)
                    continue
                if id(param) not in unit_of:
                    self._claim(unit, full_name(name, key), param, storages, unit_of)
                plan.managed[key] = unit_of[id(param)]
            if unit.entries:
                unit.in_file = self.source is not None and self.source.covers(unit)
                unit.mapped = self._may_map(module, unit)
                self.units.append(unit)
            if plan.managed:
                self.plans[id(module)] = plan
        self._share_tied(unit_of)

    def _claim(self, unit, name, param, storages, unit_of) -> None:
        entry = unit.add(name, param)
        unit_of[id(param)] = (unit, entry)
        for twin in storages.twins(param):
            unit_of[id(twin)] = (unit, entry)

    def _share_tied(self, unit_of) -> None:
        """Modules outside the targets that own a managed parameter (a tied head) lease its unit too."""
        for name, module, key, param in owned(self.model):
            if id(param) in unit_of:
                plan = self.plans.setdefault(id(module), ModulePlan(self, name, module))
                plan.managed.setdefault(key, unit_of[id(param)])

    def _stays(self, module, param, storages) -> str:
        reason = plain_reason(param)
        if not reason and storages.entangled(param):
            reason = "it shares part of its memory with another parameter"
        if not reason and getattr(module, "max_norm", None) is not None:
            reason = "its forward changes it (max_norm)"
        return reason

    def _small_ones(self, targets) -> dict[int, str]:
        """What stays on the device for its size, as much as its share of the budget holds. First come those
        of modules that call other modules: their lease would lie between those of their children."""
        found: dict[int, tuple] = {}
        for _, module, _ in targets:
            leaf = next(module.children(), None) is None
            for param in module._parameters.values():
                if param is None:
                    continue
                nbytes = round_up(param.numel() * param.element_size())
                if param.dim() <= 1 or nbytes <= SMALL_BYTES:
                    found.setdefault(id(param), (leaf, nbytes))
        small, total = {}, 0
        for ident, (_, nbytes) in sorted(found.items(), key=lambda item: item[1]):
            total += nbytes
            if total * SMALL_SHARE > self.budget:
                break
            small[ident] = "it is small"
        return small

    def _may_map(self, module, unit) -> bool:
        return bool(
            self._map_embeddings
            and type(module) is nn.Embedding
            and len(unit.entries) == 1
            and not module.sparse
            and not unit.in_file
        )

    # ------------------------------------------------------------------ opening

    def open(self) -> None:
        """Takes the model over. On failure the model is as it was before."""
        if self.opened:
            return
        undo = contextlib.ExitStack()
        with torch.inference_mode(False), torch.no_grad(), undo:
            undo.callback(self._restore)
            if self.dtype is not None:
                self._cast()
            self.reserved = self._move_unmanaged()
            self._fill_arena()
            self._build_runtime(self.reserved)
            self._wrap()
            undo.pop_all()
        self.opened = True
        self.closed = False

    def _cast(self) -> None:
        for _, _, _, param in owned(self.model):
            if param.is_floating_point() and param.dtype != self.dtype and type(param.data) is torch.Tensor:
                param.data = param.data.to(self.dtype)
        for unit in self.units:
            entries, unit.entries, unit.nbytes = unit.entries, [], 0
            for old in entries:
                new = unit.add(old.name, old.param)
                for plan in self.plans.values():
                    for key, (owner, entry) in plan.managed.items():
                        if entry is old:
                            plan.managed[key] = (owner, new)

    def _managed_ids(self) -> set[int]:
        return {id(plan.module._parameters[key]) for plan in self.plans.values() for key in plan.managed}

    def _move_unmanaged(self) -> int:
        """Parameters that stay and all buffers go to the device. Returns the bytes they take there."""
        managed, moved, total = self._managed_ids(), {}, 0
        for name, module, key, param in owned(self.model):
            if id(param) in managed or id(param) in moved:
                continue
            self.kept.setdefault(full_name(name, key), "it is not one of the managed layers'")
            on_device = self._to_device(self._bytes_of(param), full_name(name, key))
            moved[id(param)] = True
            self._resident[id(param)] = param
            param.data = on_device
            total += round_up(span_bytes(param.data)) if type(param.data) is torch.Tensor else 0
        for module in self.model.modules():
            for key, buffer in module._buffers.items():
                if buffer is None:
                    continue
                if id(buffer) not in moved:
                    moved[id(buffer)] = self._to_device(buffer, key)
                    total += round_up(buffer.numel() * buffer.element_size())
                module._buffers[key] = moved[id(buffer)]
        return total

    def _bytes_of(self, param) -> torch.Tensor:
        """The parameter's values in host memory or where they are; fresh ones when they come from a file."""
        if self.source is not None and self.source.holds(param):
            return self.source.read(param)
        return param.data

    def _to_device(self, data: torch.Tensor, name: str) -> torch.Tensor:
        if data.is_meta:
            raise StagehandError(f"{name} is on the meta device: it has no values to run with", object=name)
        if not self.target.simulated:
            return data.to(self.target.torch)
        if type(data) is not torch.Tensor or data.layout is not torch.strided or data.numel() == 0:
            return data
        nbytes = span_bytes(data)
        try:
            base = raw(self.target.core.empty(round_up(nbytes)))
        except StagehandOOMError as error:
            raise StagehandOOMError(
                f"the budget of {_core.format_size(self.budget)} has no room for {name}, which stays on the "
                f"device ({nbytes} bytes): {error}", object=name) from error
        out = view(base, 0, data.dtype, data.shape, data.stride())
        out.copy_(data)
        return out

    def _fill_arena(self) -> None:
        for unit in self.units:
            if unit.in_file:
                for entry in unit.entries:
                    entry.remember()
        in_ram = [unit for unit in self.units if not unit.in_file]
        if not in_ram:
            return
        self.arena = _core.Arena(self.target.core, sum(unit.nbytes for unit in in_ram))
        for unit in in_ram:
            unit.base = self.arena.reserve(unit.nbytes)
            for entry in unit.entries:
                self._move_master(unit, entry)
        self.arena.finish()
        if self.arena.pin_error:
            warnings.warn(
                f"stagehand: {_core.format_size(self.arena.bytes - self.arena.pinned_bytes)} of the weights could "
                f"not be pinned and are staged through a small pinned buffer, which is slower: "
                f"{self.arena.pin_error}", RuntimeWarning, stacklevel=4)

    def _move_master(self, unit: Unit, entry) -> None:
        """The parameter's bytes go into the arena; every Parameter with these bytes gets the new storage."""
        old = self._bytes_of(entry.param)
        if old.is_meta:
            raise StagehandError(f"{entry.name} is on the meta device: it has no values to stream",
                                 object=entry.name)
        if old.device.type != "cpu":
            old = old.cpu()
        address = unit.base + entry.offset
        self.arena.write(address, old.data_ptr(), entry.nbytes)
        host = view(raw(self.arena.tensor(address, entry.nbytes)), 0, entry.dtype, entry.shape, entry.stride)
        for param in self._sharers(entry):
            param.data = host if param is entry.param else view(
                raw(self.arena.tensor(address, entry.nbytes)), 0, entry.dtype, entry.shape, entry.stride)
        entry.remember()

    def _sharers(self, entry) -> list:
        """All Parameter objects with the entry's bytes."""
        found = [entry.param]
        for plan in self.plans.values():
            for key, (_, other) in plan.managed.items():
                param = dict.get(plan.module._parameters, key)
                if other is entry and all(param is not p for p in found):
                    found.append(param)
        return found

    def _build_runtime(self, reserved: int) -> None:
        mapped = [u for u in self.units if u.mapped]
        for unit in mapped:
            if not self.arena.device_alias(unit.base):
                unit.mapped = False
        streamed = [u for u in self.units if not u.mapped or self._used_elsewhere(u)]
        self.core = _core.Runtime(
            self.target.core, self.budget, reserved=reserved, read_only=self.inference_mode,
            **devices.allocator(self.target), **self.options)
        for unit in streamed:
            flags = _core.UNIT_WRITABLE if unit.writable and not unit.in_file else 0
            where = self.source.ranges(unit) if unit.in_file else {"host": unit.base, "arena": self.arena}
            unit.index = self.core.add_unit(unit.name, unit.nbytes, group=unit.group, flags=flags, **where)
        if streamed:
            self.core.seal()

    def _used_elsewhere(self, unit: Unit) -> bool:
        """Whether a mapped table is also used whole, by a tied head."""
        owners = [p for p in self.plans.values() if any(u is unit for u, _ in p.managed.values())]
        return len(owners) > 1 or any(e.param.requires_grad for e in unit.entries) and not self.inference_mode

    def _wrap(self) -> None:
        root_done = False
        for plan in self.plans.values():
            plan.install()
            unit, entry = next(iter(plan.managed.values()))
            is_root = plan.module is self.model
            if unit.mapped and type(plan.module) is nn.Embedding:
                self._wrappers.append(MappedEmbedding(self, plan.module, plan, self._table(unit, entry)))
            else:
                self._wrappers.append(ManagedForward(self, plan.module, plan, is_root))
            root_done = root_done or is_root
        if not root_done:
            self._wrappers.append(ManagedForward(self, self.model, None, True))
        for wrapper in self._wrappers:
            wrapper.install()
        self.model.__dict__["_apply"] = _Refuse(self)

    def _table(self, unit: Unit, entry) -> torch.Tensor:
        base = raw(self.arena.mapped_tensor(unit.base + entry.offset, entry.nbytes))
        return nn.Parameter(view(base, 0, entry.dtype, entry.shape, entry.stride), requires_grad=False)

    # ------------------------------------------------------------------ running

    @contextlib.contextmanager
    def step(self):
        """One pass of the model. Nested and concurrent passes join the step that is open."""
        self.begin_step()
        self.local.depth += 1
        try:
            yield
        finally:
            self.local.depth -= 1
            self.end_step()

    def begin_step(self) -> None:
        """Opens a step or joins the open one; each begin needs an end."""
        if os.getpid() != self._pid:
            raise StagehandError(
                "a model under stagehand cannot run in a forked process: the device and the copies belong to "
                "the parent. Use spawn, or shut the runtime down before the fork")
        with self._step_lock:
            first = self._steps_open == 0
            if first and self._streams():
                self.core.step_begin()
            self._steps_open += 1

    def end_step(self) -> None:
        """Leaves the step; the last one out ends it."""
        with self._step_lock:
            self._steps_open -= 1
            if self._steps_open == 0 and self._streams() and not self.closed:
                try:
                    if self.before_end is not None:
                        self.before_end()
                finally:
                    self.core.step_end()

    def _streams(self) -> bool:
        return any(unit.index >= 0 for unit in self.units)

    def lease_into(self, plan: ModulePlan, params: dict) -> None:
        """Replaces the managed entries of `params` by tensors on the device."""
        bases: dict[int, torch.Tensor] = {}
        stream = self.target.stream()
        for key, (unit, entry) in plan.managed.items():
            base = bases.get(unit.index)
            if base is None:
                base = bases[unit.index] = self._acquire(unit, stream)
            params[key] = device_tensor(base, entry)

    def lease_one(self, plan: ModulePlan, key: str) -> torch.Tensor:
        """A managed weight read from outside its module's forward: leased while the tensor is held."""
        unit, entry = plan.managed[key]
        return device_tensor(self._acquire(unit, self.target.stream()), entry)

    def _acquire(self, unit: Unit, stream: int) -> torch.Tensor:
        if unit.index < 0:  # a mapped table read as a whole
            return raw(self.arena.mapped_tensor(unit.base, unit.nbytes))
        if not self.inference_mode:
            for entry in unit.entries:
                if entry.changed():
                    self.renew(unit, entry)
        return raw(self.core.acquire(unit.index, stream))

    def renew(self, unit: Unit, entry) -> None:
        """The master was written or given other data: its bytes in the image follow, and the device's copy
        is renewed at its next use."""
        data = entry.param.data
        if data.dtype != entry.dtype or data.shape != entry.shape:
            raise StagehandError(
                f"{entry.name} was given data of another shape or dtype ({tuple(data.shape)}, {data.dtype}; it was "
                f"{tuple(entry.shape)}, {entry.dtype}): shut stagehand down before the change and wrap again",
                object=entry.name)
        if unit.in_file:
            raise StagehandError(
                f"{entry.name} was written, but its bytes are streamed from a file: keep the model in RAM "
                f"(wrap it without a file) to change its weights", object=entry.name)
        if data.data_ptr() != entry.address:
            with torch.inference_mode(False), torch.no_grad():
                kept = view(raw(self.arena.tensor(unit.base + entry.offset, entry.nbytes)), 0, entry.dtype,
                            entry.shape, entry.stride)
                kept.copy_(data)
                entry.param.data = kept
        entry.remember()
        if unit.index >= 0:
            self.core.mark_written(unit=unit.index)

    def adopt_replacement(self, plan: ModulePlan, key: str, value) -> None:
        """A managed name got another Parameter: it is moved to the device and stays there."""
        if value is None:
            return
        name = full_name(plan.name, key)
        self.kept[name] = "it replaced a managed parameter"
        with torch.inference_mode(False), torch.no_grad():
            if value.device != self.target.torch:
                value.data = value.data.to(self.target.torch)
        self._resident[id(value)] = value

    def on_device(self, args: tuple) -> tuple:
        """Inputs that model code moved to the host, because a parked weight told it so, come back."""
        if self.target.simulated:
            return args
        for i, arg in enumerate(args):
            if isinstance(arg, torch.Tensor) and arg.device.type == "cpu":
                if not self._warned_input:
                    self._warned_input = True
                    warnings.warn(
                        "stagehand: a layer was given a CPU tensor and moved it to the device, which waits for "
                        "the copy. Model code that asks a parked weight for its device gets 'cpu'; pass inputs "
                        f"on {self.target.torch}", RuntimeWarning, stacklevel=5)
                args = args[:i] + (arg.to(self.target.torch),) + args[i + 1:]
        return args

    def set_budget(self, budget: int) -> None:
        """A new budget in bytes, between steps."""
        self.core.set_budget(bytes=budget)
        self.budget = budget

    @contextlib.contextmanager
    def writing(self):
        """For inference_mode=True: weights may be written inside; the device sees it at the next use."""
        self.synchronize()
        try:
            yield self
        finally:
            for unit in self.units:
                for entry in unit.entries:
                    if entry.changed():
                        self.renew(unit, entry)
                if unit.index >= 0:
                    self.core.mark_written(unit=unit.index)

    def synchronize(self) -> None:
        """Waits until every copy issued so far has read its master."""
        if self._streams():
            self.core.synchronize()

    # ------------------------------------------------------------------ closing

    def close(self) -> None:
        """The model is plain again, on the host, with the values it has now. Again is fine."""
        if not self.opened:
            return
        self.last_stats = self.core.stats()
        self.closed = True
        self.opened = False
        with torch.inference_mode(False), torch.no_grad():
            self._restore()

    def _restore(self) -> None:
        """Undoes as much of `open` as was done."""
        self.model.__dict__.pop("_apply", None)
        for wrapper in reversed(self._wrappers):
            if wrapper.module.__dict__.get("forward") is wrapper:
                wrapper.remove()
        self._wrappers.clear()
        for plan in self.plans.values():
            if plan.masters is not None:
                plan.remove()
                plan.masters = None
        if self.core is not None:
            self.core.close()
        host = torch.device("cpu")
        for param in self._resident.values():
            param.data = param.data.to(host) if param.device != host else param.data.clone()
        self._resident.clear()
        for module in self.model.modules():
            for key, buffer in module._buffers.items():
                if buffer is not None and (buffer.device != host or self.target.simulated):
                    module._buffers[key] = buffer.to(host) if buffer.device != host else buffer.clone()


class _Refuse:
    """Stands as `_apply` of a managed model: .to(), .cuda(), .half() would move what streams."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def __call__(self, fn, *args, **kwargs):
        raise StagehandError(
            "this model is under stagehand: .to(), .cuda(), .half() and the like would load all of it at once. Its "
            f"inputs belong on {self.session.target.torch}. To convert or move it, call shutdown() on its runtime "
            "first, or pass dtype= when wrapping")

    def __deepcopy__(self, memo):
        model = memo.get(id(self.session.model))
        return type(model)._apply.__get__(model)

    def __reduce__(self):
        return _apply_of, (self.session.model,)


def _apply_of(model):
    return type(model)._apply.__get__(model)
