"""Losslessly packed files: they come back byte by byte, and stream in fewer bytes with the bits that they were made of.

On a card, within five minutes: STH_TEST_DEVICE=cuda:0 python -m pytest tests/python/test_lossless_files.py
"""

import copy
import json
import random
import struct

import card
import numpy as np
import pytest
import stagehand
import torch
from file_support import from_outside
from safetensors.torch import load_file, save_file
from stagehand import CheckpointError, DtypeMismatchError, StagehandError, _core
from stagehand.weights.fileweight import FileWeight
from support import Stack, TinyLM, aligned_copy, made, nbytes, same
from torch import nn

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
BLOCKS = r"^blocks\.\d+$"
D = 128
PIECE = 2 << 20  # bytes of values that a file packs together


def stack(dtype=torch.bfloat16, n=4):
    return made(Stack, n, D).to(dtype)


def build(dtype=torch.bfloat16, n=4):
    return lambda: Stack(n, D).to(dtype).eval()


def budget_of(model) -> int:
    return nbytes(model) // 2 + (160 << 10)


def pack(folder, tensors, name="m", **kwargs):
    """The paths of a file of these tensors, written by the safetensors package, and of the same packed."""
    plain, packed = folder / f"{name}.safetensors", folder / f"{name}.packed.safetensors"
    save_file(tensors, plain, metadata={"format": "pt", "by": "a \u00fcser"})
    _core.pack(plain, packed, "lossless", **kwargs)
    return plain, packed


def contiguous(model):
    return {name: tensor.contiguous() for name, tensor in model.state_dict().items()}


def packed_names(path) -> set:
    return {layer["name"] for layer in _core.QuantFile(path).layers()}


def comes_back(plain, packed, **kwargs):
    back = plain.with_name("back.safetensors")
    _core.unpack(packed, back, **kwargs)
    assert back.read_bytes() == plain.read_bytes()
    back.unlink()


# ---- there and back


def odd_tensors(rng):
    """Shapes and values of all kinds."""
    def bits(count, width):
        kind = rng.randrange(6)
        raw = np.frombuffer(rng.randbytes(count * width // 8), np.uint8).copy()
        if kind == 0:  # weights
            values = torch.randn(count, generator=torch.Generator().manual_seed(rng.randrange(99)))
            return values if width == 32 else values.bfloat16() if rng.random() < 0.5 else values.half()
        if kind == 1:  # NaN, infinities, subnormals, zeros of both signs, the largest
            some = [0x7F80, 0xFF80, 0x7FC1, 1, 0x8001, 0x8000, 0x7F7F, 0, 0x7C00, 0xFC01]
            return torch.tensor(np.array([rng.choice(some) for _ in range(16)], np.uint16).view(np.int16)).repeat(
                -(-count // 16))[:count].view(torch.bfloat16)
        if kind == 2:  # all equal
            raw[:] = rng.randrange(256)
        if kind == 3:
            raw[count // 7:] = 0
        if not count:
            return torch.zeros(0)
        return torch.from_numpy(raw).view({16: torch.float16, 32: torch.float32}[width])

    tensors = {}
    for i in range(12):
        count = rng.choice([0, 1, 2, 1023, 4095, 4096, 4097, 5000, 12289, 70001])
        values = bits(count, rng.choice([16, 32]))
        shape = rng.choice([[count], [1, count], [count, 1, 1]]) if count else [3, 0]
        tensors[f"t{i}.{rng.choice(['weight', 'bias', 'embed'])}"] = values.reshape(shape).clone()
    tensors["scalar"] = torch.tensor(-0.0)
    tensors["wide"] = torch.randn(3 * PIECE // 2 + 77, generator=torch.Generator().manual_seed(5)).bfloat16()
    for dtype in (torch.int64, torch.uint8, torch.bool, torch.float64, torch.float8_e4m3fn):
        tensors[str(dtype)] = torch.from_numpy(np.frombuffer(rng.randbytes(5000), np.uint8) % 2).to(dtype)
    return tensors


@pytest.mark.parametrize("seed", range(6))
def test_any_file_comes_back_byte_by_byte(tmp_path, seed):
    plain, packed = pack(tmp_path, odd_tensors(random.Random(seed)), threads=1 + seed % 3)
    comes_back(plain, packed, threads=1 + seed % 2)
    assert "wide" in packed_names(packed)
    found = _core.verify(packed, plain)
    assert all(one["checksum"] == 1 and not one["missing"] and one["equal"] == one["compared"] for one in found)
    again = tmp_path / "again.safetensors"
    _core.pack(plain, again, "lossless", threads=3)
    assert again.read_bytes() == packed.read_bytes()


def test_a_header_of_another_writer_comes_back(tmp_path):
    """Keys in another order, spaces, escapes, tensors not in the order of their places, data at an odd byte."""
    data = torch.randn(2, 4096).bfloat16().view(torch.uint8).numpy().tobytes()
    header = ('{ "__metadata__" : {"a\\u0062":"\\"x\\""} ,\n "z" : {"shape":[4096] , "data_offsets":[8195,16387],'
              '"dtype":"BF16"}, "b": {"data_offsets":[0,3],"dtype":"I8","shape":[3]},'
              '"a":{"dtype":"BF16","shape":[64,64],"data_offsets":[3,8195]}}   ').encode()
    plain, packed = tmp_path / "m.safetensors", tmp_path / "p.safetensors"
    plain.write_bytes(struct.pack("<Q", len(header)) + header + b"abc" + data)
    _core.pack(plain, packed, "lossless")
    assert packed_names(packed) == {"a", "z"}
    comes_back(plain, packed)


@pytest.mark.parametrize("tensors", [{}, {"a": torch.zeros(0)}, {"a": torch.randn(4096)}], ids=["none", "empty", "one"])
def test_the_smallest_files(tmp_path, tensors):
    plain, packed = pack(tmp_path, tensors)
    comes_back(plain, packed)
    assert all(one["checksum"] == 1 for one in _core.verify(packed))


def test_shards_come_back_as_a_folder(tmp_path):
    source, back = tmp_path / "model", tmp_path / "back"
    source.mkdir()
    model = contiguous(stack())
    names = sorted(model)
    files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in sorted(set(files.values())):
        save_file({name: model[name] for name in names if files[name] == file}, source / file)
    index = source / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": files}, indent=3))
    packed = tmp_path / "p.safetensors"
    _core.pack(source, packed, "lossless")
    _core.unpack(packed, back)
    assert sorted(p.name for p in back.iterdir()) == sorted(p.name for p in source.iterdir())
    assert all((back / p.name).read_bytes() == p.read_bytes() for p in source.iterdir())
    assert all(one["equal"] == one["compared"] and one["checksum"] == 1 for one in _core.verify(packed, source))
    streams(stagehand.load(build(), packed, vram_budget=budget_of(stack()), device=card.NAME), stack())
    index.write_text(json.dumps({"weight_map": dict(list(files.items())[1:])}))
    with pytest.raises(StagehandError, match="00001-of-00002.safetensors: holds tensors that the index does not place"):
        _core.pack(source, tmp_path / "q.safetensors", "lossless")
    assert not (tmp_path / "q.safetensors").exists()


def test_skip_and_what_does_not_shrink(tmp_path):
    noise = torch.from_numpy(np.random.default_rng(1).integers(-2**15, 2**15, 8192, np.int16)).view(torch.bfloat16)
    tensors = {"a": torch.randn(8192).bfloat16(), "b": torch.randn(8192).bfloat16(), "noise": noise,
               "small": torch.randn(4095).bfloat16()}
    plain, packed = pack(tmp_path, tensors, skip="^b$")
    assert packed_names(packed) == {"a"}
    comes_back(plain, packed)
    with pytest.raises(StagehandError, match="losslessly packed already"):
        _core.pack(packed, tmp_path / "twice.safetensors", "lossless")
    with pytest.raises(StagehandError, match="must end in .safetensors"):
        _core.pack(plain, tmp_path / "x.bin", "lossless")


def test_a_stopped_call_goes_on(tmp_path):
    tensors = {f"{i}": torch.randn(300, 1001).bfloat16() for i in range(6)}
    plain, whole = pack(tmp_path, tensors)
    for stop in range(2, 14, 2):
        calls, out = [], tmp_path / f"{stop}.safetensors"
        with pytest.raises(StagehandError, match="stopped"):
            _core.pack(plain, out, "lossless", progress=lambda *call: calls.append(call) or len(calls) < stop)
        assert not out.exists() and calls[-1][1] <= calls[-1][2]
        _core.pack(plain, out, "lossless", progress=lambda *call: calls.append(call) or True)
        assert calls[-1][1] == calls[-1][2] and out.read_bytes() == whole.read_bytes()
        assert not out.with_name(out.name + ".partial").exists()


# ---- streaming


def streams(model, plain, x=None, passes=3):
    """Outputs are those of the resident model; the link and the disk carried packed bytes."""
    want, runtime = aligned_copy(plain), stagehand.runtime(model)
    dtype = next(plain.parameters()).dtype
    x = card.there(torch.randn(3, D).to(dtype) if x is None else x)
    with torch.no_grad():
        for _ in range(passes):
            assert same(model(x), want(x))
    files = runtime.quantised["files"]
    assert files and set(files.values()) == {"lossless"} and not runtime.quantised["decoded"]
    units = [unit for unit in runtime.stats["units"] if unit["transfer_bytes"] < unit["bytes"]]
    assert len(units) == len(files)
    most = {torch.bfloat16: 0.78, torch.float16: 0.97, torch.float32: 0.92}[dtype]
    assert all(unit["transfer_bytes"] < most * unit["bytes"] for unit in units)
    return runtime


@pytest.mark.parametrize("blocks", [None, BLOCKS], ids=["layer", "block"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_load_streams_it(tmp_path, dtype, blocks):
    plain = stack(dtype)
    _, path = pack(tmp_path, contiguous(plain))
    model = stagehand.load(build(dtype), path, vram_budget=budget_of(plain), device=card.NAME, blocks=blocks)
    if blocks:
        runtime = stagehand.runtime(model)
        want, x = aligned_copy(plain), card.there(torch.randn(3, D).to(dtype))
        for _ in range(3):
            with torch.no_grad(), runtime.step() if hasattr(runtime, "step") else torch.no_grad():
                assert same(model(x), want(x))
        assert set(runtime.quantised["files"].values()) == {"lossless"}
    else:
        runtime = streams(model, plain)
    assert all(isinstance(model.get_parameter(name), FileWeight) for name in runtime.quantised["files"])
    for name, value in model.state_dict().items():
        assert type(value) is torch.Tensor and same(value, plain.state_dict()[name])
    assert same(copy.deepcopy(model).inp.weight.data, plain.inp.weight.data)
    runtime.shutdown()
    save_file(contiguous(model), tmp_path / "saved.safetensors")
    saved = load_file(tmp_path / "saved.safetensors")
    assert all(same(saved[name], value) for name, value in plain.state_dict().items())


def test_layer_mode_takes_it_as_source_and_keeps_its_bytes(tmp_path):
    plain = stack()
    _, path = pack(tmp_path, contiguous(plain))
    model = copy.deepcopy(plain)
    stagehand.layer(model, source=path, vram_budget=budget_of(plain), device=card.NAME, inference_mode=True,
                    ram_budget="1GB")
    runtime = streams(model, plain)
    before = runtime.stats["file_bytes"]
    streams(model, plain)
    stats = runtime.stats
    packed = sum(unit["transfer_bytes"] for unit in stats["units"])
    assert stats["file_bytes"] == before and 0.9 * packed < stats["ram_bytes"] < 1.2 * packed
    assert before < (1 if card.ON_CARD else 0.8) * nbytes(plain)  # slabs that a new plan gives up are read again
    runtime.shutdown()


def test_a_session_takes_it(tmp_path):
    plain = stack()
    _, path = pack(tmp_path, contiguous(plain))
    net = copy.deepcopy(plain)
    settings = {"mode": "layer", "vram_budget": budget_of(plain), "source": str(path), "inference_mode": True}
    with stagehand.session(net, {"memory": {"strategy": "stagehand", "stagehand": settings}}, device=card.NAME):
        streams(net, plain)


def test_tensors_of_many_pieces_under_transfer(tmp_path):
    plain = made(lambda: nn.Sequential(*[nn.Linear(1024, 2304) if i % 2 == 0 else nn.Linear(2304, 1024)
                                         for i in range(4)])).bfloat16()
    _, path = pack(tmp_path, contiguous(plain))
    budget = nbytes(plain) * 3 // 4 + (9 << 20)
    model = stagehand.load(lambda: copy.deepcopy(plain).to("meta"), path, vram_budget=budget, device=card.NAME,
                           transfer="lossless")
    runtime = streams(model, plain, torch.randn(2, 1024).bfloat16())
    runtime.shutdown()


@card.simulated_only
def test_without_kernels_the_host_expands(tmp_path):
    plain = stack()
    _, path = pack(tmp_path, contiguous(plain))
    device = _core.Device("sim", memory_bytes=budget_of(plain), expand=False)
    with pytest.warns(RuntimeWarning, match="expanded on the host"):
        model = stagehand.load(build(), path, vram_budget=budget_of(plain), device=device)
    want, x, runtime = aligned_copy(plain), torch.randn(3, D).bfloat16(), stagehand.runtime(model)
    with torch.no_grad():
        for _ in range(3):
            assert same(model(x), want(x))
    stats = runtime.stats
    assert all(unit["transfer_bytes"] == unit["bytes"] for unit in stats["units"])
    assert runtime.quantised["files"]
    runtime.shutdown()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_and_tied_weights(tmp_path, dtype):
    plain = made(TinyLM, 600, 64, 2).to(dtype)
    tensors = contiguous(plain)
    del tensors["head.weight"]
    _, path = pack(tmp_path, tensors)
    assert "embed.weight" in packed_names(path)
    model = stagehand.load(lambda: TinyLM(600, 64, 2).to(dtype).eval(), path, vram_budget=nbytes(plain) + (200 << 10),
                           device=card.NAME)
    ids, want = card.there(torch.randint(0, 600, (2, 7))), aligned_copy(plain)
    with torch.no_grad():
        for _ in range(3):
            assert same(model(ids), want(ids))
    assert model.head.weight is model.embed.weight
    stagehand.shutdown(model)


def test_adapters_train_over_it(tmp_path):
    plain = stack()
    _, path = pack(tmp_path, contiguous(plain))
    losses = []
    for model in (copy.deepcopy(plain), stagehand.load(build(), path, vram_budget=budget_of(plain), device=card.NAME)):
        packed = model.inp.weight.__class__ is FileWeight
        losses.append(train(model if packed else aligned_copy(model)))
    assert losses[0] == losses[1]


def train(model):
    torch.manual_seed(3)
    x = card.there(torch.randn(3, D).bfloat16())
    gate = nn.Parameter(card.there(torch.ones(D, dtype=torch.bfloat16)))
    found = []
    for _ in range(3):
        loss = model(x * gate).float().pow(2).mean()
        loss.backward()
        with torch.no_grad():
            gate -= gate.grad * 0.1
        gate.grad = None
        found.append(loss.item())
    return found


def test_what_trains_is_read_into_memory(tmp_path):
    plain = stack()
    _, path = pack(tmp_path, contiguous(plain))
    model = stagehand.load(lambda: Stack(4, D).bfloat16(), path, vram_budget=2 * nbytes(plain), device=card.NAME,
                           inference_mode=False)
    assert all(same(p.data.cpu(), plain.get_parameter(name).data) for name, p in model.named_parameters())
    assert set(reason["reason"] for reason in stagehand.runtime(model).quantised["decoded"].values()) <= {"it trains"}
    stagehand.shutdown(model)


def test_dtypes_and_shapes_are_those_of_the_file(tmp_path):
    plain = stack()
    _, path = pack(tmp_path, contiguous(plain))
    kwargs = {"vram_budget": budget_of(plain), "device": card.NAME}
    with pytest.raises(DtypeMismatchError, match="inp.weight is torch.float32"):
        stagehand.load(build(torch.float32), path, **kwargs)
    with pytest.raises(CheckpointError, match="inp.weight has shape"):
        stagehand.load(lambda: Stack(4, 2 * D).bfloat16(), path, **kwargs)
    model = stagehand.load(build(), path, **kwargs)
    with pytest.raises(StagehandError, match="stagehand unpack"):
        model.inp.weight.data.add_(1)
    stagehand.shutdown(model)


# ---- hostile files


def parts(path):
    raw = bytearray(path.read_bytes())
    length = struct.unpack_from("<Q", raw)[0]
    return raw, json.loads(raw[8:8 + length]), 8 + length


def rewritten(path, raw, header, begin):
    text = json.dumps(header).encode()
    assert len(text) <= begin - 8
    raw[8:begin] = text.ljust(begin - 8)
    path.write_bytes(raw)


def at(header, begin, name):
    return begin + header[name]["data_offsets"][0]


def _length(raw, header, begin, by):
    where = at(header, begin, "__stagehand_lossless__.lengths")
    struct.pack_into("<I", raw, where, struct.unpack_from("<I", raw, where)[0] + by & 0xFFFFFFFF)


def _original(raw, header, begin, old, new):
    where = raw.index(old, at(header, begin, "__stagehand_lossless__.header.0"))
    raw[where:where + len(old)] = new


def _says(raw, header, begin, text):
    header["__metadata__"]["stagehand_lossless"] = text


LIES = {
    "lengths that do not add up": (lambda *p: _length(*p, 512), "'a' at byte .*does not have the bytes"),
    "a length that no piece has": (lambda *p: _length(*p, 16), "'a' at byte .*length that none of so many values"),
    "a length beyond any file": (lambda *p: _length(*p, -(1 << 31)), "'a' at byte .*length that none"),
    "another shape": (lambda *p: _original(*p, b'"shape":[64,200]', b'"shape":[64,300]'), "the original.*'a'"),
    "an overlap": (lambda *p: _original(*p, b'[12,25612]', b'[13,25613]'), "the original.*'(a|b)'.*(overlap|begins)"),
    "another dtype": (lambda *p: _original(*p, b'"BF16","shape":[64,200]', b'"I16", "shape":[64,200]'),
                      "'a'.*neither as the original's header has it nor packed"),
    "another name": (lambda *p: _original(*p, b'"a":', b'"q":'), "'q' of the original is missing"),
    "no JSON": (lambda *p: _original(*p, b'{"', b'[]'), "original"),
    "a version to come": (lambda *p: _says(*p, '{"version":2,"bytes":[9]}'), "version 2.*newer Stagehand"),
    "no version": (lambda *p: _says(*p, '{"bytes":[9]}'), "no version"),
    "no sizes": (lambda *p: _says(*p, '{"version":1}'), "which files were packed"),
    "another size": (lambda *p: _says(*p, '{"version":1,"bytes":[99]}'), "the original"),
    "a path outside": (lambda *p: _says(*p, '{"version":1,"bytes":[9],"index":"../x.json","files":["a"]}'),
                       "'../x.json' is no name"),
    "one name twice": (lambda *p: _says(*p, '{"version":1,"bytes":[9,9],"index":"x.json","files":["a","a"]}'),
                       "same name"),
}


def hostile(tmp_path):
    torch.manual_seed(1)
    tensors = {"a": torch.randn(64, 200).bfloat16(), "b": torch.randn(9000).bfloat16(), "c": torch.randn(3)}
    return pack(tmp_path, tensors)[1]


@pytest.mark.parametrize("lie", LIES)
def test_headers_that_lie_are_refused_by_name(tmp_path, lie):
    path = hostile(tmp_path)
    change, says = LIES[lie]
    raw, header, begin = parts(path)
    change(raw, header, begin)
    rewritten(path, raw, header, begin)
    for use in (lambda: _core.QuantFile(path), lambda: _core.verify(path),
                lambda: _core.unpack(path, tmp_path / "x.safetensors"),
                lambda: stagehand.load(lambda: nn.Linear(200, 64), path, vram_budget="1MB", device="sim")):
        with pytest.raises(StagehandError, match=says) as error:
            use()
        assert str(path) in str(error.value)
    assert not list(tmp_path.glob("x.*"))


def test_files_that_are_cut_off_are_refused(tmp_path):
    path = hostile(tmp_path)
    raw = path.read_bytes()
    for size in (4, 40, len(raw) // 2, len(raw) - 1):
        path.write_bytes(raw[:size])
        with pytest.raises(StagehandError, match="truncated|invalid") as error:
            _core.unpack(path, tmp_path / "x.safetensors")
        assert path.name in str(error.value) and not list(tmp_path.glob("x.*"))


def test_packed_bytes_that_are_none(tmp_path):
    """A flipped bit anywhere is found by unpacking and verifying; a table that is none, and starts that lead outside,
    when the model is loaded. Nothing is left behind."""
    path, draw = hostile(tmp_path), random.Random(4)
    whole, header, begin = parts(path)
    span = header["a"]["data_offsets"]
    for _ in range(40):
        raw = bytearray(whole)
        raw[begin + draw.randrange(*span)] ^= 1 << draw.randrange(8)
        path.write_bytes(raw)
        with pytest.raises(CheckpointError, match=f"{path.name}: tensor 'a'"):
            _core.unpack(path, tmp_path / "x.safetensors")
        assert not list(tmp_path.glob("x.*"))
        try:
            assert [one["name"] for one in _core.verify(path) if one["checksum"] != 1] == ["a"]
        except CheckpointError as error:
            assert "'a'" in str(error)
    tiles = -(-64 * 200 // 1024)
    table = begin + span[0] + 1408 * tiles
    for where, says in ((8, "version"), (7, "table"), (16 + 4 * 3 + 2, "begin elsewhere")):
        raw = bytearray(whole)
        raw[table + where] ^= 0x40
        path.write_bytes(raw)
        byte = table + (where // 4 * 4 if where > 15 else where)
        with pytest.raises(CheckpointError, match=f"{path.name}: tensor 'a' at byte {byte}: .*{says}"):
            _core.QuantFile(path).segments("a", "BF16", 0, 0, 1 << 20)


def test_a_file_that_changes_under_the_model_is_an_error(tmp_path):
    plain = stack()
    _, path = pack(tmp_path, contiguous(plain))
    model = stagehand.load(build(), path, vram_budget=budget_of(plain), device="sim")
    x = torch.randn(3, D).bfloat16()
    with torch.no_grad():
        model(x)
        from_outside(path, b"\xff" * 64, path.stat().st_size // 2)
        with pytest.raises(StagehandError, match="changed"):
            for _ in range(3):
                model(x)


def test_calls_that_are_mistakes(tmp_path):
    path = hostile(tmp_path)
    file = _core.QuantFile(path)
    assert file.format() == "stagehand_lossless_v1" and file.plain() == ["c"]
    out = torch.empty(64, 200, dtype=torch.float32)
    with pytest.raises(StagehandError, match="'a' was packed as BF16.*does not come back as F32"):
        file.decode("a", "F32", out.data_ptr())
    with pytest.raises(StagehandError, match="multiple of 512"):
        file.segments("a", "BF16", 0, 16, 1 << 20)
