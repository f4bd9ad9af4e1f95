"""Libraries' code that computes weights of a managed model from several tensors does so where its masters are.

An adapter is on the device, beside the weight that a pass sees, and the weight's master is on the host. PEFT adds the
one to the other (`merge`, `unmerge`; diffusers' fuse_lora). torch.nn.utils does the like when a norm or a pruning mask
is removed. While such code runs, what its layer has on the device is on the host.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys

from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from . import sessions, standins
from ._torch import torch

METHODS = ("merge", "unmerge")
REMOVED = (BasePruningMethod, SpectralNorm, WeightNorm)  # by a method `remove`


def stand_in(modules) -> None:
    """The classes of tuners among the modules merge so from now on, and torch's norms and masks are removed so."""
    base = getattr(sys.modules.get("peft.tuners.tuners_utils"), "BaseTunerLayer", None)
    tuners = {type(module) for module in modules if isinstance(module, base)} if base is not None else ()
    with standins.lock:
        for kind, name in [*itertools.product(tuners, METHODS), *((kind, "remove") for kind in REMOVED)]:
            owner, own = standins.owner_of(kind, name)
            if callable(own) and not standins.stands(own):
                standins.replace(owner, name, _beside_masters(own), own)


def _beside_masters(own):
    @functools.wraps(own)
    def method(*args, **kwargs):
        layer = next((arg for arg in args if isinstance(arg, torch.nn.Module)), None)
        session = _session_of(layer) if layer is not None else None
        if session is None:
            return own(*args, **kwargs)
        # A forward whose adapters are switched off takes what was merged out of the weights.
        with session.writing() if session.local.depth else contextlib.nullcontext(), _on_host(session, layer):
            return own(*args, **kwargs)

    return method


def _session_of(layer):
    """The session that streams one of the layer's weights, or None."""
    for session in sessions.opened():
        with session.local.masters():
            if not session.closed and any(session.entry_of(param) is not None for param in layer.parameters()):
                return session
    return None


@contextlib.contextmanager
def _on_host(session, layer):
    """Inside it all parameters and buffers of the layer are on the host. Writes to them stay. For use at rest, or
    inside `writing()`."""
    tensors = [t for t in (*layer.parameters(), *layer.buffers()) if session.entry_of(t) is None and not t.is_meta]
    with torch.inference_mode(False), torch.no_grad():
        before = [(tensor, tensor.data) for tensor in tensors]
        for tensor, data in before:
            tensor.data = data.clone() if data.device.type == "cpu" else data.cpu()
    try:
        yield
    finally:
        with torch.inference_mode(False), torch.no_grad():
            for tensor, data in before:
                if tensor.shape == data.shape and tensor.dtype == data.dtype:
                    data.copy_(tensor.data)
                    tensor.data = data
