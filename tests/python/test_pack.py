"""pack, verify, unpack: what is written is what the formats say, comes back, goes on after a stop, and never half."""

import json
import os
import pathlib
import resource
import subprocess
import sys

import numpy as np
import pytest
import quant_files as qf
import safetensors
import torch

from stagehand import _core
from stagehand.errors import StagehandError


def write_model(path, change=None):
    """Weights of all float dtypes, blocks 2 and 10, things that are not quantised; {name: float32 or bits}."""
    rng = np.random.default_rng(3)
    floats = {}
    for block in (10, 2):
        floats[f"blocks.{block}.up.weight"] = ("BF16", rng.standard_normal((48, 100)))
        floats[f"blocks.{block}.up.bias"] = ("BF16", rng.standard_normal(48))
        floats[f"blocks.{block}.down.weight"] = ("F16", rng.standard_normal((100, 48)))
        floats[f"blocks.{block}.norm.weight"] = ("F32", rng.standard_normal(100))
    floats["out.weight"] = ("F32", rng.standard_normal((3, 7)))
    floats["embed.weight"] = ("BF16", rng.standard_normal((20, 8)))
    if change:
        change(floats)
    tensors, values = {}, {}
    for name, (dtype, array) in floats.items():
        array = np.asarray(array, np.float32)
        bits = {"BF16": qf.to_bf16, "F16": lambda x: x.astype(np.float16), "F32": lambda x: x}[dtype](array)
        tensors[name] = qf.tensor(dtype, bits)
        values[name] = qf.from_bf16(bits) if dtype == "BF16" else bits.astype(np.float32)
    tensors["steps"] = qf.tensor("I64", [5])
    tensors["mask"] = ("U8", [3], b"abc")
    tensors["empty"] = qf.tensor("F32", np.zeros((0, 4)))
    qf.write_safetensors(path, tensors)
    return tensors, values


def read_all(path):
    """{name: (dtype, shape, bytes)} by an independent reader."""
    with open(path, "rb") as f:
        length = int.from_bytes(f.read(8), "little")
        header = json.loads(f.read(length))
        data = f.read()
    header.pop("__metadata__", None)
    ends = sorted(tuple(t["data_offsets"]) for t in header.values())
    assert [b for b, _ in ends] == [0, *(e for _, e in ends[:-1])] and ends[-1][1] == len(data), "gaps"
    return {n: (t["dtype"], t["shape"], data[slice(*t["data_offsets"])]) for n, t in header.items()}


def pack(folder, format="v2", name="packed.safetensors", **options):
    _core.pack(folder / "model.safetensors", folder / name, format, **options)
    return folder / name


QUANTISED = ["blocks.2.down", "blocks.2.up", "blocks.10.down", "blocks.10.up", "out"]


def test_v2_is_what_the_format_says(tmp_path):
    tensors, values = write_model(tmp_path / "model.safetensors")
    path = pack(tmp_path)
    got = read_all(path)
    manifest = json.loads((tmp_path / "packed.manifest.json").read_text())
    assert [entry["canonical_name"] for entry in manifest["layers"]] == sorted(QUANTISED)
    for base in QUANTISED:
        q, s = qf.quantise_int8(values[base + ".weight"])
        assert got.pop(base + ".qweight") == ("I8", list(q.shape), q.tobytes())
        assert got.pop(base + ".scale") == ("F32", [len(s)], s.tobytes())
        assert got.pop(base + ".zero_point") == ("F32", [len(s)], bytes(4 * len(s)))
        if base.endswith("up"):
            bias = values[base + ".bias"]
            assert got.pop(base + ".bias") == ("F32", [len(bias)], bias.tobytes())
    plain = {n: t for n, t in tensors.items() if n.rpartition(".")[0] not in QUANTISED}
    assert got == {n: (d, list(s), b) for n, (d, s, b) in plain.items()}
    assert sorted(os.listdir(tmp_path)) == ["model.safetensors", "packed.manifest.json", "packed.safetensors"]
    with safetensors.safe_open(path, "pt") as f:  # a reader that refuses gaps and bad headers
        assert f.get_tensor("blocks.2.up.qweight").dtype == torch.int8


def test_the_signature_of_a_manifest(tmp_path):
    import hashlib
    write_model(tmp_path / "model.safetensors")
    pack(tmp_path)
    lines = sorted([f"blocks.{b}.up:100:48:True" for b in (2, 10)] + [f"blocks.{b}.down:48:100:False" for b in (2, 10)]
                   + ["out:7:3:False", "embed:8:20:False"])
    manifest = json.loads((tmp_path / "packed.manifest.json").read_text())
    assert manifest["model_signature"] == hashlib.sha256("|".join(lines).encode()).hexdigest()[:16]


@pytest.mark.parametrize("threads", [1, 3])
def test_v2_round_trip(tmp_path, threads):
    tensors, values = write_model(tmp_path / "model.safetensors")
    path = pack(tmp_path, threads=threads)
    found = {t["name"]: t for t in _core.verify(path, tmp_path / "model.safetensors", threads)}
    assert all(t["checksum"] == 1 and t["compared"] and not t["missing"] for t in found.values()), found
    _core.unpack(path, tmp_path / "back.safetensors", "F32", threads)
    back = read_all(tmp_path / "back.safetensors")
    assert back.keys() == tensors.keys()
    for name, weight in values.items():
        layer = name.rpartition(".")[0]
        if layer in QUANTISED and name.endswith(".weight"):
            q, s = qf.quantise_int8(weight)
            wanted = qf.decode_int8(q, s, np.zeros_like(s), weight.shape[1])
            assert back[name] == ("F32", list(weight.shape), wanted.tobytes())
            error = wanted.astype(np.float64) - weight
            assert found[layer]["max_abs"] == np.abs(error).max()
            assert np.isclose(found[layer]["rel_l2"], np.linalg.norm(error) / np.linalg.norm(weight), rtol=1e-12)
            assert 0.999 < found[layer]["cosine"] < 1 and not found[layer]["equal"]
        elif name.endswith("up.bias"):
            assert back[name] == ("F32", list(weight.shape), weight.tobytes()) and found[name]["equal"]
        else:
            assert back[name] == tuple(tensors[name]) and found[name]["equal"]


def test_unpacked_biases_have_the_dtype_of_weights(tmp_path):
    tensors, _ = write_model(tmp_path / "model.safetensors")
    _core.unpack(pack(tmp_path), tmp_path / "back.safetensors")
    back = read_all(tmp_path / "back.safetensors")
    assert back["blocks.2.up.bias"] == tuple(tensors["blocks.2.up.bias"])
    assert back["blocks.2.up.weight"][0] == "BF16"


def test_skip_leaves_tensors_as_they_are(tmp_path):
    tensors, _ = write_model(tmp_path / "model.safetensors")
    got = read_all(pack(tmp_path, skip=r"^blocks\.2\.|out"))
    assert got["blocks.2.up.weight"] == tuple(tensors["blocks.2.up.weight"]) and "out.weight" in got
    assert got["blocks.2.up.bias"] == tuple(tensors["blocks.2.up.bias"])
    assert "blocks.10.up.qweight" in got
    with pytest.raises(ValueError, match=r"\[.*regular expression"):
        pack(tmp_path, name="other.safetensors", skip="[")


def test_layer_index_round_trip(tmp_path):
    tensors, _ = write_model(tmp_path / "model.safetensors")
    path = pack(tmp_path, "layer-index", "packed.json")
    entries = json.loads(path.read_text())["layers"]
    data = (tmp_path / "packed.bin").read_bytes()
    assert [e["name"] for e in entries if "up.weight" in e["name"]] == ["blocks.2.up.weight", "blocks.10.up.weight"]
    for e in entries:
        assert e["offset"] % 4096 == 0 and e["path"] == "packed.bin"
        assert (e["dtype"], e["shape"], data[e["offset"] : e["offset"] + e["nbytes"]]) == tuple(tensors[e["name"]])
    ids = [e["layer_id"] for e in entries]
    modules = {(e["name"].rpartition(".")[0], e["layer_id"]) for e in entries if "." in e["name"]}
    assert ids == sorted(ids) and len(modules) == len(dict(modules)) == len({number for _, number in modules})
    for t in _core.verify(path, tmp_path / "model.safetensors"):
        assert t["checksum"] == 1 and t["equal"], t
    _core.unpack(path, tmp_path / "back.safetensors")
    assert read_all(tmp_path / "back.safetensors") == {n: tuple(t) for n, t in tensors.items()}


def test_damage_is_seen(tmp_path):
    write_model(tmp_path / "model.safetensors")
    for path, data, name in ((pack(tmp_path), "packed.safetensors", "blocks.2.up.qweight"),
                             (pack(tmp_path, "layer-index", "packed.json"), "packed.bin", "blocks.2.up.weight")):
        record = next(t for t in _core.Checkpoint(path).tensors() if t[0] == name)
        raw = bytearray((tmp_path / data).read_bytes())
        raw[record[4] + 5] ^= 1
        (tmp_path / data).write_bytes(raw)
        wrong = [t["name"] for t in _core.verify(path) if t["checksum"] == 0]
        assert wrong == [name.replace(".qweight", "")]


def test_v1_checksums(tmp_path):
    layers = qf.v1_layers(np.random.default_rng(1), {"a": (4, 64, True), "b": (4, 64, False)})
    path = tmp_path / "x.fpk"
    qf.write_zip(path, qf.v1_members(qf.v1_object(layers)))
    assert [t["checksum"] for t in _core.verify(path)] == [1, 1, 1]
    raw = bytearray(path.read_bytes())
    raw[raw.index(layers["b"][0]["qweight"].tobytes())] ^= 1
    path.write_bytes(raw)
    assert [(t["name"], t["checksum"]) for t in _core.verify(path)] == [("a", 1), ("a.bias", 1), ("b", 0)]


def test_differences_from_an_original(tmp_path):
    write_model(tmp_path / "model.safetensors")
    path = pack(tmp_path)

    def other(floats):
        floats["blocks.2.norm.weight"][1][5] += 1
        floats["blocks.2.up.bias"] = ("BF16", np.zeros(48))
        floats["new.weight"] = ("F32", np.ones((2, 2)))
        floats["blocks.10.up.weight"] = ("BF16", np.ones((48, 99)))
        del floats["out.weight"]

    write_model(tmp_path / "other.safetensors", other)
    found = {t["name"]: t for t in _core.verify(path, tmp_path / "other.safetensors")}
    assert not found["blocks.2.norm.weight"]["equal"] and np.isclose(found["blocks.2.norm.weight"]["max_abs"], 1)
    assert found["blocks.2.up.bias"]["compared"] and not found["blocks.2.up.bias"]["equal"]
    assert found["new.weight"]["missing"] and found["out"]["missing"] and found["blocks.10.up"]["missing"]
    assert found["embed.weight"]["equal"] and found["steps"]["equal"]


def stop_after(items):
    seen = []

    def progress(tensor, done, total):
        seen.append(tensor)
        return len(seen) < items
    return progress


def files_below(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


@pytest.mark.parametrize("format,name", [("v2", "p.safetensors"), ("layer-index", "p.json")])
def test_a_stopped_call_goes_on(tmp_path, format, name):
    write_model(tmp_path / "model.safetensors")
    (tmp_path / "whole").mkdir()
    _core.pack(tmp_path / "model.safetensors", tmp_path / "whole" / name, format)
    for items in (1, 3, 7):
        with pytest.raises(StagehandError, match="goes on"):
            pack(tmp_path, format, name, progress=stop_after(items))
        assert not (tmp_path / name).exists()
    seen = []
    pack(tmp_path, format, name, progress=lambda *told: seen.append(told) or True)
    assert seen[-1][1] == seen[-1][2] and len(seen) < 12, "what was made is not made again"
    for file in files_below(tmp_path / "whole"):
        assert (tmp_path / file).read_bytes() == (tmp_path / "whole" / file).read_bytes(), file
    assert not (tmp_path / (name + ".partial")).exists()


def test_another_source_starts_anew(tmp_path):
    write_model(tmp_path / "model.safetensors")
    with pytest.raises(StagehandError):
        pack(tmp_path, progress=stop_after(7))
    _, values = write_model(tmp_path / "model.safetensors",
                            lambda f: f.update({"blocks.2.up.weight": ("F32", np.ones((48, 100)))}))
    got = read_all(pack(tmp_path))
    assert got["blocks.2.up.qweight"][2] == qf.quantise_int8(values["blocks.2.up.weight"])[0].tobytes()


def test_a_killed_process_goes_on(tmp_path):
    write_model(tmp_path / "model.safetensors")
    code = ("import os, sys; from stagehand import _core\n"
            "n = [0]\n"
            "def progress(*told):\n"
            "    n[0] += 1\n"
            "    if n[0] == 6: os.kill(os.getpid(), 9)\n"
            "    return True\n"
            "_core.pack(sys.argv[1], sys.argv[2], 'v2', progress=progress)\n")
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "model.safetensors", tmp_path / "p.safetensors"])
    assert done.returncode == -9 and (tmp_path / "p.safetensors.partial").is_dir()
    assert not (tmp_path / "p.safetensors").exists() and not (tmp_path / "p.manifest.json").exists()
    path = pack(tmp_path, name="p.safetensors")
    assert all(t["checksum"] == 1 for t in _core.verify(path))
    assert not (tmp_path / "p.safetensors.partial").exists()


def test_nothing_is_overwritten(tmp_path):
    write_model(tmp_path / "model.safetensors")
    pack(tmp_path)
    before = (tmp_path / "packed.safetensors").stat().st_mtime_ns
    with pytest.raises(ValueError, match="exists already"):
        pack(tmp_path)
    assert (tmp_path / "packed.safetensors").stat().st_mtime_ns == before
    (tmp_path / "q.manifest.json").write_text("mine")
    with pytest.raises(ValueError, match="q.manifest.json.*exists already"):
        pack(tmp_path, name="q.safetensors")
    assert (tmp_path / "q.manifest.json").read_text() == "mine"
    assert not (tmp_path / "q.safetensors.partial").exists()


def test_links_are_not_followed(tmp_path):
    write_model(tmp_path / "model.safetensors")
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "a.safetensors").symlink_to(victim)
    with pytest.raises(ValueError, match="exists already"):
        pack(tmp_path, name="a.safetensors")
    (tmp_path / "b.safetensors").symlink_to(tmp_path / "absent")
    with pytest.raises(ValueError, match="exists already"):
        pack(tmp_path, name="b.safetensors")
    (tmp_path / "other").mkdir()
    (tmp_path / "c.safetensors.partial").symlink_to(tmp_path / "other")
    with pytest.raises(StagehandError, match="link"):
        pack(tmp_path, name="c.safetensors")
    partial = tmp_path / "d.safetensors.partial"
    partial.mkdir()
    (partial / "d.safetensors").symlink_to(victim)
    with pytest.raises(StagehandError, match="d.safetensors"):
        pack(tmp_path, name="d.safetensors")
    (partial / "d.safetensors").unlink(missing_ok=True)
    partial.mkdir(exist_ok=True)
    os.link(victim, partial / "d.safetensors")
    with pytest.raises(StagehandError, match="file of its own"):
        pack(tmp_path, name="d.safetensors")
    assert victim.read_text() == "mine" and os.listdir(tmp_path / "other") == []
    partial = tmp_path / "e.safetensors.partial"
    partial.mkdir()
    (partial / "letter.txt").write_text("mine")
    with pytest.raises(ValueError, match="letter.txt"):
        pack(tmp_path, name="e.safetensors")
    assert (partial / "letter.txt").read_text() == "mine"


def test_a_full_disk_leaves_nothing(tmp_path):
    write_model(tmp_path / "model.safetensors")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(StagehandError, match="more than this process may write"):
            pack(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_values_that_cannot_be_quantised(tmp_path):
    for bad in (np.nan, np.inf):
        def change(floats):
            floats["blocks.2.up.weight"][1][47, 99] = bad
        write_model(tmp_path / "model.safetensors", change)
        with pytest.raises(StagehandError, match=r"model.safetensors.*blocks.2.up.weight.*byte \d+.*skip"):
            pack(tmp_path)
        assert os.listdir(tmp_path) == ["model.safetensors"]
    path = pack(tmp_path, skip="blocks.2.up")
    assert read_all(path)["blocks.2.up.weight"][0] == "BF16"


def test_names_that_clash(tmp_path):
    write_model(tmp_path / "model.safetensors", lambda f: f.update({"out.scale": ("F32", np.ones(3))}))
    with pytest.raises(StagehandError, match="out.scale.*skip"):
        pack(tmp_path)
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_names_of_results(tmp_path):
    write_model(tmp_path / "model.safetensors")
    for format, name, end in (("v2", "x.bin", ".safetensors"), ("layer-index", "x.safetensors", ".json"),
                              ("v2", ".safetensors", ".safetensors")):
        with pytest.raises(ValueError, match=end):
            pack(tmp_path, format, name)
    with pytest.raises(ValueError, match="formats"):
        pack(tmp_path, "v9")
    with pytest.raises(FileNotFoundError):
        pack(tmp_path / "absent")
    with pytest.raises(FileNotFoundError):
        _core.pack(tmp_path / "model.safetensors", tmp_path / "absent" / "x.safetensors", "v2")
    with pytest.raises(ValueError, match="I8"):
        _core.unpack(tmp_path / "model.safetensors", tmp_path / "y.safetensors", "I8")
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_exceptions_of_the_progress_function(tmp_path):
    write_model(tmp_path / "model.safetensors")
    with pytest.raises(ZeroDivisionError):
        pack(tmp_path, progress=lambda *told: 1 / 0)
    pack(tmp_path)


def test_memory_stays_small(tmp_path):
    """A weight of 64 MiB is packed, verified and unpacked with far less than that in memory."""
    rng = np.random.default_rng(0)
    big = rng.standard_normal((1, 4096)).astype(np.float16).repeat(8192, 0)
    qf.write_safetensors(tmp_path / "model.safetensors", {"big.weight": qf.tensor("F16", big)})
    code = ("import resource, sys, pathlib; from stagehand import _core\n"
            "f = pathlib.Path(sys.argv[1])\n"
            "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
            "_core.pack(f / 'model.safetensors', f / 'p.safetensors', 'v2', threads=2)\n"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n")
    done = subprocess.run([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True, check=True)
    assert int(done.stdout) < 40_000, done.stdout
    q = np.frombuffer(read_all(tmp_path / "p.safetensors")["big.qweight"][2], np.int8).reshape(8192, 4096)
    assert np.array_equal(q, qf.quantise_int8(big[:1].astype(np.float32))[0].repeat(8192, 0))


def test_two_at_once_on_one_result(tmp_path):
    write_model(tmp_path / "model.safetensors")
    refusals = []

    def progress(*told):
        if not refusals:
            with pytest.raises(StagehandError, match="another process") as caught:
                pack(tmp_path)
            refusals.append(caught.value)
        return True
    pack(tmp_path, progress=progress)
    assert refusals and pathlib.Path(tmp_path / "packed.safetensors").exists()
