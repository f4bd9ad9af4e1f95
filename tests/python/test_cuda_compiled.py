"""Compiled blocks whose weights stream, on a real CUDA device, with PyTorch's own code generator.

Skipped where there is none. Run them on a machine with a GPU:
    python -m pytest tests/python/test_cuda_compiled.py
"""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)

import stagehand  # noqa: E402
from support import Stack, made, nbytes, runtime  # noqa: E402

pytestmark = pytest.mark.alone  # there is one card, and its memory is measured


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def pair(blocks: int = 6, d: int = 256):
    """A model on the host and its twin on the card, with compiled blocks both, and a budget that holds a part."""
    model = made(Stack, blocks, d, frozen=False)
    twin = copy.deepcopy(model).to("cuda")
    for each in (model, twin):
        for block in each.blocks:
            block.compile()
    held = sum(nbytes(block) for block in model.blocks)
    return model, twin, nbytes(model) - held + int(2.5 * held / blocks) + 2**20


def test_streamed_blocks_share_the_graph_and_the_values_of_resident_ones():
    model, twin, budget = pair()
    stagehand.layer(model, vram_budget=budget, device="cuda", inference_mode=True)
    first = 0
    try:
        with torch.no_grad():
            for step in range(4):
                x = torch.randn(64, 256, device="cuda", generator=torch.Generator("cuda").manual_seed(step))
                assert torch.equal(model(x), twin(x))
                graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
                first = first or graphs
                assert graphs == first <= 2, "compiled anew"
        assert not torch._dynamo.utils.counters["graph_break"]
        stats = runtime(model).stats
        assert stats["copies"] > 0 and runtime(model).compiled == [f"blocks.{i}" for i in range(6)]
    finally:
        runtime(model).shutdown()


def test_training_gives_the_values_of_the_compiled_resident_model():
    model, twin, budget = pair()
    stagehand.layer(model, vram_budget=budget, device="cuda")
    try:
        pairs = [(model, torch.optim.SGD(model.parameters(), lr=0.01)),
                 (twin, torch.optim.SGD(twin.parameters(), lr=0.01))]
        for step in range(3):
            x = torch.randn(64, 256, device="cuda", generator=torch.Generator("cuda").manual_seed(step))
            losses = []
            for each, optimizer in pairs:
                loss = each(x).pow(2).mean()
                loss.backward()
                losses.append(loss.detach())
                optimizer.step()
                optimizer.zero_grad()
            # The optimizers' own arithmetic differs between the processor and the card in the last bit.
            torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
        assert not torch._dynamo.utils.counters["graph_break"]
    finally:
        runtime(model).shutdown()
