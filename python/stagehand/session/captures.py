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
    """A part of a session."""

    _capturing_thread: int | None = None  # a pass is being captured by it
    _captured_lookups = False  # rows of a table that may be written are read by a graph

    @property
    def capturing(self) -> bool:
        """This thread captures a pass. Others run on meanwhile, in parts of the model that lease nothing."""
        return self._capturing_thread == threading.get_ident()

    def refuse_foreign_capture(self) -> None:
        """StagehandError inside a capture that is not ours, before anything is enqueued that would break it."""
        if not self.capturing and self.target.capturing():
            raise StagehandError(
                f"'{self.name}' cannot run inside torch.cuda.graph(): its weights stream, and the copies of one call "
                f"are not those of the next. stagehand.capture(model, *inputs) makes a graph that holds its own "
                f"copies; or call shutdown() on its runtime to capture it as it is, if it fits the device")

    def refuse_inside(self) -> None:
        if self.local.depth or self._steps or self._passing:
            raise InvalidStateTransitionError(f"'{self.name}' is inside a pass: graphs are captured and replayed "
                                              "between passes, outside of begin_step() and managed_forward()")

    def capture_pass(self, graph, stream, run) -> tuple:
        """Records run() on `stream` into `graph`, a torch.cuda.CUDAGraph. Returns what it returned, and the core's
        account of it: edition, h2d_bytes, copies, read_bytes."""
        self._check_process()
        local, token, whole, info = self.local, Pass(held=False), False, {}
        with self._pass_lock:
            self._come_between()
            try:  # an interrupt may come behind any call
                if self._streaming:
                    self.core.graph_prepare()
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
                if self._streaming:
                    with contextlib.nullcontext() if whole else contextlib.suppress(StagehandError):
                        info = self.core.graph_settle()
        return out, info

    def _record(self, stream: int, run):
        if not self._streaming:
            return run()
        self.core.graph_fork(stream)
        failed = True
        try:
            out = run()
            self.refuse_lost_writes()
            failed = False
            return out
        finally:  # in any case, or the capture could not end
            with contextlib.suppress(StagehandError) if failed else contextlib.nullcontext():
                self.core.graph_join(stream)

    def replay(self, edition: int, launch) -> bool:
        """launch() on the current stream, with residents in their places. False: the graph is stale, nothing was
        done."""
        self._check_process()
        with self._pass_lock:
            self._come_between()
            stream = self.target.stream()
            whole = False
            try:  # an interrupt may come behind any call
                if self._streaming and not self.core.graph_replay_begin(edition, stream):
                    return False
                launch()
                whole = True
            finally:
                if self._streaming:
                    with contextlib.nullcontext() if whole else contextlib.suppress(StagehandError):
                        self.core.graph_replay_end(stream)
            if self._captured_lookups:  # as with weights: they may be written when the call has returned
                torch.cuda.current_stream(self.target.torch).synchronize()
        return True

    def _come_between(self) -> None:
        """Between two passes, with everything on the device that a pass begins with. Under the pass lock."""
        if self.closed:
            raise StagehandError(f"'{self.name}' has been shut down: its graphs are of no use any more")
        with self._step_lock:
            self.refuse_inside()
            self.recover()
            if self._open:
                self._close_step()
            self._settle()
            self._come_back()
            self.follow_masters()
            if self._streaming:
                self._open_and_close()
        self.find_due_regions()

    def _open_and_close(self) -> None:
        """What the begin of a step does."""
        if self.core.parked:
            self._open_step()
            self._close_step()
        else:
            (self.finding or self.given).before_step()
            self._others_go_home()
        for unit in self.units:
            for entry in unit.entries:
                if entry.changed():
                    self.renew(unit, entry)
