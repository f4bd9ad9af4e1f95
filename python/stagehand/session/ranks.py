"""DistributedDataParallel over a managed model (docs/distributed.md).

DDP broadcasts all weights from the first rank when it is made, and wants them on devices of one kind. Frozen weights of
a managed model stream: DDP leaves them out, and ranks compare samples of them. DDP reduces the gradients of trained
weights. While a model is managed the constructor below asks first.
"""

from __future__ import annotations

import functools
import hashlib

from .._torch import torch
from ..errors import StagehandError, some_of
from ..managed import runtime_of
from ..weights.units import plain_reason
from . import standins

DDP = torch.nn.parallel.DistributedDataParallel
IGNORED = "_ddp_params_and_buffers_to_ignore"  # PyTorch's name
SAMPLES = 64  # of a weight


def stand_in() -> None:
    """DDP asks from now on."""
    with standins.lock:
        own = vars(DDP)["__init__"]
        if not standins.stands(own):
            standins.replace(DDP, "__init__", _leaving_frozen_out(own), own)


def refuse_wrapped(model) -> None:
    """StagehandError for a model that is in DistributedDataParallel already."""
    for name, module in model.named_modules():
        if isinstance(module, DDP):
            raise StagehandError(
                f"{name or 'the model'} is a DistributedDataParallel, which has made its buckets for weights where "
                f"they are. Take it off: stagehand.layer(model) first, then DistributedDataParallel(model)",
                object=name or type(module).__name__)


def _leaving_frozen_out(own):
    @functools.wraps(own)
    def init(self, module, *args, **kwargs):
        frozen = _frozen(module)
        if not frozen:
            return own(self, module, *args, **kwargs)
        _check_one_kind_of_device(module)
        if kwargs.get("init_sync", True):
            _check_equal(frozen, kwargs.get("process_group"))
        before = vars(module).get(IGNORED)
        setattr(module, IGNORED, [*(before or ()), *frozen])
        try:
            return own(self, module, *args, **kwargs)
        finally:
            if before is None:
                delattr(module, IGNORED)
            else:
                setattr(module, IGNORED, before)

    return init


def _frozen(module) -> dict:
    """name -> weight, of those of managed models inside that take no gradient."""
    roots = [name for name, part in module.named_modules() if runtime_of(part) is not None]
    return {name: param for name, param in module.named_parameters() if not param.requires_grad
            and any(not root or name.startswith(f"{root}.") for root in roots)}


def _check_one_kind_of_device(module) -> None:
    """DDP says so too, but not what to do."""
    kinds: dict = {}
    for name, param in module.named_parameters():
        if param.requires_grad:
            kinds.setdefault(param.device.type, []).append(name)
    if len(kinds) > 1:
        where = " and ".join(f"{some_of(names, 1)} on {kind}" for kind, names in kinds.items())
        raise StagehandError(
            f"DistributedDataParallel reduces gradients on devices of one kind, and there are {where}. Wrap the model "
            f"with trainables='device' and a budget with room for all that is trained, or freeze what is on the host",
            object=next(iter(kinds.values()))[0])


def _check_equal(frozen: dict, group) -> None:
    """Ranks that have other frozen weights, or other names of them, fail together."""
    dist = torch.distributed
    if dist.get_world_size(group) < 2:
        return
    mine = {name: _print_of(param) for name, param in frozen.items()}
    all_prints: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(all_prints, mine, group=group)
    others = [name for name in sorted(set().union(*all_prints))
              if any(prints.get(name) != all_prints[0].get(name) for prints in all_prints)]
    if others:
        raise StagehandError(
            f"{some_of(others, 2)} differ between ranks. Streamed weights are not broadcast when "
            f"DistributedDataParallel is made: load the same ones in each process, or seed each before it makes them",
            object=others[0])


def _print_of(param) -> str:
    found = hashlib.sha256(f"{tuple(param.shape)} {param.dtype} {type(param).__name__}".encode())
    if not plain_reason(param) and not param.is_meta and param.numel():
        with torch.no_grad():
            values = param.detach().reshape(-1)
            values = values[::max(1, values.numel() // SAMPLES)].contiguous().cpu()
            found.update(bytes(values.view(torch.uint8).tolist()))
    return found.hexdigest()[:16]
