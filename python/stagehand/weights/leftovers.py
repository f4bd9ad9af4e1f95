"""What a backward that failed leaves behind in autograd's queue of the thread that called it.

Nodes that were ready stay there with their gradients, which are memory of the device and of the host, until a later
backward of this thread has nothing newer to do. On a device that is most of a step's gradients: autograd's thread of
the device runs ahead of the thread of the host, where the hooks and the optimizers are that fail.
"""

from __future__ import annotations

import threading

from .._torch import torch


class _Last(torch.autograd.Function):
    """A node that does nothing, without an operator that anybody could see."""

    @staticmethod
    def forward(ctx, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx, grad):
        return None


def drop() -> None:
    """Takes all that is left out of this thread's queue. Not inside a backward."""
    made = []

    def make() -> None:
        # Newer nodes come first, by numbers that each thread counts for itself: those of a new thread come last.
        with torch.inference_mode(False), torch.enable_grad():
            leaf = torch.zeros((), device="cpu", requires_grad=True)
            made.extend((_Last.apply(leaf), torch.ones((), device="cpu")))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    torch.autograd.backward(*made)
