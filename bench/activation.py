"""Training with spilled activations against no offload, checkpointing and torch's save_on_cpu, and against the bound,
in one run.

usage: activation.py [--device cuda|sim] [--peaks GB,GB,...] [--blocks N] [--hidden N] [--tokens N] [--steps N]
                     [--warm N] [--no-peers] [--json FILE]

A transformer in bf16 whose weights stay on the device; a step is forward, backward and SGD without momentum. Each row
of ours is `stagehand.activation.offload` with a budget; its peak is the most that PyTorch's allocator gave out in the
measured steps. Steps of ours and of the same model without offload alternate, in either order, and `x none` is the
median of the ratios of such pairs, so that a clock that changes touches both; the row `none again` is the same without
ours. Bounds: what goes out has the time of the forward, Cf, what comes back that of the backward, Cb, and W is the
rate of pinned copies. `bound` is max(Cf, out / W) + max(Cb, back / W) of the bytes that the row moved; `link` is the
same for all that is over the budget, peak without offload - budget: the least where nothing is computed again.
Gradients are compared with those of the run without offload. On "sim" sizes are small and times say nothing; the
peak there is of saved tensors alone. GB are 10^9 bytes: the defaults are 7000, 6500 and 6000 MiB, then rounder ones.
"""

from __future__ import annotations

import contextlib
import sys
import time

import common
import torch
from common import Stack, Where, fill, link_rate, nbytes, spread, timed
from loops import Loop, agreement, attempt, batch, halves

import stagehand
from stagehand import activation

DEFAULTS = {
    "cuda": {"blocks": 12, "hidden": 2048, "tokens": 8192, "steps": 20, "warm": 8,
             "peaks": "7.34,6.816,6.291,6,5,4,3.5,3"},
    "sim": {"blocks": 4, "hidden": 64, "tokens": 128, "steps": 3, "warm": 2, "peaks": "0.0010,0.0006"},
}


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


def pairs(loop: Loop, context, where: Where, count: int) -> dict:
    """Times of steps inside `context`, and the ratios to steps outside, in turn."""
    ratio, times, others = [], [], []
    peak = 0
    for i in range(count):
        one: dict = {}
        for inside in (False, True) if i % 2 else (True, False):
            loop.context = context if inside else contextlib.nullcontext
            where.reset_peak()
            one[inside] = timed(loop.step, 1, where)[0]
            if inside:
                peak = max(peak, where.peak())
        ratio.append(one[True] / one[False])
        times.append(one[True])
        others.append(one[False])
    loop.context = context
    ratio.sort()
    return {**spread(times), "none_ms": spread(others)["ms"], "x_none": ratio[count // 2],
            "x_low": ratio[count // 4], "x_high": ratio[3 * count // 4], "peak": peak}


def run(args, where: Where, record: dict) -> list[dict]:
    rows: list[dict] = []
    x = batch(args, where)
    rate = link_rate(where)
    record.update(link_gb_s=rate / 1e9)
    want: list[torch.Tensor] | None = None
    time_of: tuple[float, float] = (0.0, 0.0)

    def plain(checkpointed: bool = False, context=contextlib.nullcontext, count: int | None = None) -> dict:
        nonlocal want, time_of
        loop = Loop(model_on(args, where, checkpointed), x, sgd, context)
        found = loop.gradients()
        if want is None:
            want, time_of = found, halves(loop, where, 5)
        return {**agreement(found, want, where), **steps(loop, where, count or args.steps, 2)}

    base = attempt("no offload", rows, plain)
    where.clean()

    def again() -> dict:
        loop = Loop(model_on(args, where, False), x, sgd)
        steps(loop, where, 1, 3)
        return pairs(loop, contextlib.nullcontext, where, args.steps)

    attempt("none again", rows, again)
    where.clean()

    def compared(row: dict) -> dict:
        if base:
            row["x_none"] = row["ms"] / base["ms"]
        return row

    attempt("checkpointing", rows, lambda: compared(plain(True)))
    where.clean()
    if not args.no_peers:
        attempt("torch save_on_cpu, pinned", rows, lambda: compared(plain(
            context=lambda: torch.autograd.graph.save_on_cpu(pin_memory=where.cuda), count=4)))
        where.clean()

    def least(out: float, back: float) -> float:
        return sum(max(half, n / rate * 1e3) for half, n in zip(time_of, (out, back)))

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
            row.update(pairs(loop, context, where, args.steps))
            after = runtime.stats
            each = {key: (after[key] - before[key]) / args.steps for key in (
                "spill_bytes", "restore_bytes", "spilled", "restored", "ahead", "stalls", "waits", "dropped",
                "recomputed", "pool_hits", "pool_misses", "stall_ns")}
            row.update(each, first_ms=warmed["ms"], host=after["host_bytes"], pinned=after["pinned_bytes"],
                       link_seen=after["link_bytes_per_s"] / 1e9, high=runtime.saver.high)
            if not where.cuda:
                row["peak"] = after["peak_bytes"]
            asked = each["pool_hits"] + each["pool_misses"]
            row["hit_rate"] = each["pool_hits"] / asked if asked else 1.0
            row["bound"] = least(each["spill_bytes"], each["restore_bytes"])
            if base and where.cuda:
                over = max(0, base["peak"] - budget)
                row["link"] = least(over, over)
            after_steps = agreement(loop.gradients(), want, where) if want else {}
            row.update({key: max(row[key], value) for key, value in after_steps.items()})
            row["x_bound"] = row["ms"] / row["bound"]
            return row
        finally:
            activation.shutdown()

    for peak in args.peaks.split(","):
        attempt(f"ours, {peak} GB", rows, lambda peak=peak: ours(float(peak)))
        where.clean()
    weights = 12 * args.blocks * args.hidden * args.hidden * 2
    print(f"{args.blocks} blocks of hidden size {args.hidden}, {args.tokens} tokens, {weights / 1e9:.2f} GB of "
          f"weights; link {rate / 1e9:.1f} GB/s; forward {time_of[0]:.1f} ms, backward {time_of[1]:.1f} ms; "
          f"batch {nbytes([x]) / 1e6:.1f} MB; gradients: "
          "largest relative differences of norms and elements from the run without offload")
    return rows


COLUMNS = [
    ("run", "row", ""), ("ms", "ms", ".1f"), ("min", "min", ".1f"), ("peak GB", "peak_gb", ".3f"),
    ("x none", "x_none", ".3f"), ("from", "x_low", ".3f"), ("to", "x_high", ".3f"), ("bound ms", "bound", ".1f"),
    ("x bound", "x_bound", ".3f"), ("link ms", "link", ".1f"), ("out GB", "out_gb", ".3f"),
    ("back GB", "back_gb", ".3f"), ("dropped", "dropped", ".0f"), ("ahead", "ahead", ".0f"),
    ("demand", "stalls", ".0f"), ("waits", "waits", ".0f"), ("hits", "hit_rate", ".3f"),
    ("pinned GB", "pinned_gb", ".3f"),
    ("grad norm", "grad_norm", ".1e"), ("grad max", "grad_max", ".1e"),
]


def readable(row: dict) -> dict:
    named = {"peak_gb": "peak", "out_gb": "spill_bytes", "back_gb": "restore_bytes", "pinned_gb": "pinned"}
    return {**row, **{key: row[of] / 1e9 for key, of in named.items() if of in row}}


def main() -> int:
    args = common.parse(__doc__, DEFAULTS, "no-peers")
    return common.main(args, run, COLUMNS, readable, ("torch save_on_cpu, pinned",))


if __name__ == "__main__":
    sys.exit(main())
