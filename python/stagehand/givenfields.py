"""Dataclasses of settings: which fields the user gave (dataclass's __init__ cannot tell a default from the same value
given), and the checks that all of them need."""

from __future__ import annotations

import functools
from dataclasses import MISSING, fields
from typing import ClassVar

from .arguments import MOST, check
from .telemetryfile import fill_in


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


def whole(name: str, value, least: int, most: int) -> None:
    """TypeError, ValueError where `value` is no whole number of this range."""
    check(name, value, "integer")
    if not least <= value <= most:
        raise ValueError(f"{name} must be from {least} to {most}, not {value}")


class Settings:
    """A base of dataclasses of settings; they have a field telemetry_file. A field is a switch where its default is.

    _RANGES: (least, most) for each field that is a whole number, or None where that is the default. _TELEMETRY: the
    file that is meant where telemetry is asked for without one.
    """

    _RANGES: ClassVar[dict[str, tuple[int, int]]]
    _TELEMETRY: ClassVar[str]

    def __post_init__(self) -> None:
        fill_in(self, self._TELEMETRY)
        self.validate()

    def validate(self) -> None:
        """Checks every field as it is now."""
        kind, defaults = type(self).__name__, defaults_of(type(self))
        for name, default in defaults.items():
            if isinstance(default, bool):
                check(f"{kind}.{name}", getattr(self, name), "bool")
        for name, (least, most) in self._RANGES.items():
            value = getattr(self, name)
            if value is not None or defaults[name] is not None:
                whole(f"{kind}.{name}", value, least, most)
        check(f"{kind}.telemetry_file", self.telemetry_file, "path", none=True)


BITS_31 = MOST >> 32  # the most of a count, and of a size in MiB
