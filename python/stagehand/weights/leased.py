"""What a module sees in place of a master: tensors over leased places that give away no write.

A write in place counts in a tensor's version, and the end of a call looks at that. `weight.data` has a version of its
own in PyTorch, so that `self.weight.data.mul_()` inside a forward would leave no trace and be lost with the place. The
classes here give `weight.detach()` for it, which shares the version, and count `weight.data = new` as a write. `grad`
and `requires_grad` are the master's, so that a forward that freezes a part of the model, or sets gradients to zero,
does.

Tensors inside a weight that is one around others are `LeasedPart`s, for the same.

PyTorch's operators take some microseconds longer with such classes. So a module whose forward is PyTorch's own, which
does none of this, sees plain Parameters.
"""

from __future__ import annotations

import contextlib

from .. import sessions
from .._torch import functions_are_seen, outside_transforms, same_bytes, torch, undisturbed, unseen

nn = torch.nn

_data, _grad_fn = torch.Tensor.data, torch.Tensor.grad_fn  # the descriptors
_ABSENT = object()
MASTER, OF, HELD = "_stagehand_master", "_stagehand_leased", "_stagehand_held"  # attributes
PLAN, KEY = "_stagehand_plan", "_stagehand_key"  # of those of through.py: whose weight it is, and under which name


def is_torchs_own(module: nn.Module, forward) -> bool:
    """Whether `forward`, that of the module, is one of torch.nn's layers as they are. Where a function is from is asked
    of what functools.wraps does not copy."""
    function = getattr(forward, "__func__", forward)
    where = getattr(function, "__globals__", {}).get("__name__", "")
    return all(name.startswith("torch.nn.modules.") for name in (type(module).__module__, where))


class Copied:
    """A tensor of which deep copies are plain ones."""

    __slots__ = ()

    def plain_copy(self) -> torch.Tensor:
        raise NotImplementedError

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            memo[id(self)] = self.plain_copy()
        return memo[id(self)]


class OfMaster:
    """A tensor whose gradient, and whether it takes one, are its master's."""

    __slots__ = ()

    @property
    def grad(self) -> torch.Tensor | None:
        return self.__dict__[MASTER].grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self.__dict__[MASTER].grad = value

    @property
    def requires_grad(self) -> bool:
        return self.__dict__[MASTER].requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.__dict__[MASTER].requires_grad = value

    def requires_grad_(self, requires_grad: bool = True):
        """Counts from the next time on that the weight is read."""
        self.__dict__[MASTER].requires_grad_(requires_grad)
        return self


class _Over(Copied):
    """A tensor over a place, whose `data` shares its version."""

    @property
    def data(self) -> torch.Tensor:
        if not functions_are_seen():
            return torch.Tensor.detach(self)
        asked = _data.__get__(self)  # a mode sees it as of any tensor, and may answer
        with unseen():
            return torch.Tensor.detach(self) if same_bytes(asked, self) else asked

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value.dtype is not self.dtype and self._was_cast(value):
            return
        _data.__set__(self, value)
        with unseen():
            self._was_given(value)

    def _was_cast(self, value: torch.Tensor) -> bool:
        """Whether `value` is what it was, in another dtype, and it is seen so from now on."""
        return False

    def set_(self, source=None, *args):
        """To the memory that it has: nothing, where PyTorch counts a write."""
        with unseen():
            if isinstance(source, torch.Tensor) and not args and same_bytes(self, source):
                return self
        torch.Tensor.set_(self, *(() if source is None else (source, *args)))
        with unseen():
            self._was_given(torch.Tensor.detach(self))
        return self

    def _was_given(self, value: torch.Tensor) -> None:
        lease = self.__dict__.get(HELD)
        if lease is None:
            torch.autograd.graph.increment_version(self)
        else:
            lease.was_given(value)


class _Stands(OfMaster, _Over):
    """A tensor over a place that stands for a master."""

    def _was_cast(self, value: torch.Tensor) -> bool:
        master = self.__dict__[MASTER]
        return any(session.casts.was_cast(master, self, value) for session in sessions.opened())

    def plain_copy(self) -> nn.Parameter:
        return nn.Parameter(torch.Tensor.detach(self).clone(), self.requires_grad)

    def __reduce_ex__(self, protocol):
        return nn.Parameter(torch.Tensor.detach(self), self.requires_grad).__reduce_ex__(protocol)


class Leased(_Stands, nn.Parameter):
    """A place, as a Parameter."""


class LeasedUpload(_Stands, torch.Tensor):
    """A place with the way of its gradient to the host: not a leaf. It has the `Leased` that it was made of."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    # As a Parameter: a module may be given it, under this name or another.
    _is_param = True  # what makes isinstance(weight, nn.Parameter) hold
    grad_fn = None
    is_leaf = True

    @property
    def grad_dtype(self) -> torch.dtype:  # which torch.compile asks of a leaf
        return self.dtype

    def _was_given(self, value: torch.Tensor) -> None:
        self.__dict__[OF].data = value


class LeasedPart(_Over, torch.Tensor):
    """A place of a tensor that is inside a weight (wrapping.py). Copies and pickles of it are plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def plain_copy(self) -> torch.Tensor:
        return torch.Tensor.detach(self).clone()

    def __reduce_ex__(self, protocol):  # parts of several dtypes share the place's storage, which torch.save refuses
        return self.plain_copy().__reduce_ex__(protocol)


KINDS = (Leased, LeasedUpload, LeasedPart)
_GIVEN = {Leased: 1, LeasedUpload: 2}  # attributes: MASTER; OF
_make_subclass = torch.Tensor._make_subclass


def take_gradient(tensor: torch.Tensor) -> None:
    """`requires_grad_()`, which PyTorch refuses where torch.func's transforms are under way."""
    with outside_transforms():
        torch.Tensor.requires_grad_(tensor)


def _by_class(tensor: torch.Tensor, requires_grad: bool, kind=Leased) -> nn.Parameter:
    """A tensor that nobody else has becomes a Parameter: half the time of a new one over it, once for each lease."""
    tensor.__class__ = kind
    if requires_grad:
        take_gradient(tensor)
    return tensor


def _by_subclass(tensor: torch.Tensor, requires_grad: bool, kind=Leased) -> nn.Parameter:
    return _make_subclass(kind, tensor, requires_grad)


def _parameter_maker():
    try:
        made = _by_class(torch.empty(1, device="cpu"), True)
        made.__dict__[MASTER] = nn.Parameter(torch.empty(1, device="cpu"))
    except TypeError:  # a PyTorch whose classes are laid out differently
        return _by_subclass
    return _by_class if isinstance(made, nn.Parameter) and made.requires_grad and made.is_leaf else _by_subclass


with undisturbed():
    _parameter = _parameter_maker()


def device_copy(tensor: torch.Tensor, master: nn.Parameter, quiet: bool, plain: bool = False) -> nn.Parameter:
    """What a module sees in place of its master: `tensor` over the place, nobody else's, with the master's attributes.
    Where gradients are recorded it takes none: `grads.upload` stands between the two. quiet: they are not; then it says
    of itself what the master does, since PyTorch's matmul picks another kernel by that alone. plain: for a module whose
    forward is torch's own."""
    alone = quiet and master.requires_grad
    if plain:
        copy = _parameter(tensor, alone, nn.Parameter)
    else:
        copy = _parameter(tensor, alone)
        copy.__dict__[MASTER] = master
    if alone and torch.is_autocast_enabled(tensor.device.type):
        # Autocast keeps what it made of a leaf that takes a gradient, and with it the place. A view is no leaf.
        with outside_transforms(), torch.enable_grad():
            copy = as_upload(copy.view_as(copy), copy)
    if master.__dict__:
        copy.__dict__.update(master.__dict__)
    return copy


def as_upload(tensor: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    """`tensor`, a differentiable function of `copy`'s master over the same place, becomes one whose `data` counts,
    where PyTorch's classes allow it. Nothing where `copy` is a plain Parameter."""
    if _parameter is _by_class and type(copy) is Leased:
        tensor.__class__ = LeasedUpload
        tensor.__dict__[OF] = copy
        tensor.__dict__[MASTER] = copy.__dict__[MASTER]
    return tensor


def as_part(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` over a place, nobody else's, as a LeasedPart, where PyTorch's classes allow it."""
    if _parameter is _by_class:
        tensor.__class__ = LeasedPart
    return tensor


def as_plain(tensor: torch.Tensor) -> None:
    """For compiled code, which knows PyTorch's own classes: a Parameter or a tensor again. A write to its `data` leaves
    no trace then."""
    if isinstance(tensor, KINDS):
        with contextlib.suppress(TypeError):  # a PyTorch whose classes are laid out differently
            tensor.__class__ = nn.Parameter if isinstance(tensor, Leased) else torch.Tensor


def follow_data(upload: torch.Tensor, copy: torch.Tensor) -> None:
    """After `weight.data = new` where gradients were off."""
    if upload.data_ptr() != copy.data_ptr():
        _data.__set__(upload, torch.Tensor.detach(copy))


def put_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """`tensor.data = data` that is no write of the user's."""
    _data.__set__(tensor, data)


def refuse_recorded_write(upload: torch.Tensor | None, name: str) -> None:
    """A weight that takes a gradient was written in place while autograd recorded, which PyTorch refuses of a leaf."""
    node = None if upload is None else _grad_fn.__get__(upload)
    if node is not None and node.name() != "UploadBackward":
        raise RuntimeError(f"a leaf Variable that requires grad is being used in an in-place operation: {name}")


def master_of(value) -> nn.Parameter | None:
    """The master that `value` stands for inside calls, None: it stands for none."""
    return value.__dict__.get(MASTER) if isinstance(value, OfMaster) else None


def has_attributes(tensor: torch.Tensor) -> bool:
    """More than its class gives it."""
    return len(tensor.__dict__) > _GIVEN.get(type(tensor), 0)


def carry_attributes(copy: torch.Tensor, master: nn.Parameter) -> None:
    """Attributes that a call gave to its weight are the master's from now on. Not views of the weight: they would hold
    the place, and miss later writes. With those the copy would be a cycle."""
    for name, value in list(copy.__dict__.items()):
        if name in (MASTER, OF, PLAN, KEY) or master.__dict__.get(name, _ABSENT) is value:
            continue
        if _same_memory(value, copy):
            del copy.__dict__[name]
        else:
            master.__dict__[name] = value


def _same_memory(value, copy: torch.Tensor) -> bool:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    return value.untyped_storage()._cdata == copy.untyped_storage()._cdata
