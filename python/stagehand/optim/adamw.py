"""AdamW for parameters in host memory: what PyTorch sees of it. The arithmetic and the threads are the core's.

A step is: look at all gradients and make missing state (nothing is written before this has succeeded), submit
one update for each host parameter, update device parameters by PyTorch meanwhile, wait. With `last_backward` the
submitting happens in hooks that fire during backward, and step() does the rest.
"""

from __future__ import annotations

import collections
import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from .. import _core
from .._torch import aside, observed, unseen
from ..arguments import check, switches
from . import clip, diskstate, flat, plain


class StateBytes(NamedTuple):
    """Bytes of optimizer state by where they are."""

    host: int
    disk: int
    device: int


class _Kept:
    """Carries a tensor through Optimizer.load_state_dict, which would cast it to the parameter's dtype."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class OffloadedAdamW(torch.optim.Optimizer):
    """torch.optim.AdamW for parameters in host memory, computed by the library's own threads.

    params: tensors, named tensors or groups, as for every torch.optim.Optimizer. lr, betas, eps, weight_decay,
        maximize: as for torch.optim.AdamW, may differ by group. There is no amsgrad.
    master_dtype: torch.float32 keeps an exact copy of bfloat16 and float16 weights, which the update works on; the
        weight is the master, rounded. None updates in the weight itself.
    state_dtype: dtype of the two moments of bfloat16 and float16 weights; torch.float32, or None for the weight's own
        (small squares are lost then).
    stochastic_rounding: bfloat16 weights are rounded up or down at random, right on average, so that small
        steps are not lost without a master. The numbers are a function of `seed`, the parameter's position,
        step and element.
    state_path: a folder, or the path of a file that does not exist. The state of host parameters lies in a new
        file there, which has no name and goes with the process; its room is taken from the disk at once.
        `state[p]` then shows `step` alone; state_dict() reads the rest into memory.
    threads: number of threads; None is one for each core that the process may use, at most 16.
    max_grad_norm: gradients are clipped to this 2-norm by every step, without being changed; the norm before is
        `grad_norm`.

    Parameters in host memory (float32, bfloat16, float16, float64; contiguous or dense in other strides) are
    updated by the threads; those on a device, and other layouts, by PyTorch where they are. Gradients may have
    another float dtype. float32 results differ from torch.optim.AdamW by rounding only. Writes to a weight from
    elsewhere win over its master, in whatever way they are made (model.load_state_dict, `p.data = new`,
    `p.data.clamp_()`): an element that is not its master, rounded, is taken as it is. GradScaler's scale is applied
    as gradients are read.

    state[p]: step (float32 scalar), exp_avg, exp_avg_sq and, where there is one, master_param. state_dict() and
    torch.optim.AdamW's go both ways.

    Threads: one thread at a time takes steps; the hooks of last_backward may run on any. After fork the child
    makes an optimizer of its own. Errors: ValueError for settings, RuntimeError for gradients that cannot be used,
    TransferError when the file of the state cannot be written, after which the state must be loaded again.
    """

    _step_supports_amp_scaling = True  # GradScaler leaves unscaling and skipping to us

    def __init__(self, params: Iterable, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-8, weight_decay: float = 0.01, *, maximize: bool = False,
                 master_dtype: torch.dtype | None = torch.float32, state_dtype: torch.dtype | None = torch.float32,
                 stochastic_rounding: bool = False, seed: int = 0, state_path: str | os.PathLike | None = None,
                 threads: int | None = None, max_grad_norm: float | None = None) -> None:
        switches(maximize=maximize, stochastic_rounding=stochastic_rounding)
        check("seed", seed, "integer")
        check("threads", threads, "integer", none=True)
        check("state_path", state_path, "path", none=True)
        for name, dtype in (("master_dtype", master_dtype), ("state_dtype", state_dtype)):
            if dtype not in (torch.float32, None):
                raise ValueError(f"{name} is torch.float32 or None, not {dtype}")
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"max_grad_norm is above 0 or None, not {max_grad_norm}")
        if threads is not None and not 1 <= threads <= 256:
            raise ValueError(f"threads is from 1 to 256, or None, not {threads}")
        if not 0 <= seed < 1 << 64:
            raise ValueError(f"seed is from 0 to 2**64 - 1, not {seed}")
        self._settings = {
            "master_dtype": master_dtype, "state_dtype": state_dtype, "stochastic_rounding": stochastic_rounding,
            "seed": seed, "state_path": None if state_path is None else os.fspath(state_path), "threads": threads,
        }  # fmt: skip
        self.max_grad_norm = max_grad_norm
        self._begin()
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, maximize=maximize))

    def _begin(self) -> None:
        """What is neither copied nor pickled."""
        self._core = _core.AdamW(self._settings["threads"] or 0, self._settings["state_path"])
        self._lock = threading.RLock()
        self._positions: dict[torch.Tensor, int] = {}
        self._regions: dict[torch.Tensor, diskstate.Region] = {}  # those with room in the file
        self._in_flight: list[torch.Tensor] = []
        # Updated before the step is over, by last_backward or in a step() that failed: (gradient, its version, by
        # last_backward)
        self._early: dict[torch.Tensor, tuple] = {}
        self._inside: dict[torch.Tensor, dict] | None = None  # in last_backward: parameters to their group
        self._scaled = False  # a GradScaler has used this optimizer
        self._broken = ""
        self.grad_norm: torch.Tensor | None = None

    # ------------------------------------------------------------------ parameters

    def add_param_group(self, param_group: dict) -> None:
        """As torch.optim.Optimizer's. With state_path it takes room on the disk: TransferError when that is full."""
        self._refuse_inside("add_param_group()")
        super().add_param_group(param_group)
        with unseen():
            self._take_in_last_group()

    def _take_in_last_group(self) -> None:
        group = self.param_groups[-1]
        try:
            _check_group(group, len(self.param_groups) - 1)
            for param in group["params"]:
                self._positions[param] = len(self._positions)
                if self._settings["stochastic_rounding"] and param.dtype == torch.float16:
                    raise ValueError(f"stochastic_rounding is for bfloat16, and {self._describe(param)} is float16: "
                                     "leave it out")
                if param.requires_grad:
                    self._take_room(param)
        except BaseException:
            self.param_groups.pop()
            for param in group["params"]:
                self._positions.pop(param, None)
            raise

    def _take_room(self, param: torch.Tensor) -> diskstate.Region | None:
        """The parameter's room in the file; None where its state belongs in memory."""
        if self._settings["state_path"] is None or not flat.on_host(param) or param.numel() == 0:
            return None
        region = self._regions.get(param)
        kind = param.shape, self._moment_dtype(param)
        changed = region is not None and (region.like.shape, region.moment_dtype) != kind
        if changed and self.state.get(param):
            self._refuse_shape(param, "exp_avg", region.like.shape)
        if region is None or changed:
            region = diskstate.create(self._core, param.detach(), self._moment_dtype(param), self._has_master(param))
            self._regions[param] = region
        return region

    def _refuse_shape(self, param: torch.Tensor, key: str, shape) -> None:
        raise RuntimeError(
            f"the state '{key}' of {self._describe(param)} has shape {list(shape)}, or the weight has another "
            "dtype than before: delete opt.state[p] to begin again with this parameter"
        )

    def _position(self, param: torch.Tensor) -> int:
        return self._positions.setdefault(param, len(self._positions))  # groups may be changed behind our back

    def _has_master(self, param: torch.Tensor) -> bool:
        return self._settings["master_dtype"] is not None and param.dtype in flat.HALVES

    def _moment_dtype(self, param: torch.Tensor) -> torch.dtype:
        if param.dtype in flat.HALVES and self._settings["state_dtype"] is not None:
            return torch.float32
        return param.dtype

    def _describe(self, param: torch.Tensor) -> str:
        for number, group in enumerate(self.param_groups):
            for index, other in enumerate(group["params"]):
                if other is param:
                    name = f" '{group['param_names'][index]}'" if "param_names" in group else ""
                    return f"parameter {index} of group {number}{name} (shape {list(param.shape)})"
        return f"a parameter of shape {list(param.shape)}"

    def _check_gradient(self, param: torch.Tensor) -> None:
        grad = param.grad
        if grad.layout is not torch.strided:
            raise RuntimeError(
                f"the gradient of {self._describe(param)} is sparse: OffloadedAdamW needs dense ones "
                "(sparse=False for embeddings), or use torch.optim.SparseAdam for it"
            )
        if flat.on_host(param) and (grad.dtype not in flat.DTYPES or grad.device.type != "cpu"):
            raise RuntimeError(
                f"the gradient of {self._describe(param)} is {grad.dtype} on {grad.device}; "
                "it should be a float tensor in host memory, as the parameter is"
            )

    # ------------------------------------------------------------------ state

    def _ready(self, param: torch.Tensor) -> dict:
        """The parameter's state, made where there is none yet, in the parameter's layout and where it is."""
        state = self.state[param]
        region = self._take_room(param)
        detached = param.detach()
        if not state:
            first = {}
            if region is None or region.begun:
                first = plain.state_of(detached, self._moment_dtype(param), self._has_master(param))
            if region is not None:
                if region.begun:  # the state that it had was deleted, or one without it was loaded
                    diskstate.write(self._core, region, param, first)
                    first = {}
                elif region.like.stride() != param.stride():
                    region.like = torch.empty_like(detached, device="meta")
                region.begun = True
            state.update(step=torch.tensor(0.0, dtype=torch.float32, device="cpu"), **first)
            return state
        if region is not None:
            self._keep_on_disk(param, state, region)
        else:
            self._keep_in_memory(param, state)
        return state

    def _keep_in_memory(self, param: torch.Tensor, state: dict) -> None:
        if "exp_avg" not in state:  # the parameter has left the host
            state.update(diskstate.read(self._core, self._regions.pop(param)))
        shape, stride, device = param.shape, param.stride(), param.device
        if not self._has_master(param):
            state.pop("master_param", None)
        elif "master_param" not in state:  # the weight has become one of low precision
            state["master_param"] = param.detach().float()
        for key, value in _parts(state).items():
            dtype = torch.float32 if key == "master_param" else self._moment_dtype(param)
            if value.shape != shape:
                self._refuse_shape(param, key, value.shape)
            if value.stride() != stride or value.device != device or value.dtype != dtype:
                state[key] = flat.laid_out_like(value, param.detach(), dtype)
        master = state.get("master_param")
        if master is not None and not flat.on_host(param):  # there the core does it
            plain.take_written(param.detach(), master, self._settings["stochastic_rounding"])

    def _keep_on_disk(self, param: torch.Tensor, state: dict, region: diskstate.Region) -> None:
        if "exp_avg" not in state and region.like.stride() == param.stride():
            return
        parts = _parts(state) if "exp_avg" in state else diskstate.read(self._core, region)
        if region.master:
            parts["master_param"] = flat.laid_out_like(parts["master_param"], param.detach(), torch.float32)
        diskstate.write(self._core, region, param, parts)
        for key in region.parts():
            state.pop(key, None)

    @property
    def state_bytes(self) -> StateBytes:
        """Bytes of state in host memory, in the file (room that was taken) and on devices."""
        if observed():
            with aside():
                return self.state_bytes
        tensors = [t for state in self.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
        host = sum(t.numel() * t.element_size() for t in tensors if t.device.type == "cpu")
        device = sum(t.numel() * t.element_size() for t in tensors if t.device.type != "cpu")
        return StateBytes(host, self._core.file_bytes, device)

    def params_on_device(self) -> list[torch.Tensor]:
        """The trainable parameters that are on a device, and not in host memory, now."""
        if observed():
            with aside():
                return self.params_on_device()
        return [p for group in self.param_groups for p in group["params"] if p.requires_grad and p.device.type != "cpu"]

    def state_bytes_of(self, params: Iterable[torch.Tensor]) -> int:
        """Bytes of state of these parameters on devices."""
        if observed():
            with aside():
                return self.state_bytes_of(params)
        return sum(t.numel() * t.element_size() for p in params for t in _parts(self.state.get(p) or {}).values()
                   if t.device.type != "cpu")

    def device_bytes_needed(self) -> tuple[int, int]:
        """Device memory that state of parameters on a device takes, or will at the first step, and that a step takes
        for a moment besides: a gradient in the dtype of the update, a root, and numbers to round with."""
        if observed():
            with aside():
                return self.device_bytes_needed()
        state = most = 0
        for group in self.param_groups:
            moment = 0
            for param in group["params"]:
                if not param.requires_grad or param.device.type == "cpu":
                    continue
                each, master = self._moment_dtype(param).itemsize, 4 if self._has_master(param) else 0
                wide = master or each
                state += param.numel() * (2 * each + master)
                moment += param.numel() * (2 * wide + (12 if self._settings["stochastic_rounding"] else 0))
            most = max(most, moment)
        return state, most

    def state_dict(self) -> dict:
        """As torch.optim.Optimizer's. State in the file is read into new tensors in memory."""
        with unseen(), self._lock, self._whole_state():
            return super().state_dict()

    @contextlib.contextmanager
    def _whole_state(self):
        """self.state with what lies in the file as tensors."""
        self.synchronize()
        thin = {}
        for param, region in self._regions.items():
            state = self.state.get(param)
            if state and "exp_avg" not in state:
                thin[param] = state
                self.state[param] = {**state, **diskstate.read(self._core, region)}
        try:
            yield
        finally:
            self.state.update(thin)

    def load_state_dict(self, state_dict: dict) -> None:
        """As torch.optim.Optimizer's; takes state of torch.optim.AdamW too. Moments keep float32, masters are used
        where the state has them and made from the weights where it does not. Raises ValueError for amsgrad."""
        self._refuse_inside("load_state_dict()")
        with unseen(), self._lock:
            with contextlib.suppress(Exception):
                self.synchronize()  # what is under way ends; how no longer matters
            last_hook = self.register_load_state_dict_pre_hook(_check_and_keep_dtypes)
            try:
                super().load_state_dict(state_dict)
            finally:
                last_hook.remove()

    def __getstate__(self) -> dict:
        with unseen(), self._lock, self._whole_state():
            state = {**super().__getstate__(), "state": dict(self.state)}
        return {**state, "settings": dict(self._settings), "max_grad_norm": self.max_grad_norm}

    def __setstate__(self, state: dict) -> None:
        """Called by load_state_dict, and by copies and pickles, whose state has settings."""
        if "settings" in state:
            state = dict(state)
            self._settings = state.pop("settings")
            self._begin()
            state["state"] = collections.defaultdict(dict, state["state"])
        super().__setstate__(state)
        self._early.clear()
        try:
            with unseen():
                self._take_over_all()
        except BaseException as error:  # what is half of one state and half of another is not used
            self._broken = f"loading a state failed: {error}"
            raise
        self._broken = ""

    def _take_over_all(self) -> None:
        for state in self.state.values():
            state.update({key: value.tensor for key, value in state.items() if isinstance(value, _Kept)})
        for number, group in enumerate(self.param_groups):
            _check_group(group, number)
        params = [param for group in self.param_groups for param in group["params"]]
        self._positions = {param: index for index, param in enumerate(params)}
        for param in params:
            if param.requires_grad:
                self._take_room(param)
            if self.state.get(param):
                self._take_over(param, self.state[param])

    def _take_over(self, param: torch.Tensor, state: dict) -> None:
        """Loaded state in our dtypes and layout, on the disk where it belongs there."""
        state["step"] = torch.tensor(float(state.get("step", 0)), dtype=torch.float32, device="cpu")
        detached = param.detach()
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = _own(state[key], detached, self._moment_dtype(param))
        if self._has_master(param):
            state["master_param"] = _own(state.get("master_param", detached), detached, torch.float32)
        else:
            state.pop("master_param", None)
        region = self._take_room(param)
        if region is not None:
            self._keep_on_disk(param, state, region)

    # ------------------------------------------------------------------ steps

    def step(self, closure: Callable | None = None):
        """One step. closure: evaluates the model, runs backward and returns the loss, which step then returns.

        With a GradScaler, gradients are unscaled as they are read and a step with non-finite ones is skipped.
        Parameters whose update last_backward() has submitted are waited for, and not updated again. A step() that
        raises StagehandOOMError in the middle is finished by the next one in the same way.
        """
        self._refuse_inside("step()")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with unseen(), self._lock, torch.no_grad():
            self._check_usable()
            self._check_early()
            scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
            if scale is not None or found_inf is not None:
                self._scaled = True
                if any(by_hook for *_, by_hook in self._early.values()):
                    raise RuntimeError(
                        "last_backward() has updated parameters with gradients that GradScaler had scaled: "
                        "run backward without last_backward() when a GradScaler is used"
                    )
            if found_inf is None or not float(found_inf):
                self._update_rest(1.0 if scale is None else 1.0 / float(scale))
        return loss

    def _update_rest(self, factor: float) -> None:
        work = []
        for number, group in enumerate(self.param_groups):
            _check_group(group, number)
            todo = [p for p in group["params"] if p.grad is not None and p not in self._early]
            for param in todo:
                self._check_gradient(param)
            work.append((group, todo))
        if self.max_grad_norm is not None:
            grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
            norm = clip.total_norm(self._core, grads) * abs(factor)
            self.grad_norm = torch.tensor(norm, dtype=torch.float32, device="cpu")
            factor *= clip.coefficient(norm, self.max_grad_norm)
        ready = [(group, [(param, self._ready(param), flat.on_host(param)) for param in todo]) for group, todo in work]
        try:
            for group, items in ready:
                numbers = self._numbers(group, factor)
                for param, state, host in items:
                    if host:
                        self._submit(numbers, param, state)
                        self._note_early(param, by_hook=False)  # should another fail, the next step() goes on
            for group, items in ready:
                there = [(param, state) for param, state, host in items if not host]
                self._update_plain(group, there, factor)
        finally:
            self.synchronize()
        self._early.clear()

    def _numbers(self, group: dict, factor: float) -> dict:
        """What the core is told for all parameters of a group."""
        return {
            "lr": float(group["lr"]),
            "beta1": float(group["betas"][0]),
            "beta2": float(group["betas"][1]),
            "eps": float(group["eps"]),
            "weight_decay": float(group["weight_decay"]),
            "maximize": group["maximize"],
            "grad_scale": factor,
            "stochastic_rounding": self._settings["stochastic_rounding"],
            "seed": self._settings["seed"],
        }

    def _submit(self, numbers: dict, param: torch.Tensor, state: dict) -> None:
        data = param.detach()
        grad = flat.laid_out_like(param.grad.detach(), data, param.grad.dtype)
        mean = state.get("exp_avg")
        if mean is None:
            memory = {"state": self._regions[param].state}
        else:
            master = state.get("master_param")
            memory = {
                "exp_avg": mean.data_ptr(),
                "exp_avg_sq": state["exp_avg_sq"].data_ptr(),
                "moment_dtype": flat.DTYPES[mean.dtype],
                "master": 0 if master is None else master.data_ptr(),
            }
        self._in_flight.append(param)
        flat.mark_written(param)  # now, for autograd's checks, and again when it is done
        self._core.submit(
            (data, grad, *_parts(state).values()),
            count=data.numel(),
            param=data.data_ptr(),
            param_dtype=flat.DTYPES[data.dtype],
            grad=grad.data_ptr(),
            grad_dtype=flat.DTYPES[grad.dtype],
            step=int(state["step"]) + 1,
            stream=self._position(param),
            **memory,
            **numbers,
        )
        state["step"] += 1

    def _update_plain(self, group: dict, items: list, factor: float) -> None:
        if not items:
            return
        seeds = None
        if self._settings["stochastic_rounding"]:
            seeds = [(self._settings["seed"], self._position(param)) for param, _ in items]
        steps = [int(state["step"]) for _, state in items]
        try:
            for done in plain.update(group, items, factor, seeds):
                for param in done:
                    self._note_early(param, by_hook=False)
        except BaseException as error:
            if any(p not in self._early and int(state["step"]) != n for (p, state), n in zip(items, steps)):
                self._broken = f"an update failed in the middle: {str(error) or type(error).__name__}"
            raise

    def synchronize(self) -> None:
        """Waits until the updates that were submitted are done. Raises TransferError when the state's file could
        not be read or written; then load a state before the next step."""
        with unseen(), self._lock:
            done, self._in_flight = self._in_flight, []
            if not done:
                return
            try:
                self._core.wait()
            except Exception as error:
                self._broken = f"an update failed: {error}"
                raise
            finally:
                for param in done:
                    flat.mark_written(param)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch.optim.Optimizer's. Refused inside last_backward()."""
        self._refuse_inside("zero_grad()")
        with self._lock:
            self.synchronize()
            self._early.clear()
        super().zero_grad(set_to_none)

    def clip_grad_norm_(self, max_norm: float, error_if_nonfinite: bool = False) -> torch.Tensor:
        """Scales the gradients of all groups to a 2-norm of at most max_norm and returns the norm before, as
        stagehand.optim.clip_grad_norm_ does. Not after last_backward(), whose updates are made."""
        self._refuse_inside("clip_grad_norm_()")
        if observed():
            with aside():
                return self.clip_grad_norm_(max_norm, error_if_nonfinite)
        self._check_early()
        if self._early:
            raise RuntimeError("updates have used these gradients already, those of last_backward() or of a step() "
                               "that failed: clip before, or not at all")
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        with torch.no_grad():
            return clip.clip(self._core, grads, max_norm, error_if_nonfinite)

    # ------------------------------------------------------------------ overlap

    @contextlib.contextmanager
    def last_backward(self):
        """Updates host parameters while backward goes on:

            with opt.last_backward():
                loss.backward()
            opt.step()

        For the last backward before step(); earlier micro-batches run outside. Inside, a gradient is final when
        it has been accumulated, and its parameter's update is submitted there and then, with the learning rate
        of that moment. Leaving the block waits for them; step() then updates the others (those on a device, or
        whose gradient came from an earlier backward alone). Refused: max_grad_norm and GradScaler, which need
        all gradients before the first update; step(), zero_grad() and the like inside; a gradient that is accumulated
        twice inside (reentrant checkpoints do that). A graph that reads a weight after that weight's gradient is
        final fails as after any write in place. Where torch.distributed runs with several ranks no gradient is final
        before backward has ended, and step() makes all updates.

        When an exception leaves the block, the updates that were submitted are finished first, and the next step()
        does not repeat them; it updates the other parameters that have a gradient. zero_grad() forgets this:
        the step is then over, with some parameters updated and others not.
        """
        with unseen(), self._lock:
            self._refuse_inside("last_backward()")
            self._check_usable()
            if self.max_grad_norm is not None:
                raise RuntimeError("max_grad_norm needs all gradients first: do not use last_backward() with it")
            if self._scaled:
                raise RuntimeError("a GradScaler unscales gradients after backward: do not use last_backward() with it")
            self._check_early()
            if self._early:
                raise RuntimeError("last_backward() was used already, or a step() failed: call step(), or zero_grad(), "
                                   "before the next")
            owners = {}
            groups = [] if _has_other_ranks() else self.param_groups
            for number, group in enumerate(groups):
                _check_group(group, number)
                owners.update({p: group for p in group["params"] if p.requires_grad and p.is_leaf and flat.on_host(p)})
            self._inside = owners
        with unseen():
            handles = [param.register_post_accumulate_grad_hook(self._gradient_is_final) for param in owners]
        try:
            yield
        finally:
            self._inside = None
            for handle in handles:
                handle.remove()
            self.synchronize()

    def confirm_gradients(self) -> None:
        """Says that the gradients which last_backward() has used hold their values still, though something has written
        them since, as clipping at infinity does, which multiplies by one. step() then does not refuse them."""
        self._refuse_inside("confirm_gradients()")
        with self._lock:
            for param, (grad, _, by_hook) in list(self._early.items()):
                if param.grad is grad:
                    self._note_early(param, by_hook)

    def _gradient_is_final(self, param: torch.Tensor) -> None:
        with unseen(), self._lock, torch.no_grad():
            group = self._inside.get(param) if self._inside is not None else None
            if group is None or param.grad is None:
                return
            if param in self._early:
                raise RuntimeError(
                    f"the gradient of {self._describe(param)} was accumulated twice inside last_backward(), after its "
                    "update: run one backward inside, and use checkpoints with use_reentrant=False"
                )
            self._check_gradient(param)
            self._submit(self._numbers(group, 1.0), param, self._ready(param))
            self._note_early(param, by_hook=True)

    def _note_early(self, param: torch.Tensor, by_hook: bool) -> None:
        self._early[param] = (param.grad, param.grad._version, by_hook)

    def _check_early(self) -> None:
        """Forgets early updates whose gradient is gone; refuses gradients that were changed after their update."""
        for param, (grad, version, _) in list(self._early.items()):
            if param.grad is not grad:
                del self._early[param]
            elif grad._version != version:
                raise RuntimeError(
                    f"the gradient of {self._describe(param)} was changed after its update had used it: clip, "
                    "scale and accumulate before that, or call zero_grad()"
                )

    # ------------------------------------------------------------------ refusals

    def _refuse_inside(self, what: str) -> None:
        if getattr(self, "_inside", None) is not None:
            raise RuntimeError(f"{what} cannot be called inside last_backward(): leave the block first")

    def _check_usable(self) -> None:
        if self._broken:
            raise RuntimeError(f"{self._broken}. Load weights and optimizer state, then go on")


def _parts(state: dict) -> dict[str, torch.Tensor]:
    return {key: state[key] for key in ("exp_avg", "exp_avg_sq", "master_param") if key in state}


def _own(tensor: torch.Tensor, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy that shares no memory with the state that was loaded."""
    return torch.empty_like(like, dtype=dtype, requires_grad=False).copy_(tensor)


def _check_and_keep_dtypes(optimizer: OffloadedAdamW, state_dict: dict) -> dict:
    """A pre-hook of load_state_dict, the last one. What cannot be used is refused before anything has changed;
    tensors pass through the rest of it as they are."""
    if any(group.get("amsgrad") for group in state_dict["param_groups"]):
        raise ValueError("the state is of an optimizer with amsgrad, which OffloadedAdamW does not have: load it into "
                         "torch.optim.AdamW")
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number, param in zip(numbers, params):
        entry = state_dict["state"].get(number, {})
        for key in ("exp_avg", "exp_avg_sq") if entry else ():
            shape = list(entry[key].shape) if key in entry else "no value"
            if shape != list(param.shape):
                raise ValueError(f"the '{key}' to load for {optimizer._describe(param)} has another shape: {shape}")
    kept = {
        key: {name: _Kept(value) if isinstance(value, torch.Tensor) else value for name, value in entry.items()}
        if isinstance(entry, dict) else entry
        for key, entry in state_dict["state"].items()
    }  # fmt: skip
    return {**state_dict, "state": kept}


def _has_other_ranks() -> bool:
    """Whether the gradients of other processes may be added to this one's."""
    dist = torch.distributed
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _check_group(group: dict, number: int) -> None:
    if group.get("amsgrad"):
        raise ValueError("OffloadedAdamW has no amsgrad: use torch.optim.AdamW, or a state without it")
    group.setdefault("maximize", False)
    beta1, beta2 = (float(beta) for beta in group["betas"])
    checks = (
        ("lr", float(group["lr"]), math.inf),
        ("betas[0]", beta1, 1.0),
        ("betas[1]", beta2, 1.0),
        ("eps", float(group["eps"]), math.inf),
        ("weight_decay", float(group["weight_decay"]), math.inf),
    )
    for name, value, limit in checks:
        if not 0.0 <= value < limit:
            raise ValueError(f"{name} of group {number} is {value}: it should be at least 0 and below {limit}")
