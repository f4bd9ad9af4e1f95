"""BudgetManager: reservations of device memory and pinned host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .. import _core
from ..owning import NotCopied
from .names import DenialReason, GrantStatus, Mode, Phase, Priority, Resource, number_of


class Grant(NamedTuple):
    """The answer to a request. granted_bytes: now; BudgetManager.granted(id) follows grants that shrink. id: to release
    it; 0 where there is nothing to release."""

    status: GrantStatus
    granted_bytes: int
    reason: DenialReason
    id: int


class BudgetManager(NotCopied):
    """Reservations under the caps of a ConductorConfig. Never more is granted than a cap allows: a request that does
    not fit takes from what is SPECULATIVE or BACKGROUND, or is denied with a reason.

    Owners are adapters that were registered, and names given to `register`. `refresh` is called before a request, and
    `settle` after each change: what shrank has been given up when `reserve` returns.
    """

    def __init__(self, core: _core.Conductor, refresh: Callable = lambda: None,
                 settle: Callable = lambda: None) -> None:
        self._core = core
        self._refresh = refresh
        self._settle = settle
        self._owners: dict[str, int] = {}
        self._others: dict[int, None] = {}  # ids of device memory that no adapter holds

    def register(self, owner: str) -> int:
        """An owner by name. InvalidStateTransitionError when there is one."""
        self._owners[owner] = self._core.register(owner)
        return self._owners[owner]

    def unregister(self, owner: str) -> None:
        """Ends it with its reservations and tokens. May be called again."""
        number = self._owners.pop(owner, None)
        if number is not None:
            self._core.unregister(number)
            self._settle()

    def has(self, owner: str) -> bool:
        """Whether the name is taken."""
        return owner in self._owners

    def number(self, owner: str) -> int:
        """The core's number of an owner; one that is none where it was not registered."""
        return self._owners.get(owner, 0xFFFFFFFF)

    def reserve(self, owner: str, nbytes: int, mode: Mode = Mode.HARD, priority: Priority = Priority.REQUIRED,
                phase_scope: Phase | None = None, *, resource: Resource = Resource.VRAM,
                adapter: bool = False) -> Grant:
        """Reserves nbytes (> 0). phase_scope: a Phase at whose end it is released, or None. adapter: of one that says
        itself what it has in use. Names of modes and so on are taken as well. Raises ValueError."""
        mode, priority = number_of(Mode, mode, "mode"), number_of(Priority, priority, "priority")
        resource = number_of(Resource, resource, "resource")
        scope = len(Phase) if phase_scope is None else number_of(Phase, phase_scope, "phase_scope")
        self._refresh()
        status, reason, granted, ident = self._core.reserve(self.number(owner), resource, nbytes, mode, priority, scope)
        if ident and not adapter and resource is Resource.VRAM and mode is not Mode.CEILING:
            self._others[ident] = None
        self._settle()
        return Grant(GrantStatus(status), granted, DenialReason(reason), ident)

    def release(self, grant: Grant) -> None:
        """Ends a reservation, a Grant or its id. May be called again."""
        self._core.release(grant.id if isinstance(grant, Grant) else grant)
        self._settle()

    def granted(self, grant: Grant) -> int:
        """Bytes that it is worth now; 0 when it has ended."""
        return self._core.granted(grant.id if isinstance(grant, Grant) else grant)

    def headroom(self, resource: Resource = Resource.VRAM, hard: bool = False) -> int:
        """Bytes below the soft cap, or the hard one; of pinned memory below its cap, by what is pinned now."""
        resource = number_of(Resource, resource, "resource")
        if resource is Resource.PINNED:
            self._refresh()
        return self._core.headroom(resource, hard)

    def of_others(self) -> int:
        """Device bytes granted to owners that are no adapters."""
        total = 0
        for ident in list(self._others):
            granted = self._core.granted(ident)
            if granted:
                total += granted
        return total

    def forget_ended(self, ident: int) -> None:
        self._others.pop(ident, None)

    @property
    def grant_count(self) -> int:
        """In this step, those in part included."""
        return self._core.stats()["grants"]

    @property
    def deny_count(self) -> int:
        return self._core.stats()["denials"]

    @property
    def partial_count(self) -> int:
        return self._core.stats()["partials"]
