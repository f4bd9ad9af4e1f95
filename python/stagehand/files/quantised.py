"""Packed transfer: which units of a session cross the link quantised or losslessly packed, and their packed images.

Decided once, when a session opens, from the first plan: what it streams and may be packed is; what it keeps on the
device keeps its full precision. Later plans change nothing of that, so that results never drift. Lossless: a unit that
the plan keeps on the device packed is one that it streams.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .. import _core
from .._torch import torch
from ..errors import StagehandError
from ..progress import over
from ..weights.units import Entry, round_up

nn = torch.nn

LOSSLESS = "lossless"
AUTO = "auto"  # LOSSLESS, and each plan chooses which units cross so and which as they are
ENCODINGS = (LOSSLESS, AUTO, "int8", "fp8", "int4")
NO_GAIN = "it would not shrink by a tenth"
LESS_ROOM = 16
TOGETHER = 256 << 20  # bytes of images in one arena
LEAST_ELEMENTS = 4096  # smaller weights gain nothing
TYPES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def check_encoding(value) -> str | None:
    """The encoding that a user asked for; None: all crosses as it is. ValueError names what there is."""
    if value is None or value == "plain":
        return None
    if value in ENCODINGS:
        return value
    raise ValueError(f"transfer is None, 'plain', 'lossless', 'auto', 'int8', 'fp8' or 'int4', not {value!r}")


@dataclass
class Packed:
    """The packed image of a unit."""

    segments: bytes
    nbytes: int
    largest: int  # most bytes of a segment
    names: list[str]  # of the tensors in it that are packed
    address: int = 0
    arena: _core.Arena | None = None
    error: float = 0.0  # relative, of all of them together

    def encode(self, place: int, arena) -> None:
        self.arena, self.address = arena, arena.reserve(self.nbytes)
        error, reference = _core.transfer_encode(self.segments, place, self.address)
        self.error = math.sqrt(error / reference) if reference else 0.0


@dataclass
class Lossless(Packed):
    """The packed image of a unit that is as large as its values need: it is laid out when they are there. Until then
    `nbytes` is an estimate and `largest` a bound."""

    tensors: list = field(default_factory=list)  # as for _core.transfer_layout
    piece: int = 0

    def fit(self, place: int) -> None:
        self.segments, self.nbytes, self.largest = _core.transfer_layout(self.tensors, self.piece, place)


@dataclass
class Quantised:
    """What a session packs: an encoding, units, and why others are left out."""

    encoding: str | None
    packed: dict[int, Packed] = field(default_factory=dict)  # id(unit) -> its image
    left: dict[str, str] = field(default_factory=dict)  # parameter name -> why it crosses in full
    arena: _core.Arena | None = None  # that images go into
    room: int = 0  # left in it
    either: bool = False

    def __post_init__(self):
        self.encoding = check_encoding(self.encoding)
        self.folds = self.encoding == LOSSLESS  # images take the place of plain ones
        self.either = self.encoding == AUTO  # masters are pinned beside their packed images
        if self.either:
            self.encoding = LOSSLESS

    @property
    def rounds(self) -> bool:
        """Whether weights arrive with other values than they have."""
        return self.encoding not in (None, LOSSLESS)

    def of(self, unit) -> Packed | None:
        return self.packed.get(id(unit))

    def report(self, session) -> dict:
        """For the user; see `SessionRuntime.quantised`."""
        errors = {name: packed.error for packed in self.packed.values() for name in packed.names}
        entries = [(unit, entry) for unit in session.units for entry in unit.entries]
        files = {entry.name: session.source.encoding(entry.param) for unit, entry in entries if unit.packed}
        decoded = session.source.decoded if session.source is not None else {}
        ram = {entry.name: {"reason": decoded[entry.name][0], "bytes": decoded[entry.name][1]}
               for _, entry in entries if entry.name in decoded}
        return {"encoding": AUTO if self.either else self.encoding, "error": errors, "left": dict(self.left),
                "files": files, "decoded": ram,
                "host_bytes": sum(packed.nbytes for packed in self.packed.values())}

    # ------------------------------------------------------------------ choosing

    def choose(self, session) -> None:
        """Fills `packed` with images that are laid out and not encoded yet. session: of which `reserved` is known."""
        if self.encoding is None:
            return
        streamed = [unit for unit in session.tables.beside(session.units) if not unit.mapped]
        images = self._images(session, streamed)
        self.left.update((entry.name, "its file holds it in few bits already")
                         for unit in streamed if unit.packed for entry in unit.entries)
        if not any(isinstance(image, Packed) for image in images):
            return
        sizes = [(unit.nbytes, _core.UNIT_KEEP if id(unit) in session.needs.keeps else 0,
                  min(unit.nbytes, image.nbytes) if image else 0,
                  min(unit.nbytes, round_up(image.nbytes)) if isinstance(image, Packed) and not self.rounds else 0)
                 for unit, image in zip(streamed, images)]
        stages = session.needs.stages * max((image.largest for image in images if image), default=0)
        # Later plans may have less, and units without an image cross in full.
        keep = _core.first_residents(sizes, max(0, session.budget - session.stay.reserved), stages,
                                     0 if self.rounds else LESS_ROOM)
        for unit, packed, resident in zip(streamed, images, keep):
            if not isinstance(packed, Packed):
                continue
            if resident:
                self.left.update((name, "it stays on the device") for name in packed.names)
            else:
                self.packed[id(unit)] = packed

    def segment(self, session, weight, owners: list) -> bytes | None:
        """How a weight that streams may cross the link packed, for the core's budget_advice; None: it crosses as it is.
        owners: (module, parameter name)."""
        if weight.kind == "packed":
            return session.source.segment(weight.param, weight.entry.dtype)
        if self.encoding is None or not isinstance(weight.entry, Entry):
            return None
        if self._unfit(weight.entry, owners):
            return None
        return _core.transfer_segments([self._tensor(weight.entry)])

    def _images(self, session, units: list) -> list:
        """How each unit crosses the link: as its file holds it, Packed, or None, in full."""
        owners, piece = _owners(session), session.needs.piece_bytes
        return [session.source.layout(unit, piece) if unit.packed else self._lay_out(unit, owners, session)
                for unit in units]

    def _tensor(self, entry) -> tuple:
        """As for _core.transfer_layout."""
        rows = _in_one_row(entry) if self.encoding == LOSSLESS else _in_rows(entry)
        return (self.encoding, *rows)

    def _lay_out(self, unit, owners, session) -> Packed | None:
        tensors, names, nbytes, piece = [], [], 0, session.needs.piece_bytes
        for entry in unit.entries:
            reason = self._why_not(unit, entry, owners, session)
            if reason:
                tensors.append(("verbatim", "U8", entry.offset, 1, entry.nbytes))
                self.left[entry.name] = reason
                nbytes += round_up(entry.nbytes)
                continue
            tensors.append(self._tensor(entry))
            names.append(entry.name)
            if self.encoding == LOSSLESS:
                nbytes += round_up(_estimate(unit, entry))
        if not names:
            return None
        if self.encoding == LOSSLESS:
            largest = _core.transfer_most(tensors, piece)[1]
            return Lossless(b"", nbytes, largest, names, tensors=tensors, piece=piece)
        return Packed(*_core.transfer_layout(tensors, piece), names)

    def _unfit(self, entry, owners) -> str:
        """Why a weight does not cross packed, for its owners, (module, parameter name), dtype and shape; "" where it
        may."""
        if self.encoding == LOSSLESS:
            return _unlike(entry, dense=False)
        return _not_alone(owners) or _unlike(entry)

    def _why_not(self, unit, entry, owners, session) -> str:
        reason = self._unfit(entry, owners.get(id(entry), ()))
        if entry.whole is not None:
            reason = "it is part of a weight that is quantised already"
        if not reason and unit.writable and not session.inference_mode:
            reason = "its layer trains: weights that train are not packed"
        if reason:
            return reason
        if self.encoding == LOSSLESS:
            return "" if _estimate(unit, entry) < entry.nbytes else NO_GAIN
        return "" if _finite(entry.param) else "it holds values that are not finite"

    # ------------------------------------------------------------------ filling

    def fill(self, session) -> None:
        """Encodes images whose values are in files. Those of masters in RAM follow one by one (`encode`)."""
        units = [unit for unit in session.units if self.of(unit) and unit.in_file]
        for unit in over(f"stagehand: packing {session.name}", units, lambda unit: unit.nbytes):
            self._encode_from_file(session, unit)

    def encode(self, session, unit, place: int) -> None:
        """place: address of an image of the unit's place. Images lie together in arenas, each of which goes with its
        last one."""
        packed = self.of(unit)
        if isinstance(packed, Lossless):
            packed.fit(place)
        if self.room < round_up(packed.nbytes):
            self.finish()
            self.room = max(TOGETHER, round_up(packed.nbytes))
            self.arena = _core.Arena(session.target.core, self.room, pinned_most=session.takeover.may_pin())
        self.room -= round_up(packed.nbytes)
        packed.encode(place, self.arena)

    def _encode_from_file(self, session, unit) -> None:
        place = torch.zeros(unit.nbytes, dtype=torch.uint8, device="cpu")
        for entry in unit.entries:
            data = session.source.read(entry.param)
            raw = torch.empty(0, dtype=torch.uint8, device="cpu").set_(data.untyped_storage())
            at = data.storage_offset() * data.element_size()
            place[entry.offset:entry.offset + entry.nbytes] = raw[at:at + entry.nbytes]
        packed = self.of(unit)
        if isinstance(packed, Lossless):
            packed.fit(place.data_ptr())
            if packed.nbytes >= 0.9 * unit.nbytes:  # it streams from its file
                del self.packed[id(unit)]
                self.left.update((name, NO_GAIN) for name in packed.names)
                return
        self.encode(session, unit, place.data_ptr())

    def finish(self) -> None:
        """Images that are there are pinned."""
        if self.arena is not None:
            self.arena.finish()

    def arenas(self) -> list[_core.Arena]:
        """Those of the images, each once."""
        return list({id(packed.arena): packed.arena for packed in self.packed.values() if packed.arena}.values())

    def forget(self, unit) -> None:
        """Its image is of no use any more."""
        self.arena = None
        if self.of(unit) is not None:
            self.of(unit).arena = None

    def refuse_training(self, unit, entry) -> None:
        if unit.packed:
            raise StagehandError(
                f"{entry.name} takes a gradient, and it is a weight of a packed file: those stay frozen. Load the "
                f"model with inference_mode=False and requires_grad=True, so that it is decoded into RAM",
                object=entry.name)
        if self.rounds and self.of(unit) is not None and entry.name in self.of(unit).names:
            raise StagehandError(
                f"{entry.name} takes a gradient, and it crosses the link as {self.encoding}: weights that train are "
                f"never quantised. Freeze it with requires_grad_(False), or wrap the model without transfer=",
                object=entry.name)


def _not_alone(owners) -> str:
    """Why a weight does not cross packed, for its owners, (module, parameter name); "" where it may."""
    if any(not isinstance(module, TYPES) or key != "weight" for module, key in owners):
        return "it is not the weight of a Linear or a convolution alone"
    return ""


def _unlike(entry, dense: bool = True) -> str:
    """The same, for its dtype and shape. dense: rows have to lie one behind the other."""
    if entry.dtype not in DTYPES:
        return f"it is {entry.dtype}"
    if math.prod(entry.shape) < LEAST_ELEMENTS:
        return f"it has fewer than {LEAST_ELEMENTS} elements"
    return "" if not dense or _dense(entry) else "its elements do not lie in the order of its shape"


def _in_rows(entry) -> tuple:
    """dtype, offset in the place, rows and columns."""
    return DTYPES[entry.dtype], entry.offset, entry.shape[0], math.prod(entry.shape[1:])


def _in_one_row(entry) -> tuple:
    """The same, of all that it occupies."""
    return DTYPES[entry.dtype], entry.offset, 1, entry.nbytes // entry.dtype.itemsize


def _estimate(unit, entry) -> int:
    """Bytes that a tensor takes losslessly packed; its own where packing gains less than a tenth. From samples of its
    values where they are in RAM as they will be in the place."""
    data = entry.param.data
    there = not unit.in_file and data.device.type == "cpu" and data.dtype == entry.dtype and data.is_contiguous()
    return _core.lossless_estimate(DTYPES[entry.dtype], data.data_ptr() if there else 0,
                                   entry.nbytes // entry.dtype.itemsize)


def _owners(session) -> dict[int, list]:
    """id(entry) -> the modules that own it, and under which name."""
    found: dict[int, list] = {}
    for plan in session.plans.values():
        for key, (_, entry) in plan.managed.items():
            found.setdefault(id(entry), []).append((plan.module, key))
    return found


def _dense(entry) -> bool:
    """Row-major, without gaps, so that its first dimension is one of rows."""
    want = 1
    for size, stride in zip(reversed(entry.shape), reversed(entry.stride)):
        if size != 1 and stride != want:
            return False
        want *= size
    return len(entry.shape) >= 2


def _finite(param) -> bool:
    low, high = torch.aminmax(param.detach())
    return bool(torch.isfinite(low)) and bool(torch.isfinite(high))
