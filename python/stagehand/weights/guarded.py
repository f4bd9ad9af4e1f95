"""Tensors of a managed model do not lose their values: one with values is not replaced by one on the meta device.

Offloaders (accelerate's, and through it diffusers' pipelines) put a tensor without values in the place of each weight.
They write into the modules' dictionaries, which no hook of torch sees. They go from module to module, and leave their
own hooks on those that they are done with. That is why every module of the model is guarded, not the managed ones
alone: the refusal comes before the first module is changed.
"""

from __future__ import annotations

import copy
from collections.abc import MutableMapping

from .. import _core
from .._torch import MEMBERS, torch, unseen
from ..errors import StagehandError
from .sharded import refuse_sharded
from .units import full_name

SLOTS = ("_parameters", "_buffers")


def refuse_loss(name: str, before, value) -> None:
    """Raises StagehandError where a tensor with values is about to be replaced by one without, or by a shard. A plain
    tensor in the place of a Parameter is there for one call only (torch.func.functional_call), and passes."""
    refuse_sharded(name, value)
    if not isinstance(value, torch.Tensor) or before is None:
        return
    with unseen(), torch._C.DisableTorchFunctionSubclass():  # a class of the caller's may refuse to be asked
        if not value.is_meta or before.is_meta:
            return
    if isinstance(before, torch.nn.Parameter) and not isinstance(value, torch.nn.Parameter):
        return
    raise StagehandError(
        f"{name} is not replaced by a tensor on the meta device, and nothing of the model was changed: this model is "
        "under stagehand, which keeps its weights on the host and brings each to the device when it is used. It needs "
        "no other offloading: leave out enable_sequential_cpu_offload() of the pipeline, cpu_offload(), "
        "disk_offload() or dispatch_model() for this model, and wrap the pipeline's other models with stagehand.layer. "
        "To offload it in another way, call stagehand.shutdown() on it first", object=name)


class Guarded(dict):
    """The `_parameters` or `_buffers` of a module whose weights do not stream."""

    __slots__ = ("name",)

    def __init__(self, items, name: str) -> None:
        super().__init__(items)
        self.name = name

    def __setitem__(self, key, value) -> None:
        refuse_loss(full_name(self.name, key), self.get(key), value)
        super().__setitem__(key, value)

    # dict's own of these would pass the check by
    update, setdefault = MutableMapping.update, MutableMapping.setdefault

    def __ior__(self, other):
        self.update(other)
        return self

    def __deepcopy__(self, memo):
        return copy.deepcopy(MEMBERS(self), memo)

    def __reduce__(self):
        return MEMBERS, (dict(self),)


class Guard:
    """Guards the dictionary `slot` of a module, until it is removed."""

    def __init__(self, module, name: str, slot: str) -> None:
        self.module, self.slot = module, slot
        self.original = module.__dict__[slot]
        self.guarded = Guarded(self.original, name)

    def install(self) -> None:
        self.module.__dict__[self.slot] = self.guarded

    def remove(self) -> None:
        if self.module.__dict__.get(self.slot) is self.guarded:
            self.original.clear()
            self.original.update(self.guarded)
            self.module.__dict__[self.slot] = self.original


def guards_for(model) -> list[Guard]:
    """What the model needs once its managed modules have dictionaries of their own, which refuse the same. Modules of
    TorchScript have none that Python could exchange."""
    return [Guard(module, name, slot) for name, module in model.named_modules() for slot in SLOTS
            if module.__dict__[slot] and isinstance(module.__dict__[slot], dict)
            and not isinstance(module.__dict__[slot], _core.Masters)]


def other_offloading(model) -> str:
    """What to do about the hooks of another offloader that stand on the model; "" where there are none."""
    for module in model.modules():
        if hasattr(module, "_hf_hook"):
            return (". accelerate has put its hooks on this model: load it without device_map, or take them off with "
                    "accelerate.hooks.remove_hook_from_module(model, recurse=True)")
        if "group_offloading" in getattr(getattr(module, "_diffusers_hook", None), "hooks", ()):
            return (". diffusers' group offloading moves the same weights: leave it out, or take its hooks off with "
                    "HookRegistry.check_if_exists_or_initialize(model).remove_hook('group_offloading')")
    return ""
