"""Runs the tool, and writes model files for it."""

import json
import pathlib
import struct
import subprocess
import sys

OK, FAILED, USAGE, DATA, DEVICE = range(5)

WIDTH = {"BOOL": 1, "U8": 1, "I8": 1, "F16": 2, "BF16": 2, "F32": 4, "I64": 8, "F64": 8}


def stagehand(*words: object, stdout=subprocess.PIPE) -> subprocess.CompletedProcess:
    """Runs the tool named on the command line of this test."""
    command = [sys.argv[1], *map(str, words)]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=300)


def expect(done: subprocess.CompletedProcess, code: int, *parts: str) -> None:
    """The exit code, and parts of what was printed: on stdout where the code is 0, else on stderr."""
    text = done.stdout if code == OK else done.stderr
    assert done.returncode == code, f"exit {done.returncode}, expected {code}: {done.stdout}{done.stderr}"
    for part in parts:
        assert part in text, f"{part!r} is not in: {text}"


def write_safetensors(path: pathlib.Path, tensors: dict[str, tuple[str, list[int]]], gap: int = 0) -> None:
    """Zeros for each name -> (dtype, shape), with `gap` bytes behind each tensor."""
    header, at = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = WIDTH[dtype]
        for extent in shape:
            size *= extent
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size + gap
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(at))
