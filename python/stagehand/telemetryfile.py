"""Telemetry that is asked for without a path: one file for each kind, in the folder in which the program runs."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import weakref
from collections.abc import Iterator

from .errors import InvalidStateTransitionError

log = logging.getLogger("stagehand")

WEIGHTS = "stagehand_telemetry.jsonl"
ACTIVATIONS = "activation_telemetry.jsonl"
CONDUCTOR = "conductor_telemetry.jsonl"
_NAMES = (WEIGHTS, ACTIVATIONS, CONDUCTOR)

_lock = threading.Lock()
_said: set[str] = set()
_claims: weakref.WeakValueDictionary = weakref.WeakValueDictionary()  # path -> the JsonLines that writes it


def path_of(telemetry) -> str | os.PathLike | None:
    """The file of an argument `telemetry`: True, False, None, or a path."""
    return WEIGHTS if telemetry is True else None if telemetry is False else telemetry


def fill_in(config, name: str) -> None:
    """`telemetry_enabled=True` that was given without a telemetry_file means the file `name`."""
    given = config.__dict__.get("_given", ())
    if "telemetry_enabled" in given and config.telemetry_enabled is True and "telemetry_file" not in given:
        config.telemetry_file = name


def _candidates(path) -> Iterator[str | os.PathLike]:
    """The path itself; instead of one of the names above also numbered ones, for further writers at the same time."""
    if path not in _NAMES:
        yield path
        return
    stem, suffix = os.path.splitext(os.path.abspath(path))
    yield stem + suffix
    for number in itertools.count(2):
        yield f"{stem}.{number}{suffix}"


def _say(path, found) -> None:
    """Once for each file of which the user gave no path."""
    if path in _NAMES:
        with _lock:
            new = found not in _said
            _said.add(found)
        if new:
            log.warning("stagehand: telemetry goes to %s", found)


def open_with(path, make):
    """(make(file), file) with the first file for `path` that nobody writes: make raises InvalidStateTransitionError
    about a file that has a writer."""
    for found in _candidates(path):
        try:
            made = make(found)
        except InvalidStateTransitionError as error:
            if path not in _NAMES or error.object != found:
                raise
            continue
        _say(path, found)
        return made, found


def claim(path, owner):
    """The same for files that are opened for each line: the first that no other owner of this process writes."""
    if path not in _NAMES:
        return None if path is None else os.path.abspath(path)  # the program may change its folder
    with _lock:
        found = next(file for file in _candidates(path) if file not in _claims)
        _claims[found] = owner
    _say(path, found)
    return found


def release(path, owner) -> None:
    """The owner writes no more: the next one may have the file."""
    with _lock:
        if path is not None and _claims.get(path) is owner:
            del _claims[path]
