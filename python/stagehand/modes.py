"""Saved tensors that autograd unpacks while modes of the caller's are active.

Where a pair of hooks unpacks a tensor, autograd detaches it in some cases in which it would not without hooks, and a
TorchDispatchMode sees that operator. The operator is not ours, and it is there because of us: it is kept from them.
"""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode

from ._torch import aside, torch, view

_detach = torch.ops.aten.detach.default
_push = torch._C._push_on_torch_dispatch_stack
_modes = torch._C._len_torch_dispatch_stack
_task = torch._C._current_graph_task_id
_is_leaf = torch.Tensor.is_leaf.__get__


def computed(tensor: torch.Tensor) -> bool:
    """Whether a tensor that is about to be packed has a node, which autograd gives it again when it unpacks it."""
    return not _is_leaf(tensor)


class _Detaching(TorchDispatchMode):
    """Takes one operator from the modes below it: the detach of `tensor`. All others go on to them. Autograd gives its
    thread the caller's modes anew for each node: this one is gone with the node."""

    supports_higher_order_operators = True

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self._tensor = tensor

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensor, self._tensor = self._tensor, None
        if tensor is not None and func is _detach and args[0] is tensor:
            with aside():
                return tensor.detach()
        return func(*args, **(kwargs or {}))


def opened(open_it, computed: bool) -> torch.Tensor:
    """open_it(), for autograd to use, so that the caller's modes see as much as without hooks. computed: as above, of
    the tensor that was packed."""
    with aside():
        tensor = open_it()
        if not computed and _plain(tensor):  # autograd detaches none that nobody else has
            tensor = view(tensor, tensor.storage_offset() * tensor.element_size(), tensor.dtype, tensor.shape,
                          tensor.stride())
    if computed and _modes() and _task() != -1:
        _push(_Detaching(tensor))
    return tensor


def _plain(tensor: torch.Tensor) -> bool:
    return (type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.requires_grad
            and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized))
