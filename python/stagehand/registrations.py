"""Notices that modules were given parameters or children, anywhere: an adapter that was put into a model
after wrapping must be found before the next step."""

from __future__ import annotations

import threading
import weakref

from torch.nn.modules import module as _modules

from .leased import KINDS, MASTER
from .listed import Listed
from .wrapping import SHOWN, wraps

count = 0  # registrations since somebody watches
_this_thread = threading.local()  # .last: (id of the module, key, id, weakref or None) of what is registered
_watchers: weakref.WeakSet = weakref.WeakSet()
_handles: list = []


def _seen(module, name, value):
    """A forward that keeps its weight under another name (`self.tied = other.weight`) sees a tensor over a leased
    place: the master is registered in place of it."""
    global count
    count += 1
    master = value.__dict__[MASTER] if type(value) is Listed else value
    if wraps(value) and SHOWN in value.__dict__:
        shown = value.__dict__[SHOWN]
        if shown is None:  # a copy
            del value.__dict__[SHOWN]
        else:
            master = shown.whole.param
    if type(value) in KINDS:
        for session in list(_watchers):
            master = session.local.master_of(value)
            if master is not value:
                break
    if master is None:
        _this_thread.last = None
    else:  # torch.utils.swap_tensors, by which modules convert weights around tensors, refuses one with a weakref to it
        _this_thread.last = id(module), name, id(master), None if wraps(master) else weakref.ref(master)
    return None if master is value else master


def comes_by_registration(module, key: str, value) -> bool:
    """Whether `value`, which the module's dictionary is given, comes by a registration: that is meant to stay. What is
    put there directly may be gone after the call (torch.func.functional_call)."""
    last, _this_thread.last = getattr(_this_thread, "last", None), None
    return last is not None and last[:3] == (id(module), key, id(value)) and (last[3] is None or last[3]() is value)


def watch(who) -> None:
    """Counts from now on, until `who` is dropped or calls `unwatch`."""
    _watchers.add(who)
    if not _handles:
        _handles.append(_modules.register_module_parameter_registration_hook(_seen))
        _handles.append(_modules.register_module_module_registration_hook(_seen))


def unwatch(who) -> None:
    _watchers.discard(who)
    if not _watchers:
        while _handles:
            _handles.pop().remove()
