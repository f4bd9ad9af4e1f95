"""What the error of a budget says besides: why so much is on the device at once, and what to do. The advice works."""

import re

import pytest
import stagehand
import torch
from support import Block, runtime, same, wrap
from torch import nn

X = torch.randn(2, 7, 64, generator=torch.Generator().manual_seed(0))


def encoder(layers=4, heads=4):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, heads, 256, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).requires_grad_(False).eval()


def outcome(build, budget, mode=torch.no_grad):
    """What four passes give, or the error of the budget."""
    model = build()
    wrap(model, budget, inference_mode=True)
    try:
        with mode():
            for _ in range(4):
                out = model(X)
        return out
    except stagehand.StagehandOOMError as error:
        return str(error)
    finally:
        runtime(model).shutdown()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_torchs_fast_path_is_named_with_a_budget_and_a_way_round_it(mode):
    with mode():
        want = encoder()(X)
    said = outcome(encoder, 320_000, mode)
    assert "unit 'layers.0.linear" in said
    assert "'layers.0' is an nn.TransformerEncoderLayer on torch's fast path" in said
    assert "set_fastpath_enabled(False)" in said and "Autograd" not in said
    least = int(re.search(r"a budget of (\d+) bytes", said).group(1))
    for more in range(0, 160_000, 20_000):
        assert same(outcome(encoder, least + more, mode), want)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with mode():
            want = encoder()(X)
        assert same(outcome(encoder, 320_000, mode), want)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


class Together(nn.Module):
    """Gives the weights of its layers to one expression."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(6))
        self.requires_grad_(False)

    def forward(self, x):
        weights = [layer.weight for layer in self.layers]
        for weight in weights:
            x = torch.tanh(nn.functional.linear(x, weight))
        return x


def test_weights_that_are_held_together_are_named():
    said = outcome(Together, 3 * 16384 + 4096)
    assert re.search(r"layers\.3\.weight is read from outside its module's forward, while layers\.0\.weight, "
                     r"layers\.1\.weight, layers\.2\.weight are on the device", said), said


def test_what_autograd_keeps_has_its_own_advice():
    class Kept(nn.Module):
        stagehand_saved_handles = False

        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block(64, 1.0) for _ in range(4))
            for block in self.blocks.modules():
                block.stagehand_saved_handles = False

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    said = outcome(Kept, 240_000, torch.enable_grad)
    assert "Autograd keeps the weights" in said and "outside" not in said
