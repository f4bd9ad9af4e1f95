#!/usr/bin/env python3
"""A program of `one_thread` (tests/meson.build) that starts a thread fails, and says so.

    test_one_thread.py FREE ONE_THREAD      the same program without and with support/one_thread.c
"""

import pathlib
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from support import tap


def run(program: str) -> tuple[int, str]:
    done = subprocess.run([program], capture_output=True, text=True, timeout=300)
    return done.returncode, done.stderr


def starts() -> None:
    assert run(sys.argv[1]) == (0, "")


def refused() -> None:
    code, said = run(sys.argv[2])
    assert code == 1 and "starts a thread: take it out of one_thread in tests/meson.build" in said, (code, said)


if __name__ == "__main__":
    sys.exit(tap.run([("a program may start a thread", starts), ("one of one_thread may not", refused)]))
