"""`session`: weights, activations, optimizer and conductor from one configuration, and one context manager for a step.

    with stagehand.session(model, "train.json") as memory:
        for batch in batches:
            with memory.step():
                loss = model(batch).loss
                loss.backward()
                memory.enter_optimizer()
                memory.optimizer.step()
                memory.optimizer.zero_grad()

    {"memory": {"strategy": "stagehand",
                "stagehand": {"mode": "block", "vram_budget": "6GB", "block_pattern": "^blocks\\\\.\\\\d+$",
                              "activation_stagehand": {"enabled": true, "slabs_per_class": null},
                              "conductor_config": {"enabled": true, "vram_soft_cap_mb": 22000},
                              "optimizer": {"enabled": true, "lr": 1e-4}}}}
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from .._torch import torch
from ..activation import ActivationRuntime, ActivationStagehandConfig
from ..arguments import Path
from ..conductor import ConductorConfig, ConductorRuntime
from ..device import DeviceLike
from ..errors import InvalidArgumentError, InvalidStateTransitionError
from ..files.filesource import Undo
from ..files.pool import PinnedPool
from ..optim import OffloadedAdamW
from ..owning import Owning
from .block import BLOCK_PATTERN, StagehandRuntime
from .common import SessionRuntime, about_to_wrap
from .config import StagehandConfig
from .layer import LayerRuntime, layers_from_files
from .load import all_from_files
from .memoryconfig import read_config
from .residency import HasRuntime, ResidentPriority


def _weights(model, settings: dict, device, pool) -> SessionRuntime:
    """The runtime of either mode, open. On failure it is shut down; parameters may be views of files then."""
    settings = dict(settings)
    mode, source, name = settings.pop("mode"), settings.pop("source", None), settings.pop("name", None)
    dtype, inference = settings.pop("dtype", None), settings.pop("inference_mode", False)
    ram_budget, map = settings.pop("ram_budget", None), settings.pop("map", True)
    common = {"dtype": dtype, "inference_mode": inference, "ram_budget": ram_budget, "device": device, "pool": pool,
              "name": name}
    without_values = source is not None and any(param.is_meta for param in model.parameters())
    files = runtime = None
    try:
        if without_values:
            files = all_from_files(model, source, dtype, inference, map=map)
        elif source is not None and mode == "layer":
            files = layers_from_files(model, source, dtype, inference, map)
        if mode == "layer":
            return LayerRuntime(model, vram_budget=settings.get("vram_budget"), transfer=settings.get("transfer"),
                                telemetry=_layer_telemetry(settings), source=files,
                                trainables=settings.get("trainables", "auto"), **common)
        pattern, group = settings.pop("block_pattern", BLOCK_PATTERN), settings.pop("group", "transformer")
        runtime = StagehandRuntime(model, StagehandConfig(**settings), pattern, group, **common)
        if files is not None:
            runtime.attach(files)
        elif source is not None:
            runtime.convert_registry_to_file_backed(source, strict=False, map=map)
        runtime.prepare()
        return runtime
    except BaseException:
        if runtime is not None:
            runtime.shutdown()
        if files is not None:
            files.close()
        raise


def _layer_telemetry(settings: dict):
    """The argument of LayerRuntime that block mode's fields amount to."""
    enabled = settings.get("telemetry_enabled")
    if enabled is not None and not isinstance(enabled, bool):
        raise TypeError(f"memory.stagehand.telemetry_enabled must be true or false, not {enabled!r}")
    path = settings.get("telemetry_file", enabled is True)
    return False if path is None or enabled is False else path


def _optimizer(model, settings: dict, inference: bool) -> OffloadedAdamW | None:
    settings = dict(settings)
    if not settings.pop("enabled", False):
        return None
    params = [param for param in model.parameters() if param.requires_grad]
    if inference or not params:
        raise InvalidArgumentError(
            "memory.stagehand.optimizer is enabled, and "
            + ("inference_mode promises that no weight is written" if inference else "no parameter of the model "
               "requires a gradient") + ": leave one of them out", object="memory.stagehand.optimizer")
    return OffloadedAdamW(params, **settings)


class MemorySession(Owning, HasRuntime):
    """What `session` gives. weights: a StagehandRuntime, or a LayerRuntime with mode "layer"; activations: an
    ActivationRuntime; conductor: a ConductorRuntime; each is there, enabled or not. optimizer: an OffloadedAdamW over
    the trainable parameters, or None. Threads: steps are taken by one; the rest as for the parts."""

    def __init__(self, model, config, device=None, pool=None) -> None:
        sections = read_config(config)
        with about_to_wrap(model):
            self._set_up(model, sections, device, pool)

    def _set_up(self, model, sections: dict, device, pool) -> None:
        settings = sections["stagehand"]
        priority = settings.pop("reserve_for_resident", None)
        activations, conductor = (ActivationStagehandConfig(**sections["activation_stagehand"]),
                                  ConductorConfig(**sections["conductor_config"]))
        self.steps = 0
        self.metrics = None  # ActivationStepMetrics of the last step
        self._passes: contextlib.ExitStack | None = None  # of the open step
        self._closed = False
        with contextlib.ExitStack() as undo:
            restore = contextlib.ExitStack()  # of a model that has become views of files; not part of shutdown
            undo.callback(lambda: restore.close())
            if settings.get("source") is not None:
                restore.callback(Undo(model))
            self.weights = _weights(model, settings, device, pool)
            undo.callback(self.weights.shutdown)
            self.activations = ActivationRuntime(activations, self.weights._residency_session().target.core)
            undo.callback(self.activations.shutdown)
            self.conductor = ConductorRuntime(conductor)
            undo.callback(self.conductor.shutdown)
            self.optimizer = _optimizer(model, sections["optimizer"], settings.get("inference_mode", False))
            self.conductor.attach(self.weights)
            if self.activations.enabled:
                self.conductor.attach(self.activations)
            if self.optimizer is not None:
                self.conductor.attach(self.optimizer)
            if priority is not None:
                self.weights.reserve_for_resident(priority=priority)
            restore.pop_all()
            self._ends = undo.pop_all()

    # ------------------------------------------------------------------ steps

    @contextlib.contextmanager
    def step(self, number: int | None = None):
        """A step: forward, backward and, after `enter_optimizer`, the optimizer's. number: for log lines and telemetry;
        None: counted. After an exception the next step is as any other. Raises InvalidStateTransitionError inside
        another step and after shutdown."""
        if self._closed:
            raise InvalidStateTransitionError("the session has been shut down; make a new one")
        if self._passes is not None:
            raise InvalidStateTransitionError("a step of this session is open: end it before the next begins")
        if number is None:
            number = self.steps
        self._passes = passes = contextlib.ExitStack()
        try:
            self.conductor.begin_step(number)
            self.weights.begin_step(number)
            try:
                self.activations.step_begin(number)
                with passes:
                    # Not managed_forward(): between passes model.parameters() gives masters, which have the gradients.
                    passes.enter_context(self.activations.managed_forward())
                    self.conductor.enter_forward()
                    yield self
                self.metrics = self.activations.step_end()
            finally:
                self.weights.end_step()
            self.conductor.end_step()
            self.steps = number + 1
        finally:
            self._passes = None

    def _check_step(self) -> contextlib.ExitStack:
        if self._passes is None:
            raise InvalidStateTransitionError("no step is open: call this inside `with memory.step():`")
        return self._passes

    def enter_forward(self) -> None:
        """The next of several forwards in one step."""
        self._check_step()
        self.conductor.enter_forward()

    def enter_optimizer(self) -> None:
        """Forward and backward are over: nothing is spilled any more in this step, weights may be written."""
        self._check_step().pop_all().close()
        self.conductor.enter_optimizer()

    # ------------------------------------------------------------------ other models on the device

    def keep_resident(self, target=None):
        """As of the runtimes (docs/residency.md). target, here and below: a runtime, a model under one, or another
        session; None: this one's weights."""
        return self.weights.keep_resident(target)

    def reserve_for_resident(self, target=None, priority=ResidentPriority.PRIMARY) -> None:
        """As of the runtimes."""
        self.weights.reserve_for_resident(target, priority)

    def release_reservation(self, target=None) -> None:
        """As of the runtimes."""
        self.weights.release_reservation(target)

    def as_guest(self, target=None):
        """As of the runtimes."""
        return self.weights.as_guest(target)

    # ------------------------------------------------------------------ the end

    def shutdown(self) -> None:
        """The model is plain again, on the host. May be called again. InvalidStateTransitionError inside a step."""
        if self._passes is not None:
            raise InvalidStateTransitionError("a step is open: shut the session down after it")
        self._closed = True
        self._ends.close()


def session(model: torch.nn.Module, config: Mapping | Path, *, device: DeviceLike | None = None,
            pool: PinnedPool | None = None) -> MemorySession:
    """Puts a model under one configuration: a mapping, or the path of a JSON file, of the form at the top of this
    module.

    model: nn.Module on the host; with "source" its parameters may be on the meta device: all of them are then read or
    streamed from there. "stagehand" has "mode": "block" (then also the fields of StagehandConfig, block_pattern and
    group) or "layer"; and for both name, source (model files, as for `stagehand.layer`), map, vram_budget, ram_budget,
    dtype, inference_mode, transfer, trainables, telemetry_enabled, telemetry_file, and reserve_for_resident ("primary"
    or "secondary": reserved from the start). Inside it: "activation_stagehand" has the fields of
    ActivationStagehandConfig, "conductor_config" those of ConductorConfig, "optimizer" the arguments of OffloadedAdamW,
    each with "enabled"; they may be left out. device, pool: as for StagehandRuntime. Raises InvalidArgumentError (a
    ValueError) naming a key that there is not and the
    nearest one, ValueError or TypeError naming a field, StagehandOOMError when the weights do not fit; the model is
    then as it was.
    """
    return MemorySession(model, config, device, pool)
