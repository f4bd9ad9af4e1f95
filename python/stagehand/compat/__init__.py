"""Stand-ins for the interfaces of other packages. stagehand.compat.ramtorch: RamTorch's layers and helpers. The other
modules have names of an earlier Stagehand (docs/names.md): budget, registry, residency, scheduler, spill, transfer."""

from .ramtorch import (
    Linear,
    add_custom_hooks,
    move_model_to_device,
    reattach_is_ramtorch_flags,
    register_ramtorch_grad_hook,
    register_ramtorch_hook,
    register_ramtorch_post_accumulate_grad_hook,
    replace_linear_with_ramtorch,
)

__all__ = [
    "Linear",
    "add_custom_hooks",
    "move_model_to_device",
    "reattach_is_ramtorch_flags",
    "register_ramtorch_grad_hook",
    "register_ramtorch_hook",
    "register_ramtorch_post_accumulate_grad_hook",
    "replace_linear_with_ramtorch",
]
