"""How a module comes to see its weights on the device.

Each managed module has two `_parameters` dictionaries: the masters (a `Masters`), and for the time of one
call of its forward one with tensors over the leased place. Only the dictionary is swapped, never
`param.data`: the Parameter objects, and with them optimizers and state_dict, stay as they were. The lease is
the life of the tensors' storage: whatever still holds a view of the weight holds the place.

The swap is made by a wrapper of `forward` with try/finally, not by module hooks: those miss exceptions that
are not Exception, recomputation under checkpointing, and calls compiled before they were added.
"""

from __future__ import annotations

import threading
import types

from ._torch import torch


class Local(threading.local):
    """Of each thread: how deep it is in calls of the managed model. 0 = at rest."""

    depth = 0


def plain_forward(module):
    """`module.forward` as its class defines it, for copies of a managed module."""
    return types.MethodType(type(module).forward, module)


def _nothing():
    return None


class Masters(dict):
    """The masters' dictionary of a managed module. At rest it is a plain dictionary of the Parameters on
    the host. Inside a call of the model, reading a managed weight from outside its own module's forward
    (`pos.weight[:n]`, `attn.out_proj.weight`) gives the device's copy, leased while it is held."""

    __slots__ = ("plan",)

    def __init__(self, items, plan: "ModulePlan") -> None:
        super().__init__(items)
        self.plan = plan

    def __getitem__(self, key):
        plan = self.plan
        if key in plan.managed and plan.session.local.depth:
            return plan.session.lease_one(plan, key)
        return super().__getitem__(key)

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        self.plan.replaced(key, value)

    def __delitem__(self, key):
        super().__delitem__(key)
        self.plan.replaced(key, None)

    def master(self, key):
        return super().__getitem__(key)

    def __deepcopy__(self, memo):
        import copy

        return copy.deepcopy(dict(self.items()), memo)

    def __reduce__(self):
        return dict, (list(self.items()),)


class ModulePlan:
    """What one module needs for a call: managed key -> (unit, entry)."""

    def __init__(self, session, name: str, module) -> None:
        self.session = session
        self.name = name
        self.module = module
        self.managed: dict[str, tuple] = {}
        self.masters: Masters | None = None
        self.original = None  # the `_parameters` object to put back
        self.flat_names = None  # parameter names behind an RNN's `_flat_weights`

    def install(self) -> None:
        module = self.module
        self.original = module._parameters
        self.masters = Masters(self.original.items(), self)
        module.__dict__["_parameters"] = self.masters
        flat = module.__dict__.get("_flat_weights")
        if flat is not None:
            self.flat_names = list(module._flat_weights_names)

    def remove(self) -> None:
        self.original.clear()
        for key, value in self.masters.items():
            self.original[key] = value
        self.module.__dict__["_parameters"] = self.original
        self.refresh_flat(self.original)

    def replaced(self, key: str, value) -> None:
        """The module was given another Parameter under a managed name: it is no longer ours to stream."""
        if key in self.managed:
            unit, entry = self.managed[key]
            if value is not entry.param:
                del self.managed[key]
                self.session.adopt_replacement(self, key, value)

    def refresh_flat(self, params) -> None:
        if self.flat_names is not None:
            get = dict.get
            self.module.__dict__["_flat_weights"] = [get(params, name) for name in self.flat_names]

    def enter(self):
        """Leases the units and swaps the dictionary. Returns what `leave` needs."""
        module = self.module
        before = module.__dict__["_parameters"]
        params = dict(self.masters.items())
        self.session.lease_into(self, params)
        module.__dict__["_parameters"] = params
        if self.flat_names is not None:
            self.refresh_flat(params)
        return before, params

    def leave(self, before, params, failed: bool) -> None:
        self.module.__dict__["_parameters"] = before
        if self.flat_names is not None:
            self.refresh_flat(before)
        if failed:
            # A traceback may keep the tensors for long: the place is not theirs any more.
            for key in self.managed:
                tensor = params.get(key)
                if tensor is not None and not tensor.requires_grad:
                    tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        params.clear()


class ManagedForward:
    """Stands as `module.forward` of a managed module, or of the model itself."""

    def __init__(self, session, module, plan: ModulePlan | None, root: bool) -> None:
        self.session = session
        self.module = module
        self.plan = plan
        self.root = root
        self.own = "forward" in module.__dict__  # the instance had a forward of its own
        self.inner = module.forward
        self.__name__ = "forward"
        self.__wrapped__ = self.inner

    def __call__(self, *args, **kwargs):
        session = self.session
        if session.closed:
            return self.inner(*args, **kwargs)
        if self.root:
            with session.step():
                return self._call(args, kwargs)
        return self._call(args, kwargs)

    def _call(self, args, kwargs):
        plan = self.plan
        if plan is None or not plan.managed:
            return self.inner(*args, **kwargs)
        session = self.session
        args = session.on_device(args)
        failed = True
        before, params = plan.enter()
        try:
            out = self.inner(*args, **kwargs)
            failed = False
            return out
        finally:
            plan.leave(before, params, failed)
            session.core.poll()

    def install(self) -> None:
        self.module.__dict__["forward"] = self

    def remove(self) -> None:
        if self.own:
            self.module.__dict__["forward"] = self.inner
        else:
            self.module.__dict__.pop("forward", None)

    def __deepcopy__(self, memo):
        return plain_forward(memo.get(id(self.module), self.module))

    def __reduce__(self):
        return plain_forward, (self.module,)


class MappedEmbedding:
    """Stands as `forward` of an embedding whose table stays in host memory: the lookup reads only the rows
    it needs, over the link where there is one."""

    def __init__(self, session, module, plan: ModulePlan, table) -> None:
        self.session = session
        self.module = module
        self.plan = plan
        self.table = table
        self.inner = module.forward
        self.own = "forward" in module.__dict__
        self.row_bytes = table.shape[1] * table.element_size()

    def __call__(self, input):
        session = self.session
        if session.closed or self._trains():
            return self.inner(input)
        module = self.module
        (input,) = session.on_device((input,))
        before = module.__dict__["_parameters"]
        params = dict(self.plan.masters.items())
        params["weight"] = self.table
        module.__dict__["_parameters"] = params
        try:
            return self.inner(input)
        finally:
            module.__dict__["_parameters"] = before
            session.core.count_mapped(input.numel() * self.row_bytes)

    def _trains(self) -> bool:
        return torch.is_grad_enabled() and self.plan.masters.master("weight").requires_grad

    install = ManagedForward.install
    remove = ManagedForward.remove
    __deepcopy__ = ManagedForward.__deepcopy__
    __reduce__ = ManagedForward.__reduce__
