"""A session's stay on the device: how it comes, and how a guest leaves with all that it has there.

The core's places come and go by themselves. What stays on the device outside of them (norms, buffers: `reserved`
bytes) is tensors of the model; a guest that leaves takes them to the host, and the next pass brings them back.
"""

from __future__ import annotations

import warnings

from . import _core, ending, relocate
from ._torch import torch
from .errors import InvalidStateTransitionError
from .residency import arbiters


def told_apart(name: str) -> str:
    """The name, with a number where another model that is open has it."""
    taken = {session.name for session in list(ending._open) if not session.closed}
    found, number = name, 1
    while found in taken:
        number += 1
        found = f"{name} {number}"
    return found


class Staying:
    """A part of a session."""

    _away = False  # what is outside the places is on the host

    def make_way(self) -> None:
        """Before the core asks for room: steps of other models that are over end, so that those can give way, and
        the device's account learns what is free."""
        for other in list(ending._open):
            if other is not self and other.target.core is self.target.core:
                other.close_finished_step()
        self.target.tell_what_is_free()

    def finds_no_room(self) -> bool:
        """Whether other models leave less than it needs to begin with. Then it opens without taking any: who is to
        give way is asked when it is used."""
        account = self.target.core.residency()
        largest = max((unit.nbytes for unit in self.units), default=0)
        return account["runtimes"] > 0 and account["free"] < self.reserved + largest

    def arrive(self, call: str, *args) -> None:
        """A call of the core that may bring it to the device."""
        self._check_process()
        self.make_way()
        if self._away:
            with self._pass_lock, self._step_lock:
                self._come_back()
        getattr(self.core, call)(*args)
        self._tell_arbiters()

    def _tell_arbiters(self) -> None:
        """It has come to the device."""
        for arbiter in list(arbiters):
            if arbiter.rules(self.target.core):
                arbiter.look()

    def leave(self) -> None:
        """A guest's block ends: all that it has on the device goes, unless it is kept or reserved, or in another
        block."""
        if self.local.depth:
            raise InvalidStateTransitionError(
                f"'{self.name}' cannot leave the device inside a call of it: end the as_guest() block "
                f"after the call")
        with self._pass_lock:
            with self._step_lock:
                if self._open:
                    self._close_step()
                left = self.core.guest_end()
                if self.core.parked and not self._away:
                    self._away = True
                    self.target.wait()  # kernels of any stream may read what is about to be freed
                    with torch.inference_mode(False), torch.no_grad():
                        self._unmanaged_to_host()
                    self.core.set_reserved(0)
        if left:
            warnings.warn(
                f"stagehand: tensors over weights of '{self.name}' are still held, and keep "
                f"{_core.format_size(left)} of the device after its as_guest() block: an output that is a view of a "
                f"weight, or a graph that backward has not gone through", RuntimeWarning, stacklevel=5)

    def _come_back(self) -> None:
        """What is outside the places returns to the device. Under the step lock."""
        if not self._away:
            return
        self.core.set_reserved(self.reserved)
        with torch.inference_mode(False), torch.no_grad():
            try:
                self._place(self._unmanaged())
            except BaseException:
                self._unmanaged_to_host()
                self.core.set_reserved(0)
                raise
        self._away = False

    def _place(self, items: list[relocate.Item]) -> None:
        """Gives tensors that stay outside the core's places memory of the device."""
        movable = [item for item in items if relocate.plain(item.data)
                   and (self.target.simulated or item.data.device != self.target.torch)]
        moved = {id(item) for item in movable}
        for item in items:
            if id(item) not in moved and not self.target.simulated:
                item.put(item.data.to(self.target.torch))
        relocate.move(movable, relocate.on_device(self.target))
