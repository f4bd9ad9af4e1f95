"""A managed model, or a part of it, in another dtype or memory format: what .half(), .to(torch.bfloat16),
.to(memory_format=torch.channels_last) and the like ask for.

    close the session -> convert on the host, as torch does it -> open a session with the same options

Parameter objects, hooks and flags stay; gradients are converted too; the runtime object is the same, its counters
begin again. What fails is undone: the values from before are kept until the new session is open, so RAM holds
the weights twice for that time.

Threads: waits for a pass of another thread; none may begin meanwhile.
"""

from __future__ import annotations

import contextlib
import copy

from torch.utils._python_dispatch import TorchDispatchMode

from .._torch import torch
from ..errors import InvalidStateTransitionError, StagehandError
from ..managed import runtime_of
from ..weights.saved import in_backward

nn = torch.nn

KEEPS, CONVERTS, ELSE = "keeps", "converts", "something else"
LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}


# ---------------------------------------------------------------------- what a function does


def _kind(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> tuple:
    return dtype or tensor.dtype, tensor.dim(), tensor.requires_grad


def _layout(fn, before: torch.Tensor, after: torch.Tensor) -> torch.memory_format | None:
    """That `fn` asks for. None: strides of some other kind."""
    last = LAYOUTS.get(before.dim())
    if after.stride() != before.stride():
        return last if last and after.is_contiguous(memory_format=last) else None
    if last is None:
        return torch.preserve_format
    other = before.contiguous(memory_format=last)
    return torch.preserve_format if fn(other).stride() == other.stride() else torch.contiguous_format


def effect(fn, session, module: nn.Module) -> tuple[str, dict, dict]:
    """What `fn`, which torch would call for every tensor of the module, does to them: tried on small stand-ins,
    one of each kind. Tensors may go to the session's device.

    Returns KEEPS, CONVERTS (to another dtype or memory format, and nothing beyond that) or ELSE, kind -> dtype, and
    number of dimensions -> memory format.
    """
    dtypes, layouts, converts, device = {}, {}, False, session.target.torch
    tensors = [t for t in (*module.parameters(), *module.buffers()) if not t.is_quantized]
    kinds = {_kind(t, session.casts.seen_dtype(t)) for t in tensors}
    for kind in sorted(kinds, key=str):
        probe = _probe(*kind)
        with torch.no_grad():
            before = copy.deepcopy(probe)
            after = fn(probe)
            layout = _layout(fn, before, after) if isinstance(after, torch.Tensor) else None
        if layout is None:
            return ELSE, {}, {}
        if after.device.type == "cpu" and after.is_shared() != before.is_shared():
            return ELSE, {}, {}
        if after.device not in (before.device, device) or _values(after) != _values(before.to(after.dtype)):
            return ELSE, {}, {}
        dtypes[kind] = after.dtype
        if layout is not torch.preserve_format and not all(
                t.is_contiguous(memory_format=layout) for t in tensors if t.dim() == probe.dim()):
            layouts[probe.dim()] = layout
        if device.type != "cpu" and _moves_off(fn, before, device):
            return ELSE, {}, {}
        if after.dtype != before.dtype or probe.dim() in layouts:
            converts = True
        elif after is not probe and after.device == before.device and not _is_to(fn, before):
            return ELSE, {}, {}
    return (CONVERTS if converts else KEEPS), dtypes, layouts


class _Operators(TorchDispatchMode):
    """Lists what runs inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.add(func)
        return func(*args, **(kwargs or {}))


def _is_to(fn, probe: torch.Tensor) -> bool:
    """Whether it is `.to(device)`. That copies for "cpu:1", as accelerate calls the host of its second process."""
    with torch.no_grad(), _Operators() as operators:
        fn(probe)
    return operators.seen == {torch.ops.aten._to_copy.default}


def _moves_off(fn, probe: torch.Tensor, device: torch.device) -> bool:
    """Whether what is on the device would not stay there, where the weights are when they are used."""
    with torch.no_grad():
        return fn(probe.to(device)).device != device


def _probe(dtype: torch.dtype, dim: int, requires_grad: bool) -> torch.Tensor:
    """Thirds, where the dtype has any: rounding them shows."""
    floating = dtype.is_floating_point or dtype.is_complex
    probe = torch.full((2,) * dim, 1 / 3 if floating else 1.0, dtype=torch.float64, device="cpu").to(dtype)
    return probe.requires_grad_(requires_grad and floating)


def _values(tensor: torch.Tensor) -> list:
    tensor = tensor.detach().cpu()
    wide = torch.complex128 if tensor.dtype.is_complex else torch.float64
    return tensor.to(wide).flatten().tolist()


# ---------------------------------------------------------------------- doing it


FEW = 4  # conversions of parts, with no pass between, that are each done at once


def cast(session, module: nn.Module, fn, dtypes: dict) -> bool:
    """As `convert`, but the session goes on: in a call that is under way, where many parts are made smaller one by one,
    and where weights stream from files. False: it cannot be done so, and nothing was."""
    def new_dtype(param):
        seen = session.casts.seen_dtype(param)
        return dtypes.get(_kind(param, seen), seen)

    inside = session.casts.is_in_calls(module)
    if not session.casts.can_cast(module, dtypes) or not (inside or session.casts.makes_smaller(module, new_dtype)):
        return False
    if inside:
        session.casts.cast(module, fn, new_dtype)
        return True
    if session.source is None and not _are_many(session):
        return False
    with session.steps.pass_lock:
        _refuse(session, files=False)
        session.casts.cast(module, fn, new_dtype)
        session.casts.make_last()
    return True


def _are_many(session) -> bool:
    """Whether conversions come one after the other: the model is taken over once, when the next pass begins, and not
    for each of them."""
    runtime = runtime_of(session.model)
    runtime.conversions = 1 if session.steps.runners else runtime.conversions + 1
    return runtime.conversions > FEW


def convert(session, module: nn.Module, dtypes: dict, layouts: dict) -> bool:
    """Gives the module's tensors the dtypes and memory formats that `effect` found for them. On failure the model is as
    it was, managed. False: another thread has shut the runtime down, and nothing was done."""
    runtime = runtime_of(session.model)
    _refuse_inside(session.local.depth)  # before it waits for a shutdown that waits for this thread's pass
    with contextlib.nullcontext() if runtime is None else runtime._life, session.steps.pass_lock:
        if session.closed:
            return False
        _refuse(session)
        runtime._pause()
        with torch.inference_mode(False), torch.no_grad():
            was = _Was(module)
            try:
                type(module)._apply(module, lambda tensor: _converted(tensor, dtypes, layouts))
                runtime._resume(dtype=None)
            except BaseException:
                was.restore()
                runtime._resume(dtype=session.dtype)
                raise
            was.mark_written()
    return True


def _converted(tensor: torch.Tensor, dtypes: dict, layouts: dict) -> torch.Tensor:
    of_its_parameter = tensor.dtype, tensor.dim(), True  # a gradient is of no kind that was tried
    dtype = dtypes.get(_kind(tensor)) or dtypes.get(of_its_parameter, tensor.dtype)
    return tensor.to(dtype, memory_format=layouts.get(tensor.dim(), torch.preserve_format))


def _refuse_inside(inside) -> None:
    if inside or in_backward():
        raise InvalidStateTransitionError(
            "this model is under stagehand and a step of it is under way: convert it after the call, the backward or "
            "end_step()")


def _refuse(session, files: bool = True) -> None:
    _refuse_inside(session.local.depth or session.steps.under_way)
    if session.steps.graph_alive():
        raise InvalidStateTransitionError(
            "this model is under stagehand, and autograd may still run backward through its last forward: convert it "
            "after backward(), or drop the forward's outputs")
    if files and session.source is not None:
        raise StagehandError(
            "this model is under stagehand and its weights stream from files, which hold them in one dtype: call "
            "shutdown() on its runtime before .to(), or save it in the other dtype and load that")


_FLAT = ("_flat_weights", "_flat_weight_refs")  # of an RNN, which empties them first


class _Was:
    """Tensors of a plain module before a conversion."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = [(m, dict(m._parameters), dict(m._buffers)) for m in module.modules()]
        self._data = [(p, p.data, p.grad, None if p.grad is None else p.grad.data) for p in module.parameters()]
        self._flat = [(m, key, list(vars(m)[key])) for m in module.modules() for key in _FLAT if key in vars(m)]

    def restore(self) -> None:
        for param, data, grad, grad_data in self._data:
            param.grad = None  # it must not be of another dtype than the data, not even for a moment
            param.data = data
            if grad is not None:
                grad.data = grad_data
                param.grad = grad
        for module, params, buffers in self._modules:
            module._parameters.update(params)
            module._buffers.update(buffers)
        for module, key, weights in self._flat:
            vars(module)[key] = weights

    def mark_written(self) -> None:
        """Graphs that a backward has gone through already must not use the new values for the old ones."""
        for param, data, _, _ in self._data:
            if param.dtype != data.dtype:
                torch.autograd.graph.increment_version(param)
