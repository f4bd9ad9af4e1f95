"""Weights of which host memory holds the packed image of their unit alone (docs/lossless.md, "At rest").

    nn.Parameter --fold--> Folded --unfold--> Unfolded --fold--> ...     end: nn.Parameter again

It is the same object all the time: PyTorch's own part of it is exchanged for one that has a shape and no memory, and
back. An operator that only reads has the values unpacked for as long as it runs. All else (a view, `data`, numpy, an
address, a write, a gradient) unfolds the weight first, and with it its unit; both parts share one version.

Threads: any; exchanges under the lock of images.py. A thread inside an operator may look at the object itself, without
a reference of its own to PyTorch's part. That part may become one with memory under it: the operator was told of values
then. The opposite waits until no operator is under way that was given an unfolded weight.
"""

from __future__ import annotations

import functools
import threading
import weakref

from torch.utils import _pytree
from torch.utils.weak import WeakIdKeyDictionary

from .. import _core
from .._torch import STORAGE_USES, USES_OF_ONE, aside, observed, span_bytes, torch, undisturbed, view
from .fileweight import Unheld, writes_to
from .leased import Copied

nn = torch.nn
_Tensor = torch.Tensor
_homes = WeakIdKeyDictionary()  # folded weight -> (its Home, offset in the place); (tensor, None): it has those values
_local = threading.local()
_under_way: list = []  # operators that were given unfolded weights
_lock = threading.RLock()  # of weights that are no session's any more
_swap = torch._C._swap_tensor_impl
_uses = getattr(_Tensor, "_use_count", None)
ADDRESS = 1  # of a folded weight, where those of masters are compared (_core/seat.c)


class Home:
    """Where the values of a unit's folded weights are. images: that unfold the unit. packed: its packed image.
    plain: its plain one, 1-D uint8, as long as that is there, which nobody else reads or writes."""

    def __init__(self, images, unit, packed, plain: torch.Tensor) -> None:
        self.images, self.unit = weakref.ref(images), weakref.ref(unit)
        self.packed, self.plain, self.over = packed, plain, False  # over: it unfolds, and its image may be written

    def read(self, offset: int, nbytes: int) -> torch.Tensor:
        """Bytes of the place, in memory of their own."""
        plain = self.plain  # another thread may drop it
        if plain is not None:
            return plain[offset:offset + nbytes].clone()
        values = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        _core.transfer_decode(self.packed.segments, self.packed.address, values.data_ptr(), offset, offset + nbytes)
        return values


def _unfolds(name: str):
    @functools.wraps(getattr(_Tensor, name))
    def method(self, *args, **kwargs):
        unfold(self)
        return getattr(self, name)(*args, **kwargs)

    return method


class _Property(property):
    """The tensor's own. `data` unfolds where it is asked for, the others where they are set."""

    def __init__(self, name: str) -> None:
        own = getattr(_Tensor, name)
        get = own.__get__ if name != "data" else lambda self: unfold(self) or self.data
        super().__init__(get, lambda self, value: unfold(self) or setattr(self, name, value))


class Folded(Unheld):
    """One that takes no gradient."""

    __slots__ = ()
    __torch_function__ = torch._C._disabled_torch_function_impl

    def now(self) -> torch.Tensor:
        """The values as a plain tensor."""
        if observed():
            with aside():
                return Folded.now(self)
        with undisturbed():
            if not isinstance(self, Folded):  # any more
                return _Tensor.detach(self)
            home, offset = _homes.get(self, (None, 0))
            if offset is None:
                return home
            if home is not None:
                values = view(home.read(offset, span_bytes(self)), 0, self.dtype, self.shape, self.stride())
                if not home.over:
                    return values
            unfold(self)  # as another thread has begun to
            return Folded.now(self)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs, schema = kwargs or {}, func._schema
        given = _local.__dict__.get("given")
        if given is not None and func is torch.ops.aten.detach.default:
            return given
        views = any(value.alias_info is not None and not value.alias_info.is_write for value in schema.returns)
        _pytree.tree_map_only(Folded, unfold, (args, kwargs) if views else list(writes_to(schema, args, kwargs)))
        args, kwargs = _pytree.tree_map_only(Folded, Folded.now, (args, kwargs))
        return func(*args, **kwargs)


for _name in ("numpy", "tolist", "detach", "detach_", "data_ptr", "untyped_storage", "storage", "_typed_storage",
              "share_memory_", "is_shared", "pin_memory", "is_pinned", "requires_grad_", "register_hook", "__dlpack__"):
    setattr(Folded, _name, _unfolds(_name))
for _name in ("data", "grad", "requires_grad"):
    setattr(Folded, _name, _Property(_name))


class FoldedLeaf(Folded):
    """One that takes a gradient, as weights do of a model that nobody froze. A graph would keep the part without
    memory: it unfolds before one is recorded."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if torch.is_grad_enabled() and getattr(func, "__name__", "") != "__get__":
            _pytree.tree_map_only(FoldedLeaf, unfold, (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Unfolded(Copied, nn.Parameter):
    """A weight that was folded, and may be again."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        _under_way.append(func)
        try:
            with torch._C.DisableTorchFunctionSubclass():
                if func is _Tensor.numpy and not args[0].requires_grad:  # an array holds the tensor that it is made of
                    args = (_Tensor.detach(args[0]), *args[1:])
                return func(*args, **(kwargs or {}))
        finally:
            _under_way.pop()

    now, plain_copy = _Tensor.detach, Unheld.plain_copy


def address_of(param: torch.Tensor) -> int:
    """Of a master, for comparing."""
    return ADDRESS if isinstance(param, Folded) else param.data_ptr()


def may_fold(param: torch.Tensor) -> bool:
    """Whether its memory may be taken from it: nobody but the object itself has a part in it."""
    return (_uses is not None and STORAGE_USES is not None and type(param) in (nn.Parameter, Unfolded)
            and param.grad is None and not param._backward_hooks and not param.is_inference()
            and param.device.type == "cpu" and _is_alone(param))


def _is_alone(param: torch.Tensor) -> bool:
    return _uses(param) == 1 and STORAGE_USES(_Tensor.untyped_storage(param)._cdata) <= USES_OF_ONE


def fold(param: torch.Tensor, home: Home, offset: int) -> bool:
    """Its values are those of its home from now on. False where another thread is at it."""
    kind, before = FoldedLeaf if param.requires_grad else Folded, type(param)
    other = _Tensor._make_wrapper_subclass(kind, param.shape, strides=param.stride(), dtype=param.dtype, device="cpu",
                                           requires_grad=param.requires_grad)
    for _ in range(param._version):
        torch.autograd.graph.increment_version(other)
    _homes[param] = home, offset
    if _core.exchange_unless(_under_way, _swap, param, other, kind, nn.Parameter):
        if _is_alone(other):
            return True
        _core.exchange_unless([], _swap, param, other, before, kind)
    del _homes[param]
    return False


def give(param: torch.Tensor, data: torch.Tensor, kind=Unfolded) -> None:
    """A folded weight has this data, which is nobody else's, as one of `kind`."""
    leaf, before = param.requires_grad, type(param)
    _local.given = data
    try:
        # as a detached tensor, which has the version of the one that it comes from
        with (undisturbed(), torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False),
              torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradCPU, False)):
            other = _Tensor.detach(param).requires_grad_(leaf)
    finally:
        _local.given = None
    _core.exchange_unless([], _swap, param, other, kind, before)
    _homes[other] = _Tensor.detach(param), None  # for a graph that has the part without memory
    del _homes[param]


def unfold(param: torch.Tensor) -> None:
    """The weight has memory, with all of its unit where that is one of a session."""
    if observed():
        with aside():
            return unfold(param)
    home, offset = _homes.get(param, (None, 0))
    images, unit = (home.images(), home.unit()) if home is not None and offset is not None else (None, None)
    with undisturbed():
        if images is not None and unit is not None and any(param is other for _, other in unit.masters()):
            return images.unfold(unit)
        with _lock:
            if isinstance(param, Folded):
                give(param, param.now(), nn.Parameter)
