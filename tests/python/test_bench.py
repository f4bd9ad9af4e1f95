"""The benchmarks' scripts run: small sizes on the simulated device, where times say nothing and gradients do."""

import importlib
import importlib.util
import json
import os
import pathlib
import sys

import pytest
import torch
from support import threads

BENCH = pathlib.Path(__file__).resolve().parents[2] / "bench"
OPTIMIZER = importlib.util.find_spec("stagehand.optim") is not None


def script(name, monkeypatch, *arguments) -> int:
    """Exit status of a script that is run in this process."""
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    return importlib.import_module(name).main()


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    def call(*arguments) -> tuple[int, list[dict], str]:
        out = tmp_path / "out.json"
        with threads(1):  # so small that others cost more than they give
            status = script("training", monkeypatch, "--device", "sim", "--json", str(out), *arguments)
        return status, json.loads(out.read_text())["rows"], capsys.readouterr().out

    return call


def ours(rows) -> list[dict]:
    found = [row for row in rows if "ours" in row["row"]]
    assert found
    return found


@pytest.mark.full("test_a_row_that_fails_says_why_and_the_others_run, with one budget that works")
def test_lora(run):
    status, rows, said = run("--case", "lora")
    assert status == 0, said
    for row in ours(rows):
        assert row["h2d"] > 0 and row["ms"] > 0 and row["bound"] > 0 and row["grad_max"] < 1e-2
    assert all(row["row"] in said for row in rows)


def test_a_row_that_fails_says_why_and_the_others_run(run):
    status, rows, said = run("--case", "lora", "--budget", "10KB,340KB")
    assert status == 1
    failed, fine = ours(rows)
    assert "StagehandOOMError" in failed["failed"] and failed["failed"] in said
    assert fine["h2d"] > 0 and fine["ms"] > 0 and fine["bound"] > 0 and fine["grad_max"] < 1e-2


def test_check(run):
    status, rows, said = run("--case", "full", "--check")
    assert status == 0, said
    assert ours(rows) and all(row["grad_max"] < 1e-2 and "ms" not in row for row in rows)


def test_full(run):
    status, rows, said = run("--case", "full")
    assert OPTIMIZER == (status == 0), said
    for row in rows:
        if OPTIMIZER or "OffloadedAdamW" not in row["row"]:
            assert "failed" not in row and row["ms"] > 0 and row["grad_max"] < 1e-2


def test_micro(run):
    status, rows, said = run("--case", "micro", "--micro", "4")
    assert status == 0, said
    rows = {row["row"]: row for row in rows}
    # A third, unless the machine is busy.
    assert rows["infer, ours, block-major"]["h2d"] < rows["infer, ours, passes"]["h2d"]
    assert rows["train, ours, block-major"]["grad_max"] < 1e-2


def test_steps(run):
    status, rows, said = run("--case", "steps")
    assert status == 0, said
    row, = ours(rows)
    assert row["loss_difference"] < 1e-2 and row["last"] < row["first"]
    assert row["+files"] == 0 and row["+threads"] == 0


def test_activation(monkeypatch, tmp_path, capsys):
    out = tmp_path / "out.json"
    with threads(1):
        status = script("activation", monkeypatch, "--device", "sim", "--tokens", "64", "--peaks", "0.0005,0.0002",
                        "--json", str(out))
    said = capsys.readouterr().out
    assert status == 0, said
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 6 and all(row["ms"] > 0 and row.get("grad_max", 0) == 0 for row in rows)
    row = rows[-1]
    assert row["spill_bytes"] > 0 and row["dropped"] > 0 and row["peak"] <= row["budget"] and row["x_bound"] > 0
    assert 0 <= row["hit_rate"] <= 1  # how high depends on the machine's other work


def test_combined(monkeypatch, tmp_path, capsys):
    out = tmp_path / "out.json"
    with threads(1):
        status = script("combined", monkeypatch, "--device", "sim", "--json", str(out))
    said = capsys.readouterr().out
    assert status == 0, said
    row = json.loads(out.read_text())["rows"][-1]
    assert row["h2d"] > 0 and row["dropped"] + row["spill_bytes"] > 0 and row["grad_max"] == 0 and row["bound"] > 0


def test_conductor(monkeypatch, tmp_path, capsys):
    out = tmp_path / "out.json"
    with threads(1):
        status = script("conductor", monkeypatch, "--device", "sim", "--quads", "1", "--json", str(out))
    said = capsys.readouterr().out
    assert status == 0, said
    rows = json.loads(out.read_text())["rows"]
    assert [row["row"] for row in rows] == ["all stays", "weights stream", "weights stream, spills"]
    assert all(row["x_low"] <= row["x_off"] <= row["x_high"] and row["spread"] >= 0 for row in rows)
    assert all(row["grad_max"] == 0 for row in rows)
    assert rows[0]["h2d"] < 1000 < rows[1]["h2d"] and rows[1]["out"] == 0 < rows[2]["out"]
    assert rows[1]["flights"] > 0 and "x off" in said


def test_disk(monkeypatch, tmp_path, capsys):
    out = tmp_path / "out.json"
    with threads(1):
        status = script("disk", monkeypatch, "--device", "sim", "--dir", str(tmp_path / "files"), "--blocks", "3",
                        "--hidden", "256", "--budget", "1500KB", "--tokens", "4", "--steps", "2", "--json", str(out))
    said = capsys.readouterr().out
    assert status == 0, said
    record = json.loads(out.read_text())
    assert record["equal"] and record["compared_with_resident"] and list((tmp_path / "files").iterdir()) == []
    weights = record["weights"]
    assert 0.4 * weights < record["half"]["ram"] <= weights / 2 and record["cold"]["ram"] == 0
    assert 0 < record["half"]["read"] < 0.9 * record["cold"]["read"] < weights
    assert all(value > 0 for key, value in record["figures"].items() if "RAM" not in key or "speed" in key)
    assert "outputs equal: True" in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is what happens without CUDA")
@pytest.mark.parametrize("name, arguments", [("training", ["--case", "lora"]), ("inference", []), ("activation", []),
                                             ("adapt", []), ("found", []), ("combined", []), ("conductor", []),
                                             ("quantised", []), ("packed", []), ("seen", []),
                                             ("disk", ["--dir", "nowhere"]), ("rows_disk", ["--dir", "nowhere"]),
                                             ("run", [])])
def test_without_cuda_it_says_so(name, arguments, monkeypatch, capsys):
    assert script(name, monkeypatch, *arguments) == 4
    assert "no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize("name, phases", [("adapt", 7), ("found", 3)])
def test_what_changes_while_it_runs(name, phases, monkeypatch, tmp_path, capsys):
    out = tmp_path / "out.json"
    with threads(1):
        status = script(name, monkeypatch, "--device", "sim", "--steps", "4", "--json", str(out))
    rows = json.loads(out.read_text())["rows"]
    assert status == 0 and len(rows) == phases, capsys.readouterr().out
    assert all(row["equal"] and len(row["times"]) == 4 and row["ms"] > 0 for row in rows)


def test_seen(monkeypatch, tmp_path, capsys):
    out = tmp_path / "out.json"
    with threads(1):
        status = script("seen", monkeypatch, "--device", "sim", "--json", str(out))
    off, recorded, trace, *curve = json.loads(out.read_text())["rows"]
    assert status == 0 and len(curve) == 5, capsys.readouterr().out
    assert off["ms"] > 0 and recorded["ms"] > 0 and trace["arrows"] > 0 and trace["late"] == 0
    assert all(row["predicted"] > 0 and row["ms"] > 0 for row in curve)


def test_quantised(monkeypatch, tmp_path, capsys):
    out = tmp_path / "out.json"
    with threads(1):
        status = script("quantised", monkeypatch, "--device", "sim", "--blocks", "4", "--hidden", "128", "--tokens",
                        "16", "--budget", "1MB", "--steps", "3", "--json", str(out))
    rows = {row["encoding"]: row for row in json.loads(out.read_text())["rows"]}
    assert status == 0 and set(rows) == {"bf16", "int8", "fp8", "int4", "lossless"}
    assert all(row["equal"] and row["ms"] > 0 and not row["expand_error"]
               for row in rows.values()), capsys.readouterr().out
    assert 1.3 < rows["int8"]["fewer_bytes"] < 2.2 and rows["int4"]["fewer_bytes"] > 1.8


def test_rows_disk(monkeypatch, tmp_path, capsys):
    status = script("rows_disk", monkeypatch, "--device", "sim", "--dir", str(tmp_path), "--layers", "2", "--experts",
                    "8", "--hidden", "256", "--intermediate", "128", "--per-token", "2", "--tokens", "4", "--json",
                    str(tmp_path / "rows.json"))
    assert status == 0 and "0 wrong" in capsys.readouterr().out
    found = json.loads((tmp_path / "rows.json").read_text())
    assert found["wrong"] == 0 and found["rounds"][0]["read"] > 0
    assert not (tmp_path / "stagehand-rows.safetensors").exists()


def test_packed(monkeypatch, tmp_path, capsys):
    out = tmp_path / "out.json"
    with threads(1):
        status = script("packed", monkeypatch, "--device", "sim", "--formats", "v2,v3-int4", "--steps", "1", "--json",
                        str(out))
    v2, v3 = json.loads(out.read_text())["rows"]
    assert status == 0 and v2["equal"] and v3["equal"], capsys.readouterr().out
    assert 0 < v3["mb"] < v2["mb"] and not v3["decoded_bytes"] and not v3["expand_error"]


@pytest.mark.parametrize("case", ["blocks", "small", "dit", "unet"])
def test_inference(case, monkeypatch, tmp_path, capsys):
    out = tmp_path / "out.json"
    with threads(1):
        status = script("inference", monkeypatch, "--device", "sim", "--case", case, "--json", str(out))
    assert status == 0, capsys.readouterr().out
    record = json.loads(out.read_text())
    resident, streamed = record["rows"]
    assert streamed["plan"]["streamed_bytes"] > 0 and streamed["difference"] < 1e-2 and streamed["x_bound"] > 0
    beside = streamed.get("resident_in_turn", resident)
    assert streamed["bound"] >= beside["ms"] and streamed["setup_s"] > 0 and record["weights"] > 0


def test_all_of_it_in_one_table_and_one_file(monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    status = script("run", monkeypatch, "--device", "sim", "--only", "small,adamw", "--json", str(tmp_path / "b.json"),
                    "--text", str(tmp_path / "b.txt"))
    said, record = capfd.readouterr().out, json.loads((tmp_path / "b.json").read_text())
    assert status == 0, said
    assert record["machine"]["torch"] == torch.__version__ and set(record["workloads"]) == {"small", "adamw"}
    assert all(found["status"] == 0 and found["rss_peak"] > 1 << 20 for found in record["workloads"].values())
    rows = record["rows"]
    assert all(row["ms"] > 0 for row in rows) and any("ours" in row["row"] and row["x_bound"] > 0 for row in rows)
    text = (tmp_path / "b.txt").read_text()
    assert all(row["row"] in text for row in rows) and text in said


def test_a_workload_without_figures_is_a_row_that_says_so(monkeypatch, tmp_path, capfd):
    monkeypatch.syspath_prepend(str(BENCH))
    bench = importlib.import_module("run")
    monkeypatch.setitem(bench.WORKLOADS, "adamw", ("adamw", "", "--elements nonsense"))
    status = script("run", monkeypatch, "--device", "sim", "--only", "adamw", "--json", str(tmp_path / "b.json"),
                    "--text", str(tmp_path / "b.txt"))
    capfd.readouterr()
    assert status == 1 and "no figures" in (tmp_path / "b.txt").read_text()


def test_every_workload_is_listed_and_an_unknown_one_is_refused(monkeypatch, capsys):
    assert script("run", monkeypatch, "--list") == 0
    said = capsys.readouterr().out
    assert all(name in said for name in ("inference", "peers", "small", "lora", "full", "activation", "combined",
                                         "disk"))
    with pytest.raises(SystemExit):
        script("run", monkeypatch, "--only", "lora,nothing")


REAL = ["flux-pipeline", "lora-flux", "llama8b", "flux", "wan14b", "qwen-image", "ltx", "sdxl-unet", "moe",
        "lora-llama8b", "full-llama1b"]


@pytest.mark.parametrize("case", REAL if os.environ.get("STH_TEST_FULL") else REAL[:3])
def test_real_models(case, monkeypatch, tmp_path, capsys):
    for package in ("diffusers", "transformers", *(["peft"] if case.startswith("lora") else [])):
        pytest.importorskip(package, reason=f"{package} is not installed")
    out = tmp_path / "real.jsonl"
    with threads(1):
        status = script("real", monkeypatch, case, "--small", "--budgets", "1", "--steps", "4", "--out", str(out))
    lines = out.read_text()
    rows = [json.loads(line) for line in lines.splitlines()]
    assert status == 0, capsys.readouterr()
    assert {row["system"] for row in rows} == {"resident", "ours"} and len(rows) in (2, 4)
    for row in rows:
        assert len(row["all"]) == 4 and row["first"] > 0 and row["ms"] > 0 and row["difference"] < 1e-3, row
    assert all(row["predicted"] > 0 for row in rows if row["system"] == "ours" and case != "flux-pipeline")
    assert script("real", monkeypatch, case, "--small", "--budgets", "1", "--steps", "4", "--out", str(out)) == 0
    assert out.read_text() == lines  # nothing was run again


@pytest.mark.skipif(not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
                    reason="this PyTorch has no gloo")
def test_ranks_are_compared_with_one_process(monkeypatch, capsys, tmp_path):
    out = tmp_path / "out.json"
    status = script("ranks", monkeypatch, "--device", "sim", "--layers", "3", "--hidden", "256", "--tokens", "8",
                    "--steps", "2", "--json", str(out))
    assert status == 0 and "bit for bit: 6 of 6" in capsys.readouterr().out
    found = sum(rank["found"] for rank in json.loads(out.read_text())["ranks"])
    assert found >= 3 * 256 * 256 * 4  # more where another test's ranks have the same weights now


def test_real_models_over_slower_links(monkeypatch, tmp_path, capsys):
    """A row for each rate, in which the link has that rate; one that this machine does not reach is refused."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    out = tmp_path / "real.jsonl"
    words = ("llama8b", "--small", "--budgets", "1", "--steps", "4", "--out", str(out))
    with threads(1):
        assert script("real", monkeypatch, *words, "--link", "0.5,2") == 0, capsys.readouterr()
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        assert [(row["system"], row["link"]) for row in rows if row["phase"] == "decode"] == [
            ("resident", None), ("ours", 0.5), ("ours", 2.0)]
        assert all(row["difference"] < 1e-3 for row in rows)
        slow, fast = (row for row in rows if row["system"] == "ours" and row["phase"] == "decode")
        assert slow["link_gb_s"] < 0.55 and fast["link_gb_s"] < 2.2  # a loaded machine only makes it slower
        assert script("real", monkeypatch, *words, "--link", "400") == 1
    assert "the link of this machine has 4.0 GB/s" in out.read_text()
