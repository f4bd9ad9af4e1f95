"""A session: one model under management. It takes the weights over, builds the core's runtime and puts the
model back as it was. Layer mode and block mode choose what is managed and when steps begin; all else is here.

Order of events:
    __init__   decides: units, what stays on the device and why (nothing is touched yet)
    open       arena filled unit by unit, unmanaged tensors moved, runtime sealed, forwards wrapped
    step/...   forwards lease units from the core
    close      forwards unwrapped, the model plain again on the host; safe to call twice
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import warnings
import weakref

from torch.utils import _pytree

from . import _core, registrations, relocate
from . import device as devices
from ._torch import raw, span_bytes, torch, view
from .dropper import Dropper
from .errors import InvalidStateTransitionError, StagehandError, StagehandOOMError
from .hooks import Frame, Local, ManagedForward, MappedEmbedding, ModulePlan
from .plain import stands_for
from .relocate import Item
from .units import Storages, Unit, device_copy, full_name, owned, plain_reason, round_up, see_directly

nn = torch.nn

SMALL_SHARE = 8  # vectors and scalars stay on the device if they take at most 1/8 of the budget
SMALL_BYTES = 4096
HELD_SHARE = 4  # weights held while others are used stay on the device if they take at most 1/4 of it


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
        self.simulated = target.simulated
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
        self._stands: list = []
        self._cast_from: list[tuple] = []  # (parameter, dtype before), until open has succeeded
        self._moved: list[tuple] = []  # (how to put it, tensor before), until open has succeeded
        self._replaced: list[tuple] = []  # (module, key, parameter before), until open has succeeded
        self._steps: list[object] = []  # one token for each pass that is under way
        self._noticed: list[tuple] = []  # (plan, key) that were given other Parameters
        self._registrations = 0  # of modules and parameters, anywhere, that have been looked at
        self.before_end = None  # called with each step that ends, while it is still open
        self._step_lock = threading.Lock()
        self._pass_lock = threading.RLock()  # passes of several threads go one after the other
        self._runners: set[int] = set()  # threads that have run passes
        self._pid = os.getpid()
        self.reserved = 0  # bytes on the device outside the core's places
        self.last_stats: dict = {}  # kept at close
        self._warned_input = self._warned_compiling = False
        self._streaming = False
        self._lookup = None  # event behind the last lookup in a table that may be written
        self._choose(targets)

    # ------------------------------------------------------------------ deciding

    def _choose(self, targets) -> None:
        """Fills units and plans from the targets, in their order."""
        self._refuse_overlap()
        storages = Storages([p for _, _, _, p in owned(self.model)], self.model.buffers())
        small = self._small_ones(targets)
        unit_of: dict[int, tuple[Unit, object]] = {}  # id(param) -> (unit, entry)
        for name, module, group in targets:
            one_each = type(module).forward is nn.Module.forward  # ParameterList: read one by one, from outside
            unit = None
            for key, param in module._parameters.items():
                if param is None or id(param) in unit_of:
                    continue
                reason = self._stays(module, param, storages) or small.get(id(param), "")
                if reason:
                    self.kept.setdefault(full_name(name, key), reason)
                    continue
                if unit is None or one_each:
                    unit = Unit(full_name(name, key) if one_each else name or type(module).__name__, group)
                    self.units.append(unit)
                self._claim(unit, full_name(name, key), param, storages, unit_of)
        for unit in self.units:
            unit.in_file = self.source is not None and self.source.covers(unit)
        self._plan_owners(unit_of)

    def _refuse_overlap(self) -> None:
        for name, module in self.model.named_modules():
            if isinstance(module.__dict__.get("forward"), ManagedForward):
                raise StagehandError(f"{name or 'this model'} is under stagehand already; call shutdown() on its "
                                     "runtime first", object=name)

    def _claim(self, unit, name, param, storages, unit_of) -> None:
        entry = unit.add(name, param)
        entry.twins = storages.twins(param)
        for owner in (param, *entry.twins):
            unit_of[id(owner)] = (unit, entry)

    def _plan_owners(self, unit_of) -> None:
        """Every module that owns a managed parameter leases its unit: the targets, and others that are tied to
        them (a head)."""
        for name, module, key, param in owned(self.model):
            if id(param) in unit_of:
                plan = self.plans.setdefault(id(module), ModulePlan(self, name, module))
                plan.managed[key] = unit_of[id(param)]
        for plan in self.plans.values():
            for unit, entry in plan.managed.values():
                unit.mapped = unit.mapped or self._may_map(plan.module, unit)

    def _stays(self, module, param, storages) -> str:
        reason = plain_reason(param)
        if not reason and storages.entangled(param):
            reason = "it shares memory with another tensor of the model"
        if not reason and isinstance(module, torch.jit.ScriptModule):
            reason = "its module is compiled by TorchScript"
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

    def _check(self) -> None:
        """What can be known before anything is touched: values, and the budget."""
        for name, module, key, param in owned(self.model):
            if param.is_meta:
                self._refuse_meta(full_name(name, key))
        for name, buffer in self.model.named_buffers():
            if buffer.is_meta:
                self._refuse_meta(name)
        stays = relocate.total_bytes(self._unmanaged())
        largest = max(self.units, key=lambda u: u.nbytes if self._is_streamed(u) else 0, default=None)
        nbytes = largest.nbytes if largest is not None and self._is_streamed(largest) else 0
        if stays + nbytes > self.budget:
            what = f"unit '{largest.name}' needs {nbytes} bytes there, and " if nbytes else ""
            raise StagehandOOMError(
                f"the budget of {_core.format_size(self.budget)} ({self.budget} bytes) on the device is too small: "
                f"{what}{stays} bytes stay there all the time; the smallest budget that can work is "
                f"{stays + nbytes} bytes", "BUDGET_TOO_SMALL", largest.name if nbytes else "budget")

    def _refuse_meta(self, name: str) -> None:
        raise StagehandError(f"{name} is on the meta device: it has no values to run with", object=name)

    # ------------------------------------------------------------------ opening

    def open(self) -> None:
        """Takes the model over. On failure the model is as it was before."""
        if self.opened:
            return
        with torch.inference_mode(False), torch.no_grad():
            self._cast_units()
            self._check()
            try:
                self._replace_inference_tensors()
                self._cast()
                self.reserved = self._move_unmanaged()
                self._fill_arena()
                self._build_runtime(self.reserved)
                self._wrap()
            except BaseException:
                self._restore(failed=True)
                raise
        self._forget_before()
        _OPEN.add(self)
        registrations.watch(self)
        self._registrations = registrations.count
        self.opened = True
        self.closed = False

    def _forget_before(self) -> None:
        self._cast_from.clear()
        self._moved.clear()
        self._replaced.clear()

    def _replace_inference_tensors(self) -> None:
        """Parameters that were made under inference_mode cannot be given other data: new ones stand for them."""
        new: dict[int, nn.Parameter] = {}
        for _, module, key, param in list(owned(self.model)):
            if not param.is_inference() or plain_reason(param):
                continue
            if id(param) not in new:
                new[id(param)] = nn.Parameter(param.clone(), requires_grad=param.requires_grad)
                new[id(param)].__dict__.update(param.__dict__)
            self._replaced.append((module, key, param))
            module._parameters[key] = new[id(param)]
        for unit in self.units:
            for entry in unit.entries:
                entry.param = new.get(id(entry.param), entry.param)
                entry.twins = [new.get(id(twin), twin) for twin in entry.twins]

    def _casts(self, param) -> bool:
        return (self.dtype is not None and param.is_floating_point() and param.dtype != self.dtype
                and type(param.data) is torch.Tensor)

    def _cast_units(self) -> None:
        """Sizes of units whose parameters will be cast."""
        renewed = {}
        for unit in self.units:
            if not any(self._casts(entry.param) for entry in unit.entries):
                continue
            entries, unit.entries, unit.nbytes = unit.entries, [], 0
            for old in entries:
                renewed[id(old)] = unit.add(old.name, old.param, self.dtype if self._casts(old.param) else None)
                renewed[id(old)].twins = old.twins
        for plan in self.plans.values():
            for key, (unit, entry) in plan.managed.items():
                plan.managed[key] = (unit, renewed.get(id(entry), entry))

    def _cast(self) -> None:
        cast: dict[tuple, torch.Tensor] = {}  # tensors that were one stay one
        for _, _, _, param in owned(self.model):
            if not self._casts(param):
                continue
            data = param.data
            key = (data.data_ptr(), data.shape, data.stride(), data.dtype)
            if param.is_meta or key not in cast:
                cast[key] = data.to(self.dtype)
            self._cast_from.append((param, data.dtype))
            param.data = cast[key]

    def _managed_ids(self) -> set[int]:
        return {id(plan.module._parameters[key]) for plan in self.plans.values() for key in plan.managed}

    def _unmanaged(self) -> list[Item]:
        """Parameters that stay on the device, and all buffers; objects that stand in several places once."""
        managed, seen, items = self._managed_ids(), set(), []
        for name, module, key, param in owned(self.model):
            if id(param) in managed or id(param) in seen:
                continue
            seen.add(id(param))
            self.kept.setdefault(full_name(name, key), "it is not one of the managed layers'")
            items.append(Item(full_name(name, key), self._bytes_of(param), _Data(param)))
        places: dict[int, list] = {}
        for module in self.model.modules():
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    places.setdefault(id(buffer), []).append((module, key))
        for name, buffer in self.model.named_buffers():
            items.append(Item(name, buffer, _Buffer(places[id(buffer)])))
        return items

    def _move_unmanaged(self) -> int:
        """Parameters that stay and all buffers go to the device. Returns the bytes they take there."""
        items = self._unmanaged()
        self._moved = [(item.put, item.put.before()) for item in items]
        movable = [item for item in items if relocate.plain(item.data)
                   and (self.target.simulated or item.data.device != self.target.torch)]
        moved = {id(item) for item in movable}
        for item in items:
            if id(item) not in moved and not self.target.simulated:
                item.put(item.data.to(self.target.torch))
        total = relocate.total_bytes(items)
        relocate.move(movable, relocate.on_device(self.target))
        return total

    def _bytes_of(self, param) -> torch.Tensor:
        """The parameter's values in host memory or where they are; fresh ones when they come from a file."""
        if self.source is not None and self.source.holds(param):
            return self.source.read(param)
        return param.data

    def _fill_arena(self) -> None:
        for unit in self.units:
            if unit.in_file:
                for entry in unit.entries:
                    entry.remember()
        in_ram = [unit for unit in self.units if not unit.in_file]
        if not in_ram:
            return
        self.arena = _core.Arena(self.target.core, sum(unit.nbytes for unit in in_ram))
        with Dropper() as originals:
            for unit in in_ram:
                unit.base = self.arena.reserve(unit.nbytes)
                for entry in unit.entries:
                    originals.drop(self._move_master(unit, entry))
            self.arena.finish()
        if self.arena.pin_error:
            warnings.warn(
                f"stagehand: {_core.format_size(self.arena.bytes - self.arena.pinned_bytes)} of the weights could "
                f"not be pinned and are staged through a small pinned buffer, which is slower: "
                f"{self.arena.pin_error}", RuntimeWarning, stacklevel=4)

    def _move_master(self, unit: Unit, entry) -> list:
        """The parameter's bytes go into the arena; every Parameter with these bytes gets the new storage. Returns
        a box with the old one."""
        old = [self._bytes_of(entry.param)]
        if old[0].device.type != "cpu":
            old[0] = old[0].cpu()
        address = unit.base + entry.offset
        self.arena.write(address, old[0].data_ptr(), entry.nbytes)
        host = self._master_view(unit, entry)
        for param in (entry.param, *entry.twins):
            param.data = host if param is entry.param else self._master_view(unit, entry)
        entry.remember()
        return old

    def _master_view(self, unit: Unit, entry) -> torch.Tensor:
        """A tensor over the entry's bytes in the arena, with a storage of its own."""
        return view(raw(self.arena.tensor(unit.base + entry.offset, entry.nbytes)), 0, entry.dtype, entry.shape,
                    entry.stride)

    def _build_runtime(self, reserved: int) -> None:
        for unit in self.units:
            if unit.mapped and not self.arena.device_alias(unit.base):
                unit.mapped = False
        self.core = _core.Runtime(
            self.target.core, self.budget, reserved=reserved, read_only=self.inference_mode,
            **devices.allocator(self.target), **self.options)
        streamed = [unit for unit in self.units if self._is_streamed(unit)]
        keep = self._held_round_others(streamed)
        for unit in streamed:
            if unit.in_file:
                flags, where = 0, self.source.ranges(unit)
            else:
                flags = _core.UNIT_WRITABLE if unit.writable else _core.UNIT_WATCHED
                where = {"host": unit.base, "arena": self.arena}
            if id(unit) in keep:
                flags |= _core.UNIT_KEEP
            unit.index = self.core.add_unit(unit.name, unit.nbytes, group=unit.group, flags=flags, **where)
            if len(unit.entries) == 1:
                see_directly(unit.entries[0])
        if streamed:
            self.core.seal()
        for plan in self.plans.values():
            plan.find_single()
        self._streaming = bool(streamed)

    def _held_round_others(self, streamed: list[Unit]) -> set[int]:
        """Units that a module holds while modules inside it use theirs: kept on the device if that is cheap, for
        a place that is held in the middle of the ring is in the way of what streams round it."""
        outer = [plan for plan in self.plans.values()
                 if any(id(part) in self.plans for part in plan.module.modules() if part is not plan.module)]
        ids = {id(unit) for plan in outer for unit, _ in plan.managed.values()}
        nbytes = sum(unit.nbytes for unit in streamed if id(unit) in ids)
        return ids if nbytes * HELD_SHARE <= self.budget - self.reserved else set()

    def _is_streamed(self, unit: Unit) -> bool:
        """Whether a unit is ever used as a whole: not so a table of which embeddings alone look up rows."""
        if not unit.mapped:
            return True
        owners = [p for p in self.plans.values() if any(u is unit for u, _ in p.managed.values())]
        return not all(self._may_map(p.module, unit) for p in owners) or (unit.writable and not self.inference_mode)

    def _wrap(self) -> None:
        self._warn_of_bare_tensors()
        for plan in self.plans.values():
            plan.install()
        above = _containers(self.model, {id(plan.module) for plan in self.plans.values()})
        for module in above:
            self._wrap_module(module, None)
        for plan in self.plans.values():
            self._wrap_module(plan.module, plan)

    def _wrap_module(self, module, plan) -> None:
        root = module is self.model
        wrapper = None
        if plan is not None and "weight" in plan.managed:
            unit, entry = plan.managed["weight"]
            if unit.mapped and self._may_map(module, unit):
                wrapper = MappedEmbedding(self, module, plan, self._table(unit, entry), root)
        wrapper = wrapper or ManagedForward(self, module, plan, root)
        wrapper.install()
        self._wrappers.append(wrapper)
        for stand in stands_for(self, module, plan is not None):
            stand.install()
            self._stands.append(stand)

    def _warn_of_bare_tensors(self) -> None:
        if self.target.simulated:
            return
        found = bare_tensors(self.model)
        if found:
            warnings.warn(
                f"stagehand: {', '.join(found)} are tensors that are neither parameters nor buffers: they stay on "
                f"the CPU. Register them with register_buffer(), or move them to {self.target.torch}",
                RuntimeWarning, stacklevel=5)

    def _table(self, unit: Unit, entry) -> torch.Tensor:
        base = raw(self.arena.mapped_tensor(unit.base + entry.offset, entry.nbytes))
        return nn.Parameter(view(base, 0, entry.dtype, entry.shape, entry.stride), requires_grad=False)

    # ------------------------------------------------------------------ running

    @contextlib.contextmanager
    def step(self):
        """One pass of the model. Nested passes join the step that is open; those of other threads wait."""
        local, token = self.local, object()
        depth = local.depth
        self._check_process()
        with self._pass_lock:
            try:
                self._runners.add(threading.get_ident())
                self._begin(token)
                local.depth = depth + 1
                yield
            finally:
                local.depth = depth
                self._end(token)

    @contextlib.contextmanager
    def passage(self):
        """A call of a part of the model alone: no step of its own."""
        self._check_process()
        local = self.local
        try:
            self._settle()
            if self._streaming:
                self.core.fence()
            local.depth = 1
            yield
        finally:
            local.depth = 0

    def begin_step(self) -> None:
        """Opens a step or joins the open one; each begin needs an end."""
        self._check_process()
        self._begin(_HELD)

    def end_step(self) -> None:
        """Leaves the step; the last one out ends it."""
        self._end(_HELD)

    def _check_process(self) -> None:
        if _exiting:
            _park()
        if os.getpid() != self._pid:
            raise StagehandError(
                "a model under stagehand cannot run in a forked process: the device and the copies belong to "
                "the parent. Use spawn, or shut the runtime down before the fork")

    def _begin(self, token) -> None:
        with self._step_lock:
            self._steps.append(token)
            if len(self._steps) > 1:
                return
            self._settle()
            if not self._streaming:
                return
            try:
                self.core.step_begin()
            except InvalidStateTransitionError:  # an interrupt came between its end and our noticing
                self.core.step_end()
                self.core.step_begin()

    def _end(self, token) -> None:
        with self._step_lock:
            if token not in self._steps:
                return
            self._steps.remove(token)
            if self._steps or self.closed:
                return
            try:
                if self.before_end is not None:
                    self.before_end()
            finally:
                if self._lookup is not None:
                    self._lookup.synchronize()
                if self._streaming:
                    with contextlib.suppress(InvalidStateTransitionError):  # an interrupt came before its begin
                        self.core.step_end()

    def lease_into(self, plan: ModulePlan, frame: Frame) -> None:
        """Leases what a module owns and fills its frame with tensors over the places. Those are normal tensors,
        also where results are inference tensors, so that writes to them count."""
        try:
            if torch.is_inference_mode_enabled():
                with torch.inference_mode(False):
                    self._lease(plan, frame)
            else:
                self._lease(plan, frame)
        except StagehandOOMError as error:
            raise self._advise(error) from None

    def _lease(self, plan: ModulePlan, frame: Frame) -> None:
        stream = 0 if self.simulated else self.target.stream()
        if plan.single is not None:  # the usual case: one weight that is all of its unit
            key, unit, entry = plan.single
            master = entry.param
            if master._version != entry.version or master.data_ptr() != entry.address:
                self.renew(unit, entry)
            frame[key] = device_copy(raw(self.core.acquire(unit.index, stream, entry.view)), master)
            return
        bases: dict[int, torch.Tensor] = {}
        try:
            for key, (unit, entry) in plan.managed.items():
                base = None if entry.view is not None else bases.get(id(unit))
                if base is None:
                    base = self._acquire(unit, stream, entry.view)
                    if entry.view is None:
                        bases[id(unit)] = base
                frame[key] = self._copy_over(base, entry, dict.__getitem__(plan.masters, key))
        finally:
            base = None  # a traceback must not keep the place
            bases.clear()

    def lease_one(self, plan: ModulePlan, key: str) -> torch.Tensor:
        """A managed weight read from outside its module's forward: leased while the tensor is held."""
        unit, entry = plan.managed[key]
        try:
            with torch.inference_mode(False) if torch.is_inference_mode_enabled() else _NOTHING:
                base = self._acquire(unit, self.target.stream(), entry.view)
                return self._copy_over(base, entry, dict.__getitem__(plan.masters, key))
        except StagehandOOMError as error:
            raise self._advise(error) from None

    def _acquire(self, unit: Unit, stream: int, seen_as: bytes | None) -> torch.Tensor:
        """A tensor over the unit's place, as `seen_as` says or as bytes, that holds a lease of it."""
        for entry in unit.entries:
            if entry.changed():
                self.renew(unit, entry)
        if unit.index < 0:  # a mapped table read as a whole
            return raw(self.arena.mapped_tensor(unit.base, unit.nbytes))
        return raw(self.core.acquire(unit.index, stream, seen_as))

    @staticmethod
    def _copy_over(base: torch.Tensor, entry, master) -> nn.Parameter:
        if entry.view is None:
            base = view(base, entry.offset, entry.dtype, entry.shape, entry.stride)
        return device_copy(base, master)

    @staticmethod
    def _advise(error: StagehandOOMError) -> StagehandOOMError:
        if not torch.is_grad_enabled():
            return error
        return StagehandOOMError(
            f"{error}. Autograd keeps the weights of the layers before for backward: run under torch.no_grad(), "
            "checkpoint blocks (torch.utils.checkpoint with use_reentrant=False), or raise the budget",
            error.status, error.object, error.native_code)

    def refresh(self, unit: Unit, entry) -> None:
        """Before a table is read in place: it may have been given other memory."""
        if entry.changed():
            self.renew(unit, entry)

    def looked_up(self, entry, nbytes: int) -> None:
        """Rows of a table were read in place by work that the stream has still to do."""
        self.core.count_mapped(nbytes)
        if entry.param.requires_grad and not self.inference_mode and not self.target.simulated:
            if self._lookup is None:
                self._lookup = torch.cuda.Event()
            self._lookup.record(torch.cuda.current_stream(self.target.torch))

    # ------------------------------------------------------------------ writes

    def renew(self, unit: Unit, entry) -> None:
        """The master was written or given other data: its bytes in the image follow, and the device's copy
        is renewed at its next use."""
        if unit.in_file:
            raise StagehandError(
                f"{entry.name} was written, but its bytes are streamed from a file: keep the model in RAM "
                f"(wrap it without a file) to change its weights", object=entry.name)
        strangers = [p for p in (entry.param, *entry.twins) if p.data_ptr() != entry.address]
        if strangers:
            self._take_in(unit, entry, strangers)
        entry.remember()
        if unit.index >= 0:
            self.core.mark_written(unit=unit.index)

    def _take_in(self, unit: Unit, entry, strangers: list) -> None:
        """Parameters whose data is other memory now (p.data = new): it moves into the arena."""
        data = strangers[0].data
        if data.dtype != entry.dtype or data.shape != entry.shape:
            raise StagehandError(
                f"{entry.name} was given data of another shape or dtype ({tuple(data.shape)}, {data.dtype}; it was "
                f"{tuple(entry.shape)}, {entry.dtype}): shut stagehand down before the change and wrap again",
                object=entry.name)
        if len(strangers) != 1 + len(entry.twins) or any(p.data_ptr() != data.data_ptr() for p in strangers):
            raise StagehandError(
                f"{entry.name} shared its memory with other parameters, and not all of them were given the same "
                f"new data: shut stagehand down before the change and wrap again", object=entry.name)
        with torch.inference_mode(False), torch.no_grad():
            self._write_image(unit, entry, data)
            for param in strangers:
                param.data = self._master_view(unit, entry)

    def _write_image(self, unit: Unit, entry, data: torch.Tensor) -> None:
        if data.device.type != "cpu":
            data = data.cpu()
        if data.stride() == entry.stride:
            self.arena.write(unit.base + entry.offset, data.data_ptr(), entry.nbytes)
        else:
            self._master_view(unit, entry).copy_(data)

    def write_back(self, plan: ModulePlan, key: str, copy: torch.Tensor) -> None:
        """A forward wrote into its weight: the master gets the values."""
        unit, entry = plan.managed.get(key) or plan.replaced[key]
        if unit.in_file:
            raise StagehandError(f"the forward of {plan.name} writes {entry.name}, whose bytes are streamed from a "
                                 "file: keep the model in RAM", object=entry.name)
        with torch.inference_mode(False), torch.no_grad():
            self._write_image(unit, entry, copy.detach())

    def is_master(self, entry, value) -> bool:
        return value is entry.param or any(value is twin for twin in entry.twins)

    def noticed(self, plan: ModulePlan, key: str, value) -> None:
        """A module was given another tensor under a name: looked at when the next step begins."""
        if isinstance(value, nn.Parameter):
            self._noticed.append((plan, key))

    def _settle(self) -> None:
        """Parameters that replaced managed ones since the last step: the same shape and dtype takes the old one's
        place and streams, anything else moves to the device and stays there."""
        if self._registrations != registrations.count:
            self._registrations = registrations.count
            self._look_around()
        if not self._noticed:
            return
        noticed, self._noticed = self._noticed, []
        with torch.inference_mode(False), torch.no_grad():
            for plan, key in noticed:
                value = dict.get(plan.masters, key)
                if key in plan.managed or not isinstance(value, nn.Parameter):
                    continue
                known = self._entry_of(value) or self._succeed(plan, key, value)
                if known is not None:
                    plan.replaced.pop(key, None)
                    plan.managed[key] = known
                else:
                    self._bring(full_name(plan.name, key), value)
            for plan, _ in noticed:
                plan.find_single()

    def _entry_of(self, param):
        """The unit and entry of a parameter that streams already (tied anew), or None."""
        for unit in self.units:
            for entry in unit.entries:
                if self.is_master(entry, param):
                    return unit, entry
        return None

    def _succeed(self, plan: ModulePlan, key: str, value):
        """The new parameter in the place of the one that it replaced, if nobody else uses that one and the bytes
        fit; or None."""
        unit, entry = plan.replaced.get(key, (None, None))
        if entry is None or unit.in_file or plain_reason(value) or value.is_meta:
            return None
        if value.shape != entry.shape or value.dtype != entry.dtype:
            return None
        owners = [(p, k) for p in self.plans.values() for k, (_, e) in p.managed.items() if e is entry]
        if owners:
            return None
        twins = [dict.get(p.masters, k) for p in self.plans.values() for k, (_, e) in p.replaced.items() if e is entry]
        twins = [t for t in twins if isinstance(t, nn.Parameter) and t is not value and t.data_ptr() == value.data_ptr()
                 and t.shape == value.shape and t.dtype == value.dtype and t.stride() == value.stride()]
        self._write_image(unit, entry, value.data)
        entry.param, entry.twins = value, list({id(t): t for t in twins}.values())
        for param in (value, *entry.twins):
            param.data = self._master_view(unit, entry)
        entry.remember()
        if unit.index >= 0:
            self.core.mark_written(unit=unit.index)
        return unit, entry

    def _look_around(self) -> None:
        """Something was registered somewhere: modules that are new here may own weights that stream; others of
        theirs (adapters) belong on the device."""
        entries = {id(p): (unit, entry) for unit in self.units for entry in unit.entries
                   for p in (entry.param, *entry.twins)}
        with torch.inference_mode(False), torch.no_grad():
            for name, module in list(self.model.named_modules()):
                plan = self.plans.get(id(module))
                if plan is None:
                    self._take_up(name, module, entries)
                for key, param in list(dict.items(module._parameters)):
                    if param is not None and id(param) not in entries and not (plan and key in plan.replaced):
                        self._bring(full_name(name, key), param)
                for key, buffer in module._buffers.items():
                    if buffer is not None and not self.simulated and buffer.device != self.target.torch:
                        module._buffers[key] = buffer.to(self.target.torch)

    def _take_up(self, name: str, module, entries: dict) -> None:
        """Puts a module under management that came to own weights that stream."""
        managed = {key: entries[id(p)] for key, p in module._parameters.items() if id(p) in entries}
        if not managed:
            return
        plan = ModulePlan(self, name, module)
        plan.managed = managed
        self.plans[id(module)] = plan
        plan.install()
        plan.find_single()
        self._wrap_module(module, plan)

    def _bring(self, name: str, param) -> None:
        """A parameter that came after wrapping goes to the device, where that is not the host."""
        if self.simulated or param.device == self.target.torch:
            return
        self.kept[name] = "it was added after wrapping"
        param.data = param.data.to(self.target.torch)

    def warn_of_compiling(self) -> None:
        if not self._warned_compiling:
            self._warned_compiling = True
            warnings.warn("stagehand: torch.compile has no effect on modules whose weights stream: they run as "
                          "they would without it", RuntimeWarning, stacklevel=4)

    # ------------------------------------------------------------------ inputs

    def inputs_on_device(self, args, kwargs):
        """Inputs of a pass that are on the host go to the device."""
        if self.target.simulated:
            return args, kwargs

        def move(value):
            if isinstance(value, torch.Tensor) and value.device.type == "cpu":
                return value.to(self.target.torch, non_blocking=True)
            return value

        return _pytree.tree_map(move, (args, kwargs))

    def arguments_on_device(self, args: tuple, kwargs: dict):
        """Arguments that model code moved to the host, because a parked weight told it so, come back."""
        cpu = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor) and a.device.type == "cpu"]
        if not cpu:
            return args, kwargs
        if not self._warned_input:
            self._warned_input = True
            warnings.warn(
                "stagehand: a layer was given a CPU tensor and moved it to the device, which waits for the copy. "
                f"Model code that asks a parked weight for its device gets 'cpu'; pass inputs on {self.target.torch}",
                RuntimeWarning, stacklevel=5)
        return self.inputs_on_device(args, kwargs)

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
            self._mark_all()

    def synchronize(self) -> None:
        """Waits until every copy issued so far has read its master. Whatever is written after it, in whatever
        way, is seen at the next use."""
        if self._streaming:
            self.core.synchronize()
            self._mark_all()

    def _mark_all(self) -> None:
        for unit in self.units:
            for entry in unit.entries:
                if entry.changed():
                    self.renew(unit, entry)
            if unit.index >= 0 and not unit.in_file:
                self.core.mark_written(unit=unit.index)

    # ------------------------------------------------------------------ closing

    def close(self) -> None:
        """The model is plain again, on the host, with the values it has now. Again is fine."""
        if not self.opened:
            return
        if self.local.depth:
            raise InvalidStateTransitionError(
                "the runtime cannot be shut down inside a call of its model; do it after the call")
        with self._pass_lock:
            self._settle()
            self.last_stats = self.core.stats()
            self.closed = True
            self.opened = False
            registrations.unwatch(self)
            with torch.inference_mode(False), torch.no_grad():
                self._restore(failed=False)

    def _restore(self, failed: bool) -> None:
        """Undoes as much of `open` as was done."""
        for stand in self._stands:
            stand.remove()
        for wrapper in reversed(self._wrappers):
            if wrapper.module.__dict__.get("forward") is wrapper:
                wrapper.remove()
        self._stands.clear()
        self._wrappers.clear()
        for plan in self.plans.values():
            if plan.masters is not None:
                plan.remove()
        for unit in self.units:  # data given since the last step is the user's, and stays as it is
            unit.index = -1
        if self.core is not None:
            self.core.close()
        if failed:
            for put, before in reversed(self._moved):
                put(before)
            for param, dtype in reversed(self._cast_from):
                if param.dtype != dtype:
                    param.data = param.data.to(dtype)
            for module, key, param in reversed(self._replaced):
                module._parameters[key] = param
            self._forget_before()
        else:
            self._unmanaged_to_host()

    def _unmanaged_to_host(self) -> None:
        items = [item for item in self._unmanaged() if self.target.simulated or item.data.device.type != "cpu"]
        relocate.move([item for item in items if relocate.plain(item.data)], relocate.on_host)
        for item in items:
            if not relocate.plain(item.data) and item.data.device.type not in ("cpu", "meta"):
                item.put(item.data.cpu())


_OPEN: weakref.WeakSet = weakref.WeakSet()
EXIT_WAIT_S, PARK_WAIT_S = 2.0, 0.1
_parked = threading.Event()
_exiting = False


@atexit.register
def _stop_passes() -> None:
    """At the interpreter's end: a pass that a daemon thread is in may finish, another does not begin. The thread
    would otherwise die inside an operator of torch, which aborts the process."""
    global _exiting
    _exiting = True
    end = time.monotonic() + EXIT_WAIT_S
    for session in list(_OPEN):
        session._pass_lock.acquire(timeout=max(0.0, end - time.monotonic()))  # and kept
    runners = {ident for session in list(_OPEN) for ident in session._runners}
    if any(thread.ident in runners and thread.daemon for thread in threading.enumerate()):
        _parked.wait(PARK_WAIT_S)  # it is on its way from the end of its pass to the begin of the next


def _park() -> None:
    """Holds any thread but the main one for good."""
    if threading.current_thread() is not threading.main_thread():
        _parked.set()
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()


_HELD = object()  # the token of steps between begin_step and end_step


_NOTHING = contextlib.nullcontext()


class _Data:
    """Gives a Parameter other data."""

    def __init__(self, param) -> None:
        self.param = param

    def before(self) -> torch.Tensor:
        return self.param.data

    def __call__(self, data: torch.Tensor) -> None:
        self.param.data = data


class _Buffer:
    """Puts a buffer where it stands: (module, key), several where it is shared."""

    def __init__(self, places: list[tuple]) -> None:
        self.places = places

    def before(self) -> torch.Tensor:
        module, key = self.places[0]
        return module._buffers[key]

    def __call__(self, data: torch.Tensor) -> None:
        for module, key in self.places:
            module._buffers[key] = data


def _containers(model: nn.Module, managed: set[int]) -> list[nn.Module]:
    """Modules without weights to lease that contain such ones, and the model itself; outer ones first."""
    found = []
    for module in model.modules():
        if id(module) in managed:
            continue
        if module is model or any(id(part) in managed for part in module.modules()):
            found.append(module)
    return found


def bare_tensors(model: nn.Module) -> list[str]:
    """Names of CPU tensors that modules hold as plain attributes."""
    return [full_name(name, key) for name, module in model.named_modules() for key, value in vars(module).items()
            if isinstance(value, torch.Tensor) and value.device.type == "cpu"]
