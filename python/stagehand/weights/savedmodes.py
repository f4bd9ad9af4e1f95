"""Saved tensors that autograd packs and unpacks while modes of the caller's are active.

Autograd detaches what it saves and gives back at other moments where a pair of hooks is set than where none is, and a
TorchDispatchMode sees these operators. They are not ours, and they would be there because of us:

                                without hooks                       with hooks
    an operator's output        when saved, when given back         when given back
    others with a gradient      never                               when given back
    those without               never                               when given back, if somebody else has them
"""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode

from .._torch import aside, torch, view

_detach = torch.ops.aten.detach.default
_push = torch._C._push_on_torch_dispatch_stack
_modes, _mode_at = torch._C._len_torch_dispatch_stack, torch._C._get_dispatch_stack_at
_task = torch._C._current_graph_task_id
_data = torch.Tensor.data.__get__
_grad_fn, _requires_grad = torch.Tensor.grad_fn.__get__, torch.Tensor.requires_grad.__get__
_next = getattr(torch._C._autograd, "_get_sequence_nr", lambda: -1)  # of the next node of this thread
CONSTANT, INPUT, OUTPUT = range(3)


def kind_of(tensor: torch.Tensor) -> int:
    """Of a tensor that is being packed: CONSTANT, one without a gradient; OUTPUT of the operator that saves it; INPUT,
    another."""
    node = _grad_fn(tensor)
    if node is None:
        return INPUT if _requires_grad(tensor) else CONSTANT
    last = node._sequence_nr() == _next() - 1  # but for the copy that an operator saves of what it is about to write
    return OUTPUT if last and node.name() != "CloneBackward0" else INPUT


class _Detaching(TorchDispatchMode):
    """Takes one operator from the modes below it: the detach of `tensor`. All others go on to them. Autograd gives its
    thread the caller's modes again for each node: this one is gone with the node."""

    supports_higher_order_operators = True

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.tensor = tensor
        self.own = self  # PyTorch 2.4 drops a mode that it takes off the stack before it gives it to who asked

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensor, self.tensor = self.tensor, None
        if tensor is not None and func is _detach and args[0] is tensor:
            with aside():
                return tensor.detach()
        return func(*args, **(kwargs or {}))


def packed(pack_it, tensor: torch.Tensor):
    """pack_it(tensor), so that the caller's modes see as much as without hooks."""
    with aside():
        saved = pack_it(tensor)
    if saved is not None and saved.kind == OUTPUT:
        _data(tensor)  # one `detach`, as autograd makes it; Tensor.detach() is two of them in PyTorch 2.4 to 2.8
    return saved


def opened(open_it, kind: int) -> torch.Tensor:
    """open_it(), for autograd to use, so that the caller's modes see as much as without hooks. kind: of the tensor that
    was packed."""
    with aside():
        tensor = open_it()
        if kind == CONSTANT and _plain(tensor):
            tensor = view(tensor, tensor.storage_offset() * tensor.element_size(), tensor.dtype, tensor.shape,
                          tensor.stride())
    if kind == INPUT and _modes() and _task() != -1:
        top = _mode_at(_modes() - 1)
        if type(top) is _Detaching:  # of another tensor of the same node
            top.tensor = tensor
        else:
            _push(_Detaching(tensor))
    return tensor


def _plain(tensor: torch.Tensor) -> bool:
    return (type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.requires_grad
            and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized))
