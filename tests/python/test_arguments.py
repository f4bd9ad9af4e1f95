"""What is given in place of a model: an error that says which argument it is, and of what type."""

import pytest
import stagehand
import torch
from torch import nn

from stagehand.compat import ramtorch

SETTINGS = {"memory": {"strategy": "stagehand", "stagehand": {"mode": "layer", "vram_budget": "1MB"}}}
WHERE = {
    "layer": lambda given: stagehand.layer(given, vram_budget="1MB"),
    "layer, from files": lambda given: stagehand.layer(given, vram_budget="1MB", source="nowhere"),
    "Runtime": lambda given: stagehand.Runtime(vram_budget="1MB").layer(given),
    "LayerRuntime": lambda given: stagehand.LayerRuntime(given, vram_budget="1MB"),
    "StagehandRuntime": lambda given: stagehand.StagehandRuntime(given),
    "session": lambda given: stagehand.session(given, SETTINGS),
    "capture": lambda given: stagehand.capture(given, torch.zeros(1)),
    "block_major": lambda given: stagehand.block_major(given, [nn.Identity()], [torch.zeros(1)]),
    "move_model_to_device": lambda given: ramtorch.move_model_to_device(given, "cpu"),
    "replace_linear_with_ramtorch": lambda given: ramtorch.replace_linear_with_ramtorch(given, "sim"),
    "reattach_is_ramtorch_flags": ramtorch.reattach_is_ramtorch_flags,
}


@pytest.mark.parametrize("given, said", [
    (None, "of type NoneType"), ({"weight": torch.zeros(1)}, "of type dict"), (torch.zeros(1), "of type Tensor"),
    ("model.pt", "of type str"), ([nn.Linear(2, 2)], "of type list"), (nn.Linear, "the class Linear")])
@pytest.mark.parametrize("where", WHERE)
def test_what_is_no_module_is_named_with_its_type(where, given, said):
    argument = "module" if "ramtorch" in where else "model"
    with pytest.raises(TypeError, match=f"^{argument} is {said}; give"):
        WHERE[where](given)


def test_load_says_what_it_was_given():
    with pytest.raises(TypeError, match="the first is a NoneType"):
        stagehand.load(None, "nowhere")
    with pytest.raises(TypeError, match="not NoneType"):
        stagehand.load(lambda: None, "nowhere")
