"""Lossless and quantised transfer against the same budget without, on a step that the link bounds, in one run.

usage: quantised.py [--device cuda|sim] [--budget 3GiB] [--blocks 24] [--hidden 4096] [--tokens 1024] [--steps 20]
                    [--transfer lossless,int8,fp8,int4] [--ratios] [--json FILE]

--ratios: plain, lossless and auto under two budgets (--budget, twice that) with two numbers of tokens (--tokens, 16
times that), as multiples of the resident model's step.

Prints for each encoding: the step, how much faster it is than with bf16 over the link, how many fewer bytes crossed,
the time that those bytes take alone at the link's rate, and what of the step is beyond both that and the resident step:
1.00 to 1.05 means that expansion is hidden behind the copies. "equal": outputs are those of a resident model, whose
weights went through the CPU's encoder and decoder but for lossless transfer. On "sim" all runs on the CPU: a smoke
test, times there say nothing.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys

import torch
from common import NO_CARD, SIM_LINK, Stack, Where, fill, lacks_card, link_rate, spread, timed, twin_on

import stagehand
from stagehand import _core


def through(weight: torch.Tensor, encoding: str) -> torch.Tensor:
    """A bf16 weight on the host, encoded and decoded by the CPU; of lossless transfer as it is."""
    if encoding == "lossless":
        return weight
    data = weight.detach().contiguous().clone()
    segments, nbytes, _ = _core.transfer_layout([(encoding, "BF16", 0, *data.shape)], 8 << 20)
    packed = torch.zeros(nbytes, dtype=torch.uint8)
    _core.transfer_encode(segments, data.data_ptr(), packed.data_ptr())
    _core.transfer_decode(segments, packed.data_ptr(), data.data_ptr())
    return data


def step_ms(model, x, steps: int, where: Where) -> dict:
    with torch.no_grad():
        for _ in range(2):
            timed(lambda: model(x), 6, where)
        return spread(timed(lambda: model(x), steps, where))


def equal(model, plain, names, encoding, x, where: Where) -> bool:
    ref = copy.deepcopy(plain)
    params = dict(ref.named_parameters())
    with torch.no_grad():
        for name in names:
            params[name].copy_(through(params[name], encoding))
        ref = twin_on(ref, where.torch)
        return bool(torch.equal(model(x), ref(x)))


def row(plain, encoding, x, args, where: Where, link: float) -> dict:
    budget = _core.parse_size(args.budget)
    model = copy.deepcopy(plain)
    stagehand.layer(model, vram_budget=budget, inference_mode=True, device=where.target(budget), transfer=encoding)
    runtime = stagehand.runtime(model)
    found = step_ms(model, x, args.steps, where)
    stats, names = runtime.stats, list(runtime.quantised["error"])
    moved = runtime.plan["bytes_per_step"]
    found.update(encoding=encoding or "bf16", bytes_per_step=moved, resident_bytes=stats["resident_bytes"],
                 stage_bytes=stats["stage_bytes"], link_ms=moved / link * 1e3, expand_error=stats["expand_error"],
                 relative_error=max(runtime.quantised["error"].values(), default=0.0), units=len(names))
    found["equal"] = equal(model, plain, names, encoding, x, where) if encoding else True
    runtime.shutdown()
    where.clean()
    return found


def ratios(plain, args, where: Where) -> list[dict]:
    """A row for each number of tokens and budget: steps of each transfer beside the resident model's."""
    shapes = [(1, tokens, args.hidden) for tokens in (args.tokens, 16 * args.tokens)]
    inputs = [torch.randn(*shape, device=where.torch, dtype=torch.bfloat16) for shape in shapes]
    model = twin_on(plain, where.torch)
    compute = [step_ms(model, x, args.steps, where)["ms"] for x in inputs]
    with torch.no_grad():
        want = [model(x).cpu() for x in inputs]
    del model
    where.clean()
    budgets = [_core.parse_size(args.budget), 2 * _core.parse_size(args.budget)]
    rows = {(b, i): {"tokens": shapes[i][1], "budget": b, "resident_ms": compute[i]} for b in budgets for i in (0, 1)}
    for budget in budgets:
        for transfer in ("plain", "lossless", "auto"):
            model = copy.deepcopy(plain)
            stagehand.layer(model, vram_budget=budget, inference_mode=True, device=where.target(budget),
                            transfer=transfer)
            runtime = stagehand.runtime(model)
            for i, x in enumerate(inputs):
                ms = step_ms(model, x, args.steps, where)["ms"]
                with torch.no_grad():
                    equal = bool(torch.equal(model(x).cpu(), want[i]))
                rows[budget, i][transfer] = {
                    "x_resident": ms / compute[i], "equal": equal, "bytes_per_step": runtime.plan["bytes_per_step"],
                    "packed_bytes": runtime.plan["packed_bytes"], "host_bytes": runtime.quantised["host_bytes"]}
            runtime.shutdown()
            del model
            where.clean()
        for found in (rows[budget, i] for i in (0, 1)):
            print(f"{found['tokens']:>7} tokens, budget {budget / 1e9:.3f} GB, resident {found['resident_ms']:.1f} ms: "
                  + ", ".join(f"{name} {found[name]['x_resident']:.3f} x "
                              f"({found[name]['bytes_per_step'] / 1e6:.1f} MB, "
                              f"{found[name]['packed_bytes'] / 1e6:.1f} MB packed"
                              f"{'' if found[name]['equal'] else ', NOT EQUAL'})"
                              for name in ("plain", "lossless", "auto")), flush=True)
    return list(rows.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "sim"])
    parser.add_argument("--budget", default="3GiB")
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--transfer", default="lossless,int8,fp8,int4")
    parser.add_argument("--ratios", action="store_true")
    parser.add_argument("--json")
    args = parser.parse_args()
    if lacks_card(args.device):
        return NO_CARD
    where = Where(args.device)
    torch.manual_seed(0)
    plain = fill(Stack(args.blocks, args.hidden), args.hidden).requires_grad_(False)
    if args.ratios:
        rows = ratios(plain, args, where)
        if args.json:
            with open(args.json, "w") as out:
                json.dump({**where.describe(), "rows": rows}, out, indent=1)
        return 0
    x = torch.randn(1, args.tokens, args.hidden, device=where.torch, dtype=torch.bfloat16)
    link = link_rate(where) if where.cuda else SIM_LINK
    resident = twin_on(plain, where.torch)
    compute = step_ms(resident, x, args.steps, where)
    del resident
    where.clean()
    rows = [row(plain, encoding, x, args, where, link) for encoding in (None, *args.transfer.split(","))]
    for r in rows:
        r["speed"] = rows[0]["ms"] / r["ms"]
        r["fewer_bytes"] = rows[0]["bytes_per_step"] / r["bytes_per_step"]
        r["row"], r["bound"] = f"{r['encoding']} over the link", max(r["link_ms"], compute["ms"])
        r["over_bound"] = r["x_bound"] = r["ms"] / r["bound"]
        r["x_resident"] = r["ms"] / compute["ms"]

    print(f"budget {args.budget}, {args.tokens} tokens, link {link / 1e9:.1f} GB/s, resident {compute['ms']:.1f} ms")
    print(f"{'over the link':>13} {'ms':>8} {'min-max':>15} {'speed':>6} {'bytes':>6} {'link ms':>8} {'x bound':>8} "
          f"{'resident MiB':>12} {'error':>7} {'equal':>6}")
    for r in rows:
        print(f"{r['encoding']:>13} {r['ms']:>8.1f} {r['min']:>7.1f}-{r['max']:<7.1f} {r['speed']:>6.2f} "
              f"{r['fewer_bytes']:>6.2f} {r['link_ms']:>8.1f} {r['over_bound']:>8.3f} "
              f"{r['resident_bytes'] / 2**20:>12.0f} {r['relative_error']:>7.4f} {str(r['equal']):>6}")
        if r["expand_error"]:
            print(f"{'':>13} expanded on the host: {r['expand_error']}")
    if args.json:
        with open(args.json, "w") as out:
            json.dump({**where.describe(), "link": link, "resident": compute, "rows": rows}, out, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
