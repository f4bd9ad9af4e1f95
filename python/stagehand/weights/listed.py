"""Weights as a pass lists them: `for p in self.parameters()` inside a forward.

A list of all weights would hold all of their places at once (nn.Module's own walk keeps what it has given out, to give
tied weights once). So a walk gives tensors without memory, one for each master and always the same one: they know
shape, dtype and device, gradient and flag are the master's, and an operator that is given one sees the weight as the
pass does, leased for that operator.
"""

from __future__ import annotations

from torch.utils import _pytree

from .._torch import torch
from .leased import MASTER, Copied, OfMaster

nn = torch.nn
_Tensor = torch.Tensor

_OF_ITSELF = {  # what needs no values
    getattr(_Tensor, name).__get__ for name in
    ("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "is_cuda", "is_cpu", "is_meta", "is_leaf",
     "grad_fn", "is_sparse", "is_quantized", "is_mkldnn") if hasattr(_Tensor, name)
} | {_Tensor.size, _Tensor.dim, _Tensor.numel, _Tensor.stride, _Tensor.element_size, _Tensor.is_floating_point,
     _Tensor.is_complex, _Tensor.nelement, _Tensor.ndimension, _Tensor.__len__, _Tensor.is_contiguous}
_OF_MASTERS = {torch.autograd.grad, torch.autograd.backward}  # graphs lead there
_OWN = ("data", "grad", "requires_grad")


class Listed(Copied, OfMaster, _Tensor):
    """One weight; see the module's docstring. Threads: any."""

    _is_param = True  # what makes isinstance(weight, nn.Parameter) hold

    @staticmethod
    def of(plan, key: str, master: nn.Parameter) -> "Listed":
        entry = plan.entry_of(key)
        dtype = entry.cast if entry.is_cast else entry.dtype
        self = _Tensor._make_wrapper_subclass(Listed, entry.shape, strides=entry.stride, dtype=dtype,
                                              device=plan.session.target.torch)
        self.__dict__.update({MASTER: master, "_plan": plan, "_key": key, "_inside": entry.inside})
        return self

    def now(self) -> torch.Tensor:
        """The weight as code that runs now sees it."""
        plan, master = self.__dict__["_plan"], self.__dict__[MASTER]
        return plan.on_device(self.__dict__["_key"]) if self.stands() and not plan.at_rest() else master

    def fits(self, entry) -> bool:
        """Whether it can stand for the weight still. entry: the weight's."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.stands() and self.dtype is (entry.cast if entry.is_cast else entry.dtype)

    def stands(self) -> bool:
        """Whether its module has that weight still, and it streams."""
        plan, key, master = self.__dict__["_plan"], self.__dict__["_key"], self.__dict__[MASTER]
        return plan.masters is not None and key in plan.managed and dict.get(plan.masters, key) is master

    @property
    def data(self) -> torch.Tensor:
        return self.now().data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self.now().data = value

    def __getattr__(self, name):
        if name in self.__dict__["_inside"]:
            return getattr(self.now(), name)
        return getattr(self.__dict__[MASTER], name)

    def __setattr__(self, name, value) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.__dict__[MASTER], name, value)

    def plain_copy(self) -> nn.Parameter:
        return nn.Parameter(self.now().detach().clone(), self.requires_grad)

    def __reduce_ex__(self, protocol):
        return self.__dict__[MASTER].__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _OF_ITSELF:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        seen = (lambda listed: listed.__dict__[MASTER]) if func in _OF_MASTERS else Listed.now
        args, kwargs = _pytree.tree_map_only(Listed, seen, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = _pytree.tree_map_only(Listed, Listed.now, (args, kwargs or {}))
        return func(*args, **kwargs)
