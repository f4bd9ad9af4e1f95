"""Files in few bits against the same weights in bf16, with the file's bytes in RAM, on a step that the link bounds.

usage: packed.py [--device cuda|sim] [--blocks 2] [--hidden 4096] [--tokens 64] [--steps 20]
                 [--formats bf16,v2,v3-int4] [--json FILE]

Writes the weights (bf16) to a temporary folder, packs them, and streams each file under a budget of half of
its bf16 bytes with ram_budget= as large as the file: no disk in any step. The bound is max(C, the bytes of
the plan over the link): what is beyond it is expansion that is not hidden. "equal": outputs are those of a
resident model with the values that the file decodes to.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time

import common
import torch
from common import SIM_LINK, Stack, Where, link_rate, spread, timed
from disk import stack_shapes, write

import stagehand
from stagehand import _core

DEFAULTS = {"cuda": {"blocks": 2, "hidden": 4096, "tokens": 64, "steps": 20, "formats": "bf16,v2,v3-int4"},
            "sim": {"blocks": 2, "hidden": 1024, "tokens": 4, "steps": 2, "formats": "bf16,v2,v3-int4"}}
COLUMNS = [("file", "row", ""), ("pack s", "pack_s", ".1f"), ("ms", "ms", ".2f"), ("min", "min", ".2f"),
           ("max", "max", ".2f"), ("MB a step", "mb", ".1f"), ("link ms", "link_ms", ".2f"),
           ("x bound", "x_bound", ".3f"), ("predicted", "predicted", ".2f"), ("speed", "speed", ".2f"),
           ("equal", "equal", "")]


def packed(source: str, form: str, folder: str) -> str:
    """The file, or folder, in that format."""
    if form == "bf16":
        return source
    path = os.path.join(folder, form + (".safetensors" if form == "v2" else ""))
    _core.pack(source, path, form)
    return path


def resident(values: dict, x, args, where: Where) -> tuple:
    """Output, and the milliseconds of a step, of the model with these weights on the device."""
    model = Stack(args.blocks, args.hidden)
    model.load_state_dict(values, assign=True)
    model = model.to(where.torch).requires_grad_(False)
    with torch.no_grad():
        timed(lambda: model(x), 6, where)
        return model(x), spread(timed(lambda: model(x), args.steps, where))["ms"]


def row(source: str, form: str, x, args, where: Where, weights: int, link: float, folder: str) -> dict:
    begin = time.perf_counter()
    path = packed(source, form, folder)
    pack_s, budget = time.perf_counter() - begin, weights // 2
    model = stagehand.load(lambda: Stack(args.blocks, args.hidden), path, vram_budget=budget, ram_budget=2 * weights,
                           device=where.target(budget))
    runtime = stagehand.runtime(model)
    with torch.no_grad():
        for _ in range(2):
            timed(lambda: model(x), 6, where)
        found = spread(timed(lambda: model(x), args.steps, where))
        out = model(x)
    moved, stats = runtime.plan["bytes_per_step"], runtime.stats
    want, compute = resident({name: value.clone() for name, value in model.state_dict().items()}, x, args, where)
    found.update(row=form, pack_s=pack_s, mb=moved / 1e6, link_ms=moved / link * 1e3,
                 predicted=runtime.plan["step_ns"] / 1e6, bound=max(compute, moved / link * 1e3),
                 equal=bool(torch.equal(out, want)), decoded_bytes=runtime.quantised.get("host_bytes", 0),
                 expand_error=stats["expand_error"])
    found["x_bound"] = found["ms"] / found["bound"]
    runtime.shutdown()
    where.clean()
    return found


def run(args, where: Where, record: dict) -> list[dict]:
    torch.manual_seed(0)
    link = record["link"] = link_rate(where) if where.cuda else float(SIM_LINK)
    x = (torch.randn(1, args.tokens, args.hidden) * 0.5).to(torch.bfloat16).to(where.torch)
    with tempfile.TemporaryDirectory() as folder:
        source = os.path.join(folder, "weights.safetensors")
        weights = record["weights"] = write(source, stack_shapes(args.blocks, args.hidden))
        rows = [row(source, form, x, args, where, weights, link, folder) for form in args.formats.split(",")]
    for found in rows:
        found["speed"] = rows[0]["ms"] / found["ms"]
    return rows


def main() -> int:
    return common.main(common.parse(__doc__, DEFAULTS), run, COLUMNS, dict)


if __name__ == "__main__":
    sys.exit(main())
