"""LoRA with streamed weights and spilled activations at once, against the same model resident and against the bound, in
one run.

usage: combined.py [--device cuda|sim] [--budgets WEIGHTS+TOTAL,...] [--blocks N] [--hidden N] [--tokens N] [--steps N]
                   [--json FILE]

Adapters of rank 16 on a frozen bf16 model, blocks not checkpointed, AdamW. WEIGHTS is the budget of `stagehand.layer`,
TOTAL that of `stagehand.activation.offload`: all that PyTorch has allocated. `rest GB` is what the model takes on the
card outside PyTorch's allocator (the ring of streamed weights). The bound is that of the bytes that the row moved:
max(Cf, up / W in each half, out beside them) + max(Cb, back and up), with Cf and Cb the resident step's forward and
backward, W the rate of pinned copies and Wb that in each direction while both run.
"""

from __future__ import annotations

import contextlib
import sys

import common
import torch
from common import Where, both_ways_rate, link_rate, nbytes, twin_on
from loops import Counted, Loop, adamw, agreement, attempt, batch, halves, lora_model, measured, ratios, streamed

import stagehand
from stagehand import activation

DEFAULTS = {
    "cuda": {"blocks": 12, "hidden": 4096, "tokens": 4096, "steps": 16, "budgets": "3GB+9GB,3GB+7GB,2GB+6GB"},
    "sim": {"blocks": 4, "hidden": 64, "tokens": 64, "steps": 3, "budgets": "340KB+300KB"},
}


def link_ms(up: float, down: float, rate: float, both: float) -> float:
    return (min(up, down) / both + abs(up - down) / rate) * 1e3


def run(args, where: Where, record: dict) -> list[dict]:
    rows: list[dict] = []
    x = batch(args, where)
    rate, both = link_rate(where), both_ways_rate(where)
    record.update(link_gb_s=rate / 1e9, both_ways_gb_s=both / 1e9)
    want: list[torch.Tensor] = []
    times: list[float] = []

    def resident(checkpointed: bool) -> dict:
        loop = Loop(twin_on(lora_model(args, checkpointed), where.torch), x, adamw)
        first = loop.gradients()
        row = agreement(first, want or loop.gradients(), where)
        row.update(measured(loop, where, args.steps, 3))
        if not want:
            want.extend(first)
            times.extend(halves(loop, where, 5))
        return row

    base = attempt("resident", rows, lambda: resident(False))
    where.clean()
    attempt("resident, checkpointed", rows, lambda: ratios(resident(True), base))
    where.clean()

    def ours(weights: str, total: str) -> dict:
        device = None if where.cuda else stagehand.Device("sim")
        inside = activation.offload(total, device=device)

        @contextlib.contextmanager
        def context():
            with inside:
                yield

        model = lora_model(args, checkpointed=False)
        try:
            with streamed(model, weights, where) as runtime:
                loop = Loop(model, x, adamw, context)
                row = agreement(loop.gradients(), want, where)
                for _ in range(12):
                    where.reset_peak()
                    loop.step()
                    where.synchronize()
                counted, before = Counted(runtime, where), inside.runtime.stats
                row.update(measured(loop, where, args.steps, 0))
                row.update(counted.per_step(args.steps))
                after = inside.runtime.stats
                each = {key: (after[key] - before[key]) / args.steps
                        for key in ("spill_bytes", "restore_bytes", "dropped", "recomputed", "ahead", "stalls")}
                row.update(each, total=stagehand.parse_size(total), ring=row["plan"]["ring_bytes"])
                if base:
                    up = row["h2d"] / 2
                    row["bound"] = (max(times[0], link_ms(up, each["spill_bytes"], rate, both))
                                    + max(times[1], link_ms(up + each["restore_bytes"], 0, rate, both))
                                    + base["ms"] - sum(times))
                after_steps = agreement(loop.gradients(), want, where)
                row.update({key: max(row[key], value) for key, value in after_steps.items()})
                return ratios(row, base)
        finally:
            activation.shutdown()

    for budgets in args.budgets.split(","):
        attempt(f"ours, {budgets}", rows, lambda budgets=budgets: ours(*budgets.split("+")))
        where.clean()
    if times:
        print(f"resident forward {times[0]:.1f} ms, backward {times[1]:.1f} ms")
    base_bytes = nbytes(p for p in lora_model(args).parameters() if not p.requires_grad)
    print(f"{base_bytes / 1e9:.2f} GB of base weights, {args.tokens} tokens; link {rate / 1e9:.1f} GB/s, both ways "
          f"{both / 1e9:.1f} each; gradients: largest relative differences of norms and elements from "
          "the resident run's")
    return rows


COLUMNS = [
    ("run", "row", ""), ("ms", "ms", ".1f"), ("min", "min", ".1f"), ("x resident", "x_resident", ".3f"),
    ("bound ms", "bound", ".1f"), ("x bound", "x_bound", ".3f"), ("peak GB", "peak_gb", ".3f"),
    ("rest GB", "ring_gb", ".3f"), ("up GB", "h2d_gb", ".3f"), ("out GB", "out_gb", ".3f"),
    ("back GB", "back_gb", ".3f"), ("dropped", "dropped", ".0f"), ("waits", "waits", ".0f"),
    ("demand", "demand", ".1f"), ("stalls", "stalls", ".1f"), ("grad norm", "grad_norm", ".1e"),
    ("grad max", "grad_max", ".1e"),
]


def readable(row: dict) -> dict:
    named = {"peak_gb": "peak", "out_gb": "spill_bytes", "back_gb": "restore_bytes", "h2d_gb": "h2d", "ring_gb": "ring"}
    return {**row, **{key: row[of] / 1e9 for key, of in named.items() if of in row}}


def main() -> int:
    return common.main(common.parse(__doc__, DEFAULTS), run, COLUMNS, readable)


if __name__ == "__main__":
    sys.exit(main())
