"""What it costs to see what happens, and whether what is said is so: traces and curves.

usage: seen.py [--device cuda|sim] [--blocks N] [--hidden N] [--tokens N] [--steps N] [--json FILE]

Rows of inference of equal blocks in bf16, a third of the weights' bytes as budget:
    off, recorded   steps without a recording and inside `stagehand.trace`, in turns; "cost" is the ratio of medians
    curve           for five budgets what `runtime.curve()` said before, and the steps then measured
    trace           arrows whose copy ends after its use begins; the profiler's copies that no slice of the trace
                    covers, where the profiler sees copies
On a card about two minutes.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile

import common
import torch
from common import Stack, Where, fill, nbytes, spread, timed

import stagehand

DEFAULTS = {
    "cuda": {"blocks": 24, "hidden": 4096, "tokens": 4096, "steps": 12},
    "sim": {"blocks": 4, "hidden": 64, "tokens": 8, "steps": 3},
}
ROUNDS, POINTS = 5, 5
SLACK_US = 50.0  # of the two clocks


def _events(path: str) -> list[dict]:
    with open(path) as file:
        return json.load(file)["traceEvents"]


def _late_arrows(events: list[dict]) -> tuple[int, int]:
    """(arrows, those whose copy ends after its use begins)."""
    slices = {(e["pid"], e["tid"], e["ts"]): e for e in events if e["ph"] == "X"}
    ends: dict = {}
    for e in events:
        if e["ph"] in "sf":
            ends.setdefault(e["id"], {})[e["ph"]] = slices[e["pid"], e["tid"], e["ts"]]
    whole = [pair for pair in ends.values() if len(pair) == 2]
    late = sum(pair["s"]["ts"] + pair["s"]["dur"] > pair["f"]["ts"] + 2 for pair in whole)
    return len(whole), late


def _uncovered(own: list[dict], theirs: list[dict]) -> tuple[int, int]:
    """(the profiler's copies of 1 MB and more to the device, those that lie in no slice of a copy)."""
    spans = [(e["ts"] - SLACK_US, e["ts"] + e["dur"] + SLACK_US) for e in own
             if e["ph"] == "X" and e["cat"].startswith("copies up")]
    first, last = min((a for a, _ in spans), default=0), max((b for _, b in spans), default=0)
    copies = [(e["ts"], e["ts"] + e["dur"]) for e in theirs if e.get("cat") == "gpu_memcpy" and "HtoD" in e["name"]
              and e.get("args", {}).get("bytes", 0) >= 1 << 20 and first <= e["ts"] <= last]
    runs: list = []  # neighboring units have slices side by side
    for a, b in sorted(spans):
        if runs and a <= runs[-1][1]:
            runs[-1][1] = max(runs[-1][1], b)
        else:
            runs.append([a, b])
    missing = sum(not any(a <= c and d <= b for a, b in runs) for c, d in copies)
    return len(copies), missing


def _recorded(step, steps: int, where: Where, folder: str) -> list[dict]:
    times: dict[str, list[float]] = {"off": [], "recorded": []}
    for number in range(ROUNDS):
        times["off"] += timed(step, steps, where)
        with stagehand.trace(os.path.join(folder, f"{number}.json")):
            times["recorded"] += timed(step, steps, where)
    ratio = statistics.median(times["recorded"]) / statistics.median(times["off"])
    return [{"row": "off", **spread(times["off"])}, {"row": "recorded", **spread(times["recorded"]), "cost": ratio - 1}]


def _checked(runtime, step, where: Where, folder: str) -> dict:
    from torch.profiler import ProfilerActivity, profile
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if where.cuda else [])
    own, theirs = os.path.join(folder, "own.json"), os.path.join(folder, "theirs.json")
    with profile(activities=kinds) as profiler, stagehand.trace(own):
        for _ in range(3):
            step()
        where.synchronize()
        runtime.end_step()
    profiler.export_chrome_trace(theirs)
    events = _events(own)
    arrows, late = _late_arrows(events)
    copies, missing = _uncovered(events, _events(theirs))
    row = {"row": "trace", "arrows": arrows, "late": late, "copies": copies, "missing": missing}
    if not arrows or late or missing:
        row["failed"] = "the trace is not what the device did"
    return row


def _curve(runtime, step, steps: int, where: Where) -> list[dict]:
    points = [p for p in runtime.curve(POINTS + 2) if not p["present"]][1:POINTS + 1]
    rows = []
    for point in points:
        runtime.set_vram_budget(point["budget"])
        timed(step, 4, where)
        measured = spread(timed(step, steps, where))
        rows.append({"row": f"curve, {point['budget'] / 1e9:.2f} GB", **measured, "predicted": point["step_ms"],
                     "off": measured["ms"] / point["step_ms"] - 1})
    return rows


def run(args, where: Where, record: dict) -> list[dict]:
    model = fill(Stack(args.blocks, args.hidden), args.hidden)
    weights = nbytes(model.parameters())
    budget = weights // 3
    stagehand.layer(model, vram_budget=budget, inference_mode=True, device=where.target(2 * weights))
    runtime = stagehand.runtime(model)
    inputs = torch.randn(1, args.tokens, args.hidden, dtype=torch.bfloat16, device=where.torch)

    def step() -> None:
        with torch.inference_mode():
            model(inputs)

    timed(step, 8, where)
    with tempfile.TemporaryDirectory() as folder:
        rows = [*_recorded(step, args.steps, where, folder), _checked(runtime, step, where, folder)]
    rows += _curve(runtime, step, args.steps, where)
    stagehand.shutdown(model)
    return rows


COLUMNS = [("row", "row", ""), ("ms a step", "ms", ".2f"), ("min", "min", ".2f"), ("max", "max", ".2f"),
           ("cost", "cost", "+.1%"), ("predicted", "predicted", ".2f"), ("off by", "off", "+.1%"),
           ("arrows", "arrows", "d"), ("late", "late", "d"), ("copies", "copies", "d"), ("missing", "missing", "d")]


def main() -> int:
    return common.main(common.parse(__doc__, DEFAULTS), run, COLUMNS, lambda row: row)


if __name__ == "__main__":
    sys.exit(main())
