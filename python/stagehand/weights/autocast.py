"""Casts of weights that autocast keeps.

While a region of autocast lasts, PyTorch keeps the cast that it makes of a leaf that takes a gradient. Each later use
takes that cast, and the gradients of all uses are added in its dtype before they are cast back, once. A managed weight
is no leaf inside calls, so that nothing keeps it on the device: each use casts it again. The same values come out as
long as the weight is not written. Here is what makes the same gradients, and refuses the rest.

    one use       Upload -> Gate -> master                                  as without autocast
    more uses     Upload -> Gate ─┐
                  Upload -> Gate -> Added (sums in the lower dtype) ─┐
                  Upload (the first use) ──────────────────────────> Gate (rounds) -> master

A region is known by the cast of a leaf of our own, which autocast keeps as it keeps those of weights: an object that
the node of that cast holds dies when autocast drops it. PyTorch has one such store for all threads.
"""

from __future__ import annotations

import weakref

from torch.utils._python_dispatch import is_traceable_wrapper_subclass as wraps

from .._torch import torch, transforming
from ..errors import StagehandError
from . import grads
from .saved import hide_from_hooks

nn = torch.nn
F = nn.functional

# Modules of torch whose own forward casts all of their weights.
MODULES = {nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
           nn.LSTMCell, nn.GRUCell, nn.RNNCell, nn.LSTM, nn.GRU, nn.RNN}
# One whose own forward casts them or views of them, of which autocast keeps no cast: as it is called.
MIXED = nn.MultiheadAttention
# And some whose own forward casts none.
NEVER = {nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d}
# Operators -> positions and names of the arguments that they cast as they are given them; None: all.
OPERATORS = dict.fromkeys((
    F.linear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d, torch.mm,
    torch.matmul, torch.bmm, torch.mv, torch.addmm, torch.addmv, torch.addbmm, torch.baddbmm, torch.Tensor.mm,
    torch.Tensor.matmul, torch.Tensor.bmm, torch.Tensor.mv, torch.Tensor.addmm, torch.Tensor.addmv,
    torch.Tensor.__matmul__, torch.Tensor.__rmatmul__,
))
OPERATORS[F.multi_head_attention_forward] = {11, 12, "out_proj_weight", "out_proj_bias", "q_proj_weight",
                                             "k_proj_weight", "v_proj_weight"}
_PACKED = {5, 6}  # of that: in_proj_weight, in_proj_bias

_ABOUT = "stagehand"  # key of a node's metadata
_leaves: dict[torch.device, tuple] = {}
_last: dict[torch.device, weakref.ref] = {}  # the region that was found last


class Use:
    """Uses of one weight in a region. state: `_state` at the first. count: of those of which gradients are recorded.
    gate: through which the gradient of the first of these goes. added: the end of the others'."""

    __slots__ = ("entry", "state", "dtype", "gate", "added", "quiet", "count")

    def __init__(self, entry, state: tuple, dtype: torch.dtype) -> None:
        self.entry = weakref.ref(entry)
        self.state = state
        self.dtype = dtype
        self.gate = self.added = None
        self.quiet = False  # autocast keeps a cast that was made where no gradients are recorded
        self.count = 0


class Region:
    """Lives as long as autocast keeps what it has cast."""

    __slots__ = ("uses", "__weakref__")

    def __init__(self) -> None:
        self.uses: dict[int, Use] = {}  # by id(entry)


def region(device: torch.device) -> Region | None:
    """The region that this thread is in; None: autocast keeps no cast."""
    if not (torch.is_autocast_enabled(device.type) and torch.is_autocast_cache_enabled()):
        return None
    if transforming() or torch.is_inference_mode_enabled() and not INFERENCE_KEEPS:
        return None
    last = _last.get(device)
    found = last() if last is not None else None
    return found if found is not None else _find(device)


def _quiet_takes_gradient() -> bool:
    """Whether a cast that is kept from a use without gradients serves one with gradients as if it had been made there.
    In some versions of PyTorch the weight gets none."""
    leaf = torch.ones(1, 1, device="cpu", requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            torch.mm(leaf, leaf)
        return torch.mm(leaf, torch.ones(1, 1, device="cpu")).requires_grad


def _inference_keeps() -> bool:
    """Whether casts are kept under inference mode, too, as in PyTorch 2.4 to 2.6."""
    leaf, one = torch.ones(1, 1, device="cpu", requires_grad=True), torch.ones(1, 1, device="cpu")
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        before = torch.mm(leaf, one)
        leaf.mul_(2)
        return torch.equal(torch.mm(leaf, one), before)


with hide_from_hooks(), torch.inference_mode(False), torch.enable_grad():
    QUIET_TAKES_GRADIENT = _quiet_takes_gradient()
    INFERENCE_KEEPS = _inference_keeps()


def _find(device: torch.device) -> Region:
    if device not in _leaves:
        with torch.inference_mode(False):
            _leaves[device] = (torch.ones(1, 1, device=device, requires_grad=True), torch.ones(1, 1, device=device))
    with hide_from_hooks(), torch.inference_mode(False), torch.enable_grad():
        node = torch.mm(*_leaves[device]).grad_fn.next_functions[0][0]
    found = node.metadata.get(_ABOUT)
    if found is None:
        found = node.metadata[_ABOUT] = Region()
    _last[device] = weakref.ref(found)
    return found


def kept(master: torch.Tensor) -> bool:
    """Whether autocast would keep a cast of it: not of a tensor around others, which casts itself."""
    return not wraps(master) and master.requires_grad and master.dtype is torch.float32 and master.is_leaf


def _state(session, entry) -> tuple:
    """Of the weight's bytes: another one after each write that was seen, by its version or by the core's samples of its
    image (`.data.mul_()` leaves no version)."""
    found = session.writes.entry_of(entry.param)
    seen = found is not None and found[0].index >= 0
    return entry.state(), session.core.unit_stats(found[0].index)["image_hash"] if seen else 0


def use(where: Region, session, entry) -> Use:
    """A use of the weight that casts it, of which there is a lease. Raises StagehandError where PyTorch would go on
    with the values from before a write."""
    found, state = where.uses.get(id(entry)), _state(session, entry)
    if found is None or found.entry() is not entry:
        found = where.uses[id(entry)] = Use(entry, state, torch.get_autocast_dtype(session.target.torch.type))
    elif found.state != state:
        raise StagehandError(
            f"{entry.name} was written inside a region of torch.autocast in which it had been used: PyTorch goes on "
            f"with the cast from before the write until the region ends. Leave the region before the write, call "
            f"torch.clear_autocast_cache() behind it, or use torch.autocast(..., cache_enabled=False)",
            object=entry.name)
    return found


def use_quietly(where: Region, session, entry) -> None:
    """As `use`, where no gradients are recorded."""
    found = use(where, session, entry)
    found.quiet = found.quiet or found.gate is None  # else autocast has a cast from a recorded use


def upload(where: Region, session, entry, master: torch.Tensor, copy: torch.Tensor) -> torch.Tensor | None:
    """As `grads.upload`, for a use that casts. None: it takes no gradient."""
    found = use(where, session, entry)
    if found.quiet and not QUIET_TAKES_GRADIENT:
        return None
    found.count += 1
    if found.gate is None:
        made, found.gate = grads.upload_of_use(session, entry, master, copy, found)
        return made
    if found.added is None:
        found.added = Added.apply(found.gate, found.dtype)
    return grads.upload_of_use(session, entry, found.added, copy, None)[0]


def cast_for_steps(weight: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A recurrent layer's weight as its operator uses it at each step of time, which on the CPU casts it each time
    unless autocast keeps the cast. cuDNN's operators take it once."""
    return weight.to(torch.get_autocast_dtype("cpu")) if device.type == "cpu" and region(device) is not None else weight


def positions(function, args: tuple, kwargs: dict):
    """The arguments that an operator of `OPERATORS` casts as it is given them, as there."""
    which = OPERATORS[function]
    if function is not F.multi_head_attention_forward or kwargs.get("use_separate_proj_weight"):
        return which
    query, key, value = args[:3]
    return which | _PACKED if query is key and key is value and query.dim() == 3 else which  # else it takes views


class Added(torch.autograd.Function):
    """Autograd adds what comes to it, in the dtype of the cast."""

    @staticmethod
    def forward(ctx, gate: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return grads.stand_in(gate.shape, dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad.to(torch.float32), None
