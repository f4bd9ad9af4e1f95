"""Models that other libraries have quantised: their weights stay on the device, are named and counted as what they hold, and the
rest of the model streams. Each library is skipped where it is not installed."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import stagehand  # noqa: E402
from support import same  # noqa: E402
from torch import nn  # noqa: E402

WIDTH = 256


def half_quantised():
    """Linears, every second of which a library may quantise."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(8)]).eval().requires_grad_(False)


def second(module, name) -> bool:
    return isinstance(module, nn.Linear) and int(name) % 2 == 1


def torchao(config):
    def quantise(model):
        library = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
        library.quantize_(model, getattr(library, config)(), filter_fn=second)
    return quantise


def quanto(kind):
    def quantise(model):
        library = pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed")
        library.quantize(model, weights=getattr(library, kind), include=["1", "3", "5", "7"])
        library.freeze(model)
    return quantise


def bitsandbytes(model):
    library = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    for i in range(1, 8, 2):
        layer = library.nn.Linear4bit(WIDTH, WIDTH, quant_type="nf4", compute_dtype=torch.float32)
        layer.load_state_dict(model[i].state_dict())
        model[i] = layer.requires_grad_(False).to("cpu")


@pytest.mark.parametrize("quantise, most", [
    pytest.param(torchao("Int8WeightOnlyConfig"), 1.1, id="torchao-int8"),
    pytest.param(torchao("Int8DynamicActivationInt8WeightConfig"), 1.1, id="torchao-int8-dynamic"),
    pytest.param(torchao("Float8WeightOnlyConfig"), 1.1, id="torchao-fp8"),
    pytest.param(quanto("qint8"), 1.1, id="quanto-int8"),
    pytest.param(quanto("qfloat8"), 1.1, id="quanto-fp8"),
    pytest.param(quanto("qint4"), 0.65, id="quanto-int4"),
    pytest.param(bitsandbytes, 0.6, id="bitsandbytes-nf4"),
])
def test_quantised_weights_stay_and_the_rest_streams(quantise, most):
    """most: bytes of a quantised weight for each element."""
    model = half_quantised()
    quantise(model)
    x = torch.randn(4, WIDTH)
    with torch.no_grad():
        want = model(x)
    budget = int(4 * most * WIDTH ** 2) + 2 * 4 * WIDTH ** 2 + 40000  # what stays, and two of the four that stream
    stagehand.layer(model, vram_budget=budget, device="sim", inference_mode=True)
    runtime = model._stagehand_layer_runtime
    with torch.no_grad():
        for _ in range(3):
            assert same(model(x), want)
    stats = runtime.stats
    assert stats["copies"] > 4 and stats["device_peak"] + stats["reserved_bytes"] <= budget
    assert {f"{i}.weight" for i in (1, 3, 5, 7)} <= set(runtime.report)
    runtime.shutdown()
    with torch.no_grad():
        assert same(model(x), want)
