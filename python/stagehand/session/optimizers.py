"""Optimizers and masters: every step of a torch optimizer says which weights it wrote.

In-place operators count in a tensor's version, but torch's fused optimizers write without a trace. So a hook behind
every optimizer's step marks the weights that it may have written. A hook before it brings back what a model that has
left the device had outside its places, for state is there. One pair of hooks serves all sessions.
"""

from __future__ import annotations

import os
import threading

from .. import sessions
from .._torch import unseen

_handles: list = []
_lock = threading.Lock()  # of these
os.register_at_fork(after_in_child=_lock._at_fork_reinit)


def watch() -> None:
    """A session has opened: weights of its model that an optimizer updates are renewed at their next use."""
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    with _lock:
        if not _handles:
            _handles.extend((register_optimizer_step_pre_hook(_steps), register_optimizer_step_post_hook(_stepped)))


def unwatch() -> None:
    """A session has closed."""
    with _lock:
        while _handles and not sessions.opened():
            _handles.pop().remove()


def _with_gradients(optimizer) -> set[int]:
    with unseen():
        return {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}


def _steps(optimizer, args, kwargs) -> None:
    for session in sessions.opened():
        session.casts.settle()
    away = [session for session in sessions.opened() if session.stay.away]
    if away:
        updated = _with_gradients(optimizer)
        for session in away:
            session.stay.before_update(updated)


def _stepped(optimizer, args, kwargs) -> None:
    written = _with_gradients(optimizer)
    for session in sessions.opened():
        session.writes.stepped(written)
