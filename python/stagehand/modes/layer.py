"""Layer mode: one line for any module.

    model = stagehand.layer(model, vram_budget="8GB")

Linear, Conv1d/2d/3d, Embedding, transformers' Conv1D and every other module that owns 1 MiB of parameters or
more stream through the device; the rest (norms, biases, buffers) stays on it and is reported.
"""

from __future__ import annotations

import warnings
import weakref

from .. import device as devices
from .._torch import torch, unseen
from ..arguments import Path, Size, check, switches
from ..device import DeviceLike
from ..files.filesource import FileSource, Undo
from ..files.pool import PinnedPool, pool_for_next
from ..files.quantised import check_encoding
from ..files.quantsource import stream_from_files
from ..report import budget_bytes
from ..session.finding import Finding, model_bytes
from ..session.session import Session
from ..session.trained import check_trainables
from ..sessions import members
from ..telemetryfile import path_of
from ..weights.units import refuse_uninitialised
from .common import SessionRuntime, about_to_wrap
from .telemetry import StagehandTelemetry

nn = torch.nn

LAYER_TYPES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)
OWNED_BYTES = 1 << 20  # a module of any other type is managed from this size on


def _is_layer(module: nn.Module) -> bool:
    if isinstance(module, LAYER_TYPES):
        return True
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")


def _own_bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module._parameters.values() if p is not None)


def discover_layers(model: nn.Module, known=()) -> list[tuple[str, nn.Module]]:
    """(name, module) of every module that layer mode manages, in the order of named_modules. known: modules that
    it manages whatever their size is now."""
    refuse_uninitialised(model)
    known = {id(module) for module in known}
    found = []
    for name, module in model.named_modules():
        owned = _own_bytes(module)
        if owned and (_is_layer(module) or owned >= OWNED_BYTES or id(module) in known):
            found.append((name, module))
    return found


class LayerRuntime(SessionRuntime):
    """Manages the layers of one model; `layer` makes it, and `stagehand.runtime(model)` gives it.

    mode: "trace" until the order of one step is known, then "scheduled"; "shutdown" at the end.
    num_layers: managed modules. source: checkpoint.FileSource of weights that stream from files, from `load`.
    """

    def __init__(self, model: torch.nn.Module, vram_budget: Size | None = None, ram_budget: Size | None = None,
                 prefetch_k: int = 3, dtype: torch.dtype | None = None, inference_mode: bool = False,
                 telemetry: bool | Path | None = False, pool: PinnedPool | None = None,
                 device: DeviceLike | None = None, source: FileSource | None = None, transfer: str | None = None,
                 name: str | None = None, trainables: str = "auto") -> None:
        switches(inference_mode=inference_mode)
        check("name", name, "text", none=True)
        super().__init__()
        with about_to_wrap(model):
            layers = discover_layers(model)
            if not layers:
                held = sum(buffer.nbytes for buffer in model.buffers())
                quantised = (f". Its buffers hold {held} bytes, and buffers stay on the device: layers of other "
                             "libraries that keep quantised weights there cannot stream"
                             if held >= OWNED_BYTES else "")
                raise ValueError(
                    f"No eligible layers in {type(model).__name__}: nothing of it is a Linear, a convolution or an "
                    f"embedding, or owns {OWNED_BYTES} bytes of parameters: wrap the module that owns the "
                    f"weights{quantised}")
            kept = budget_bytes(ram_budget, "ram_budget")
            if prefetch_k != 3:
                warnings.warn("stagehand: prefetch_k has no effect: the planner chooses how far to prefetch "
                              "(the fixed window is policy='static' of StagehandRuntime)", RuntimeWarning, stacklevel=3)
            self._given_budget = budget_bytes(vram_budget, "vram_budget")
            self.model = model
            self._name = name
            self._target = devices.resolve(device, self._given_budget)
            self._options = {"inference_mode": inference_mode, "source": source, "transfer": check_encoding(transfer),
                             "trainables": check_trainables(trainables),
                             "options": {"telemetry_path": path_of(telemetry),
                                         "pool": pool._core if pool is not None else None,
                                         "ram_budget": kept or 0}, "name": name}
            self._pool = pool
            try:
                self._open(layers, dtype)
                model.__dict__["_stagehand_layer_runtime"] = self
            except BaseException:
                if self.session is not None:
                    self.session.close()
                model.__dict__.pop("_stagehand_layer_runtime", None)
                raise

    def _open(self, layers, dtype) -> None:
        budget, finding = self._given_budget, None
        if budget is None:
            finding = self._find_with(model_bytes(self.model, dtype, self._options["trainables"] != "host"))
            budget = finding.first()
        session = Session(self.model, [(name, module, "layer") for name, module in layers], budget=budget,
                          target=self._target, dtype=dtype, finding=finding, **self._options)
        self._take(session)
        self.telemetry = StagehandTelemetry(session)
        self._layers = [module for _, module in layers]
        self.num_layers = len(layers)

    def _find_with(self, nbytes: int) -> Finding:
        """What finds the budget. nbytes: that the model can use."""
        return Finding(self._target, nbytes)

    def _pause(self) -> None:
        self.telemetry.freeze()
        self.session.close()

    def _resume(self, dtype) -> None:
        self._open(discover_layers(self.model, self._layers), dtype)
        self._protect_again()

    @property
    def device(self) -> torch.device:
        """The device on which the model runs; the simulated one is torch's "cpu"."""
        return self._target.torch

    @property
    def mode(self) -> str:
        if self.session.closed:
            return "shutdown"
        return "scheduled" if self.session.core.stats()["planned"] else "trace"

    @property
    def traced(self) -> bool:
        return self.mode == "scheduled"

    @property
    def step(self) -> int:
        return self.session.core.stats()["steps"]

    def shutdown(self) -> None:
        """The model is plain again, on the host. May be called again."""
        self._may_end()
        with unseen(), self._life:
            self.telemetry.freeze()
            self.session.close()
            if self.session.source is not None:
                self.session.source.close()
            if self.model.__dict__.get("_stagehand_layer_runtime") is self:
                del self.model.__dict__["_stagehand_layer_runtime"]

    def shutdown_keep_pool(self):
        """Like shutdown; returns a PinnedPool for the next model: the one that was given, else a new one. A model whose
        weights are all in RAM needs none."""
        if self.session.closed:
            raise RuntimeError("stagehand: the runtime has been shut down already; make a new one")
        largest = self.session.largest_unit()
        self.shutdown()
        return self._pool if self._pool is not None else pool_for_next(largest)


def layers_from_files(model, path, dtype, inference_mode: bool, map: bool = True) -> FileSource:
    """The layers' parameters that may stream from files get views of them; those without a tensor stay in RAM."""
    modules = [module for _, module in discover_layers(model)]
    return stream_from_files(model, modules, path, dtype, inference_mode, map, stacklevel=5)[0]


def layer(model: torch.nn.Module, *, vram_budget: Size | None = None, ram_budget: Size | None = None,
          prefetch_k: int = 3, dtype: torch.dtype | None = None, inference_mode: bool = False,
          telemetry: bool | Path | None = False, device: DeviceLike | None = None, pool: PinnedPool | None = None,
          source: Path | None = None, transfer: str | None = None, name: str | None = None,
          map: bool = True, trainables: str = "auto") -> torch.nn.Module:
    """Streams the model's layers through the device and returns the same model.

    model: nn.Module on the host, of any size that RAM holds.
    vram_budget: what its parameters, buffers and places may take on the device together: bytes, "8GB"
        (10^9), "8GiB" (2^30); activations come on top. None: it is found, and follows what the rest of the process and
        other processes need (docs/budget.md); runtime.stats["budget_found"] says what it is and why.
    prefetch_k: of no effect, for callers of old: the planner chooses how far to prefetch, and another value warns.
    dtype: torch.dtype that floating parameters are cast to; None keeps each tensor's own.
    inference_mode: True promises that weights are only written inside `runtime.writing()`; then all of them
        are fetched across steps.
    telemetry: a path for one JSON line a step; True: stagehand_telemetry.jsonl in the working folder (a number before
        the suffix where another runtime writes it); False: none, counters alone. runtime.telemetry.path says which.
    device: None (CUDA where there is one, otherwise simulated), "cuda:1", "sim" or "cpu" (simulated).
    pool: PinnedPool for sources that need staging.
    source: None, or model files (as for `load`, quantised ones too) from which the layers' frozen weights (all of them
        with inference_mode=True) stream from now on; what they held is dropped. Weights without a tensor there stay in
        RAM, with a warning.
    ram_budget: bytes, or a size string. With source: of host memory in which file-backed weights are kept so that they
        are read once only. Without: of the weights in RAM that are pinned; the rest is staged through slabs, which is
        slower. Beside it there are the slabs.
    transfer: "lossless": weights that stream and do not train cross the link packed, bfloat16 in about 0.7 of its
        bytes, and arrive with the bits that they have; their packed bytes take host memory beside the weights
        (docs/lossless.md). "auto": each plan chooses which of them cross packed, and which as they are because compute
        is the bound; both take pinned host memory. "int8", "fp8" or "int4": weights of Linear and convolutions that
        stream cross the link in so many bits and are expanded on the device. Which they are is settled here and stays;
        `runtime.quantised` names them with their errors, and what is left out with the reason. None or "plain": all
        bytes cross as they are.
    name: of the model in errors, where there are several; None: its class.
    map: with source, as for `load`.
    trainables: where weights that take a gradient live. "auto": those of a model of which a part is frozen live on the
        device as plain parameters, with their gradients and the optimizer's state, small ones first, as many as pay;
        the others, and all where nothing is frozen, have their masters on the host. "device": as many as the budget
        has room for. "host": none. The budget counts gradient and state (two float32 moments);
        `runtime.trainables` says which and why (docs/training.md).
    Raises StagehandOOMError when the budget is too small (names the unit and the smallest that works),
    ValueError when nothing in the model can stream; with source CheckpointError and DtypeMismatchError naming parameter
    and file. The model is then as it was.
    """
    kwargs = {"vram_budget": vram_budget, "ram_budget": ram_budget, "prefetch_k": prefetch_k, "dtype": dtype,
              "inference_mode": inference_mode, "telemetry": telemetry, "pool": pool, "device": device,
              "transfer": transfer, "name": name, "trainables": trainables}
    if source is None:
        LayerRuntime(model, **kwargs)
        return model
    switches(inference_mode=inference_mode)
    with about_to_wrap(model):
        undo, files = Undo(model), None
        try:
            files = layers_from_files(model, source, dtype, inference_mode, map)
            LayerRuntime(model, source=files, **kwargs)
        except BaseException:
            if files is not None:
                files.discard()
            undo()
            raise
    return model


wrap = layer


class Runtime:
    """Keeps keyword arguments of `layer` for several models: Runtime(vram_budget="8GB").layer(model). As a context it
    ends with the shutdown of what it wrapped."""

    def __init__(self, **kwargs: object) -> None:
        self._kwargs = kwargs
        self._made = weakref.WeakSet()  # runtimes

    def layer(self, model: torch.nn.Module) -> torch.nn.Module:
        layer(model, **self._kwargs)
        self._made.add(model._stagehand_layer_runtime)
        return model

    wrap = layer

    def shutdown(self) -> None:
        """Shuts down the runtime of each model that it wrapped. May be called again."""
        for runtime in members(self._made):
            runtime.shutdown()
            self._made.discard(runtime)

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        self.shutdown()

    def __getstate__(self):  # a copy has wrapped nothing
        return self._kwargs

    def __setstate__(self, kwargs) -> None:
        self.__init__(**kwargs)
