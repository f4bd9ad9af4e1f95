#!/usr/bin/env python3
"""`stagehand stream`: really streams through the simulated device; budget kept, bytes right, numbers told."""

import gzip
import json
import pathlib
import random
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from cli.tool import DATA, DEVICE, OK, USAGE, expect, stagehand, write_safetensors
from support import tap

folder = pathlib.Path()
KIB = 1024


def model() -> pathlib.Path:
    """8 blocks of about 300 KiB of random bytes, with sizes that are no multiples of anything."""
    path = folder / "model.safetensors"
    tensors = {}
    for i in range(8):
        tensors[f"h.{i}.mlp.weight"] = ("U8", [200 * KIB + 77 * i])
        tensors[f"h.{i}.mlp.bias"] = ("U8", [13])
        tensors[f"h.{i}.attn.weight"] = ("U8", [100 * KIB + i])
    write_safetensors(path, tensors)
    bytes_now = path.read_bytes()
    start = int.from_bytes(bytes_now[:8], "little") + 8
    path.write_bytes(bytes_now[:start] + random.Random(1).randbytes(len(bytes_now) - start))
    return path


def stream(*words: object, steps: int = 5) -> dict:
    done = stagehand("stream", model(), "--device", "sim", "--steps", steps, "--json", *words)
    expect(done, OK)
    return json.loads(done.stdout)


def test_a_third_of_the_model() -> None:
    told = stream("--budget", "800KiB", "--verify")
    assert told["verified"] == {"units": 16, "differing": 0}
    assert 0 < told["device"]["peak_bytes"] <= 800 * KIB == told["budget"]
    assert told["totals"]["steps"] >= 5 and told["units"] == 16
    least = told["bytes"] - 800 * KIB
    assert told["totals"]["h2d_bytes"] >= told["bytes"] + 4 * least
    assert told["measured"]["steps"] == 3 and told["measured"]["step_ms"] > 0
    assert told["measured"]["bytes_per_step"] >= least and 0 <= told["measured"]["hit_rate"] <= 1
    assert told["predicted"]["bytes_per_step"] >= least
    assert 0 < told["host"]["ram_bytes"] <= told["host"]["ram_peak_bytes"]
    assert told["host"]["staging_bytes"] > 0


def test_a_model_that_fits_is_moved_once() -> None:
    told = stream("--budget", "4MiB", "--verify")
    assert told["totals"]["h2d_bytes"] == told["bytes"], told["totals"]
    assert told["predicted"]["bytes_per_step"] == 0 and told["measured"]["bytes_per_step"] == 0
    assert told["measured"]["hit_rate"] == 1 and told["verified"]["differing"] == 0


def test_compute_takes_its_time() -> None:
    told = stream("--budget", "4MiB", "--compute-ms", "20")
    assert told["measured"]["compute_ms"] >= 19 and told["measured"]["step_ms"] >= 19, told["measured"]


def test_blocks() -> None:
    told = stream("--budget", "800KiB", "--blocks", r"h\.[0-3]$", "--verify")
    assert told["blocks"] == 4 and told["units"] == 8 and told["verified"] == {"units": 8, "differing": 0}


def test_one_step() -> None:
    told = stream("--budget", "800KiB", steps=1)
    assert told["measured"]["steps"] == 1 and told["verified"] is None


def test_text_and_progress() -> None:
    done = stagehand("stream", model(), "--device", "sim", "--budget", "800KiB", "--steps", "25", "--verify")
    expect(done, OK, "predicted", "measured", "hit rate", "host waits", "VRAM", "staging", "25 in ",
           "16 units: 0 differ")
    lines = done.stderr.splitlines()
    assert 1 <= len(lines) <= 10 and lines[-1] == "step 25 of 25", lines


def test_telemetry_feeds_the_plan() -> None:
    steps = folder / "steps.jsonl"
    stream("--budget", "800KiB", "--compute-ms", "10", "--telemetry", steps, steps=4)
    records = [json.loads(line) for line in steps.read_text().splitlines()]
    assert [r["step"] for r in records] == [0, 1, 2, 3], records
    mean = sum(r["compute_time_ms"] for r in records) / 4
    done = stagehand("plan", model(), "--device", "sim", "--budget", "800KiB", "--json", "--telemetry", steps)
    expect(done, OK)
    assert abs(json.loads(done.stdout)["compute"]["ms"] - mean) < 0.01


def test_a_trace_holds_every_copy_and_read() -> None:
    for name in ("run.json", "run.json.gz"):
        done = stagehand("stream", model(), "--device", "sim", "--budget", "800KiB", "--steps", "4", "--trace",
                         folder / name, "--telemetry", folder / f"{name}l")
        expect(done, OK)
        data = (folder / name).read_bytes()
        events = json.loads(gzip.decompress(data) if name.endswith(".gz") else data)["traceEvents"]
        of = lambda kind: [e for e in events if e["ph"] == "X" and e["cat"] == kind]  # noqa: E731
        records = [json.loads(line) for line in (folder / f"{name}l").read_text().splitlines()]
        for record in records[1:]:  # what seal has copied is the first one's
            copied = [e["args"]["bytes"] for kind in ("copies up", "copies up, on demand") for e in of(kind)
                      if e["args"]["step"] == record["step"]]
            assert sum(copied) == record["h2d_bytes"] > 0, record
        assert len(of("steps")) == 4 and of("disk") and of("compute")
    expect(stagehand("stream", model(), "--device", "sim", "--budget", "800KiB", "--trace", model()), DATA, "a trace")


def test_a_budget_that_is_too_small() -> None:
    done = stagehand("stream", model(), "--device", "sim", "--budget", "100KiB")
    expect(done, DEVICE, "h.", "BUDGET_TOO_SMALL")


def test_unsound_files() -> None:
    expect(stagehand("stream", folder / "absent", "--budget", "1MB"), DATA, "absent")
    cut = folder / "cut.safetensors"
    cut.write_bytes(model().read_bytes()[:-1])
    done = stagehand("stream", cut, "--device", "sim", "--budget", "1MB")
    expect(done, DATA, "cut.safetensors", "CORRUPT_DATA")
    link = folder / "link.jsonl"
    link.symlink_to(folder / "target.jsonl")
    done = stagehand("stream", model(), "--device", "sim", "--budget", "1MB", "--telemetry", link)
    expect(done, DATA, "link.jsonl", "symbolic link")
    assert not (folder / "target.jsonl").exists()


def test_mistakes() -> None:
    words = ("stream", model())
    expect(stagehand(*words), USAGE, "--budget")
    expect(stagehand(*words, "--budget", "1MB", "--steps", "0"), USAGE, "--steps")
    expect(stagehand(*words, "--budget", "1MB", "--device", "sim", "--link", "0"), USAGE, "--link")
    expect(stagehand(*words, "--budget", "1MB", "--device", "cuda", "--link", "9"), USAGE, "--link", "cuda")
    expect(stagehand(*words, "--budget", "1MB", "--device", "tpu"), DEVICE, "tpu")
    expect(stagehand(*words, "--budget", "1MB", "--blocks", "nix"), USAGE, "nix", "h.0.attn")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        folder = pathlib.Path(made)
        cases = [(name[5:], case) for name, case in list(globals().items()) if name.startswith("test_")]
        sys.exit(tap.run(cases))
