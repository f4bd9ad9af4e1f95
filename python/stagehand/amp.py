"""Gradient scaling for gradients on the host.

torch's GradScaler keeps its scale on the device of the loss and copies it to the device of the gradients without
waiting (`non_blocking=True`). Gradients of streamed weights are on the host, where such a copy is read before it has
come: gradients are unscaled by what was in that memory before, and infinities are missed. `GradScaler` here waits;
and while a model with trainable streamed weights is open on a real device, torch's own scalers wait too. Fused
optimizers copy the scale, and the mark of an infinity, in the same way in their step; `settle` has both on the host
before that.
"""

from __future__ import annotations

import functools
import threading

from torch.amp import grad_scaler as _theirs

from ._torch import torch

_lock = threading.Lock()
_users = 0  # how many want torch's scalers to wait
_original = _ours = None  # _MultiDeviceReplicator.get as it was, and what stands for it; None while nothing does


class GradScaler(torch.amp.GradScaler):
    """As torch.amp.GradScaler, with the same arguments; right for gradients on the host. It waits for the scale once
    each time that an optimizer with such gradients is unscaled. Fused optimizers of host parameters are unscaled
    before their step, since they would read the scale without waiting."""

    def _unscale_grads_(self, *args, **kwargs):
        install()
        try:
            return super()._unscale_grads_(*args, **kwargs)
        finally:
            remove()

    def step(self, optimizer: torch.optim.Optimizer, *args: object, **kwargs: object):
        if not (self.is_enabled() and self._reads_scale_itself(optimizer)):
            return super().step(optimizer, *args, **kwargs)
        before = optimizer.__dict__.get("_step_supports_amp_scaling", _ABSENT)
        optimizer._step_supports_amp_scaling = False
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            if before is _ABSENT:
                del optimizer._step_supports_amp_scaling
            else:
                optimizer._step_supports_amp_scaling = before

    def _reads_scale_itself(self, optimizer) -> bool:
        return getattr(optimizer, "_step_supports_amp_scaling", False) and _has_host_parameters(optimizer)


def _has_host_parameters(optimizer) -> bool:
    return any(param.device.type == "cpu" for group in optimizer.param_groups for param in group["params"])


_ABSENT = object()


def _synchronize(device: torch.device) -> None:
    torch.cuda.current_stream(device).synchronize()


def install() -> None:
    """torch's scalers wait for the replicas that they make on the host, until as many `remove()`."""
    global _users, _original, _ours
    with _lock:
        _users += 1
        if _ours is None:
            _original = _theirs._MultiDeviceReplicator.get
            _theirs._MultiDeviceReplicator.get = _ours = _waiting(_original)


def settle(optimizer: torch.optim.Optimizer) -> None:
    """Before a step of an optimizer that uses the scale itself: a scaler has given it the scale and the mark of an
    infinity, which go to the host where a parameter is there. The mark is the sum of those of the devices that have
    parameters, and PyTorch's kernels skip a step for a mark of 1 alone."""
    if not _has_host_parameters(optimizer):
        return
    for name, most in (("grad_scale", None), ("found_inf", 1.0)):
        given = getattr(optimizer, name, None)
        if given is not None:
            given = given.to("cpu")
            setattr(optimizer, name, given if most is None else given.clamp(max=most))


def remove() -> None:
    """The counterpart of `install`; the last one puts torch's function back, unless somebody else has replaced it
    meanwhile: then ours stays below theirs, where it does no harm."""
    global _users, _original, _ours
    with _lock:
        _users -= 1
        if _users == 0 and _theirs._MultiDeviceReplicator.get is _ours:
            _theirs._MultiDeviceReplicator.get = _original
            _original = _ours = None


def _waiting(get):
    @functools.wraps(get)
    def waiting(self, device):
        made = len(self._per_device_tensors)
        replica = get(self, device)
        source = self.master.device
        if len(self._per_device_tensors) != made and replica.device.type == "cpu" and source.type != "cpu":
            _synchronize(source)
        return replica

    return waiting
