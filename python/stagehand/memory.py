"""`session`: weights, activations and the conductor from one configuration, and one context manager for a step.

    with stagehand.session(model, "train.json") as memory:
        for batch in batches:
            with memory.step():
                loss = model(batch).loss
                loss.backward()
                memory.enter_optimizer()
                optimizer.step()
                optimizer.zero_grad()

    {"memory": {"strategy": "stagehand",
                "stagehand": {"vram_budget": "6GB", "block_pattern": "^blocks\\\\.\\\\d+$"},
                "activation_stagehand": {"enabled": true, "slabs_per_class": null},
                "conductor_config": {"enabled": true, "vram_soft_cap_mb": 22000}}}
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import fields

from ._torch import torch
from .activation import ActivationRuntime, ActivationStagehandConfig
from .block import StagehandRuntime
from .conductor import ConductorConfig, ConductorRuntime
from .config import StagehandConfig
from .errors import InvalidArgumentError

STRATEGY = "stagehand"
_RUNTIME = ("block_pattern", "group", "dtype", "inference_mode", "ram_budget")  # of StagehandRuntime itself
_WEIGHTS = (*(f.name for f in fields(StagehandConfig)), *_RUNTIME)
_ACTIVATIONS = tuple(f.name for f in fields(ActivationStagehandConfig))
_CONDUCTOR = tuple(f.name for f in fields(ConductorConfig))
_SECTIONS = {"stagehand": _WEIGHTS, "activation_stagehand": _ACTIVATIONS, "conductor_config": _CONDUCTOR}


# ---------------------------------------------------------------------- the configuration


def _no_duplicates(pairs):
    found = {}
    for key, value in pairs:
        if key in found:
            raise InvalidArgumentError(f"the configuration has the key {key!r} twice", object=key)
        found[key] = value
    return found


def _read(config):
    if isinstance(config, Mapping):
        return config
    if not isinstance(config, (str, os.PathLike)):
        raise TypeError(f"a configuration is a mapping or the path of a JSON file, not {config!r}")
    with open(config, encoding="utf-8") as file:
        try:
            return json.load(file, object_pairs_hook=_no_duplicates)
        except json.JSONDecodeError as error:
            raise InvalidArgumentError(f"{os.fspath(config)} is not JSON: {error}", object=os.fspath(config)) from error


def _check_keys(where: str, given, known) -> None:
    if not isinstance(given, Mapping):
        raise InvalidArgumentError(f"{where} must be an object, not {given!r}", object=where)
    for key in given:
        if key in known:
            continue
        near = difflib.get_close_matches(str(key), known, 1, 0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known)}"
        raise InvalidArgumentError(f"{where} has no key {key!r}: {hint}", object=f"{where}.{key}")


def read_config(config) -> dict[str, dict]:
    """Settings of each section of a configuration, a mapping or the path of a JSON file, with lists as tuples; {} for
    one that is not there. Raises InvalidArgumentError naming the key, and the nearest one that there is."""
    config = _read(config)
    _check_keys("the configuration", config, ("memory",))
    if "memory" not in config:
        raise InvalidArgumentError('the configuration has no key "memory"', object="memory")
    memory = config["memory"]
    _check_keys("memory", memory, ("strategy", *_SECTIONS))
    strategy = memory.get("strategy")
    if strategy != STRATEGY:
        raise InvalidArgumentError(f"memory.strategy is {strategy!r}: this package has {STRATEGY!r} alone",
                                   object="memory.strategy")
    sections = {}
    for name, known in _SECTIONS.items():
        section = memory.get(name, {})
        _check_keys(f"memory.{name}", section, known)
        sections[name] = {key: tuple(v) if isinstance(v, list) else v for key, v in section.items()}
        if name != "stagehand" and section and not section.get("enabled"):
            warnings.warn(f"stagehand: memory.{name} has settings and \"enabled\" is not true: they have no effect",
                          RuntimeWarning, stacklevel=4)
    sections["stagehand"]["dtype"] = _dtype(sections["stagehand"].get("dtype"))
    return sections


def _dtype(value):
    if value is None or isinstance(value, torch.dtype):
        return value
    found = getattr(torch, str(value).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise InvalidArgumentError(f"memory.stagehand.dtype is {value!r}: write the name of a dtype, such as "
                                   '"bfloat16"', object="memory.stagehand.dtype")
    return found


# ---------------------------------------------------------------------- the session


class MemorySession:
    """What `session` gives. weights: a StagehandRuntime; activations: an ActivationRuntime; conductor: a ConductorRuntime;
    each is there, enabled or not. Steps are taken by one thread."""

    def __init__(self, model, config, device=None, pool=None) -> None:
        sections = read_config(config)
        settings = sections["stagehand"]
        options = {key: settings.pop(key) for key in _RUNTIME if key in settings}
        weights, activations, conductor = (StagehandConfig(**settings),
                                           ActivationStagehandConfig(**sections["activation_stagehand"]),
                                           ConductorConfig(**sections["conductor_config"]))
        self.steps = 0
        self.metrics = None  # ActivationStepMetrics of the last step
        self._passes: contextlib.ExitStack | None = None
        with contextlib.ExitStack() as undo:
            self.weights = StagehandRuntime(model, weights, device=device, pool=pool, **options)
            undo.callback(self.weights.shutdown)
            opened = self.weights.prepare()
            self.activations = ActivationRuntime(activations, opened.target.core)
            undo.callback(self.activations.shutdown)
            self.conductor = ConductorRuntime(conductor)
            undo.callback(self.conductor.shutdown)
            self.conductor.attach(self.weights)
            if self.activations.enabled:
                self.conductor.attach(self.activations)
            self._ends = undo.pop_all()

    @contextlib.contextmanager
    def step(self, number: int | None = None):
        """A step: forward, backward and, after `enter_optimizer`, the optimizer's. number: for log lines and telemetry;
        None: counted. After an exception the next step is as any other."""
        if number is None:
            number = self.steps
        self.conductor.begin_step(number)
        self.weights.begin_step(number)
        try:
            self.activations.step_begin(number)
            with contextlib.ExitStack() as self._passes:
                self._passes.enter_context(self.weights.managed_forward())
                self._passes.enter_context(self.weights.managed_backward())
                self._passes.enter_context(self.activations.managed_forward())
                self.conductor.enter_forward()
                yield self
            self.metrics = self.activations.step_end()
        finally:
            self._passes = None
            self.weights.end_step()
        self.conductor.end_step()
        self.steps = number + 1

    def enter_forward(self) -> None:
        """The next of several forwards in one step."""
        self.conductor.enter_forward()

    def enter_optimizer(self) -> None:
        """Forward and backward are over: nothing is spilled any more in this step, weights may be written."""
        if self._passes is not None:
            self._passes.pop_all().close()
        self.conductor.enter_optimizer()

    def shutdown(self) -> None:
        """The model is plain again, on the host. Again is fine."""
        self._ends.close()

    def __enter__(self) -> MemorySession:
        return self

    def __exit__(self, *error) -> None:
        self.shutdown()


def session(model, config, *, device=None, pool=None) -> MemorySession:
    """Puts a model under one configuration: a mapping, or the path of a JSON file, of the form at the top of this module.

    model: nn.Module on the host. "stagehand" has the fields of StagehandConfig, and block_pattern, group, dtype,
    inference_mode, ram_budget as StagehandRuntime takes them; "activation_stagehand" those of
    ActivationStagehandConfig, "conductor_config" those of ConductorConfig; sections may be left out. device, pool: as for
    StagehandRuntime. Raises InvalidArgumentError (a ValueError) naming a key that there is not and the nearest one,
    ValueError or TypeError naming a field, StagehandOOMError when the weights do not fit; the model is then as it was.
    """
    return MemorySession(model, config, device, pool)
