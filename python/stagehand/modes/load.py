"""`load`: a model whose weights stream from its files and are never in RAM as a whole."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Callable

from torch.utils.weak import WeakIdKeyDictionary

from .._torch import torch, undisturbed, unseen
from ..arguments import Path, Size, switches
from ..claims import taking_over
from ..device import DeviceLike
from ..errors import CheckpointError, StagehandError, some_of
from ..files.filesource import FileSource, Undo, wanted_parameters
from ..files.names import ranks
from ..files.pool import PinnedPool
from ..files.quantsource import open_source
from ..telemetryfile import path_of
from ..weights.units import full_name
from .block import StagehandRuntime
from ..managed import refuse_second
from .config import StagehandConfig
from .layer import LayerRuntime

nn = torch.nn


_building = threading.local()  # .moved: real parameter -> its meta one, for each model that this thread builds
_lock = threading.Lock()  # of the two below
_builders = 0
_original = None  # nn.Module.register_parameter, while ours stands for it
os.register_at_fork(after_in_child=_lock._at_fork_reinit)


@contextlib.contextmanager
def parameters_on_meta():
    """While it lasts, modules made by this thread get their parameters on the meta device, one at a time;
    buffers are real. Parameters shared between modules stay shared."""
    global _builders, _original
    before = getattr(_building, "moved", None)
    with _lock:
        if _builders == 0:
            _original, nn.Module.register_parameter = nn.Module.register_parameter, _register_parameter
        _builders += 1
    try:
        _building.moved = WeakIdKeyDictionary()  # the real one may die
        yield
    finally:
        _building.moved = before
        with _lock:
            _builders -= 1
            if _builders == 0:
                nn.Module.register_parameter = _original


def _register_parameter(self, name, param):
    _original(self, name, param)
    moved = getattr(_building, "moved", None)
    if param is not None and moved is not None:
        with unseen():
            _move(self, name, param, moved)


def _move(module, name: str, param, moved) -> None:
    if param.is_meta or isinstance(param, nn.parameter.UninitializedTensorMixin):
        return
    if type(param.data) is not torch.Tensor:
        return
    if param not in moved:
        meta = torch.Tensor._make_subclass(type(param), param.data.to("meta"), param.requires_grad)
        meta.__dict__.update(param.__dict__)
        moved[param] = meta
    module._parameters[name] = moved[param]


def _build(build):
    if isinstance(build, nn.Module):
        return build
    if not callable(build):
        raise TypeError(f"stagehand.load takes the model, or what builds it, and then the path; the first is a "
                        f"{type(build).__name__}")
    with parameters_on_meta():
        model = build()
    if not isinstance(model, nn.Module):
        raise TypeError(f"build() must return an nn.Module, not {type(model).__name__}")
    return model


def _bind_parameters(model, source: FileSource, dtype, inference_mode: bool) -> None:
    wanted = wanted_parameters(model, lambda module, key, param: True, dtype)
    source.bind(source.match(wanted, cast=dtype is not None))
    with torch.no_grad():
        for param in model.parameters():
            if inference_mode:
                param.requires_grad_(False)
            elif param.requires_grad and source.holds(param):  # it will be written: a master of its own in RAM
                param.data = source.read(param)


def _fill_buffers(model, source: FileSource) -> list[str]:
    """Persistent buffers get their values from the files. Returns the names of those that have none there;
    a buffer without values at all is an error."""
    missing, done = [], {}
    records = source.records
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is None:
                continue
            name = full_name(prefix, key)
            if id(buffer) in done:
                module._buffers[key] = done[id(buffer)]
                continue
            persistent = key not in module._non_persistent_buffers_set
            hit = next((c for rank in ranks(name) for c in rank if c in records), None) if persistent else None
            if hit is not None:
                source.used.add(hit)
                module._buffers[key] = done[id(buffer)] = _value_of(source, hit, name, buffer)
            elif buffer.is_meta:
                raise StagehandError(
                    f"the buffer {name} is on the meta device and {source.checkpoint.path} has no values for it: "
                    f"pass a callable that builds the model, so that buffers are real", object=name)
            elif persistent:
                missing.append(name)
    return missing


def _value_of(source: FileSource, key: str, name: str, buffer: torch.Tensor) -> torch.Tensor:
    record = source.records[key]
    if tuple(record.shape) != tuple(buffer.shape):
        raise CheckpointError(
            f"the buffer {name} has shape {tuple(buffer.shape)}, its tensor {key} in "
            f"{source.checkpoint.file_of(record)} has {record.shape}", "SHAPE_MISMATCH", name)
    return record.value(source).to(buffer.dtype)


def _check_leftovers(source: FileSource, missing: list[str], strict: bool) -> None:
    extra = [name for name in source.records if name not in source.used]
    for names, text in ((missing, "has no values for the buffers"),
                        (extra, "has tensors that the model does not use:")):
        if not names:
            continue
        sentence = f"{source.checkpoint.path} {text} {some_of(names)}"
        if strict:
            raise CheckpointError(f"{sentence} (strict=False goes on with a warning)", object=names[0])
        warnings.warn(f"stagehand: {sentence}", RuntimeWarning, stacklevel=4)


def all_from_files(model, path, dtype, inference_mode: bool, strict: bool = True, map: bool = True) -> FileSource:
    """Every parameter gets a view of its file, or, where it is trainable, its values; buffers get their values. On
    failure the model is half done: an Undo made before puts it back."""
    source = open_source(path, inference_mode, map)
    try:
        with undisturbed():
            _bind_parameters(model, source, dtype, inference_mode)
            missing = _fill_buffers(model, source)
        _check_leftovers(source, missing, strict)
    except BaseException:
        source.discard()
        raise
    return source


def load(build: Callable[[], torch.nn.Module] | torch.nn.Module, path: Path, *, vram_budget: Size | None = None,
         ram_budget: Size | None = None, blocks: str | None = None, dtype: torch.dtype | None = None,
         inference_mode: bool = True, device: DeviceLike | None = None, telemetry: bool | Path | None = False,
         pool: PinnedPool | None = None, strict: bool = True, transfer: str | None = None, name: str | None = None,
         map: bool = True, trainables: str = "auto") -> torch.nn.Module:
    """Builds a model and streams its weights from its files, without a copy of them in RAM.

    build: a callable that returns the nn.Module (called so that parameters take no memory while buffers are
        real), or a module that is on the meta device already.
    path: a .safetensors file, an index JSON, or a folder. Every parameter must be there, with its shape and
        dtype: build the model in the file's dtype, or say dtype=. Or a quantised file (.fpk, .slab, .safetensors with
        its manifest, a folder of 4-bit shards): what the device can expand crosses the link in the bits that the file
        has, the rest is decoded into RAM; `runtime.quantised` says which is which. Their dtype is the model's. Or a
        file of `stagehand pack --lossless`: disk and link carry its packed bytes; shapes and dtypes are the original's.
    vram_budget, device, telemetry, pool: as for `layer`.
    ram_budget: bytes of host memory, or a size string, in which weights are kept so that they are read once only; the
        rest is read in every pass. Beside it there are the staging slabs. None: nothing is kept.
    blocks: regular expression of block names for block mode; None: layer mode.
    dtype: torch.dtype that floating parameters are to have; their files must have it. None: the model's.
    inference_mode: True: weights are read-only and not trainable. False: trainable ones are read into RAM.
    transfer: as for `layer`. Weights that stream are then read and encoded once, and RAM keeps their packed bytes.
    name, trainables: as for `layer`.
    strict: False: buffers without values and tensors without use warn instead of being errors.
    map: True: weights at rest (state_dict, a forward after shutdown) are views of the mapped file, cost no RAM, and
        move to RAM when they are written. Nobody may write the file meanwhile: this process is refused. False:
        nothing is mapped; a weight at rest is read from its file each time, and cannot be written.
    Returns the model; stagehand.runtime(model) is its runtime.
    Raises CheckpointError (a ValueError) and DtypeMismatchError naming parameter, file and both shapes,
    StagehandOOMError for a budget that is too small. A module that was passed in is then as it was.
    """
    switches(inference_mode=inference_mode, strict=strict)
    model = _build(build)
    with unseen(), taking_over(model):
        refuse_second(model)
        undo, source = Undo(model), None
        try:
            source = all_from_files(model, path, dtype, inference_mode, strict, map)
            _run(model, source, blocks, (vram_budget, ram_budget), dtype, inference_mode, device, telemetry, pool,
                 transfer, name, trainables)
        except BaseException:
            if source is not None:
                source.discard()
            undo()
            raise
    return model


def _run(model, source, blocks, budgets, dtype, inference_mode, device, telemetry, pool, transfer, name,
         trainables) -> None:
    vram_budget, ram_budget = budgets
    if blocks is None:
        LayerRuntime(model, vram_budget=vram_budget, ram_budget=ram_budget, dtype=dtype, inference_mode=inference_mode,
                     telemetry=telemetry, device=device, pool=pool, source=source, transfer=transfer, name=name,
                     trainables=trainables)
        return
    config = StagehandConfig(vram_budget=vram_budget, telemetry_file=path_of(telemetry), transfer=transfer,
                             trainables=trainables)
    runtime = StagehandRuntime(
        model, config, block_pattern=blocks, dtype=dtype, inference_mode=inference_mode, pool=pool,
        device=device, ram_budget=ram_budget, name=name)
    try:
        runtime.attach(source)
    except BaseException:
        runtime.shutdown()
        raise
