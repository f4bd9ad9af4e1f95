"""load: models built without memory for their weights, bound to their files, streamed from there."""

import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import card  # noqa: E402
from file_support import (  # noqa: E402
    BLOCKS, Stack, TinyLM, made, nbytes, open_files, same_state, save, save_sharded, sim, state, tight_budget,
)
from support import aligned_copy, same  # noqa: E402
from torch import nn  # noqa: E402

import stagehand  # noqa: E402
from stagehand import CheckpointError, DtypeMismatchError, StagehandError, StagehandOOMError  # noqa: E402
from stagehand.modes.load import parameters_on_meta  # noqa: E402


@pytest.fixture
def stack(tmp_path):
    plain = made(Stack)
    reference = aligned_copy(plain)
    save(tmp_path / "w.safetensors", state(plain))
    return reference, tmp_path / "w.safetensors"


def runtime_of(model):
    return getattr(model, "_stagehand_runtime", None) or model._stagehand_layer_runtime


# ---- building


def test_parameters_are_made_on_meta_and_buffers_are_real():
    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 4)
            self.rnn = nn.LSTM(3, 3)
            self.both = nn.Parameter(torch.ones(2))
            self.again = self.both
            self.tag = nn.Parameter(torch.ones(2))
            self.tag.note = "kept"
            self.parts = nn.ParameterList([nn.Parameter(torch.ones(3))])
            self.register_buffer("table", torch.arange(4))

    before = nn.Module.register_parameter
    with parameters_on_meta():
        part = Part()
        own = nn.Parameter(torch.ones(2))
        a, b = nn.Module(), nn.Module()
        a.p, b.p = own, own
    assert nn.Module.register_parameter is before
    assert all(p.is_meta for p in part.parameters()) and len(list(part.parameters())) == 9
    assert part.again is part.both and part.lin.weight.shape == (4, 4)
    assert a.p is b.p and a.p.is_meta and not own.is_meta
    assert torch.equal(part.table, torch.arange(4))
    assert nn.Linear(2, 2).weight.is_meta is False


def test_building_that_fails_restores_torch():
    before = nn.Module.register_parameter
    with pytest.raises(ZeroDivisionError):
        stagehand.load(lambda: 1 / 0, "nowhere")
    with pytest.raises(TypeError, match="must return an nn.Module"):
        stagehand.load(lambda: 5, "nowhere")
    assert nn.Module.register_parameter is before


# ---- running


@pytest.mark.parametrize("blocks", [None, BLOCKS], ids=["layer", "block"])
@pytest.mark.parametrize("inference_mode", [True, False])
def test_a_loaded_model_equals_the_reference(stack, blocks, inference_mode):
    reference, path = stack
    budget, x = tight_budget(reference), torch.randn(3, 64)
    model = stagehand.load(Stack, path, vram_budget=budget, blocks=blocks, inference_mode=inference_mode,
                           device=sim(budget))
    with torch.no_grad():
        for _ in range(3):
            assert same(model(x), reference(x))
    runtime = runtime_of(model)
    stats = runtime.stats
    assert stats["copies"] > len(stats["units"])
    assert (stats["host_bytes"] == 0) == inference_mode, "what may be trained is in RAM"
    assert all(p.requires_grad != inference_mode for p in model.parameters())
    assert same_state(model, reference)
    runtime.shutdown()
    with torch.no_grad():
        assert same(model(x), reference(x))
    assert open_files(path.parent) == []


def test_shards_and_a_module_that_is_on_meta_already(tmp_path):
    reference = made(Stack)
    save_sharded(tmp_path, state(reference), 4)
    with torch.device("meta"):
        built = Stack()
    model = stagehand.load(built, tmp_path, vram_budget=1 << 20, device=card.NAME)
    assert model is built
    x = torch.randn(2, 64)
    assert same(model(x), reference(x))
    runtime_of(model).shutdown()


def test_every_parameter_gets_its_own_values_and_tied_ones_share(tmp_path):
    """On the meta device all addresses are 0, and so are those of empty parameters."""

    class Odd(TinyLM):
        def __init__(self):
            super().__init__()
            self.empty = nn.ParameterList([nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(0, 3))])
            self.one = nn.Parameter(torch.randn(1))
            self.scalar = nn.Parameter(torch.randn(()))

        def forward(self, ids):
            return super().forward(ids) * self.one * self.scalar

    reference = made(Odd)
    save(tmp_path / "w.safetensors", state(reference))
    model = stagehand.load(Odd, tmp_path / "w.safetensors", vram_budget=nbytes(reference) + (1 << 16), device=card.NAME)
    assert model.head.weight is model.embed.weight
    assert model.empty[0].shape == (0,) and model.empty[1].shape == (0, 3) and model.scalar.shape == ()
    assert same_state(model, reference)
    ids = torch.randint(0, 500, (2, 4))
    for _ in range(2):
        assert same(model(ids), reference(ids))
    assert sum(u["name"] in ("embed", "head") for u in runtime_of(model).stats["units"]) == 1
    runtime_of(model).shutdown()


def test_a_recurrent_net_sees_the_loaded_weights(tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp = nn.Linear(8, 300)
            self.rnn = nn.LSTM(300, 200)

        def forward(self, x):
            return self.rnn(self.inp(x))[0]

    reference = made(Net)
    save(tmp_path / "w.safetensors", state(reference))
    model = stagehand.load(Net, tmp_path / "w.safetensors", vram_budget="4MiB", device=card.NAME)
    x = torch.randn(5, 2, 8)
    for _ in range(2):
        assert same(model(x), reference(x))
    runtime_of(model).shutdown()
    assert same(model(x), reference(x))


class Normed(Stack):
    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(64)
        self.register_buffer("table", torch.linspace(0, 1, 64), persistent=False)

    def forward(self, x):
        return self.bn(super().forward(x)) + self.table


def test_buffers_come_from_the_file_or_from_building(tmp_path):
    reference = made(Normed).eval()
    reference.bn.running_mean.normal_()
    save(tmp_path / "w.safetensors", state(reference))
    model = stagehand.load(lambda: Normed().eval(), tmp_path / "w.safetensors", vram_budget=1 << 20, device=card.NAME)
    x = torch.randn(3, 64)
    assert same(model(x), reference(x))
    runtime_of(model).shutdown()
    with torch.device("meta"):
        built = Normed()
    with pytest.raises(StagehandError, match="buffer table is on the meta device"):
        stagehand.load(built, tmp_path / "w.safetensors", vram_budget=1 << 20, device=card.NAME)
    assert all(p.is_meta for p in built.parameters()) and all(b.is_meta for b in built.buffers())


# ---- refusals


def changed(path, reference, change):
    tensors = state(reference)
    change(tensors)
    save(path, tensors)


@pytest.mark.parametrize(
    "change, error, words",
    [
        (lambda t: t.pop("inp.bias"), CheckpointError, r"no tensor for inp\.bias"),
        (lambda t: t.update({"inp.bias": torch.zeros(3)}), CheckpointError, r"inp\.bias has shape \(64,\).*\(3,\)"),
        (lambda t: t.update({"inp.bias": torch.zeros(64).half()}), DtypeMismatchError,
         r"inp\.bias is torch\.float32.*torch\.float16"),
        (lambda t: t.update({"stray": torch.zeros(3)}), CheckpointError, r"does not use: stray.*strict=False"),
    ],
    ids=["missing", "shape", "dtype", "unexpected"],
)
def test_what_does_not_fit_is_named_and_leaves_a_given_module_alone(stack, change, error, words):
    reference, path = stack
    changed(path, reference, change)
    with torch.device("meta"):
        built = Stack()
    before = list(built.parameters())
    with pytest.raises(error, match=words) as caught:
        stagehand.load(built, path, vram_budget=1 << 20, device=card.NAME)
    assert "w.safetensors" in str(caught.value)
    after = list(built.parameters())
    assert len(after) == len(before) and all(a is b for a, b in zip(after, before))
    assert all(p.is_meta and p.requires_grad for p in after)
    assert open_files(path.parent) == []


def test_leftovers_may_be_allowed(stack):
    reference, path = stack
    changed(path, reference, lambda t: t.update({"stray": torch.zeros(3)}))
    with pytest.warns(RuntimeWarning, match="does not use: stray"):
        model = stagehand.load(Stack, path, vram_budget=1 << 20, device=card.NAME, strict=False)
    runtime_of(model).shutdown()


@pytest.mark.parametrize("blocks", [None, BLOCKS], ids=["layer", "block"])
def test_a_budget_that_is_too_small_is_refused(stack, blocks):
    _, path = stack
    with torch.device("meta"):
        built = Stack()
    before = set(built.__dict__)
    with pytest.raises(StagehandOOMError, match="smallest budget|no room"):
        stagehand.load(built, path, vram_budget=50 * 1024, blocks=blocks, device=card.NAME)
    assert all(p.is_meta for p in built.parameters()) and set(built.__dict__) == before
    assert open_files(path.parent) == []


def test_dtype_is_what_the_file_must_have(tmp_path):
    reference = made(Stack).to(torch.bfloat16)
    save(tmp_path / "w.safetensors", state(reference))
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    with pytest.raises(DtypeMismatchError, match="build the model in torch.bfloat16"):
        stagehand.load(Stack, tmp_path / "w.safetensors", device=card.NAME)
    with pytest.raises(DtypeMismatchError, match="keep the file's dtype"):
        stagehand.load(Stack, tmp_path / "w.safetensors", dtype=torch.float16, device=card.NAME)
    model = stagehand.load(Stack, tmp_path / "w.safetensors", dtype=torch.bfloat16, vram_budget=1 << 20,
                           device=card.NAME)
    assert same(model(x), reference(x))
    runtime_of(model).shutdown()


# ---- memory

CHILD = """
import sys, threading, time
import torch, stagehand
from torch import nn
from file_support import anonymous_bytes, save
from stagehand import _core
D = 1024

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(D, 4 * D, bias=False) for _ in range(16))
    def forward(self, x):
        for block in self.blocks:
            x = block(x)[:, :D]
        return x

with torch.no_grad():
    # first what torch and the package load and start once: here a net of one small layer
    save(sys.argv[1] + "/small.safetensors", {"weight": torch.ones(64, 64)})
    small = stagehand.load(lambda: nn.Linear(64, 64, bias=False), sys.argv[1] + "/small.safetensors",
                           vram_budget=1 << 20, device="sim")
    small(torch.randn(2, 64))
    small._stagehand_layer_runtime.shutdown()
    block, total = 4 * D * D * 4, 16 * 4 * D * D * 4
    base = anonymous_bytes()
    budget = 2 * block
    peak, running = [0], True
    def watch():
        while running:
            peak[0] = max(peak[0], anonymous_bytes() - base)
            time.sleep(0.001)
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    model = stagehand.load(Net, sys.argv[1], vram_budget=budget, device=_core.Device("sim", memory_bytes=budget))
    x = torch.full((1, D), 0.5)
    for _ in range(2):
        out = model(x)
    stats = model._stagehand_layer_runtime.stats
    running = False
    thread.join()
print(out.sum().item(), peak[0] - budget, block, stats["h2d_bytes"], total)
"""


def test_peak_memory_of_eight_shards_is_a_few_blocks(tmp_path):
    """8 shards of 32 MiB: 16 blocks of 16 MiB. Beside the simulated device, which is host memory here, less than
    two blocks and a constant are anonymous at any time."""
    side, tensors = 1024, {}
    for i in range(16):
        tensors[f"blocks.{i}.weight"] = torch.eye(side).repeat(4, 1) * (1 + i / 16)
    save_sharded(tmp_path, tensors, 8)
    expected = torch.full((1, side), 0.5)
    for i in range(16):
        expected = (expected @ tensors[f"blocks.{i}.weight"].T)[:, :side]
    del tensors
    done = subprocess.run([sys.executable, "-c", CHILD, tmp_path], capture_output=True, text=True,
                          cwd=os.path.dirname(__file__), timeout=300)
    assert done.returncode == 0, done.stderr
    total_out, anonymous, block, moved, total = map(float, done.stdout.split())
    assert total_out == pytest.approx(expected.sum().item(), rel=1e-5)
    assert moved >= 1.5 * total, "both passes streamed"
    assert anonymous < 2 * block + (48 << 20), f"{anonymous / 2**20:.0f} MiB beside the device"
