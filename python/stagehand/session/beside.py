"""Gradients that DistributedDataParallel cannot reduce beside the others, for it takes weights of one kind of device.

A model that is trained as a whole has large masters on the host, and small weights that stay on the device, as those of
norms. DDP reduces the larger part (ranks.py). The object below reduces the other in one collective at the end of each
backward in which DDP reduces. Ranks come to it in one order: DDP has started all of its collectives by then.
"""

from __future__ import annotations

import weakref

from .._torch import torch, unseen


class Beside:
    """Lives as long as `ddp` does. weights: those that it reduces. others: those that DDP does; a backward that reaches
    none of them either is not seen. group: of processes. Threads: hooks run where autograd calls them."""

    def __init__(self, ddp, weights: list, others: list, group) -> None:
        self._weights, self._group = weights, group
        self._armed = False  # a forward has run whose backward reduces
        self._queued = False  # and that is under way
        known = weakref.ref(ddp, self._end)
        self._ddp = known
        self._hooks = [param.register_post_accumulate_grad_hook(self._accumulated) for param in (*weights, *others)]
        ddp.register_forward_pre_hook(self._begins)
        ddp.register_forward_hook(self._ends)

    def broadcast(self) -> None:
        """All ranks have the first one's weights."""
        with torch.no_grad():
            for param in self._weights:
                torch.distributed.broadcast(param.detach(), _first(self._group), self._group)

    def _begins(self, ddp, inputs) -> None:
        if torch.is_grad_enabled():
            self._armed, self._queued = ddp.require_backward_grad_sync, False

    def _ends(self, ddp, inputs, output) -> None:
        if self._armed:
            for tensor in _tensors(output):
                tensor.register_hook(self._accumulated)

    def _accumulated(self, _) -> None:
        """A backward has come to an output, or to a weight where no output was found: reentrant checkpoints run
        backwards inside, whose end is not that of the whole."""
        if self._armed and not self._queued:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._reduce)

    def _reduce(self) -> None:
        """At the end of a backward. A weight has a gradient then if it has one on any rank."""
        self._armed = self._queued = False
        kinds: dict = {}
        for param in self._weights:
            kinds.setdefault((param.device, param.dtype), []).append(param)
        with unseen(), torch.no_grad():
            for params in kinds.values():
                self._reduce_alike(params)

    def _reduce_alike(self, params: list) -> None:
        parts = [torch.zeros_like(param) if param.grad is None else param.grad for param in params]
        there = torch.tensor([param.grad is not None for param in params]).to(parts[0])
        flat = torch.cat([part.reshape(-1) for part in parts])
        flat = torch.cat([flat * (1 / torch.distributed.get_world_size(self._group)), there])
        torch.distributed.all_reduce(flat, group=self._group)
        *parts, there = flat.split([param.numel() for param in params] + [len(params)])
        for param, part, ranks in zip(params, parts, there):
            if param.grad is not None:
                param.grad.copy_(part.view_as(param))
            elif ranks:  # which waits for the device
                param.grad = part.view_as(param).clone()

    def _end(self, _) -> None:
        for hook in self._hooks:
            hook.remove()


def _tensors(found):
    """Those that a backward can begin at, in containers that models return."""
    if isinstance(found, torch.Tensor):
        if found.requires_grad:
            yield found
    elif isinstance(found, dict):
        yield from _tensors(list(found.values()))
    elif isinstance(found, (list, tuple)):
        for each in found:
            yield from _tensors(each)


def _first(group) -> int:
    """The global number of a group's first rank."""
    return torch.distributed.get_global_rank(group, 0) if group is not None else 0
