"""When steps of the core begin, pause and end; docs/training.md draws the states.

A pass is a call of the model, or what stands between begin_step and end_step. A step is a pass and, where autograd
recorded it, the backward through it. It closes when end_step() says so, or when the next pass begins.

A program may run several passes before one backward. Nobody knows that at its first pass, so the second one ends the
step. The backward then reaches the graph of a step that was cut off like this, and from then on passes join.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
import weakref

from torch.utils import _pytree

from .._torch import aside, observed, torch, apart_from_caller
from ..errors import InvalidStateTransitionError, StagehandError, TransferError
from ..sessions import members
from ..weights import leftovers
from ..weights.hooks import Pass
from ..weights.saved import Graph, Held, in_backward
from . import ending

MAX_JOINED = 8  # passes in one step, where they join; after so many without a backward they join no more
MAX_WATCHED = 16  # outputs of a pass that tell when backward begins

_HELD = object()  # the token of steps between begin_step and end_step
_engine = torch.autograd.Variable._execution_engine
_task = torch._C._current_graph_task_id


def _differentiable(out):
    """Tensors of a module's output through which backward can run."""
    for leaf in _pytree.tree_leaves(out):
        if isinstance(leaf, torch.Tensor):
            if leaf.grad_fn is not None:
                yield leaf
        elif hasattr(leaf, "__dict__"):  # a dataclass or the like
            yield from (v for v in vars(leaf).values() if isinstance(v, torch.Tensor) and v.grad_fn is not None)


class Steps:
    """What a session knows about the step that is open."""

    # Of its session.
    USES = """casts.settle check_process closed core ending finding given images.follow_common images.follow_masters
        images.renew inference_mode local options regions.find_due regions.found regions.put_back_left stay.asking
        stay.come_back stay.make_way stay.others_go_home stay.tell_arbiters streaming tables.let_write
        tables.pass_begins trained.settle writes.refuse_lost_writes writes.settle writes.undo_lost_writes"""

    def __init__(self, session) -> None:
        self._session = session
        self._local = session.local
        self.pass_lock = threading.RLock()  # passes of several threads go one after the other
        self.lock = threading.Lock()  # of what is below
        self.under_way: list[object] = []  # one token for each pass that is under way
        self.is_open = False  # a step of the core is open
        self._passes = 0  # in it
        self._calls = 0  # in it, of the model, where contexts are round them
        self.passing = 0  # calls of parts of the model that are under way
        self._graph = None  # weakref of the Graph of the open step
        self.held_ref = None  # weakref of what saved weights hold of it
        self._graphs = weakref.WeakSet()  # of all steps
        self._backward_seen = False
        self._ended = False  # end_step() came inside the open step, which closes as soon as it can
        self._most_passes = 1  # that a step takes before a backward
        self.after_backward = False  # a backward has ended, and no call of the model has begun since
        self.backwards: set[int] = set()  # backward passes under way, by autograd's number
        self._failed_backwards = 0
        self._lookup = None  # event behind the last lookup in a table that may be written
        self._trained: list[tuple] = []  # (unit, entry) of weights that took a gradient when the session opened
        self.runners: set[int] = set()  # threads that have run passes
        self.before_end = None  # called with each step that ends, while it is still open
        self.at_backward = None  # called when a backward begins, without the lock

    @contextlib.contextmanager
    def both_locks(self):
        """No pass runs inside, and no step begins or ends: tensors may move."""
        with self.pass_lock, self.lock:
            yield

    # ------------------------------------------------------------------ passes

    @contextlib.contextmanager
    def step(self, last: bool = False, held: bool = False):
        """One pass of the model. Nested passes join the step that is open; those of other threads wait. last: the
        step ends with it also where a backward could follow. held: the user enters and leaves it."""
        session = self._session
        local, token, thread = self._local, Pass(held), threading.get_ident()
        passes, strays = local.passes, local.strays  # of this thread, whichever leaves
        before = list(passes)
        session.check_process()
        if strays:
            self.take_back_strays()
        inside = in_backward()  # recomputation: the thread that called backward may hold the lock
        try:
            with contextlib.nullcontext() if inside else self.pass_lock:
                try:
                    if session.closed:  # by another thread, while this one waited
                        yield
                        return
                    self.runners.add(thread)
                    if local.idle():
                        self.recover()  # before weights are renewed, which leases that were left would hinder
                    self.backward_begins() if inside else self._begin(token, join=last)
                    local.enter(token)
                    yield
                    if len(passes) == 1:
                        session.writes.refuse_lost_writes()
                finally:
                    passes.pop(token, None)
                    if threading.get_ident() != thread:
                        strays.append(token)
                    elif passes and not held:
                        local.left(before)
                    else:
                        local.depth = len(passes)
                        if not passes:
                            local.ended()
                            session.casts.settle()
                    if not inside:
                        self._end(token, last)
        except RuntimeError as error:  # of the lock
            if threading.get_ident() == thread:
                raise
            raise StagehandError(
                "a pass was left on another thread than the one that entered it, which keeps the model from all others "
                "until it uses it again: enter and leave managed_forward() on one thread, also in generators"
            ) from error

    def take_back_strays(self) -> None:
        """Passes that this thread entered and another one left have ended."""
        local = self._local
        while local.strays:
            local.strays.pop()
            self.pass_lock.release()
        local.depth = len(local.passes)
        if not local.depth:
            local.ended()

    def passage(self) -> _Passage:
        """A context for a call of a part of the model alone: no step of its own. In a backward, where checkpointing
        computes parts again, there are some for each part."""
        return _Passage(self)

    def begin_passage(self, token: Pass) -> bool:
        """Whether it counts in `passing`: `end_passage` takes it back."""
        session, local = self._session, self._local
        session.check_process()
        passes_by = False
        if self._computes_again():
            local.enter(token)
            return passes_by
        try:
            if local.idle():
                self.recover()
            if in_backward():
                self.backward_begins()
            else:
                with self.lock:
                    self.passing += 1
                    passes_by = True
                self._pass_by()
            local.enter(token)
        except BaseException:
            self.end_passage(token, passes_by)
            raise
        return passes_by

    def _computes_again(self) -> bool:
        """Whether the thread is in a backward that is known, and nothing is left of passes before: one that begins has
        nothing to do."""
        return (_task() in self.backwards and self._local.quiet() and not self._session.regions.found
                and not observed())

    def end_passage(self, token: Pass, passes_by: bool) -> None:
        """The call of a part is over, or could not begin."""
        local = self._local
        passes = local.passes
        passes.pop(token, None)
        local.depth = len(passes)
        if not passes:
            if not local.quiet():
                local.ended()
            self._session.casts.settle()
        if passes_by:
            with self.lock:
                self.passing -= 1
        if not in_backward():
            if self._trained:
                self.pause()
            else:
                self.let_write()

    def refuse_lost_writes(self) -> None:
        """At the end of a pass that no other one is round."""
        if len(self._local.passes) == 1 and not self._local.outside.quiet():
            self._session.writes.refuse_lost_writes()

    @apart_from_caller
    def recover(self) -> None:
        """At the start of a pass: what an interrupt in the middle of a call's end has left."""
        self.drop_leftovers()
        self._session.writes.undo_lost_writes()
        self._local.recover()
        self._session.regions.put_back_left()

    def drop_leftovers(self) -> None:
        """Behind a pass, a step or a backward: of backwards that have failed since this thread asked last."""
        if self._local.failed_backwards != self._failed_backwards and not in_backward():
            self._local.failed_backwards = self._failed_backwards
            leftovers.drop()

    def let_write(self) -> None:
        """Behind a pass, whose uses may be enqueued behind copies that have not read their masters yet: waits for
        these, so that code of the caller's may write masters."""
        session = self._session
        if session.streaming and not (session.inference_mode or session.closed):
            self.wait_for_lookups()
            session.tables.let_write()
            session.core.pass_end()

    def pause(self) -> None:
        """Waits until no copy reads a weight that may be written; none does before the next use."""
        session = self._session
        if session.streaming and not session.closed:
            self.wait_for_lookups()
            session.tables.let_write()
            session.core.step_pause()

    @apart_from_caller
    def _pass_by(self) -> None:
        session = self._session
        with self.lock:
            if self.is_open and not self.under_way and self._backward_seen:
                self.close_step()
            if all(token is _HELD for token in self.under_way):  # else a pass of another thread: its step goes on
                session.writes.settle(inside=1)
            if session.finding is not None and not self.is_open:
                session.finding.before_part()
            session.stay.come_back()
            session.images.follow_masters()
            session.tables.pass_begins()
        session.regions.find_due()
        if session.streaming:
            session.core.fence()

    def begin_step(self) -> None:
        """Opens a step or joins the open one; each begin needs an end."""
        self._session.check_process()
        try:
            self._begin(_HELD)
        except BaseException:
            self._end(_HELD)
            raise

    def end_step(self) -> None:
        """Leaves the step; the last one out ends it."""
        self._end(_HELD, last=True)

    @apart_from_caller
    def finish_step(self) -> None:
        """Ends the open step, if there is one. Inside a call of the model, a backward or another begin_step() it ends
        with that."""
        self._session.check_process()
        self.drop_leftovers()
        with self.lock:
            if not self.is_open or self._session.closed:
                return
            if self.backwards or not self._only_contexts(self.under_way):
                self._ended = True
            else:
                self.close_step()

    @staticmethod
    def _only_contexts(tokens) -> bool:
        """Of passes: whether all are managed_forward() and the like, and none is a call or a begin_step()."""
        return all(token is not _HELD and token.held for token in tokens)

    @apart_from_caller
    def _begin(self, token, join: bool = False) -> None:
        """join: go on with a step that is open, whatever happened in it."""
        with self.lock:
            self.under_way.append(token)
            if len(self.under_way) > 1:
                return
            self._calls = 0
            if self.is_open and not (join or self._joins(token)):
                self._cut_off(token)
                self.close_step()
            self._come_in()
        self._session.regions.find_due()

    def _come_in(self) -> None:
        """A pass begins, in the step that is open or in one of its own."""
        session = self._session
        session.writes.settle()
        session.stay.come_back()
        session.trained.settle()
        session.images.follow_masters()
        session.tables.pass_begins()
        if session.streaming:
            self._passes += 1
            self._mark_trained()
            if self.is_open:
                session.core.fence()
            else:
                self.open_step()

    @apart_from_caller
    def called_inside(self) -> None:
        """A call of the model begins on a thread that is in a pass. Inside of managed_forward() it begins a step where
        end_step() ended the one before, or where that has become long: some programs run for ever in one context."""
        session = self._session
        if not self._only_contexts(self._local.passes) or in_backward():
            return
        with self.lock:
            if session.closed or not session.streaming or not self._only_contexts(self.under_way):
                return
            self._calls += 1
            if self.is_open and self._calls <= MAX_JOINED:
                return
            self._calls = 1
            if self.is_open:
                self.close_step()
            self._come_in()
        session.regions.find_due()

    @apart_from_caller
    def _end(self, token, last: bool = False) -> None:
        self.drop_leftovers()
        with self.lock:
            if token not in self.under_way:
                return
            self.under_way.remove(token)
            if self.under_way or self._session.closed:
                return
            if self._session.streaming and not self.is_open:
                if token is not _HELD and token.held:  # parts that were called by hand after end_step() have no step
                    self.pause()
            elif last or not self._continues():
                if not last:
                    self._cut_off(token)
                self.close_step()
            else:
                self.let_write()

    # ------------------------------------------------------------------ the core's step

    def mark_trained(self, trained: list[tuple]) -> None:
        """The session opens. trained: (unit, entry) of weights that take a gradient."""
        self._trained = trained

    def has_graph(self) -> bool:
        """Whether somebody holds the graph of the open step."""
        return self._graph is not None and self._graph() is not None

    def graphs_alive(self) -> bool:
        """Whether a backward may still go through what one of the steps computed."""
        return any(graph.may_be_used() for graph in members(self._graphs))

    def between(self, call) -> None:
        """Makes the call under the locks of a pass, if no pass is under way."""
        if not self.pass_lock.acquire(blocking=False):
            return
        try:
            if self.lock.acquire(blocking=False):
                try:
                    if not (self.under_way or self.is_open or self._session.closed):
                        call()
                finally:
                    self.lock.release()
        finally:
            self.pass_lock.release()

    def busy(self) -> bool:
        """Whether passes, calls of parts or backwards are under way."""
        return bool(self.under_way or self.backwards or self.passing)

    def graph_alive(self) -> bool:
        """A first backward may follow through what the open step computed."""
        return self._graph is not None and self._graph() is not None and not self._backward_seen

    def _continues(self) -> bool:
        """More of the open step may come."""
        return not self._ended and self.graph_alive() and self._passes < MAX_JOINED

    def _joins(self, token) -> bool:
        """The pass that begins belongs to the open step."""
        return token is not _HELD and self._continues() and self._passes < self._most_passes

    def _cut_off(self, token) -> None:
        """A pass ends the open step although a backward may still come, and nobody asked for the end. If a backward
        does come, passes join from then on."""
        graph = self._graph() if self._graph is not None else None
        if token is _HELD or self._ended or self._backward_seen or graph is None:
            return
        graph.cut_off = True
        self._most_passes = 1

    def _mark_trained(self) -> None:
        """Before a pass, so that what the optimizer wrote comes in the order of use."""
        for unit, entry in self._trained:
            if entry.changed():
                self._session.images.renew(unit, entry)

    def open_step(self) -> None:
        """A step of the core begins. Under the lock."""
        session = self._session
        (session.finding or session.given).before_step()
        comes = session.core.parked
        if comes:
            session.stay.make_way()
        try:
            session.stay.asking(session.core.step_begin) if comes else session.core.step_begin()
        except InvalidStateTransitionError:  # an interrupt came between its end and our noticing
            session.core.step_end()
            session.core.step_begin()
        self.is_open = True
        if comes:
            session.stay.tell_arbiters()
        else:
            session.stay.others_go_home()  # what was needed there when they gave way may be so no more

    def close_step(self) -> None:
        """The open step ends. Under the lock."""
        self.is_open = self._backward_seen = self._ended = False
        self._passes = 0
        self._graph = self.held_ref = None
        self.backwards.clear()
        try:
            if self.before_end is not None:
                self.before_end()
        finally:
            self.wait_for_lookups()
            if self._session.streaming:
                self._session.tables.let_write()
                try:
                    self._session.core.step_end()
                except InvalidStateTransitionError:  # an interrupt came before its begin
                    pass
                except TransferError as error:
                    self._raise_unless_telemetry(error)

    def flush_telemetry(self) -> None:
        """At the end: writes what is gathered for the file."""
        try:
            self._session.core.flush_telemetry()
        except TransferError as error:
            self._raise_unless_telemetry(error)

    def _raise_unless_telemetry(self, error: TransferError) -> None:
        """A telemetry file that cannot be written is an error of one step, but no reason for a shutdown to stop."""
        session = self._session
        path = session.options.get("telemetry_path")
        if not session.ending or path is None or error.object != os.fsdecode(path):
            raise error
        lost = session.core.stats()["telemetry_lost"]
        warnings.warn(f"stagehand: {lost} steps are missing at the end of the telemetry: {error}", RuntimeWarning,
                      stacklevel=6)

    def looked_up(self, stream) -> None:
        """Work on the stream reads rows in place of a table that may be written."""
        if self._lookup is None:
            self._lookup = torch.cuda.Event()
        self._lookup.record(stream)

    def wait_for_lookups(self) -> None:
        """Until rows that were read in place have been."""
        if self._lookup is not None:
            self._lookup.synchronize()

    @apart_from_caller
    def close_finished_step(self) -> None:
        """Ends a step that waits for the next one to begin, so that its figures are complete. Not while a step
        begins or ends: what asks may be a part of that."""
        if not self.lock.acquire(blocking=False):
            return
        try:
            if self.is_open and not self.under_way and not self.backwards and not self._continues():
                self.close_step()
        finally:
            self.lock.release()

    # ------------------------------------------------------------------ backward

    def graph(self) -> Graph:
        """The token of the open step's graph; handles hold it."""
        graph = self._graph() if self._graph is not None else None
        if graph is None:
            graph = Graph(self._session)
            self._graph = weakref.ref(graph)
            self._graphs.add(graph)
        return graph

    def held(self) -> Held:
        """What a saved weight of the open step holds."""
        held = self.held_ref() if self.held_ref is not None else None
        if held is None:
            held = self.graph().hold()
            self.held_ref = weakref.ref(held)
        return held

    def watch_outputs(self, out) -> None:
        """Backward through these outputs will belong to the open step."""
        if not self._session.streaming:
            return
        if observed():
            with aside():
                return self.watch_outputs(out)
        self._backward_seen = False  # one inside the pass is over: that through its outputs is to come
        graph = None
        with torch._C.DisableTorchFunctionSubclass():  # a class of the caller's does not see what is read here
            for i, tensor in enumerate(_differentiable(out)):
                if i == MAX_WATCHED:
                    return
                if graph is None:
                    graph = self.graph()
                    graph.pending += 1
                tensor.grad_fn.register_prehook(graph)

    def backward_through(self, graph: Graph) -> None:
        """A backward has come to something that `graph` stands for."""
        graph.used_by(_task())
        if graph.cut_off:
            graph.cut_off = False
            self._most_passes = MAX_JOINED
        self.backward_begins()

    @apart_from_caller
    def backward_begins(self) -> None:
        """Called in a backward of autograd, as often as something is seen of it, on any thread."""
        ending.hold_if_ending(foreign=False)
        task = _task()
        if task == -1 or task in self.backwards:
            return
        session = self._session
        with self.lock:
            if task in self.backwards or session.closed or not session.streaming:
                return
            session.stay.come_back()
            session.images.follow_common()
            first = not self.backwards
            self.backwards.add(task)
            self._backward_seen = True
            if not self.is_open:  # parts of the model were called by hand, or the step was ended before
                self.is_open = True
                session.core.step_pause()
                with contextlib.suppress(InvalidStateTransitionError):  # the step of those calls is open: it goes on
                    session.core.step_begin()
            elif first:
                session.core.fence()
            session.core.mark_backward()
        _engine.queue_callback(_BackwardsEnd(self, task))
        if self.at_backward is not None:
            self.at_backward()

    def backward_ends(self, task: int) -> None:
        """Masters may be written after it. What runs on, a pass round a call of autograd.grad, resumes the step."""
        with self.lock:
            if task not in self.backwards:
                return
            self.backwards.discard(task)
            self.after_backward = True
            if not self.backwards and self.is_open:
                self.pause()
                if self._session.streaming and not self._session.closed:
                    self._session.core.mark_forward()
        self._session.casts.settle()

    def backward_lets_go(self, task: int | None) -> None:
        """Autograd has dropped a backward: one that has not come to its end has failed."""
        if task in self.backwards and not self._session.closed:
            self._failed_backwards += 1
            with contextlib.suppress(StagehandError):  # the backward has failed and said why; the step's end waits, too
                self.backward_ends(task)

    def call_begins(self) -> None:
        """A call of the model, behind a backward."""
        self.after_backward = False

    def between_calls(self) -> bool:
        """Whether this thread is inside managed_forward() or the like, and behind a backward or in one: there the
        optimizer's work is done, and lists of parameters give masters."""
        local = self._local
        return bool((self.after_backward or self.backwards) and not local.frames and self._only_contexts(local.passes))


class _Passage:
    """Steps.passage(). It counts from the middle of `__enter__` on; an exception there ends it."""

    __slots__ = ("steps", "token", "passes_by")

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.token = Pass(held=False)

    def __enter__(self) -> None:
        self.passes_by = self.steps.begin_passage(self.token)

    def __exit__(self, kind, error, traceback) -> None:
        try:
            if kind is None:
                self.steps.refuse_lost_writes()
        finally:
            self.steps.end_passage(self.token, self.passes_by)


class _BackwardsEnd:
    """Autograd's last call of a backward. One that fails makes no such call, but drops the object."""

    __slots__ = ("steps", "task")

    def __init__(self, steps: Steps, task: int) -> None:
        self.steps = steps
        self.task = task

    def __call__(self) -> None:
        self.steps.backward_ends(self.task)

    def __del__(self) -> None:
        steps = getattr(self, "steps", None)  # interrupted in __init__
        if steps is not None:
            steps.backward_lets_go(getattr(self, "task", None))
