"""Weights that are leased from outside their own modules' forwards (`pos.weight[:n]`, a tied head), and writes to them.

Such a write goes to a copy on the device and is lost with that, so it is an error. Code may also write the bits that
were there: `torch.nn.utils.parametrize` does, and that is none. The difference shows in the bytes, once nobody else
has the copy. Until somebody looks, before the next lease and at the end of the pass, the lease lasts.
"""

from __future__ import annotations

import weakref
from collections import Counter

from .._torch import STORAGE_USES, USES_OF_ONE, outside_transforms, same_bits, span_bytes, torch, apart_from_caller
from .leased import HELD
from .saved import Handle, empty_out


class Lease:
    """One weight that is leased from outside. seen: a tensor over the place that shares the copy's version, without
    memory where PyTorch does not tell who else has it; None: nobody looks at the end."""

    __slots__ = ("unit", "entry", "copy", "begin", "end", "seen", "version", "storage", "given")

    def __init__(self, unit, entry, copy: torch.Tensor) -> None:
        self.unit = unit
        self.entry = entry
        self.copy = weakref.ref(copy)
        self.begin = copy.data_ptr()
        self.end = self.begin + (span_bytes(copy) if entry.is_cast else entry.nbytes)
        self.version = copy._version
        self.seen = None
        self.given = False

    def hold(self, copy: torch.Tensor) -> None:
        with outside_transforms(), torch.inference_mode(False):
            self.seen = copy.detach()
        self.storage = self.seen.untyped_storage()._cdata
        if STORAGE_USES is None:
            empty_out(self.seen)
        copy.__dict__[HELD] = self

    def was_given(self, value: torch.Tensor) -> None:
        """The copy has other memory: `weight.data = value`, which shows in no version."""
        self.given = not (self.seen.numel() and same_bits(self.seen, value))

    def over(self, held: int) -> bool:
        """Whether nobody has the place but this lease and others, `held` together."""
        return STORAGE_USES is not None and STORAGE_USES(self.storage) <= USES_OF_ONE + held - 1

    @apart_from_caller
    def written(self) -> bool:
        """Whether the place, or the copy, has other bits than the master."""
        if self.given or self.seen._version == self.version:
            return self.given
        return not (self.seen.numel() and same_bits(self.seen, self.entry.shown_values()))


class Outside:
    """Those of one thread. held: those at which somebody looks; the list stays the same object."""

    def __init__(self) -> None:
        self.held: list[Lease] = []
        self._others: list[Lease] = []
        self.lost: list[tuple] = []  # (unit, name) of weights that were written
        self.apart: list[tuple] = []  # (tensor without memory that shares a version, version, unit, name)

    def note(self, unit, entry, copy: torch.Tensor, held: bool) -> None:
        """held: somebody looks at the end. A region that is computed again has no end of a pass."""
        lease = Lease(unit, entry, copy)
        if held:
            lease.hold(copy)
            self.held.append(lease)
        else:
            self._others = [other for other in self._others if other.copy() is not None]
            self._others.append(lease)

    def alive(self) -> list[Lease]:
        return [lease for lease in (*self.held, *self._others) if lease.copy() is not None]

    def handle(self, session, tensor, address: int) -> Handle | None:
        """A handle for a saved tensor over one of them."""
        for lease in (*self.held, *self._others):
            copy = lease.copy() if lease.begin <= address < lease.end else None
            if copy is not None and address + span_bytes(tensor) <= lease.end:
                entry = lease.entry
                cast = copy.dtype if entry.whole is None and copy.dtype is not entry.dtype else None
                return Handle(session.calls, lease.unit, entry, copy, tensor, address - lease.begin, cast)
        return None

    def look(self, end: bool = False) -> None:
        """Ends leases that are over. end: all of them, with the pass."""
        if not (self.held or self.apart):  # as in nearly all calls
            return
        held, self.held[:] = list(self.held), []
        of_each = Counter(lease.storage for lease in held)
        for lease in held:
            if not end and not lease.over(of_each[lease.storage]):
                self.held.append(lease)
            elif lease.written():
                self.lost.append((lease.unit, lease.entry.name))
        if end:
            apart, self.apart = self.apart, []
            self.lost += [(unit, name) for seen, version, unit, name in apart if seen._version != version]

    def quiet(self) -> bool:
        """Whether there is nothing to look at or to forget."""
        return not (self.held or self._others or self.apart or self.lost)

    def forget(self) -> None:
        self.held.clear()
        self._others.clear()
        self.apart.clear()
        self.lost.clear()

    def take_lost(self) -> list[tuple]:
        """(unit, name) of weights that were written since it was asked last."""
        lost, self.lost = self.lost, []
        return lost
