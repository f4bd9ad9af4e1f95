#!/usr/bin/env python3
"""`stagehand pack`, `verify`, `unpack`: exit codes, what is printed, what Ctrl-C leaves."""

import json
import pathlib
import random
import signal
import struct
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from cli.tool import DATA, FAILED, OK, USAGE, expect, stagehand
from support import tap

folder = pathlib.Path()
STOPPED = 130


def model(rows: int = 64, layers: int = 3) -> pathlib.Path:
    """Random F32 weights of [rows, 256] and a norm."""
    path = folder / "model.safetensors"
    draw, header, data = random.Random(1), {}, b""
    for name, shape in [(f"h.{i}.w.weight", [rows, 256]) for i in range(layers)] + [("norm.weight", [5])]:
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + 4 * count]}
        data += struct.pack("<256f", *(draw.gauss(0, 1) for _ in range(256))) * (count // 256 or 1)
        data = data[: header[name]["data_offsets"][1]]
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def clear() -> None:
    for path in folder.iterdir():
        path.unlink()


def test_there_and_back() -> None:
    for words, packed in ((("--int8",), "p.safetensors"), (("--format", "layer-index"), "p.json")):
        source, out = model(), folder / packed
        done = stagehand("pack", source, out, *words)
        expect(done, OK, str(out))
        assert "packed 100 %" in done.stderr and len(done.stderr.splitlines()) <= 10, done.stderr
        done = stagehand("verify", out, source, "--quiet")
        expect(done, OK, "0 checksums wrong, 0 without one; 0 missing", "h.0.w", "right", "norm.weight")
        assert not done.stderr
        told = json.loads(stagehand("verify", out, source, "--json").stdout)
        assert told["checksums_wrong"] == told["missing"] == told["stored_differ"] == 0
        assert (told["worst_rel_l2"] > 0) == (words[0] == "--int8") and len(told["tensors"]) == 4
        back = folder / "back.safetensors"
        expect(stagehand("unpack", out, back, "--dtype", "f32", "--quiet"), OK)
        expect(stagehand("verify", back, source, "--quiet"), FAILED if words[0] == "--int8" else OK)
        expect(stagehand("pack", source, out, *words), USAGE, "exists already")
        clear()


def test_damage() -> None:
    source, out = model(), folder / "p.safetensors"
    expect(stagehand("pack", source, out, "--int8", "--quiet"), OK)
    raw = bytearray(out.read_bytes())
    raw[-3] ^= 1
    out.write_bytes(raw)
    done = stagehand("verify", out, "--quiet")
    assert done.returncode == FAILED and "WRONG" in done.stdout and "1 checksums wrong" in done.stdout
    out.write_bytes(raw[:-1])
    expect(stagehand("verify", out, "--quiet"), DATA, "truncated", "p.safetensors")
    clear()


def test_ctrl_c_and_on() -> None:
    source, out = model(4096, 24), folder / "p.safetensors"
    command = [sys.argv[1], "pack", source, out, "--int8", "--threads", "1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr.readline() == "packed 10 %\n"
    process.send_signal(signal.SIGINT)
    rest = process.stderr.read()
    assert process.wait() == STOPPED, rest
    assert "goes on" in rest and not out.exists() and (folder / "p.safetensors.partial").is_dir()
    begin = time.monotonic()
    expect(stagehand("pack", source, out, "--int8"), OK)
    assert time.monotonic() > begin and not (folder / "p.safetensors.partial").exists()
    expect(stagehand("verify", out, "--quiet"), OK, "0 checksums wrong, 0 without one")
    clear()


def test_mistakes() -> None:
    source = model()
    expect(stagehand("pack", source), USAGE, "IN OUT")
    expect(stagehand("pack", source, folder / "x.safetensors"), USAGE, "--format")
    expect(stagehand("pack", source, folder / "x.safetensors", "--int8", "--int4"), USAGE, "one of")
    expect(stagehand("pack", source, folder / "x.safetensors", "--format", "v9"), USAGE, "v9", "layer-index")
    expect(stagehand("pack", source, folder / "x.bin", "--int8"), USAGE, ".safetensors")
    expect(stagehand("pack", source, folder / "x.safetensors", "--int8", "--skip", "("), USAGE, "regular")
    expect(stagehand("pack", folder / "absent", folder / "x.safetensors", "--int8"), DATA, "absent")
    expect(stagehand("unpack", source, folder / "x.safetensors", "--dtype", "i8"), USAGE, "i8")
    expect(stagehand("verify", folder / "absent.fpk"), DATA, "absent.fpk")
    assert [p.name for p in folder.iterdir()] == ["model.safetensors"]
    clear()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        folder = pathlib.Path(made)
        cases = [(name[5:], case) for name, case in list(globals().items()) if name.startswith("test_")]
        sys.exit(tap.run(cases))
