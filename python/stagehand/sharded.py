"""Weights of which a process has a shard: FSDP, fully_shard, tensor parallelism. They are refused by name."""

from __future__ import annotations

import sys

from ._torch import torch
from .errors import StagehandError

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_CLASSES = (("torch.distributed.tensor", "DTensor"), ("torch.distributed._tensor", "DTensor"),
            ("torch.distributed.fsdp._flat_param", "FlatParameter"))


def refuse_sharded(name: str, value) -> None:
    """Raises StagehandError where the value is a shard. What nobody has imported, it is not."""
    if type(value) in _PLAIN:
        return
    for module, key in _CLASSES:
        kind = getattr(sys.modules.get(module), key, None)
        if kind is not None and isinstance(value, kind):
            raise StagehandError(
                f"{name} is a {key}: FSDP, fully_shard() or tensor parallelism gave this process a shard of it, and "
                "stagehand streams whole weights of one process. Wrap the model with stagehand and do not shard it, "
                "or shard it and leave stagehand out", object=name)


def refuse_sharded_model(model) -> None:
    for name, param in model.named_parameters():
        refuse_sharded(name, param)
