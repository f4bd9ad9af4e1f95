"""What several of the cases share."""

from __future__ import annotations

import pytest
import support as s
import torch
from torch.utils.checkpoint import checkpoint

import stagehand

BLOCKS = r"^blocks\.\d+$"
SLOW = 1e8  # bytes/s: a missing wait shows
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")


class Checkpointed(s.Stack):
    """Its blocks are recomputed in backward, in the reentrant way or the other."""

    reentrant = False

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant) if torch.is_grad_enabled() else block(x)
        return self.out(x)


def managed(build=s.Stack, *args, frozen=True, link=SLOW, seed=0, budget=None, mode="layer", extra=0,
            takes_from_host=True, **options):  # fmt: skip
    """(model under stagehand, reference). mode: "layer", or "block": then its runtime is model._stagehand_runtime.
    takes_from_host: whether the reference does, as of `s.aligned_copy`."""
    model = s.made(build, *args, frozen=frozen, seed=seed)
    ref = s.aligned_copy(model, takes_from_host)
    budget = (budget or s.tight_budget(model)) + extra
    if mode == "layer":
        s.wrap(model, budget, link, **options)
    else:
        config = stagehand.StagehandConfig(vram_budget=budget, **options)
        stagehand.StagehandRuntime(model, config, block_pattern=BLOCKS, device=s.device(budget, link)).prepare()
    return model, ref


def run(model):
    """The runtime of a model, of either mode."""
    return model.__dict__.get("_stagehand_layer_runtime") or model._stagehand_runtime


def train(net, x, lr=0.01):
    """A step of SGD by hand; (output, gradients)."""
    net.zero_grad()
    out = net(x)
    out.pow(2).sum().backward()
    grads = [p.grad.clone() for p in net.parameters()]
    with torch.no_grad():
        for p in net.parameters():
            p -= lr * p.grad
    return [out.detach(), *grads]


def infer(net, x):
    with torch.no_grad():
        return net(x)


def state(net):
    return list(net.state_dict().values())
