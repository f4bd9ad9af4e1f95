"""Quantised model files written from their description with numpy and struct alone, and their values by the book.

Nothing here uses the library: what it reads is compared with what stands here. Matrices are decoded with dense Hadamard
matrices; all sums of signed scale multiples are exact in float64, so that their order does not matter.
"""

import binascii
import functools
import json
import struct

import numpy as np

DTYPES = {"I8": np.int8, "U8": np.uint8, "F32": np.float32, "BF16": np.uint16, "F16": np.float16, "I64": np.int64}


def to_bf16(x):
    """float32 to bfloat16 bits, to nearest even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


@functools.cache
def hadamard(n):
    """Signs of the Sylvester matrix, not normalised."""
    h = np.ones((1, 1))
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return h


def rotate(rows, size):
    """float32 rows times the normalised block-diagonal Hadamard matrix: exact sums, one division, one rounding."""
    blocks = rows.astype(np.float64).reshape(len(rows), -1, size)
    return (blocks @ hadamard(size) / np.sqrt(np.float64(size))).reshape(rows.shape).astype(np.float32)


def low_rank(up, down):
    """float32: the sum over the rank in ascending order. up [out, r], down [in, r], both float32."""
    total = np.zeros((len(up), len(down)), np.float32)
    for r in range(up.shape[1]):
        total += up[:, r : r + 1] * down[:, r]
    return total


def pack_nibbles(q):
    """int4 values [out, in], low nibble first, to bytes [out, in / 2]."""
    q = q.astype(np.int64) & 15
    return (q[:, 0::2] | q[:, 1::2] << 4).astype(np.uint8)


# ---- containers ----


def tensor(dtype, array):
    array = np.ascontiguousarray(array, DTYPES[dtype])
    return dtype, list(array.shape), array.tobytes()


def write_safetensors(path, tensors, metadata=None):
    """{name: tensor(...)}, back to back, with the header padded to a multiple of 8."""
    header, at = {}, 0
    if metadata:
        header["__metadata__"] = metadata
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(t[2] for t in tensors.values()))


def write_zip(path, members, zip64=True, crc=None, method=0):
    """Stored members with descriptors and padded to 64, as torch.save lays them out. [(name, bytes)]."""
    out, directory = bytearray(), bytearray()
    for name, data in members:
        encoded, start = name.encode(), len(out)
        pad = -(start + 30 + len(encoded) + 4) % 64
        extra = b"FB" + struct.pack("<H", pad) + b"Z" * pad
        checksum = binascii.crc32(data) if crc is None else crc
        out += struct.pack("<IHHHHHIIIHH", 0x04034B50, 0, 0x0808, method, 0, 0, 0, 0, 0, len(encoded), len(extra))
        out += encoded + extra
        assert len(out) % 64 == 0
        out += data + struct.pack("<IIII", 0x08074B50, checksum, len(data), len(data))
        directory += struct.pack("<IHHHHHHIIIHHHHHII", 0x02014B50, 0, 0, 0x0808, method, 0, 0, checksum, len(data),
                                 len(data), len(encoded), 0, 0, 0, 0, 0, start)
        directory += encoded
    begin, count = len(out), len(members)
    out += directory
    if zip64:
        where = len(out)
        out += struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 0x31E, 45, 0, 0, count, count, len(directory), begin)
        out += struct.pack("<IIQI", 0x07064B50, 0, where, 1)
    out += struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, count, count, len(directory), begin, 0)
    path.write_bytes(out)


class Pickler:
    """Protocol 2 in the opcodes that torch.save uses; tensors become storages to be written beside it."""

    def __init__(self):
        self.out, self.memo, self.storages = bytearray(b"\x80\x02"), 0, []

    def put(self):
        self.out += b"q" + bytes([self.memo]) if self.memo < 256 else b"r" + struct.pack("<I", self.memo)
        self.memo += 1

    def text(self, text):
        self.out += b"X" + struct.pack("<I", len(text.encode())) + text.encode()
        self.put()

    def integer(self, n):
        if 0 <= n < 256:
            self.out += b"K" + bytes([n])
        elif 0 <= n < 65536:
            self.out += b"M" + struct.pack("<H", n)
        elif -(1 << 31) <= n < 1 << 31:
            self.out += b"J" + struct.pack("<i", n)
        else:
            data = n.to_bytes(n.bit_length() // 8 + 1, "little", signed=True)
            self.out += b"\x8a" + bytes([len(data)]) + data

    def sizes(self, values):
        for n in values:
            self.integer(n)
        self.out += {1: b"\x85", 2: b"\x86", 3: b"\x87"}[len(values)]
        self.put()

    def array(self, array):
        kind = {"int8": "CharStorage", "float32": "FloatStorage"}[array.dtype.name]
        self.out += b"ctorch._utils\n_rebuild_tensor_v2\n"
        self.put()
        self.out += b"(("
        self.text("storage")
        self.out += b"ctorch\n" + kind.encode() + b"\n"
        self.put()
        self.text(str(len(self.storages)))
        self.text("cpu")
        self.integer(array.size)
        self.out += b"t"
        self.put()
        self.out += b"Q"
        self.storages.append(array.tobytes())
        self.integer(0)
        self.sizes(array.shape)
        self.sizes([s // array.itemsize for s in np.ascontiguousarray(array).strides])
        self.out += b"\x89ccollections\nOrderedDict\n"
        self.put()
        self.out += b")R"
        self.put()
        self.out += b"t"
        self.put()
        self.out += b"R"
        self.put()

    def value(self, value):
        if isinstance(value, dict):
            self.out += b"}"
            self.put()
            self.out += b"("
            for key, item in value.items():
                self.value(key)
                self.value(item)
            self.out += b"u"
        elif isinstance(value, list):
            self.out += b"]"
            self.put()
            self.out += b"("
            for item in value:
                self.value(item)
            self.out += b"e"
        elif isinstance(value, bool):
            self.out += b"\x88" if value else b"\x89"
        elif value is None:
            self.out += b"N"
        elif isinstance(value, str):
            self.text(value)
        elif isinstance(value, int):
            self.integer(value)
        else:
            self.array(value)

    def dump(self, value):
        self.value(value)
        return bytes(self.out) + b"."


# ---- int8: v1 and v2 ----


def quantise_int8(w, pack=64):
    """(q [out, padded] int8, s [out] float32)."""
    padded = -(-w.shape[1] // pack) * pack if pack > 1 else w.shape[1]
    wide = np.zeros((len(w), padded), np.float32)
    wide[:, : w.shape[1]] = w
    s = np.maximum(np.abs(wide).max(1) / np.float32(127), np.float32(1e-8)).astype(np.float32)
    q = np.clip(np.rint(wide * (np.float32(1) / s)[:, None]), -127, 127).astype(np.int8)
    return q, s


def decode_int8(q, s, zero, columns):
    return ((q.astype(np.float32) - zero[:, None]) * s[:, None])[:, :columns]


def v1_layers(rng, shapes):
    """{name: (tensors, inp)} for {name: (out, in, has_bias)}."""
    layers = {}
    for name, (out, inp, bias) in shapes.items():
        q, s = quantise_int8(rng.standard_normal((out, inp)).astype(np.float32))
        tensors = {"qweight": q, "scale": s, "zero_point": np.zeros(out, np.float32)}
        if bias:
            tensors["bias"] = rng.standard_normal(out).astype(np.float32)
        layers[name] = (tensors, inp)
    return layers


def v1_object(layers):
    entries = [
        {"name": name, "out": t["qweight"].shape[0], "inp": inp, "padded_in": t["qweight"].shape[1],
         "has_bias": "bias" in t}
        for name, (t, inp) in sorted(layers.items())
    ]
    manifest = {"model_name": "tiny", "quant_version": "squareq_bp8_v1", "layout": "rowwise_sym_int8", "pack_k": 64,
                "layers": entries}
    return {"manifest": manifest, "layers": {name: t for name, (t, _) in layers.items()}}


def v1_members(value, root="slab", pickle=None):
    pickler = Pickler()
    data = pickler.dump(value)
    members = [(f"{root}/data.pkl", pickle or data), (f"{root}/byteorder", b"little")]
    members += [(f"{root}/data/{i}", storage) for i, storage in enumerate(pickler.storages)]
    return members + [(f"{root}/version", b"3\n")]


def write_v2(folder, layers, change=None, extra=None, name="model"):
    """The pair of files from {name: (tensors, in)}; `change` edits the manifest before it is written."""
    tensors, entries = {}, []
    for layer, (t, inp) in layers.items():
        for key, array in t.items():
            tensors[f"{layer}.{key}"] = tensor("I8" if key == "qweight" else "F32", array)
    for layer, (t, inp) in sorted(layers.items()):
        out, padded = t["qweight"].shape
        entries.append({
            "canonical_name": layer, "qweight_key": f"{layer}.qweight", "scale_key": f"{layer}.scale",
            "zero_point_key": f"{layer}.zero_point", "bias_key": f"{layer}.bias" if "bias" in t else None,
            "orig_shape": [out, inp], "packed_shape": [out, padded], "pad_k": 64, "quant_bits": 8,
            "quant_scheme": "per_row_symmetric", "quant_axis": 0, "dtype_qweight": "int8",
            "dtype_scale": "float32", "dtype_zero_point": "float32", "block_id": None,
        })
    manifest = {
        "model_signature": "0123456789abcdef", "architecture_id": "unknown", "quant_version": "squareq_bp8_v2",
        "kernel_abi_version": 1, "min_runtime_version": "0.1.0", "layer_count": len(entries),
        "total_qweight_bytes": sum(t["qweight"].size for t, _ in layers.values()), "layers": entries,
    }
    tensors.update(extra or {})
    if change:
        change(manifest, tensors)
    path = folder / f"{name}.safetensors"
    write_safetensors(path, tensors)
    (folder / f"{name}.manifest.json").write_text(json.dumps(manifest))
    return path


# ---- int4 with low-rank factors ----


def random_int4(rng, out, columns, groups, rank):
    """Codes of the whole range, scales of several exponents, factors: all as stored, with bfloat16 as bits."""
    q = rng.integers(-8, 8, (out, columns))
    scales = to_bf16(np.exp2(rng.uniform(-9, -5, (groups, out))).astype(np.float32))
    down = to_bf16(rng.standard_normal((columns, rank)).astype(np.float32) * 0.1)
    up = to_bf16(rng.standard_normal((out, rank)).astype(np.float32) * 0.1)
    return q, scales, down, up


def decode_int4(q, scales, down, up, block):
    """float32 weight; scales [groups, out] as bits; `block`: size of the Hadamard blocks, 0 for none."""
    group = q.shape[1] // len(scales)
    v = q.astype(np.float32) * np.repeat(from_bf16(scales).T, group, axis=1)
    return (rotate(v, block) if block else v) + low_rank(from_bf16(up), from_bf16(down))


# ---- NVFP4 ----

MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def ue4m3(code):
    code = code.astype(np.int64)
    value = np.exp2((code >> 3) - 7.0) * (1 + (code & 7) / 8)
    return np.where(code == 0, 0, value).astype(np.float32)


def tile_scales(scales):
    """[out, in / 16] bytes in rows to the tiles of cuBLASLt."""
    out, blocks = scales.shape
    rows, wide = -(-out // 128) * 128, -(-blocks // 4) * 4
    tiles = np.zeros(rows * wide, np.uint8)
    for o in range(out):
        for c in range(blocks):
            at = ((o // 128) * (wide // 4) + c // 4) * 512 + (o % 32) * 16 + ((o // 32) % 4) * 4 + c % 4
            tiles[at] = scales[o, c]
    return tiles


def decode_nvfp4(codes, scales, g, down, up):
    """codes [out, in] of 4 bits, scales [out, in / 16] bytes."""
    value = np.where(codes & 8, -MAGNITUDES[codes & 7], MAGNITUDES[codes & 7]).astype(np.float32)
    v = value * np.repeat(ue4m3(scales), 16, axis=1) * np.float32(g)
    return rotate(v, 256) + low_rank(from_bf16(up), from_bf16(down))


def write_v3(folder, shards, layers, fmt="squareq_w4_v1", plan=True):
    """shards: a list of {name: tensor}; layers: {key: (out, in, rank)} for the plan."""
    weight_map = {}
    for i, tensors in enumerate(shards):
        name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(folder / name, tensors, {"format": fmt, "rank": "32", "group": "64"})
        weight_map.update(dict.fromkeys(tensors, name))
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"format": "squareq_w4_v1"}, "weight_map": weight_map}))
    if plan:
        entries = {key: {"out": out, "in": inp, "rank": rank, "cos_w": 1.0, "rel_l2": 0.0, "bytes_q": 1,
                         "bytes_bf16": 2, "format": fmt} for key, (out, inp, rank) in layers.items()}
        (folder / "squareq-plan.json").write_text(json.dumps(
            {"plan_version": 1, "format": fmt, "model": "m", "source": "s", "hblock": 256, "group": 64,
             "rank_default": 32, "layers": entries, "passthrough": [], "totals": {}}, indent=1, sort_keys=True))
    return folder
