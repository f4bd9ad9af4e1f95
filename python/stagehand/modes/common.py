"""What the runtimes of layer mode and block mode have in common for their users."""

from __future__ import annotations

import contextlib
import threading

from .._torch import unseen
from ..arguments import Path, Size
from ..claims import taking_over
from ..errors import StagehandError
from ..managed import refuse_second
from ..owning import Owning
from ..report import budget_bytes, runtime_stats
from ..session.ranks import refuse_wrapped
from ..weights.sharded import refuse_sharded_model
from .curves import Curve, curve_of
from .describe import described, report_of, shown
from .residency import Residency


@contextlib.contextmanager
def about_to_wrap(model):
    """Inside it a mode takes the model over, and other threads that would wait. Raises StagehandError
    where the model is managed already, is sharded, or is in DistributedDataParallel."""
    refuse_second(model)
    refuse_sharded_model(model)
    refuse_wrapped(model)
    with unseen(), taking_over(model):
        refuse_second(model)  # another thread may have been first
        yield


class SessionRuntime(Owning, Residency):
    """A runtime over `self.session`. `_opened()` returns the session once the model is managed. As a context
    it ends with its shutdown."""

    _instead = ("leave the runtime out. A copy or pickle of the model is a plain model, which stagehand.layer or "
                "stagehand.StagehandRuntime puts under a runtime of its own")

    session = None
    _name: str | None = None  # as the user gave it
    _given_budget: int | None = None  # bytes that the user named; None: it is found

    conversions = 0  # of parts, one after the other (converting.py)
    _held = False  # a step is open from begin_step to end_step
    _step: int | None = None  # its number

    def __init__(self) -> None:
        self._life = threading.RLock()  # of who opens it, converts its model or shuts it down: one after the other
        self._held_lock = threading.RLock()  # of begin_step() and end_step()

    def _opened(self):
        return self.session

    def _take(self, session) -> None:
        """Opens the session, which is this runtime's from then on. An interrupt leaves both or neither."""
        before = self.session
        try:
            session.open()
            self.session = session
        except BaseException:
            session.close()
            self.session = before
            raise

    def _may_end(self) -> None:
        """Raises where this thread cannot shut it down, before it waits for others that may wait for this one."""
        session = self.session
        if session is not None and session.opened:
            session.check_process()
            session.refuse_inside_call()

    def _manage(self):
        return self._opened()

    def _session_for_step(self):
        """The session, for a step that begins."""
        session = self._residency_session()
        return self._residency_session() if session.writes.gives_way_to_another() else session

    @property
    def name(self) -> str:
        """The model's name in errors: as given, or its class; with a number where another open model has it."""
        return self.session.name if self.session is not None else self._name or type(self.model).__name__

    def __repr__(self) -> str:
        return described(self)

    def _repr_html_(self) -> str | None:
        return shown(self)

    def report_html(self, path: Path | None = None) -> str:
        """A page of HTML of the run so far: what stays and what streams, a mean step unit by unit, what bounds it, the
        last 100 steps against what was predicted, memory, other budgets, advice. One file without network, light and
        dark, readable printed. path: a file to which it is written as well; one that is there is replaced. Searches a
        plan for each of some budgets: up to seconds. Raises StagehandError where nothing streams."""
        return report_of(self._opened(), path)

    @property
    def report(self) -> dict[str, str]:
        """Name -> why, of the parameters that stay on the device."""
        return dict(self._opened().choice.kept)

    @property
    def trainables(self) -> dict[str, dict]:
        """For each weight that is trained and could stream: {"home": "device" or "host", "why": text}. On the device it
        is a plain parameter, whose gradient and optimizer state the budget counts (docs/training.md). Empty where
        nothing is frozen: then all masters are on the host."""
        return self._opened().trained.homes()

    @property
    def compiled(self) -> list[str]:
        """Names of modules that torch.compile has compiled and that run so (docs/compile.md)."""
        return self._opened().regions.names()

    @property
    def quantised(self) -> dict:
        """What crosses the link in fewer bits: {"encoding": str or None, "error": tensor name -> relative error of its
        unit, "left": tensor name -> why it crosses in full, "host_bytes": of host memory that packed bytes take beside
        the weights}. Of a quantised file, "files": tensor name -> the encoding
        in which it streams from there, "decoded": tensor name -> {"reason": why it does not, "bytes": of host memory
        that its values take}."""
        session = self._opened()
        return session.quantised.report(session)

    @property
    def stats(self) -> dict:
        """Bytes, copies, stalls and times since wrapping; "units" has one record for each unit, "files" one for
        each file that weights stream from: how it is read, and why."""
        session = self._opened()
        session.steps.close_finished_step()
        return runtime_stats(session)

    @property
    def plan(self) -> dict:
        """The prediction for the plan in force: times in ns, sizes in bytes. "experts", where there are such that
        come by rows (docs/experts.md): what their pool has done since wrapping."""
        session = self._opened()
        experts = session.tables.report()
        return session.core.prediction() if experts is None else {**session.core.prediction(), "experts": experts}

    def curve(self, points: int = 16) -> Curve:
        """What a step takes over budgets: predictions for `points` (2 to 1000) of them, from the smallest that works
        to the one that holds everything, and for the one in force; by the order, times and rates that are known by
        now. Before the first steps compute is not known, and the link alone is predicted. Searches a plan for each: up
        to seconds. Raises StagehandError where nothing streams, InvalidStateTransitionError with policy="static"."""
        return curve_of(self._opened(), points)

    def set_vram_budget(self, budget: Size | None) -> None:
        """A new budget, in bytes or as a size string; between steps. StagehandOOMError when it is too small, or more
        than a conductor's caps allow: the old one stays. None: it is found from the next step on, whatever was seen
        before."""
        if budget is None:
            self._opened().find_budget()
            self._given_budget = None
            return
        self._set_budget(budget_bytes(budget, "budget"))

    def free(self, nbytes: int) -> None:
        """Gives back at least `nbytes` of device memory; between steps. A budget that was found stays at what is
        left."""
        self._set_budget(self._opened().budget - nbytes)

    def _set_budget(self, budget: int) -> None:
        session = self._opened()
        before = session.budget
        session.set_budget(budget)
        if session.arbiter is not None:
            try:
                session.arbiter.budget_changed(session)
            except StagehandError:
                session.set_budget(before)
                session.arbiter.budget_changed(session)
                raise
        self._given_budget = budget

    # ------------------------------------------------------------------ steps

    def begin_step(self, step: int | None = None) -> None:
        """Opens a step that lasts until end_step(). One that is still open, after an exception, ends first.
        step: number for log lines."""
        self._residency_session()
        with self._held_lock:
            self._leave_held_step()
            session = self._session_for_step()
            self._held = True  # before: an interrupt must not leave a step that end_step() does not know of
            session.steps.begin_step()
            self._step = step

    def end_step(self) -> None:
        """Ends the step that is open: the one of begin_step(), or that of the last pass. Nothing happens where none
        is. A backward may still follow, also through what came out of the step. Without this call a step ends when the
        next pass begins."""
        if self._held:
            self._leave_held_step()
        elif self.session is not None and not self.session.closed:
            self.session.steps.finish_step()

    def _leave_held_step(self) -> None:
        with self._held_lock:
            if self._held:
                self._held = False
                self.session.steps.end_step()

    @contextlib.contextmanager
    def managed_forward(self):
        """Forwards inside are managed and belong to one step, that of begin_step() or one of their own; without
        begin_step() end_step() parts them, and the ninth begins another. To be left on the thread that entered it:
        other threads wait for their turn until then. Several of one thread need not nest. After a backward inside,
        until the next forward, lists of the model's parameters give the Parameters on the host, as outside."""
        session = self._session_for_step()
        with session.steps.step(held=True):
            yield self

    @contextlib.contextmanager
    def managed_backward(self):
        """A backward inside belongs to the step of its forward, and without begin_step() that step ends with it. Not
        needed for right gradients: a backward outside is seen as well, and its step ends when the next begins."""
        session = self._residency_session()
        with session.steps.step(last=True, held=True):
            yield self

    def _end_held_step(self) -> None:
        self.end_step()

    # ------------------------------------------------------------------ the rest

    def _pause(self) -> None:
        """Lets the model go; `_resume` follows."""
        raise NotImplementedError

    def _resume(self, dtype) -> None:
        """Takes the model over again as it is now, with the options that it had. dtype: as when wrapping. Counters
        begin again. On failure the model stays plain."""
        raise NotImplementedError

    def writing(self):
        """Context in which weights of an inference_mode=True model may be written, and, inside a pass of any model,
        weights of other modules than the one whose forward runs: the thread sees masters there."""
        return self._opened().writes.writing()

    def synchronize(self) -> None:
        """Waits until every copy issued so far has read its master."""
        self._opened().writes.synchronize()
