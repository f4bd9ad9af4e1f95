"""Notices that modules were given parameters or children, anywhere: an adapter that was put into a model
after wrapping must be found before the next step."""

from __future__ import annotations

import weakref

from torch.nn.modules import module as _modules

from .leased import KINDS

count = 0  # registrations since somebody watches
_watchers: weakref.WeakSet = weakref.WeakSet()
_handles: list = []


def _seen(module, name, value):
    """A forward that keeps its weight under another name (`self.tied = other.weight`) sees a tensor over a leased place: the
    master is registered in place of it."""
    global count
    count += 1
    if type(value) in KINDS:
        for session in list(_watchers):
            master = session.local.master_of(value)
            if master is not value:
                return master
    return None


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
