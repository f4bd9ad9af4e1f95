"""The configuration of a session: a mapping, or a JSON file, checked key by key. memory.py shows its form."""

from __future__ import annotations

import difflib
import inspect
import json
import os
import stat
import warnings
from collections.abc import Mapping
from dataclasses import fields

from .._torch import torch
from ..activation import ActivationStagehandConfig
from ..arguments import check
from ..conductor import ConductorConfig
from ..errors import InvalidArgumentError
from ..optim import OffloadedAdamW
from .config import StagehandConfig
from .residency import ResidentPriority

STRATEGY = "stagehand"
MOST_BYTES = 1 << 20
_WHERE = "memory.stagehand"
_BOTH = ("mode", "name", "source", "map", "vram_budget", "ram_budget", "dtype", "inference_mode", "transfer",
         "trainables", "telemetry_enabled", "telemetry_file", "reserve_for_resident")
_FIELDS = tuple(f.name for f in fields(StagehandConfig))
_BLOCK = (*dict.fromkeys((*_BOTH, *_FIELDS, "block_pattern", "group")),)
# Key -> kind of its value (arguments.py), and whether it may be null. Those of StagehandConfig, of activations and of
# the conductor are checked by their classes.
_KINDS = {
    _WHERE: {"name": ("text", True), "source": ("path", True), "map": ("bool", False), "vram_budget": ("size", True),
             "ram_budget": ("size", True), "inference_mode": ("bool", False), "transfer": ("text", True),
             "trainables": ("text", False),
             "telemetry_enabled": ("bool", False), "telemetry_file": ("path", True),
             "block_pattern": ("pattern", False), "group": ("text", False)},
    f"{_WHERE}.optimizer": {
        "lr": ("number", False), "betas": ("pair", False), "eps": ("number", False), "weight_decay": ("number", False),
        "maximize": ("bool", False), "stochastic_rounding": ("bool", False), "seed": ("integer", False),
        "state_path": ("path", True), "threads": ("integer", True), "max_grad_norm": ("number", True)},
}
MODES = {"block": _BLOCK, "layer": _BOTH}
SECTIONS = {
    "activation_stagehand": tuple(f.name for f in fields(ActivationStagehandConfig)),
    "conductor_config": tuple(f.name for f in fields(ConductorConfig)),
    "optimizer": ("enabled", *(name for name in inspect.signature(OffloadedAdamW).parameters if name != "params")),
}


def _no_duplicates(pairs):
    found = {}
    for key, value in pairs:
        if key in found:
            raise InvalidArgumentError(f"the configuration has the key {key!r} twice: remove one", object=key)
        found[key] = value
    return found


def _read(config):
    if isinstance(config, Mapping):
        return config
    if not isinstance(config, (str, os.PathLike)):
        raise TypeError(f"a configuration is a mapping or the path of a JSON file, not {config!r}")
    name = os.fsdecode(config)
    try:
        return json.loads(_text_of(config, name), object_pairs_hook=_no_duplicates)
    except ValueError as error:
        if isinstance(error, InvalidArgumentError):
            raise
        raise InvalidArgumentError(f"{name} is not JSON: {error}", object=name) from error
    except RecursionError as error:
        raise InvalidArgumentError(f"{name} nests objects or lists too deeply: give a configuration",
                                   object=name) from error


def _text_of(path, name: str) -> str:
    """A configuration's text. O_NONBLOCK: a pipe is refused, and not waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise InvalidArgumentError(f"{name} must be a regular file, as a configuration is", object=name)
        with open(descriptor, "rb", closefd=False) as file:
            text = file.read(MOST_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(text) > MOST_BYTES:
        raise InvalidArgumentError(f"{name} has more than {MOST_BYTES} bytes: give a configuration", object=name)
    return text.decode("utf-8")


def _check_keys(where: str, given, known, elsewhere=lambda key: None) -> None:
    """elsewhere: a key -> what to say of one that would be right in another place, or None."""
    if not isinstance(given, Mapping):
        raise InvalidArgumentError(f"{where} must be an object, not {given!r}", object=where)
    for key in given:
        if key in known:
            continue
        near = difflib.get_close_matches(str(key), known, 1, 0.4)
        hint = elsewhere(key) or (f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known)}")
        raise InvalidArgumentError(f"{where} has no key {key!r}: {hint}", object=f"{where}.{key}")


def _check_kinds(where: str, given) -> None:
    for key, (kind, none) in _KINDS.get(where, {}).items():
        if key in given:
            check(f"{where}.{key}", given[key], kind, none)


def _one_of(where: str, value, known):
    if value not in known:
        raise InvalidArgumentError(f"{where} is {value!r}: it is one of {', '.join(map(repr, known))}", object=where)
    return value


def read_config(config) -> dict[str, dict]:
    """Settings of "stagehand" and of each section in it, with lists as tuples; {} for a section that is not there.
    "stagehand" has "mode" in any case. Raises InvalidArgumentError naming the key, and the nearest that there is."""
    config = _read(config)
    _check_keys("the configuration", config, ("memory",))
    if "memory" not in config:
        raise InvalidArgumentError('the configuration has no key "memory": put its sections there', object="memory")
    memory = config["memory"]
    _check_keys("memory", memory, ("strategy", "stagehand"),
                lambda key: f"it goes into {_WHERE}" if key in SECTIONS else None)
    strategy = memory.get("strategy", STRATEGY if "stagehand" in memory else None)
    if strategy != STRATEGY:
        raise InvalidArgumentError(f"memory.strategy is {strategy!r}: this package has {STRATEGY!r} alone",
                                   object="memory.strategy")
    given = memory.get("stagehand", {})
    if not isinstance(given, Mapping):
        raise InvalidArgumentError(f"{_WHERE} must be an object, not {given!r}", object=_WHERE)
    mode = _one_of(f"{_WHERE}.mode", given.get("mode", "block"), tuple(MODES))
    _check_keys(_WHERE, given, (*MODES[mode], *SECTIONS),
                lambda key: 'it is for mode "block"' if key in _BLOCK else None)
    _check_kinds(_WHERE, given)
    settings = {key: _plain(value) for key, value in given.items() if key not in SECTIONS}
    settings["mode"] = mode
    _take_dtype(settings, "dtype", _WHERE)
    if settings.get("reserve_for_resident") is not None:
        settings["reserve_for_resident"] = ResidentPriority(_one_of(
            f"{_WHERE}.reserve_for_resident", settings["reserve_for_resident"], [p.value for p in ResidentPriority]))
    return {"stagehand": settings, **{name: _section(name, given.get(name, {})) for name in SECTIONS}}


def _section(name: str, given) -> dict:
    where = f"{_WHERE}.{name}"
    _check_keys(where, given, SECTIONS[name])
    enabled = given.get("enabled", False)
    check(f"{where}.enabled", enabled, "bool")
    _check_kinds(where, given)
    if given and not enabled:
        warnings.warn(f"stagehand: {where} has settings and \"enabled\" is not true: they have no effect",
                      RuntimeWarning, stacklevel=6)
    section = {key: _plain(value) for key, value in given.items()}
    for key in ("master_dtype", "state_dtype"):
        _take_dtype(section, key, where)
    return section


def _plain(value):
    return tuple(value) if isinstance(value, list) else value


def _take_dtype(settings: dict, key: str, where: str) -> None:
    """The name of a dtype becomes it."""
    value = settings.get(key)
    if value is None or isinstance(value, torch.dtype):
        return
    found = getattr(torch, str(value).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise InvalidArgumentError(f"{where}.{key} is {value!r}: write the name of a dtype, such as \"bfloat16\"",
                                   object=f"{where}.{key}")
    settings[key] = found
