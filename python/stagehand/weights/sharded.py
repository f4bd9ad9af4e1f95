"""Weights of which a process has a shard: FSDP, fully_shard, tensor parallelism. They are refused by name."""

from __future__ import annotations

import sys

from .._torch import torch
from ..errors import StagehandError

_DTENSOR = ("torch.distributed.tensor", "torch.distributed._tensor")  # where it is, and where it was


def _is_dtensor(value) -> bool:
    """Nothing is one that nobody has imported."""
    kinds = (getattr(sys.modules.get(name), "DTensor", None) for name in _DTENSOR)
    return any(kind is not None and isinstance(value, kind) for kind in kinds)


def refuse_sharded(name: str, value) -> None:
    """Raises StagehandError where the value is a shard."""
    if getattr(value, "_is_flat_param", False) or (type(value) is not torch.nn.Parameter and _is_dtensor(value)):
        raise StagehandError(
            f"{name} is a {'FlatParameter' if type(value) is torch.nn.Parameter else 'DTensor'}: FSDP, fully_shard() "
            "or tensor parallelism gave this process a shard of it, and stagehand streams whole weights of one "
            "process. Wrap the model with stagehand and do not shard it, or shard it and leave stagehand out",
            object=name)


def refuse_sharded_model(model) -> None:
    for name, param in model.named_parameters():
        refuse_sharded(name, param)
