"""Optimizers and masters: every step of a torch optimizer says which weights it wrote.

In-place operators count in a tensor's version, but torch's fused optimizers write without a trace. So a hook behind
every optimizer's step marks the weights that it may have written. A hook before it brings back what a model that has
left the device had outside its places, for state is there. Where a weight has moved since, between the host and the
device, its state follows it: as `load_state_dict` does it. One pair of hooks serves all sessions.
"""

from __future__ import annotations

import os
import threading
import weakref

from .. import amp, sessions
from .._torch import torch, unseen
from ..weights import relocate

_handles: list = []
# Optimizer -> (`relocate.moves`, {id of a parameter: its device}) at its last step.
_seen: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
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


def follow(optimizer) -> None:
    """State of weights that have moved since the optimizer's last step, or since it was made, goes where they are.
    State that an optimizer keeps elsewhere on purpose stays there, and so does a step count, where it is kept on the
    host."""
    moves, places = _seen.get(optimizer, (-1, {}))
    if moves == relocate.moves:
        return
    with unseen(), torch.inference_mode(False), torch.no_grad():
        now = {id(param): param.device for group in optimizer.param_groups for param in group["params"]}
        ours = {id(param) for session in sessions.opened() for param in session.model.parameters()}
        for group in optimizer.param_groups:
            counts_move = group.get("capturable") or group.get("fused")
            for param in group["params"]:
                moved = places[id(param)] != param.device if id(param) in places else id(param) in ours
                if moved and not param.is_meta:
                    _follow(param.device, optimizer.state.get(param), counts_move)
    _seen[optimizer] = relocate.moves, now


def _follow(device, state, counts_move) -> None:
    """A state, or a part of it: dictionaries and lists of tensors, as `load_state_dict` walks through them."""
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    for name, value in list(items):
        if isinstance(value, torch.Tensor):
            if value.device != device and (name != "step" or counts_move):
                state[name] = value.to(device)
        else:
            _follow(device, value, counts_move)


def left(model) -> None:
    """A model's weights have left the device, and its session, whose hooks would see the next step, is about to end."""
    ids = {id(param) for param in model.parameters()}
    for optimizer in list(_seen):
        if any(id(param) in ids for group in optimizer.param_groups for param in group["params"]):
            follow(optimizer)


def _steps(optimizer, args, kwargs) -> None:
    for session in sessions.opened():
        session.casts.settle()
    away = [session for session in sessions.opened() if session.stay.away]
    if away:
        updated = _with_gradients(optimizer)
        for session in away:
            session.stay.before_update(updated)
    follow(optimizer)
    with unseen():
        amp.settle(optimizer)


def _stepped(optimizer, args, kwargs) -> None:
    written = _with_gradients(optimizer)
    for session in sessions.opened():
        session.writes.stepped(written)
