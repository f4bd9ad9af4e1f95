"""Quantised transfer: what a model computes is what it computes with weights that were encoded and decoded."""

import copy

import card
import pytest
import stagehand
import torch
from file_support import save
from stagehand import _core
from support import HostMasterGuard, Stack, TinyLM, aligned_copy, at_rest, made, nbytes, same
from torch import nn

ENCODINGS = ("int8", "fp8", "int4")


def decoded(weight: torch.Tensor, encoding: str) -> torch.Tensor:
    """What is left of a weight: the definitions, written again."""
    w = weight.detach().float().reshape(weight.shape[0], -1)
    if encoding == "int8":
        scale = (w.abs().amax(1, keepdim=True) / 127).clamp_min(1e-8)
        out = (w * (1 / scale)).round().clamp(-127, 127) * scale
    elif encoding == "fp8":
        scale = w.abs().amax(1, keepdim=True) / 448
        out = (w / scale).to(torch.float8_e4m3fn).float() * scale
    else:
        pad = -w.shape[1] % 64
        groups = nn.functional.pad(w, (0, pad)).reshape(w.shape[0], -1, 64)
        scale = (groups.abs().amax(2, keepdim=True) / 7).bfloat16().float()
        scale = torch.where(scale == 0, torch.full_like(scale, 2.0**-100), scale)
        out = ((groups / scale).round().clamp(-8, 7) * scale).reshape(w.shape[0], -1)[:, : w.shape[1]]
    return out.reshape(weight.shape).to(weight.dtype)


def reference(model, names, encoding):
    """An aligned copy with the named weights as they arrive."""
    ref = aligned_copy(model)
    parameters = dict(ref.named_parameters())
    with torch.no_grad():
        for name in names:
            parameters[name].copy_(decoded(parameters[name], encoding))
    return ref


def budget_of(model, share=0.5) -> int:
    return int(nbytes(model) * share) + (96 << 10)


def wrapped(model, encoding, **kwargs):
    """The model under layer mode, its runtime, and the reference for it."""
    plain = copy.deepcopy(model)
    kwargs.setdefault("vram_budget", budget_of(model))
    kwargs.setdefault("device", card.NAME)
    stagehand.layer(model, transfer=encoding, **kwargs)
    runtime = model._stagehand_layer_runtime
    names = list(runtime.quantised["error"])
    return runtime, names, reference(plain, names, encoding)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_results_are_those_of_the_decoded_weights(encoding, dtype):
    model = made(Stack, 6, 96).to(dtype)
    x = torch.randn(4, 96, dtype=dtype)
    before = copy.deepcopy(model.state_dict())
    runtime, names, ref = wrapped(model, encoding)
    assert len(names) >= 3 and all(name.endswith("weight") for name in names)
    with torch.no_grad():
        want = ref(x)
        assert not torch.equal(*at_rest((want, reference(ref, (), encoding)(x + 1))))
        for _ in range(4):
            with HostMasterGuard(model):
                assert same(model(x), want)
    errors = runtime.quantised["error"]
    low, high = {"int8": (1e-3, 0.01), "fp8": (0.01, 0.04), "int4": (0.03, 0.15)}[encoding]
    assert all(low < error < high for error in errors.values())
    state = model.state_dict()  # masters stay what they were
    assert all(same(state[name], before[name]) for name in before)
    runtime.shutdown()
    with torch.no_grad():
        assert all(same(value, before[name]) for name, value in model.state_dict().items())


def test_what_crosses_is_counted_and_what_stays_is_named():
    model = made(Stack, 8, 128)
    runtime, names, _ = wrapped(model, "int8")
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(4, 128))
    stats = runtime.stats
    units = {unit["name"] + ".weight": unit for unit in stats["units"]}
    for name, unit in units.items():
        if name in names:
            assert unit["transfer_bytes"] < 0.35 * unit["bytes"]  # float32
        else:
            assert unit["transfer_bytes"] == unit["bytes"]
            assert runtime.quantised["left"][name] == "it stays on the device"
    assert stats["quantised"] == runtime.quantised and stats["stage_bytes"] > 0 and not stats["expand_error"]
    assert stats["device_peak"] + stats["reserved_bytes"] <= stats["budget"]
    runtime.shutdown()


def test_the_choice_stays_when_plans_change():
    model = made(Stack, 8, 96)
    x = torch.randn(2, 96)
    runtime, names, ref = wrapped(model, "int8", vram_budget=budget_of(model, 0.8))
    with torch.no_grad():
        want = ref(x)
        assert same(model(x), want)
        runtime.set_vram_budget(budget_of(model, 0.4))
        assert same(model(x), want)
        runtime.set_vram_budget(budget_of(model, 0.8))
        assert same(model(x), want)
    assert list(runtime.quantised["error"]) == names
    runtime.shutdown()


def test_all_resident_means_nothing_is_quantised():
    model = made(Stack, 3, 96)
    x = torch.randn(2, 96)
    runtime, names, ref = wrapped(model, "int4", vram_budget="1GB")
    with torch.no_grad():
        assert not names and same(model(x), ref(x))
    runtime.shutdown()


class Convolutions(nn.Module):
    def __init__(self, c=24, n=8):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(c, c, 3, padding=1) for _ in range(n))
        self.layers[3].to(memory_format=torch.channels_last)

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def test_convolutions_and_embeddings():
    model = made(Convolutions)
    x = torch.randn(2, 24, 9, 9)
    runtime, names, ref = wrapped(model, "int8", vram_budget=budget_of(model, 0.4))
    with torch.no_grad():
        assert names and same(model(x), ref(x))
    assert "order" in runtime.quantised["left"]["layers.3.weight"]  # channels last
    runtime.shutdown()
    model = made(TinyLM, 400, 64)
    ids = model.example()
    runtime, names, ref = wrapped(model, "int8", vram_budget=budget_of(model, 0.4))
    with torch.no_grad():
        assert same(model(*ids), ref(*ids))
    assert "embed.weight" not in names and "head.weight" not in names
    runtime.shutdown()


def test_without_kernels_the_host_expands_and_says_so():
    model = made(Stack, 6, 96)
    x = torch.randn(4, 96)
    budget = budget_of(model)
    device = _core.Device("sim", memory_bytes=budget, expand=False)
    with pytest.warns(RuntimeWarning, match="expanded on the host.*without expansion"):
        runtime, names, ref = wrapped(model, "int8", device=device, vram_budget=budget)
    with torch.no_grad():
        assert names and same(model(x), ref(x)) and same(model(x), ref(x))
    assert all(unit["transfer_bytes"] == unit["bytes"] for unit in runtime.stats["units"])
    runtime.shutdown()


@pytest.mark.parametrize("how", ["add_", "data", "numpy", "optimizer-like"])
def test_written_weights_are_encoded_again(how):
    model = made(Stack, 6, 96)
    x = torch.randn(4, 96)
    runtime, names, _ = wrapped(model, "int8")
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        model(x)
        for name in names:
            weight = parameters[name]
            if how == "add_":
                weight.add_(0.25)
            elif how == "data":
                weight.data = weight.detach() * 2 + 0.125
            elif how == "numpy":
                weight.numpy()[:] = weight.numpy() * 0.5 + 0.25
            else:
                weight.data.mul_(1.5)
        ref = reference(copy.deepcopy(model), names, "int8")
        assert same(model(x), ref(x))
        assert same(model(x), ref(x))
    runtime.shutdown()


def test_weights_that_train_are_left_out_and_named():
    model = made(Stack, 6, 96, frozen=False)
    x = torch.randn(4, 96)
    ref = aligned_copy(model)
    stagehand.layer(model, transfer="int8", vram_budget=budget_of(model), device=card.NAME)
    runtime = model._stagehand_layer_runtime
    assert not runtime.quantised["error"]
    assert any("train" in reason for reason in runtime.quantised["left"].values())
    model(x).sum().backward()
    ref(x).sum().backward()
    assert same(dict(model.named_parameters())["blocks.2.up.weight"].grad, ref.blocks[2].up.weight.grad)
    runtime.shutdown()


def test_a_quantised_weight_refuses_to_train():
    model = made(Stack, 6, 96)
    runtime, names, _ = wrapped(model, "int8")
    weight = dict(model.named_parameters())[names[0]]
    weight.requires_grad_(True)
    with pytest.raises(stagehand.StagehandError, match="never quantised"):
        model(torch.randn(2, 96))
    weight.requires_grad_(False)
    with torch.no_grad():
        model(torch.randn(2, 96))
    runtime.shutdown()


class LoRA(nn.Module):
    """A frozen layer with a trainable low-rank path beside it."""

    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / 8)
        self.up = nn.Parameter(torch.randn(base.out_features, rank) / 8)

    def forward(self, x):
        return self.base(x) + x @ self.down.t() @ self.up.t()


def with_adapters(model):
    torch.manual_seed(7)
    for block in model.blocks:
        block.up = LoRA(block.up)
    return model


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_lora_over_quantised_weights_has_the_gradients_of_the_decoded_ones(encoding):
    model = with_adapters(made(Stack, 6, 96))
    x = torch.randn(4, 96, requires_grad=True)
    runtime, names, ref = wrapped(model, encoding)
    assert any("up.base" in name for name in names)
    for _ in range(3):
        x.grad = None
        model.zero_grad()
        ref.zero_grad()
        model(x).square().sum().backward()
        got, x.grad = x.grad, None
        ref(x).square().sum().backward()
        assert same(got, x.grad)
        for (name, a), (_, b) in zip(model.named_parameters(), ref.named_parameters()):
            if b.requires_grad:
                assert same(a.grad, b.grad)
    runtime.shutdown()


def test_a_value_written_that_is_not_finite_is_an_error_that_names_its_tensor():
    model = made(Stack, 6, 96)
    runtime, names, ref = wrapped(model, "int8")
    name = names[-1]
    weight = dict(model.named_parameters())[name]
    x = torch.randn(2, 96)
    with torch.no_grad():
        good = weight[3, 5].clone()
        weight[3, 5] = float("nan")
        with pytest.raises(stagehand.StagehandError, match=f"tensor '{name}' was written.*\\[[0-9]+, 5\\].*not finite"):
            for _ in range(2):
                model(x)
        weight[3, 5] = good
        assert same(model(x), ref(x))
    runtime.shutdown()


def test_values_that_are_not_finite_cross_in_full():
    model = made(Stack, 6, 96)
    with torch.no_grad():
        for block in model.blocks:
            block.up.weight[3, 5] = float("inf")
    runtime, names, ref = wrapped(model, "fp8")
    assert names and not any("up" in name for name in names)
    assert "not finite" in runtime.quantised["left"]["blocks.1.up.weight"]
    x = torch.randn(2, 96)
    with torch.no_grad():
        assert same(model(x).isnan(), ref(x).isnan())
    runtime.shutdown()


def test_options():
    for bad in ("int3", 8, True):
        with pytest.raises(ValueError, match="int8"):
            stagehand.layer(made(Stack, 2, 16), transfer=bad, device=card.NAME)


def test_block_mode():
    model = made(Stack, 6, 96)
    plain = copy.deepcopy(model)
    x = torch.randn(2, 96)
    config = stagehand.StagehandConfig(vram_budget=budget_of(model), transfer="int8")
    runtime = stagehand.StagehandRuntime(model, config, block_pattern=r"^blocks\.\d+$", device=card.NAME,
                                         inference_mode=True)
    with torch.no_grad():
        for _ in range(2):
            runtime.begin_step()
            got = model(x)
            runtime.end_step()
    names = list(runtime.quantised["error"])
    with torch.no_grad():
        assert names and same(got, reference(plain, names, "int8")(x))
    runtime.shutdown()
    with pytest.raises(ValueError, match="int8"):
        stagehand.StagehandConfig(transfer="int5")


def test_conversion_chooses_and_encodes_anew():
    model = made(Stack, 6, 96)
    plain = copy.deepcopy(model).bfloat16()
    runtime, _, _ = wrapped(model, "int8")
    model.bfloat16()
    names = list(runtime.quantised["error"])
    x = torch.randn(2, 96, dtype=torch.bfloat16)
    with torch.no_grad():
        assert same(model(x), reference(plain, names, "int8")(x))
    runtime.shutdown()


@pytest.mark.parametrize("encoding", ["int8", "int4"])
def test_a_model_from_files_is_quantised_on_the_way_in(tmp_path, encoding):
    plain = made(Stack, 6, 96)
    save(tmp_path / "stack.safetensors", plain.state_dict())
    budget = budget_of(plain)
    model = stagehand.load(lambda: Stack(6, 96).eval(), tmp_path / "stack.safetensors", vram_budget=budget,
                           device=card.NAME, transfer=encoding)
    runtime = model._stagehand_layer_runtime
    names = list(runtime.quantised["error"])
    ref = reference(plain, names, encoding)
    x = torch.randn(3, 96)
    with torch.no_grad():
        for _ in range(3):
            assert names and same(model(x), ref(x))
    assert runtime.stats["host_bytes"] < 0.5 * nbytes(plain)
    runtime.shutdown()


@pytest.mark.parametrize("expand", [True, False])
def test_packed_images_in_files(tmp_path, expand):
    """The core reads the codes and scales of a unit from where they lie in a file, in ranges; zero points too."""
    torch.manual_seed(0)
    rows, cols, units = 96, 200, 6
    q = torch.randint(-128, 128, (units, rows, 208), dtype=torch.int8)  # padded to the stride
    scale, zero = torch.rand(units, rows) + 0.1, torch.randint(-9, 9, (units, rows)).float()
    tensors = {f"{part}.{i}": t[i] for i in range(units) for part, t in (("q", q), ("s", scale), ("z", zero))}
    offsets = save(tmp_path / "packed.safetensors", tensors)
    codes, scales, zeros, total = 0, 20480, 20992, 21504  # of a unit's packed image, multiples of 512
    segments = _core.transfer_segments([("int8", "F32", 0, rows, cols, 208, codes, scales, zeros)])
    checkpoint = _core.Checkpoint(str(tmp_path / "packed.safetensors"))
    nbytes_of_unit = rows * cols * 4
    budget = 4 * nbytes_of_unit + 3 * total + (64 << 10)
    device = _core.Device("sim", memory_bytes=budget, expand=expand)
    runtime = _core.Runtime(device, budget, read_only=True)
    for i in range(units):
        ranges = [(0, offsets[f"q.{i}"], rows * 208, codes), (0, offsets[f"s.{i}"], rows * 4, scales),
                  (0, offsets[f"z.{i}"], rows * 4, zeros)]
        runtime.add_unit(f"unit.{i}", nbytes_of_unit, checkpoint=checkpoint, ranges=ranges, segments=segments,
                         packed_bytes=total)
    runtime.seal()
    for _ in range(3):
        runtime.step_begin()
        for i in range(units):
            got = torch.utils.dlpack.from_dlpack(runtime.acquire(i)).view(torch.float32).view(rows, cols).clone()
            want = (q[i, :, :cols].float() - zero[i][:, None]) * scale[i][:, None]
            assert same(got, want)
        runtime.step_end()
    stats = runtime.stats()
    assert bool(stats["expand_error"]) != expand
    if expand:
        assert stats["h2d_bytes"] <= 3 * units * total and stats["file_bytes"] > 0
    runtime.close()
    checkpoint.close()


def test_large_buffers_and_subclasses_that_stay_are_named():
    model = made(Stack, 2, 64)
    model.register_buffer("codes", torch.zeros(1 << 20, dtype=torch.int8))
    model.int8 = nn.Linear(64, 256)
    model.int8.weight = nn.Parameter(torch.ones(256, 64, dtype=torch.int8), requires_grad=False)  # streams as its bytes
    runtime, _, _ = wrapped(model, "int8", vram_budget=(1 << 20) + budget_of(made(Stack, 2, 64), 0.8) + (1 << 19))
    assert "buffer" in runtime.report["codes"]
    assert any(unit["name"] == "int8" for unit in runtime.stats["units"])
    assert runtime.quantised["left"]["int8.weight"] in ("it is torch.int8", "it stays on the device")
    runtime.shutdown()
