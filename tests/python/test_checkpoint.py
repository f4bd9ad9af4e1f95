"""open_checkpoint, and how tensors of files are found for parameters of a model."""

import json
import os
import struct

import pytest

torch = pytest.importorskip("torch")

import card  # noqa: E402
from core_support import write_safetensors  # noqa: E402
from file_support import (  # noqa: E402
    BLOCKS, SIZES, Stack, made, open_files, same_state, save, save_sharded, state, tensor_bytes, twin,
)
from support import same  # noqa: E402
from torch import nn  # noqa: E402

import stagehand  # noqa: E402
from stagehand import CheckpointError, DtypeMismatchError, StagehandError, TransferError, open_checkpoint  # noqa: E402
from stagehand.files.filesource import FileSource, wanted_parameters  # noqa: E402
from stagehand.files.names import ranks  # noqa: E402

# ---- the mapping


def test_every_dtype_comes_back_bit_for_bit(tmp_path):
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for dtype, name in SIZES.items():
        raw = torch.randint(0, 2 if name == "BOOL" else 256, (4, 6, dtype.itemsize), generator=generator)
        tensors[name] = raw.to(torch.uint8).reshape(4, -1).view(dtype)
    tensors["scalar"] = torch.tensor(3.5)
    tensors["empty"] = torch.empty(0, 3)
    save(tmp_path / "a.safetensors", tensors)
    with open_checkpoint(tmp_path / "a.safetensors") as checkpoint:
        assert sorted(checkpoint) == sorted(tensors) and len(checkpoint) == len(tensors)
        for name, tensor in tensors.items():
            read = checkpoint[name]
            assert read.dtype == tensor.dtype and read.shape == tensor.shape
            assert read.data_ptr() % 16 == 0
            assert torch.equal(read.reshape(-1).view(torch.uint8), tensor.contiguous().reshape(-1).view(torch.uint8))


def test_it_is_a_read_only_mapping(tmp_path):
    save(tmp_path / "a.safetensors", {"x": torch.ones(2)})
    checkpoint = open_checkpoint(str(tmp_path / "a.safetensors"))
    assert "x" in checkpoint and "y" not in checkpoint and dict(checkpoint)["x"].sum() == 2
    checkpoint["x"].fill_(5)  # a copy of the caller's own
    assert checkpoint["x"].sum() == 2
    with pytest.raises(KeyError):
        checkpoint["y"]
    with pytest.raises(TypeError):
        checkpoint["x"] = torch.ones(2)
    checkpoint.close()
    checkpoint.close()
    with pytest.raises(StagehandError, match="closed|shut down"):
        checkpoint["x"]
    assert open_files(tmp_path) == []


def test_a_scale_of_a_layer_index_is_applied(tmp_path):
    (tmp_path / "weights.bin").write_bytes(struct.pack("<4b", 1, -2, 3, 4))
    entry = {"layer_id": 0, "name": "w", "path": "weights.bin", "offset": 0, "nbytes": 4, "dtype": "I8",
             "shape": [2, 2], "scale": 0.5}
    (tmp_path / "layers.json").write_text(json.dumps([entry]))
    assert torch.equal(open_checkpoint(tmp_path / "layers.json")["w"], torch.tensor([[0.5, -1.0], [1.5, 2.0]]))


def raw_file(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def entry(begin, end, shape=(2,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


HOSTILE = {
    "same name twice": b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
                       b'"a":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}',
    "overlap": {"a": entry(0, 8), "b": entry(4, 12)},
    "past the end": {"a": entry(0, 1 << 20, (1 << 18,))},
    "huge offset": {"a": entry(2**64 - 16, 2**64 - 8)},
    "huge shape": {"a": entry(0, 8, (1 << 32, 1 << 32))},
    "negative": {"a": entry(-8, 0)},
    "float offset": {"a": entry(0.0, 8.0)},
    "unknown dtype": {"a": entry(0, 8, dtype="F31")},
    "size against shape": {"a": entry(0, 8, (3,))},
    "deep": b"[" * 100000,
    "not JSON": b"hello",
}


@pytest.mark.parametrize("header", HOSTILE.values(), ids=HOSTILE)
def test_a_lying_header_is_refused_with_the_file_named(tmp_path, header):
    raw_file(tmp_path / "bad.safetensors", header, bytes(16))
    with pytest.raises(StagehandError, match="bad.safetensors"):
        open_checkpoint(tmp_path / "bad.safetensors")
    assert open_files(tmp_path) == []


@pytest.mark.parametrize("cut", [1, 4, 7, 8, 9, 40, 4000])
def test_a_truncated_file_is_refused_at_opening(tmp_path, cut):
    path = tmp_path / "cut.safetensors"
    save(path, {"a": torch.ones(500), "b": torch.ones(500)})
    os.truncate(path, path.stat().st_size - cut)
    with pytest.raises(CheckpointError, match="cut.safetensors"):
        open_checkpoint(path)


def test_a_file_that_changes_while_open_is_noticed(tmp_path):
    path = tmp_path / "a.safetensors"
    save(path, {"a": torch.ones(500), "b": torch.ones(500)})
    checkpoint = open_checkpoint(path)
    os.truncate(path, path.stat().st_size - 100)
    with pytest.raises(TransferError, match="a.safetensors"):
        checkpoint["a"]


def test_the_index_decides_and_stray_shards_are_not_opened(tmp_path):
    good = {f"t{i}": torch.full((8,), float(i)) for i in range(4)}
    save_sharded(tmp_path, good, 2)
    save(tmp_path / "model-00001-of-00003.safetensors", {"t0": torch.zeros(8) - 1, "stray": torch.zeros(1)})
    (tmp_path / "model-00001-of-00002.safetensors.tmp").write_bytes(b"half")
    save(tmp_path / "adapter.safetensors", {"t1": torch.zeros(8) - 1})
    with open_checkpoint(tmp_path) as checkpoint:
        assert sorted(checkpoint) == sorted(good)
        assert all(torch.equal(checkpoint[name], good[name]) for name in good)
        assert sorted(map(os.path.basename, open_files(tmp_path))) == [
            "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def test_a_missing_file_is_a_file_not_found_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing.safetensors"):
        open_checkpoint(tmp_path / "nothing.safetensors")


# ---- names


@pytest.mark.parametrize(
    "ours, theirs",
    [
        ("blocks.0.up.weight", "blocks.0.up.weight"),
        ("blocks.0.up.weight", "model.diffusion_model.blocks.0.up.weight"),
        ("blocks.0.up.base_layer.weight", "blocks.0.up.weight"),
        ("blocks.0.orig.up.org_module.weight", "model.blocks.0.up.weight"),
        ("blocks.0.attn1.to_q.weight", "blocks.0.self_attn.q.weight"),
        ("blocks.0.attn2.to_out.0.weight", "blocks.0.cross_attn.o.weight"),
        ("blocks.0.ffn.net.0.proj.weight", "diffusion_model.blocks.0.ffn.0.weight"),
        ("blocks.0.ff.net.2.weight", "blocks.0.ff.linear_out.weight"),
        ("blocks.0.scale_shift_table", "blocks.0.modulation"),
    ],
)
def test_candidates_have_the_names_other_code_uses(ours, theirs):
    assert any(theirs in rank for rank in ranks(ours))


def test_aliases_are_whole_components():
    every = [name for rank in ranks("blocks.0.attn10.to_qkv.weight") for name in rank]
    assert not any("self_attn" in name or ".qkv" in name for name in every)


# ---- matching


def find(model, path, accept=lambda *_: True, **kwargs):
    source = FileSource(path)
    try:
        return {b.wanted.names[0]: b.record.name for b in source.match(wanted_parameters(model, accept), **kwargs)}
    finally:
        source.close()


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm2 = nn.Linear(3, 3, bias=False)
        self.norm3 = nn.Linear(3, 3, bias=False)


def test_an_own_name_hides_an_alias(tmp_path):
    tensors = {"model.norm2.weight": torch.ones(3, 3), "model.norm3.weight": torch.zeros(3, 3)}
    save(tmp_path / "a.safetensors", tensors)
    assert find(Pair(), tmp_path / "a.safetensors") == {f"norm{i}.weight": f"model.norm{i}.weight" for i in (2, 3)}


def test_two_parameters_are_never_read_from_one_tensor(tmp_path):
    save(tmp_path / "a.safetensors", {"norm3.weight": torch.zeros(3, 3)})
    with pytest.raises(CheckpointError, match=r"norm2\.weight and norm3\.weight .* norm3\.weight of .*a\.safetensors"):
        find(Pair(), tmp_path / "a.safetensors")


def test_two_candidates_that_differ_are_ambiguous(tmp_path):
    tensors = {"model.x.weight": torch.ones(3, 3), "diffusion_model.x.weight": torch.zeros(3, 3)}
    save(tmp_path / "a.safetensors", tensors)
    model = nn.ModuleDict({"x": nn.Linear(3, 3, bias=False)})
    with pytest.raises(CheckpointError, match="x.weight could be .* or .*, which differ"):
        find(model, tmp_path / "a.safetensors")


@pytest.mark.parametrize("equal", [True, False])
def test_a_tied_parameter_stored_twice_must_be_stored_equally(tmp_path, equal):
    model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    other = torch.ones(5, 4) if equal else torch.zeros(5, 4)
    save(tmp_path / "a.safetensors", {"embed.weight": torch.ones(5, 4), "head.weight": other})
    if equal:
        assert find(model, tmp_path / "a.safetensors") == {"embed.weight": "embed.weight"}
    else:
        with pytest.raises(CheckpointError, match="embed.weight = head.weight"):
            find(model, tmp_path / "a.safetensors")


def test_missing_tensors_are_named(tmp_path):
    save(tmp_path / "a.safetensors", {"norm3.bias": torch.zeros(3)})
    with pytest.raises(CheckpointError, match=r"a\.safetensors has no tensor for norm2\.weight, norm3\.weight"):
        find(Pair(), tmp_path / "a.safetensors")
    assert find(Pair(), tmp_path / "a.safetensors", strict=False) == {}


def test_wrong_shape_and_dtype_name_parameter_file_and_both(tmp_path):
    path = tmp_path / "a.safetensors"
    save(path, {"weight": torch.zeros(3, 4)})
    with pytest.raises(CheckpointError, match=r"weight has shape \(4, 3\).*a\.safetensors has \(3, 4\)"):
        find(nn.Linear(3, 4, bias=False), path)
    with pytest.raises(DtypeMismatchError, match=r"weight is torch\.bfloat16.*a\.safetensors is torch\.float32"):
        find(nn.Linear(4, 3, bias=False, dtype=torch.bfloat16), path)


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn, torch.bfloat16])
def test_a_scaled_tensor_is_decoded_into_ram(tmp_path, stored):
    torch.manual_seed(2)
    model = nn.Sequential(*(nn.Linear(96, 96) for _ in range(6))).to(torch.bfloat16).requires_grad_(False)
    reference, records, data = twin(model), [], b""
    for index, (name, param) in enumerate(reference.named_parameters()):
        scale = 0.03125 + 0.001 * index if name.endswith("weight") and index else 1.0
        codes = (param.float() / scale).to(stored) if scale != 1.0 else param
        param.copy_(codes.float() * scale)
        records.append({"layer_id": index, "name": name, "path": "weights.bin", "offset": len(data),
                        "nbytes": codes.numel() * codes.itemsize, "dtype": SIZES[codes.dtype],
                        "shape": list(codes.shape), "scale": scale})
        data += tensor_bytes(codes)
    (tmp_path / "weights.bin").write_bytes(data)
    (tmp_path / "layers.json").write_text(json.dumps(records))
    stagehand.layer(model, source=tmp_path / "layers.json", vram_budget=80 << 10, device=card.NAME)
    runtime, x = model._stagehand_layer_runtime, torch.randn(3, 96, dtype=torch.bfloat16)
    for _ in range(3):
        assert same(model(x), reference(x))
    assert same_state(model, reference)
    assert runtime.quantised["decoded"]["1.weight"] == {"reason": "the file holds it with a scale",
                                                        "bytes": 2 * 96 * 96}
    assert "0.weight" not in runtime.quantised["decoded"]
    runtime.shutdown()
    with pytest.raises(DtypeMismatchError, match="is torch.int64"):
        wrong = nn.Sequential(nn.Identity(), nn.Module())
        wrong[1].weight = nn.Parameter(torch.zeros(96, 96, dtype=torch.int64), requires_grad=False)
        find(wrong, tmp_path / "layers.json")


# ---- conversion of a model

BAD = {
    "missing": lambda s: s.pop("blocks.3.up.weight"),
    "shape": lambda s: s.update({"blocks.3.up.weight": torch.zeros(5, 5)}),
    "dtype": lambda s: s.update({"blocks.3.up.weight": s["blocks.3.up.weight"].double()}),
}


@pytest.mark.parametrize("spoil", BAD.values(), ids=BAD)
def test_a_failed_conversion_leaves_the_model_as_it_was(tmp_path, spoil):
    model = made(Stack)
    reference, pointers = twin(model), [p.data_ptr() for p in model.parameters()]
    tensors = state(model)
    spoil(tensors)
    save(tmp_path / "a.safetensors", tensors)
    runtime = stagehand.StagehandRuntime(model, block_pattern=BLOCKS, device=card.NAME, inference_mode=True)
    with pytest.raises(StagehandError, match=r"blocks\.3\.up\.weight"):
        runtime.convert_registry_to_file_backed(tmp_path / "a.safetensors")
    assert [p.data_ptr() for p in model.parameters()] == pointers and same_state(model, reference)
    assert open_files(tmp_path) == []
    x = torch.randn(2, 64)
    assert same(model(x), reference(x)), "it streams from RAM instead"
    runtime.shutdown()


def test_a_cast_that_the_file_does_not_have_is_refused(tmp_path):
    model = made(Stack)
    save(tmp_path / "a.safetensors", state(model))
    runtime = stagehand.StagehandRuntime(model, block_pattern=BLOCKS, dtype=torch.bfloat16, inference_mode=True)
    with pytest.raises(DtypeMismatchError, match="keep the file's dtype"):
        runtime.convert_registry_to_file_backed(tmp_path / "a.safetensors")
    runtime.shutdown()


def test_converted_parameters_are_right_at_rest_at_any_alignment(tmp_path):
    model = made(Stack)
    reference, objects = twin(model), dict(model.named_parameters())
    tensors = {"pad": torch.zeros(3, dtype=torch.uint8), **state(model)}  # odd addresses for all that follows
    write_safetensors(tmp_path / "a.safetensors", {
        n: (SIZES[t.dtype], t.shape, bytes(t.reshape(-1).view(torch.uint8).tolist())) for n, t in tensors.items()})
    runtime = stagehand.StagehandRuntime(model, block_pattern=BLOCKS, device=card.NAME, inference_mode=True)
    assert runtime.convert_registry_to_file_backed(tmp_path / "a.safetensors") == 7 * 6
    weight = model.blocks[0].up.weight
    assert weight.data_ptr() % 4 == 3 and weight.untyped_storage().nbytes() == weight.numel() * 4
    assert all(dict(model.named_parameters())[name] is p for name, p in objects.items())
    assert same_state(model, reference) and same_state(twin(model), reference)
    torch.save(model.state_dict(), tmp_path / "saved.pt")
    assert same_state(model, reference)
    loaded = torch.load(tmp_path / "saved.pt")
    assert all(same(loaded[k], v) for k, v in reference.state_dict().items())
    x = torch.randn(2, 64)
    assert same(model(x), reference(x))
    runtime.shutdown()
