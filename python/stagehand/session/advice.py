"""What the refusal of a lease adds to the core's error: why so much is on the device at once, and what to do."""

from __future__ import annotations

from .. import _core
from .._torch import differentiating, torch
from ..errors import StagehandOOMError, some_of

nn = torch.nn


def advised(session, error: StagehandOOMError, outside: tuple | None = None) -> StagehandOOMError:
    """The error to raise. outside: (plan, key) of a weight that was read from outside its module's forward."""
    why = _of_the_fast_path(session, outside[0]) if outside else ""
    held = _of_what_is_held(session, outside)
    if not why:
        why = ". ".join(part for part in (held, _of_autograd()) if part)
        why += _whatever_is_held(session) if why and error.status == "BUDGET_TOO_SMALL" else ""
    return StagehandOOMError(f"{error}. {why}", error.status, error.object, error.native_code) if why else error


def _of_the_fast_path(session, plan) -> str:
    """Of nn.TransformerEncoderLayer, one operator of torch takes all weights for inference."""
    for name, layer in session.model.named_modules():
        if not isinstance(layer, nn.TransformerEncoderLayer) or layer.training:
            continue
        inside = {id(part) for part in layer.modules()}
        if id(plan.module) in inside:
            plans = [other for other in session.plans.values() if id(other.module) in inside]
            need, least = session.regions.holding(plans)
            if least <= session.budget:
                return ""
            size = _core.format_size
            return (f"'{name or type(layer).__name__}' is an nn.TransformerEncoderLayer on torch's fast path, which "
                    f"takes all of its weights at once and needs {size(need)} for them: a budget of {least} bytes "
                    f"({size(least)}) has "
                    "that room. Or turn that path off with torch.backends.mha.set_fastpath_enabled(False), which "
                    "changes the last bits of results")
    return ""


def _whatever_is_held(session) -> str:
    """Nobody knows yet what the rest of the pass is going to hold."""
    least = session.regions.holding_all()
    size = _core.format_size(least)
    return f". However much the rest of the pass holds beside it, a budget of {size} ({least} bytes) works"


def _of_what_is_held(session, outside: tuple | None) -> str:
    local = session.local
    if outside is None and not local.outside.alive():
        return ""
    held = [lease.entry.name for lease in local.outside.alive()]
    held += [other.entry_of(name).name for other, frame in local.frames.items() for name in frame]
    names = list(dict.fromkeys(held))
    if not names:
        return ""
    what = ""
    if outside is not None:
        what = f"{outside[0].entry_of(outside[1]).name} is read from outside its module's forward, while "
    return (f"{what}{some_of(names)} are on the device because the code that runs holds them. Let it read one after "
            "the other, or raise the budget")


def _of_autograd() -> str:
    if not torch.is_grad_enabled():
        return ""
    if differentiating():  # where PyTorch calls no hooks for what is saved
        return ("torch.func's grad, vjp, jacrev and the like keep the weights of all layers on the device until they "
                "return: raise the budget to hold them, or use autograd itself (backward(), torch.autograd.grad), "
                "which brings weights back as backward needs them")
    return ("Autograd keeps the weights of the layers before for backward: run under torch.no_grad(), checkpoint "
            "blocks (torch.utils.checkpoint with use_reentrant=False), or raise the budget")
