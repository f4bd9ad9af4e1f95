#!/usr/bin/env python3
"""Every call of a conductor that is switched off takes fewer than 20 instructions and calls nothing.

    count_disabled.py PROGRAM

callgrind counts the instructions of each function in PROGRAM, which calls each a known number of times."""

import functools
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from support import tap

program = pathlib.Path(sys.argv[1])
MOST = 20
FUNCTION = re.compile(r"^fn=\((\d+)\)(?: (.*))?$")
COST = re.compile(r"^[+\-*\d]\S* (\d+)")


def counted() -> tuple[dict, dict, set]:
    """Function -> times it was called; function -> instructions of its own; functions that call others."""
    if shutil.which("valgrind") is None:
        raise tap.Skip("valgrind is not installed: nothing counts instructions")
    if b"__asan_init" in program.read_bytes() or b"__tsan_init" in program.read_bytes():
        raise tap.Skip("built with a sanitizer, whose instructions are not the library's")
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "out"
        done = subprocess.run(["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}", program],
                              capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        times = {name: int(n) for name, n in (line.split() for line in done.stdout.splitlines())}
        names, costs, callers, here, of_call = {}, {}, set(), None, False
        for line in out.read_text().splitlines():
            found = FUNCTION.match(line)
            if found:
                if found[2]:
                    names[found[1]] = found[2]
                here = names[found[1]]
            elif line.startswith("calls="):
                callers.add(here)
                of_call = True
            elif here and (cost := COST.match(line)):
                if not of_call:
                    costs[here] = costs.get(here, 0) + int(cost[1])
                of_call = False
            elif found := re.match(r"^cfn=\((\d+)\) (.*)$", line):
                names[found[1]] = found[2]
    return times, costs, callers


@functools.lru_cache
def once():
    return counted()


def is_cheap(name: str) -> None:
    times, costs, callers = once()
    assert times[name] and costs[name], "it was not called"
    each = costs[name] / times[name]
    print(f"# {name}: {each:.1f} instructions")
    assert each < MOST, f"{each:.1f} instructions a call"
    assert name not in callers, "it calls something"


def main() -> int:
    source = pathlib.Path(__file__).with_name("disabled.c").read_text()
    names = re.findall(r"EACH\((sth_\w+),", source)
    assert len(names) > 15
    return tap.run([(f"{name} of no conductor costs next to nothing", functools.partial(is_cheap, name))
                    for name in names])


sys.exit(main())
