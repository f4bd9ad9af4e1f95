"""Weights that are tensors around tensors: those of torchao, quanto, and others that follow PyTorch's protocol for
wrapper subclasses (`__tensor_flatten__`, `__tensor_unflatten__`).

What streams is the plain tensors inside, as the bytes that they hold: each is a `Part` of the unit, and a `Wrapping`
stands for the weight where a plan has an entry. A call sees a tensor of the same class, put together around the parts'
places. The Parameter stays the object that it was; the tensors inside it are views of the host image, as a plain
Parameter's data is.

PyTorch counts a write through the weight in the weight's version and not in those of the tensors inside, a write to one
of these only there: both are looked at. So that a write to the `data` of one of these counts, those that a call sees
are `LeasedPart`s (leased.py). Threads: as for entries.
"""

from __future__ import annotations

import contextlib

from torch.utils._python_dispatch import is_traceable_wrapper_subclass as wraps

from .._torch import torch, apart_from_caller, view
from ..errors import StagehandError
from .leased import LeasedPart, as_part, master_of, take_gradient
from .saved import empty_out
from .units import Entry, Unit, bytes_reason

nn = torch.nn

SHOWN = "_stagehand_shown"  # attribute of what a call sees
_ELSEWHERE = ("torch.distributed.", "torch.nested.")  # their metadata belongs to processes, or to one batch
_ABSENT = object()


def inside(tensor: torch.Tensor, path: tuple = ()) -> list[tuple[tuple, torch.Tensor]]:
    """(names of attributes that lead to it, tensor) of the plain tensors in it, those of nested ones too."""
    found = []
    for name in tensor.__tensor_flatten__()[0]:
        part = getattr(tensor, name)
        found += inside(part, (*path, name)) if wraps(part) else [((*path, name), part)]
    return found


def _at(tensor: torch.Tensor, path: tuple):
    for name in path:
        tensor = getattr(tensor, name, None)
    return tensor


def put_together(like: torch.Tensor, parts: dict, path: tuple = ()) -> torch.Tensor:
    """A tensor as `like` is now, around other plain tensors. parts: those, by the paths that `inside` gives."""
    names, context = like.__tensor_flatten__()
    inner = {}
    for name in names:
        part, at = getattr(like, name), (*path, name)
        inner[name] = put_together(part, parts, at) if wraps(part) else parts[at]
    return type(like).__tensor_unflatten__(inner, context, like.shape, like.stride())


def inside_of(params) -> list[torch.Tensor]:
    """The plain tensors inside those of `params` for which `wraps` holds."""
    found = []
    for param in {id(param): param for param in params}.values():
        with contextlib.suppress(Exception):  # of another library's code: `wrapping_reason` tells
            found += [part for _, part in inside(param)] if wraps(param) else []
    return found


@contextlib.contextmanager
def _named(name: str):
    """Code of another library's class, which worked when it was tried: its errors say of which weight they are."""
    try:
        yield
    except StagehandError:
        raise
    except Exception as error:
        raise StagehandError(
            f"{name} is a tensor subclass that could not be taken apart or put together again ({type(error).__name__}: "
            f"{error})", object=name) from error


def wrapping_reason(param: nn.Parameter, storages, inference_mode: bool) -> str:
    """Why a weight for which `wraps` holds cannot stream; "" when it can."""
    kind = type(param).__name__
    if param.requires_grad and not inference_mode:
        return (f"it is a {kind}, a tensor subclass, and takes a gradient: those stream that are frozen "
                f"(requires_grad_(False)), and all with inference_mode=True")
    if type(param).__module__.startswith(_ELSEWHERE):
        return f"it is a {kind}, a tensor subclass that belongs to where it is"
    if param.is_inference():
        return f"it is a {kind}, a tensor subclass, and was made under inference_mode"
    try:
        parts = inside(param)
        why = _parts_reason(parts, storages) or _together_reason(param, parts)
    except Exception as error:  # code of another library: whatever it raises says that it cannot be taken apart
        why = f"cannot be taken apart or put together again ({type(error).__name__}: {error})"
    return f"it is a {kind}, a tensor subclass that {why}" if why else ""


def part_reason(part) -> str:
    """Why the bytes of what is inside a weight cannot be moved as bytes; "" when they can."""
    if type(part) not in (torch.Tensor, nn.Parameter, LeasedPart):
        return f"it is a {type(part).__name__}"
    return bytes_reason(part.data)


def _parts_reason(parts: list, storages) -> str:
    if not parts:
        return "has no tensors in it"
    for path, part in parts:
        name = ".".join(path)
        why = part_reason(part)
        if why:
            return f"holds {name}: {why}"
        if part.requires_grad or part.is_inference():
            return f"holds {name}, which takes a gradient or was made under inference_mode"
        if part.device.type != "cpu":
            return f"is on {part.device} already: those that stream are on the CPU when the model is wrapped"
        if storages.entangled(part):
            return f"holds {name}, which shares memory with another tensor of the model"
    return ""


def _together_reason(param: nn.Parameter, parts: list) -> str:
    """Tries it: around the same tensors, and around others of another device, which have no values."""
    again = put_together(param, dict(parts))
    if not _alike(again, param) or _addresses(inside(again)) != _addresses(parts):
        return "is another one, or has other tensors in it, when it is put together again"
    abroad = put_together(param, {path: torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device="meta")
                                  for path, part in parts})
    if not _alike(abroad, param) or abroad.device.type != "meta":
        return "keeps to its device when it is put together around tensors of another"
    return ""


def _addresses(parts: list) -> list:
    return [(path, part.data_ptr()) for path, part in parts]


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return type(a) is type(b) and (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


class Part(Entry):
    """One plain tensor inside a weight, as an entry of its unit. param: that tensor.

    version: as for entries, and -1 where the weight has been written, or given another tensor, since it was remembered:
    so a graph of before finds out.
    """

    whole: Wrapping
    path: tuple
    outer = 0  # the weight's version when it was remembered

    @property
    def version(self) -> int:
        return self._seen if self.outer == self.whole.param._version and self._now() is self.param else -1

    @version.setter
    def version(self, value: int) -> None:
        self._seen = value

    def _now(self) -> torch.Tensor | None:
        return _at(self.whole.param, self.path)

    def remember(self) -> None:
        super().remember()
        self.outer = self.whole.param._version

    def changed(self) -> bool:
        now = self._now()
        if now is not self.param:
            why = part_reason(now)
            if why:
                raise StagehandError(
                    f"{self.name} was given other data, whose bytes cannot be moved: {why}. Shut stagehand down before "
                    f"the change and wrap again", object=self.name)
            self.param = now
            return True
        if self.whole.param._version != self.outer:
            torch.autograd.graph.increment_version(self.param)
            return True
        return super().changed()


class Wrapping:
    """A weight whose parts stream; where a plan has an entry. param: the weight; the others as of an Entry."""

    view = None
    twins = ()
    fresh_version = 0
    is_cast = False

    def __init__(self, unit: Unit, name: str, param: nn.Parameter) -> None:
        self.name = name
        self.param = param
        self.dtype, self.shape, self.stride = param.dtype, param.shape, param.stride()
        self.parts: list[Part] = []
        with _named(name):
            tensors = inside(param)
        for path, tensor in tensors:
            part = unit.add(f"{name}.{'.'.join(path)}", tensor, kind=Part)
            part.whole, part.path = self, path
            self.parts.append(part)
        self.inside = {part.path[0] for part in self.parts}
        unit.wrapping.append(self)

    def is_like(self, value) -> bool:
        """Whether the parts' bytes could be those of `value`."""
        if type(value) is not type(self.param) or (value.dtype, value.shape) != (self.dtype, self.shape):
            return False
        found = None
        with contextlib.suppress(Exception):  # of another library's code
            found = [(path, t.dtype, t.shape, t.stride()) for path, t in inside(value)]
        return found == [(part.path, part.dtype, part.shape, part.stride) for part in self.parts]

    @apart_from_caller
    def over(self, base: torch.Tensor, master: nn.Parameter, quiet: bool, plain: bool) -> torch.Tensor:
        """What a call sees: `base` is the unit's place, the rest as for `Entry.over`."""
        if master.requires_grad and not quiet:
            raise StagehandError(
                f"{self.name} takes a gradient, and it is a {type(master).__name__}, a tensor subclass, which streams "
                f"without: freeze it with requires_grad_(False), or run under torch.no_grad()", object=self.name)
        tensors = [view(base, part.offset, part.dtype, part.shape, part.stride) for part in self.parts]
        if not plain:
            tensors = [as_part(tensor) for tensor in tensors]
        with _named(self.name):
            copy = self._around(master, tensors)
        if master.requires_grad and not torch.is_autocast_enabled(base.device.type):  # which would keep what it makes
            take_gradient(copy)  # PyTorch's matmul picks another kernel by that alone
        known = copy.__dict__
        for name, value in master.__dict__.items():
            known.setdefault(name, value)
        known[SHOWN] = Shown(self, tensors, None if plain else dict(known))
        return copy

    def _around(self, master: nn.Parameter, tensors: list) -> torch.Tensor:
        try:
            return put_together(master, {part.path: tensor for part, tensor in zip(self.parts, tensors)})
        except KeyError as error:
            raise StagehandError(
                f"{self.name} holds another tensor than when the model was wrapped, {error}: shut stagehand down "
                f"before the change and wrap again", object=self.name) from error

    def tensors(self, copy: torch.Tensor) -> list[tuple]:
        return list(zip(self.parts, copy.__dict__[SHOWN].tensors))

    @apart_from_caller
    def note(self, local, unit: Unit, copy: torch.Tensor) -> None:
        for part, tensor in self.tensors(copy):
            local.outside.note(unit, part, tensor, local.depth > 0)
        if local.depth:
            with torch.inference_mode(False):
                seen = copy.detach()  # shares the version; without its memory it holds no lease
            tensors = {id(tensor) for tensor in copy.__dict__[SHOWN].tensors}
            parts = [part for _, part in inside(seen)]
            if not any(id(part) in tensors for part in parts):
                for part in parts:
                    empty_out(part)
                local.outside.apart.append((seen, copy._version, unit, self.name))

    def written(self, copy: torch.Tensor, shown: Shown) -> list[tuple[Part, torch.Tensor]]:
        """(part, what is there at the end of a call) of those that the call wrote or exchanged in `copy`."""
        now = shown.tensors
        if shown.given is not None:
            now = [_at(copy, part.path) for part in self.parts]
        through = copy._version != self.fresh_version
        return [(part, tensor) for part, tensor, given in zip(self.parts, now, shown.tensors)
                if through or given._version != part.fresh_version or not _same_memory(tensor, given)]

    def carry_attributes(self, copy: torch.Tensor, shown: Shown) -> None:
        """As leased.carry_attributes. What is inside the weight is not carried: that was written back."""
        places = {tensor.untyped_storage()._cdata for tensor in shown.tensors}
        for name, value in copy.__dict__.items():
            if name in self.inside or shown.given.get(name, _ABSENT) is value:
                continue
            if not (type(value) in (torch.Tensor, LeasedPart) and value.untyped_storage()._cdata in places):
                self.param.__dict__[name] = value


def master_behind(value) -> nn.Parameter | None:
    """As `leased.master_of`, of weights around tensors too."""
    master = master_of(value)
    if master is None and wraps(value):
        shown = value.__dict__.get(SHOWN)
        master = None if shown is None else shown.whole.param
    return master


def _same_memory(a, b: torch.Tensor) -> bool:
    plain = type(a) in (torch.Tensor, LeasedPart) and a.layout is torch.strided
    return a is b or (plain and a.data_ptr() == b.data_ptr())


class Shown:
    """What is known of a weight that a call sees: the tensors over its parts' places, and its attributes when it was
    made. Copies and pickles of the weight have None for it."""

    __slots__ = ("whole", "tensors", "given")

    def __init__(self, whole: Wrapping, tensors: list, given: dict | None) -> None:
        self.whole = whole
        self.tensors = tensors
        self.given = given  # None: the call is PyTorch's own code, which gives no attributes

    def __reduce__(self):
        return type(None), ()

    def __deepcopy__(self, memo):
        return None
