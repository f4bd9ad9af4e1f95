"""The update by PyTorch's own operators, for parameters that the core cannot work on: those on a device, and the
rare ones on the host whose elements do not lie in one range. It runs where the parameter is."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.optim.adamw import adamw


def state_of(param: torch.Tensor, moment_dtype: torch.dtype, master: bool) -> dict[str, torch.Tensor]:
    """New state beside the parameter."""
    state = {key: torch.zeros_like(param, dtype=moment_dtype, requires_grad=False, memory_format=torch.preserve_format)
             for key in ("exp_avg", "exp_avg_sq")}
    if master:
        state["master_param"] = param.detach().float().clone(memory_format=torch.preserve_format)
    return state


def take_written(param: torch.Tensor, master: torch.Tensor, at_random: bool) -> None:
    """Where the weight is not its master, rounded, somebody else has written it, and it is the master from here on."""
    if at_random and param.dtype == torch.bfloat16:  # either of the two that a master is between
        bits = master.view(torch.int32)
        down, up = bits & -(1 << 16), (bits + ((1 << 16) - 1)).bitwise_and_(-(1 << 16))
        foreign = (param != down.view(torch.float32)) & (param != up.view(torch.float32))
    else:
        foreign = param != master.to(param.dtype)
    torch.where(foreign, param, master, out=master)


def update(group: dict, work: list[tuple[torch.Tensor, dict]], factor: float,
           seeds: list | None) -> Iterator[list[torch.Tensor]]:
    """One step for parameters of one group: those of each device and dtype together, and given when they are done.
    work: (parameter, its state); factor: gradients are multiplied by it; seeds: for stochastic rounding, a tuple of
    numbers for each parameter. `step` of a state moves before anything else of it does."""
    kinds: dict = {}
    for index, (param, state) in enumerate(work):
        target = state.get("master_param")
        if target is None:
            widened = seeds is not None and param.dtype == torch.bfloat16
            narrow = param.dtype != state["exp_avg"].dtype
            target = param.detach().to(state["exp_avg"].dtype) if widened or narrow else param.detach()
        grad = param.grad.detach().to(target.dtype)
        if factor != 1.0:
            grad = grad * factor
        kinds.setdefault((target.device, target.dtype), []).append((index, param, state, target, grad))
    beta1, beta2 = (float(beta) for beta in group["betas"])
    for items in kinds.values():
        _make_room(items, seeds is not None)
        adamw(
            [target for _, _, _, target, _ in items],
            [grad for _, _, _, _, grad in items],
            [state["exp_avg"] for _, _, state, _, _ in items],
            [state["exp_avg_sq"] for _, _, state, _, _ in items],
            [],
            [state["step"] for _, _, state, _, _ in items],
            has_complex=any(target.is_complex() for _, _, _, target, _ in items),
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=float(group["lr"]),
            weight_decay=float(group["weight_decay"]),
            eps=float(group["eps"]),
            maximize=group["maximize"],
        )
        for index, param, state, target, _ in items:
            if target.dtype == param.dtype:
                continue
            if seeds is not None and param.dtype == torch.bfloat16:
                target = _rounded_at_random(target, (*seeds[index], int(state["step"])))
            param.detach().copy_(target)
        yield [param for _, param, _, _, _ in items]


def _make_room(items: list, rounding: bool) -> None:
    """Takes the memory that an update takes, and gives it back to the allocator, which keeps it: what is not there
    fails here, before anything was written."""
    room = [torch.empty_like(target) for _, _, _, target, _ in items]
    if rounding:
        largest = max((target for _, _, _, target, _ in items), key=torch.Tensor.numel)
        room += [torch.empty_like(largest) for _ in range(3)]


def _mixed(numbers: tuple[int, ...]) -> int:
    """One seed of several numbers. All of them reach its low bits: PyTorch's generator on the CPU looks at 32."""
    out = 0
    for number in numbers:
        out = ((out ^ number) + 1) * 0x9E3779B97F4A7C15 % (1 << 64)
        out ^= out >> 32
    return out >> 1


def _rounded_at_random(values: torch.Tensor, numbers: tuple[int, ...]) -> torch.Tensor:
    """float32 values that bfloat16 holds exactly: each rounded up or down at random, right on average."""
    generator = torch.Generator(values.device).manual_seed(_mixed(numbers))
    noise = torch.empty_like(values, dtype=torch.int32).random_(0, 1 << 16, generator=generator)
    rounded = ((values.view(torch.int32) + noise) & -(1 << 16)).view(torch.float32)
    return torch.where(torch.isfinite(values), rounded, values)
