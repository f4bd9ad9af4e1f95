"""Attributes of other libraries' classes and modules are replaced while a model is managed (answers.py,
ranks.py, refusals.py, tuners.py). They are put back when the last such model has ended."""

from __future__ import annotations

import sys
import threading

lock = threading.RLock()
_replaced: list[tuple] = []  # (class or module, name, what stands there, what stood there)


def replace(owner, name: str, stand, own) -> None:
    _replaced.append((owner, name, stand, own))
    setattr(owner, name, stand)


def stands(found) -> bool:
    """Whether it is one of ours."""
    return any(stand is found for _, _, stand, _ in _replaced)


def replace_functions(functions) -> None:
    """Replaces functions of modules, under every name to which they were imported, but for those that are, and those
    whose module is not imported. functions: (module, name, what makes the stand from the function)."""
    wanted: dict[str, list[tuple]] = {}
    for module, name, stand_for in functions:
        own = getattr(sys.modules.get(module), name, None)
        if own is not None and not stands(own):
            wanted.setdefault(name, []).append((own, stand_for(own)))
    for other in list(sys.modules.values()) if wanted else ():
        known = getattr(other, "__dict__", {})
        for name in wanted.keys() & known.keys():  # one walk for all: there are thousands of modules
            for own, stand in wanted[name]:
                if known.get(name) is own:
                    replace(other, name, stand, own)


def owner_of(kind: type, name: str):
    """(class from which `kind` has the attribute, the attribute as that class holds it); (None, None): from none."""
    owner = next((base for base in kind.__mro__ if name in vars(base)), None)
    return owner, None if owner is None else vars(owner)[name]


def put_back() -> None:
    while _replaced:
        owner, name, stand, own = _replaced.pop()
        if vars(owner).get(name) is stand:
            setattr(owner, name, own)
