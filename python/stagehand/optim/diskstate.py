"""Optimizer state of parameters in the core's file: room for it, and the way between file and tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import _core
from . import flat


@dataclass
class Region:
    """A parameter's room. Elements lie in the order in which they lay in the parameter's memory: `like` is an
    empty shell with its shape and strides. begun: it may hold a state; until then the core takes it for zeros."""

    state: int
    like: torch.Tensor  # on the meta device
    moment_dtype: torch.dtype
    master: bool
    begun: bool = False

    def parts(self) -> dict[str, torch.dtype]:
        moments = {"exp_avg": self.moment_dtype, "exp_avg_sq": self.moment_dtype}
        return {**moments, "master_param": torch.float32} if self.master else moments


def create(core: _core.AdamW, param: torch.Tensor, moment_dtype: torch.dtype, master: bool) -> Region:
    """Takes room on the disk. Raises TransferError when there is none."""
    state = core.state_create(param.numel(), flat.DTYPES[moment_dtype], master)
    return Region(state, torch.empty_like(param, device="meta", requires_grad=False), moment_dtype, master)


def read(core: _core.AdamW, region: Region) -> dict[str, torch.Tensor]:
    """All parts as new tensors in host memory. No update of the parameter may be under way."""
    out = {}
    for part, dtype in region.parts().items():
        out[part] = torch.empty_like(region.like, dtype=dtype, device="cpu")
        core.state_read(region.state, part, out[part].data_ptr())
    return out


def write(core: _core.AdamW, region: Region, param: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
    """Replaces all parts; they take on the parameter's strides."""
    region.like = torch.empty_like(param, device="meta", requires_grad=False)
    region.begun = True
    for part, dtype in region.parts().items():
        laid = flat.laid_out_like(tensors[part], param.detach(), dtype)
        core.state_write(region.state, part, laid.data_ptr())
