"""Which models are under management: the attributes that keep their runtimes, and the conductors that hear of it."""

from __future__ import annotations

import weakref

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


def refuse_second(model) -> None:
    """TypeError where it is no model, StagehandError when it is under a runtime already."""
    check_module(model)
    if runtime_of(model) is not None:
        raise StagehandError("this model is under stagehand already; call shutdown() on its runtime first")
