"""The dictionary that a managed module has for its `_parameters`: masters at rest, device copies inside a call."""

from __future__ import annotations

from collections.abc import MutableMapping

from .. import _core
from .._torch import MEMBERS
from .guarded import refuse_loss
from .units import full_name

_get = dict.__getitem__


class Masters(_core.Masters):
    """The `_parameters` of a managed module; see hooks.py."""

    __slots__ = ("plan", "seat")

    def __init__(self, items, plan) -> None:
        super().__init__(items)
        self.plan = plan
        self.seat = plan.seat

    def shown(self, key):
        """A managed weight, where that is not what the call's frame has (_core/masters.c)."""
        plan = self.plan
        if not plan.at_rest():
            return plan.on_device(key)
        plan.session.casts.settle()
        return _get(self, key)

    def __iter__(self):  # also so that dict(self) and {**self} ask for each item
        return super().__iter__()

    def get(self, key, default=None):
        return self[key] if key in self else default

    def items(self):
        if self.plan.lists_masters():
            self.plan.session.casts.settle()
            return super().items()
        return ((key, self.plan.listed(key)) for key in list(self))

    def values(self):
        if self.plan.lists_masters():
            self.plan.session.casts.settle()
            return super().values()
        return (self.plan.listed(key) for key in list(self))

    def __setitem__(self, key, value):
        refuse_loss(full_name(self.plan.name, key), dict.get(self, key), value)
        super().__setitem__(key, self.plan.assigned(key, value))

    def __delitem__(self, key):
        super().__delitem__(key)
        self.plan.assigned(key, None)

    # dict's own of these would pass the two above by
    pop, update, setdefault = MutableMapping.pop, MutableMapping.update, MutableMapping.setdefault

    def popitem(self):
        for key in reversed(list(self)):
            return key, self.pop(key)
        raise KeyError("popitem(): dictionary is empty")

    def clear(self):
        for key in list(self):
            del self[key]

    def __ior__(self, other):
        self.update(other)
        return self

    def copy(self):
        return MEMBERS((key, self[key]) for key in self)

    def plain(self) -> dict:
        """The masters as a plain module has them."""
        return MEMBERS(dict.items(self))

    def __deepcopy__(self, memo):
        import copy

        return copy.deepcopy(self.plain(), memo)

    def __reduce__(self):
        return MEMBERS, (list(dict.items(self)),)
