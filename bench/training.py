"""Streamed training against the same model resident, and against the bound, in one run.

usage: training.py --case lora|full|micro|steps [--check] [--device cuda|sim] [--budget B,B,...]
                   [--blocks N] [--hidden N] [--tokens N] [--steps N] [--micro M] [--no-peers]
                   [--trace FILE] [--json FILE]

lora    adapters of rank 16 on a frozen bf16 model, blocks checkpointed, AdamW. The bound is max(C, 2 (B - V) / W):
        C resident step, B bytes of base weights, V budget, W the pinned copy rate. C of a row is timed in turns with
        it.
full    all weights are trained; the optimizer runs on the host. The bound is max(C, link, A) where it works while
        backward goes on, and max(C, link) + A where it comes after: C resident forward and backward;
        link = min(H, D) / Wb + |H - D| / W for H = B + (B - V) bytes up, since each step writes all weights, and D = B
        bytes of gradients down, with Wb the rate in each direction while both run; A = the optimizer's bytes a
        parameter over the rate of host memory: 28 with float32 masters and moments, 14 where all is bf16. On a card
        one step whose optimizer overlaps is traced, and what it was doing when is printed; --trace keeps the Chrome
        trace.
micro   M micro-batches of the LoRA model in block-major order against M passes, with and without gradients. Their
        bounds are max(C, n (B - V + u) / W) and max(C, 2 n (B - V) / W): C the resident M passes, u the largest layer,
        n = 1 in block-major order and M otherwise.
steps   many steps of a small LoRA: what grows between step 20 and the last, and the loss against the resident run's.
--check prints only how gradients (lora, full) agree with the resident run's.

Rates are measured in the same run. On CUDA the card must hold the whole model, for the resident run.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from common import (
    NO_CARD, Where, both_ways_rate, lacks_card, link_rate, memory_rate, nbytes, rss, spread, table, timed, twin_on)
from loops import (
    Counted, Loop, adamw, agreement, attempt, batch, full_model, in_turns, lora_model, measured, ratios, streamed,
    worst)
from peers import PEERS
from timeline import traced

import stagehand

RATE = 1e-4  # of learning, in many steps
# A parameter's bytes in an update: moments and weight read and written, bf16 gradient read; with a float32 master, as
# are the moments then, the bf16 weight written, too.
WITH_MASTER, ALL_BF16 = 28, 14
DEFAULTS = {  # blocks, hidden, tokens, steps, budgets
    "lora": (12, 4096, 4096, 20, "3GB,3072MiB,1200MiB"),
    "full": (12, 4096, 4096, 6, "3GB"),
    "micro": (12, 4096, 512, 6, "1200MiB"),
    "steps": (8, 1024, 1024, 200, "40MB"),
}
SIM_DEFAULTS = {  # smoke test
    "lora": (4, 64, 32, 3, "340KB,300KB"),
    "full": (4, 64, 32, 2, "300KB"),
    "micro": (4, 64, 16, 2, "300KB"),
    "steps": (3, 64, 16, 30, "200KB"),
}


# ---------------------------------------------------------------------- LoRA


def lora(args, where: Where, record: dict) -> list[dict]:
    rows: list[dict] = []
    model, x = lora_model(args), batch(args, where)
    weights = nbytes(p for p in model.parameters() if not p.requires_grad)
    rate = link_rate(where)
    record.update(weights=weights, link_gb_s=rate / 1e9, adapters=nbytes(model.parameters()) - weights)

    twin = Loop(twin_on(model, where.torch), x, adamw)

    def resident() -> dict:
        record["want"] = first = twin.gradients()
        row = agreement(twin.gradients(), first, where)
        if not args.check:
            row.update(measured(twin, where, args.steps, 3))
            record["activations"] = row["peak"] - row["rest"]
            row["x_resident"] = 1.0
        return row

    base = attempt("resident", rows, resident)
    want = record.pop("want", None)

    def ours(budget: str) -> dict:
        nonlocal want
        begin = time.perf_counter()
        with streamed(model, budget, where) as runtime:
            row = {"setup_s": time.perf_counter() - begin}
            loop = Loop(model, x, adamw)
            if want is None:
                want = loop.gradients()
            row.update(worst(agreement(loop.gradients(), want, where) for _ in range(4)))
            if args.check:
                return row
            timed(loop.step, 10, where)
            counted = Counted(runtime, where)
            row.update(measured(loop, where, args.steps, 0))
            row.update(counted.per_step(args.steps))
            row.update(worst([row, agreement(loop.gradients(), want, where)]))
            beside = nbytes(twin.model.parameters()) + twin.state_bytes(where) - nbytes([x]) if where.cuda else 0
            row["peak"] -= beside
            row["taken"] = where.taken() - beside
            if where.cuda and base:
                # The ring is mapped outside torch's allocator; the rest of the places is inside.
                row["model_vram"] = (row["peak"] + row["plan"]["ring_bytes"] - loop.state_bytes(where)
                                     - record["activations"])
            other, mine = in_turns((twin.step, loop.step), args.steps, where)
            row.update(mine, resident_in_turns=other["ms"])
            link_ms = max(0, 2 * (weights - stagehand.parse_size(budget))) / rate * 1e3
            row["bound"] = max(other["ms"], link_ms)
            row["x_resident"], row["x_bound"] = row["ms"] / other["ms"], row["ms"] / row["bound"]
            return row

    for budget in args.budget.split(","):
        attempt(f"ours, {budget}", rows, lambda budget=budget: ours(budget))
    twin = None
    where.clean()

    def peer(prepare) -> dict:
        other = lora_model(args)
        begin = time.perf_counter()
        row = {"version": prepare(other), "setup_s": time.perf_counter() - begin}
        loop = Loop(other, x, adamw)
        loop.step()
        row.update(agreement(loop.gradients(), want, where))
        row.update(measured(loop, where, 4, 1))  # some take seconds a step
        return ratios(row, base)

    if where.cuda and not args.check and not args.no_peers:
        for name, prepare in PEERS.items():
            attempt(name, rows, lambda prepare=prepare: peer(prepare))
            where.clean()
    print(f"{weights / 1e9:.2f} GB of base weights, {record['adapters'] / 1e6:.1f} MB of adapters, "
          f"{args.tokens} tokens, link {rate / 1e9:.1f} GB/s; gradients: largest relative differences of norms and "
          "elements from the resident run's, which is compared with itself")
    return rows


# ---------------------------------------------------------------------- full fine-tuning


def parts(loop: Loop, where: Where, steps: int, warm: int = 1, overlap: bool = False) -> dict:
    """Medians of forward and backward, of the optimizer, and of both, by the host's clock with the device idle at
    each border. overlap: the optimizer works inside backward, so that only the whole is known."""
    spent: list[tuple[float, float]] = []
    for i in range(warm + steps):
        if i == warm:
            where.reset_peak()
        where.synchronize()
        begin = time.perf_counter()
        loss = loop.loss()
        with loop.optimizer.last_backward() if overlap else contextlib.nullcontext():
            loss.backward()
        del loss
        where.synchronize()
        middle = time.perf_counter()
        loop.optimizer.step()
        where.synchronize()
        spent.append(((middle - begin) * 1e3, (time.perf_counter() - middle) * 1e3))
        loop.clear()
    spent = spent[warm:]
    row = {**spread([a + b for a, b in spent]), "peak": where.peak()}
    row["forward_backward"] = spread([a for a, _ in spent])["ms"]
    row["optimizer"] = spread([b for _, b in spent])["ms"]
    return row


def offloaded(params):
    from stagehand.optim import OffloadedAdamW

    return OffloadedAdamW(params, lr=0.0)


def offloaded_bf16(params):
    """What torch's AdamW keeps for bf16 weights."""
    from stagehand.optim import OffloadedAdamW

    return OffloadedAdamW(params, lr=0.0, master_dtype=None, state_dtype=None)


class Way(NamedTuple):
    """An optimizer on the host, and when it works."""

    name: str
    make: Callable
    overlap: bool
    bytes: int  # a parameter
    warm: int = 4  # steps: orders are learnt, plans change


WAYS = (
    Way("OffloadedAdamW overlapped", offloaded, True, WITH_MASTER),
    Way("OffloadedAdamW after backward", offloaded, False, WITH_MASTER),
    Way("OffloadedAdamW overlapped, all bf16", offloaded_bf16, True, ALL_BF16),
    Way("OffloadedAdamW after backward, all bf16", offloaded_bf16, False, ALL_BF16),
    Way("torch AdamW on the CPU, foreach", lambda params: torch.optim.AdamW(params, lr=0.0, foreach=True), False,
        ALL_BF16, 1),
    Way("torch AdamW on the CPU, fused", lambda params: torch.optim.AdamW(params, lr=0.0, fused=True), False,
        ALL_BF16, 1),
)


def full(args, where: Where, record: dict) -> list[dict]:
    rows: list[dict] = []
    model, x = full_model(args), batch(args, where)
    weights, count = nbytes(model.parameters()), sum(p.numel() for p in model.parameters())
    rate, both = link_rate(where), both_ways_rate(where)
    memory = memory_rate(1 << (30 if where.cuda else 24))
    record.update(weights=weights, parameters=count, link_gb_s=rate / 1e9, both_ways_gb_s=both / 1e9,
                  memory_gb_s=memory / 1e9)
    want = None

    def resident() -> dict:
        nonlocal want
        loop = Loop(twin_on(model, where.torch), x, None if args.check else adamw)
        want = loop.gradients()
        row = agreement(loop.gradients(), want, where)
        if not args.check:
            row.update(parts(loop, where, args.steps, 2), x_resident=1.0)
        return row

    base = attempt("resident", rows, resident)
    where.clean()

    def bound(budget: str, way: Way) -> float:
        up, down = weights + max(0, weights - stagehand.parse_size(budget)), weights
        link = min(up, down) / both + abs(up - down) / rate
        pass_ms = max(base["forward_backward"] if base else 0.0, link * 1e3)
        host_ms = way.bytes * count / memory * 1e3
        return max(pass_ms, host_ms) if way.overlap else pass_ms + host_ms

    def agrees(loop: Loop, times: int) -> dict:
        return worst(agreement(loop.gradients(), want, where) for _ in range(times)) if want is not None else {}

    def check(budget: str) -> dict:
        with streamed(model, budget, where):
            return agrees(Loop(model, x), 4)  # more than once: orders are learnt, plans change

    def ours(budget: str, way: Way) -> dict:
        with streamed(model, budget, where) as runtime:
            loop = Loop(model, x, way.make)
            row = agrees(loop, 1)
            parts(loop, where, 1, way.warm, way.overlap)
            counted = Counted(runtime, where)
            row.update(parts(loop, where, args.steps, 0, way.overlap))
            row.update(counted.per_step(args.steps))
            if way.overlap:  # what happened where is not known
                row["forward_backward"] = row["optimizer"] = None
            row["bound"] = bound(budget, way)
            if where.cuda and way is WAYS[0] and "phases" not in record:  # of the first budget
                with tempfile.TemporaryDirectory() as folder:
                    path = args.trace or os.path.join(folder, "trace.json")
                    record.update(traced(lambda: parts(loop, where, 1, 0, True), path, threads="sth-adamw"))
            return ratios(row, base)

    for budget in args.budget.split(","):
        if args.check:
            attempt(f"ours, {budget}", rows, lambda budget=budget: check(budget))
            continue
        for way in WAYS:
            attempt(f"ours, {budget}, {way.name}", rows, lambda budget=budget, way=way: ours(budget, way))
    print(f"{weights / 1e9:.2f} GB of weights, {args.tokens} tokens; link {rate / 1e9:.1f} GB/s, both ways "
          f"{both / 1e9:.1f} each; host memory {memory / 1e9:.1f} GB/s (the best of a copy and a change in place by "
          f"{torch.get_num_threads()} threads, read + written). torch's AdamW keeps its state in the dtype of the "
          "weights, bf16")
    if "phases" in record:
        print("a step whose optimizer overlaps, under the profiler:")
        table(PHASES, [{**phase, "kernels": 100 * phase["kernels"]} for phase in record["phases"]])
    return rows


# ---------------------------------------------------------------------- micro-batches


def loss_of(y) -> torch.Tensor:
    return y.float().pow(2).mean()


class Batches:
    """Ways to run m micro-batches through a model; each returns nothing."""

    def __init__(self, model, inputs: list) -> None:
        self.model = model
        self.inputs = inputs
        self.trained = [p for p in model.parameters() if p.requires_grad]

    def clear(self) -> None:
        for param in self.trained:
            param.grad = None

    def infer_passes(self) -> None:
        with torch.no_grad():
            for x in self.inputs:
                self.model(x)

    def infer_together(self) -> None:
        with torch.no_grad():
            stagehand.block_major(self.model, self.model.blocks, self.inputs)

    def train_passes(self) -> None:
        self.clear()
        for x in self.inputs:
            loss_of(self.model(x)).backward()

    def train_together(self) -> None:
        self.clear()
        torch.autograd.backward(stagehand.block_major(self.model, [*self.model.blocks, loss_of], self.inputs))

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad.to("cpu", copy=True) for p in self.trained]


def micro(args, where: Where, record: dict) -> list[dict]:
    rows: list[dict] = []
    budget = args.budget.split(",")[0]
    model = lora_model(args)
    base = [p for p in model.parameters() if not p.requires_grad]
    weights, largest, rate = nbytes(base), max(nbytes([p]) for p in base), link_rate(where)
    room = max(0, weights - stagehand.parse_size(budget))
    record.update(weights=weights, link_gb_s=rate / 1e9)
    torch.manual_seed(1)
    inputs = [torch.randn(1, args.tokens, args.hidden, dtype=torch.bfloat16).to(where.torch) for _ in range(args.micro)]
    want = None
    resident: dict[str, dict | None] = {}

    def run(batches: Batches, kind: str, how: str, runtime=None) -> dict:
        nonlocal want
        step = getattr(batches, f"{kind}_{how}")
        timed(step, 6 if runtime else 2, where)
        counted = Counted(runtime, where) if runtime else None
        where.reset_peak()
        row = {**spread(timed(step, args.steps, where)), "peak": where.peak()}
        if counted:
            row.update(counted.per_step(args.steps))
            passes = 1 if how == "together" else args.micro
            row["predicted"] *= passes  # a plan is of one step
            link_ms = passes * (room + largest if kind == "infer" else 2 * room) / rate * 1e3
            row["bound"] = max(resident[kind]["ms"] if resident[kind] else 0.0, link_ms)
        if kind == "train":
            found = batches.gradients()
            if want is None:
                want = found
            row.update(agreement(found, want, where))
            batches.clear()
        return ratios(row, resident.get(kind))

    twin = Batches(twin_on(model, where.torch), inputs)
    for kind in ("infer", "train"):
        resident[kind] = attempt(f"{kind}, resident, passes", rows, lambda kind=kind: run(twin, kind, "passes"))
    twin = None
    where.clean()
    with streamed(model, budget, where) as runtime:
        for kind in ("infer", "train"):
            for how, words in (("passes", "passes"), ("together", "block-major")):
                attempt(f"{kind}, ours, {words}", rows,
                        lambda kind=kind, how=how: run(Batches(model, inputs), kind, how, runtime))
    print(f"{args.micro} micro-batches of {args.tokens} tokens, {weights / 1e9:.2f} GB of base weights in {budget}, "
          f"link {rate / 1e9:.1f} GB/s; times and bytes are those of all micro-batches")
    return rows


# ---------------------------------------------------------------------- many steps


def resources(where: Where) -> dict:
    gc.collect()
    where.synchronize()
    return {"vram": where.allocated(), "taken": where.taken(), "rss": rss()["VmRSS"],
            "files": len(os.listdir("/proc/self/fd")), "threads": len(os.listdir("/proc/self/task")),
            "objects": len(gc.get_objects())}


def many_steps(args, where: Where, record: dict) -> list[dict]:
    budget = args.budget.split(",")[0]
    model, x = lora_model(args), batch(args, where)

    def run(model) -> tuple[list[float], dict]:
        loop = Loop(model, x, lambda params: torch.optim.AdamW(params, lr=RATE))
        losses, begin, first = [], time.perf_counter(), None
        for i in range(args.steps):
            losses.append(loop.step().item())
            if i + 1 == 20:
                first = resources(where)
        last = resources(where)
        row = {"ms": (time.perf_counter() - begin) * 1e3 / args.steps, "losses": losses, "first": losses[0],
               "last": losses[-1]}
        return row | {f"+{key}": last[key] - first[key] for key in first}

    rows: list[dict] = []
    base = None

    def compared(row: dict) -> dict:
        if base:
            row["loss_difference"] = max(abs(a - b) / abs(b) for a, b in zip(row["losses"], base["losses"]))
        return row

    def resident() -> dict:
        return compared(run(twin_on(model, where.torch)))

    base = attempt("resident", rows, resident)
    where.clean()
    attempt("resident again", rows, resident)  # attention's backward is not deterministic on a GPU
    where.clean()

    def ours() -> dict:
        with streamed(model, budget, where) as runtime:
            row = run(model)
            row["replans"] = runtime.stats["replans"]
        return compared(row)

    attempt(f"ours, {budget}", rows, ours)
    print(f"{args.steps} steps of AdamW at {RATE:g}, {args.blocks} blocks of hidden size {args.hidden}, "
          f"{args.tokens} tokens; growth is from step 20 to the last; vram is torch's count, taken the card's")
    return rows


# ---------------------------------------------------------------------- printing

TIMES = [("row", "row", ""), ("ms", "ms", ".1f"), ("min", "min", ".1f"), ("max", "max", ".1f"),
         ("x resid.", "x_resident", ".3f"), ("bound", "bound", ".1f"), ("x bound", "x_bound", ".3f")]
MOVED = [("predicted", "predicted", ".1f"), ("up MB/step", "h2d_mb", ".0f"), ("down MB/step", "d2h_mb", ".0f"),
         ("waits", "waits", ".1f"), ("peak MiB", "peak_mib", ".0f")]
AGREE = [("grad norm", "grad_norm", ".1e"), ("grad max", "grad_max", ".1e")]
COLUMNS = {
    "lora": (TIMES + [("resident in turns", "resident_in_turns", ".1f")] + MOVED + [("model MiB", "model_mib", ".0f")]
             + AGREE + [("version", "version", "")]),
    "full": TIMES + [("fwd+bwd", "forward_backward", ".1f"), ("optim.", "optimizer", ".1f")] + MOVED + AGREE,
    "steps": [("row", "row", ""), ("ms", "ms", ".2f"), ("first loss", "first", ".6f"), ("last loss", "last", ".6f"),
              ("max rel. diff.", "loss_difference", ".1e"), ("replans", "replans", "d")]
             + [(f"+{key}", f"+{key}", "d") for key in ("vram", "taken", "rss", "files", "threads", "objects")],
}
PHASES = [("", "phase", ""), ("ms", "ms", ".1f"), ("up GB", "up_gb", ".2f"), ("down GB", "down_gb", ".2f"),
          ("kernels run, %", "kernels", ".0f"), ("optimizer's threads at work", "threads", ".1f"),
          ("of", "of_threads", "d")]
COLUMNS["micro"] = TIMES + MOVED + AGREE
CASES = {"lora": lora, "full": full, "micro": micro, "steps": many_steps}


def readable(row: dict) -> dict:
    """With sizes in the units of the table."""
    shown = dict(row)
    for key, name, unit in (("h2d", "h2d_mb", 1e6), ("d2h", "d2h_mb", 1e6), ("peak", "peak_mib", 2**20),
                            ("model_vram", "model_mib", 2**20)):
        if row.get(key) is not None:
            shown[name] = row[key] / unit
    return shown


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--check", action="store_true", help="only the agreement of gradients (lora, full)")
    parser.add_argument("--device", choices=("cuda", "sim"), default="cuda")
    parser.add_argument("--budget", help="sizes, separated by commas")
    parser.add_argument("--micro", type=int, default=8, help="number of micro-batches")
    for name in ("blocks", "hidden", "tokens", "steps"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--trace", help="keep the Chrome trace of one step of full fine-tuning here")
    parser.add_argument("--json")
    args = parser.parse_args()
    defaults = (DEFAULTS if args.device == "cuda" else SIM_DEFAULTS)[args.case]
    for name, value in zip(("blocks", "hidden", "tokens", "steps", "budget"), defaults):
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.case == "steps" and args.steps <= 20:
        parser.error("--case steps compares step 20 with the last: --steps must be above 20")
    if args.trace and (args.case != "full" or args.check or args.device != "cuda"):
        parser.error("--trace is for --case full on a CUDA device")
    if args.case in ("micro", "steps") and args.check:
        parser.error("--check is for --case lora and --case full")
    return args


def main() -> int:
    args = parse()
    if lacks_card(args.device):
        return NO_CARD
    warnings.simplefilter("ignore", DeprecationWarning)  # of the peers
    where = Where(args.device)
    record: dict = {**where.describe(), "arguments": vars(args)}
    print(", ".join(f"{key} {value}" for key, value in where.describe().items()))
    record["rows"] = rows = CASES[args.case](args, where, record)
    columns = [c for c in COLUMNS[args.case] if not args.check or c in AGREE or c[1] == "row"]
    table(columns, [readable(row) for row in rows])
    if args.json:
        with open(args.json, "w") as out:
            json.dump(record, out, indent=1)
    own = [row for row in rows if row["row"] not in PEERS]
    return 1 if any("failed" in row for row in own) else 0


if __name__ == "__main__":
    sys.exit(main())
