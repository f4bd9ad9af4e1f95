"""`python -m stagehand bench`: stacks on the simulated device, and the process that runs them."""

import json
import os
import subprocess
import sys

import pytest

from stagehand.bench.ways import Ways, versions

RUN = {"blocks": 3, "hidden": 64, "tokens": [4, 8], "budget": 120_000, "steps": 4, "seconds": 60, "device": "sim"}


def test_the_whole_of_it_without_a_card(tmp_path):
    out = tmp_path / "out.json"
    done = subprocess.run([sys.executable, "-m", "stagehand", "bench", "--device", "sim", "--disk", str(tmp_path),
                           "--json", str(out)], capture_output=True, text=True, timeout=300,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    told = json.loads(out.read_text())
    assert told["versions"]["torch"] and told["steps_left_out"] is None and len(told["runs"]) == 8
    for run in told["runs"]:
        assert bool(run["rows"]) == (run["left_out"] is None), run
        if run["system"] == "stagehand":
            assert [row["equal"] for row in run["rows"]] == [True, True]
            assert all(0 < row["budget"] < run["weights"] and row["predicted"] > 0 for row in run["rows"])
    assert "it needs a card" in done.stdout and "simulated device" in done.stdout
    assert "starting PyTorch" in done.stderr


def test_ways_give_what_the_resident_model_gives():
    ways = Ways()
    systems = ["resident", "stagehand"] + (["accelerate cpu_offload"] if versions()["accelerate"] else [])
    for system in systems:
        answer = ways.answer({**RUN, "system": system})
        rows = answer.get("rows")
        assert rows and [row["tokens"] for row in rows] == RUN["tokens"], answer
        assert all(row["ms"] > 0 and row["setup_s"] > 0 and row["steps"] >= 1 for row in rows)
        if system != "resident":
            assert all(row["equal"] for row in rows), system


def test_an_output_that_differs_is_said():
    ways = Ways()
    ways.answer({**RUN, "system": "resident"})
    ways.wanted = {key: value + 1 for key, value in ways.wanted.items()}
    assert not any(row["equal"] for row in ways.answer({**RUN, "system": "stagehand"})["rows"])


def test_a_way_that_fails_says_why_and_others_run(monkeypatch):
    ways = Ways()
    answer = ways.answer({**RUN, "system": "stagehand", "budget": 1000})
    assert "StagehandOOMError" in answer["why"] and "rows" not in answer
    monkeypatch.setitem(sys.modules, "diffusers.hooks", None)
    assert "is not installed" in ways.answer({**RUN, "system": "diffusers group offload"})["why"]
    assert ways.answer({**RUN, "system": "stagehand"})["rows"]


def test_little_time_is_few_steps():
    row, *_ = Ways().answer({**RUN, "system": "resident", "seconds": 0, "steps": 100})["rows"]
    assert row["steps"] == 1


@pytest.mark.parametrize("noise", ["print('noise')", "import os; os.write(1, b'noise')"])
def test_nothing_but_answers_comes_out(noise):
    code = (f"import sys, stagehand.bench.ways as w\nold = w.Ways.answer\n"
            f"def answer(self, run):\n    {noise}\n    return old(self, run)\n"
            f"w.Ways.answer = answer\nfrom stagehand.bench.__main__ import main\nsys.exit(main())")
    line = json.dumps({**RUN, "system": "resident"}) + "\n"
    done = subprocess.run([sys.executable, "-c", code], input=line, capture_output=True, text=True, timeout=300)
    hello, answer = map(json.loads, done.stdout.splitlines())
    assert hello["torch"] and answer["rows"] and "noise" in done.stderr
