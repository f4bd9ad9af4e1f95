"""Calls of other libraries that would offload a managed model a second time, and of PyTorch that would give each rank a
shard of it, are refused before they change anything.

accelerate and diffusers go from model to model and from module to module, and leave their hooks on those that they are
done with, and fully_shard() from weight to weight. guarded.py refuses the loss of a weight; by then hooks stand on the
modules before it, and weights of theirs are shards. While a model is managed, the functions and methods below
look at their arguments first, as far as their modules were imported when the model became managed.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys

from .. import _core, sessions
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

SHARDING = {
    "torch.distributed.fsdp._fully_shard._fully_shard": ("fully_shard",),
    "torch.distributed.tensor._api": ("distribute_module",),
    "torch.distributed.tensor.parallel.api": ("parallelize_module",),
}
FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel"


def functions() -> list[tuple]:
    """Those that ask while a model is managed, as standins.replace_functions takes them."""
    return [(name, function, asks) for table, asks in ((FUNCTIONS, _asks_first), (SHARDING, _shards_what_is_left))
            for name, found in table.items() for function in found]


def stand_in() -> None:
    """The methods ask from now on, as far as these libraries are imported."""
    with standins.lock:
        for name, classes in METHODS.items():
            for kind, methods in classes.items():
                for method in methods:
                    _replace_method(name, kind, method, _asks_first)
        _replace_method(FSDP1, "FullyShardedDataParallel", "__init__", _shards_what_is_left)


def _replace_method(module: str, kind: str, method: str, asks) -> None:
    owner = vars(sys.modules.get(module, object)).get(kind)
    own = vars(owner).get(method) if owner is not None else None
    if own is not None and not standins.stands(own):
        standins.replace(owner, method, asks(own), own)


def _asks_first(own):
    @functools.wraps(own)
    def call(*args, **kwargs):
        for value in itertools.chain(args, kwargs.values()):
            for name, model in _models_of(value):
                _refuse(own.__name__, name, model)
        return own(*args, **kwargs)

    return call


def _shards_what_is_left(own):
    """For a call that shards the weights of a module, but for some that it is given."""
    name = own.__name__ if own.__name__ != "__init__" else "FullyShardedDataParallel"
    signature = inspect.signature(own)

    @functools.wraps(own)
    def call(*args, **kwargs):
        given = signature.bind(*args, **kwargs).arguments
        left = [*(given.get("ignored_params") or ()), *(given.get("ignored_states") or ())]
        for module in [each for each in (*left, *(given.get("ignored_modules") or ())) if hasattr(each, "parameters")]:
            left.extend(module.parameters())
        _refuse_shards(name, given["module"], {id(each) for each in left}, "ignored_params" in signature.parameters)
        return own(*args, **kwargs)

    return call


def _refuse_shards(call: str, given, left: set[int], can_leave: bool) -> None:
    modules = given if isinstance(given, (list, tuple)) else (given,)
    managed = [session.model for session in sessions.opened()]
    managed.extend(part for module in modules for part in module.modules() if runtime_of(part) is not None)
    ours = {id(param): (name, model) for model in managed for name, param in model.named_parameters()}
    for module in modules:
        for param in module.parameters():
            if id(param) in ours and id(param) not in left:
                name, model = ours[id(param)]
                model = type(model).__name__
                remedy = f"Give it ignored_params=set of the parameters of {model}, or shard parts outside of it" \
                    if can_leave else f"Shard parts outside of {model}"
                raise StagehandError(
                    f"{call}() is refused, and nothing was changed: it would give each rank a shard of {name} of "
                    f"{model}, which is under stagehand, and stagehand streams whole weights. {remedy}; to shard "
                    f"{model}, call stagehand.shutdown() on it first", object=name)


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
