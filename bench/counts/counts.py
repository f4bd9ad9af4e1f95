#!/usr/bin/env python3
"""Counts that do not depend on the machine: instructions of the library's own code, and its memory.

    counts.py check PROGRAM    the test: what `make test` compares with counts.json; with STH_TEST_FULL=1 also what
                               takes long
    counts.py all PROGRAM      prints every count beside the one kept, and the planner's time on this machine
                               (make bench-cpu)
    counts.py update PROGRAM   writes counts.json anew

callgrind runs PROGRAM (work.c) and says how many instructions each source line took. Counted are those in src/, but for
src/device/: not the C library's, whose memcpy is another one on another processor, nor the driver's. "all" counts
are everything, where a library that we call does much of the work. A count may grow by TOLERANCE; one that has become
smaller by more fails too, so that what was won is kept: run `update` and commit counts.json with the reason.
Another compiler gives other counts: they are compared with those kept only where it is of the same name and major
version.
"""

import functools
import json
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from support import tap

KEPT = pathlib.Path(__file__).with_name("counts.json")
TOLERANCE = 0.03
TOLERANCE_ALL = 0.25  # jansson's and libc's versions differ
OWN = re.compile(r"(?:^|/)(?:src/(?!device/)(?:[a-z]+/)+\w+\.[ch]|include/stagehand/\w+\.h)$")
NAMED = re.compile(r"^c?(fn|fl|fi|fe)=\((\d+)\)(?: (.*))?$")
COST = re.compile(r"^[+\-*\d]\S* (\d+)")
HEADER_TENSORS = 20000

# name -> (work and its argument, what it is counted for, whether the test runs it)
WORKS = {
    "acquire and release, on the device": ("resident 64", "use", True),
    "acquire and release, streamed": ("streamed 64", "use", True),
    "plan of 100 units": ("plan 100", "unit", True),
    "plan of 1,000 units": ("plan 1000", "unit", False),
    "plan of 10,000 units": ("plan 10000", "unit", False),
    "plan of 100,000 units": ("plan 100000", "unit", False),
    "plan of 100 units, training": ("plan-training 100", "unit", False),
    "plan of 10,000 units, training": ("plan-training 10000", "unit", False),
    f"header of {HEADER_TENSORS:,} tensors": ("header", "tensor", True),
}


def write_header(folder: pathlib.Path) -> pathlib.Path:
    entries = {}
    for i in range(HEADER_TENSORS):
        entries[f"model.layers.{i // 8}.part{i % 8}.weight"] = {
            "dtype": "BF16", "shape": [4, 4], "data_offsets": [32 * i, 32 * i + 32]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(32 * HEADER_TENSORS))
    os.utime(path, (1000000000, 1000000000))  # the reader waits a moment for a file written just now
    return path


def read_callgrind(text: str) -> tuple[int, int]:
    """Instructions in our own source files, and in all."""
    files, own, total, here, of_call = {}, 0, 0, "", False
    for line in text.splitlines():
        if named := NAMED.match(line):
            if named[1] == "fn":
                continue
            if named[3]:
                files[named[2]] = named[3]
            if not line.startswith("c"):
                here = files[named[2]]
        elif line.startswith("calls="):
            of_call = True  # the next line is what the called function took, which is counted where it stands
        elif cost := COST.match(line):
            if not of_call:
                total += int(cost[1])
                own += int(cost[1]) if OWN.search(here) else 0
            of_call = False
    return own, total


def count(program: str, what: str) -> tuple[float, float]:
    """Instructions for each use, unit or tensor: our own, and all."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "out"
        words = what.split() if " " in what else [what, str(write_header(pathlib.Path(folder)))]
        done = subprocess.run(
            ["valgrind", "--tool=callgrind", "--collect-atstart=no", "--toggle-collect=measured",
             f"--callgrind-out-file={out}", program, *words], capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr
        own, total = read_callgrind(out.read_text())
        assert total >= own > 0, "nothing was counted"
        times = int(done.stdout)
        return own / times, total / times


def memory(program: str) -> tuple[float, float, int]:
    """Heap bytes and blocks that each further unit takes, where fixed parts cancel out; bytes of a runtime of 8
    units."""
    small, few, many = [[int(n) for n in subprocess.run([program, "memory", str(n)], check=True, capture_output=True,
                                                        text=True).stdout.split()] for n in (8, 4096, 8192)]
    return *((b - a) / (many[0] - few[0]) for a, b in zip(few[1:], many[1:])), small[1]


def compiler(program: str) -> str:
    """Such as "GCC 12", from the program itself."""
    said = subprocess.run(["readelf", "-p", ".comment", program], check=True, capture_output=True, text=True).stdout
    found = re.search(r"(clang).*?(\d+)\.\d+", said) or re.search(r"(GCC).*?(\d+)\.\d+", said)
    return f"{found[1]} {found[2]}" if found else "unknown"


def measure(program: str, everything: bool) -> dict[str, float]:
    counts = {}
    for name, (what, each, tested) in WORKS.items():
        if tested or everything:
            own, total = count(program, what)
            counts[f"{name}: instructions for each {each}"] = round(own, 1)
            if what == "header":
                counts[f"{name}: all instructions for each {each}"] = round(total, 1)
    size, blocks, small = memory(program)
    counts["memory of a runtime: bytes of one with 8 units"] = small
    counts["memory of a runtime: bytes for each unit"] = round(size, 1)
    counts["memory of a runtime: blocks for each unit"] = round(blocks, 2)
    return counts


def need_tools(program: str) -> None:
    binary = pathlib.Path(program).read_bytes()
    if b"__asan_init" in binary or b"__tsan_init" in binary:
        raise tap.Skip("built with a sanitizer, whose instructions are not the library's")
    if not shutil.which("valgrind"):
        raise tap.Skip("valgrind is not installed: nothing counts instructions")


def kept_for(program: str) -> dict[str, float]:
    kept = json.loads(KEPT.read_text())
    if kept["compiler"] != compiler(program):
        raise tap.Skip(f"counts.json is for {kept['compiler']}, and this was built by {compiler(program)}")
    return kept["counts"]


EVERYTHING = bool(os.environ.get("STH_TEST_FULL"))


@functools.lru_cache
def tested(program: str) -> dict[str, float]:
    return measure(program, EVERYTHING)


def hold(program: str, name: str) -> None:
    need_tools(program)
    wanted, now = kept_for(program)[name], tested(program)[name]
    tolerance = TOLERANCE_ALL if ": all " in name else TOLERANCE
    print(f"# {name}: {now} (kept: {wanted})")
    how = f"{now}, and {wanted} is kept; if that is as it should be: bench/counts/counts.py update {program}"
    assert now <= wanted * (1 + tolerance), f"has grown: {how}"
    assert now >= wanted * (1 - tolerance), f"has become smaller, which is to be kept: {how}"


def check(program: str) -> int:
    names = [name for name in json.loads(KEPT.read_text())["counts"]
             if EVERYTHING or name.startswith("memory") or WORKS[name.split(":")[0]][2]]
    return tap.run([(name, functools.partial(hold, program, name)) for name in names])


def show(program: str) -> int:
    kept = json.loads(KEPT.read_text())
    print(f"built by {compiler(program)}; kept for {kept['compiler']}\n         now         kept")
    for name, value in measure(program, True).items():
        print(f"{value:12,.1f} {kept['counts'].get(name, 0):12,.1f}  {name}")
    for name, (what, _, _) in WORKS.items():
        if what.startswith("plan"):
            start = time.monotonic()
            subprocess.run([program, *what.split()], check=True, stdout=subprocess.DEVNULL)
            print(f"{time.monotonic() - start:12.2f} {'':12}  {name}: seconds on this machine")
    return 0


def update(program: str) -> int:
    KEPT.write_text(json.dumps({"compiler": compiler(program), "counts": measure(program, True)}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit({"check": check, "all": show, "update": update}[sys.argv[1]](sys.argv[2]))
