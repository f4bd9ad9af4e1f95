"""A model of files run layer by layer through a function of your own: `Runner`.

    def block(layer, x):                                    # layer.weights: name -> tensor on the device
        w = layer.weights
        return torch.nn.functional.linear(x, w["weight"], w["bias"]).relu()

    with Runner("model.safetensors", block, budget="4GB") as run:
        y = run(x)

No module has to exist: weights come from the files, are on the device just before their layer runs, and give way to the
next ones behind it. For PyTorch modules see `stagehand.layer` and `stagehand.load`. docs/runner.md is the whole of it;
this is the executor boundary of stagehand/executor.h with a Python callable behind it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod

from .. import _core
from .. import device as devices
from .._torch import quietly_without_gradients, raw, torch, unseen, view
from ..arguments import Path, Size
from ..device import DeviceLike
from ..errors import StagehandError, for_status
from ..files.checkpoint import _TORCH_NAMES
from ..owning import NotCopied
from ..report import budget_bytes

_MOST = 8  # tensors between two layers: STH_MAX_ACTIVATIONS
_NAMES = {getattr(torch, name): dtype for dtype, name in _TORCH_NAMES.items() if hasattr(torch, name)}


@dataclass
class Layer:
    """The argument of the function: `index` from 0 in the order of use, `name` such as "blocks.3", and `weights`, a
    dict from a tensor's name within the layer to the tensor, in the file's dtype and shape. Weights are valid inside
    the call only. `scales` names those whose values are the stored numbers times a factor (layer indexes)."""

    index: int
    name: str
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    scales: dict[str, float] = field(default_factory=dict)


def _invalid(text: str, what: str) -> StagehandError:
    return for_status("INVALID_ARGUMENT", text, what, 0)


def _dtype(name: str, what: str) -> torch.dtype:
    dtype = getattr(torch, _TORCH_NAMES.get(name, ""), None)
    if dtype is None:
        raise StagehandError(f"{what} is {name}, which PyTorch {torch.__version__} does not have: convert it",
                             object=what)
    return dtype


def _meta(described) -> list[torch.Tensor]:
    return [torch.empty(shape, dtype=_dtype(name, "an activation"), device="meta") for name, shape in described]


def _tensor(capsule, name: str, shape, what: str) -> torch.Tensor:
    stride = [prod(shape[i + 1:]) for i in range(len(shape))]
    return view(raw(capsule), 0, _dtype(name, what), shape, stride)


def _described(tensors) -> list[tuple[str, tuple[int, ...]]]:
    return [(_NAMES[t.dtype], tuple(t.shape)) for t in tensors]


def _check(tensors, whose: str, what: str) -> None:
    """whose: what they are, as a message begins: "input". what: the error's object."""
    if not 1 <= len(tensors) <= _MOST:
        raise _invalid(f"{whose}: {len(tensors)} tensors; give 1 to {_MOST}", what)
    for i, x in enumerate(tensors):
        if not isinstance(x, torch.Tensor):
            raise _invalid(f"{whose} {i} is of type {type(x).__name__}; give a torch.Tensor", what)
        if x.dtype not in _NAMES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _NAMES)
            raise _invalid(f"{whose} {i} is {x.dtype}, which the runner does not carry; convert it to one of {known}",
                           what)


def _many(result, layer: Layer) -> list[torch.Tensor]:
    """What a function returned, as a list."""
    if isinstance(result, torch.Tensor):
        result = [result]
    elif not isinstance(result, Iterable):
        raise _invalid(f"the function returned {type(result).__name__} for layer '{layer.name}'; return a tensor, or a "
                       "list or tuple of tensors", layer.name)
    results = list(result)
    _check(results, f"layer '{layer.name}': what the function returned", layer.name)
    return results


def _layer_names(layers) -> list[str] | None:
    if layers is None:
        return None
    if isinstance(layers, (str, bytes)):
        raise _invalid(f"layers is the text {layers!r}; give a list of names, such as [{layers!r}]", "layers")
    if not isinstance(layers, Iterable):
        raise _invalid(f"layers is of type {type(layers).__name__}; give a list of names", "layers")
    names = list(layers)
    for name in names:
        if not isinstance(name, str):
            raise _invalid(f"layers has {name!r}, which is no name; give texts such as 'blocks.1'", "layers")
    return names


def _budget(size) -> int:
    if size is None:
        raise _invalid("budget is None: the runner does not find one; give bytes or a size such as '4GB'", "budget")
    return budget_bytes(size, "budget")


class Runner(NotCopied):
    """Runs the layers of model files through `function(layer, *inputs) -> tensor or tensors`.

    path: what `stagehand.open_checkpoint` takes. Layers are made of the tensors' names: "blocks.3.up.weight" belongs to
        layer "blocks.3" as "up.weight", in natural order.
    function: called once for each layer with a `Layer` and what the layer before returned (the caller's tensors for the
        first). It runs on the current stream, without autograd. It must be a function of shapes that runs on meta
        tensors, too: that is how the runner learns the shapes of what it returns, once for each new input shape; or
        give `shapes`, called in the same way and only for shapes. It must not keep its tensors: clone what is to stay.
    device: as elsewhere (stagehand.device.resolve): None is CUDA where there is one, otherwise simulated; "cuda" is the
        current card; "cuda:1", "sim", "own:1" of a back end of your own, or a stagehand.Device.
    budget: bytes or a size such as "8GB", for weights and for what lies between layers; not for what the function
        allocates itself.
    layers: names of layers in their order, for files that hold others, or none in natural order.
    lookahead: transfers kept ahead; 0 lets the planner choose. group: layers in a transfer, 1 to 4.
    ram_budget: bytes or a size of host memory in which weights are kept, so that they are read once only.
    readers: threads that read the files; 0: the thread that runs the layers does; None: by the ways in which they are
        read.

    Raises StagehandError, CheckpointError, StagehandOOMError, or what the function raised. Threads: one after the
    other. A context manager; `close` ends it.
    """

    def __init__(self, path: Path, function: Callable, *, device: DeviceLike | None = None, budget: Size,
                 layers: Sequence[str] | None = None, lookahead: int = 0, group: int = 1, ram_budget: Size = 0,
                 readers: int | None = None, shapes: Callable | None = None) -> None:
        names, budget = _layer_names(layers), _budget(budget)
        kept = budget_bytes(ram_budget or None, "ram_budget") or 0
        self._target = devices.resolve(device, None)
        self.device = self._target.torch
        self._function, self._shapes = function, shapes or function
        self._lock, self._owner = threading.Lock(), None
        self._known = (None, None)  # inputs of the last pass, and what the model makes of such
        more = {} if readers is None else {"readers": readers}
        self._target.tell_what_is_free()  # other models may be on the card
        self._core = _core.Runner(
            self._target.core, path, self._prepare, self._run, budget, layers=names, lookahead=lookahead, group=group,
            ram_budget=kept, **more)
        self.layers = self._core.layers()

    def __call__(self, *inputs: torch.Tensor):
        """One pass. inputs: contiguous tensors on `device`, 1 to 8. Returns a tensor, or a list where the last layer
        returns several."""
        with unseen():
            self._check_inputs(inputs)
        self._refuse_inside()
        with self._lock, quietly_without_gradients():
            self._owner = threading.get_ident()
            try:
                return self._pass(inputs)
            finally:
                self._owner = None

    def _check_inputs(self, inputs) -> None:
        _check(inputs, "input", "input")
        for x in inputs:
            if x.device != self.device or not x.is_contiguous():
                raise StagehandError(f"an input is on {x.device}{'' if x.is_contiguous() else ' and not contiguous'}; "
                                     f"give contiguous tensors on {self.device}", "INVALID_ARGUMENT", "input")

    def _refuse_inside(self) -> None:
        """The pass that is under way holds the runner's lock: a call from its function would wait for ever."""
        if self._owner == threading.get_ident():
            raise StagehandError("the runner is running: its function must not call it", "INVALID_STATE", "runner")

    def _pass(self, inputs):
        with unseen():
            given = _described(inputs)
            if self._known[0] != given:
                self._known = (given, self._core.output(given))
            made = self._known[1]
            outputs = [torch.empty(shape, dtype=_dtype(name, "an output"), device=self.device) for name, shape in made]
            addresses = [_address(x) for x in inputs], [_address(x) for x in outputs]
        self._core.run(*addresses, self._target.stream())
        return outputs[0] if len(outputs) == 1 else outputs

    def _layer(self, index: int, make) -> Layer:
        name, tensors = self.layers[index]
        layer = Layer(index, name)
        for at, (tensor, dtype, shape, scale) in enumerate(tensors):
            layer.weights[tensor] = make(at, dtype, shape, f"{name}.{tensor}")
            if scale != 1.0:
                layer.scales[tensor] = scale
        return layer

    def _prepare(self, index: int, inputs):
        with unseen(), torch.no_grad():  # it runs for the runner's sake, and once more for the caller's
            layer = self._layer(
                index, lambda at, dtype, shape, what: torch.empty(shape, dtype=_dtype(dtype, what), device="meta"))
            return _described(_many(self._shapes(layer, *_meta(inputs)), layer))

    def _run(self, index: int, weights, inputs, described_in, outputs, described_out) -> None:
        with unseen():
            layer = self._layer(index, lambda at, dtype, shape, what: _tensor(weights[at], dtype, shape, what))
            given = [_tensor(capsule, *described, "an input") for capsule, described in zip(inputs, described_in)]
        made = self._function(layer, *given)
        with unseen():
            self._take(layer, _many(made, layer), outputs, described_out)

    @staticmethod
    def _take(layer: Layer, results: list, outputs, described_out) -> None:
        if _described(results) != described_out:
            raise StagehandError(f"layer '{layer.name}' returned {_described(results)} and not {described_out}, as its "
                                 "shapes said", "SHAPE_MISMATCH", layer.name)
        for capsule, described, result in zip(outputs, described_out, results):
            _tensor(capsule, *described, "an output").copy_(result)

    def metrics(self) -> dict:
        """Figures of the newest pass: run, latency_ms, compute_ms, stall_ms, h2d_bytes, copy_ms, bandwidth_gb_s,
        overlap_ratio, file_bytes. Waits for it. Not from the function."""
        self._refuse_inside()
        return self._core.metrics()

    def layer_metrics(self, index: int) -> dict:
        """Means over passes: name, bytes, runs, h2d_ms, compute_ms, stall_ms. Not from the function."""
        self._refuse_inside()
        return self._core.layer_metrics(index)

    def close(self) -> None:
        """Ends the runner and gives its device memory back. May be called again."""
        self._core.close()

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *error) -> None:
        self.close()


def _address(x: torch.Tensor):
    return (_NAMES[x.dtype], tuple(x.shape), x.data_ptr(), x.numel() * x.element_size())
