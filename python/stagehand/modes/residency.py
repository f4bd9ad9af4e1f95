"""Several models on one device: who stays, who comes as a guest. What a runtime offers for it is here; who gives way
to whom is decided in the core (docs/residency.md).

    card = stagehand.Device("cuda:0", budget="20GB")            # one for all of them
    text, main, upscaler = (StagehandRuntime(m, config, device=card) for m in models)
    with text.keep_resident():
        main.reserve_for_resident()                             # main's blocks come while text still runs
        ...
        with main.as_guest(upscaler):                           # in what main leaves; gone at the block's end
            ...
    main.release_reservation()
"""

from __future__ import annotations

import contextlib
import enum
import threading

from .._moved import attribute
from ..errors import InvalidArgumentError, InvalidStateTransitionError, StagehandError
from ..managed import arbiters, runtime_of
from ..sessions import members

_lock = threading.Lock()  # of the counts below; nothing is called under it


class ResidentPriority(enum.Enum):
    """PRIMARY: never evicted while it is reserved. SECONDARY: evicted only when a load would fail otherwise, after
    everything that is not reserved."""

    PRIMARY = "primary"
    SECONDARY = "secondary"


class HasRuntime:
    """What may be named in place of a runtime: `weights` is that runtime."""


class Residency:
    """The part of a runtime that says what stays on the device. Methods take a target: another runtime, or a model
    under one, on the same Device; None is the runtime itself."""

    _keeps = 0  # keep_resident blocks that are open
    _guests = 0  # as_guest blocks
    _priority: ResidentPriority | None = None
    _books: tuple = ()  # conductors that count it because it is reserved

    # ------------------------------------------------------------------ for users

    def keep_resident(self, model_or_runtime: object = None):
        """A context. Inside the block the target's memory on the device is nobody else's; it comes there if it was not.
        Blocks may be nested. Raises StagehandOOMError, before the block, when it does not fit beside what is
        protected."""
        return self._block(model_or_runtime, "keep_begin", "_keeps", Residency._unkeep)

    def reserve_for_resident(self, model_or_runtime: object = None,
                             priority: ResidentPriority = ResidentPriority.PRIMARY) -> None:
        """Reserves what the target's plan occupies on the device, residents and slots, until release_reservation() or
        its shutdown. The target comes to the device now, and its weights with it, also while another model runs.
        Again: the newer priority counts. Raises StagehandOOMError when it does not fit beside what is protected."""
        if not isinstance(priority, ResidentPriority):
            raise TypeError(f"priority is ResidentPriority.PRIMARY or SECONDARY, not {priority!r}")
        target = self._target_of(model_or_runtime)
        books = target._into_books() if target._priority is None else ()
        try:
            target._enter("reserve", priority.value)
        except BaseException:
            target._out_of(books)
            raise
        with _lock:
            target._books += books
            target._priority = priority

    def release_reservation(self, model_or_runtime: object = None) -> None:
        """Ends the target's reservation; nothing happens where there is none. It stays on the device until somebody
        asks for the memory."""
        target = self._target_of(model_or_runtime, alive=False)
        target._priority = None
        target._tell("release")
        with _lock:
            books, target._books = target._books, ()
        target._out_of(books)

    def as_guest(self, model_or_runtime: object = None):
        """A context. Inside the block the target works in memory that is not reserved; at its end all that it has on
        the device leaves, unless it is reserved or kept. Raises StagehandOOMError, before the block, when it does not
        fit."""
        return self._block(model_or_runtime, "guest_begin", "_guests", Residency._leave)

    @contextlib.contextmanager
    def _block(self, model_or_runtime, begin: str, count: str, end):
        target = self._target_of(model_or_runtime)
        with target._below_the_caps():
            target._enter(begin)
            target._count(count, 1)
            try:
                yield target
            finally:
                target._count(count, -1)
                end(target)

    # ------------------------------------------------------------------ the target's side

    def _target_of(self, given, alive: bool = True) -> "Residency":
        target = self if given is None else given.weights if isinstance(given, HasRuntime) else given
        if not isinstance(target, Residency):
            found = runtime_of(target) if hasattr(target, "__dict__") else None
            if found is None:
                raise InvalidArgumentError(
                    f"{type(target).__name__} is neither a runtime nor a model under stagehand: wrap it first")
            target = found
        if not alive:
            return target
        here, there = self._residency_session(), target._residency_session()
        if here.target.core is not there.target.core:
            raise InvalidArgumentError(
                f"'{there.name}' is on another Device than '{here.name}': make one "
                f"stagehand.Device(...) and pass it to both as device=")
        return target

    def _residency_session(self):
        """The open session of this runtime."""
        session = self._manage()
        if session.closed:
            raise InvalidStateTransitionError("the runtime has been shut down; make a new one")
        return session

    def _into_books(self) -> tuple:
        """Conductors that rule the device, which count it from now on until `_out_of` them. Raises StagehandOOMError
        where their caps do not allow it."""
        core = self._residency_session().target.core
        books = []
        try:
            for arbiter in [arbiter for arbiter in members(arbiters) if arbiter.rules(core)]:
                arbiter.visit(self)
                books.append(arbiter)
        except BaseException:
            self._out_of(books)
            raise
        return tuple(books)

    def _out_of(self, books) -> None:
        for arbiter in books:
            arbiter.left(self)

    @contextlib.contextmanager
    def _below_the_caps(self):
        """Counted by the conductors inside the block."""
        books = self._into_books()
        try:
            yield
        finally:
            self._out_of(books)

    def _manage(self):
        """The session, opened if that has not happened."""
        raise NotImplementedError

    def _end_held_step(self) -> None:
        """Ends a step that the user has opened and left open."""

    def _count(self, name: str, by: int) -> None:
        with _lock:
            setattr(self, name, getattr(self, name) + by)

    def _enter(self, call: str, *args) -> None:
        """A call of the core that may bring the model to the device."""
        self._residency_session().stay.arrive(call, *args)

    def _tell(self, call: str) -> None:
        """A call of the core that only frees. A runtime that has been shut down has done so."""
        session = self.session
        if session is None or session.closed:
            return
        try:
            getattr(session.core, call)()
        except StagehandError as error:
            if error.status != "SHUT_DOWN":
                raise

    def _unkeep(self) -> None:
        self._tell("keep_end")

    def _leave(self) -> None:
        if self.session is None or self.session.closed:
            return
        self._end_held_step()
        self.session.stay.leave()

    def _protect_again(self) -> None:
        """A new session stands for the one that was protected."""
        for _ in range(self._keeps):
            self._enter("keep_begin")
        for _ in range(self._guests):
            self._enter("guest_begin")
        if self._priority is not None:
            self._enter("reserve", self._priority.value)


def __getattr__(name: str):
    return attribute(__name__, name)
