"""How many steps a streamed model needs to be at its best again when something changes: the length of the input, the
budget, who else is on the link. One process, one runtime; inference of equal blocks.

usage: adapt.py [--device cuda|sim] [--blocks N] [--hidden N] [--short N] [--long N] [--steps N] [--json FILE]

Of each phase: the first step, the median of the last quarter ("settled"), and how many steps it took until the median
of three in a row was within 5 % of settled. The bound is max(C, (B - V + u) / W): C the resident model's step at that
length, B bytes of weights, V budget, u the largest layer, W the rate of pinned copies. While the link is shared nobody
knows W: the runtime's own estimate says what it plans with.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import threading
from typing import NamedTuple

import common
import torch
from common import Stack, Where, fill, link_rate, nbytes, timed, twin_on

import stagehand

DEFAULTS = {
    "cuda": {"blocks": 24, "hidden": 4096, "short": 1024, "long": 16384, "steps": 24},
    "sim": {"blocks": 4, "hidden": 64, "short": 8, "long": 64, "steps": 6},
}
NEAR = 1.05  # of what it settles at


class Neighbour:
    """Copies of its own to the device, back to back, in a thread: as a process that loads a model beside ours."""

    def __init__(self, where: Where) -> None:
        self.cuda, self.copied = where.cuda, 0
        self._end = threading.Event()

    def _run(self) -> None:
        host = torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)
        device, stream = torch.empty_like(host, device="cuda"), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            while not self._end.is_set():
                device.copy_(host, non_blocking=True)
                stream.synchronize()
                self.copied += host.numel()

    @contextlib.contextmanager
    def at_work(self):
        if not self.cuda:
            yield
            return
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield
        finally:
            self._end.set()
            thread.join()


def settled(times: list[float]) -> dict:
    """Where a phase's steps settle, and how many came before."""
    last = statistics.median(times[-max(3, len(times) // 4):])
    threes = [statistics.median(times[i:i + 3]) for i in range(len(times) - 2)]
    after = next((i for i, three in enumerate(threes) if abs(three / last - 1) <= NEAR - 1), len(times))
    return {"first": times[0], "ms": last, "after": after, "min": min(times), "max": max(times)}


class Resident(NamedTuple):
    """The model, inputs by number of tokens, and what the model takes and gives where all of it is on the device."""

    model: torch.nn.Module
    inputs: dict[int, torch.Tensor]
    ms: dict[int, float]
    want: dict[int, torch.Tensor]
    weights: int  # bytes
    largest: int  # bytes of the largest layer
    rate: float  # of pinned copies, bytes/s


def resident(args, where: Where, record: dict) -> Resident:
    torch.manual_seed(0)
    model = fill(Stack(args.blocks, args.hidden), args.hidden).requires_grad_(False)
    inputs = {tokens: torch.randn(1, tokens, args.hidden, dtype=torch.bfloat16).to(where.torch)
              for tokens in (args.short, args.long)}
    weights, largest, rate = nbytes(model.parameters()), max(nbytes([p]) for p in model.parameters()), link_rate(where)
    with torch.no_grad():
        twin = twin_on(model, where.torch)
        ms = {tokens: statistics.median(timed(lambda x=x: twin(x), 8, where)[2:]) for tokens, x in inputs.items()}
        want = {tokens: twin(x) for tokens, x in inputs.items()}
        del twin
    where.clean()
    record.update(weights=weights, link_gb_s=rate / 1e9, resident_ms=ms)
    return Resident(model, inputs, ms, want, weights, largest, rate)


def against_bound(row: dict, base: Resident, tokens: int, budget: int) -> None:
    row["bound"] = max(base.ms[tokens], max(0, base.weights - budget + base.largest) / base.rate * 1e3)
    row["x_bound"] = row["ms"] / row["bound"]


def run(args, where: Where, record: dict) -> list[dict]:
    base = resident(args, where, record)
    model, inputs = base.model, base.inputs
    small, large = int(0.3 * base.weights), int(0.6 * base.weights)
    stagehand.layer(model, vram_budget=small, inference_mode=True, device=where.target(large))
    runtime = stagehand.runtime(model)
    rows: list[dict] = []

    def phase(name: str, tokens: int, budget: int, shared: bool = False) -> None:
        neighbour = Neighbour(where)
        with torch.no_grad(), neighbour.at_work() if shared else contextlib.nullcontext():
            runtime.set_vram_budget(budget)
            before = runtime.stats["replans"]
            times = timed(lambda: model(inputs[tokens]), args.steps, where)
            row = {"row": name, **settled(times), "replans": runtime.stats["replans"] - before, "times": times,
                   "predicted": runtime.plan["step_ns"] / 1e6, "link": runtime.stats["link_bytes_per_s"] / 1e9,
                   "equal": bool(torch.equal(model(inputs[tokens]), base.want[tokens]))}
        if not shared:
            against_bound(row, base, tokens, budget)
        rows.append(row)
        print(f"  {name}: {row['ms']:.1f} ms", file=sys.stderr, flush=True)

    try:
        phase(f"{args.short} tokens, 30 %", args.short, small)
        phase(f"{args.long} tokens", args.long, small)
        phase(f"{args.short} tokens again", args.short, small)
        phase("budget 60 %", args.short, large)
        phase("budget 30 % again", args.short, small)
        phase("the link shared", args.short, small, shared=True)
        phase("the link alone again", args.short, small)
    finally:
        runtime.shutdown()
    print(f"{args.blocks} blocks of hidden size {args.hidden}, {base.weights / 1e9:.2f} GB of weights; link "
          f"{base.rate / 1e9:.1f} GB/s; {args.steps} steps of each, the runtime is told of nothing but the budget")
    return rows


COLUMNS = [("what changed", "row", ""), ("first ms", "first", ".1f"), ("settled", "ms", ".1f"),
           ("after steps", "after", "d"), ("bound", "bound", ".1f"), ("x bound", "x_bound", ".3f"),
           ("predicted", "predicted", ".1f"), ("plans", "replans", "d"), ("link GB/s", "link", ".1f"),
           ("equal", "equal", "")]


def main() -> int:
    return common.main(common.parse(__doc__, DEFAULTS), run, COLUMNS, lambda row: {**row, "equal": str(row["equal"])})


if __name__ == "__main__":
    sys.exit(main())
