"""v3-int4 as packed here: the codes are what the format's maths gives for the stored factors, the factors are nearly
the best of their rank, and the same bytes come out for every number of threads."""

import json

import numpy as np
import pytest
import quant_files as qf

from stagehand import _core
from stagehand.errors import StagehandError

SHARES = [np.float32(f) for f in (0.85, 0.88, 0.91, 0.94, 0.97, 1.0)]


def fast_rotate(x):
    """float64 rows times the normalised block-diagonal H_256: sums of pairs at distance 1, 2, 4 ..., then / 16."""
    x = x.astype(np.float64).reshape(len(x), -1, 256).copy()
    half = 1
    while half < 256:
        pairs = x.reshape(*x.shape[:2], -1, 2, half)
        x = np.stack([pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]], -2).reshape(x.shape)
        half *= 2
    return (x / 16).reshape(len(x), -1)


def encode_int4(x, group=64):
    """(codes [out, in], scale bits [groups, out]) of float32 rows: the search of the format's description."""
    groups = x.reshape(len(x), -1, group)
    largest = np.abs(groups).max(-1)
    best = np.full(largest.shape, np.inf, np.float32)
    scales, codes = np.zeros(largest.shape, np.uint16), np.zeros(groups.shape, np.int8)
    for share in SHARES:
        bits = qf.to_bf16(largest * share / np.float32(7))
        bits[bits == 0] = 0x3F80
        s = qf.from_bf16(bits)[..., None]
        q = np.clip(np.rint(groups / s), -8, 7)
        error = np.zeros(largest.shape, np.float32)
        for k in range(group):
            each = q[..., k] * s[..., 0] - groups[..., k]
            error += each * each
        better = error < best
        best[better], scales[better], codes[better] = error[better], bits[better], q[better]
    return codes.reshape(x.shape), scales.T.copy()


def write_model(path, shapes):
    rng = np.random.default_rng(5)
    tensors, values = {}, {}
    for name, (out, inp) in shapes.items():
        spectrum = rng.standard_normal((out, 8)) @ rng.standard_normal((8, inp)) * 0.3
        bits = qf.to_bf16((rng.standard_normal((out, inp)) + spectrum).astype(np.float32) * 0.02)
        tensors[name], values[name] = qf.tensor("BF16", bits), qf.from_bf16(bits)
    tensors["blocks.0.norm.weight"] = qf.tensor("F32", np.arange(9))
    tensors["blocks.0.q.bias"] = qf.tensor("BF16", np.arange(1024))
    tensors["small.weight"] = qf.tensor("F32", np.ones((1024, 64)))
    qf.write_safetensors(path, tensors)
    return tensors, values


def read_shards(folder):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    checkpoint, out = _core.Checkpoint(folder), {}
    files = [open(path, "rb") for path in checkpoint.files()]
    for name, dtype, shape, file, offset, size in checkpoint.tensors():
        files[file].seek(offset)
        out[name] = (dtype, list(shape), files[file].read(size))
        assert index["weight_map"][name] == files[file].name.rpartition("/")[2]
    return index, out


def array(tensor, dtype):
    return np.frombuffer(tensor[2], dtype).reshape(tensor[1])


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("v3")
    shapes = {"blocks.0.q.weight": (1024, 1280), "blocks.10.q.weight": (1030, 1024)}
    tensors, values = write_model(folder / "model.safetensors", shapes)
    _core.pack(folder / "model.safetensors", folder / "packed", "v3-int4", threads=2)
    return folder, tensors, values


def test_codes_and_scales_are_those_of_the_maths(packed):
    folder, tensors, values = packed
    index, got = read_shards(folder / "packed")
    assert index["metadata"] == {"format": "squareq_w4_v1"}
    for key, w in values.items():
        base = key.removesuffix(".weight")
        up, down = (array(got[base + end], np.uint16) for end in (".lora_up", ".lora_down"))
        assert up.shape == (len(w), 32) and down.shape == (w.shape[1], 32)
        low = qf.low_rank(qf.from_bf16(up), qf.from_bf16(down))
        rotated = fast_rotate(w.astype(np.float64) - low).astype(np.float32)
        q, scales = encode_int4(rotated)
        assert array(got[base + ".wscales"], np.uint16).shape == (w.shape[1] // 64, len(w))
        assert np.array_equal(array(got[base + ".wscales"], np.uint16), scales)
        assert got[base + ".qweight"] == ("U8", [len(w), w.shape[1] // 2], qf.pack_nibbles(q).tobytes())
    for name in ("blocks.0.norm.weight", "blocks.0.q.bias", "small.weight"):
        assert got[name] == tuple(tensors[name])


def test_factors_are_nearly_the_best_of_their_rank(packed):
    folder, _, values = packed
    _, got = read_shards(folder / "packed")
    for key, w in values.items():
        base = key.removesuffix(".weight")
        up, down = (qf.from_bf16(array(got[base + end], np.uint16)) for end in (".lora_up", ".lora_down"))
        wide = w.astype(np.float64)
        singular = np.sqrt(np.maximum(np.linalg.eigvalsh(wide @ wide.T)[::-1], 0))
        best = np.sqrt((singular[32:] ** 2).sum())
        assert np.linalg.norm(w - up.astype(np.float64) @ down.T) < 1.002 * best
        assert np.allclose(np.linalg.norm(up, axis=0)[:8], singular[:8], rtol=0.01)
        assert np.allclose(down.T @ down, np.eye(32), atol=0.02)


def test_files_of_the_folder(packed):
    folder, _, values = packed
    names = sorted(p.name for p in (folder / "packed").iterdir())
    assert names == ["build-state.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
                     "model.safetensors.index.json", "squareq-plan.json"]
    plan = json.loads((folder / "packed" / "squareq-plan.json").read_text())
    assert list(plan) == sorted(plan) and plan["plan_version"] == 1 and plan["totals"]["quantized_layers"] == 2
    assert sorted(plan["passthrough"]) == ["blocks.0.norm.weight", "blocks.0.q.bias", "small.weight"]
    entry = plan["layers"]["blocks.0.q.weight"]
    assert (entry["out"], entry["in"], entry["rank"], entry["format"]) == (1024, 1280, 32, "squareq_w4_v1")
    assert entry["bytes_bf16"] == 2 * 1024 * 1280
    assert entry["bytes_q"] == 1024 * 640 + 20 * 1024 * 2 + 1280 * 64 + 1024 * 64
    state = json.loads((folder / "packed" / "build-state.json").read_text())
    assert state["completed_shards"] == names[1:3]
    assert state["source_bytes"] == (folder / "model.safetensors").stat().st_size
    with open(folder / "packed" / names[1], "rb") as f:
        header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
    assert header["__metadata__"] == {"format": "squareq_w4_v1", "rank": "32", "group": "64"}


def test_errors_in_the_plan_are_those_of_the_decoded_weight(packed):
    folder, _, values = packed
    plan = json.loads((folder / "packed" / "squareq-plan.json").read_text())["layers"]
    found = {t["name"]: t for t in _core.verify(folder / "packed", folder / "model.safetensors")}
    file = _core.QuantFile(folder / "packed")
    for key, w in values.items():
        base = key.removesuffix(".weight")
        out = np.empty(w.shape, np.float32)
        file.decode(base, "F32", out.ctypes.data)
        relative = np.linalg.norm(out.astype(np.float64) - w) / np.linalg.norm(w.astype(np.float64))
        assert 0.01 < relative < 0.12 and found[base]["checksum"] == 1
        for told in (plan[key]["rel_l2"], found[base]["rel_l2"]):
            assert np.isclose(told, relative, rtol=1e-9)
        assert np.isclose(plan[key]["cos_w"], found[base]["cosine"], rtol=1e-12) and plan[key]["cos_w"] > 0.99
    assert found["small.weight"]["equal"] and found["blocks.0.q.bias"]["checksum"] == 1


def same_files(a, b):
    names = sorted(p.name for p in a.iterdir())
    assert names == sorted(p.name for p in b.iterdir())
    return all((a / name).read_bytes() == (b / name).read_bytes() for name in names)


def test_threads_and_stops_change_no_byte(packed):
    folder, _, _ = packed
    _core.pack(folder / "model.safetensors", folder / "alone", "v3-int4", threads=1)
    assert same_files(folder / "packed", folder / "alone")
    for calls in (3, 20):
        left = [calls]

        def progress(*told):
            left[0] -= 1
            return left[0] > 0
        with pytest.raises(StagehandError, match="goes on"):
            _core.pack(folder / "model.safetensors", folder / "stopped", "v3-int4", progress=progress)
    _core.pack(folder / "model.safetensors", folder / "stopped", "v3-int4")
    assert same_files(folder / "packed", folder / "stopped")
    with pytest.raises(ValueError, match="exists already"):
        _core.pack(folder / "model.safetensors", folder / "stopped", "v3-int4")


def test_unpacking(packed):
    folder, tensors, values = packed
    _core.unpack(folder / "packed", folder / "back.safetensors", "BF16")
    found = {t["name"]: t for t in _core.verify(folder / "back.safetensors", folder / "model.safetensors")}
    assert found.keys() == tensors.keys() and not any(t["missing"] for t in found.values())
    assert all(found[name]["equal"] == (name not in values) for name in tensors)


def test_weights_of_low_rank_and_zeros(tmp_path):
    """Nothing is left for the codes: no division by 0, and the decoded weight is the factors' product."""
    rng = np.random.default_rng(9)
    thin = (rng.standard_normal((1024, 2)) @ rng.standard_normal((2, 1024))).astype(np.float32)
    qf.write_safetensors(tmp_path / "model.safetensors", {
        "a.0.weight": qf.tensor("F32", np.zeros((1024, 1024))), "a.1.weight": qf.tensor("F32", thin)})
    _core.pack(tmp_path / "model.safetensors", tmp_path / "packed", "v3-int4")
    found = {t["name"]: t for t in _core.verify(tmp_path / "packed", tmp_path / "model.safetensors")}
    assert found["a.0"]["equal"] and found["a.1"]["rel_l2"] < 1e-3


def test_what_cannot_be_packed(tmp_path):
    qf.write_safetensors(tmp_path / "model.safetensors", {"a.weight": qf.tensor("F32", np.ones((1024, 1000)))})
    with pytest.raises(StagehandError, match="nothing to quantise"):
        _core.pack(tmp_path / "model.safetensors", tmp_path / "packed", "v3-int4")
    bad = np.ones((1024, 1024), np.float32)
    bad[1000, 3] = np.nan
    qf.write_safetensors(tmp_path / "model.safetensors", {"a.weight": qf.tensor("F32", bad)})
    with pytest.raises(StagehandError, match="a.weight.*byte"):
        _core.pack(tmp_path / "model.safetensors", tmp_path / "packed", "v3-int4")
    bad[1000, 3] = 3e38
    bad[1000, 4:200] = 3e38
    qf.write_safetensors(tmp_path / "model.safetensors", {"a.weight": qf.tensor("F32", bad)})
    with pytest.raises(StagehandError, match="a.weight.*too large|a.weight.*row"):
        _core.pack(tmp_path / "model.safetensors", tmp_path / "packed", "v3-int4")
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


def test_blocks_are_in_natural_order_four_to_a_shard(tmp_path):
    one = qf.tensor("BF16", np.full((1024, 1024), 0x3F80))
    qf.write_safetensors(tmp_path / "model.safetensors",
                         {f"blocks.{i}.w.weight": one for i in (10, 2, 0, 1, 9)} | {"z": qf.tensor("F32", [1])})
    _core.pack(tmp_path / "model.safetensors", tmp_path / "packed", "v3-int4")
    index, _ = read_shards(tmp_path / "packed")
    shard = {i: index["weight_map"][f"blocks.{i}.w.qweight"] for i in (0, 1, 2, 9, 10)}
    assert {shard[i] for i in (0, 1, 2, 9)} == {"model-00001-of-00003.safetensors"}
    assert shard[10] == "model-00002-of-00003.safetensors"
    assert index["weight_map"]["z"] == "model-00003-of-00003.safetensors"
