"""Quantised files as sources: what a model computes is what it computes with the values that the file decodes to."""

import copy
import gc
import io
import os
import random

import card
import pytest
import stagehand
import torch
from file_support import from_outside, open_files, save
from quant_models import FORMS, FOUR_BITS, PACKED, differing_weights, layers_of, resident, write
from stagehand import CheckpointError, DtypeMismatchError, StagehandError, _core
from stagehand.weights.fileweight import FileWeight
from support import (
    HostMasterGuard, Stack, TinyLM, aligned_copy, at_rest, made, nbytes, random_model, runtime, same, smallest_budget)
from torch import nn

ENCODINGS = {"svdquant": "int4-group", "svdquant-smooth": "int4-group", "hybrid": "int4-row-hadamard",
             "v3-int4": "int4-group-hadamard", "v3-nvfp4": "nvfp4-hadamard"}
BLOCKS = r"^blocks\.\d+$"
D = 256


def stack(dtype=torch.float32):
    return made(Stack, 3, D, 1).to(dtype)


def build(dtype=torch.float32):
    return lambda: Stack(3, D, 1).to(dtype)


def half(model) -> int:
    return nbytes(model) // 2 + (160 << 10)


def check(model, ref, x, passes=4, guard=True):
    with torch.no_grad():
        want = ref(x)
        for _ in range(passes):
            with HostMasterGuard(model) if guard else torch.no_grad():
                assert same(model(x), want)


# ---- values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_results_are_those_of_the_decoded_weights(tmp_path, form, dtype):
    plain, x = stack(dtype), torch.randn(3, D, dtype=dtype)
    path = write(tmp_path, plain, form)
    ref, kwargs = resident(plain, path), {"vram_budget": half(plain), "device": card.NAME, "inference_mode": True}
    if form == "v1":  # holds layers alone: the rest stays what the model has
        model = stagehand.layer(copy.deepcopy(plain), source=path, **kwargs)
    else:
        model = stagehand.load(build(dtype), path, **kwargs)
    weights = {f"{name}.weight" for name in layers_of(plain)}
    assert not torch.equal(*at_rest((ref(x), plain(x))))
    check(model, ref, x)
    told, stats = runtime(model).quantised, runtime(model).stats
    assert set(told["files"] if form in PACKED else told["decoded"]) == weights
    assert not (told["decoded"] if form in PACKED else told["files"])
    if form in PACKED:
        assert stats["host_bytes"] == 0 and set(told["files"].values()) == {ENCODINGS.get(form, "int8-row")}
        share = 0.6 if form not in FOUR_BITS else 0.58  # at 256 x 256 the factors are half of it, and biases stay
        in_bits = [u for u in stats["units"] if u["transfer_bytes"] != u["bytes"] or u["bytes"] > 4096]
        assert len(in_bits) == 8
        assert all(u["transfer_bytes"] < u["bytes"] * (share / 2 if dtype is torch.float32 else share) for u in in_bits)
    else:
        full = {name: p.numel() * p.element_size() for name, p in plain.named_parameters()}
        assert all(told["decoded"][name]["bytes"] == full[name] and told["decoded"][name]["reason"] for name in weights)
        assert stats["host_bytes"] >= sum(full[name] for name in weights)
    assert stats["device_peak"] + stats["reserved_bytes"] <= stats["budget"]
    values = model.state_dict()
    assert all(type(values[name]) is torch.Tensor and same(values[name], value)
               for name, value in ref.state_dict().items())
    runtime(model).shutdown()
    check(model, ref, x, guard=False)


@pytest.mark.parametrize("columns", [88, 90])
def test_rows_of_any_length_stay_packed(tmp_path, columns):
    plain, x = made(Stack, 8, columns, 1), torch.randn(3, columns)
    path = write(tmp_path, plain, "v2-narrow")  # rows of so many codes
    model = stagehand.load(lambda: Stack(8, columns, 1), path, vram_budget=half(plain), device=card.NAME)
    check(model, resident(plain, path), x)
    assert runtime(model).quantised["files"]["inp.weight"] == "int8-row"
    runtime(model).shutdown()


@pytest.mark.parametrize("form", ["v2-zeros", "svdquant-smooth", "v3-int4"])
def test_blocks_and_what_is_outside_of_them(tmp_path, form):
    plain, x = stack(), torch.randn(3, D)
    path = write(tmp_path, plain, form, leave=("blocks.1.up",))
    ref = resident(plain, path)
    model = stagehand.load(build(), path, vram_budget=half(plain) + (512 << 10), blocks=BLOCKS, device=card.NAME)
    opened = model._stagehand_runtime
    told = opened.quantised
    assert set(told["files"]) == {f"blocks.{i}.{part}.weight" for i, part in (
        (0, "up"), (0, "down"), (1, "down"), (2, "up"), (2, "down"))}
    assert not isinstance(model.inp.weight, FileWeight), "what stays on the device is a Parameter like others"
    check(model, ref, x, guard=False)
    opened.shutdown()

    model = copy.deepcopy(plain)
    opened = stagehand.StagehandRuntime(model, stagehand.StagehandConfig(vram_budget=half(plain) + (512 << 10)), BLOCKS,
                                        inference_mode=True, device=card.NAME)
    opened.convert_registry_to_file_backed(path)
    with torch.no_grad(), opened.managed_forward():
        outside = resident(plain, path)
        outside.inp, outside.out = aligned_copy(plain).inp, aligned_copy(plain).out
        assert same(model(x), outside(x))
    told = opened.quantised
    assert len(told["files"]) == 5 and not told["decoded"], told
    opened.shutdown()


class Tall(nn.Module):
    """Layers of more rows than a segment takes, and of a number of them that is no multiple of anything."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(D, 900), nn.Linear(D, 1026), nn.Linear(2 * D, 700)

    def forward(self, x):
        return self.c(self.b(self.a(x)[:, :D])[:, :2 * D])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["svdquant-smooth", "v3-int4", "v3-nvfp4"])
def test_layers_of_many_segments(tmp_path, form, dtype):
    plain, x = made(Tall).to(dtype), torch.randn(3, D, dtype=dtype)
    path = write(tmp_path, plain, form)
    quant = _core.QuantFile(path)
    codes = [r for r in quant.segments("b", "BF16", 0, 0, 1 << 16)[1] if r[2] % (D // 2) == 0 and r[2] > 8192]
    assert len(codes) > 2, "one segment would try nothing"
    quant.close()
    model = stagehand.load(lambda: Tall().to(dtype), path, vram_budget=nbytes(plain) * 3 // 4 + (200 << 10),
                           device="check+sim")
    check(model, resident(plain, path), x)
    assert len(runtime(model).quantised["files"]) == 3 and runtime(model).stats["expand_error"] == ""
    runtime(model).shutdown()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FOUR_BITS)
def test_every_bit_of_the_weights_is_the_decoders(tmp_path, form, dtype):
    wrong, told, stats = differing_weights(tmp_path, form, dtype, card.NAME)
    assert not wrong and not told["decoded"] and len(told["files"]) >= 4 and stats["host_bytes"] == 0


class Two(nn.Linear):
    """A module of which the file holds one parameter in few bits and one as it is."""

    def __init__(self, *args):
        super().__init__(*args)
        self.more = nn.Parameter(torch.randn(D, D) / 16)

    def forward(self, x):
        return super().forward(x) @ self.more


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D), Two(D, D)
        self.conv = nn.Conv2d(4, 24, 4)

    def forward(self, x):
        return self.conv(self.d(self.c(self.b(self.a(x)))).reshape(-1, 4, 8, 8)).flatten(1)

    def example(self):
        return (torch.randn(2, D),)


def test_mixed_sources_in_one_model(tmp_path):
    """Weights in RAM (not in the file), plain in the file and packed there, and a module that has two kinds."""
    plain = made(Wide)
    path = write(tmp_path, plain, "v2", leave=("b", "c"), without=("c.weight", "c.bias"))
    ref = resident(plain, path)
    model = copy.deepcopy(plain)
    with pytest.warns(RuntimeWarning, match="c.weight, c.bias have no tensor"):
        stagehand.layer(model, source=path, vram_budget=half(plain), inference_mode=True, device=card.NAME)
    check(model, ref, *plain.example())
    kinds = {unit.name: (unit.in_file, unit.packed) for unit in runtime(model).session.units}
    assert kinds == {"a": (True, True), "b": (True, False), "c": (False, False), "d": (True, True),
                     "d.more": (True, False), "conv": (True, True)}
    assert set(runtime(model).quantised["files"]) == {"a.weight", "d.weight", "conv.weight"}
    runtime(model).shutdown()


def test_what_the_file_holds_in_another_dtype_is_converted_once(tmp_path):
    plain = stack()
    path = write(tmp_path, plain, "v2")
    kwargs = {"vram_budget": 1 << 20, "device": card.NAME}
    model = stagehand.load(build(torch.bfloat16), path, **kwargs)
    # A decoded value rounded twice is the same value rounded once: float32 first.
    ref = resident(plain, path).bfloat16()
    check(model, ref, torch.randn(3, D, dtype=torch.bfloat16))
    assert all(p.dtype is torch.bfloat16 for p in model.parameters())
    runtime(model).shutdown()
    with pytest.raises(DtypeMismatchError, match="inp.weight is torch.float64.*decodes to"):
        stagehand.load(build(torch.float64), path, **kwargs)
    with pytest.raises(CheckpointError,
                       match=r"inp.weight has shape \(256, 256\), its quantised layer inp .* \(128, 256\)"):
        small = made(Stack, 3, D, 1)
        small.inp = nn.Linear(D, D // 2)
        os.mkdir(tmp_path / "small")
        stagehand.load(build(), write(tmp_path / "small", small, "v2"), **kwargs)


@pytest.mark.parametrize("seed", range(8))
def test_random_models(tmp_path, seed):
    """Attention that reads weights from outside, convolutions, parametrizations, recurrent nets, experts."""
    plain = random_model(random.Random(seed)).requires_grad_(False)
    path = write(tmp_path, plain, "v2-zeros", leave=("head",))  # which may be tied to an embedding
    ref, x = resident(plain, path), plain.example()
    model = copy.deepcopy(plain)
    budget = max(half(plain), smallest_budget(plain) + (64 << 10))
    stagehand.layer(model, source=path, vram_budget=budget, device=card.NAME, inference_mode=True)
    with torch.no_grad():
        want = ref(*x)
        for _ in range(3):
            assert same(model(*x), want)
    runtime(model).shutdown()


def test_tied_weights_are_one(tmp_path):
    plain = made(TinyLM, 300, 64, 2)
    path = write(tmp_path, plain, "v2", without=("embed.weight",))
    ref = copy.deepcopy(plain)
    with torch.no_grad():
        _core.QuantFile(path).decode("head", "F32", ref.head.weight.data_ptr())
        for name, module in layers_of(ref).items():
            _core.QuantFile(path).decode(name, "F32", module.weight.data_ptr())
    ref = aligned_copy(ref)
    model = stagehand.load(lambda: TinyLM(300, 64, 2), path, vram_budget=half(plain), device=card.NAME, strict=False)
    tied = [p for p in model.parameters() if p.shape == plain.head.weight.shape]
    assert len(tied) == (1 if plain.head.weight is plain.embed.weight else 2)
    check(model, ref, *plain.example())
    runtime(model).shutdown()


@pytest.mark.parametrize("form", ["v2", "v2-zeros", "svdquant", "hybrid", "v3-int4", "v3-nvfp4"])
def test_a_packed_file_without_its_manifest_says_what_is_missing(tmp_path, form):
    plain = stack()
    path = write(tmp_path, plain, form)
    if form.startswith("v3"):  # a shard alone
        path, said = sorted(tmp_path.glob("*-00001-*"))[0], "a shard of a packed folder, give the folder"
    else:
        os.rename(tmp_path / "model.manifest.json", tmp_path / "elsewhere.json")
        said = f"put its manifest back to {tmp_path / 'model.manifest.json'}"
    kwargs = {"vram_budget": half(plain), "device": card.NAME, "inference_mode": True}

    def convert():
        config = stagehand.StagehandConfig(vram_budget=half(plain))
        runtime = stagehand.StagehandRuntime(stack(), config, BLOCKS, device=card.NAME, inference_mode=True)
        runtime.convert_registry_to_file_backed(path, strict=False)

    ways = [lambda: stagehand.load(build(), path, **kwargs), lambda: stagehand.layer(stack(), source=path, **kwargs),
            convert]
    for way in ways:
        with pytest.raises(CheckpointError,
                           match=r"has no tensor for .*\.weight, but .*\.(qweight|nvq), as packed") as error:
            way()
        assert said in str(error.value)


def test_a_model_with_such_names_of_its_own_is_no_packed_file(tmp_path):
    class Codes(nn.Module):
        def __init__(self):
            super().__init__()
            self.qweight = nn.Parameter(torch.randint(-9, 9, (D, D), dtype=torch.int8), requires_grad=False)

        def forward(self, x):
            return x @ self.qweight.float()

    plain = nn.Sequential(Codes(), nn.Linear(D, D), Codes()).requires_grad_(False)
    path, x = tmp_path / "m.safetensors", torch.randn(3, D)
    save(path, dict(plain.state_dict()))
    model = stagehand.load(lambda: nn.Sequential(Codes(), nn.Linear(D, D), Codes()), path, vram_budget=nbytes(plain),
                           device=card.NAME)
    check(model, plain, x)
    runtime(model).shutdown()


# ---- the weights at rest


@pytest.fixture
def loaded(tmp_path):
    plain = stack()
    path = write(tmp_path, plain, "v2-zeros")
    model = stagehand.load(build(), path, vram_budget=half(plain), device=card.NAME)
    yield model, resident(plain, path), torch.randn(3, D), path
    if "_stagehand_layer_runtime" in model.__dict__:
        runtime(model).shutdown()


def test_copies_and_pickles_are_plain_and_right(loaded):
    model, ref, x, _ = loaded
    weight = model.blocks[0].up.weight
    assert isinstance(weight, FileWeight) and isinstance(weight, nn.Parameter) and not weight.requires_grad
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert all(type(p) is nn.Parameter for p in twin.parameters())
        assert same(aligned_copy(twin)(x), ref(x))
    assert same(weight + 1, ref.blocks[0].up.weight + 1) and same(weight.data, ref.blocks[0].up.weight)
    assert same(weight[2:5], ref.blocks[0].up.weight[2:5]) and weight.shape == (D, D)
    assert same(weight.t()[1:].clone(), ref.blocks[0].up.weight.t()[1:])
    assert not isinstance(weight.data, nn.Parameter)
    assert same(torch.stack([weight.data, weight]).mean(0), ref.blocks[0].up.weight)
    check(model, ref, x)


def test_writes_are_refused(loaded):
    model, ref, x, _ = loaded
    weight = model.blocks[0].up.weight
    with torch.no_grad(), pytest.raises(StagehandError, match="blocks.0.up.weight .* cannot be written"):
        weight.add_(1)
    with torch.no_grad(), pytest.raises(StagehandError, match="cannot be written"):
        torch.add(ref.blocks[0].up.weight, 1, out=weight)
    for write_to in (weight.data, weight.data[3], weight.view(-1)[:7], weight.t(), weight.data.unbind()[2]):
        with torch.no_grad(), pytest.raises(StagehandError, match="blocks.0.up.weight .* cannot be written"):
            write_to.zero_()
    summed, value = torch.zeros(D, D), at_rest(ref.blocks[0].up.weight)
    assert type(summed.add_(weight)) is torch.Tensor and type(torch.mm(weight, value, out=summed)) is torch.Tensor
    assert same(summed, value @ value)
    copied = weight.detach()
    copied.zero_()  # is memory of its own, as in a state_dict
    check(model, ref, x)
    weight.data = torch.ones(D, D)
    with torch.no_grad(), pytest.raises(StagehandError, match="blocks.0.up.weight was written.*packed file"):
        model(x)


class Renamed(nn.Module):
    """A model inside another one, whose states were saved under another name."""

    def __init__(self, model):
        super().__init__()
        self.inner = model
        if hasattr(self, "register_load_state_dict_pre_hook"):
            self.register_load_state_dict_pre_hook(self.rename)
        else:  # PyTorch 2.4
            self._register_load_state_dict_pre_hook(self.rename, with_module=True)

    @staticmethod
    def rename(module, state, prefix, *args):
        for name in [name for name in state if name.startswith(f"{prefix}old.")]:
            state[f"{prefix}inner.{name[len(prefix) + 4:]}"] = state.pop(name)


@pytest.mark.combinations("each form is loaded by code of its own")
@pytest.mark.parametrize("where", ["model", "a block", "a module around it", "renamed by a hook"])
@pytest.mark.parametrize("form", ["v3-int4", "svdquant", "v2", "in full", "in full, sent as int8"])
def test_a_state_that_cannot_be_loaded_changes_nothing(tmp_path, form, where):
    plain, x = stack(), torch.randn(3, D)
    sent = "int8" if "int8" in form else None
    path = str(tmp_path / "full.safetensors") if "full" in form else write(tmp_path, plain, form)
    if "full" in form:
        save(path, dict(plain.state_dict()))
    model = stagehand.load(build(), path, vram_budget=half(plain), device=card.NAME, transfer=sent)
    with torch.no_grad():
        want, before = model(x), {name: value.clone() for name, value in model.state_dict().items()}
    others = {"model": model, "a block": model.blocks[0]}
    loaded = others.get(where) or Renamed(model)
    state = {name: value + 1 for name, value in loaded.state_dict().items()}
    if where == "renamed by a hook":
        state = {f"old.{name.removeprefix('inner.')}": value for name, value in state.items()}
    for strict in (True, False):
        with pytest.raises(StagehandError, match=r"up.weight.* cannot be written.*nothing of the state dict"):
            loaded.load_state_dict(state, strict=strict)
    assert all(same(value, before[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        assert same(model(x), want)
    loaded.load_state_dict({name: value for name, value in state.items() if value.ndim < 2}, strict=False)
    changed = [name for name, value in model.state_dict().items() if not same(value, before[name])]
    assert changed and all(before[name].ndim < 2 for name in changed)
    with torch.no_grad():
        assert not torch.equal(*at_rest((model(x), want)))
    runtime(model).shutdown()
    assert "_load_from_state_dict" not in vars(model)


def test_training_a_weight_of_the_file_is_refused_or_decoded(loaded):
    model, ref, x, path = loaded
    model.blocks[1].up.weight.requires_grad_(True)
    with pytest.raises(StagehandError, match="blocks.1.up.weight takes a gradient.*packed file"):
        model(x).sum().backward()
    model.blocks[1].up.weight.requires_grad_(False)
    check(model, ref, x)

    trained = stagehand.load(build(), path, vram_budget=half(ref), device=card.NAME, inference_mode=False)
    told = runtime(trained).quantised
    assert not told["files"] and told["decoded"]["inp.weight"] == {"reason": "it trains", "bytes": 4 * D * D}
    ref.requires_grad_(True)
    trained(x).square().sum().backward()
    ref(x).square().sum().backward()
    assert all(same(p.grad, q.grad) for p, q in zip(trained.parameters(), ref.parameters()))
    runtime(trained).shutdown()


def test_a_model_can_be_wrapped_again_after_shutdown(loaded):
    model, ref, x, path = loaded
    runtime(model).shutdown()
    stagehand.layer(model, vram_budget=half(ref), device=card.NAME)  # all of it in RAM now
    assert all(type(p) is nn.Parameter for p in model.parameters())
    check(model, ref, x)
    runtime(model).shutdown()
    stagehand.layer(model, source=path, vram_budget=half(ref), device=card.NAME)
    check(model, ref, x)
    runtime(model).shutdown()
    model.to(torch.float64)
    assert same(model.inp.weight, ref.inp.weight.double())


def test_files_are_closed_with_the_last_weight(tmp_path):
    plain = stack()
    path = write(tmp_path, plain, "v2")
    model = stagehand.load(build(), path, vram_budget=half(plain), device=card.NAME)
    runtime(model).shutdown()
    assert open_files(tmp_path), "the weights are there and nowhere else"
    del model
    gc.collect()
    assert open_files(tmp_path) == []


def test_a_failure_leaves_the_model_as_it_was(tmp_path):
    plain = stack()
    path, model = write(tmp_path, plain, "v2"), copy.deepcopy(plain)
    before = list(model.parameters())
    with pytest.raises(stagehand.StagehandOOMError):
        stagehand.layer(model, source=path, vram_budget=1000, device=card.NAME)
    assert all(a is b for a, b in zip(model.parameters(), before)) and open_files(tmp_path) == []
    assert all(same(p, q) for p, q in zip(model.parameters(), plain.parameters()))


# ---- training beside them


class Lora(nn.Module):
    def __init__(self, base, rank=4):
        super().__init__()
        self.base_layer = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.randn(base.out_features, rank) * 0.1)

    def forward(self, x):
        return self.base_layer(x) + x @ self.down.t() @ self.up.t()


def adapted(model):
    torch.manual_seed(5)
    for block in model.blocks:
        block.up, block.down = Lora(block.up), Lora(block.down)
    return model


@pytest.mark.parametrize("form", ["v2-zeros", "v3-int4"])
def test_lora_over_frozen_weights_trains(tmp_path, form):
    plain = stack()
    path = write(tmp_path, plain, form)
    ref, model = adapted(resident(plain, path)), adapted(copy.deepcopy(plain))
    stagehand.layer(model, source=path, vram_budget=half(plain) + (200 << 10), device=card.NAME)
    told = runtime(model).quantised
    assert len(told["files"]) >= 6
    losses = []
    for net in (model, ref):
        optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
        torch.manual_seed(1)
        losses.append([])
        for _ in range(4):
            loss = net(torch.randn(3, D)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.detach())
    assert same(losses[0], losses[1]) and losses[0][-1] != losses[0][0]
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 12 and all(same(p, dict(ref.named_parameters())[name]) for name, p in trained.items())
    runtime(model).shutdown()


# ---- memory, readers, kernels


@pytest.mark.parametrize("form", ["v2", "svdquant-smooth", "v3-int4", "v3-nvfp4"])
def test_ram_budget_keeps_packed_bytes(tmp_path, form):
    plain, x = stack(), torch.randn(3, D)
    path = write(tmp_path, plain, form)
    ref = resident(plain, path)
    model = stagehand.load(build(), path, vram_budget=half(plain), ram_budget="1GB", device=card.NAME)
    check(model, ref, x, 3)
    before = runtime(model).stats
    check(model, ref, x, 3)
    after = runtime(model).stats
    packed = sum(u["transfer_bytes"] for u in after["units"])
    assert after["file_bytes"] == before["file_bytes"], "every byte was read once"
    assert packed * 0.9 < after["ram_bytes"] < packed * 1.2
    runtime(model).shutdown()


@pytest.mark.parametrize("form", ["v1", "v2-zeros", "svdquant-smooth", "hybrid", "v3-int4", "v3-nvfp4"])
def test_without_kernels_the_host_expands(tmp_path, form):
    plain, x = stack(), torch.randn(3, D)
    path = write(tmp_path, plain, form)
    device = _core.Device("sim", memory_bytes=half(plain), expand=False)
    model = copy.deepcopy(plain)
    with pytest.warns(RuntimeWarning, match="expanded on the host"):
        stagehand.layer(model, source=path, vram_budget=half(plain), device=device, inference_mode=True)
    check(model, resident(plain, path), x)
    assert all(unit["transfer_bytes"] == unit["bytes"] for unit in runtime(model).stats["units"])
    runtime(model).shutdown()


def test_transfer_beside_a_quantised_file(tmp_path):
    """What the file holds in few bits stays as it is; what it holds in full is quantised as the user asked."""
    plain, x = stack(), torch.randn(3, D)
    path = write(tmp_path, plain, "v2", leave=("inp", "blocks.0.up"))
    model = stagehand.load(build(), path, vram_budget=nbytes(plain) // 4 + (160 << 10), device=card.NAME,
                           transfer="fp8")
    told = runtime(model).quantised
    assert "blocks.1.up.weight" in told["files"] and told["encoding"] == "fp8"
    assert told["left"]["blocks.1.up.weight"] == "its file holds it in few bits already"
    assert set(told["error"]) <= {"inp.weight", "blocks.0.up.weight"} and told["error"]
    ref = resident(plain, path)
    modules = dict(ref.named_modules())
    with torch.no_grad():
        for name in told["error"]:
            w = modules[name[:-7]].weight
            scale = w.abs().amax(1, keepdim=True) / 448
            w.copy_((w / scale).to(torch.float8_e4m3fn).float() * scale)
    check(model, ref, x)
    runtime(model).shutdown()


def test_a_large_decoded_share_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(stagehand.files.filesource, "WARNED_BYTES", 1 << 20)
    plain = stack()
    path = write(tmp_path, plain, "svdquant-fine")
    with pytest.warns(RuntimeWarning, match="16 tensors of .* are decoded into .* of host memory.*no multiple of 16"):
        model = stagehand.load(build(), path, vram_budget=half(plain), device=card.NAME)
    runtime(model).shutdown()


# ---- bad files


def failing_pass(model, x):
    with torch.no_grad(), pytest.raises(StagehandError) as caught:
        for _ in range(4):
            model(x)
    return str(caught.value)


@pytest.mark.combinations("each form is read by code of its own")
@pytest.mark.parametrize("form", ["v2", "svdquant-smooth"])
@pytest.mark.parametrize("expand", [True, False])
@pytest.mark.parametrize("how", ["written", "truncated"])
def test_a_file_that_changes_is_an_error_that_names_the_tensor(tmp_path, how, expand, form):
    plain, x = stack(), torch.randn(3, D)
    path = write(tmp_path, plain, form)
    device = _core.Device("sim", memory_bytes=half(plain), expand=expand)
    with pytest.warns(RuntimeWarning) if not expand else torch.no_grad():
        model = stagehand.load(build(), path, vram_budget=half(plain), device=device)
    with torch.no_grad():
        model(x)
    data = path.read_bytes()
    if how == "truncated":
        from_outside(path, size=len(data) // 2)
    else:
        from_outside(path, b"new bytes", at=len(data) // 2)
    text = failing_pass(model, x)
    assert str(path) in text and "changed" in text and "unit '" in text and "tensor '" in text, text
    assert form != "v2" or ".qweight'" in text
    with pytest.raises(StagehandError, match="changed"):
        model.state_dict()
    runtime(model).shutdown()


def test_another_file_of_its_name_changes_nothing(tmp_path):
    plain, x = stack(), torch.randn(3, D)
    path = write(tmp_path, plain, "v2")
    ref = resident(plain, path)
    model = stagehand.load(build(), path, vram_budget=half(plain), device=card.NAME)
    os.mkdir(tmp_path / "other")
    os.replace(write(tmp_path / "other", made(Stack, 3, D, 1, seed=9), "v2"), path)
    check(model, ref, x)
    assert same(model.state_dict()["inp.weight"], ref.inp.weight)
    runtime(model).shutdown()


def test_a_scale_that_is_not_finite_is_named(tmp_path):
    plain = stack()
    path = write(tmp_path, plain, "v2")
    scale = bytes(_core_scale(path, "blocks.1.up"))
    data = path.read_bytes()
    at = data.index(scale) + 4 * 7
    path.write_bytes(data[:at] + b"\x00\x00\xc0\x7f" + data[at + 4:])
    with pytest.raises(CheckpointError, match=rf"model.safetensors.*blocks.1.up.scale.*byte {at}.*not finite"):
        stagehand.load(build(), path, vram_budget=half(plain), device=card.NAME)
    assert open_files(tmp_path) == []


@pytest.mark.parametrize("form, part, bad, why", [
    ("v3-int4", "blocks.1.up.lora_down", b"\x80\x7f", "not finite"),
    ("v3-int4", "blocks.0.up.lora_up", b"\xc0\x7f", "not finite"),
    ("v3-int4", "out.wscales", b"\x80\xff", "not finite"),
    ("v3-nvfp4", "blocks.1.up.nvs", b"\x7f\x10", "readers disagree"),
    ("v3-nvfp4", "inp.nvg", b"\x00\x00\x80\x7f", "not finite"),
    ("svdquant-smooth", "inp.smooth", b"\x00\x00", "a factor of 0"),
])
def test_numbers_that_cannot_be_are_named(tmp_path, form, part, bad, why):
    plain = stack()
    path = write(tmp_path, plain, form)
    quant = _core.QuantFile(path)
    checkpoint = quant.checkpoint()
    _, _, _, file, offset, nbytes = next(e for e in checkpoint.tensors() if e[0] == part)
    checkpoint.close()
    quant.close()
    shards = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    at = offset + (0 if part.endswith("nvg") else nbytes // 4 * 2)
    with open(shards[file], "r+b") as data:
        data.seek(at)
        data.write(bad)
    with pytest.raises(CheckpointError, match=rf"{part}.*byte {at}.*{why}"):
        stagehand.load(build(), path, vram_budget=half(plain), device=card.NAME)
    assert open_files(tmp_path) == []


def test_factors_as_large_as_the_weight_are_decoded(tmp_path):
    """What a file says of its rank makes no stage larger than a weight."""
    plain, x = made(Stack, 3, D, 1), torch.randn(3, D)
    path = write(tmp_path, plain, "svdquant", rank=128)
    model = stagehand.load(build(), path, vram_budget=half(plain), device=card.NAME)
    check(model, resident(plain, path), x)
    told = runtime(model).quantised
    assert not told["files"] and "as large as the weight" in told["decoded"]["inp.weight"]["reason"]
    runtime(model).shutdown()


def _core_scale(path, layer):
    quant = _core.QuantFile(path)
    checkpoint = quant.checkpoint()
    entry = next(e for e in checkpoint.tensors() if e[0] == f"{layer}.scale")
    data = torch.empty(entry[5], dtype=torch.uint8)
    checkpoint.read(entry[3], entry[4], entry[5], data.data_ptr())
    return data.numpy().tobytes()


def test_plain_files_are_no_slabs(tmp_path):
    save(tmp_path / "w.safetensors", {"a": torch.ones(3)})
    assert _core.QuantFile.open_if_slab(tmp_path / "w.safetensors") is None
    assert _core.QuantFile.open_if_slab(tmp_path / "absent.safetensors") is None
    (tmp_path / "w.manifest.json").write_text("{}")
    with pytest.raises(StagehandError, match="manifest"):
        _core.QuantFile.open_if_slab(tmp_path / "w.safetensors")


def test_layouts_that_are_refused(tmp_path):
    plain = stack()
    quant = _core.QuantFile(write(tmp_path, plain, "v2"))
    for arguments, error in ((("absent", "F32", 0, 0, 1 << 20), "no layer"), (("inp", "F64", 0, 0, 1 << 20), "dtype"),
                             (("inp", "F32", 8, 0, 1 << 20), "multiple of 16"),
                             (("inp", "F32", 0, 16, 1 << 20), "512")):
        with pytest.raises(StagehandError, match=error):
            quant.segments(*arguments)
    segments, ranges, end, largest = quant.segments("inp", "BF16", 512, 1024, 16 << 10)
    assert 8 << 10 < largest <= 16 << 10
    assert ranges[0][3] == 1024 and end % 512 == 0 and sum(r[2] for r in ranges) == D * D + 4 * D
    checkpoint = quant.checkpoint()
    quant.close()
    assert len(checkpoint.tensors()) > 8, "it keeps the file open"
    checkpoint.close()
    assert open_files(tmp_path) == []
    os.mkdir(tmp_path / "v3")
    with pytest.raises(StagehandError, match="groups of inputs"):
        _core.QuantFile(write(tmp_path / "v3", plain, "svdquant-fine")).segments("inp", "F32", 0, 0, 1 << 20)
