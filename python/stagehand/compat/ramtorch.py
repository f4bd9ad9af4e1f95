"""RamTorch's names over Stagehand: a program written for RamTorch's layers needs another import line.

    from stagehand.compat.ramtorch import move_model_to_device, replace_linear_with_ramtorch
    model = replace_linear_with_ramtorch(model, device)   # streams from here on
    model = move_model_to_device(model, device)           # what streams stays on the host

What differs: modules keep their classes and Parameters stay the same objects; every layer that layer mode knows
streams, not Linear alone; gradients are on the host, and complete, when hooks and optimizers see them.

Threads: as for the model. Hooks run in the thread that accumulates the gradient.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from .._torch import torch, unseen
from ..arguments import Path, Size
from ..device import DeviceLike
from ..files.pool import PinnedPool
from ..managed import check_module, runtime_of
from ..modes.layer import layer

nn = torch.nn

FLAG = "is_ramtorch"
GRAD_HOOKS, ACCUMULATED_HOOKS = "_ramtorch_backward_hooks", "_ramtorch_post_accumulate_grad_hooks"


# ---------------------------------------------------------------------- models


def replace_linear_with_ramtorch(module: nn.Module, device: DeviceLike | None = "cuda", *,
                                 vram_budget: Size | None = None, ram_budget: Size | None = None, prefetch_k: int = 3,
                                 dtype: torch.dtype | None = None, inference_mode: bool = False,
                                 telemetry: bool | Path | None = False, pool: PinnedPool | None = None) -> nn.Module:
    """Streams the module's layers through `device` and returns the same module, its layers flagged `is_ramtorch`.

    device: "cuda" (the current card; the simulated device where there is none), "cuda:1", a card's number,
        torch.device, "sim", "cpu" or None. The other arguments are those of stagehand.layer.
    A module that streams already is flagged again and returned. Raises what stagehand.layer raises.
    """
    check_module(module, "module")
    runtime = runtime_of(module)
    if runtime is None:
        layer(module, vram_budget=vram_budget, ram_budget=ram_budget, prefetch_k=prefetch_k, dtype=dtype,
              inference_mode=inference_mode, telemetry=telemetry, device=_device(device), pool=pool,
              trainables="host")
        runtime = runtime_of(module)
    _mark_is_ramtorch(runtime)
    return module


def move_model_to_device(model: nn.Module, device: DeviceLike | None = "cuda") -> nn.Module:
    """Moves parameters, their gradients and buffers to `device`, in place; returns the model.

    Models that stream, whole or as a part of this one, stay as they are, and so does every tensor that is flagged
    `is_ramtorch`. device: as for replace_linear_with_ramtorch.
    """
    check_module(model)
    target = _torch_device(device)
    modules = list(_outside_of_runtimes(model))
    flagged = [tensor for module in modules for tensor in (*module._parameters.values(), *module._buffers.values())
               if tensor is not None and getattr(tensor, FLAG, False)]
    stay = {id(tensor) for tensor in flagged} | {id(tensor.grad) for tensor in flagged if tensor.is_leaf}
    moved: dict[int, tuple] = {}  # a tensor that stands in several places stays one; the old one holds its id

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in stay:
            return tensor
        if id(tensor) not in moved:
            moved[id(tensor)] = tensor, tensor.to(target)
        return moved[id(tensor)][1]

    for module in modules:
        module._apply(move, recurse=False)
    return model


def reattach_is_ramtorch_flags(module: nn.Module) -> None:
    """Flags parameters and buffers of every module inside `module` that is flagged itself: copies and loaded
    models lose the flags of their tensors. Of a model that streams, all that streams is flagged."""
    check_module(module, "module")
    runtime = runtime_of(module)
    if runtime is not None:
        _mark_is_ramtorch(runtime)
        return
    for part in module.modules():
        if getattr(part, FLAG, False):
            _mark_tensors(part)


def _mark_is_ramtorch(runtime) -> None:
    """Flags the modules that a runtime manages, their parameters and buffers; of layer mode all layers, also those that
    stay on the device because they are small."""
    modules = [plan.module for plan in runtime.session.plans.values()]
    for module in {id(module): module for module in (*modules, *getattr(runtime, "_layers", ()))}.values():
        if not getattr(module, FLAG, False):
            setattr(module, FLAG, True)
        _mark_tensors(module)


def _mark_tensors(module: nn.Module) -> None:
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None:
            setattr(tensor, FLAG, True)


def _outside_of_runtimes(module: nn.Module):
    """The module and all inside it, without those that are under a runtime."""
    if runtime_of(module) is None:
        yield module
        for child in module.children():
            yield from _outside_of_runtimes(child)


def _device(device):
    """What stagehand.layer takes for a device as RamTorch's programs name it."""
    if isinstance(device, int) and not isinstance(device, bool):
        device = f"cuda:{device}"
    if str(device) == "cuda":
        return None  # the current card, the simulated device where there is none
    return device


def _torch_device(device) -> torch.device:
    device = _device(device)
    if device is None:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    return torch.device("cpu" if str(device) == "sim" else device)


# ---------------------------------------------------------------------- layers


class Linear(nn.Linear):
    """A Linear whose weights stay on the host, whatever device its model moves to: shape (*, in_features) to
    (*, out_features).

    Under a runtime (replace_linear_with_ramtorch or stagehand.layer of the model) it streams. Before that it is
    right and slow: its weights go to the input's device for each call, and stay there until backward.

    dtype: of the weights, float32 where it is None. device: where inputs come from, for RamTorch's signature; it
    has no effect. skip_init: True leaves the weights without values, for a state dict to come.
    """

    is_ramtorch = True

    def __init__(self, in_features: int, out_features: int, bias: bool = True, dtype: torch.dtype | None = None,
                 device: DeviceLike | None = None, skip_init: bool = False) -> None:
        self._skip_init = skip_init
        super().__init__(in_features, out_features, bias, device="cpu", dtype=dtype or torch.float32)
        _mark_tensors(self)

    def reset_parameters(self) -> None:
        if self.__dict__.pop("_skip_init", False):
            return
        super().reset_parameters()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        bias = self.bias
        return nn.functional.linear(input, self.weight.to(input.device),
                                    None if bias is None else bias.to(input.device))

    def _apply(self, fn, recurse: bool = True):
        """.to(), .cuda(), .half(): the dtype changes, the device does not."""
        with unseen(), torch.no_grad():
            probe = torch.empty((0,) * self.weight.dim(), dtype=self.weight.dtype, device="cpu")
            after = fn(probe)
        if after.device == probe.device or self.weight.device != probe.device:
            return super()._apply(fn, recurse)
        if after.dtype != probe.dtype:
            return super()._apply(lambda tensor: tensor.to(after.dtype), recurse)
        return self


# ---------------------------------------------------------------------- hooks


class HookId(int):
    """A hook's number in its dictionary. remove(): the hook is not called any more."""

    _hooks: dict

    def remove(self) -> None:
        self._hooks.pop(int(self), None)


def add_custom_hooks(tensor: torch.Tensor, hook_name: str = "_custom_hooks") -> torch.Tensor:
    """Gives a tensor an ordered dictionary `hook_name` of hooks and a counter `<hook_name>_counter` at 0, where it
    has none; returns the tensor. The program calls the hooks itself, but for those of gradients (see
    register_ramtorch_hook)."""
    if not hasattr(tensor, hook_name):
        setattr(tensor, hook_name, OrderedDict())
        setattr(tensor, f"{hook_name}_counter", 0)
    return tensor


def register_ramtorch_hook(tensor: torch.Tensor, hook: Callable, hook_name: str) -> int:
    """Puts a hook into the tensor's dictionary `hook_name`, made where it is missing. Returns its number there,
    which has a remove() too.

    Hooks of two names are called by backward, in the order of their numbers, of a tensor that takes a gradient:
    "_ramtorch_backward_hooks": hook(grad) before the gradient is accumulated; what it returns, if not None, is the
        gradient from there on.
    "_ramtorch_post_accumulate_grad_hooks": hook(tensor) after it; `tensor.grad` and, inside the hook,
        `tensor.ramtorch_grad` are the accumulated gradient, to be changed in place.
    """
    add_custom_hooks(tensor, hook_name)
    hooks = getattr(tensor, hook_name)
    number = HookId(getattr(tensor, f"{hook_name}_counter"))
    number._hooks = hooks
    hooks[int(number)] = hook
    setattr(tensor, f"{hook_name}_counter", int(number) + 1)
    _call_from_backward(tensor, hook_name)
    return number


def _call_from_backward(tensor: torch.Tensor, hook_name: str) -> None:
    """Has autograd call the tensor's hooks; once for each tensor and name. Whether it does already is read from
    the tensor's own hooks, which copies and pickles do not take along."""
    if not tensor.requires_grad:
        return
    if hook_name == GRAD_HOOKS and not _has_runner(tensor._backward_hooks):
        tensor.register_hook(_GradHooks(getattr(tensor, hook_name)))
    elif hook_name == ACCUMULATED_HOOKS and not _has_runner(tensor._post_accumulate_grad_hooks):
        tensor.register_post_accumulate_grad_hook(_AccumulatedHooks(getattr(tensor, hook_name)))


def _has_runner(hooks) -> bool:
    return any(isinstance(hook, _Runner) for hook in (hooks or {}).values())


class _Runner:
    """A hook of autograd's that calls those of a dictionary."""

    def __init__(self, hooks: dict) -> None:
        self.hooks = hooks


class _GradHooks(_Runner):
    def __call__(self, grad: torch.Tensor) -> torch.Tensor:
        for hook in list(self.hooks.values()):
            changed = hook(grad)
            grad = grad if changed is None else changed
        return grad


class _AccumulatedHooks(_Runner):
    def __call__(self, tensor: torch.Tensor) -> None:
        for hook in list(self.hooks.values()):
            tensor.ramtorch_grad = tensor.grad
            try:
                hook(tensor)
            finally:
                del tensor.ramtorch_grad


def register_ramtorch_grad_hook(module: nn.Module, hook_fn: Callable,
                                param_names: Iterable[str] | None = None) -> list:
    """Calls hook_fn(grad) for each gradient of the module's trained parameters, before it is accumulated; what it
    returns, if not None, is the gradient. param_names: names as in named_parameters(), None = all; others are ignored.

    Returns one handle for each parameter, with remove().
    """
    return [register_ramtorch_hook(param, hook_fn, GRAD_HOOKS) if getattr(param, FLAG, False)
            else param.register_hook(hook_fn)
            for param in _trained(module, param_names)]


def register_ramtorch_post_accumulate_grad_hook(module: nn.Module, hook_fn: Callable,
                                                param_names: Iterable[str] | None = None) -> list:
    """Calls hook_fn(parameter) each time a gradient of the module's trained parameters has been accumulated, in
    `parameter.grad` and, for flagged ones, `parameter.ramtorch_grad`. Names and handles as for
    register_ramtorch_grad_hook."""
    return [register_ramtorch_hook(param, hook_fn, ACCUMULATED_HOOKS) if getattr(param, FLAG, False)
            else param.register_post_accumulate_grad_hook(hook_fn)
            for param in _trained(module, param_names)]


def _trained(module: nn.Module, names) -> list:
    return [param for name, param in module.named_parameters()
            if param.requires_grad and (names is None or name in names)]
