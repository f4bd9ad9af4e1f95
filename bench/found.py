"""No budget given: what the runtime finds, with a neighbour process on the card that leaves little, takes more, and
gives back; with inputs that grow. Inference of equal blocks in one process.

usage: found.py [--device cuda|sim] [--blocks N] [--hidden N] [--short N] [--long N] [--steps N] [--left GB]
                [--json FILE]

left: GB of the card that the neighbour leaves at first. The bound of a phase is max(C, (B - V + u) / W) for the budget
V that was found by its end: C the resident model's step, B bytes of weights, u the largest layer, W the rate of pinned
copies.
On the simulated device there is no neighbour.
"""

from __future__ import annotations

import subprocess
import sys

import common
import torch
from adapt import against_bound, resident, settled
from common import Where, timed

import stagehand

DEFAULTS = {
    "cuda": {"blocks": 24, "hidden": 4096, "short": 1024, "long": 16384, "steps": 24, "left": 8.0},
    "sim": {"blocks": 4, "hidden": 64, "short": 8, "long": 64, "steps": 6, "left": 0.0},
}
PIECE = 256 << 20
NEIGHBOUR = """
import sys, torch
held = []
for line in sys.stdin:
    pieces, size = map(int, line.split())
    for _ in range(pieces):
        held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    for _ in range(-pieces):
        held.pop()
    if pieces < 0:
        torch.cuda.empty_cache()
    torch.cuda.synchronize()
    print(len(held), flush=True)
"""


class Neighbour:
    """A process that takes memory of the card in pieces, and gives it back."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", NEIGHBOUR], stdin=subprocess.PIPE,
                                         stdout=subprocess.PIPE, text=True)
        self._ask(0, 1)  # it has begun

    def _ask(self, pieces: int, size: int) -> None:
        self._process.stdin.write(f"{pieces} {size}\n")
        self._process.stdin.flush()
        if not self._process.stdout.readline():
            raise RuntimeError("the neighbour process ended: it had no room")

    def take(self, pieces: int) -> None:
        """Gives back when negative."""
        self._ask(pieces, PIECE)

    def leave(self, left: int) -> None:
        """Takes all but so much."""
        self.take(max(0, (torch.cuda.mem_get_info()[0] - left) // PIECE))

    def end(self) -> None:
        self._process.stdin.close()
        self._process.wait()


def run(args, where: Where, record: dict) -> list[dict]:
    base = resident(args, where, record)
    model, inputs = base.model, base.inputs
    neighbour = Neighbour() if where.cuda else None
    if neighbour:
        neighbour.leave(int(args.left * 1e9))
    stagehand.layer(model, inference_mode=True, device=where.target(2 * base.weights))
    runtime = stagehand.runtime(model)
    rows: list[dict] = []

    def phase(name: str, tokens: int, pieces: int = 0) -> None:
        """pieces: that the neighbour takes one by one between steps, or gives back at once."""
        times = []
        with torch.no_grad():
            if neighbour and pieces < 0:
                neighbour.take(pieces)
            for i in range(args.steps):
                if neighbour and i < pieces:
                    neighbour.take(1)
                times += timed(lambda: model(inputs[tokens]), 1, where)
            equal = bool(torch.equal(model(inputs[tokens]), base.want[tokens]))
        found = runtime.stats["budget_found"]
        row = {"row": name, **settled(times), "times": times, "found": found, "budget": runtime.stats["budget"],
               "free": torch.cuda.mem_get_info()[0] if where.cuda else 0, "equal": equal}
        against_bound(row, base, tokens, row["budget"])
        rows.append(row)
        print(f"  {name}: {row['ms']:.1f} ms, {row['budget'] / 1e9:.2f} GB", file=sys.stderr, flush=True)

    try:
        phase(f"{args.short} tokens", args.short)
        phase(f"{args.long} tokens", args.long)
        phase(f"{args.short} tokens again", args.short)
        if neighbour:
            phase("the neighbour takes 2 GiB", args.short, pieces=8)
            phase("the neighbour gives back 4 GiB", args.short, pieces=-16)
    finally:
        runtime.shutdown()
        if neighbour:
            neighbour.end()
    print(f"{args.blocks} blocks of hidden size {args.hidden}, {base.weights / 1e9:.2f} GB of weights, no budget given;"
          f" link {base.rate / 1e9:.1f} GB/s; {args.steps} steps of each, one after the other to its end")
    return rows


COLUMNS = [("what changed", "row", ""), ("budget GB", "budget_gb", ".2f"), ("free GB", "free_gb", ".2f"),
           ("why", "why", ""), ("first ms", "first", ".1f"), ("settled", "ms", ".1f"), ("after steps", "after", "d"),
           ("bound", "bound", ".1f"), ("x bound", "x_bound", ".3f"), ("equal", "equal", "")]


def readable(row: dict) -> dict:
    return {**row, "equal": str(row["equal"]), "budget_gb": row["budget"] / 1e9, "free_gb": row["free"] / 1e9,
            "why": str((row["found"] or {}).get("why"))}


def main() -> int:
    return common.main(common.parse(__doc__, DEFAULTS), run, COLUMNS, readable)


if __name__ == "__main__":
    sys.exit(main())
