"""A stack of transformer blocks, with weights that no file holds, and the time of its steps."""

from __future__ import annotations

import copy
import statistics
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


def linear(inputs: int, outputs: int) -> nn.Module:
    """A bf16 layer whose weight is yet to be filled in."""
    return nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16, device="meta")


class Block(nn.Module):
    """Attention and MLP of a transformer, head size 128, norms without weights."""

    def __init__(self, hidden: int, layer=linear) -> None:
        super().__init__()
        self.head = min(128, hidden)
        self.n1 = nn.LayerNorm(hidden, elementwise_affine=False)
        self.n2 = nn.LayerNorm(hidden, elementwise_affine=False)
        self.qkv = layer(hidden, 3 * hidden)
        self.proj = layer(hidden, hidden)
        self.fc1 = layer(hidden, 4 * hidden)
        self.fc2 = layer(4 * hidden, hidden)

    def forward(self, x):
        b, t, h = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, h // self.head, self.head).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, h))
        return x + self.fc2(F.gelu(self.fc1(self.n2(x)), approximate="tanh"))


class Stack(nn.Module):
    """checkpointed: under autograd each block is checkpointed, without reentering."""

    def __init__(self, blocks: int, hidden: int, layer=linear, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(hidden, layer) for _ in range(blocks))
        self.checkpointed = checkpointed

    def forward(self, x):
        for block in self.blocks:
            if self.checkpointed and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return x


def fill(model: nn.Module, hidden: int, trainable: bool = False) -> nn.Module:
    """Gives the weights on "meta" values that differ from block to block, so that a mixed-up block shows."""
    base = (torch.randn(4 * hidden * hidden) * 0.02).to(torch.bfloat16)
    waiting = [(name, param) for name, param in model.named_parameters() if param.is_meta]
    for i, (name, param) in enumerate(waiting):
        owner, _, key = name.rpartition(".")
        data = base[: param.numel()].roll(i * 977).view(param.shape).clone()
        setattr(model.get_submodule(owner), key, nn.Parameter(data, requires_grad=trainable))
    return model


def twin_on(model: nn.Module, device) -> nn.Module:
    """The same model with its parameters on `device`; never two copies on the host."""
    there = {id(p): nn.Parameter(p.detach().to(device, copy=True), p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, there)


def nbytes(tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def timed(step, times: int, cuda: bool) -> list[float]:
    """Milliseconds of each call of `step`, back to back, by events on a CUDA device."""
    if not cuda:
        marks = [time.perf_counter()]
        for _ in range(times):
            step()
            marks.append(time.perf_counter())
        return [(b - a) * 1e3 for a, b in zip(marks, marks[1:])]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    for mark in marks[:-1]:
        mark.record()
        step()
    marks[-1].record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in zip(marks, marks[1:])]


def spread(times: list[float]) -> dict:
    return {"ms": statistics.median(times), "min": min(times), "max": max(times), "steps": len(times)}
