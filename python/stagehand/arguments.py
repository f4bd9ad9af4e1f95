"""Checks of values that a program or a configuration gives: an error names the argument, the value and what is right.
A text such as "false" is true to Python, so that a switch is checked before it is asked."""

from __future__ import annotations

import os
import re
from typing import TypeAlias

Size: TypeAlias = "int | str"  # bytes, or a text such as "8GB"
Path: TypeAlias = "str | bytes | os.PathLike"

MOST = (1 << 63) - 1
MOST_REAL = 1e300


def _is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < MOST_REAL


# Kind -> (whether a value is of it, what to say is right).
KINDS = {
    "bool": (lambda value: isinstance(value, bool), "True or False (in JSON true or false)"),
    "text": (lambda value: isinstance(value, str), "a text"),
    "pattern": (lambda value: isinstance(value, (str, re.Pattern)), "a regular expression"),
    "path": (lambda value: isinstance(value, (str, bytes, os.PathLike)) and value not in ("", b""), "a path"),
    "integer": (lambda value: isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MOST,
                "a whole number of 64 bits"),
    "number": (_is_number, "a finite number"),
    "pair": (lambda value: isinstance(value, (tuple, list)) and len(value) == 2 and all(map(_is_number, value)),
             "two finite numbers"),
    "size": (lambda value: isinstance(value, (int, str)) and not isinstance(value, bool),
             "a number of bytes or a size such as '8GB'"),
}


def check(name: str, value, kind: str, none: bool = False) -> None:
    """TypeError where `value` is not of the kind. none: it may be None."""
    fits, right = KINDS[kind]
    if not (none and value is None) and not fits(value):
        raise TypeError(f"{name} must be {right}{' or None' if none else ''}, not {value!r:.200}")


def switches(**values) -> None:
    """As check, of several that are True or False."""
    for name, value in values.items():
        check(name, value, "bool")
