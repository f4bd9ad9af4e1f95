"""Models that other libraries have quantised: weights of torchao and quanto stream as the bytes that they hold, those
of bitsandbytes stay on the device and are named. Each library is skipped where it is not installed."""

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


KINDS = [
    pytest.param(torchao("Int8WeightOnlyConfig"), 1.1, id="torchao-int8"),
    pytest.param(torchao("Int8DynamicActivationInt8WeightConfig"), 1.1, id="torchao-int8-dynamic"),
    pytest.param(torchao("Float8WeightOnlyConfig"), 1.1, id="torchao-fp8"),
    pytest.param(quanto("qint8"), 1.1, id="quanto-int8"),
    pytest.param(quanto("qfloat8"), 1.1, id="quanto-fp8"),
    pytest.param(quanto("qint4"), 0.65, id="quanto-int4"),
    pytest.param(quanto("qint2"), 0.4, id="quanto-int2"),
]


@pytest.mark.parametrize("inference_mode", [False, True])
@pytest.mark.parametrize("quantise, most", KINDS)
def test_quantised_weights_stream_as_what_they_hold(quantise, most, inference_mode):
    """most: bytes of a quantised weight for each element."""
    model = half_quantised()
    quantise(model)
    if not inference_mode:
        model.requires_grad_(False)  # quanto's take a gradient otherwise
    weights = [model[i].weight for i in (1, 3, 5, 7)]
    x = torch.randn(4, 3, WIDTH)
    with torch.no_grad():
        want = model(x)
    budget = 2 * 4 * WIDTH ** 2 + int(most * WIDTH ** 2) + 40000  # two of those in full, and one of these
    stagehand.layer(model, vram_budget=budget, device="sim", inference_mode=inference_mode)
    runtime = model._stagehand_layer_runtime
    with torch.no_grad():
        for _ in range(3):
            assert same(model(x), want)
    stats = runtime.stats
    assert stats["copies"] > 8 and stats["device_peak"] + stats["reserved_bytes"] <= budget
    sizes = {unit.name: unit.nbytes for unit in runtime.session.units}
    assert all(0 < sizes[f"{i}"] <= most * WIDTH ** 2 + 1024 for i in (1, 3, 5, 7))
    assert not {f"{i}.weight" for i in range(8)} & set(runtime.report)
    runtime.shutdown()
    with torch.no_grad():
        assert same(model(x), want)
    assert all(model[i].weight is weight for i, weight in zip((1, 3, 5, 7), weights))


class Adapted(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x):
        return torch.tanh(self.base(x) + self.up(self.down(x)))


@pytest.mark.parametrize("quantise, most", KINDS)
def test_adapters_train_over_them(quantise, most):
    def train(model):
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        for step in range(3):
            model(x + step).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters() if p.requires_grad]

    def build():
        model = half_quantised()
        quantise(model)
        model.requires_grad_(False)
        torch.manual_seed(1)
        return nn.Sequential(*(Adapted(layer) for layer in model))

    x = torch.randn(4, WIDTH)
    try:
        want = train(build())
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"the library does not train so: {error}")
    model = build()
    budget = 3 * 4 * WIDTH ** 2 + 8 * 8 * 4 * WIDTH + 60000
    stagehand.layer(model, vram_budget=budget, device="sim")
    assert same(train(model), want)
    stats = model._stagehand_layer_runtime.stats
    assert stats["copies"] > 8 and stats["device_peak"] + stats["reserved_bytes"] <= budget
    model._stagehand_layer_runtime.shutdown()


@pytest.mark.parametrize("quantise, most", [
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
