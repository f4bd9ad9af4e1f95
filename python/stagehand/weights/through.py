"""Weights that are read from outside their own modules' forwards while autograd records: a tied head, a hook that makes
a weight of others and keeps it as an attribute (torch.nn.utils.weight_norm).

Pairs of saved-tensor hooks stand round forwards of managed modules alone. What autograd saves of a weight elsewhere
would hold its place for as long as the graph lives, and that attribute may live for ever. So such a weight is a tensor
of a class by which PyTorch says of each operator that it is given: the pair stands round that operator, and makes a
handle of what is saved (saved.py). Views of the weight are of such a class, too. Inside a region of autocast weights of
any module but torch's own are such tensors, for the operators that cast them (autocast.py).
"""

from __future__ import annotations

from .._torch import torch
from . import autocast
from .leased import KEY, OF, PLAN, LeasedUpload
from .saved import PLAIN, around_operator


class _Through:
    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            plan = _plan_of((args, kwargs)) if torch.is_grad_enabled() else None
            if plan is None:
                return func(*args, **(kwargs or {}))
            if func in autocast.OPERATORS:
                kwargs = kwargs or {}
                which = autocast.positions(func, args, kwargs)
                args, kwargs = _cast(plan.session.target.torch, args, kwargs, which)
            with around_operator(plan.session):
                out = func(*args, **(kwargs or {}))
            for tensor in out if type(out) in (tuple, list) else (out,):
                if type(tensor) is torch.Tensor and tensor._is_view() and isinstance(tensor._base, _Through):
                    tensor.__class__ = ThroughView
                    tensor.__dict__[PLAN] = plan
            return out


class Through(_Through, LeasedUpload):
    """A weight with the way of its gradient to the host, read from outside its module's forward."""

    __torch_function__ = _Through.__torch_function__


class ThroughView(_Through, torch.Tensor):
    """A view of one."""


PLAIN.update((Through, ThroughView))


def _plan_of(values):
    """The plan of the first of these tensors in (nested) arguments."""
    for value in values.values() if type(values) is dict else values:
        if isinstance(value, _Through):
            return value.__dict__.get(PLAN)
        if type(value) in (tuple, list, dict):
            plan = _plan_of(value)
            if plan is not None:
                return plan
    return None


def _cast(device, args: tuple, kwargs: dict, which) -> tuple:
    """Arguments of an operator that casts those of them that `which` names."""
    region = autocast.region(device)
    if region is None:
        return args, kwargs
    return (tuple(_cast_of(region, value) if which is None or at in which else value for at, value in enumerate(args)),
            {name: _cast_of(region, value) if which is None or name in which else value
             for name, value in kwargs.items()})


def _cast_of(region, value):
    """An argument of an operator that casts it, where autocast keeps the casts of weights."""
    if type(value) is not Through:
        return value
    plan, key, copy = value.__dict__[PLAN], value.__dict__[KEY], value.__dict__[OF]
    master = plan.master(key)
    if not autocast.kept(master):
        return value
    made = autocast.upload(region, plan.session, plan.entry_of(key), master, copy)
    return copy if made is None else made


def tell_uses(upload: torch.Tensor, plan, key: str) -> None:
    """`upload`, of a weight of the plan's module, becomes one that says what it is used for."""
    if type(upload) is LeasedUpload:
        upload.__class__ = Through
        upload.__dict__.update({PLAN: plan, KEY: key})
