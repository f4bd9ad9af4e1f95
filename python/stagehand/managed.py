"""Which models are managed: the attributes that keep their runtimes, and the conductors that hear of it."""

from __future__ import annotations

import weakref

from . import sessions
from ._torch import torch
from .errors import StagehandError

RUNTIMES = ("_stagehand_layer_runtime", "_stagehand_runtime")  # where a model keeps its runtime
arbiters: weakref.WeakSet = weakref.WeakSet()  # conductors that are enabled


def check_module(given, argument: str = "model") -> None:
    """TypeError where it is no module."""
    if not isinstance(given, torch.nn.Module):
        what = f"the class {given.__name__}; give an instance of it" if isinstance(given, type) else \
            f"of type {type(given).__name__}; give a torch.nn.Module"
        raise TypeError(f"{argument} is {what}")


def runtime_of(model):
    """The runtime that manages a model, of either mode, or None."""
    return next((model.__dict__[name] for name in RUNTIMES if model.__dict__.get(name) is not None), None)


def _managed_inside(model) -> list:
    """Runtimes of the managed models that a module is or holds, from the outside in."""
    return [found for found in map(runtime_of, model.modules()) if found is not None]


def runtime(model: torch.nn.Module):
    """The runtime that manages a model: a LayerRuntime or a StagehandRuntime.

    model: as it was wrapped, or a module around it, such as a PeftModel or the result of torch.compile.
    Raises StagehandError where nothing in it is managed, or more than one model is; TypeError where it is no
    module. Any thread.
    """
    check_module(model)
    found = _managed_inside(model)
    if len(found) == 1:
        return found[0]
    if not found:
        _refuse_part(model, "runtime")
        raise StagehandError(f"{type(model).__name__} is not under stagehand: wrap it with stagehand.layer, or with "
                             f"stagehand.StagehandRuntime, before you ask for its runtime")
    names = ", ".join(f"'{each.name}'" for each in found)
    raise StagehandError(f"{type(model).__name__} holds {len(found)} models under stagehand ({names}): give one of "
                         f"them to stagehand.runtime")


def shutdown(model: torch.nn.Module) -> None:
    """Ends the management of a model, and of all models inside it: they are plain again, on the host, with the values
    that they have now. A model that is not managed stays as it is.

    Raises StagehandError inside a call of the model, and for a part of a model that is managed as a whole;
    TypeError where it is no module. Not from two threads at once.
    """
    check_module(model)
    inside = _managed_inside(model)
    if not inside:
        _refuse_part(model, "shutdown")
    for found in inside:
        found.shutdown()


def _refuse_part(model: torch.nn.Module, call: str) -> None:
    """StagehandError where a module is a part of a managed model."""
    for session in sessions.opened():
        if any(part is model for part in session.model.modules()):
            whole = type(session.model).__name__
            raise StagehandError(f"{type(model).__name__} is a part of {whole}, which is under stagehand: give {whole} "
                                 f"to stagehand.{call}", object=type(model).__name__)


def refuse_second(model) -> None:
    """TypeError where it is no model, StagehandError when it is under a runtime already."""
    check_module(model)
    if runtime_of(model) is not None:
        raise StagehandError("this model is under stagehand already; call shutdown() on its runtime first")
