"""A pipeline of diffusers under one budget.

    from stagehand.integrations.diffusers import offload

    pipe = FluxPipeline.from_pretrained(..., torch_dtype=torch.bfloat16)  # in RAM; no .to("cuda")
    offloaded = offload(pipe, vram_budget="12GB")
    image = pipe("a cat").images[0]
    offloaded.shutdown()  # a plain pipeline again, on the host

Every model of the pipeline is managed as by `stagehand.layer`. One at a time runs in a pipeline, so the one that runs
takes the budget, and those that are idle give way to it (docs/residency.md). LoRA, callbacks, tiling and slicing work
as before; `pipe.device` names the card, and `pipe.to()` that card does nothing.
"""

from __future__ import annotations

from .. import device as devices
from .._core import Device
from .._torch import torch
from ..arguments import Size
from ..device import DeviceLike
from ..errors import StagehandError
from ..managed import runtime
from ..modes.layer import LayerRuntime, discover_layers, layer
from ..owning import Owning
from ..report import budget_bytes
from ..weights.guarded import other_offloading


class Offloaded(Owning):
    """A pipeline under management. As a context it ends with its shutdown.

    runtimes: name of the pipeline's component -> its LayerRuntime. moved: components in which nothing can stream, and
    which are on the device as a whole.
    """

    _instead = "call offload() for the other pipeline"

    def __init__(self) -> None:
        self.runtimes: dict[str, LayerRuntime] = {}
        self.moved: dict[str, torch.nn.Module] = {}

    def shutdown(self) -> None:
        """The pipeline's models are plain again, on the host. Again is fine."""
        for runtime in self.runtimes.values():
            runtime.shutdown()
        for model in self.moved.values():
            model.to("cpu")
        self.moved.clear()


def _models(pipe) -> dict[str, torch.nn.Module]:
    """Name -> model, of each model once."""
    components = getattr(pipe, "components", None)
    if not isinstance(components, dict):
        raise TypeError(f"pipe is of type {type(pipe).__name__}; give a pipeline of diffusers")
    found: dict[int, tuple] = {}
    for name, part in components.items():
        if isinstance(part, torch.nn.Module):
            found.setdefault(id(part), (name, part))
    return dict(found.values())


def _common_device(device, budget: int | None):
    """The device= of `layer`, for all models of a pipeline."""
    if isinstance(device, Device):
        return device
    target = devices.resolve(device, budget)
    if target.simulated or budget is None:
        return target.core
    name = devices.core_name(str(target.torch))
    del target  # else it would be a second Device of that card
    return Device(name, budget=budget)


def _managed(name: str, model, **options) -> LayerRuntime:
    try:
        return runtime(layer(model, name=name, **options))
    except StagehandError as error:
        raise type(error)(f"{name} of the pipeline: {error}", error.status, error.object, error.native_code) from error


def offload(pipe: object, vram_budget: Size | None = None, *, device: DeviceLike | None = None,
            **options: object) -> Offloaded:
    """Streams all models of a pipeline through the device, under one budget. The result ends it by `shutdown()`.

    pipe: DiffusionPipeline whose models are on the host.
    vram_budget: what all of them may take on the device together, as for `stagehand.layer`; activations come on top.
        None: it is found for each.
    device: as for `layer`. A stagehand.Device keeps the cap that it was given, and other models on it count, too.
    options: of `layer`, for each model.
    Raises TypeError where it is no pipeline, StagehandError where another offloading is on or a model is managed
    already, StagehandOOMError where the budget is too small for one of the models. The pipeline is then as it was.
    """
    models, budget = _models(pipe), budget_bytes(vram_budget, "vram_budget")
    for name, model in models.items():
        others = other_offloading(model)
        if others:
            raise StagehandError(f"{name} of the pipeline is offloaded already; its remove_all_hooks() ends that"
                                 f"{others}", object=name)
    common = _common_device(device, budget)
    offloaded = Offloaded()
    try:
        for name, model in models.items():
            if discover_layers(model):
                offloaded.runtimes[name] = _managed(name, model, vram_budget=budget, device=common, **options)
            else:
                offloaded.moved[name] = model
        for model in offloaded.moved.values():
            model.to(devices.resolve(common, budget).torch)
    except BaseException:
        offloaded.shutdown()
        raise
    return offloaded
