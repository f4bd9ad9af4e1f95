"""Several models: errors and reports tell them apart, by the name that the user gave or by their class."""

from __future__ import annotations

import pytest
import stagehand
import torch
from card import simulated_only
from support import Stack, device, made, nbytes, tight_budget


class Named(Stack):
    """Of a class of its own: models of other tests may still be open."""


def wrapped(card, name=None, blocks=4, seed=0, **options):
    model = made(Named, blocks, 48, seed=seed)
    stagehand.layer(model, vram_budget=nbytes(model), device=card, inference_mode=True, name=name, **options)
    return model._stagehand_layer_runtime


@simulated_only  # its devices are small
def test_errors_name_the_models_and_tell_two_of_one_class_apart():
    card = device(230_000)
    text, unet = wrapped(card, "text encoder", 3), wrapped(card, seed=1)
    assert (text.name, unet.name) == ("text encoder", "Named")
    text.reserve_for_resident()
    with torch.no_grad(), pytest.raises(stagehand.StagehandOOMError) as caught:
        unet.keep_resident().__enter__()
    assert "'Named' needs" in str(caught.value) and "'text encoder' has" in str(caught.value)
    twin = wrapped(card, seed=2)
    assert twin.name == "Named 2"
    with pytest.raises(stagehand.StagehandOOMError, match="'Named 2' needs"):
        twin.keep_resident().__enter__()
    other = wrapped(device(300_000), "text encoder")
    assert other.name == "text encoder 2"
    with pytest.raises(ValueError, match="'text encoder 2' is on another Device than 'text encoder'"):
        text.reserve_for_resident(other)
    for runtime in (text, unet, twin, other):
        runtime.shutdown()
    assert wrapped(device(300_000)).name == "Named"


def test_a_name_of_block_mode_and_of_files_and_after_a_conversion(tmp_path):
    from safetensors.torch import save_file

    model = made(Stack, 4, 48)
    save_file(model.state_dict(), str(tmp_path / "m.safetensors"))
    runtime = stagehand.StagehandRuntime(model, stagehand.StagehandConfig(vram_budget=tight_budget(model)),
                                         device=device(1 << 20), name="main")
    assert runtime.name == "main"
    runtime.prepare()
    model.double()
    assert runtime.name == runtime.session.name == "main"
    loaded = stagehand.load(lambda: Stack(4, 48), tmp_path / "m.safetensors", vram_budget="200KB", device="sim",
                            name="main")
    assert loaded._stagehand_layer_runtime.name == "main 2"
    loaded._stagehand_layer_runtime.shutdown()
    runtime.shutdown()
