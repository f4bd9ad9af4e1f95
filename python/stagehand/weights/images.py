"""Where masters lie: in the image of their unit, from which the core copies, or apart from it.

`p.data = new` gives a weight memory that others may hold and write: a flat vector, an average, a numpy array. Such a
weight stays where it is, so that both go on seeing one memory. The image has a copy of it, which is compared with it
as a whole before each pass. Once nobody else holds the memory the weight moves into the image. An image that somebody
still holds (`keep = p.data`) stays as it is, and the unit gets another one.

The packed image of a losslessly packed unit takes the place of its plain one: the unit is *folded*, and its weights
have no memory (folded.py). It unfolds once somebody looks at one of them otherwise than by an operator, and folds again
before a pass, once nobody has the memory. Its plain image goes when the packed one says all of it, which the core
finds out beside the passes.

A weight that streams from a file lies in a private mapping of that file. The kernel tells which pages were
written (hostmem.py), in whatever way. The unit of such a weight moves to an image in RAM. A weight that other ranks
hold, too (docs/distributed.md), lies in a private view of memory that all of them have, and leaves it in the same way.

Locks: `lock` is held while masters move; the core's lock is taken inside it.
"""

from __future__ import annotations

import threading
import warnings

from .. import _core
from .._torch import raw, torch, undisturbed, view
from ..errors import StagehandError, some_of
from . import folded, relocate
from .fileweight import FileWeight, Unheld
from .hooks import MappedEmbedding
from .units import NO_BOUND, Entry, Unit, held_elsewhere, refuse_data, storage_of


def table_of(unit: Unit, entry) -> torch.Tensor:
    """A table in mapped host memory, as lookups on the device read it."""
    base = raw(unit.arena.mapped_tensor(unit.base + entry.offset, entry.nbytes))
    return torch.nn.Parameter(view(base, 0, entry.dtype, entry.shape, entry.stride), requires_grad=False)


class Images:
    """Keeps the images and the masters of a session the same."""

    # Of its session.
    USES = """casts.forget_cast casts.take_other_dtype core inference_mode mark_written opened quantised source
        steps.wait_for_lookups tables.moved takeover.wrappers target units writes.entry_of"""

    def __init__(self, session) -> None:
        self._session = session
        self._units = session.units
        self._source = session.source
        self._common: tuple[int, int] | None = None  # addresses between which views of common images lie
        self._apart: list[tuple] = []  # (unit, entry) of masters outside their image
        self.lock = threading.RLock()
        self.moved_to_ram: dict[str, int] = {}  # unit of a file that was written -> bytes of its image
        self._unfolded: list[Unit] = []  # that were folded, and have weights with memory now
        self._folding: dict[int, Unit] = {}  # by index: folded ones that have their plain image still

    def renew(self, unit: Unit, entry) -> None:
        """The master was written or given other data: the image has its bytes now, and the device's copy is renewed at
        its next use."""
        session = self._session
        with self.lock, undisturbed():
            if entry.at_home is not None and entry.param.dtype is entry.dtype:  # it was given such data again
                session.casts.forget_cast(entry)
            if unit.in_file and not entry.is_lasting() and self._source.same_as_file(entry.param):
                entry.remember()
                return
            if unit.common and not self._left_common(unit, entry):
                entry.remember()
                return
            if type(entry) is Entry and entry.param.dtype is not entry.dtype:
                session.casts.take_other_dtype(unit, entry)
            else:
                self._renew(unit, entry)
            entry.remember()
        session.mark_written(unit)

    def _renew(self, unit: Unit, entry) -> None:
        self.unfold(unit)
        strangers = [p for p in _masters(entry) if p.data_ptr() != entry.address]
        if strangers:
            self._check_given(entry, strangers)
        if unit.in_file:
            self.leave_files([unit])
        elif unit.common:
            self._new_image(unit)
        elif strangers:
            self.put(unit, entry)
        elif self._lies_apart(unit, entry):
            self._copy_in(unit, entry)

    def follow_masters(self) -> None:
        """Before a pass: what was written in a file's mapping, or in memory that a weight shares with somebody."""
        if self._unfolded or self._folding:
            self._fold_again()
        if self._apart:
            with self.lock, undisturbed():
                for unit, entry in list(self._apart):
                    if not entry.changed():  # else its next use takes it in
                        self._follow(unit, entry)
        self.follow_common()
        if self._source is not None and self._session.opened:
            written = self._source.written()
            if written:
                with self.lock, undisturbed():
                    known = [found[0] for found in map(self._session.writes.entry_of, written) if found is not None]
                    self.leave_files(list({id(unit): unit for unit in known if unit.in_file}.values()))

    def follow_common(self) -> None:
        """The same of weights in common; before a backward, too, for nothing but the kernel sees a write there."""
        for unit in self._written_in_common():
            with self.lock, undisturbed():
                self._new_image(unit)
            self._session.mark_written(unit)

    def _left_common(self, unit: Unit, entry) -> bool:
        """Whether a master in common has other bytes than the image, or lies elsewhere."""
        return any(param.dtype is not entry.dtype or param.data_ptr() != unit.base + entry.offset
                   for param in _masters(entry)) or not _core.same_memory(
            unit.base + entry.offset, unit.arena.image(unit.base + entry.offset), entry.nbytes)

    def _written_in_common(self) -> list[Unit]:
        """Units in common of which this rank has written some bytes without a trace in a version."""
        if self._common is None and self._session.opened:
            units = [unit for unit in self._units if unit.common]
            self._common = (min(unit.base for unit in units), max(unit.base + unit.nbytes for unit in units)
                            ) if units else (0, 0)
        low, high = self._common or (0, 0)
        pages = _core.written_pages(low, high - low) if low else ()
        return [unit for unit in self._units if unit.common
                and any(begin < unit.base + unit.nbytes and unit.base < end for begin, end in pages)
                and not any(entry.changed() for entry in unit.entries)  # else its next use takes it in
                and any(self._left_common(unit, entry) for entry in unit.entries)] if pages else []

    def let_go(self) -> None:
        """The session has ended: memory of weights lives as long as a tensor over it."""
        for unit in self._units:
            unit.arena = None

    # ------------------------------------------------------------------ memory that a weight was given

    def _check_given(self, entry, strangers: list) -> None:
        data = strangers[0].data
        if data.dtype != entry.dtype or data.shape != entry.shape:
            refuse_data(entry, data)
        if any(param.data_ptr() != data.data_ptr() for param in _masters(entry)):
            raise StagehandError(
                f"{entry.name} shared its memory with other parameters, and not all of them were given the same "
                f"new data: shut stagehand down before the change and wrap again", object=entry.name)

    def put(self, unit: Unit, entry) -> None:
        """The entry's masters have memory outside the image, whose bytes are the entry's from now on."""
        self.unfold(unit)
        if unit.common or entry.storage is not None and not entry.storage.expired():
            if unit.common or self._lies_apart(unit, entry):  # else it came there with another of its unit
                self._new_image(unit)
            return
        self._copy_in(unit, entry)
        self._settle_master(unit, entry)

    def is_shared(self, unit: Unit, entry) -> bool:
        """Whether the master has been given memory that somebody else may write. It has to stay there, so that both go
        on seeing one memory."""
        return self._session.opened and not unit.folded and self._lies_apart(unit, entry) and held_elsewhere(
            entry.param, self._mates(entry.param))

    def _lies_apart(self, unit: Unit, entry) -> bool:
        return entry.param.data_ptr() != unit.base + entry.offset

    def _copy_in(self, unit: Unit, entry) -> bool:
        """The image has the master's bytes. Returns whether they differed."""
        data, place = entry.values(), unit.base + entry.offset
        if data.dtype != entry.dtype or data.shape != entry.shape:
            refuse_data(entry, data)
        if data.device.type != "cpu" or data.stride() != entry.stride:
            data = torch.empty_strided(entry.shape, entry.stride, dtype=entry.dtype, device="cpu").copy_(data)
        if _core.same_memory(place, data.data_ptr(), entry.nbytes):
            return False
        unit.arena.write(place, data.data_ptr(), entry.nbytes)
        return True

    def _settle_master(self, unit: Unit, entry, ours: bool = False) -> None:
        """After `_copy_in`: into the image, unless somebody else may write the memory where the masters are. One on a
        device moves in any case: a streamed master is on the host. ours: they are in an arena."""
        if entry.is_lasting():
            entry.at_home, entry.storage = self.master_view(unit, entry), None
            return
        params = _masters(entry)
        self._apart = [(u, e) for u, e in self._apart if e is not entry]
        if entry.param.device.type == "cpu" and any(
                held_elsewhere(param, self._mates(param), ours) for param in (params if ours else params[:1])):
            entry.storage = None
            self._apart.append((unit, entry))
        else:
            for param in params:
                relocate.give(param, self.master_view(unit, entry))
            entry.storage = storage_of(entry.param)
        entry.remember()

    def _mates(self, param) -> int:
        """How many masters lie in the storage of this one."""
        storage = param.untyped_storage()._cdata
        mates = {id(p): p for unit in self._units if not unit.packed for entry in unit.entries
                 for p in _masters(entry)}
        return sum(not isinstance(p, Unheld) and p.untyped_storage()._cdata == storage for p in mates.values())

    def _follow(self, unit: Unit, entry) -> None:
        differed = self._copy_in(unit, entry)
        if not held_elsewhere(entry.param, 1 + len(entry.twins)):
            self._settle_master(unit, entry)
        if differed:
            self._session.mark_written(unit)

    # ------------------------------------------------------------------ images

    def _new_image(self, unit: Unit) -> None:
        """Another image, made of the masters: the old one belongs to its holders, or there was none."""
        session = self._session
        encoded = session.quantised.of(unit) is not None and not session.quantised.either
        staged = encoded or unit.pageable()
        arena = _core.Arena(session.target.core, unit.nbytes, pinned_most=0 if staged else NO_BOUND)
        before = unit.arena, unit.base
        ours = [unit.common and entry.param.data_ptr() == unit.base + entry.offset for entry in unit.entries]
        storages = [entry.storage for entry in unit.entries if not entry.twins]
        unit.arena, unit.base = arena, arena.reserve(unit.nbytes)
        try:
            for entry in unit.entries:
                self.write_image(unit, entry, entry.param.data)
            arena.finish()
            if unit.index >= 0:
                session.core.set_host(unit=unit.index, host=unit.base, arena=arena)
                session.tables.moved(unit)
        except BaseException:
            unit.arena, unit.base = before
            raise
        unit.in_file = False
        for wrapper in session.takeover.wrappers:
            if not isinstance(wrapper, MappedEmbedding):
                continue
            plan = wrapper.plan
            found = plan.managed.get("weight") or plan.replaced.get("weight")  # by the Parameter that succeeds it
            if found is not None and found[0] is unit:
                session.steps.wait_for_lookups()
                wrapper.table = table_of(unit, unit.entries[0])
        for entry, lay_there in zip(unit.entries, ours):
            self._settle_master(unit, entry, lay_there)
        held = len(storages) < len(unit.entries) or not all(old is not None and old.expired() for old in storages)
        if before[0] is not None and not (unit.mapped or held):
            before[0].leave(before[1], unit.nbytes)

    def leave_files(self, units: list[Unit]) -> None:
        """Units that streamed from files do so no more, because weights of theirs were written."""
        for unit in units:
            for entry in unit.entries:
                if isinstance(entry.param, FileWeight):
                    raise StagehandError(
                        f"{entry.name} was written, and {entry.param._unlock}", object=entry.name)
            self._new_image(unit)
            self._source.let_go([param for entry in unit.entries for param in _masters(entry)])
            self.moved_to_ram[unit.name] = unit.nbytes
            self._session.mark_written(unit)
        if units:
            nbytes = sum(unit.nbytes for unit in units)
            warnings.warn(
                f"stagehand: {some_of([unit.name for unit in units], 1)} streamed from a file and was written: "
                f"{_core.format_size(nbytes)} of weights are in RAM from now on and stream from there", RuntimeWarning,
                stacklevel=6)

    def master_view(self, unit: Unit, entry) -> torch.Tensor:
        """A tensor over the entry's bytes in the arena, with a storage of its own."""
        return view(raw(unit.arena.tensor(unit.base + entry.offset, entry.nbytes)), 0, entry.dtype, entry.shape,
                    entry.stride)

    def write_image(self, unit: Unit, entry, data: torch.Tensor) -> None:
        """The image gets these values."""
        self.unfold(unit)
        if unit.common:
            self._new_image(unit)
        if data.device.type != "cpu":
            data = data.cpu()
        if data.dtype is not entry.dtype:  # of a master that was cast
            data = data.to(entry.dtype)
        if data.stride() == entry.stride:
            unit.arena.write(unit.base + entry.offset, data.data_ptr(), entry.nbytes)
        else:
            self.master_view(unit, entry).copy_(data)

    def write_master(self, unit: Unit, entry, data: torch.Tensor) -> None:
        """The image and the master get these values."""
        self.write_image(unit, entry, data)
        if self._lies_apart(unit, entry):
            entry.param.data.copy_(data)


    # ------------------------------------------------------------------ folding

    def fold(self, unit: Unit) -> None:
        """The unit's weights have no memory any more: its packed image has their values. Not where somebody else has a
        part in the memory of one."""
        packed, weights = self._session.quantised.of(unit), unit.masters()
        if unit.folded or unit.wrapping or not all(self._may_fold(unit, *weight) for weight in weights):
            return
        home = folded.Home(self, unit, packed, raw(unit.arena.tensor(unit.base, unit.nbytes)))
        for number, (entry, param) in enumerate(weights):
            if not folded.fold(param, home, entry.offset):
                for entry, param in weights[:number]:
                    folded.give(param, self.master_view(unit, entry))
                return
        for entry in unit.entries:
            entry.storage = None
            entry.remember()
        unit.folded = home
        if unit.index < 0:  # its packed image was just made of the plain one
            self._drop_plain(unit)
        else:
            self._session.core.drop_master(unit.index)
            self._folding[unit.index] = unit

    def _may_fold(self, unit: Unit, entry, param) -> bool:
        trains = param.requires_grad and not self._session.inference_mode
        known = type(entry) is Entry and not entry.is_lasting() and not (unit.index >= 0 and entry.changed())
        return not trains and known and not self._lies_apart(unit, entry) and folded.may_fold(param)

    def _drop_plain(self, unit: Unit) -> None:
        unit.folded.plain, unit.arena, unit.base = None, None, 0

    def unfold(self, unit: Unit) -> None:
        """The unit's weights have memory, and are its masters."""
        if not unit.folded:
            return
        with self.lock, undisturbed():
            home = unit.folded
            if home is None:
                return  # another thread was at it
            home.over = True
            if home.plain is None:
                unit.arena = _core.Arena(self._session.target.core, unit.nbytes, pinned_most=0)
                unit.base = unit.arena.reserve(unit.nbytes)
                _core.transfer_decode(home.packed.segments, home.packed.address, unit.base)
                unit.arena.finish()
            if unit.index >= 0 and not (self._folding.pop(unit.index, None) and
                                        self._session.core.keep_master(unit.index)):
                self._session.core.give_master(unit.index, unit.base)
            unit.folded = None
            for entry, param in unit.masters():
                if isinstance(param, folded.Folded):
                    folded.give(param, self.master_view(unit, entry))
            for entry in [entry for entry in unit.entries if isinstance(entry.param, folded.Unfolded)]:
                entry.storage = storage_of(entry.param)
                entry.remember()
            self._unfolded.append(unit)

    def _fold_again(self, wait: bool = False) -> None:
        with self.lock, undisturbed():
            for unit in self._unfolded:
                self.fold(unit)
            self._unfolded = [unit for unit in self._unfolded if not unit.folded]
            for index in self._session.core.dropped_masters(wait) if self._folding else ():
                self._drop_plain(self._folding.pop(index))

    def end_folding(self) -> None:
        """The core is closed: all weights are Parameters like others."""
        for unit in self._units:
            self.unfold(unit)
            self._session.quantised.forget(unit)
            for _, param in unit.masters():
                param.__class__ = torch.nn.Parameter if type(param) is folded.Unfolded else type(param)


def _masters(entry) -> tuple:
    return (entry.param, *entry.twins)
