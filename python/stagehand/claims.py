"""Who takes a model over: one thread at a time, where several want a model, or models that share modules.

The others wait, and then find what the first has made of it.
"""

from __future__ import annotations

import contextlib
import os
import threading

_changed = threading.Condition()
_owners: dict[int, int] = {}  # id of a module that is being taken over -> thread


def _in_child() -> None:
    """None of the threads that were at it is there."""
    _changed._at_fork_reinit()
    _owners.clear()


os.register_at_fork(after_in_child=_in_child)


@contextlib.contextmanager
def taking_over(model):
    """Inside it no other thread is inside with a module of the model. One thread may be inside several times."""
    me, modules = threading.get_ident(), {id(module) for module in model.modules()}
    with _changed:
        while any(_owners.get(module, me) != me for module in modules):
            _changed.wait()
        new = modules - _owners.keys()
        _owners.update(dict.fromkeys(new, me))
    try:
        yield
    finally:
        with _changed:
            for module in new:
                _owners.pop(module, None)
            _changed.notify_all()
