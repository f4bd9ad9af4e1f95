"""How a session takes a model over and lets it go: the second part of a session.

    open   parameters cast, unmanaged tensors moved, arena filled unit by unit, runtime sealed, forwards wrapped
    close  forwards unwrapped, all tensors on the host again

What fails on the way is undone: `_restore(failed=True)` gives every tensor that was replaced back.
"""

from __future__ import annotations

import warnings

from . import _core, optimizers, reading, registrations, relocate, sessions, telemetryfile
from . import device as devices
from ._torch import apart_from_caller, raw, torch, unseen, view
from .answers import Answer
from .claims import taking_over
from .dropper import Dropper
from .errors import InvalidStateTransitionError, some_of
from .fileweight import FileWeight, make_plain
from .grads import Gradients
from .guarded import guards_for
from .hooks import ManagedForward, MappedEmbedding
from .plain import stands_for
from .quantised import piece_bytes
from .relocate import Item
from .units import ADDED, NO_BOUND, Unit, as_text, full_name, owned, plain_reason, see_directly, storage_of

nn = torch.nn


NAMED_BUFFER = 1 << 20  # bytes from which on a buffer, which stays, is named in the report


class Opening:
    """open and close of a session."""

    _opening = False  # a thread is at it

    @apart_from_caller
    def open(self) -> None:
        """Takes the model over. On failure the model is as it was before."""
        if self.opened:
            return
        with unseen(), taking_over(self.model):
            self._opening = True
            sessions.tell_apart(self)
            try:
                self._change_model()
            except BaseException:
                sessions.discard(self)
                raise
            finally:
                self._opening = False

    def _change_model(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self._cast_units()
            self._check()
            try:
                self._replace_inference_tensors()
                self._settle_file_weights()
                self._cast()
                self._move_unmanaged()
                self.quantised.choose(self)
                self._fill_arena()
                self._build_runtime()
                self._wrap()
                sessions.add(self)
                registrations.watch(self)
                optimizers.watch()
                self.answer = Answer(self.model, self._answered)
                self._registrations = registrations.count
                self.closed = False
                self.opened = True
                self.ending = False
            except BaseException:
                self.opened, self.closed = False, True
                self._forget()
                self._restore(failed=True)
                raise
        self._forget_before()
        self._masters = None

    def _forget(self) -> None:
        """Nothing watches for it any more. Again is fine."""
        sessions.discard(self)
        registrations.unwatch(self)
        optimizers.unwatch()
        if self.answer is not None:
            self.answer.end()

    def _answered(self):
        """The device that the model's modules name as theirs, or None."""
        return None if self.closed else self.target.torch

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

    def _settle_file_weights(self) -> None:
        """Weights of a quantised file that do not stream are Parameters like others."""
        streams = self._managed_ids()
        self._replaced += make_plain(self.model, lambda weight: id(weight) not in streams)

    def _casts(self, param) -> bool:
        return (self.dtype is not None and not isinstance(param, FileWeight) and param.is_floating_point()
                and param.dtype != self.dtype
                and type(param.data) is torch.Tensor)

    def _cast_units(self) -> None:
        """Sizes of units whose parameters will be cast."""
        for unit in self.units:
            dtypes = [self.dtype if entry.whole is None and self._casts(entry.param) else None
                      for entry in unit.entries]
            if any(dtypes):
                unit.lay_anew(dtypes)

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

    def _unmanaged(self, but=()) -> list[Item]:
        """Parameters that stay on the device, and all buffers; objects that stand in several places once. but: places,
        (id(module), key), that are passed by."""
        managed, seen, items = self._managed_ids(), set(), []
        for name, module, key, param in owned(self.model):
            if id(param) in managed or id(param) in seen or (id(module), key) in but:
                continue
            seen.add(id(param))
            self.kept.setdefault(full_name(name, key), ADDED if self.opened else "it is not one of the managed layers'")
            items.append(Item(full_name(name, key), self._bytes_of(param), _Data(param)))
        places: dict[int, list] = {}
        for module in self.model.modules():
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    places.setdefault(id(buffer), []).append((module, key))
        for name, buffer in self.model.named_buffers():
            if buffer.numel() * buffer.element_size() >= NAMED_BUFFER:
                self.kept.setdefault(name, "it is a buffer: those stay on the device")
            items.append(Item(name, buffer, _Buffer(places[id(buffer)])))
        return items

    def _move_unmanaged(self) -> None:
        """Parameters that stay and all buffers go to the device, once the core has room for them."""
        items = self._unmanaged()
        self._moved = [(item.put, item.put.before()) for item in items]
        self._count(items, relocate.total_bytes(items))
        self.make_way()
        self._away = self.finds_no_room()
        options = {**devices.allocator(self.target), **self.options}
        self.core, self.telemetry_path = telemetryfile.open_with(
            options.pop("telemetry_path", None), lambda path: _core.Runtime(
                self.target.core, self.budget, reserved=0 if self._away else self.reserved, parked=self._away,
                read_only=self.inference_mode, name=self.name, least_room=self.least_room, telemetry_path=path,
                **options))
        if not self._away:
            self._place(items)

    def _bytes_of(self, param) -> torch.Tensor:
        """The parameter's values in host memory or where they are; fresh ones when they come from a file."""
        if self.source is not None and self.source.holds(param):
            return self.source.read(param)
        if type(param) not in (nn.Parameter, torch.Tensor):  # its own .to() may quantise it, or take along what it has
            return param
        return param.data

    def _warn_of_shared(self) -> None:
        """Training programs of several processes keep one model in shared memory."""
        shared = [entry.name for unit in self.units if not unit.in_file for entry in unit.entries
                  if entry.param.device.type == "cpu" and entry.param.is_shared()]
        if shared:
            warnings.warn(
                f"stagehand: {some_of(shared, 1)} were in memory that "
                f"is shared with other processes (share_memory()), and are this process's own from now on",
                RuntimeWarning, stacklevel=5)

    def _fill_arena(self) -> None:
        self._warn_of_shared()
        for unit in self.units:
            if unit.in_file:
                for entry in unit.entries:
                    entry.remember()
        self.quantised.fill(self)
        packed = [unit for unit in self.units if not unit.in_file and self.quantised.of(unit)]
        plain = [unit for unit in self.units if not unit.in_file and not self.quantised.of(unit)]
        with Dropper() as originals:
            self._fill(packed, originals, 0)
            self.quantised.finish()
            self.arena = self._fill(plain, originals, self.may_pin())
        for arena in (self.arena, self.quantised.arena):
            if arena is not None and arena.pin_error:
                warnings.warn(
                    f"stagehand: {_core.format_size(arena.bytes - arena.pinned_bytes)} of the weights could "
                    f"not be pinned and are staged through a small pinned buffer, which is slower: "
                    f"{arena.pin_error}", RuntimeWarning, stacklevel=4)

    def may_pin(self) -> int:
        """Bytes of host memory that weights in RAM may still pin. `ram_budget` bounds them where none streams from a
        file; else it is for those."""
        most = self.options.get("ram_budget")
        if not most or any(unit.in_file for unit in self.units):
            return NO_BOUND
        packed = self.quantised.arena
        return max(0, most - (packed.pinned_bytes if packed is not None else 0))

    def _fill(self, units: list[Unit], originals: Dropper, pinned: int) -> _core.Arena | None:
        """An arena with the masters of the units. pinned: most bytes of them to pin; 0 where they are encoded from
        there and not copied."""
        if not units:
            return None
        arena = _core.Arena(self.target.core, sum(unit.nbytes for unit in units), pinned_most=pinned)
        for unit in units:
            unit.arena, unit.base = arena, arena.reserve(unit.nbytes)
            for entry in unit.entries:
                originals.drop(self._move_master(unit, entry))
            if self.quantised.of(unit):
                self.quantised.of(unit).encode(unit.base)
        arena.finish()
        return arena

    def _move_master(self, unit: Unit, entry) -> list:
        """The parameter's bytes go into the arena; every Parameter with these bytes gets the new storage. Returns
        a box with the old one."""
        old = [self._bytes_of(entry.param)]
        if old[0].device.type != "cpu":
            old[0] = relocate.to_host(old[0])
        address = unit.base + entry.offset
        unit.arena.write(address, old[0].data_ptr(), entry.nbytes)
        host = self._master_view(unit, entry)
        for param in (entry.param, *entry.twins):
            param.data = host if param is entry.param else self._master_view(unit, entry)
        entry.storage = storage_of(host)
        entry.remember()
        return old

    def _master_view(self, unit: Unit, entry) -> torch.Tensor:
        """A tensor over the entry's bytes in the arena, with a storage of its own."""
        return view(raw(unit.arena.tensor(unit.base + entry.offset, entry.nbytes)), 0, entry.dtype, entry.shape,
                    entry.stride)

    def _build_runtime(self) -> None:
        for unit in self.units:
            if unit.mapped and not self.arena.device_alias(unit.base):
                unit.mapped = False
        streamed = [unit for unit in self.units if self._is_streamed(unit)]
        for unit in streamed:
            packed = self.quantised.of(unit)
            if packed is not None:
                flags = 0 if unit.in_file else _core.UNIT_WATCHED
                where = {"host": packed.address, "arena": packed.arena, "segments": packed.segments,
                         "packed_bytes": packed.nbytes, "master": unit.base}
            elif unit.in_file:
                flags, where = 0, self.source.ranges(unit, piece_bytes(self.budget))
            else:
                flags = _core.UNIT_WRITABLE if unit.writable else _core.UNIT_WATCHED
                where = {"host": unit.base, "arena": self.arena}
            if id(unit) in self.keeps:
                flags |= _core.UNIT_KEEP
            tensors = [(as_text(entry.name), entry.offset) for entry in unit.entries]
            unit.index = self.core.add_unit(as_text(unit.name), unit.nbytes, group=as_text(unit.group), flags=flags,
                                            tensors=tensors, **where)
            if len(unit.entries) == 1 and not unit.wrapping:
                see_directly(unit.entries[0])
        if streamed:
            self.core.seal()
            self._warn_of_no_kernels()
        elif self.telemetry_path is not None:
            warnings.warn(f"stagehand: {self.telemetry_path} stays empty: all weights of {self.name} stay "
                          "on the device, and steps without copies are not recorded", RuntimeWarning, stacklevel=5)
        self.grads = Gradients(self.target, self.units, self.core)
        self.calls = self._what_calls_need()
        for plan in self.plans.values():
            plan.find_single()
        self._streaming = bool(streamed)
        self._trained = [(u, e) for u in streamed if not u.in_file for e in u.entries if e.param.requires_grad]

    def _warn_of_no_kernels(self) -> None:
        reason = self.core.stats()["expand_error"]
        if reason:
            warnings.warn(
                f"stagehand: the device cannot expand weights that cross the link in few bits; they are expanded on "
                f"the host, which is right and slower: {reason}", RuntimeWarning, stacklevel=5)

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
        reading.find_readers(self, self.containers())
        for guard in guards_for(self.model):
            self._stands.append(guard)
            guard.install()
        if self._away:
            self._watch_calls()
        self.find_regions()

    def containers(self) -> list:
        """Wrappers of modules that hold no weights that stream, and contain such ones."""
        return [wrapper for wrapper in self._wrappers if type(wrapper) is ManagedForward and wrapper.plan is None]

    def _wrap_module(self, module, plan) -> None:
        root = module is self.model
        wrapper = None
        if plan is not None and "weight" in plan.managed:
            unit, entry = plan.managed["weight"]
            if unit.mapped and self._may_map(module, unit):
                wrapper = MappedEmbedding(self, module, plan, self._table(unit, entry), root)
        wrapper = wrapper or ManagedForward(self, module, plan, root)
        self._wrappers.append(wrapper)  # noted before it stands, so that an interrupt leaves none behind
        wrapper.install()
        for stand in stands_for(self, module, plan is not None):
            self._stands.append(stand)
            stand.install()

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
        base = raw(unit.arena.mapped_tensor(unit.base + entry.offset, entry.nbytes))
        return nn.Parameter(view(base, 0, entry.dtype, entry.shape, entry.stride), requires_grad=False)

    @apart_from_caller
    def close(self) -> None:
        """The model is plain again, on the host, with the values it has now. Again is fine."""
        if not self.opened:
            return
        self._check_process()
        self.refuse_inside_call()
        self.ending = True
        with self._pass_lock:
            with self._step_lock:
                if self._open:
                    self._close_step()
            if not self.closed:  # else an interrupt came into an earlier call
                self.make_casts_last()
                self._settle(closing=True)
                self.flush_telemetry()
                self.last_stats = self.core.stats()
            self.closed = True
            self._forget()
            if self.finding is not None:
                self.target.findings.discard(self.finding)
            with torch.inference_mode(False), torch.no_grad():
                self._restore(failed=False)
            self.opened = False

    def wait_for_others(self) -> None:
        """For a call that finds it closed: until another thread has opened it, or has closed it, which moves weights
        that the call would read."""
        if self._opening:
            with taking_over(self.model):
                pass
        elif self.opened and not self.local.depth:
            with self._pass_lock:
                pass

    def refuse_inside_call(self) -> None:
        if self.local.depth:
            raise InvalidStateTransitionError(
                "the runtime cannot be shut down inside a call of its model; do it after the call")

    def _restore(self, failed: bool) -> None:
        """Undoes as much of `open` as was done."""
        for stand in self._stands:
            stand.remove()
        with self._regions_lock:
            self._no_regions()
        self._stands.clear()
        for plan in self.plans.values():
            if plan.masters is not None:
                plan.remove()
        for unit in self.units:  # data given since the last step is the user's, and stays as it is
            unit.index = -1
        if self.grads is not None:
            self.grads.close()
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
            optimizers.left(self.model)
        for wrapper in reversed(self._wrappers):  # until here calls of other threads wait: what they would read moves
            if wrapper.stands():
                wrapper.remove()
        self._wrappers.clear()
        self._watch_no_calls()

    def _unmanaged_to_host(self) -> None:
        items = [item for item in self._unmanaged() if self.target.simulated or item.data.device.type != "cpu"]
        items += [Item(entry.name, param.data, _Data(param)) for unit in self.units for entry in unit.entries
                  for param in (entry.param, *entry.twins)
                  if not isinstance(param, FileWeight) and self._is_placed(param)]
        relocate.move([item for item in items if relocate.plain(item.data)], relocate.on_host)
        for item in items:
            if not relocate.plain(item.data) and item.data.device.type not in ("cpu", "meta"):
                item.put(item.data.cpu())


class _Data:
    """Gives a Parameter other data."""

    def __init__(self, param) -> None:
        self.param = param

    def before(self) -> torch.Tensor:
        return self.param.data

    def __call__(self, data: torch.Tensor) -> None:
        grad = self.param.grad
        self.param.data = data
        if type(data) is type(self.param) and data is not self.param:  # its own .to() made it, with what belongs to it
            self.param.__dict__.update(data.__dict__)
        if grad is not None and grad.device != data.device:  # an optimizer wants them in one place
            self.param.grad = None
            self.param.grad = grad.to(data.device)


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
