"""Real architectures on the simulated device, bit for bit: those of bench/architectures.py, plain and with compiled
blocks."""

from __future__ import annotations

import pathlib
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import stagehand  # noqa: E402
from support import aligned_copy, nbytes, needs_regions, runtime, same, wrap  # noqa: E402
from torch import nn  # noqa: E402

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "bench"))
import architectures  # noqa: E402

SIZES = {"dit": (2, 96, 40), "llama": (2, 96, 12), "unet": (2, 32, 16)}
BLOCKS = {"dit": (architectures.DoubleBlock, architectures.SingleBlock),
          "unet": (architectures._Res, architectures._Attention)}


def model_of(name):
    if name == "llama":
        pytest.importorskip("transformers", reason="transformers is not installed")
    blocks, hidden, size = SIZES[name]
    torch.manual_seed(0)
    model = architectures.build(name, blocks, hidden).float()  # bf16 differs with the place of a tensor on a CPU
    return model, lambda: _floating(model.inputs(size, hidden))


def _floating(x):
    return x.float() if x.is_floating_point() else x


def blocks_of(name, model):
    if name == "llama":
        return list(model.model.model.layers)
    return [module for module in model.modules() if isinstance(module, BLOCKS[name])]


@pytest.mark.parametrize("share", [0.35, 0.7])
@pytest.mark.parametrize("name", SIZES)
def test_an_architecture_streams(name, share):
    model, example = model_of(name)
    ref = aligned_copy(model)
    largest = max(sum(p.nbytes for p in module.parameters(recurse=False)) for module in model.modules())
    wrap(model, max(int(share * nbytes(model)), 4 * largest))
    with torch.inference_mode():
        for _ in range(3):
            x = example()
            assert same(model(x), ref(x))
    stats = runtime(model).stats
    assert stats["copies"] > 6 and stats["device_peak"] + stats["reserved_bytes"] <= stats["budget"]


@pytest.mark.parametrize("name", ["dit", "llama"])
def test_an_architecture_streams_with_compiled_blocks(name):
    needs_regions()
    model, example = model_of(name)
    model.passes = 3
    ref = aligned_copy(model)
    torch._dynamo.reset()
    for block in blocks_of(name, model):
        block.compile(backend="aot_eager", dynamic=True)
    largest = max(nbytes(block) for block in blocks_of(name, model))
    wrap(model, nbytes(model) // 2 + 2 * largest)
    with torch.no_grad():
        for _ in range(2):
            x = example()
            assert same(model(x), ref(x))
    assert len(runtime(model).compiled) == len(blocks_of(name, model))
    torch._dynamo.reset()


def test_a_generation_with_transformers_own_loop():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
                                      num_attention_heads=4, num_key_value_heads=2, bos_token_id=None,
                                      eos_token_id=None, pad_token_id=0)
    model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    ref = aligned_copy(model)
    wrap(model, nbytes(model) // 2)
    ids = torch.randint(1, 300, (2, 9))
    for options in ({"do_sample": False}, {"num_beams": 3, "do_sample": False}):
        want = ref.generate(ids, max_new_tokens=12, **options)
        assert same(model.generate(ids, max_new_tokens=12, **options), want)


def test_layers_that_share_all_their_weights():
    """One block called many times, as looped transformers do, beside others of their own."""
    torch.manual_seed(0)
    shared = nn.Linear(64, 64)
    model = nn.Sequential(*[nn.Sequential(shared, nn.GELU(), nn.Linear(64, 64))
                            for _ in range(5)]).requires_grad_(False)
    ref = aligned_copy(model)
    stagehand.layer(model, vram_budget=3 * 17000, device="sim", inference_mode=True)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(2, 64)
            assert same(model(x), ref(x))
