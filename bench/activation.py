"""Training with spilled activations against no offload, checkpointing and torch's save_on_cpu, and against the bound,
in one run.

usage: activation.py [--device cuda|sim] [--peaks GB,GB,...] [--blocks N] [--hidden N] [--tokens N] [--steps N]
                     [--warm N] [--no-peers] [--json FILE]

A transformer in bf16 whose weights stay on the device; a step is forward, backward and SGD without momentum. Each row
of ours is `stagehand.activation.offload` with a budget; its peak is the most that PyTorch's allocator gave out in the
measured steps. The bound of a point is max(C, n / W): C the step without offload, n the bytes over the link each
way in that row, W the rate of pinned copies while both directions run, for those go out in forward and come back in
backward. `needed` is the bound for the budget itself: (peak without offload - budget) each way instead of n.
Gradients are compared with those of the run without offload. On "sim" sizes are small and times say nothing; the
peak there is of saved tensors alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time

import torch
from common import Stack, Where, both_ways_rate, fill, link_rate, nbytes, spread, table, timed
from loops import Loop, agreement, attempt, batch, ratios

import stagehand
from stagehand import activation

DEFAULTS = {"cuda": (12, 2048, 8192, 20, 8, "7.0,6.5,6.0,5,4,3"), "sim": (4, 64, 128, 3, 2, "0.0010,0.0006")}


def sgd(params):
    """Steps of size 0: every run computes the same gradients."""
    return torch.optim.SGD(params, lr=0.0)


def model_on(args, where: Where, checkpointed: bool) -> Stack:
    torch.manual_seed(0)
    return fill(Stack(args.blocks, args.hidden, checkpointed=checkpointed), args.hidden, trainable=True).to(where.torch)


def steps(loop: Loop, where: Where, count: int, warm: int) -> dict:
    for _ in range(warm):  # watermarks follow the peak of each
        where.reset_peak()
        loop.step()
        where.synchronize()
    where.reset_peak()
    begin = time.perf_counter()
    times = timed(loop.step, count, where)
    return {**spread(times), "wall_ms": (time.perf_counter() - begin) * 1e3 / count, "peak": where.peak()}


def run(args, where: Where, record: dict) -> list[dict]:
    rows: list[dict] = []
    x = batch(args, where)
    rate, both = link_rate(where), both_ways_rate(where)
    record.update(link_gb_s=rate / 1e9, both_ways_gb_s=both / 1e9)
    want: list[torch.Tensor] | None = None

    def plain(checkpointed: bool = False, context=contextlib.nullcontext, count: int | None = None) -> dict:
        nonlocal want
        loop = Loop(model_on(args, where, checkpointed), x, sgd, context)
        found = loop.gradients()
        want = want or found
        return {**agreement(found, want, where), **steps(loop, where, count or args.steps, 2)}

    base = attempt("no offload", rows, plain)
    where.clean()

    def compared(row: dict) -> dict:
        row["bound"] = base["ms"] if base else None
        return ratios(row, base)

    attempt("checkpointing", rows, lambda: compared(plain(True)))
    where.clean()
    if not args.no_peers:
        attempt("torch save_on_cpu, pinned", rows, lambda: compared(plain(
            context=lambda: torch.autograd.graph.save_on_cpu(pin_memory=where.cuda), count=4)))
        where.clean()

    def ours(gigabytes: float) -> dict:
        budget = int(gigabytes * 1e9)
        device = None if where.cuda else stagehand.Device("sim")
        inside = activation.offload(budget, device=device)  # one for all steps, as a decorator or a loop would have it
        runtime = inside.runtime

        @contextlib.contextmanager
        def context():
            with inside:
                yield

        try:
            loop = Loop(model_on(args, where, False), x, sgd, context)
            row = agreement(loop.gradients(), want, where) if want else {}
            row["budget"] = budget
            warmed = steps(loop, where, 1, args.warm)
            before = runtime.stats
            row.update(steps(loop, where, args.steps, 0))
            after = runtime.stats
            each = {key: (after[key] - before[key]) / args.steps for key in (
                "spill_bytes", "restore_bytes", "spilled", "restored", "ahead", "stalls", "waits", "pool_hits",
                "pool_misses", "stall_ns")}
            row.update(each, first_ms=warmed["ms"], host=after["host_bytes"], pinned=after["pinned_bytes"],
                       link_seen=after["link_bytes_per_s"] / 1e9, high=runtime.saver.high)
            if not where.cuda:
                row["peak"] = after["peak_bytes"]
            asked = each["pool_hits"] + each["pool_misses"]
            row["hit_rate"] = each["pool_hits"] / asked if asked else 1.0
            compute = base["ms"] if base else 0.0
            row["bound"] = max(compute, max(each["spill_bytes"], each["restore_bytes"]) / both * 1e3)
            if base and where.cuda:
                row["needed"] = max(compute, 2 * max(0, base["peak"] - budget) / rate * 1e3)
            after_steps = agreement(loop.gradients(), want, where) if want else {}
            row.update({key: max(row[key], value) for key, value in after_steps.items()})
            return ratios(row, base)
        finally:
            activation.shutdown()

    for peak in args.peaks.split(","):
        attempt(f"ours, {peak} GB", rows, lambda peak=peak: ours(float(peak)))
        where.clean()
    weights = 12 * args.blocks * args.hidden * args.hidden * 2
    print(f"{args.blocks} blocks of hidden size {args.hidden}, {args.tokens} tokens, {weights / 1e9:.2f} GB of weights; "
          f"link {rate / 1e9:.1f} GB/s, both ways {both / 1e9:.1f} each; batch {nbytes([x]) / 1e6:.1f} MB; gradients: "
          "largest relative differences of norms and elements from the run without offload")
    return rows


COLUMNS = [
    ("run", "row", ""), ("ms", "ms", ".1f"), ("min", "min", ".1f"), ("peak GB", "peak_gb", ".3f"),
    ("bound ms", "bound", ".1f"), ("x bound", "x_bound", ".3f"), ("x none", "x_resident", ".3f"),
    ("needed ms", "needed", ".1f"), ("out GB", "out_gb", ".3f"), ("back GB", "back_gb", ".3f"),
    ("ahead", "ahead", ".0f"),
    ("demand", "stalls", ".0f"), ("waits", "waits", ".0f"), ("hits", "hit_rate", ".3f"),
    ("pinned GB", "pinned_gb", ".3f"),
    ("grad norm", "grad_norm", ".1e"), ("grad max", "grad_max", ".1e"),
]


def readable(row: dict) -> dict:
    named = {"peak_gb": "peak", "out_gb": "spill_bytes", "back_gb": "restore_bytes", "pinned_gb": "pinned"}
    return {**row, **{key: row[of] / 1e9 for key, of in named.items() if of in row}}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "sim"), default="cuda")
    for name in ("blocks", "hidden", "tokens", "steps", "warm"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--peaks")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--json")
    args = parser.parse_args()
    for name, value in zip(("blocks", "hidden", "tokens", "steps", "warm", "peaks"), DEFAULTS[args.device]):
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def main() -> int:
    args = parse()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: --device sim runs a smoke test on the CPU", file=sys.stderr)
        return 4
    where = Where(args.device)
    record: dict = {**where.describe(), "arguments": vars(args)}
    print(", ".join(f"{key} {value}" for key, value in where.describe().items()))
    record["rows"] = rows = run(args, where, record)
    table(COLUMNS, [readable(row) for row in rows])
    if args.json:
        with open(args.json, "w") as out:
            json.dump(record, out, indent=1)
    return 1 if any("failed" in row for row in rows if row["row"] != "torch save_on_cpu, pinned") else 0


if __name__ == "__main__":
    sys.exit(main())
