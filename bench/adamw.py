"""OffloadedAdamW against the memory's own speed and against torch.optim.AdamW on the CPU, in one process.

usage: adamw.py [--elements 64M] [--threads N] [--steps 10] [--state-path FOLDER] [--json FILE]

Ratios are of the best of some steps, taken in turns. The copy is torch's `copy_` between two arrays larger than the
caches, with all of torch's threads; its bytes are those read and written. An update's bytes, for each element:
weight, gradient and two moments read, weight and moments written: 28 in float32, 28 also with a bfloat16 weight, whose
master is read and written and whose low-precision copy is written. torch's bfloat16 steps have no master: they
move fewer bytes and lose small steps.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import torch
from common import Where

from stagehand import _core, parse_size
from stagehand.optim import OffloadedAdamW


def in_turns(functions: dict, rounds: int) -> dict[str, float]:
    """The best time of each function; they take turns, so that all meet the same state of the machine."""
    best = {}
    for turn in range(rounds + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            took = time.perf_counter() - start
            if turn:  # the first makes the state
                best[name] = min(best.get(name, took), took)
    return best


def step_of(make, elements: int, dtype: torch.dtype):
    param = torch.nn.Parameter(torch.randn(elements).to(dtype))
    param.grad = torch.randn(elements).to(dtype)
    return make([param]).step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", default="64M")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--state-path")
    parser.add_argument("--json")
    args = parser.parse_args()
    elements = parse_size(args.elements)
    if args.threads:
        torch.set_num_threads(args.threads)
    source, target = torch.ones(2 * elements), torch.zeros(2 * elements)
    core = _core.AdamW(threads=args.threads or 0)
    print(f"{elements} elements, {core.threads} threads, {core.kernels}; torch has {torch.get_num_threads()} threads")
    rows: list[dict] = []
    for dtype in (torch.float32, torch.bfloat16):
        makers = {
            "ours": lambda params: OffloadedAdamW(params, threads=args.threads),
            "torch.optim.AdamW(foreach=True)": lambda params: torch.optim.AdamW(params, foreach=True),
            "torch.optim.AdamW(fused=True)": lambda params: torch.optim.AdamW(params, fused=True),
        }
        if args.state_path:
            options = {"threads": args.threads, "state_path": args.state_path}
            makers["ours, state in a file"] = lambda params: OffloadedAdamW(params, **options)
        turns = {name: step_of(make, elements, dtype) for name, make in makers.items()}
        times = in_turns({**turns, "copy": lambda: target.copy_(source)}, args.steps)
        ours, copy = times.pop("ours"), 16 * elements / times.pop("copy")
        share = 28 * elements / ours / copy
        bound = 28 * elements / copy * 1e3
        rows += [{"row": f"{str(dtype)[6:]}, {name}", "ms": took * 1e3, "bound": bound, "x_bound": took * 1e3 / bound}
                 for name, took in {"ours": ours, **times}.items()]
        print(f"{str(dtype)[6:]}: {ours * 1e3:.1f} ms, {share:.2f} x the rate of the copy, {copy / 1e9:.1f} GB/s")
        for name, took in times.items():
            print(f"    {took / ours:.2f} x its time: {name}")
    if args.json:
        with open(args.json, "w") as out:
            json.dump({**Where("sim").describe(), "card": "none: it runs on the host", "rows": rows}, out, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
