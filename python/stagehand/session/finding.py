"""The budget of a session that was given none: measured before its steps, decided in the core (docs/budget.md)."""

from __future__ import annotations

import contextlib
import logging
import time

from torch.utils import _pytree

from .. import _core, sessions
from .._torch import torch, unseen
from ..errors import StagehandError
from ..weights.relocate import held_bytes
from ..weights.units import refuse_uninitialised
from ..weights.wrapping import wraps

log = logging.getLogger("stagehand")


def model_bytes(model, dtype=None, trained: bool = False) -> int:
    """What a budget need not exceed: all of the model on the device, with room for alignment. trained: and with
    gradients and states of weights that are trained beside frozen ones."""
    refuse_uninitialised(model)
    params = list(model.parameters())
    total = sum(held_bytes(p) if dtype is None or not p.is_floating_point() or wraps(p) else p.numel() * dtype.itemsize
                for p in params)
    total += sum(b.numel() * b.element_size() for b in model.buffers())
    if trained and not all(param.requires_grad for param in params):
        total += sum(held_bytes(p) + _core.TRAINABLE_STATE_BYTES * p.numel() for p in params if p.requires_grad)
    return total + len(params) * 1024 + (1 << 20)


def _nbytes(values) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in _pytree.tree_leaves(values)
               if isinstance(leaf, torch.Tensor))


class Turns:
    """Models that take turns on one device, as those of a pipeline do: each has budgets of its own, for what the rest
    of the process needs differs with the one that runs.

    ceiling: bytes that the process may have of the device, None: all that is there. own: of them, what the models may
    have. ran: the Finding of the model that runs, or ran last.
    """

    def __init__(self, ceiling: int | None = None, own: int | None = None) -> None:
        self.ceiling = ceiling
        self.own = own
        self.ran: Finding | None = None
        self._members = 0

    def number(self) -> int:
        self._members += 1
        return self._members


class Finding:
    """Of one session. Called by the thread that begins a step, under the session's step lock; `coming` by the thread
    of a pass before that.

    held: a conductor decides: the budget stays. verdict: the last one, see Device.find_budget.
    """

    clock = staticmethod(time.monotonic_ns)

    def __init__(self, target, want: int, turns: Turns | None = None) -> None:
        self.target = target
        self.turns = turns
        self._phase = {} if turns is None else {"phase": turns.number(), "ceiling": turns.ceiling or 0}
        self.session = None
        self.held = False
        self._want = want
        self._pace = _core.BudgetPace()
        self._reading: dict = {}
        self.verdict: dict = {}
        target.findings.add(self)

    # ------------------------------------------------------------------ opening

    def first(self) -> int:
        """The budget to open with."""
        self.target.begin_peak()
        budget = self._ask(0)["budget"]
        return max(1, min(budget, self.target.obtainable_bytes()))

    def attach(self, session) -> None:
        """`session` has been made with the budget of `first`: it gets what it cannot do without, if that is there."""
        self.session = session
        needed = session.needs.comfortable()
        if needed > self.verdict["cap"]:  # which may be of a time when others had the memory
            self._ask(0, least=needed)
        needs = min(needed, self.verdict["cap"])
        if needs > session.budget:
            session.budget = min(needs, max(session.budget, self.target.obtainable_bytes()))
        if self.turns is not None:
            session.budget = max(session.budget, self._least_in_turn())

    def afford(self, reserved: int) -> bool:
        """Weights came that stay on the device, where all of them take `reserved` bytes now. Whether the budget is one
        that works with them: it is raised to the smallest such, unless the models that take turns may not have that."""
        session = self.session
        least = session.core.smallest_budget() - session.core.reserved + reserved
        if self.held or (self.turns is not None and self.turns.own is not None and least > self.turns.own):
            return False
        if least > session.budget:
            session.budget = self._set(least)
        return session.budget >= least

    def _least_in_turn(self) -> int:
        """A model works with it, though what else the process has there now leaves less: its step goes above the cap
        then. 0 where all that the models may have would not be enough."""
        least = self.session.needs.smallest()
        return least if self.turns.own is None or least <= self.turns.own else 0

    def renew(self) -> None:
        """What was seen so far does not count any more."""
        self.target.core.forget()
        self._pace.renew()
        self.target.begin_peak()

    # ------------------------------------------------------------------ before a step

    def coming(self, args, kwargs) -> None:
        """A pass with these inputs is about to begin."""
        with unseen():
            self._pace.inputs(_nbytes((args, kwargs)), self.session.steps.under_way)

    def refused(self) -> None:
        """What is leased at once needs more than the first budget: the next step has all."""
        self._pace.hurry()

    def before_step(self) -> None:
        """The session's step is about to begin: its budget follows the device's memory."""
        session, now = self.session, self.clock()
        comes = self.turns is not None and self.turns.ran is not self
        due, growth = self._pace.due(now, comes)
        if self.held or self.target.capturing() or not due:
            return
        self._ask(session.budget, growth=growth, runs=True, runtime=session.core, spare=session.tables.spare,
                  least=self._least_to_return() if session.core.parked else 0)
        self._pace.looked(now)
        if self.verdict["budget"] != session.budget:
            self._change()
        self._others_give_way()
        if comes:
            self.turns.ran = self
            if self.target.core.above_ceiling(**self._reading, budget=session.budget, **self._phase):
                self.target.trim()

    def before_part(self) -> None:
        """A part of the model is called alone, as a pipeline calls a VAE's decoder."""
        if self.turns is not None and self.turns.ran is not self:
            self.before_step()

    def look(self) -> None:
        """The device's account learns what there is, and what a session without places needs at least."""
        session = self.session
        if session is None:
            self._ask(0)
        elif session.core is not None and session.core.parked:
            self._ask(0, least=self._least_to_return())
        else:
            self._ask(session.budget)

    def _least_to_return(self) -> int:
        """What a session without places needs, those of its weights that stay included."""
        return self.session.core.smallest_budget() + (self.session.stay.reserved if self.session.stay.away else 0)

    def _ask(self, budget: int, **more) -> dict:
        self._reading = self.target.memory()
        self.verdict = self.target.core.find_budget(
            **self._reading, budget=budget, want=self._want, steps=self._pace.steps, **self._phase, **more)
        if self.verdict["reset_peak"]:
            self.target.begin_peak()
        return self.verdict

    def _change(self) -> None:
        session, asked = self.session, self.verdict["budget"]
        session.trained.fit(asked)
        before, session.budget = session.budget, self._set(asked)
        session.trained.budget_changed()
        session.tables.fill()
        if session.budget < before and self.verdict["trim"]:
            self.target.trim()
        self.target.settle_counts(self._reading, refused=session.budget < asked and asked > before)
        self.target.begin_peak()
        session.regions.look_again(True)  # not now: the step lock is held
        log.info("stagehand: the budget of %s is %s now, after %s: %s (others had %s of %s)",
                 type(session.model).__name__, _core.format_size(session.budget), _core.format_size(before),
                 self.verdict["text"], _core.format_size(self.verdict["others"]),
                 _core.format_size(self.verdict["capacity"]))

    def _set(self, budget: int) -> int:
        """Tries it; returns the budget that is in force then."""
        core = self.session.core
        self.session.tables.fit(budget)
        try:
            core.set_budget(budget)
        except StagehandError as error:
            if error.status not in ("BUDGET_TOO_SMALL", "OUT_OF_DEVICE_MEMORY"):
                raise
            log.info("stagehand: the budget stays: %s", error)
        return core.stats()["budget"]

    def _others_give_way(self) -> None:
        """Idle models that found their budgets, too, plan for less where all together have more than the cap."""
        account = self.target.core.residency()
        over = account["occupied"] - self.verdict["cap"]
        findings = [other.finding for other in sessions.opened()]
        idle = [found for found in findings if found not in (None, self) and not found.held
                and found.target.core is self.target.core]
        for finding in sorted(idle, key=lambda found: found._pace.looked_ns):
            if over > 0:
                with contextlib.suppress(StagehandError):  # it is in a step by now, leased, or has been shut down
                    over -= finding.give_way(over)
        if self.turns is not None and over < account["occupied"] - self.verdict["cap"]:
            self._ask(self.session.budget, runs=True)  # the cap that was in their way
            self.target.begin_peak()

    def give_way(self, over: int) -> int:
        """Plans for `over` bytes less, as far as an idle model can. Returns by how many."""
        core = self.session.core
        if self.session.steps.is_open or core.parked:
            return 0
        if self.turns is not None:
            before = self.target.core.residency()["occupied"]
            core.lend(over)
            return before - self.target.core.residency()["occupied"]
        less, freed = core.budget_without(over, self.session.tables.spare)
        if less:
            self.session.tables.fit(less)
            core.set_budget(less)
            self.session.budget = less
        return freed

    # ------------------------------------------------------------------ reports

    def report(self) -> dict:
        """The last verdict: bytes, and why."""
        return {key: value for key, value in self.verdict.items() if key not in ("budget", "reset_peak", "trim")}
