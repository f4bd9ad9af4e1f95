#!/usr/bin/env python3
"""`stagehand inspect`: sound files are listed in full, unsound ones refused by name."""

import json
import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from cli.tool import DATA, OK, USAGE, expect, stagehand, write_safetensors
from support import tap

folder = pathlib.Path()
MODEL = {
    "h.10.attn.weight": ("BF16", [4, 4]),
    "h.2.attn.weight": ("BF16", [4, 4]),
    "h.2.attn.bias": ("F32", [4]),
    "scale": ("F32", []),
}


def model() -> pathlib.Path:
    path = folder / "model.safetensors"
    write_safetensors(path, MODEL)
    return path


def test_listing() -> None:
    done = stagehand("inspect", model())
    expect(done, OK, "h.2.attn  2 tensors, 48 B", "weight  [4, 4]", "bias  [4]", "scale  []", str(model()),
           "4 tensors in 3 units and 1 files", "(84 bytes)")
    assert done.stdout.index("h.2.attn") < done.stdout.index("h.10.attn")
    assert "holes" not in done.stdout and "read: " in done.stdout


def test_totals() -> None:
    done = stagehand("inspect", model(), "--totals")
    expect(done, OK, "BF16     2 tensors, 64 B", "F32      2 tensors, 20 B", "(84 bytes)")
    assert "h.2.attn" not in done.stdout


def test_json() -> None:
    done = stagehand("inspect", "--json", model())
    expect(done, OK)
    told = json.loads(done.stdout)
    found = {
        tensor["name"]: (tensor["dtype"], tensor["shape"])
        for unit in told["units"]
        for tensor in unit["tensors"]
    }
    assert found == MODEL, found
    assert [unit["name"] for unit in told["units"]] == ["", "h.2.attn", "h.10.attn"], told["units"]
    file, = told["files"]
    assert file.pop("way") in ("io_uring", "direct", "page cache", "buffered") and file.pop("why")
    assert file == {"path": str(model()), "hole_bytes": 0}
    assert told["totals"] == {
        "tensors": 4,
        "units": 3,
        "bytes": 84,
        "hole_bytes": 0,
        "bytes_by_dtype": {"BF16": 64, "F32": 20},
    }
    header = int.from_bytes(model().read_bytes()[:8], "little") + 8
    first = told["units"][2]["tensors"][0]
    assert (first["file"], first["offset"], first["bytes"], first["scale"]) == (0, header, 32, 1), first
    expect(stagehand("inspect", "--json", "--totals", model()), USAGE, "--totals")


def test_holes() -> None:
    """A layer index may leave bytes out; a safetensors file may not."""
    path = folder / "index.json"
    (folder / "raw.bin").write_bytes(bytes(20))
    path.write_text(json.dumps([{"name": f"m.{i}", "path": "raw.bin", "offset": 8 * i, "nbytes": 4} for i in (0, 1)]))
    expect(stagehand("inspect", path), OK, "holes: 12 bytes")
    assert json.loads(stagehand("inspect", path, "--json").stdout)["totals"]["hole_bytes"] == 12
    write_safetensors(folder / "gap.safetensors", MODEL, gap=3)
    expect(stagehand("inspect", folder / "gap.safetensors"), DATA, "gap.safetensors", "begins at byte")


def test_a_dtype_that_is_not_known() -> None:
    """It is listed; the rest of the file is as it is."""
    path = folder / "other.safetensors"
    text = json.dumps({"m.a": {"dtype": "Q9_K", "shape": [3], "data_offsets": [0, 5]},
                       "m.b": {"dtype": "U8", "shape": [2], "data_offsets": [5, 7]}}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(7))
    expect(stagehand("inspect", path), OK, "dtype Q9_K", "other    1 tensors, 5 B", "U8       1 tensors")
    told = json.loads(stagehand("inspect", path, "--json").stdout)
    assert [t["dtype"] for t in told["units"][0]["tensors"]] == ["Q9_K", "U8"], told
    assert told["totals"]["bytes_by_dtype"] == {"U8": 2, "other": 5}


def test_shards() -> None:
    shards = folder / "shards"
    shards.mkdir()
    write_safetensors(shards / "a.safetensors", {"m.x": ("U8", [3])})
    write_safetensors(shards / "b.safetensors", {"m.y": ("U8", [5])})
    (shards / "stray.safetensors").write_text("not opened")
    index = {"weight_map": {"m.x": "a.safetensors", "m.y": "b.safetensors"}}
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    expect(stagehand("inspect", shards), OK, "m  2 tensors, 8 B", "a.safetensors", "b.safetensors", "2 files")
    (shards / "b.safetensors").unlink()
    expect(stagehand("inspect", shards), DATA, "b.safetensors", "NOT_FOUND")


def test_unsound_files() -> None:
    expect(stagehand("inspect", folder / "absent.safetensors"), DATA, "absent.safetensors", "NOT_FOUND")
    cut = folder / "cut.safetensors"
    cut.write_bytes(model().read_bytes()[:-1])
    done = stagehand("inspect", cut, "--json")
    expect(done, DATA, "cut.safetensors", "'scale'", "4 bytes wanted", "3 found", "CORRUPT_DATA")
    assert done.stdout == ""


def test_names_cannot_steer_the_terminal() -> None:
    path = folder / "escape.safetensors"
    write_safetensors(path, {"red\x1b[31m.\x9b2Jdel\x7f": ("U8", [1])})
    done = stagehand("inspect", path)
    expect(done, OK, "red")
    assert not set("\x1b\x7f\x9b") & set(done.stdout), repr(done.stdout)


def test_empty_file() -> None:
    path = folder / "empty.safetensors"
    write_safetensors(path, {})
    expect(stagehand("inspect", path), OK, "0 tensors in 0 units")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        folder = pathlib.Path(made)
        cases = [(name[5:], case) for name, case in list(globals().items()) if name.startswith("test_")]
        sys.exit(tap.run(cases))
