"""What stays on the device is counted anew when something came after wrapping: when that is, beside whom, and what a
refusal leaves behind."""

import pytest
import stagehand
import torch
from support import aligned_copy, device, made, runtime, same
from torch import nn

D = 128
ONE = D * D * 4


class Chain(nn.Module):
    """Nothing in it stays on the device."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D, bias=False) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def within(model):
    session = runtime(model).session
    return session.core.stats()["device_bytes"] + session.reserved <= session.budget


def managed(weights=4):
    """A model with room for so many of its weights, on a device with room for far more; its copy; an input."""
    model = made(Chain)
    ref = aligned_copy(model)
    stagehand.layer(model, vram_budget=weights * ONE, device=device(256 * ONE))
    return model, ref, torch.randn(2, D)


def test_a_step_that_could_not_begin_is_not_open():
    model, ref, x = managed()
    own = runtime(model)
    with torch.no_grad():
        want = ref(x)
        assert same(model(x), want)
        model.big = nn.Parameter(torch.zeros(5 * D * D))
        for _ in range(2):
            with pytest.raises(stagehand.StagehandOOMError, match="big"):
                own.begin_step()
            own.end_step()
            with pytest.raises(stagehand.StagehandOOMError, match="big"):
                model(x)
            with pytest.raises(stagehand.StagehandOOMError, match="big"), own.managed_forward():
                model(x)
            assert within(model)
        del model.big
        steps = own.stats["steps"]
        own.begin_step()
        assert same(model(x), want)
        own.end_step()
        assert own.stats["steps"] == steps + 1
    own.shutdown()
