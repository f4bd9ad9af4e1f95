"""A session's passes inside CUDA graphs: what stands round a capture and round each replay (docs/graphs.md).

The core's steps do the work (stagehand/graph.h): between two passes, under the pass lock. While a pass is captured the
model's calls lease as in any pass.
"""

from __future__ import annotations

import contextlib
import threading

from .._torch import torch
from ..errors import InvalidStateTransitionError, StagehandError
from ..weights.hooks import Pass


class Captures:
    """What a session knows about passes inside graphs."""

    # Of its session.
    USES = """check_process closed core finding given images.follow_masters images.renew local name
        regions.find_due stay.come_back stay.others_go_home steps.close_step steps.is_open
        steps.lock steps.open_step steps.pass_lock steps.passing steps.recover steps.under_way
        streaming tables.to_layers target units writes.refuse_lost_writes writes.settle"""

    def __init__(self, session) -> None:
        self._session = session
        self._steps = session.steps
        self._target = session.target
        self._capturing_thread: int | None = None  # a pass is being captured by it
        self._captured_lookups = False  # rows of a table that may be written are read by a graph

    @property
    def capturing(self) -> bool:
        """This thread captures a pass. Others run on meanwhile, in parts of the model that lease nothing."""
        return self._capturing_thread == threading.get_ident()

    def looked_up(self, writable: bool) -> None:
        """The pass that is captured reads rows of a table in place. writable: which may be written."""
        self._captured_lookups |= writable

    def refuse_foreign_capture(self) -> None:
        """StagehandError inside a capture that is not ours, before anything is enqueued that would break it."""
        if self._target.capturing() and not self.capturing:
            raise StagehandError(
                f"'{self._session.name}' cannot run inside torch.cuda.graph(): its weights stream, and the copies of "
                f"one call are not those of the next. stagehand.capture(model, *inputs) makes a graph that holds its "
                f"own copies; or call shutdown() on its runtime to capture it as it is, if it fits the device")

    def refuse_inside(self) -> None:
        """InvalidStateTransitionError inside a pass."""
        if self._session.local.depth or self._steps.under_way or self._steps.passing:
            raise InvalidStateTransitionError(
                f"'{self._session.name}' is inside a pass: graphs are captured and replayed between passes, outside of "
                "begin_step() and managed_forward()")

    def capture_pass(self, graph, stream, run) -> tuple:
        """Records run() on `stream` into `graph`, a torch.cuda.CUDAGraph. Returns what it returned, and the core's
        account of it: edition, h2d_bytes, copies, read_bytes."""
        session = self._session
        session.check_process()
        local, token, whole, info = session.local, Pass(held=False), False, {}
        with self._steps.pass_lock:
            self._come_between()
            session.tables.to_layers(for_good=True)
            try:  # an interrupt may come behind any call
                if session.streaming:
                    session.core.graph_prepare()
                self._capturing_thread = threading.get_ident()
                local.enter(token)
                # Other threads' calls of the driver (readers, pinning, other models) are no business of this capture.
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                    out = self._record(stream.cuda_stream, run)
                whole = True
            finally:
                local.passes.pop(token, None)
                local.depth = len(local.passes)
                if not local.passes:
                    local.ended()
                self._capturing_thread = None
                if session.streaming:
                    with contextlib.nullcontext() if whole else contextlib.suppress(StagehandError):
                        info = session.core.graph_settle()
        return out, info

    def _record(self, stream: int, run):
        session = self._session
        if not session.streaming:
            return run()
        session.core.graph_fork(stream)
        failed = True
        try:
            out = run()
            session.writes.refuse_lost_writes()
            failed = False
            return out
        finally:  # in any case, or the capture could not end
            with contextlib.suppress(StagehandError) if failed else contextlib.nullcontext():
                session.core.graph_join(stream)

    def replay(self, edition: int, launch) -> bool:
        """launch() on the current stream, with residents in their places. False: the graph is stale, nothing was
        done."""
        session = self._session
        session.check_process()
        with self._steps.pass_lock:
            self._come_between()
            stream = self._target.stream()
            whole = False
            try:  # an interrupt may come behind any call
                if session.streaming and not session.core.graph_replay_begin(edition, stream):
                    return False
                launch()
                whole = True
            finally:
                if session.streaming:
                    with contextlib.nullcontext() if whole else contextlib.suppress(StagehandError):
                        session.core.graph_replay_end(stream)
            if self._captured_lookups:  # as with weights: they may be written when the call has returned
                torch.cuda.current_stream(self._target.torch).synchronize()
        return True

    def _come_between(self) -> None:
        """Between two passes, with everything on the device that a pass begins with. Under the pass lock."""
        steps = self._steps
        session = self._session
        if session.closed:
            raise StagehandError(f"'{session.name}' has been shut down: capture the model again")
        with steps.lock:
            self.refuse_inside()
            steps.recover()
            if steps.is_open:
                steps.close_step()
            session.writes.settle()
            session.stay.come_back()
            session.images.follow_masters()
            if session.streaming:
                self._open_and_close()
        session.regions.find_due()

    def _open_and_close(self) -> None:
        """What the begin of a step does."""
        session = self._session
        if session.core.parked:
            self._steps.open_step()
            self._steps.close_step()
        else:
            (session.finding or session.given).before_step()
            session.stay.others_go_home()
        for unit in session.units:
            for entry in unit.entries:
                if entry.changed():
                    session.images.renew(unit, entry)
