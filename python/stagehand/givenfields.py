"""Which fields of a dataclass of settings the user gave: dataclass's __init__ cannot tell a default from the same value
given."""

from __future__ import annotations

import functools
from dataclasses import MISSING, fields


def remember_given(cls):
    """Decorates a dataclass: `config._given` are the names of the fields that were given. (dataclasses.replace gives
    every field; then none counts as given.)"""
    generated, names = cls.__init__, [f.name for f in fields(cls)]

    @functools.wraps(generated)
    def __init__(self, *args, **kwargs):
        given = {*names[:len(args)], *kwargs}
        self.__dict__["_given"] = given if len(given) < len(names) else set()
        generated(self, *args, **kwargs)

    cls.__init__ = __init__
    return cls


def defaults_of(cls) -> dict:
    return {f.name: f.default for f in fields(cls) if f.default is not MISSING}
