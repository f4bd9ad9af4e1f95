"""Optimizers and masters: every step of a torch optimizer says which weights it wrote.

In-place operators count in a tensor's version, but torch's fused optimizers write without a trace. So a hook behind
every optimizer's step marks the weights that it may have written. One hook serves all sessions.
"""

from __future__ import annotations

import weakref

_open: weakref.WeakSet = weakref.WeakSet()  # sessions
_handle = None


def watch(session) -> None:
    """`session` is open: weights of its model that an optimizer updates are renewed at their next use."""
    global _handle
    _open.add(session)
    if _handle is None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        _handle = register_optimizer_step_post_hook(_stepped)


def unwatch(session) -> None:
    global _handle
    _open.discard(session)
    if not _open and _handle is not None:
        _handle.remove()
        _handle = None


def _stepped(optimizer, args, kwargs) -> None:
    written = {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
    for session in list(_open):
        session.stepped(written)
