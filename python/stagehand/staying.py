"""A session's stay on the device: how it comes, and how it leaves with all that it has there.

The core's places come and go by themselves. What stays on the device outside of them (norms, buffers: `reserved`
bytes) is tensors of the model; a guest that leaves, and a model that was made to give way altogether, take them to the
host, and the next use brings them back. An optimizer's step is a use of those that it updates.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
import warnings

from . import _core, relocate, sessions
from ._torch import aside, observed, torch
from .errors import InvalidStateTransitionError, StagehandError, StagehandOOMError
from .hooks import ManagedForward
from .plain import stands_for_copies
from .residency import arbiters
from .units import owned, storage_of


WAIT_S = 30.0  # for models that other threads bring to the device or take away


class Staying:
    """A part of a session."""

    _away = False  # what is outside the places is on the host

    def make_way(self) -> None:
        """Before the core asks for room: steps of other models that are over end, so that those can give way, and
        the device's account learns what is free."""
        for other in self._others():
            other.close_finished_step()
        if self.finding is not None and self.finding.verdict:
            self.finding.look()
        else:
            self.target.tell_what_is_free()

    def finds_no_room(self) -> bool:
        """Whether other models leave less than it needs to begin with. Then it opens without taking any: who is to
        give way is asked when it is used."""
        account = self.target.core.residency()
        largest = max((unit.nbytes for unit in self.units), default=0)
        return account["runtimes"] > 0 and account["free"] < self.reserved + largest

    def arrive(self, call: str, *args) -> None:
        """A call of the core that may bring it to the device."""
        if observed():
            with aside():
                return self.arrive(call, *args)
        self._check_process()
        self.make_way()
        if self._away:
            with self._pass_lock, self._step_lock:
                self._come_back()
        self._asking(getattr(self.core, call), *args, locked=False)
        self._tell_arbiters()

    def _asking(self, call, *args, locked: bool = True):
        """A call of the core that may make others give way. What those that did have outside their places leaves as
        well; where that is needed first, the call is made again. Models that other threads are about to bring or take
        away are waited for, with nothing of this one on the device: two that come at once must not wait for each
        other's norms. locked: under the pass lock or none, and the step lock."""
        until, again = None, threading.active_count() > 1
        while True:
            try:
                result = call(*args)
                break
            except StagehandOOMError as error:
                if error.status != "BUDGET_TOO_SMALL":
                    raise
                if self._others_go_home():
                    continue
                if until is None:
                    until = time.monotonic() + WAIT_S
                waits = self._others_come_or_go()
                if time.monotonic() > until or not (waits or again):
                    raise
                again = waits  # once more where nobody is seen: one may just have left
                self._stand_aside(locked)
        self._others_go_home()
        return result

    def _others(self) -> list:
        return [other for other in sessions.opened() if other is not self and other.target.core is self.target.core]

    def _others_come_or_go(self) -> bool:
        """Whether other threads are inside calls of models that have no places now. Not for a thread that is inside a
        model itself, which they might be waiting for."""
        others = self._others()
        return not any(other.local.depth for other in others) and any(other._comes_or_goes() for other in others)

    def _comes_or_goes(self) -> bool:
        with contextlib.suppress(StagehandError):  # closed meanwhile
            if self.closed or not self.core.parked:
                return False
            for lock in (self._pass_lock, self._step_lock):
                if not lock.acquire(blocking=False):
                    return True
                lock.release()
            return self._passing > 0
        return True

    def _stand_aside(self, locked: bool) -> None:
        """Leaves for a moment with what it has brought already."""
        with contextlib.ExitStack() as locks:
            if not locked:
                locks.enter_context(self._pass_lock)
                locks.enter_context(self._step_lock)
            comes = not self._away and self.core.parked and self.reserved > 0 and not self._needed_there(coming=True)
            if comes:
                self._go_home()
        time.sleep(random.uniform(0.002, 0.01))  # so that of two one is first
        if comes:
            with contextlib.ExitStack() as locks:
                if not locked:
                    locks.enter_context(self._pass_lock)
                    locks.enter_context(self._step_lock)
                self._come_back()

    def _others_go_home(self) -> bool:
        """Whether one did."""
        return sum(other.go_home() for other in self._others()) > 0

    def go_home(self) -> bool:
        """Takes what is outside the places of a model that has parked to the host, if nobody needs it there. Called by
        the thread of another model, which holds that one's locks: it waits for nothing."""
        with contextlib.suppress(StagehandError):  # closed meanwhile
            if self._away or self.closed or self.local.depth or not self.core.parked:
                return False
        if not self._pass_lock.acquire(blocking=False):
            return False
        try:
            if not self._step_lock.acquire(blocking=False):
                return False
            try:
                if self.closed or self._away or not self.core.parked or self._needed_there():
                    return False
                self._go_home()
                return True
            finally:
                self._step_lock.release()
        finally:
            self._pass_lock.release()

    def _needed_there(self, coming: bool = False) -> bool:
        """Parts of the model run, a backward does or may follow, or an optimizer is about to step: gradients, and state
        beside them, stay where they are. coming: it is this thread's pass that is about to begin."""
        graph = self._graph is not None and self._graph() is not None
        if self._passing or (self._steps and not coming) or self._tasks or graph or not self.reserved:
            return True
        return any(param.grad is not None for param in self._unmanaged_parameters())

    def _unmanaged_parameters(self):
        managed = self._managed_ids()
        return (param for *_, param in owned(self.model) if id(param) not in managed)

    def _go_home(self) -> None:
        self._away = True
        self.target.wait()  # kernels of any stream may read what is about to be freed
        with torch.inference_mode(False), torch.no_grad():
            self._unmanaged_to_host()
        self.core.set_reserved(0)
        self._watch_calls()

    def _watch_calls(self) -> None:
        """Modules whose tensors have left with the model bring it back when they are called alone, as a pipeline calls
        `vae.post_quant_conv`. While the model is on the device their calls pass nothing of ours."""
        wrapped = {id(wrapper.module) for wrapper in self._wrappers}
        for module in self.model.modules():
            if id(module) in wrapped or not (module._parameters or module._buffers):
                continue
            for stand in (ManagedForward(self, module, None, False), *stands_for_copies(self, module)):
                self._watching.append(stand)
                stand.install()

    def _watch_no_calls(self) -> None:
        for stand in self._watching:
            # A program may have put its own forward over ours.
            if not isinstance(stand, ManagedForward) or stand.stands():
                stand.remove()
        self._watching.clear()

    def before_update(self, params: set[int]) -> None:
        """An optimizer is about to step, with these parameters by id: those outside the places are where they were."""
        if not self._away or self.closed:
            return
        if observed():
            with aside():
                return self.before_update(params)
        if any(id(param) in params for param in self._unmanaged_parameters()):
            with self._pass_lock, self._step_lock:
                self._come_back()

    def _tell_arbiters(self) -> None:
        """It has come to the device."""
        for arbiter in sessions.members(arbiters):
            if arbiter.rules(self.target.core):
                arbiter.look()

    def leave(self) -> None:
        """A guest's block ends: all that it has on the device goes, unless it is kept or reserved, or in another
        block."""
        if observed():
            with aside():
                return self.leave()
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
                    self._go_home()
        if left:
            warnings.warn(
                f"stagehand: tensors over weights of '{self.name}' are still held, and keep "
                f"{_core.format_size(left)} of the device after its as_guest() block: an output that is a view of a "
                f"weight, or a graph that backward has not gone through", RuntimeWarning, stacklevel=5)

    def _come_back(self) -> None:
        """What is outside the places returns to the device, counted as it is now. Under the step lock."""
        if not self._away:
            return
        self.make_way()
        with torch.inference_mode(False), torch.no_grad():
            items = self._outside()
            self._reserve(items)
            try:
                self._place(items)
            except BaseException:
                self._unmanaged_to_host()
                self.core.set_reserved(0)
                raise
        self._away = False
        self._watch_no_calls()

    def _place(self, items: list[relocate.Item]) -> None:
        """Gives tensors that stay outside the core's places memory of the device."""
        movable = [item for item in items if relocate.plain(item.data)
                   and (self.target.simulated or item.data.device != self.target.torch)]
        moved = {id(item) for item in movable}
        for item in items:
            if id(item) not in moved and not self.target.simulated:
                item.put(item.data.to(self.target.torch))
        allocate = relocate.on_device(self.target)

        def noted(name: str, nbytes: int) -> torch.Tensor:
            base = allocate(name, nbytes)
            self._placed = [ref for ref in self._placed if not ref.expired()] + [storage_of(base)]
            return base

        relocate.move(movable, noted)

    def _is_placed(self, param) -> bool:
        """Whether it has memory of the device: a weight that streams has when it was given that of one that stays."""
        if not self.simulated or not relocate.plain(param.data):
            return param.device.type not in ("cpu", "meta")
        storage = param.untyped_storage()._cdata
        return any(ref.cdata == storage and not ref.expired() for ref in self._placed)
