#!/usr/bin/env python3
"""The C examples of stores and executors do what they say.

    test_layers.py OWN_EXECUTOR OWN_STORE STREAM_MLP
"""

import pathlib
import re
import struct
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from cli.tool import write_safetensors
from support import tap

OWN_EXECUTOR, OWN_STORE, STREAM_MLP = sys.argv[1:]


def call(*words: object) -> subprocess.CompletedProcess:
    return subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=300)


def sums_of(path: pathlib.Path, layers: int, elements: int) -> list[float]:
    data = path.read_bytes()
    begin = 8 + struct.unpack("<Q", data[:8])[0]
    values = struct.unpack(f"<{layers * elements}f", data[begin:begin + 4 * layers * elements])
    return [sum(values[i * elements:(i + 1) * elements]) for i in range(layers)]


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        model = pathlib.Path(folder) / "model.safetensors"
        layers, elements = 10, 32 * 32
        write_safetensors(model, {f"layers.{i}.weight": ("F32", [32, 32]) for i in range(layers)})
        # Bytes of any kind are no numbers: small whole ones instead.
        head = model.read_bytes()[:-4 * layers * elements]
        model.write_bytes(head + struct.pack(f"<{layers * elements}f",
                                             *[i % 251 - 100 for i in range(layers * elements)]))

        def an_own_executor_sees_every_layer() -> None:
            done = call(OWN_EXECUTOR, model, 3 * 4 * elements + 4096)
            assert done.returncode == 0, done.stderr
            seen = [float(x) for x in re.findall(r"1 tensors, sum (\S+)", done.stdout)]
            assert seen == sums_of(model, layers, elements)
            assert re.search(rf"{layers} layers, total (\S+)", done.stdout)[1] == f"{sum(seen):g}"

        def it_says_what_is_wrong() -> None:
            halves = pathlib.Path(folder) / "halves.safetensors"
            write_safetensors(halves, {"a.0.w": ("F16", [8])})
            for words, code, text in [
                ((), 2, "usage"),
                ((model, 1000), 1, "BUDGET_TOO_SMALL"),
                ((halves, "1MB"), 1, "layer 'a.0', executor 'adds up': only F32"),
                ((pathlib.Path(folder) / "absent", "1MB"), 1, "absent"),
            ]:
                done = call(OWN_EXECUTOR, *words)
                assert done.returncode == code and text in done.stderr, done

        def an_own_store_streams() -> None:
            for count in (12, 7):
                done = call(OWN_STORE, count)
                assert done.returncode == 0, done.stderr
                said, computed, most = map(int, re.findall(r"\d+", done.stdout))
                assert said == count and computed > count, "nothing was asked for again"
                assert most <= 4, "more layers were held than the header promises"
            assert call(OWN_STORE, 0).returncode == 2

        def a_streamed_perceptron_is_the_resident_one() -> None:
            for n, (dtype, lookahead, group) in enumerate([("F32", 0, 1), ("BF16", 2, 2), ("F16", 0, 4)]):
                file = pathlib.Path(folder) / f"mlp{n}.safetensors"
                words = ("sim", "300KB", 48, 96, 4, 24, dtype, lookahead, group, file)
                done = call(STREAM_MLP, *words)
                assert done.returncode == 0, done.stderr
                assert "equal, bit for bit" in done.stdout
                first = done.stdout.splitlines()[0]
                assert int(re.search(r"(\d+) bytes copied", first)[1]) > 0, "nothing streamed"
                assert int(re.search(r"at most (\d+) bytes", first)[1]) <= 300_000
            assert call(STREAM_MLP, "sim", "1KB", 48, 96, 4, 24, "F32", 0, 1, file).returncode == 1

        return tap.run([
            ("an executor of one's own sees every layer, within the budget", an_own_executor_sees_every_layer),
            ("what is wrong is said, with an exit code", it_says_what_is_wrong),
            ("a store of one's own streams", an_own_store_streams),
            ("a perceptron that streams from a file gives the bits of the resident one",
             a_streamed_perceptron_is_the_resident_one),
        ])


if __name__ == "__main__":
    sys.exit(main())
