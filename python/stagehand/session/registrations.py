"""Notices that modules were given parameters or children, anywhere: an adapter that was put into a model
after wrapping must be found before the next step."""

from __future__ import annotations

import itertools
import os
import threading
import weakref

from torch.nn.modules import module as _modules

from ..sessions import members
from ..weights.masters import Masters
from ..weights.wrapping import SHOWN, wraps

count = 0  # of a registration: another one for each since somebody watches
_counter = itertools.count(1)
_lock = threading.Lock()  # of the handles
os.register_at_fork(after_in_child=_lock._at_fork_reinit)
_this_thread = threading.local()  # .last: (id of the module, key, id, weakref or None) of what is registered
_watchers: weakref.WeakSet = weakref.WeakSet()
_handles: list = []


def _seen(module, name, value):
    """A forward that keeps its weight under another name (`self.tied = other.weight`) sees a tensor over a leased
    place: the master is registered in place of it, at once or, where the pass may still use it, at its end."""
    global count
    count = next(_counter)  # any thread
    if wraps(value) and value.__dict__.get(SHOWN, value) is None:  # a copy
        del value.__dict__[SHOWN]
    master, session = _master_of(value)
    if master is None:
        master = value
    elif type(getattr(module, "_parameters", None)) is not Masters and session.local.depth:
        session.local.lend(module, name)
        return None
    if master is None:
        _this_thread.last = None
    else:  # torch.utils.swap_tensors, by which modules convert weights around tensors, refuses one with a weakref to it
        _this_thread.last = id(module), name, id(master), None if wraps(master) else weakref.ref(master)
    return None if master is value else master


def _child_seen(module, name, child) -> None:
    """Modules that a model has get children. Others are no news: `self.layers[:n]` makes a list in each pass, and a new
    module comes with parameters."""
    global count
    if any(session.writes.knows(module) for session in members(_watchers)):
        count = next(_counter)
    _this_thread.last = None


def _master_of(value) -> tuple:
    """The master that `value` stands for, and the session that streams it; (None, None): it stands for none."""
    for session in members(_watchers):
        master = session.local.master_of(value)
        if master is not None and session.writes.entry_of(master) is not None:
            return master, session
    return None, None


def comes_by_registration(module, key: str, value) -> bool:
    """Whether `value`, which the module's dictionary is given, comes by a registration: that is meant to stay. What is
    put there directly may be gone after the call (torch.func.functional_call)."""
    last, _this_thread.last = getattr(_this_thread, "last", None), None
    return last is not None and last[:3] == (id(module), key, id(value)) and (last[3] is None or last[3]() is value)


def watch(who) -> None:
    """Counts from now on, until `who` is dropped or calls `unwatch`."""
    _watchers.add(who)
    with _lock:
        if not _handles:
            _handles.append(_modules.register_module_parameter_registration_hook(_seen))
            _handles.append(_modules.register_module_module_registration_hook(_child_seen))


def unwatch(who) -> None:
    _watchers.discard(who)
    with _lock:
        while _handles and not members(_watchers):
            _handles.pop().remove()
