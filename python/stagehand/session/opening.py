"""What a session does to a model's tensors and forwards when it takes the model over, and when it lets it go.

    open   parameters cast, unmanaged tensors moved, arena filled unit by unit, runtime sealed, forwards wrapped
    close  forwards unwrapped, all tensors on the host again

What fails on the way is undone: `undo` gives every tensor that was replaced back.
"""

from __future__ import annotations

import warnings

from .. import _core
from .._torch import torch
from ..errors import StagehandError, some_of
from ..progress import over
from ..weights import reading, relocate
from ..weights.dropper import Dropper
from ..weights.fileweight import FileWeight, list_flat, make_plain
from ..weights.guarded import guards_for
from ..weights.experts import ExpertsForward
from ..weights.hooks import ManagedForward, MappedEmbedding
from ..weights.images import table_of
from ..weights.relocate import Item
from ..weights.units import ADDED, NO_BOUND, Unit, as_text, full_name, owned, plain_reason, see_directly, storage_of
from .choosing import will_cast
from .plain import stands_for
from .ranks import share_the_host

nn = torch.nn


NAMED_BUFFER = 1 << 20  # bytes from which on a buffer, which stays, is named in the report


class Takeover:
    """What a session does to a model that it takes over, and how it is undone."""

    # Of its session.
    USES = """choice.may_map choice.note choice.streamed dtype images.fold images.master_view inference_mode model name
        needs.keeps needs.piece_bytes opened options plans quantised regions.find source stay.away stay.is_placed
        stay.place stay.watch_calls tables.is_aside tables.of target trained.idle units"""

    def __init__(self, session) -> None:
        self._session = session
        self._model = session.model
        self._units = session.units
        self._plans = session.plans
        self._source = session.source
        self._quantised = session.quantised
        self._target = session.target
        self.wrappers: list = []  # of forwards, in the order in which they were put there
        self._stands: list = []  # what stands beside them
        self._guards: list = []  # of the parameters and buffers of modules that own nothing that streams
        self._cast_from: list[tuple] = []  # (parameter, dtype before), until open has succeeded
        self._moved: list[tuple] = []  # (how to put it, tensor before), until open has succeeded
        self._replaced: list[tuple] = []  # (module, key, parameter before), until open has succeeded

    def succeed(self) -> None:
        """The session is open: nothing is to be undone."""
        self._cast_from.clear()
        self._moved.clear()
        self._replaced.clear()

    def replace_inference_tensors(self) -> None:
        """Parameters that were made under inference_mode cannot be given other data: new ones stand for them."""
        new: dict[int, nn.Parameter] = {}
        for _, module, key, param in list(owned(self._model)):
            if not param.is_inference() or plain_reason(param):
                continue
            if id(param) not in new:
                new[id(param)] = nn.Parameter(param.clone(), requires_grad=param.requires_grad)
                new[id(param)].__dict__.update(param.__dict__)
            self._replaced.append((module, key, param))
            module._parameters[key] = new[id(param)]
        for unit in self._units:
            for entry in unit.entries:
                entry.param = new.get(id(entry.param), entry.param)
                entry.twins = [new.get(id(twin), twin) for twin in entry.twins]

    def settle_file_weights(self) -> None:
        """Weights of a quantised file that do not stream are Parameters like others."""
        streams = self.managed_ids()
        self._replaced += make_plain(self._model, lambda weight: id(weight) not in streams)

    def cast(self) -> None:
        """Parameters have the session's dtype."""
        cast: dict[tuple, torch.Tensor] = {}  # tensors that were one stay one
        for _, _, _, param in owned(self._model):
            if not will_cast(param, self._session.dtype):
                continue
            data = param.data
            key = (data.data_ptr(), data.shape, data.stride(), data.dtype)
            if param.is_meta or key not in cast:
                cast[key] = data.to(self._session.dtype)
            self._cast_from.append((param, data.dtype))
            param.data = cast[key]

    def managed_ids(self) -> set[int]:
        """Of parameters that stream."""
        return {id(plan.module._parameters[key]) for plan in self._plans.values() for key in plan.managed}

    def outside(self) -> list[Item]:
        """As `unmanaged`, for the session to move: a failure puts them back."""
        items = self.unmanaged()
        self._moved = [(item.put, item.put.before()) for item in items]
        return items

    def unmanaged(self, but=()) -> list[Item]:
        """Parameters that stay on the device, and all buffers; objects that stand in several places once. but: places,
        (id(module), key), that are passed by."""
        managed, seen, items = self.managed_ids(), set(), []
        reason = ADDED if self._session.opened else "it is not one of the managed layers'"
        for name, module, key, param in owned(self._model):
            if id(param) in managed or id(param) in seen or (id(module), key) in but:
                continue
            seen.add(id(param))
            self._session.choice.note(full_name(name, key), reason)
            items.append(Item(full_name(name, key), self._bytes_of(param), _Data(param)))
        places: dict[int, list] = {}
        for module in self._model.modules():
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    places.setdefault(id(buffer), []).append((module, key))
        for name, buffer in self._model.named_buffers():
            if buffer.numel() * buffer.element_size() >= NAMED_BUFFER:
                self._session.choice.note(name, "it is a buffer: those stay on the device")
            items.append(Item(name, buffer, _Buffer(places[id(buffer)])))
        return items

    def _bytes_of(self, param) -> torch.Tensor:
        """The parameter's values in host memory or where they are; fresh ones when they come from a file."""
        if self._source is not None and self._source.holds(param):
            return self._source.read(param)
        if type(param) not in (nn.Parameter, torch.Tensor):  # its own .to() may quantise it, or take along what it has
            return param
        return param.data

    def _warn_of_shared(self) -> None:
        """Training programs of several processes keep one model in shared memory."""
        shared = [entry.name for unit in self._units if not unit.in_file for entry in unit.entries
                  if entry.param.device.type == "cpu" and entry.param.is_shared()]
        if shared:
            warnings.warn(
                f"stagehand: {some_of(shared, 1)} were in memory that "
                f"is shared with other processes (share_memory()), and are this process's own from now on",
                RuntimeWarning, stacklevel=5)

    def leave_plans_without_weights(self) -> None:
        """Modules that own nothing that streams, and contain nothing that does, run as they would without us."""
        for plan in [plan for plan in self._plans.values() if self._is_needless(plan)]:
            del self._plans[id(plan.module)]
            for wrapper in [w for w in self.wrappers if w.plan is plan and w.stands()]:
                wrapper.remove()
                self.drop(wrapper)
            if plan.masters is not None:
                plan.remove()
        for plan in self._plans.values():
            if self._session.opened:
                plan.find_single()

    def _is_needless(self, plan) -> bool:
        if plan.managed or plan.replaced:
            return False
        if not self._session.opened:
            return True
        return plan.module is not self._model and not any(id(part) in self._plans for part in plan.module.modules()
                                                          if part is not plan.module)

    def to_host(self, params: list) -> None:
        """Parameters that stay on the device move to the host, with their gradients."""
        items = [Item("", param.data, _Data(param)) for param in params]
        relocate.move([item for item in items if self._session.stay.is_placed(item.put.param)], relocate.on_host)

    def to_device(self, params: list) -> None:
        """The opposite, where there is room for them."""
        self._session.stay.place([Item("a trained weight", param.data, _Data(param)) for param in params])

    def fill_arena(self) -> None:
        """Weights that stream from RAM are in the arena, and their parameters lie there."""
        self._warn_of_shared()
        for unit in self._units:
            if unit.in_file:
                for entry in unit.entries:
                    entry.remember()
        self._quantised.fill(self._session)
        packed = [unit for unit in self._units if not unit.in_file and self._quantised.of(unit)]
        plain = [unit for unit in self._units if not unit.in_file and not self._quantised.of(unit)]
        with Dropper() as originals:
            frozen = [unit for unit in plain if self._session.inference_mode or not unit.writable]
            common = self._fill_common(frozen, originals)
            plain = [unit for unit in plain if not unit.common]
            masters = self._fill(packed, [], originals, self.may_pin()) if self._quantised.either else None
            for unit in self._over([] if self._quantised.either else packed):
                self._fill([unit], [], originals, 0)  # its memory goes where it is folded
            self._quantised.finish()
            weights = self._fill(plain, self._session.trained.idle if self._units else [], originals, self.may_pin())
        for arena in (common, weights, masters, *self._quantised.arenas()):
            if arena is not None and arena.pin_error:
                warnings.warn(
                    f"stagehand: {_core.format_size(arena.bytes - arena.pinned_bytes)} of the weights could "
                    f"not be pinned and are staged through a small pinned buffer, which is slower: "
                    f"{arena.pin_error}", RuntimeWarning, stacklevel=4)

    def add_units(self, core) -> list[Unit]:
        """The core knows the units that stream from now on: these."""
        for unit in self._units:
            if unit.mapped and not unit.arena.device_alias(unit.base):
                unit.mapped = False
        streamed = self._session.choice.streamed()
        for unit in streamed:
            packed = self._quantised.of(unit)
            if packed is not None:
                flags = 0 if unit.in_file or unit.folded else _core.UNIT_WATCHED
                if self._quantised.either and not unit.in_file and unit.arena.pinned_bytes == unit.arena.bytes:
                    flags |= _core.UNIT_EITHER
                where = {"host": packed.address, "arena": packed.arena, "segments": packed.segments,
                         "packed_bytes": packed.nbytes, "master": unit.base}  # a folded one has none
            elif unit.in_file:
                flags, where = 0, self._source.ranges(unit, self._session.needs.piece_bytes)
            else:
                flags = _core.UNIT_WRITABLE if unit.writable else _core.UNIT_WATCHED
                if unit.common:
                    flags = 0  # its image is not written
                where = {"host": unit.base, "arena": unit.arena}
            if self._session.tables.is_aside(unit):
                flags |= _core.UNIT_ASIDE
            if id(unit) in self._session.needs.keeps:
                flags |= _core.UNIT_KEEP
            tensors = [(as_text(entry.name), entry.offset) for entry in unit.entries]
            unit.index = core.add_unit(as_text(unit.name), unit.nbytes, group=as_text(unit.group), flags=flags,
                                       tensors=tensors, **where)
            if len(unit.entries) == 1 and not unit.wrapping:
                see_directly(unit.entries[0])
        for unit in self._session.trained.idle if streamed else ():
            unit.index = core.add_unit(as_text(unit.name), unit.nbytes, group=as_text(unit.group),
                                       flags=_core.UNIT_WRITABLE | _core.UNIT_IDLE, host=unit.base, arena=unit.arena,
                                       tensors=[(as_text(entry.name), entry.offset) for entry in unit.entries])
            if len(unit.entries) == 1:
                see_directly(unit.entries[0])
        return streamed

    def may_pin(self) -> int:
        """Bytes of host memory that weights in RAM may still pin. `ram_budget` bounds them where none streams from a
        file; else it is for those."""
        most = self._session.options.get("ram_budget")
        if not most or any(unit.in_file for unit in self._units):
            return NO_BOUND
        return max(0, most - sum(arena.pinned_bytes for arena in self._quantised.arenas()))

    def _fill(self, units: list[Unit], idle: list[Unit], originals: Dropper, pinned: int) -> _core.Arena | None:
        """An arena with the masters of the units, and with room for those of idle ones. pinned: most bytes of them to
        pin; 0 where they are encoded from there and not copied. Folded ones have left it."""
        if not (units or idle):
            return None
        arena = _core.Arena(self._target.core, sum(unit.nbytes for unit in (*units, *idle)), pinned_most=pinned)
        for unit in (*units, *idle):
            unit.arena, unit.base = arena, arena.reserve(unit.nbytes)
        for unit in self._over(units) if len(units) > 1 else units:
            for entry in unit.entries:
                old = self._host_bytes(entry)
                arena.write(unit.base + entry.offset, old[0].data_ptr(), entry.nbytes)
                originals.drop(self._move_master(unit, entry, old))
            if self._quantised.of(unit):
                self._quantised.encode(self._session, unit, unit.base)
                if self._quantised.folds:
                    self._session.images.fold(unit)
        arena.finish()
        return arena

    def _over(self, units: list[Unit]):
        return over(f"stagehand: loading {self._session.name}", units, lambda unit: unit.nbytes)

    def _fill_common(self, units: list[Unit], originals: Dropper) -> _core.Arena | None:
        """As `_fill`, with memory of other ranks that hold the same weights. None where there are no others, or the
        system cannot: these are filled as others are. Prints are made before it is this rank's turn."""
        if not (units and share_the_host() and _core.tells_writes()):
            return None
        try:
            arena = _core.Arena(self._target.core, sum(unit.nbytes for unit in units), self.may_pin(), len(units))
        except StagehandError:  # this system has no such memory
            return None
        prints = {id(unit): _core.arena_print(unit.nbytes, _parts(unit, [[entry.param] for entry in unit.entries]))
                  for unit in units if all(entry.param.device.type == "cpu" for entry in unit.entries)}
        try:
            for unit in self._over(units):
                old = [self._host_bytes(entry) for entry in unit.entries]
                unit.base = arena.place(unit.nbytes, _parts(unit, old), prints.get(id(unit)))
                unit.arena = arena
                for entry, box in zip(unit.entries, old):
                    originals.drop(self._move_master(unit, entry, box))
        finally:
            arena.finish()
        return arena

    def _host_bytes(self, entry) -> list:
        """A box with the parameter's values in host memory."""
        old = self._bytes_of(entry.param)
        return [old if old.device.type == "cpu" else relocate.to_host(old)]

    def _move_master(self, unit: Unit, entry, old: list) -> list:
        """The parameter's bytes are in the arena: every Parameter with these bytes gets the new storage. Returns `old`,
        the box with what it had."""
        host = self._session.images.master_view(unit, entry)
        for param in (entry.param, *entry.twins):
            param.data = host if param is entry.param else self._session.images.master_view(unit, entry)
        entry.storage = storage_of(host)
        entry.remember()
        return old

    def wrap(self) -> None:
        """Calls of the model's modules are managed."""
        self._warn_of_bare_tensors()
        for plan in self._plans.values():
            plan.install()
        above = _containers(self._model, {id(plan.module) for plan in self._plans.values()})
        for module in above:
            self.wrap_module(module, None)
        for plan in self._plans.values():
            self.wrap_module(plan.module, plan)
        reading.find_readers(self._session, self.containers())
        for guard in guards_for(self._model):
            self._guards.append(guard)
            guard.install()
        if self._session.stay.away:
            self._session.stay.watch_calls()
        self._session.regions.find()

    def add(self, wrapper) -> None:
        """Puts a wrapper where it stands."""
        self.wrappers.append(wrapper)  # noted before it stands, so that an interrupt leaves none behind
        wrapper.install()

    def drop(self, wrapper) -> None:
        """The wrapper stands no more."""
        self.wrappers.remove(wrapper)

    def containers(self) -> list:
        """Wrappers of modules that hold no weights that stream, and contain such ones."""
        return [wrapper for wrapper in self.wrappers if type(wrapper) is ManagedForward and wrapper.plan is None]

    def wrap_module(self, module, plan) -> None:
        """Calls of the module are managed. plan: None where it has no weights that stream."""
        root = module is self._model
        wrapper = None
        if plan is not None and "weight" in plan.managed:
            unit, entry = plan.managed["weight"]
            if unit.mapped and self._session.choice.may_map(module, unit):
                wrapper = MappedEmbedding(self._session, module, plan, table_of(unit, entry), root)
        table = self._session.tables.of(plan)
        if table is not None:
            wrapper = ExpertsForward(self._session, module, plan, table, root)
        wrapper = wrapper or ManagedForward(self._session, module, plan, root)
        self.add(wrapper)
        for stand in stands_for(self._session, module, plan is not None):
            self._stands.append(stand)
            stand.install()

    def _warn_of_bare_tensors(self) -> None:
        if self._target.simulated:
            return
        found = bare_tensors(self._model)
        if found:
            warnings.warn(
                f"stagehand: {', '.join(found)} are tensors that are neither parameters nor buffers: they stay on "
                f"the CPU. Register them with register_buffer(), or move them to {self._target.torch}",
                RuntimeWarning, stacklevel=5)

    # ------------------------------------------------------------------ the way back

    def remove_stands(self) -> None:
        """What stands beside the forwards has gone."""
        for stand in self._stands:
            stand.remove()
        self._stands.clear()

    def remove_plans(self) -> None:
        """Modules have their own dictionaries of parameters, and no unit is the core's."""
        for plan in self._plans.values():
            if plan.masters is not None:
                plan.remove()
        for guard in self._guards:  # of a module that had no plan when the session opened, and has had one since
            guard.remove()
        self._guards.clear()
        for unit in self._units:  # data given since the last step is the user's, and stays as it is
            unit.index = -1

    def undo(self) -> None:
        """The session could not be opened: tensors that were replaced are there again."""
        for put, before in reversed(self._moved):
            put(before)
        for param, dtype in reversed(self._cast_from):
            if param.dtype != dtype:
                param.data = param.data.to(dtype)
        for module, key, param in reversed(self._replaced):
            module._parameters[key] = param
        self.succeed()

    def unwrap(self) -> None:
        """Forwards are the modules' own. Until here calls of other threads wait: what they would read moves."""
        for wrapper in reversed(self.wrappers):
            if wrapper.stands():
                wrapper.remove()
        self.wrappers.clear()

    def unmanaged_to_host(self) -> None:
        """What does not stream is on the host, and what streams and was given memory of the device."""
        items = [item for item in self.unmanaged() if self._target.simulated or item.data.device.type != "cpu"]
        items += [Item(entry.name, param.data, _Data(param)) for unit in self._units for entry in unit.entries
                  for param in (entry.param, *entry.twins)
                  if not isinstance(param, FileWeight) and self._session.stay.is_placed(param)]
        relocate.move([item for item in items if relocate.plain(item.data)], relocate.on_host)
        for item in items:
            if not relocate.plain(item.data) and item.data.device.type not in ("cpu", "meta"):
                item.put(item.data.cpu())
        for module in self._model.modules():  # functional_call may have left tensors in the lists of RNNs
            list_flat(module, module._parameters)


class _Data:
    """Gives a Parameter other data."""

    def __init__(self, param) -> None:
        self.param = param

    def before(self) -> torch.Tensor:
        return self.param.data

    def __call__(self, data: torch.Tensor) -> None:
        relocate.give(self.param, data)
        if type(data) is type(self.param) and data is not self.param:  # its own .to() made it, with what belongs to it
            self.param.__dict__.update(data.__dict__)


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


def _parts(unit: Unit, boxes: list) -> list[tuple]:
    return [(entry.offset, box[0].data_ptr(), entry.nbytes) for entry, box in zip(unit.entries, boxes)]


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
