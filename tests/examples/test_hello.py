#!/usr/bin/env python3
"""The C example does what it says, and README shows a part of it.

    test_hello.py PROGRAM
"""

import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from cli.tool import write_safetensors
from support import tap

LAYERS, BYTES = 12, 4 * 64 * 64
STEPS = 5  # what hello.c makes


def hello(*words: object) -> subprocess.CompletedProcess:
    return subprocess.run([sys.argv[1], *map(str, words)], capture_output=True, text=True, timeout=300)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        model = pathlib.Path(folder) / "model.safetensors"
        write_safetensors(model, {f"layers.{i}.weight": ("F32", [64, 64]) for i in range(LAYERS)})

        def streams() -> None:
            done = hello(model, LAYERS * BYTES // 2)
            assert done.returncode == 0, done.stderr
            steps, moved, copies, peak = map(int, re.findall(r"\d+", done.stdout))
            assert steps == STEPS
            assert moved >= copies * BYTES > LAYERS * BYTES, "nothing was loaded again"
            assert 0 < peak <= LAYERS * BYTES // 2

        def explains() -> None:
            for words, code, text in [
                ((), 2, "usage"),
                ((model, 1000), 1, "smallest budget that works"),
                ((model, "much"), 1, "much"),
                ((pathlib.Path(folder) / "absent.safetensors", "1MB"), 1, "absent.safetensors"),
            ]:
                done = hello(*words)
                assert done.returncode == code and text in done.stderr, done

        def readme_agrees() -> None:
            shown = re.findall(r"```c\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
            assert shown, "README shows no C"
            source = (ROOT / "examples/hello.c").read_text()
            for text in shown:
                assert text in source, f"README shows what hello.c does not hold:\n{text}"

        return tap.run([
            ("a model larger than its budget is streamed within it", streams),
            ("what is wrong is said, with an exit code", explains),
            ("README shows a part of the example", readme_agrees),
        ])


if __name__ == "__main__":
    sys.exit(main())
