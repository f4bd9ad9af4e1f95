"""Modules whose forward reads weights of modules inside them without calling those: `F.linear(x, self.l.weight)`.

What autograd saves of such a weight would be a lease until backward, since the pair of hooks that makes handles of
saved weights (saved.py) stands while the module that owns them runs. So a reader's forward runs under such a pair,
too, from its first read on (_core/reading.c). Otherwise there is none: a pair of hooks costs time for everything that
is saved, and torch.func's vmap and grad refuse to run inside of it.

A reader is known by the names in its code, which it may come to or not. Other code is found out at its first read,
which is late for that call and right for later ones. A module is none where such a transform is named in its code or in
that of a module inside it.
"""

from __future__ import annotations

import dis
import functools
import types

_LISTS = {"parameters", "named_parameters", "_parameters", "get_parameter"}
_LOOKS = {"dtype", "device", "shape", "size", "is_cuda", "requires_grad", "numel", "ndim"}  # which read no values
_TRANSFORMS = {"vmap", "grad", "grad_and_value", "vjp", "jacrev", "hessian", "linearize"}


@functools.lru_cache(maxsize=4096)
def _read_by(kind: type) -> frozenset:
    """What the forward of the class, and the methods that it names, read: (of what, name, and what of that)."""
    found, seen, names = set(), set(), ["forward"]
    while names:
        method = getattr(kind, names.pop(), None)
        code = getattr(method, "__code__", None)
        if code is None or code in seen or method.__module__ == "torch.nn.modules.module":
            continue
        seen.add(code)
        read = list(_reads(code))
        found.update(read)
        names += [name for _, name, _ in read]
    return frozenset(found)


def _reads(code):
    """As `_read_by`, of one piece of code and those inside it."""
    steps = [step for step in dis.get_instructions(code) if step.opname != "CACHE"]
    for i, step in enumerate(steps):
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_DEREF"):
            before = steps[i - 1].argval if i else None
            after = steps[i + 1].argval if i + 1 < len(steps) and steps[i + 1].opname == "LOAD_ATTR" else None
            yield before, step.argval, after
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _reads(const)


def _transforms(module) -> bool:
    return any(name in _TRANSFORMS for part in module.modules() for _, name, _ in _read_by(type(part)))


def _is_reader(module, keys: set) -> bool:
    """keys: names of weights that modules inside it have."""
    return not _transforms(module) and any(
        (name in _LISTS or name in keys and before != "self") and after not in _LOOKS
        for before, name, after in _read_by(type(module)))


def find_readers(session, wrappers) -> None:
    """Marks readers among the wrappers."""
    for wrapper in wrappers:
        inside = [session.plans[id(part)] for part in wrapper.module.modules() if id(part) in session.plans]
        wrapper.reads = int(_is_reader(wrapper.module, {key for plan in inside for key in plan.managed}))


def learn(session) -> None:
    """A weight is read from outside while gradients are recorded."""
    wrapper = session.local.here.inside
    if wrapper is None or wrapper.plan is not None or wrapper.reads or wrapper.session is not session:
        return
    for other in session.takeover.containers():
        if type(other.module) is type(wrapper.module):
            other.reads = int(not _transforms(other.module))

