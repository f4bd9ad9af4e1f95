"""Calls of other libraries that would offload a managed model a second time are refused before they change anything.

accelerate and diffusers go from model to model and from module to module, and leave their hooks on those that they are
done with. guarded.py refuses the loss of a weight; by then hooks stand on the modules before it. While a model is
managed, the functions and methods below look at their arguments first.
"""

from __future__ import annotations

import functools
import itertools
import sys

from .. import _core
from .._torch import torch
from ..errors import StagehandError
from ..managed import runtime_of
from ..weights.guarded import Guarded
from . import standins

FUNCTIONS = {
    "accelerate.big_modeling": ("cpu_offload", "cpu_offload_with_hook", "disk_offload", "dispatch_model"),
    "diffusers.hooks.group_offloading": ("apply_group_offloading",),
}
METHODS = {"diffusers.pipelines.pipeline_utils": {"DiffusionPipeline": (
    "enable_sequential_cpu_offload", "enable_model_cpu_offload", "enable_group_offload")}}


def stand_in() -> None:
    """These libraries ask from now on, as far as they are imported."""
    with standins.lock:
        for name, functions in FUNCTIONS.items():
            for function in functions:
                standins.replace_function(name, function, _asks_first)
        for name, classes in METHODS.items():
            for kind, methods in classes.items():
                owner = vars(sys.modules.get(name, object)).get(kind)
                for method in methods:
                    own = vars(owner).get(method) if owner is not None else None
                    if own is not None and not standins.stands(own):
                        standins.replace(owner, method, _asks_first(own), own)


def _asks_first(own):
    @functools.wraps(own)
    def call(*args, **kwargs):
        for value in itertools.chain(args, kwargs.values()):
            for name, model in _models_of(value):
                _refuse(own.__name__, name, model)
        return own(*args, **kwargs)

    return call


def _models_of(value):
    """(name, module) of a model, or of each model of a pipeline."""
    if isinstance(value, torch.nn.Module):
        yield type(value).__name__, value
        return
    components = getattr(value, "components", None)
    if isinstance(components, dict):
        yield from ((name, part) for name, part in components.items() if isinstance(part, torch.nn.Module))


def _managed(module) -> bool:
    return runtime_of(module) is not None or isinstance(vars(module).get("_parameters"), (_core.Masters, Guarded))


def _refuse(call: str, name: str, model) -> None:
    for module in model.modules():
        if _managed(module):
            raise StagehandError(
                f"{call}() is refused, and nothing was changed: {name} is under stagehand, which keeps its weights on "
                f"the host and brings each to the device when it is used, so that it needs no other offloading. Leave "
                f"the call out; stagehand.integrations.diffusers.offload(pipe) manages all models of a pipeline. To "
                f"offload {name} in another way, call stagehand.shutdown() on it first", object=name)
