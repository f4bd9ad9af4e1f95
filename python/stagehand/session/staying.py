"""A session's stay on the device: how it comes, and how it leaves with all that it has there.

The core's places come and go by themselves. What stays on the device outside of them (norms, buffers: `reserved`
bytes) is tensors of the model; a guest that leaves, and a model that was made to give way altogether, take them to the
host, and the next use brings them back. An optimizer's step is a use of those that it updates.
"""

from __future__ import annotations

import contextlib
import operator
import threading
import warnings

from .. import _core, sessions
from .._torch import aside, observed, torch
from ..errors import InvalidStateTransitionError, StagehandError, StagehandOOMError, some_of
from ..managed import arbiters
from ..weights import relocate
from ..weights.hooks import ManagedForward
from ..weights.units import owned, storage_of
from . import optimizers
from .plain import stands_for_copies


WORTH_MOVING = 64  # of a budget, the part that models without places have beside them
AGAIN = "with shutdown() of its runtime and the call that wrapped the model"


_NOTHING = contextlib.nullcontext()


_is_on_host = operator.attrgetter("is_cpu")


class Staying:
    """What a session has on the device outside of the core's places."""

    # Of its session.
    USES = """budget check_process closed core finding local model name regions.look_again simulated steps.backwards
        steps.both_locks steps.close_step steps.has_graph steps.is_open steps.lock steps.pass_lock steps.passing
        steps.under_way streaming tables.beside tables.come tables.leave tables.nbytes takeover.managed_ids
        takeover.unmanaged_to_host takeover.wrappers target trained.beside trained.taken units writes.outside"""

    def __init__(self, session) -> None:
        self._session = session
        self._steps = session.steps
        self._target = session.target
        self.away = False  # what is outside the places is on the host
        self.reserved = 0  # bytes on the device outside the core's places
        self._pool = 0  # of them, the pool's of experts
        self._counted: dict[str, int] = {}  # name -> bytes of what these are of
        self._params: list = []  # of these, the parameters
        self._placed: list = []  # StorageWeakRef of what stands on the device outside the core's places
        self._watching: list = []  # stands at modules whose tensors have left the device

    def open_with(self, items: list[relocate.Item]) -> None:
        """The session opens, with these items outside the places: there, or away where others leave no room."""
        self.count(items)
        self.make_way()
        self.away = self._finds_no_room()

    def make_way(self) -> None:
        """Before the core asks for room: steps of other models that are over end, so that those can give way, and
        the device's account learns what is free."""
        session = self._session
        for other in self._others():
            other.steps.close_finished_step()
        if session.finding is not None and session.finding.verdict:
            session.finding.look()
        else:
            self._target.tell_what_is_free()

    def _finds_no_room(self) -> bool:
        """Whether other models leave less than it needs to begin with. Then it opens without taking any: who is to
        give way is asked when it is used."""
        account = self._target.core.residency()
        largest = max((unit.nbytes for unit in self._session.tables.beside(self._session.units)), default=0)
        return account["runtimes"] > 0 and account["free"] < self.reserved + largest

    def arrive(self, call: str, *args) -> None:
        """A call of the core that may bring it to the device."""
        if observed():
            with aside():
                return self.arrive(call, *args)
        self._session.check_process()
        self.make_way()
        if self.away:
            with self._steps.both_locks():
                self.come_back()
        self.asking(getattr(self._session.core, call), *args, locked=False)
        self.tell_arbiters()

    def asking(self, call, *args, locked: bool = True):
        """A call of the core that may make others give way. What those that did have outside their places leaves as
        well; where that is needed first, the call is made again. Models that other threads are about to bring or take
        away are waited for, with nothing of this one on the device: two that come at once must not wait for each
        other's norms. locked: under the pass lock or none, and the step lock."""
        again, refused = threading.active_count() > 1, False
        try:
            while True:
                try:
                    result = call(*args)
                    break
                except StagehandOOMError as error:
                    if error.status != "BUDGET_TOO_SMALL":
                        raise
                    if self.others_go_home(needed=True):
                        continue
                    if not refused:
                        self._target.core.turn_begin()
                        refused = True
                    waits = self._others_come_or_go()
                    if not (waits or again) or not self._wait_for_turn(locked):
                        raise
                    again = waits  # once more where nobody is seen: one may just have left
        finally:
            if refused:
                self._target.core.turn_end()
        self.others_go_home()
        return result

    def _others(self) -> list:
        return [other for other in sessions.opened()
                if other is not self._session and other.target.core is self._target.core]

    def _others_come_or_go(self) -> bool:
        """Whether other threads are inside calls of models that have no places now. Not for a thread that is inside a
        model itself, which they might be waiting for."""
        others = self._others()
        return not any(other.local.depth for other in others) and any(other.stay.comes_or_goes() for other in others)

    def comes_or_goes(self) -> bool:
        """Whether a thread is inside a call of this model, which has no places now."""
        steps = self._steps
        with contextlib.suppress(StagehandError):  # closed meanwhile
            if self._session.closed or not self._session.core.parked:
                return False
            for lock in (steps.pass_lock, steps.lock):
                if not lock.acquire(blocking=False):
                    return True
                lock.release()
            return steps.passing > 0
        return True

    def _wait_for_turn(self, locked: bool) -> bool:
        """Of threads that ask again, the first keeps what it has brought; others leave with it until they are first.
        False: it has waited for too long."""
        core, came = self._target.core, False
        if not core.turn_is_first():
            with _NOTHING if locked else self._steps.both_locks():
                parked = not self.away and self._session.core.parked
                came = parked and self.reserved > 0 and not self._needed_there(coming=True)
                if came:
                    self._go_home()
        in_time = core.turn_wait()
        if came:
            with _NOTHING if locked else self._steps.both_locks():
                self.come_back()
        return in_time

    def others_go_home(self, needed: bool = False) -> bool:
        """Whether one did. Unless their room is needed they stay where all that they have is little: the device waits
        while small tensors leave, and again when they return."""
        others = [other for other in self._others() if not other.stay.away]
        if not needed and WORTH_MOVING * sum(other.stay.reserved for other in others) < self._session.budget:
            return False
        return sum(other.stay.go_home() for other in others) > 0

    def go_home(self) -> bool:
        """Takes what is outside the places of a model that has parked to the host, if nobody needs it there. Called by
        the thread of another model, which holds that one's locks: it waits for nothing."""
        steps = self._steps
        session = self._session
        with contextlib.suppress(StagehandError):  # closed meanwhile
            if self.away or session.closed or session.local.depth or not session.core.parked:
                return False
        if not steps.pass_lock.acquire(blocking=False):
            return False
        try:
            if not steps.lock.acquire(blocking=False):
                return False
            try:
                if session.closed or self.away or not session.core.parked or self._needed_there():
                    return False
                self._go_home()
                return True
            finally:
                steps.lock.release()
        finally:
            steps.pass_lock.release()

    def _needed_there(self, coming: bool = False) -> bool:
        """Parts of the model run, a backward does or may follow, or an optimizer is about to step: gradients, and state
        beside them, stay where they are. coming: it is this thread's pass that is about to begin."""
        steps = self._steps
        if not self.reserved or steps.passing or steps.backwards or steps.has_graph():
            return True
        if steps.under_way and not coming:
            return True
        return any(param.grad is not None for param in self._unmanaged_parameters())

    def _unmanaged_parameters(self):
        managed = self._session.takeover.managed_ids()
        return (param for *_, param in owned(self._session.model) if id(param) not in managed)

    def _go_home(self) -> None:
        self.away = True
        self._target.wait()  # kernels of any stream may read what is about to be freed
        self._session.tables.leave()
        with torch.inference_mode(False), torch.no_grad():
            self._session.takeover.unmanaged_to_host()
        optimizers.left(self._session.model)
        self._session.core.set_reserved(0)
        self.watch_calls()

    def watch_calls(self) -> None:
        """Modules whose tensors have left with the model bring it back when they are called alone, as a pipeline calls
        `vae.post_quant_conv`. While the model is on the device their calls pass nothing of ours."""
        session = self._session
        wrapped = {id(wrapper.module) for wrapper in session.takeover.wrappers}
        for module in session.model.modules():
            if id(module) in wrapped or not (module._parameters or module._buffers):
                continue
            forward = ManagedForward(session, module, None, False)
            for stand in (forward, *stands_for_copies(session, module)):
                self._watching.append(stand)
                stand.install()

    def watch_no_calls(self) -> None:
        """Those modules are as they were."""
        for stand in self._watching:
            # A program may have put its own forward over it.
            if not isinstance(stand, ManagedForward) or stand.stands():
                stand.remove()
        self._watching.clear()

    def before_update(self, params: set[int]) -> None:
        """An optimizer is about to step, with these parameters by id: those outside the places are where they were."""
        if not self.away or self._session.closed:
            return
        if observed():
            with aside():
                return self.before_update(params)
        if any(id(param) in params for param in self._unmanaged_parameters()):
            with self._steps.both_locks():
                self.come_back()

    def tell_arbiters(self) -> None:
        """It has come to the device."""
        for arbiter in sessions.members(arbiters):
            if arbiter.rules(self._target.core):
                arbiter.look()

    def leave(self) -> None:
        """A guest's block ends: all that it has on the device goes, unless it is kept or reserved, or in another
        block."""
        if observed():
            with aside():
                return self.leave()
        steps = self._steps
        session = self._session
        if session.local.depth:
            raise InvalidStateTransitionError(
                f"'{session.name}' cannot leave the device inside a call of it: end the as_guest() block "
                f"after the call")
        with steps.pass_lock:
            with steps.lock:
                if steps.is_open:
                    steps.close_step()
                left = session.core.guest_end()
                if session.core.parked and not self.away:
                    self._go_home()
        if left:
            warnings.warn(
                f"stagehand: tensors over weights of '{session.name}' are still held, and keep "
                f"{_core.format_size(left)} of the device after its as_guest() block: an output that is a view of a "
                f"weight, or a graph that backward has not gone through", RuntimeWarning, stacklevel=5)

    def come_back(self) -> None:
        """What is outside the places returns to the device, counted as it is now. Under the step lock."""
        if not self.away:
            return
        session = self._session
        self.make_way()
        with torch.inference_mode(False), torch.no_grad():
            items = session.writes.outside()
            self.reserve(items)
            try:
                self.place(items)
            except BaseException:
                session.takeover.unmanaged_to_host()
                session.core.set_reserved(0)
                raise
            self.away = False
            session.tables.come()
        self.watch_no_calls()

    def reserve(self, items: list[relocate.Item]) -> None:
        """The core keeps room for these items, which are outside the places."""
        session = self._session
        nbytes = self._bytes_of(items)
        if nbytes == self.reserved and not self.away:
            return
        if self._steps.is_open and session.streaming:
            session.core.step_pause()
        try:
            self._set_reserved(nbytes)
        except StagehandOOMError as error:
            if nbytes <= self.reserved:
                raise
            raise self._no_room_for(items, nbytes, error) from None
        if nbytes != self.reserved:
            session.regions.look_again()
        session.core.soften(session.trained.beside())
        self.count(items)

    def _set_reserved(self, nbytes: int) -> None:
        session = self._session
        try:
            self.asking(session.core.set_reserved, nbytes)
        except StagehandOOMError:
            if session.finding is None or nbytes <= self.reserved or not session.finding.afford(nbytes):
                raise
            self.asking(session.core.set_reserved, nbytes)

    def _bytes_of(self, items: list[relocate.Item]) -> int:
        """What these take on the device, with the pool of experts, and with gradients and states of weights that are
        trained there."""
        session = self._session
        return relocate.total_bytes(items) + session.trained.beside() + session.tables.nbytes

    def outside_bytes(self, items: list[relocate.Item]) -> int:
        """What these take on the device without what can give way: weights that are trained there."""
        return relocate.total_bytes(items) + self._session.trained.beside() - self._session.trained.taken()

    def count(self, items: list[relocate.Item]) -> None:
        """These items are outside the places now."""
        self._pool = self._session.tables.nbytes
        self.reserved = self._bytes_of(items)
        self._counted = {item.name: relocate.held_bytes(item.data) for item in items}
        self._params = [item.put.param for item in items if hasattr(item.put, "param")]

    def settle_pool(self) -> None:
        """The pool of experts is about to be of another size, or was: the core keeps room for it. Between steps, or in
        one that is paused. Under the step lock or none."""
        if self.away:
            return
        core = self._session.core
        nbytes = self.reserved - self._pool + self._session.tables.nbytes
        keeps = nbytes - max(0, self.reserved - core.reserved)  # leases have the room of gradients and states
        if nbytes > self.reserved:
            self.asking(core.set_reserved, keeps)
        else:
            core.set_reserved(keeps)
        self._pool = self._session.tables.nbytes
        self.reserved = nbytes

    def has_data_on_host(self) -> bool:
        """Whether a program has given one of its parameters data on the host: averages of weights that
        were taken before wrapping, for example."""
        return not (self._session.simulated or self.away) and any(map(_is_on_host, self._params))

    def _no_room_for(self, items: list[relocate.Item], nbytes: int, error: StagehandOOMError) -> StagehandOOMError:
        came = [item.name for item in items if item.name not in self._counted]
        grew = [item.name for item in items if relocate.held_bytes(item.data) > self._counted.get(item.name, nbytes)]
        what = [f"{some_of(names, 1)} {verb} after wrapping" for names, verb in ((came, "came"), (grew, "grew"))
                if names]
        return StagehandOOMError(
            f"{' and '.join(what) or 'tensors that shared their memory do so no more'}: what stays on the device takes "
            f"{nbytes} bytes there, and took {self.reserved}. Raise the "
            f"budget{f', or wrap again, {AGAIN}' if came else ''}: {error}", error.status,
            (came + grew + ["budget"])[0], error.native_code)

    def place(self, items: list[relocate.Item]) -> None:
        """Gives tensors that stay outside the core's places memory of the device."""
        movable = [item for item in items if relocate.plain(item.data)
                   and (self._target.simulated or item.data.device != self._target.torch)]
        moved = {id(item) for item in movable}
        for item in items:
            if id(item) not in moved and not self._target.simulated:
                item.put(item.data.to(self._target.torch))
        allocate = relocate.on_device(self._target)

        def noted(name: str, nbytes: int) -> torch.Tensor:
            base = allocate(name, nbytes)
            self._placed = [ref for ref in self._placed if not ref.expired()] + [storage_of(base)]
            return base

        relocate.move(movable, noted)

    def is_placed(self, param) -> bool:
        """Whether it has memory of the device: a weight that streams has when it was given that of one that stays."""
        if not self._session.simulated or not relocate.plain(param.data):
            return param.device.type not in ("cpu", "meta")
        storage = param.untyped_storage()._cdata
        return any(ref.cdata == storage and not ref.expired() for ref in self._placed)
