"""Quantised model files: each format written from its description reads to the values of its maths, bit for bit; what
does not add up is refused by file, tensor and byte."""

import json
import struct

import numpy as np
import pytest
import quant_files as qf
import torch

from stagehand import _core
from stagehand.errors import CheckpointError, NotFoundError, StagehandError

WIDTH = {"F32": 4, "BF16": 2, "F16": 2}


def decoded(file, layer, dtype="F32", threads=0):
    out = np.empty((layer["out"], layer["in"]), {"F32": np.float32, "BF16": np.uint16, "F16": np.uint16}[dtype])
    file.decode(layer["name"], dtype, out.ctypes.data, threads)
    return out


def same_bits(got, wanted):
    assert got.shape == wanted.shape and got.dtype.itemsize == wanted.dtype.itemsize
    bits = np.uint32 if got.dtype.itemsize == 4 else np.uint16
    return np.array_equal(got.view(bits), np.ascontiguousarray(wanted).view(bits))


def check_decoding(file, wanted):
    """`wanted`: {name: float32 weight}. Every dtype and number of threads."""
    layers = {layer["name"]: layer for layer in file.layers()}
    assert layers.keys() == wanted.keys()
    for name, weight in wanted.items():
        assert same_bits(decoded(file, layers[name]), weight), name
        assert same_bits(decoded(file, layers[name], threads=3), weight), name
        assert same_bits(decoded(file, layers[name], "BF16"), qf.to_bf16(weight)), name
        assert same_bits(decoded(file, layers[name], "F16"), weight.astype(np.float16).view(np.uint16)), name
    return layers


SHAPES = {"transformer_blocks.1.attn": (24, 100, True), "transformer_blocks.0.ff": (5, 64, False),
          "proj_out": (130, 700, True)}


def int8_values(layers):
    return {name: qf.decode_int8(t["qweight"], t["scale"], t["zero_point"], inp) for name, (t, inp) in layers.items()}


# ---- v1 ----


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def write_v1(folder, layers, value=None, name="tiny.fpk", **options):
    path = folder / name
    qf.write_zip(path, qf.v1_members(value or qf.v1_object(layers)), **options)
    return path


@pytest.mark.parametrize("zip64", [True, False])
def test_v1_reads_to_its_values(tmp_path, rng, zip64):
    layers = qf.v1_layers(rng, SHAPES)
    path = write_v1(tmp_path, layers, zip64=zip64)
    file = _core.QuantFile(path)
    assert file.format() == "squareq_bp8_v1" and file.plain() == []
    found = check_decoding(file, int8_values(layers))
    assert found["proj_out"]["padded_in"] == 704 and found["proj_out"]["parts"]["bias"] == "proj_out.bias"
    assert "bias" not in found["transformer_blocks.0.ff"]["parts"]
    # The writer of this test is held to torch's own reader.
    loaded = torch.load(path, weights_only=True)
    assert np.array_equal(loaded["layers"]["proj_out"]["qweight"].numpy(), layers["proj_out"][0]["qweight"])


def test_v1_as_torch_saves_it(tmp_path, rng):
    layers = qf.v1_layers(rng, {f"transformer_blocks.{i}.ff": (3, 70, i % 2 == 0) for i in range(300)})
    value = qf.v1_object(layers)
    value["layers"] = {n: {k: torch.from_numpy(a) for k, a in t.items()} for n, t in value["layers"].items()}
    path = tmp_path / "saved.slab"
    torch.save(value, path)
    check_decoding(_core.QuantFile(path), int8_values(layers))


def test_v1_zero_points_count(tmp_path, rng):
    layers = qf.v1_layers(rng, {"proj_out": (4, 64, False)})
    layers["proj_out"][0]["zero_point"][:] = [0, 1.5, -3, 100]
    check_decoding(_core.QuantFile(write_v1(tmp_path, layers)), int8_values(layers))


def test_v1_views_of_one_storage(tmp_path, rng):
    layers = qf.v1_layers(rng, {"proj_out": (4, 64, False)})
    value = qf.v1_object(layers)
    both = torch.from_numpy(np.concatenate([layers["proj_out"][0]["scale"], np.zeros(4, np.float32)]))
    value["layers"]["proj_out"] = {"qweight": torch.from_numpy(layers["proj_out"][0]["qweight"]), "scale": both[:4],
                                   "zero_point": both[4:]}
    torch.save(value, tmp_path / "views.fpk")
    check_decoding(_core.QuantFile(tmp_path / "views.fpk"), int8_values(layers))
    value["layers"]["proj_out"]["zero_point"] = both[3:7]
    torch.save(value, tmp_path / "overlap.fpk")
    refused(tmp_path / "overlap.fpk", "overlap", "proj_out.scale")
    value["layers"]["proj_out"]["zero_point"] = both[::2]
    torch.save(value, tmp_path / "strided.fpk")
    refused(tmp_path / "strided.fpk", "row by row", "proj_out")


def refused(path, *parts, error=CheckpointError):
    with pytest.raises(error) as caught:
        _core.QuantFile(path)
    for part in (path.name if path.is_file() else path.parent.name, *parts):
        assert part in str(caught.value), caught.value


def executes(marker):
    """A pickle that would make a file if it were executed."""
    class Evil:
        def __reduce__(self):
            import os
            return os.mkdir, (str(marker),)
    import pickle
    return pickle.dumps({"manifest": Evil(), "layers": {}}, protocol=2)


def test_v1_executes_nothing(tmp_path, rng):
    path, marker = tmp_path / "evil.fpk", tmp_path / "made"
    members = qf.v1_members(qf.v1_object(qf.v1_layers(rng, SHAPES)), pickle=executes(marker))
    qf.write_zip(path, members)
    refused(path, "mkdir", "not executed", "byte")
    assert not marker.exists()


PICKLES = {
    "an unknown operation": (b"\x80\x02}i.", "operation 0x69"),
    "build": (b"\x80\x02}}b.", "operation 0x62"),
    "another protocol": (b"\x80\x04}.", "protocol 2"),
    "no end": (b"\x80\x02}", "end is missing"),
    "cut in a text": (b"\x80\x02X\xff\xff\xff\x7fabc.", "middle of a value"),
    "bytes behind": (b"\x80\x02}.}", "follow its end"),
    "two values": (b"\x80\x02}}.", "more or less than one"),
    "no value": (b"\x80\x02.", "more or less than one"),
    "a mark too few": (b"\x80\x02}u.", "mark is missing"),
    "a memo with holes": (b"\x80\x02}r\xff\xff\xff\xff.", "memo"),
    "an unknown memo": (b"\x80\x02h\x05.", "memo"),
    "a long of 9 bytes": (b"\x80\x02\x8a\x09" + bytes(9) + b".", "64 bits"),
    "not UTF-8": (b"\x80\x02X\x02\x00\x00\x00\xc0\x80.", "UTF-8"),
    "a key that is no text": (b"\x80\x02}K\x01K\x02s.", "key"),
    "a value without key": (b"\x80\x02}(K\x01u.", "key"),
    "a persistent id of text": (b"\x80\x02X\x01\x00\x00\x00aQ.", "persistent id"),
    "a call of nothing": (b"\x80\x02)R.", "call"),
    "a call of a storage": (b"\x80\x02ctorch\nFloatStorage\n)R.", "call"),
    "a list in itself": (b"\x80\x02]q\x00h\x00a.", "not a slab"),
    "an empty dict": (b"\x80\x02}.", "not a slab"),
}


@pytest.mark.parametrize("what", PICKLES)
def test_v1_pickles_that_are_refused(tmp_path, rng, what):
    pickle, part = PICKLES[what]
    path = tmp_path / "bad.fpk"
    qf.write_zip(path, qf.v1_members(qf.v1_object(qf.v1_layers(rng, SHAPES)), pickle=pickle))
    refused(path, part, "byte")


def changed(value, path, new):
    """A copy of nested dicts and lists with the value at `path` replaced, or left out where `new` is None."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    if len(path) == 1 and new is None:
        del copy[path[0]]
    else:
        copy[path[0]] = changed(copy[path[0]] if path[0] in copy or isinstance(copy, list) else {}, path[1:], new)
    return copy


V1_CHANGES = {
    "a layer less": (("layers", "proj_out"), None, "different numbers"),
    "a part less": (("layers", "proj_out", "scale"), None, "missing"),
    "a part more": (("layers", "proj_out", "extra"), np.zeros(3, np.float32), "not known"),
    "no bias": (("layers", "proj_out", "bias"), None, "bias"),
    "other dtype": (("layers", "proj_out", "scale"), np.zeros(130, np.int8), "proj_out.scale"),
    "other rows": (("layers", "proj_out", "scale"), np.ones(129, np.float32), "F32 [129]"),
    "other columns": (("layers", "proj_out", "qweight"), np.zeros((130, 640), np.int8), "I8 [130, 640]"),
    "more columns than padded": (("manifest", "layers", 0, "padded_in"), 699, "make no sense"),
    "no rows": (("manifest", "layers", 0, "out"), 0, "make no sense"),
    "many rows": (("manifest", "layers", 0, "out"), 1 << 62, "I8 [4611686018427387904, 704]"),
    "negative": (("manifest", "layers", 0, "inp"), -5, "make no sense"),
    "twice": (("manifest", "layers", 1, "name"), "proj_out", "proj_out"),
    "a version from the future": (("manifest", "quant_version"), "squareq_bp9", "squareq_bp9"),
}


@pytest.mark.parametrize("what", V1_CHANGES)
def test_v1_objects_that_disagree(tmp_path, rng, what):
    path, new, part = V1_CHANGES[what]
    value = changed(qf.v1_object(qf.v1_layers(rng, SHAPES)), path, new)
    error = StagehandError if "future" in what else CheckpointError
    refused(write_v1(tmp_path, None, value), part, error=error)


def test_v1_storages_that_disagree(tmp_path, rng):
    members = qf.v1_members(qf.v1_object(qf.v1_layers(rng, SHAPES)))
    path = tmp_path / "bad.fpk"
    names = [name for name, _ in members]
    at = names.index("slab/data/0")
    short = list(members)
    short[at] = (members[at][0], members[at][1][:-1])
    qf.write_zip(path, short)
    refused(path, "slab/data/0", "bytes")
    qf.write_zip(path, members[:at] + members[at + 1 :])
    refused(path, "missing")
    qf.write_zip(path, members + [("other/data.pkl", b"")])
    refused(path, "two members")
    qf.write_zip(path, [m for m in members if not m[0].endswith("data.pkl")])
    refused(path, "data.pkl")
    qf.write_zip(path, [(n, b"big\0\0\0" if n.endswith("byteorder") else d) for n, d in members])
    refused(path, "byte order", error=StagehandError)


def test_zip_files_that_are_refused(tmp_path, rng):
    members = qf.v1_members(qf.v1_object(qf.v1_layers(rng, SHAPES)))
    path = tmp_path / "bad.fpk"
    qf.write_zip(path, members, method=8)
    refused(path, "compressed", "data.pkl")
    qf.write_zip(path, members, crc=1)
    refused(path, "checksum")
    qf.write_zip(path, [*members, members[0]])
    refused(path, "twice", "data.pkl")
    qf.write_zip(path, members)
    good = path.read_bytes()
    for cut in (1, 21, 22, 60, 200, len(good) // 2, len(good) - 10):
        path.write_bytes(good[:-cut])
        refused(path, "byte")
    path.write_bytes(b"")
    refused(path, "too short")
    first = good.index(b"PK\x01\x02")

    def patched(offset, fmt, *values):
        data = bytearray(good)
        struct.pack_into(fmt, data, offset, *values)
        path.write_bytes(data)

    second = good.index(b"PK\x01\x02", first + 1)
    patched(first + 24, "<I", 1 << 30)
    refused(path, "sizes differ")
    patched(first + 20, "<II", 1 << 30, 1 << 30)
    refused(path, "data.pkl", "directory begins")
    patched(second + 42, "<I", 0)
    refused(path, "another name")
    patched(second + 42, "<I", len(good))
    refused(path, "outside")
    patched(first + 8, "<H", 1)
    refused(path, "encrypted")
    patched(first + 20, "<II", 0xFFFFFFFF, 0xFFFFFFFF)
    refused(path, "zip64")
    end64 = good.index(b"PK\x06\x06")
    patched(end64 + 24, "<QQ", 1 << 60, 1 << 60)
    refused(path, "disagree")
    patched(end64 + 40, "<Q", (1 << 64) - 1)
    refused(path, "disagree")
    patched(len(good) - 22 + 10, "<H", 7)
    refused(path, "disks")
    # Bombs: members that share their bytes.
    overlap = bytearray(good)
    names = [good.index(b"PK\x01\x02", first)]
    while (at := good.find(b"PK\x01\x02", names[-1] + 1)) > 0:
        names.append(at)
    size, = struct.unpack_from("<I", good, names[2] + 24)
    struct.pack_into("<II", overlap, names[2] + 20, size + 4096, size + 4096)
    path.write_bytes(overlap)
    refused(path, "overlap")


# ---- v2 ----


def test_v2_reads_to_its_values(tmp_path, rng):
    layers = qf.v1_layers(rng, SHAPES)
    extra = {"norm.weight": qf.tensor("BF16", np.arange(7))}
    path = qf.write_v2(tmp_path, layers, extra=extra)
    for name in (path, tmp_path / "model.manifest.json", tmp_path):
        file = _core.QuantFile(name)
        assert file.format() == "squareq_bp8_v2" and file.plain() == ["norm.weight"]
        check_decoding(file, int8_values(layers))


V2_CHANGES = {
    "abi": (lambda m, t: m.update(kernel_abi_version=2), "kernel_abi_version 2"),
    "no abi": (lambda m, t: m.pop("kernel_abi_version"), "kernel_abi_version"),
    "bits": (lambda m, t: m["layers"][0].update(quant_bits=4), "8 bits"),
    "scheme": (lambda m, t: m["layers"][0].update(quant_scheme="per_tensor"), "per_row_symmetric"),
    "count": (lambda m, t: m.update(layer_count=9), "layer_count"),
    "bytes": (lambda m, t: m.update(total_qweight_bytes=9), "total_qweight_bytes"),
    "name": (lambda m, t: m["layers"][0].pop("canonical_name"), "canonical_name"),
    "twice": (lambda m, t: m.update(layers=2 * m["layers"][:1], layer_count=2, total_qweight_bytes=2 * 130 * 704),
              "proj_out"),
    "shared": (lambda m, t: m["layers"][1].update(zero_point_key="transformer_blocks.0.ff.scale"), "used twice"),
    "no key": (lambda m, t: m["layers"][0].pop("scale_key"), "scale_key"),
    "missing": (lambda m, t: t.pop("proj_out.scale"), "proj_out.scale"),
    "bias missing": (lambda m, t: t.pop("proj_out.bias"), "proj_out.bias"),
    "dtype": (lambda m, t: t.update({"proj_out.scale": qf.tensor("F16", np.zeros(130))}), "F16 [130]"),
    "zero shape": (lambda m, t: t.update({"proj_out.zero_point": qf.tensor("F32", np.zeros(129))}), "F32 [129]"),
    "packed": (lambda m, t: m["layers"][0].update(packed_shape=[130, 640]), "padded"),
    "pad": (lambda m, t: m["layers"][0].update(pad_k=100), "pad_k"),
    "negative": (lambda m, t: m["layers"][0].update(orig_shape=[130, -700]), "orig_shape"),
    "huge": (lambda m, t: m["layers"][0].update(orig_shape=[1 << 62, 8], packed_shape=[1 << 62, 64]), "I8 [130, 704]"),
    "no layers": (lambda m, t: m.pop("layers"), "layers"),
    "kind": (lambda m, t: m.update(quant_version="int3"), "int3"),
}


@pytest.mark.parametrize("what", V2_CHANGES)
def test_v2_manifests_that_disagree(tmp_path, rng, what):
    change, part = V2_CHANGES[what]
    path = qf.write_v2(tmp_path, qf.v1_layers(rng, SHAPES), change)
    with pytest.raises(StagehandError) as caught:
        _core.QuantFile(path)
    assert part in str(caught.value) and "model." in str(caught.value), caught.value


def test_a_manifest_that_is_not_json(tmp_path, rng):
    path = qf.write_v2(tmp_path, qf.v1_layers(rng, SHAPES))
    manifest = tmp_path / "model.manifest.json"
    good = manifest.read_text()
    for bad, part in ((good[:-1], "JSON"), ("[]", "object"), ('{"a":1,"a":2}', "byte"), ("", "JSON")):
        manifest.write_text(bad)
        refused(manifest, part)
    manifest.unlink()
    refused(path, "manifest.json", error=StagehandError)
    refused(tmp_path / "absent.fpk", error=NotFoundError)
    refused(tmp_path / "absent.safetensors", error=NotFoundError)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_scales_that_are_not_finite(tmp_path, rng, bad):
    layers = qf.v1_layers(rng, SHAPES)
    layers["proj_out"][0]["scale"][129] = bad
    path = qf.write_v2(tmp_path, layers)
    file = _core.QuantFile(path)
    layer = next(each for each in file.layers() if each["name"] == "proj_out")
    with pytest.raises(CheckpointError) as caught:
        decoded(file, layer)
    at = path.read_bytes().index(layers["proj_out"][0]["scale"].tobytes()) + 4 * 129
    assert f"byte {at}" in str(caught.value) and "proj_out.scale" in str(caught.value)


# ---- SVDQuant ----


def write_svdquant(folder, rng, hybrid):
    """One layer of each kind; returns the path and the values."""
    tensors, values, entries = {"norm.weight": qf.tensor("BF16", np.arange(9))}, {}, {}
    for base, out, inp, rank, rows in (("a.0.q", 256, 320, 32, False), ("a.1.q", 37, 2048, 128, True)):
        if rows and not hybrid:
            continue
        q, scales, down, up = qf.random_int4(rng, out, inp, 1 if rows else inp // 64, rank)
        tensors[base + ".qweight"] = qf.tensor("I8", qf.pack_nibbles(q).view(np.int8))
        tensors[base + (".wscale" if rows else ".wscales")] = qf.tensor("BF16", scales[0] if rows else scales)
        tensors[base + ".lora_down"], tensors[base + ".lora_up"] = qf.tensor("BF16", down), qf.tensor("BF16", up)
        if not rows:
            tensors[base + ".smooth"] = qf.tensor("BF16", np.full(inp, 0x3F80))
            tensors[base + ".bias"] = qf.tensor("BF16", np.arange(out))
        values[base] = qf.decode_int4(q, scales, down, up, inp if rows else 0)
        entry = {"in": inp, "out": out, "rank": rank}
        entries[base + ".weight"] = (
            {"kind": "w4a4" if rows else "w4a16", **entry} if hybrid else {**entry, "group": 64})
    manifest = {"method": "svdquant_int4", "quant_bits": 4, "rank": 32, "group": 64, "quantized": entries,
                "passthrough": ["norm.weight", "a.0.q.bias"]}
    if hybrid:
        manifest = {"method": "svdquant_w4a4_hybrid", "rank": 128, "w4a16_rank": 32, "group": 64,
                    "hadamard": "sylvester", "layers": entries, "passthrough": ["norm.weight", "a.0.q.bias"],
                    "w4a4_count": 1, "w4a16_count": 1, "passthrough_count": 2}
    path = folder / "svd.safetensors"
    qf.write_safetensors(path, tensors, {"svdquant_manifest": json.dumps(manifest)})
    (folder / "svd.manifest.json").write_text(json.dumps(manifest))
    return path, values, tensors, manifest


@pytest.mark.parametrize("hybrid", [False, True])
def test_svdquant_reads_to_its_values(tmp_path, rng, hybrid):
    path, values, _, _ = write_svdquant(tmp_path, rng, hybrid)
    file = _core.QuantFile(path)
    assert file.format() == ("svdquant_w4a4_hybrid" if hybrid else "svdquant_int4")
    assert file.plain() == ["norm.weight"]
    check_decoding(file, values)
    file.close()
    (tmp_path / "svd.manifest.json").unlink()  # the header holds it, too
    check_decoding(_core.QuantFile(path), values)


def test_a_manifest_in_the_header_that_is_not_json(tmp_path, rng):
    path, _, tensors, _ = write_svdquant(tmp_path, rng, False)
    (tmp_path / "svd.manifest.json").unlink()
    for text, part in (("{", "JSON"), ("[1]", "no manifest"), ('{"a":1,"a":1}', "JSON")):
        qf.write_safetensors(path, tensors, {"svdquant_manifest": text})
        refused(path, part, error=StagehandError)


def test_svdquant_smoothing_divides(tmp_path, rng):
    path, values, tensors, _ = write_svdquant(tmp_path, rng, False)
    smooth = np.exp2(rng.uniform(-2, 2, 320)).astype(np.float32)
    tensors["a.0.q.smooth"] = qf.tensor("BF16", qf.to_bf16(smooth))
    qf.write_safetensors(path, tensors)
    wanted = values["a.0.q"] / qf.from_bf16(qf.to_bf16(smooth))
    check_decoding(_core.QuantFile(path), {"a.0.q": wanted})
    tensors["a.0.q.smooth"] = qf.tensor("BF16", np.zeros(320))
    qf.write_safetensors(path, tensors)
    file = _core.QuantFile(path)
    with pytest.raises(CheckpointError, match="smooth.*factor of 0"):
        decoded(file, file.layers()[0])


SVD_CHANGES = {
    "kind": (lambda m, t: m["layers"]["a.0.q.weight"].update(kind="w2"), "kind"),
    "odd group": (lambda m, t: m.update(group=5), "group"),
    "group 0": (lambda m, t: m.update(group=0), "group"),
    "no power of two": (lambda m, t: m["layers"]["a.1.q.weight"].update({"in": 2046}), "power of two"),
    "rank": (lambda m, t: m["layers"]["a.0.q.weight"].update(rank=16), "lora_down"),
    "no rank": (lambda m, t: m["layers"]["a.0.q.weight"].pop("rank"), "rank"),
    "hadamard": (lambda m, t: m.update(hadamard="paley"), "Sylvester"),
    "passthrough": (lambda m, t: m["passthrough"].append("absent"), "absent"),
    "scales": (lambda m, t: t.pop("a.0.q.wscales"), "a.0.q.wscales"),
    "smooth": (lambda m, t: t.pop("a.0.q.smooth"), "smooth"),
    "entry": (lambda m, t: m["layers"].update({"a.0.q.weight": 5}), "a.0.q"),
}


@pytest.mark.parametrize("what", SVD_CHANGES)
def test_svdquant_manifests_that_disagree(tmp_path, rng, what):
    change, part = SVD_CHANGES[what]
    path, _, tensors, manifest = write_svdquant(tmp_path, rng, True)
    change(manifest, tensors)
    qf.write_safetensors(path, tensors)
    (tmp_path / "svd.manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(StagehandError) as caught:
        _core.QuantFile(path)
    assert part in str(caught.value), caught.value


# ---- v3 ----


def write_int4(folder, rng, group=64, plan=True, change=None):
    shards, values, layers = [], {}, {}
    for i, (base, out, inp) in enumerate((("blocks.0.q", 130, 512), ("blocks.1.q", 7, 256))):
        q, scales, down, up = qf.random_int4(rng, out, inp, inp // group, 32)
        shards.append({
            base + ".qweight": qf.tensor("U8", qf.pack_nibbles(q)), base + ".wscales": qf.tensor("BF16", scales),
            base + ".lora_down": qf.tensor("BF16", down), base + ".lora_up": qf.tensor("BF16", up)})
        values[base], layers[base + ".weight"] = qf.decode_int4(q, scales, down, up, 256), (out, inp, 32)
    shards.append({"blocks.0.norm": qf.tensor("F32", np.arange(3)), "blocks.0.q.bias": qf.tensor("F32", np.arange(5))})
    if change:
        change(shards, layers)
    return qf.write_v3(folder, shards, layers, plan=plan), values


@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("plan", [True, False])
def test_v3_int4_reads_to_its_values(tmp_path, rng, group, plan):
    folder, values = write_int4(tmp_path, rng, group, plan)
    file = _core.QuantFile(folder)
    assert file.format() == "squareq_w4_v1" and file.plain() == ["blocks.0.norm", "blocks.0.q.bias"]
    layers = check_decoding(file, values)
    assert layers["blocks.0.q"]["group"] == group and layers["blocks.0.q"]["rank"] == 32


def write_nvfp4(folder, rng, bad_scale=None):
    shards, values, layers = [], {}, {}
    for base, out, inp in (("blocks.0.q", 300, 512), ("blocks.1.q", 16, 256)):
        codes, scales = rng.integers(0, 16, (out, inp)), rng.integers(8, 0x7F, (out, inp // 16)).astype(np.uint8)
        scales[rng.random(scales.shape) < 0.1] = 0
        if bad_scale is not None:
            scales[5, 3] = bad_scale
        _, _, down, up = qf.random_int4(rng, out, inp, 1, 32)
        g = np.float32(rng.uniform(1e-4, 1e-3))
        shards.append({
            base + ".nvq": qf.tensor("U8", codes[:, 0::2] | codes[:, 1::2] << 4),
            base + ".nvs": qf.tensor("U8", qf.tile_scales(scales)), base + ".nvg": qf.tensor("F32", [g]),
            base + ".lora_down": qf.tensor("BF16", down), base + ".lora_up": qf.tensor("BF16", up)})
        values[base], layers[base + ".weight"] = qf.decode_nvfp4(codes, scales, g, down, up), (out, inp, 32)
    return qf.write_v3(folder, shards, layers, "squareq_nvfp4_v1"), values


def test_v3_nvfp4_reads_to_its_values(tmp_path, rng):
    folder, values = write_nvfp4(tmp_path, rng)
    file = _core.QuantFile(folder)
    assert file.format() == "squareq_nvfp4_v1"
    check_decoding(file, values)


@pytest.mark.parametrize("code", [1, 7, 0x7F, 0x80, 0xFF])
def test_nvfp4_scales_about_which_readers_disagree(tmp_path, rng, code):
    file = _core.QuantFile(write_nvfp4(tmp_path, rng, code)[0])
    with pytest.raises(CheckpointError, match="blocks.0.q.nvs.*byte"):
        decoded(file, file.layers()[0])


V3_CHANGES = {
    "no scales": (lambda s, p: s[0].pop("blocks.0.q.wscales"), "wscales"),
    "no factors": (lambda s, p: s[0].pop("blocks.0.q.lora_down"), "lora_down"),
    "factors of another layer": (lambda s, p: s[0].update({"blocks.0.q.lora_up": qf.tensor("BF16", np.ones((7, 32)))}),
                                 "BF16 [7, 32]"),
    "codes of another size": (lambda s, p: s[0].update({"blocks.0.q.qweight": qf.tensor("U8", np.ones((130, 100)))}),
                              "multiple of 256"),
    "codes in one row": (lambda s, p: s[0].update({"blocks.0.q.qweight": qf.tensor("U8", np.ones(256))}),
                         "two extents"),
    "scales that do not divide": (
        lambda s, p: s[0].update({"blocks.0.q.wscales": qf.tensor("BF16", np.ones((7, 130)))}), "group"),
    "not in the plan": (lambda s, p: p.pop("blocks.0.q.weight"), "squareq-plan"),
    "only in the plan": (lambda s, p: p.update({"x.weight": (1, 256, 32)}), "squareq-plan"),
    "another rank": (lambda s, p: p.update({"blocks.0.q.weight": (130, 512, 16)}), "squareq-plan"),
}


@pytest.mark.parametrize("what", V3_CHANGES)
def test_v3_folders_that_disagree(tmp_path, rng, what):
    change, part = V3_CHANGES[what]
    folder, _ = write_int4(tmp_path, rng, change=change)
    with pytest.raises(StagehandError) as caught:
        _core.QuantFile(folder)
    assert part in str(caught.value), caught.value


def test_v3_builds_that_did_not_end(tmp_path, rng):
    folder, _ = write_int4(tmp_path, rng, plan=False)
    (folder / "squareq-plan.partial.json").write_text("{}")
    refused(folder, "built to its end")


def test_calls_that_are_mistakes(tmp_path, rng):
    path = qf.write_v2(tmp_path, qf.v1_layers(rng, SHAPES))
    file, room = _core.QuantFile(path), np.zeros((130, 700), np.float64)
    with pytest.raises(NotFoundError, match="no layer of that name"):
        file.decode("absent", "F32", room.ctypes.data)
    with pytest.raises(ValueError, match="F64"):
        file.decode("proj_out", "F64", room.ctypes.data)
    with pytest.raises(ValueError, match="_core.DTYPES"):
        file.decode("proj_out", "float", room.ctypes.data)
    with pytest.raises(ValueError, match="memory"):
        file.decode("proj_out", "F32", 0)
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(StagehandError, match="changed"):
        file.decode("proj_out", "F32", room.ctypes.data)
    file.close()
    with pytest.raises(StagehandError, match="closed"):
        file.layers()
