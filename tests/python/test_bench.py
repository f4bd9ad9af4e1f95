"""The benchmarks' scripts run: small sizes on the simulated device, where times say nothing and gradients do."""

import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest

BENCH = pathlib.Path(__file__).resolve().parents[2] / "bench"
OPTIMIZER = importlib.util.find_spec("stagehand.optim") is not None


def run(tmp_path, *arguments) -> tuple[dict, subprocess.CompletedProcess]:
    out = tmp_path / "out.json"
    command = [sys.executable, str(BENCH / "training.py"), "--device", "sim", "--json", str(out), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert out.exists(), done.stderr
    return json.loads(out.read_text()), done


def of(record, prefix):
    rows = [row for row in record["rows"] if row["row"].startswith(prefix)]
    assert rows
    return rows


def test_lora(tmp_path):
    record, done = run(tmp_path, "--case", "lora")
    assert done.returncode == 0, done.stdout + done.stderr
    for row in of(record, "ours"):
        assert row["h2d"] > 0 and row["ms"] > 0 and row["bound"] > 0 and row["grad_max"] < 1e-2
    assert all(row["row"] in done.stdout for row in record["rows"])


def test_check(tmp_path):
    record, done = run(tmp_path, "--case", "full", "--check")
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(row["grad_max"] < 1e-2 for row in record["rows"])


def test_full(tmp_path):
    record, done = run(tmp_path, "--case", "full")
    assert OPTIMIZER == (done.returncode == 0), done.stdout + done.stderr
    ran = [row for row in record["rows"] if OPTIMIZER or "OffloadedAdamW" not in row["row"]]
    for row in ran:
        assert "failed" not in row and row["ms"] > 0 and row["grad_max"] < 1e-2


def test_steps(tmp_path):
    record, done = run(tmp_path, "--case", "steps")
    assert done.returncode == 0, done.stdout + done.stderr
    ours, = of(record, "ours")
    assert ours["loss_difference"] < 1e-2 and ours["last"] < ours["first"]
    assert ours["+files"] == 0 and ours["+threads"] == 0


@pytest.mark.skipif(__import__("torch").cuda.is_available(), reason="this is what happens without CUDA")
@pytest.mark.parametrize("script", ["training.py --case lora", "inference.py"])
def test_without_cuda_it_says_so(script):
    name, *arguments = script.split()
    done = subprocess.run([sys.executable, str(BENCH / name), *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 4 and "no CUDA device" in done.stderr
