"""Tensor subclasses around tensors, as libraries that quantise make them: weights of tests."""

from __future__ import annotations

import copy

import card
import torch
from support import Stack, _aligned, made
from torch import nn
from torch.utils import _pytree

from stagehand.weights.wrapping import inside

aten = torch.ops.aten


class Around(torch.Tensor):
    """What both classes below share. `each` makes one of the same kind of what a function gives for each tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (aten.detach.default, aten.clone.default, aten._to_copy.default) and "dtype" not in kwargs:
            return args[0].each(lambda tensor: func(tensor, *args[1:], **kwargs))
        if func is aten._to_copy.default and isinstance(args[0], Rows):
            others = {key: value for key, value in kwargs.items() if key != "dtype"}
            return type(args[0])(func(args[0].codes, **others), func(args[0].scale, **kwargs), args[0].turned)
        if func is aten.t.default and isinstance(args[0], Rows):
            return type(args[0])(args[0].codes, args[0].scale, not args[0].turned)
        if func is aten.copy_.default and isinstance(args[0], Around):
            names = args[0].__tensor_flatten__()[0]
            for name in names:
                getattr(args[0], name).copy_(getattr(args[1], name))
            return args[0]
        if func in (aten.mul_.Tensor, aten.mul_.Scalar) and isinstance(args[0], Rows):
            args[0].scale.mul_(args[1])
            return args[0]
        assert not func._schema.is_mutable, func
        args, kwargs = _pytree.tree_map_only(Around, lambda tensor: tensor.values(), (args, kwargs))
        return func(*args, **kwargs)


class Rows(Around):
    """int8 codes and a scale for each row. turned: it stands for the transposed matrix."""

    read_at = None  # a set: addresses of codes that were read

    @staticmethod
    def __new__(cls, codes, scale, turned=False):
        shape, stride = tuple(codes.shape), (codes.shape[1], 1)
        return torch.Tensor._make_wrapper_subclass(cls, shape[::-1] if turned else shape, dtype=scale.dtype,
                                                   strides=stride[::-1] if turned else stride, device=scale.device)

    def __init__(self, codes, scale, turned=False):
        self.codes, self.scale, self.turned = codes, scale, turned

    @classmethod
    def of(cls, weight, nested=False):
        scale = weight.detach().abs().amax(1, keepdim=True) / 127
        codes = (weight.detach() / scale).round().to(torch.int8)
        return cls(Raised.of(codes) if nested else codes, scale)

    def __tensor_flatten__(self):
        return ["codes", "scale"], {"turned": self.turned}

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Rows(inner["codes"], inner["scale"], context["turned"])

    def each(self, function):
        return type(self)(function(self.codes), function(self.scale), self.turned)

    def values(self):
        if Rows.read_at is not None:
            Rows.read_at |= {tensor.data_ptr() for _, tensor in inside(self)}
        values = self.codes.to(self.scale.dtype) * self.scale
        return values.t() if self.turned else values


class Raised(Around):
    """int8 values as uint8, 128 more: codes that are a subclass themselves."""

    @staticmethod
    def __new__(cls, raised):
        return torch.Tensor._make_wrapper_subclass(cls, raised.shape, dtype=torch.int8, device=raised.device)

    def __init__(self, raised):
        self.raised = raised

    @classmethod
    def of(cls, codes):
        return cls((codes.to(torch.int16) + 128).to(torch.uint8))

    def __tensor_flatten__(self):
        return ["raised"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Raised(inner["raised"])

    def each(self, function):
        return Raised(function(self.raised))

    def values(self):
        return (self.raised.to(torch.int16) - 128).to(torch.int8)


def quantised(model: nn.Module, nested=False, only=lambda name: True) -> nn.Module:
    """Gives the model's Linears such weights."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and only(name):
            module.weight = nn.Parameter(Rows.of(module.weight, nested), requires_grad=False)
    return model


def stack(n=6, d=64, nested=False, **kwargs) -> nn.Module:
    return quantised(made(Stack, n, d, **kwargs), nested)


def aligned_around(weight: Around) -> Around:
    return type(weight)(*(aligned_around(part) if isinstance(part, Around) else _aligned(part)
                          for part in (getattr(weight, name) for name in weight.__tensor_flatten__()[0])),
                        *(weight.__tensor_flatten__()[1] or {}).values())


def aligned(model: nn.Module) -> nn.Module:
    """As support.aligned_copy, where weights may be such subclasses."""
    ref, done = copy.deepcopy(model), {}
    for module in ref.modules():
        for name, param in module._parameters.items():
            if isinstance(param, Around):
                if id(param) not in done:
                    done[id(param)] = param, nn.Parameter(aligned_around(param.data), param.requires_grad)
                module._parameters[name] = done[id(param)][1]
            elif param is not None:
                param.data = _aligned(param.data)
    return card.as_managed(ref)


def held(model: nn.Module) -> int:
    """Bytes of the parameters as they are on the device."""
    parts = [tensor for param in model.parameters() for tensor in
             ([t for _, t in inside(param)] if isinstance(param, Around) else [param])]
    return sum(-(-t.numel() * t.element_size() // 512) * 512 for t in parts)
