"""PEFT's adapters of a managed model are merged where its masters are.

An adapter is on the device, beside the weight that a pass sees, and the weight's master is on the host. PEFT adds the
one to the other (`merge`, `unmerge`; diffusers' fuse_lora). While it does so, what its layer has on the device is on
the host.
"""

from __future__ import annotations

import contextlib
import functools
import sys

from .. import sessions
from .._torch import torch
from . import standins

METHODS = ("merge", "unmerge")


def stand_in(modules) -> None:
    """The classes of tuners among the modules merge so from now on."""
    base = getattr(sys.modules.get("peft.tuners.tuners_utils"), "BaseTunerLayer", None)
    if base is None:
        return
    with standins.lock:
        for kind in {type(module) for module in modules if isinstance(module, base)}:
            for name in METHODS:
                owner, own = standins.owner_of(kind, name)
                if callable(own) and not standins.stands(own):
                    standins.replace(owner, name, _beside_masters(own), own)


def _beside_masters(own):
    @functools.wraps(own)
    def method(layer, *args, **kwargs):
        session = _session_of(layer)
        if session is None:
            return own(layer, *args, **kwargs)
        # A forward whose adapters are switched off takes what was merged out of the weights.
        with session.writes.writing() if session.local.depth else contextlib.nullcontext(), _on_host(session, layer):
            return own(layer, *args, **kwargs)

    return method


def _session_of(layer):
    """The session that streams one of the layer's weights, or None."""
    for session in sessions.opened():
        with session.local.masters():
            if not session.closed and any(session.writes.entry_of(param) is not None for param in layer.parameters()):
                return session
    return None


@contextlib.contextmanager
def _on_host(session, layer):
    """Inside it all parameters and buffers of the layer are on the host. Writes to them stay. For use at rest, or
    inside `writing()`."""
    tensors = [t for t in (*layer.parameters(), *layer.buffers())
               if session.writes.entry_of(t) is None and not t.is_meta]
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
