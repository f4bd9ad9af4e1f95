"""What the conductor costs where memory suffices: a LoRA step with streamed weights and an activation runtime, with it
and without it, in one run.

usage: conductor.py [--device cuda|sim] [--blocks N] [--hidden N] [--tokens N] [--steps N] [--quads N] [--json FILE]

Its caps are far away: it has nothing to refuse, and takes part in every copy and phase. Legs of `steps` steps, after
one that is not timed, in the order off, on, on, off, `quads` times; a leg counts with its median. `x off` is the median
over quads of (on + on) / (off + off), `from` and `to` the least and the largest; `spread` the largest |off / off - 1|
within a quad: what two legs without it differ by. Rows: all weights stay on the device; they stream; they stream, and
activations above half of the peak before are spilled (nothing is computed again). On "sim" times say nothing.
"""

from __future__ import annotations

import statistics
import sys

import common
from common import Where, nbytes, timed
from loops import Loop, adamw, agreement, attempt, batch, lora_model, streamed

from stagehand.activation import ActivationRuntime, ActivationStagehandConfig
from stagehand.conductor import ConductorConfig, ConductorRuntime

DEFAULTS = {
    "cuda": {"blocks": 6, "hidden": 4096, "tokens": 4096, "steps": 3, "quads": 3},
    "sim": {"blocks": 4, "hidden": 64, "tokens": 64, "steps": 2, "quads": 2},
}
FAR = 1 << 20  # MiB
WARM = 4


def activations(runtime, high: int) -> ActivationRuntime:
    """high: bytes in use above which it spills."""
    config = ActivationStagehandConfig(enabled=True, slabs_per_class=None, max_inflight_d2h=4, max_inflight_h2d=4,
                                       recompute_cheap=False)
    return ActivationRuntime(config, runtime.session.target.core, smallest=1024, high=high, low=high - high // 8)


def compared(loop: Loop, runtime, spills: ActivationRuntime, where: Where, steps: int, quads: int) -> dict:
    conductor, number = ConductorRuntime(), 0

    def step() -> None:
        nonlocal number
        conductor.begin_step(number)
        conductor.enter_forward()
        with spills.managed_forward():
            loss = loop.loss()
            loss.backward()
        conductor.enter_optimizer()
        loop.optimizer.step()
        loop.clear()
        conductor.end_step()
        number += 1

    def leg(on: bool) -> float:
        nonlocal conductor
        conductor = ConductorRuntime(ConductorConfig(enabled=on, vram_soft_cap_mb=FAR, vram_hard_cap_mb=FAR))
        with conductor:
            conductor.attach(runtime)
            conductor.attach(spills)
            timed(step, 1, where)
            found = statistics.median(timed(step, steps, where))
            if on:
                stats = conductor.core.stats()
                flights.append(stats["flights"] / (steps + 1))
        return found

    flights: list[float] = []
    timed(step, WARM, where)
    where.reset_peak()
    quad = [[leg(on) for on in (False, True, True, False)] for _ in range(quads)]
    ratio = sorted((on1 + on2) / (off1 + off2) for off1, on1, on2, off2 in quad)
    off = [ms for q in quad for ms in (q[0], q[3])]
    return {"ms": statistics.median(off), "on_ms": statistics.median(ms for q in quad for ms in q[1:3]),
            "x_off": statistics.median(ratio), "x_low": ratio[0], "x_high": ratio[-1],
            "spread": max(abs(q[3] / q[0] - 1) for q in quad), "flights": statistics.mean(flights),
            "peak": where.peak()}


def run(args, where: Where, record: dict) -> list[dict]:
    rows: list[dict] = []
    x = batch(args, where)
    model = lora_model(args, checkpointed=False)
    total = nbytes(model.parameters())
    want: list = []
    highest = 0

    def one(budget: int, high: int) -> dict:
        nonlocal highest
        with streamed(model, f"{budget}B", where) as runtime, activations(runtime, high) as spills:
            loop = Loop(model, x, adamw, spills.managed_forward)
            first = loop.gradients()
            want.extend([] if want else first)
            before, stats = spills.stats, runtime.stats
            row = {**compared(loop, runtime, spills, where, args.steps, args.quads), **agreement(first, want, where)}
            count = WARM + 4 * args.quads * (args.steps + 1)
            row["out"] = (spills.stats["spill_bytes"] - before["spill_bytes"]) / count
            row["h2d"] = (runtime.stats["h2d_bytes"] - stats["h2d_bytes"]) / count
            highest = max(highest, row["peak"], spills.stats["peak_bytes"])
            return row

    far = 1 << 40
    room = total + (1 << 20)
    tight = total // 2
    attempt("all stays", rows, lambda: one(room, far))
    attempt("weights stream", rows, lambda: one(tight, far))
    attempt("weights stream, spills", rows, lambda: one(tight, max(highest // 2, 1)))
    print(f"{total / 1e9:.2f} GB of weights, {args.tokens} tokens; budgets {room / 1e9:.2f} and {tight / 1e9:.2f} GB")
    return rows


COLUMNS = [
    ("run", "row", ""), ("off ms", "ms", ".1f"), ("on ms", "on_ms", ".1f"), ("x off", "x_off", ".4f"),
    ("from", "x_low", ".4f"), ("to", "x_high", ".4f"), ("spread", "spread", ".4f"), ("flights", "flights", ".0f"),
    ("up GB", "up_gb", ".3f"), ("out GB", "out_gb", ".3f"), ("peak GB", "peak_gb", ".3f"),
    ("grad norm", "grad_norm", ".1e"), ("grad max", "grad_max", ".1e"),
]


def readable(row: dict) -> dict:
    named = {"peak_gb": "peak", "out_gb": "out", "up_gb": "h2d"}
    return {**row, **{key: row[of] / 1e9 for key, of in named.items() if of in row}}


def main() -> int:
    return common.main(common.parse(__doc__, DEFAULTS), run, COLUMNS, readable)


if __name__ == "__main__":
    sys.exit(main())
