"""A pipeline of diffusers below one cap.

    from stagehand.integrations.diffusers import offload

    pipe = FluxPipeline.from_pretrained(..., torch_dtype=torch.bfloat16)  # in RAM; no .to("cuda")
    offloaded = offload(pipe, vram_budget="12GB")
    image = pipe("a cat").images[0]
    offloaded.shutdown()  # a plain pipeline again, on the host

Every model of the pipeline is managed as by `stagehand.layer`. They take turns: the one that runs has what its own
activations leave of the cap, and those that are idle lend it (docs/residency.md). How much the activations take is seen
in each model's first step, for which half of the cap is kept free. LoRA, callbacks, tiling and slicing work as before;
`pipe.device` names the card, and `pipe.to()` that card does nothing. Tried with diffusers 0.42.
"""

from __future__ import annotations

from .. import device as devices
from .._core import Device
from .._torch import torch
from ..arguments import Size
from ..device import DeviceLike
from ..errors import StagehandError
from ..modes.layer import LayerRuntime, discover_layers
from ..owning import Owning
from ..report import budget_bytes
from ..session.finding import Finding, Turns
from ..weights.guarded import other_offloading


class Offloaded(Owning):
    """A managed pipeline. As a context it ends with its shutdown.

    runtimes: name of the pipeline's component -> its LayerRuntime. moved: components in which nothing can stream, and
    which are on the device as a whole.
    """

    _instead = "call offload() for the other pipeline"

    def __init__(self) -> None:
        self.runtimes: dict[str, LayerRuntime] = {}
        self.moved: dict[str, torch.nn.Module] = {}

    def shutdown(self) -> None:
        """The pipeline's models are plain again, on the host, but for those that another offloaded pipeline has. May be
        called again."""
        for runtime in self.runtimes.values():
            runtime.pipelines.discard(self)
            if not runtime.pipelines:
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


OF_ONE_MODEL = ("source", "map", "name")


class _Part(LayerRuntime):
    """A model of a pipeline. turns: of all its models. pipelines: those Offloaded that have it."""

    def __init__(self, model, turns: Turns, **options) -> None:
        self.turns = turns
        self.pipelines: set[Offloaded] = set()
        super().__init__(model, **options)

    def _find_with(self, nbytes: int) -> Finding:
        return Finding(self._target, nbytes, self.turns)


def _common_device(device, ceiling: int | None):
    """The Device of all models of a pipeline, with an account of their own where none was given."""
    if isinstance(device, Device):
        return device
    target = devices.resolve(device, ceiling)
    if target.simulated or ceiling is None:
        return target.core
    name = devices.core_name(str(target.torch))
    del target  # else it would be a second Device of that card
    return Device(name)


def _shared(models: dict, given: bool) -> dict[str, _Part]:
    """Name -> runtime, of the models that another offloaded pipeline has. given: a cap or a device was."""
    managed = {name: vars(model).get("_stagehand_layer_runtime") for name, model in models.items()}
    found = {name: part for name, part in managed.items() if isinstance(part, _Part)}
    names = ", ".join(found)
    if found and given:
        raise StagehandError(f"{names} of the pipeline: another offloaded pipeline has the same, and both work below "
                             f"its cap on its device: leave vram_budget and device out", object=names)
    if len({part.turns for part in found.values()}) > 1:
        raise StagehandError(f"{names} of the pipeline belong to pipelines with a cap for each: offload one of those "
                             f"first, and the others behind it without vram_budget", object=names)
    return found


def _others(core) -> int:
    """Bytes of the device that this process has already."""
    target = devices.resolve(core, None)
    return max(target.memory().get("framework_allocated", 0), core.residency()["occupied"])


def _managed(name: str, model, turns: Turns, **options) -> LayerRuntime:
    try:
        return _Part(model, turns, name=name, **options)
    except StagehandError as error:
        raise type(error)(f"{name} of the pipeline: {error}", error.status, error.object, error.native_code) from error


def offload(pipe: object, vram_budget: Size | None = None, *, device: DeviceLike | None = None,
            **options: object) -> Offloaded:
    """Streams all models of a pipeline through the device, below one cap. The result ends it by `shutdown()`.

    pipe: DiffusionPipeline whose models are on the host.
    vram_budget: what the pipeline may take on the device in all: weights, activations, latents. Bytes, or a size such
        as "12GB". What the process has there already comes on top. None: all that is free.
    device: as for `stagehand.layer`. A stagehand.Device keeps the cap that it was given, and other models on it count,
        too. Where the pipeline shares models with one that is offloaded, both work below the cap of that one, and
        vram_budget and device are left out.
    options: of LayerRuntime, for each model: ram_budget, dtype, inference_mode, telemetry, pool, transfer.
    Raises TypeError where it is no pipeline, StagehandError where another offloading is on or a model is managed
    already, StagehandOOMError where the budget is too small for the weights of one of the models. The pipeline is then
    as it was. A step whose activations leave less than the smallest budget of its model goes above the cap.
    """
    unfit = [name for name in OF_ONE_MODEL if name in options]
    if unfit:
        raise TypeError(f"{', '.join(unfit)} of stagehand.layer is of one model, and a pipeline has several: leave it "
                        f"out, or wrap the pipeline's models one by one with stagehand.layer")
    models, ceiling = _models(pipe), budget_bytes(vram_budget, "vram_budget")
    for name, model in models.items():
        others = other_offloading(model)
        if others:
            raise StagehandError(f"{name} of the pipeline is offloaded already; call its remove_all_hooks() first"
                                 f"{others}", object=name)
    shared = _shared(models, vram_budget is not None or device is not None)
    if shared:
        part = next(iter(shared.values()))
        common, turns = part.session.target.core, part.turns
    else:
        common = _common_device(device, ceiling)
        turns = Turns(None if ceiling is None else ceiling + _others(common), ceiling)
    offloaded = Offloaded()
    try:
        for name, model in models.items():
            if name in shared or discover_layers(model):
                part = shared.get(name) or _managed(name, model, turns, device=common, **options)
                part.pipelines.add(offloaded)
                offloaded.runtimes[name] = part
            else:
                offloaded.moved[name] = model
        for model in offloaded.moved.values():
            model.to(devices.resolve(common, ceiling).torch)
    except BaseException:
        offloaded.shutdown()
        raise
    return offloaded
