"""The device that a managed model answers with.

Libraries ask a model for the device on which its inputs belong. diffusers' and transformers' models have a property
`device` for that, which reads the first parameter, and pipelines, generate(), Trainer and PEFT go by it. The first
parameter of a managed model may be a master on the host. While such a model is managed, properties named
`device` of its modules' classes therefore answer with the device on which it runs. The same holds for the functions
of these libraries that read the first parameter. `next(model.parameters()).device` says where the master is.

A class gets its own property back when the last model that needs the answer has ended. Models that are not managed get
the property's own answer.
"""

from __future__ import annotations

import functools
import weakref

from .. import sessions
from .._torch import torch
from . import ranks, refusals, standins, tuners

FUNCTION = "get_parameter_device"  # what a library calls the function that reads the first parameter
LIBRARIES = ("diffusers.models.modeling_utils", "transformers.modeling_utils")  # modules that define it

_answers: dict[int, tuple] = {}  # id(module) -> weakrefs of it and of its Answer; the id may be another module's by now
_watching: weakref.WeakSet[Answer] = weakref.WeakSet()
_nobody = type(None)  # called, it gives None


class Answer:
    """Modules of `model` answer with a device from now on, until `end` or until nobody holds this object. device:
    callable that gives a torch.device, or None for their own answer."""

    def __init__(self, model: torch.nn.Module, device) -> None:
        self.device = device
        modules = list(model.modules())
        with standins.lock:
            _watching.add(self)
            for module in modules:
                _answers[id(module)] = weakref.ref(module), weakref.ref(self)
            _replace_properties(modules)
            standins.replace_functions([*((name, FUNCTION, _function) for name in LIBRARIES), *refusals.functions()])
            tuners.stand_in(modules)
            refusals.stand_in()
            ranks.stand_in()

    def end(self) -> None:
        """May be called again."""
        with standins.lock:
            _watching.discard(self)
            for ident in [ident for ident, (_, answer) in _answers.items() if answer() in (self, None)]:
                del _answers[ident]
            if not _watching:
                standins.put_back()


def _instead(module: torch.nn.Module, found):
    """The answer of a module. found: its own."""
    if type(found) is not torch.device or found.type != "cpu":
        return found
    known, answer = (ref() for ref in _answers.get(id(module), (_nobody, _nobody)))
    if answer is not None and known is module:
        return answer.device() or found
    first = next(module.parameters(), None)
    for session in sessions.opened():
        if session.writes.entry_of(first) is not None and not session.closed:
            return session.target.torch
    return found


def _property(own: property) -> property:
    """The stand for a property `device` of a class."""

    getter = own.fget  # compilers of PyTorch 2.4 follow a function, and not a property's attribute

    @functools.wraps(getter)
    def device(module):
        found = getter(module)
        if torch.compiler.is_compiling():  # a weight that compiled code sees is on the device
            return found
        return _instead(module, found)

    return property(device, own.fset, own.fdel, own.__doc__)


def _replace_properties(modules: list) -> None:
    for kind in {type(module) for module in modules}:
        owner, own = standins.owner_of(kind, "device")
        if isinstance(own, property) and own.fget is not None and not standins.stands(own):
            standins.replace(owner, "device", _property(own), own)


def _function(own):
    """The stand for a function that reads the first parameter of a module."""

    @functools.wraps(own)
    def device(parameter):
        return _instead(parameter, own(parameter))

    return device
