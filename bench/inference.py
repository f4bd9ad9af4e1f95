"""Streamed inference against the same model resident, the bound, and other systems, in one run.

usage: inference.py [--case blocks|small|dit|llama|unet] [--compile] [--graph] [--device cuda|sim]
                    [--budget 3GiB,...] [--blocks 24] [--hidden 4096] [--tokens 1024,16384] [--steps 20] [--no-peers]
                    [--trace FILE] [--json FILE]

blocks  attention and MLP in bf16, no norm weights. The bound is max(C, (B - V + u) / W): C resident step, B bytes of
        weights, V budget, u the largest layer (of compiled blocks, which hold all of theirs at once, the largest
        block), W the pinned copy rate measured here in 1 GiB copies.
small   layer mode with as many small Linears as --blocks says (2,000 of hidden size 512). The bound is
        max(C, (B - V + u) / W, H): H is what the host needs to enqueue the resident step, and 15 us for each layer.
        What the host needs varies from second to second: resident and streamed steps are timed in turn.
dit, llama, unet  those of architectures.py, with the bound of "blocks" for each pass over the weights; --tokens is
        the image's tokens, the prompt's, and the side of a latent image. A step of llama is a prompt and the tokens
        that it generates.

--compile: also resident and streamed with compiled blocks, as rows of their own. --graph: also both as CUDA graphs
(stagehand.capture); the bound is then of the resident graph. A budget may be a share of the weights, "30%".

Needs a CUDA device that holds the whole model, for the resident run. Peers run where they are installed, at the first
budget. On "sim" sizes are small, outputs may differ in their last bits from the resident twin's, and times say nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings

import torch
import torch.nn as nn
import torch.nn.functional as F
from architectures import ARCHITECTURES, build
from common import (
    NO_CARD, Stack, Where, fill, lacks_card, linear, link_rate, nbytes, rss, spread, table, timed, twin_on)
from loops import attempt, ratios
from peers import INFERENCE as PEERS
from timeline import traced

import stagehand

LAYER_US = 15  # of the host's time, which a layer may cost
SAME_AGAIN = 4  # calls of the resident model that must give the same bits if others are to
DEFAULTS = {"blocks": (24, 4096, "1024,16384", 20, "3GiB"), "small": (2000, 512, "256", 20, "300MB"),
            "dit": (6, 3072, "1024,4096", 10, "33%,66%"), "llama": (20, 4096, "512", 6, "33%,66%"),
            "unet": (2, 640, "64", 10, "33%,66%")}
SIM_DEFAULTS = {"blocks": (4, 64, "16", 3, "200KB"), "small": (60, 32, "8", 3, "60KB"), "dit": (1, 64, "16", 2, "60%"),
                "llama": (2, 64, "8", 2, "60%"), "unet": (1, 32, "16", 2, "60%")}


class Small(nn.Module):
    """Linears one after the other, with a norm now and then that keeps values in range."""

    def __init__(self, layers: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linear(hidden, hidden) for _ in range(layers))

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = layer(x if i % 8 else F.layer_norm(x, x.shape[-1:], eps=1e-20))  # eight layers shrink it by 1e7
        return x


def built(args, where: Where) -> nn.Module:
    torch.manual_seed(0)
    if args.case in ARCHITECTURES:
        return build(args.case, args.blocks, args.hidden, where.torch)
    kind = Small if args.case == "small" else Stack
    return fill(kind(args.blocks, args.hidden), args.hidden).requires_grad_(False)


def measure(model, x, steps: int, where: Where, warm: int = 6) -> dict:
    with torch.no_grad():
        for _ in range(2):  # a change of input length is learnt in the first round and planned for in the second
            timed(lambda: model(x), warm, where)
        where.reset_peak()
        times = timed(lambda: model(x), steps, where)
    return {**spread(times), "peak": where.peak()}


def budget_bytes(text: str, weights: int) -> int:
    """A size, or a share of the weights in per cent."""
    return int(float(text[:-1]) / 100 * weights) if text.endswith("%") else stagehand.parse_size(text)


def blocks_of(model) -> list[nn.Module]:
    """The outermost modules that stand in lists."""
    inside: set[int] = set()
    found = []
    for module in model.modules():
        if id(module) not in inside and isinstance(module, nn.ModuleList):
            for block in module:
                found.append(block)
                inside |= {id(part) for part in block.modules()}
    return found


def compile_blocks(model) -> None:
    """Each by itself."""
    for block in blocks_of(model):
        block.compile()


def inputs_of(args, where: Where) -> dict:
    """By number of tokens."""
    make = ARCHITECTURES[args.case].inputs if args.case in ARCHITECTURES else \
        lambda n, hidden: torch.randn(1, n, hidden)
    found = {int(t): make(int(t), args.hidden) for t in args.tokens.split(",")}
    return {t: (x.bfloat16() if x.is_floating_point() else x).to(where.torch) for t, x in found.items()}


def host_ms(model, x, where: Where, times: int = 5) -> float:
    """Milliseconds until the call returns when the device was idle before it: what the host spends on a step.
    A host that waits for the device inside the step would need the step's time."""
    spent = []
    with torch.no_grad():
        for _ in range(times):
            where.synchronize()
            begin = time.perf_counter()
            model(x)
            spent.append((time.perf_counter() - begin) * 1e3)
    where.synchronize()
    return statistics.median(spent)


def copy_seconds(model) -> dict[str, float]:
    """Seconds to copy all weights once within host memory: to fresh memory, as torch's clone does it with its
    threads, and with one thread."""
    seconds, threads = {}, torch.get_num_threads()
    for name, count in (("threads", threads), ("one_thread", 1)):
        torch.set_num_threads(count)
        begin = time.perf_counter()
        copies = [p.data.clone() for p in model.parameters()]
        seconds[name] = time.perf_counter() - begin
        del copies
    torch.set_num_threads(threads)
    return seconds


def resident_graph(model, x):
    """A call of a model that is on the device as a whole, captured."""
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.no_grad():
        with torch.cuda.stream(side):
            for _ in range(3):
                model(x)
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            model(x)
    return lambda x: graph.replay()


def in_turn(twin, model, x, times: int, where: Where) -> tuple[dict, dict]:
    """Steps of both by turns, each to its end."""
    spent: tuple[list, list] = ([], [])
    with torch.no_grad():
        where.synchronize()
        for _ in range(times):
            for step, found in zip((twin, model), spent):
                begin = time.perf_counter()
                step(x)
                where.synchronize()
                found.append((time.perf_counter() - begin) * 1e3)
    return spread(spent[0]), spread(spent[1])


class Resident:
    """The model on the device as a whole: a row and the wanted output for each number of tokens. `twin` stays for
    "small" alone."""

    def __init__(self, model, inputs: dict, args, where: Where, rows: list, label: str = "") -> None:
        twin = twin_on(model, where.torch)
        if label:
            compile_blocks(twin)
        before = where.allocated()
        self.rows, self.graphs = {}, {}
        for tokens, x in inputs.items():
            self.rows[tokens] = attempt(f"resident{label}, {tokens}", rows,
                                        lambda x=x: self._row(twin, x, args.steps, where, before))
            if args.graph and not label:
                self.graphs[tokens] = attempt(f"resident, graph, {tokens}", rows, lambda x=x: self._row(
                    resident_graph(twin, x), x, args.steps, where, before))
        with torch.no_grad():  # a compiler that has met all sizes by now may take another graph for the first of them
            self.want = {tokens: twin(x) for tokens, x in inputs.items()}
            # Libraries may sum in any order (products with one row, split over blocks): then it does not equal itself.
            self.own = {tokens: all(torch.equal(twin(x), self.want[tokens]) for _ in range(SAME_AGAIN))
                        for tokens, x in inputs.items()}
        self.twin = twin if args.case == "small" else None
        del twin
        where.clean()

    @staticmethod
    def _row(model, x, steps: int, where: Where, before: int) -> dict:
        row = measure(model, x, steps, where)
        return {**row, "x_resident": 1.0, "activations": row["peak"] - before, "host_ms": host_ms(model, x, where)}


def bound_of(args, resident: dict, weights: int, largest: int, budget: int, link: float, graph: bool = False) -> float:
    passes = ARCHITECTURES[args.case].passes if args.case in ARCHITECTURES else 1
    bound = max(resident["ms"], passes * max(0, weights - budget + largest) / link * 1e3)
    host = args.case == "small" and not graph  # a graph is one launch
    return max(bound, resident["host_ms"] + LAYER_US * args.blocks / 1e3) if host else bound


def same(out, resident: "Resident", tokens: int) -> dict:
    """equal: "as itself" where the resident model's own outputs differ from call to call."""
    want = resident.want[tokens]
    equal = bool(torch.equal(out, want)) or (False if resident.own[tokens] else "as itself")
    return {"equal": equal, "difference": ((out - want).abs().max() / want.abs().max()).item()}


def streamed(model, budget: str, inputs: dict, resident: Resident, args, where: Where, record: dict, rows: list,
             label: str = ""):
    base, begin = rss()["VmRSS"], time.perf_counter()
    bytes_ = budget_bytes(budget, record["weights"])
    stagehand.layer(model, vram_budget=bytes_, inference_mode=True, device=where.target(bytes_))
    setup = time.perf_counter() - begin
    runtime = stagehand.runtime(model)
    weights = nbytes(model.parameters())
    units = [nbytes(block.parameters()) for block in blocks_of(model)] if label else \
        [nbytes([p]) for p in model.parameters()]
    held = nbytes(inputs.values()) + nbytes(resident.want.values())

    def ours(tokens: int, x) -> dict:
        free = where.taken()
        row = measure(model, x, args.steps, where)
        stats, plan, base_row = runtime.stats, runtime.plan, resident.rows[tokens]
        if resident.twin and base_row:
            other, mine = in_turn(resident.twin, model, x, 2 * args.steps, where)
            base_row = {**base_row, **other, "host_ms": other["ms"]}
            row.update(mine, resident_in_turn=other, peak=row["peak"] - nbytes(resident.twin.parameters()))
        # The ring is mapped outside torch's allocator; the rest of the places is inside.
        row.update(setup_s=setup, host_ms=host_ms(model, x, where), predicted=plan["step_ns"] / 1e6, plan=plan,
                   host_waits=stats["host_waits"], demand_loads=stats["demand_loads"], metrics=stats["last_step"],
                   device_bytes=stats["device_peak"], taken=where.taken() - free, rss_growth=rss()["VmRSS"] - base,
                   runtime_link_gb_s=stats["link_bytes_per_s"] / 1e9)
        if base_row:
            row["bound"] = bound_of(args, base_row, weights, max(units), bytes_, record["link_gb_s"] * 1e9)
            if where.cuda:
                row["model_vram"] = row["peak"] - held + plan["ring_bytes"] - base_row["activations"]
        with torch.no_grad():
            row.update(same(model(x), resident, tokens))
        return ratios(row, base_row)

    def captured(tokens: int, x) -> dict:
        begin = time.perf_counter()
        step, base_row = stagehand.capture(model, x), resident.graphs[tokens]
        row = {"setup_s": time.perf_counter() - begin, **measure(step, x, args.steps, where)}
        row.update(host_ms=host_ms(step, x, where), graph=step.stats)
        if base_row:
            row["bound"] = bound_of(args, base_row, weights, max(units), bytes_, record["link_gb_s"] * 1e9, graph=True)
        with torch.no_grad():
            row.update(same(step(x), resident, tokens))
        return ratios(row, base_row)

    try:
        for tokens, x in inputs.items():
            attempt(f"ours{label}, {budget}, {tokens}", rows, lambda tokens=tokens, x=x: ours(tokens, x))
            if args.graph and not label:
                attempt(f"ours, graph, {budget}, {tokens}", rows, lambda tokens=tokens, x=x: captured(tokens, x))
        if args.trace:
            trace(model, next(iter(inputs.values())), args.trace, record)
            args.trace = None  # of the first budget
    finally:
        runtime.shutdown()
        where.clean()


def trace(model, x, path: str, record: dict) -> None:
    with torch.no_grad():
        record.update(traced(lambda: model(x), path))


def peers(inputs: dict, resident: Resident, args, where: Where, rows: list) -> None:
    """Each on a model of its own: not all of them let go of one."""
    for name, prepare in PEERS.items():
        def started(prepare=prepare):
            model, begin = built(args, where), time.perf_counter()
            version = prepare(model)
            return model, {"version": version, "setup_s": time.perf_counter() - begin}

        try:
            model, head = started()
        except ImportError as error:
            print(f"  {name}: not here ({error})", file=sys.stderr)
            continue
        except Exception as error:  # noqa: BLE001 - a peer that refuses must not end the run
            rows.append({"row": name, "failed": f"{type(error).__name__}: {str(error)[:200]}"})
            continue
        for tokens, x in inputs.items():
            def row(tokens=tokens, x=x, model=model, head=head):
                found = {**head, **measure(model, x, 4, where, warm=1)}  # some take seconds a step
                with torch.no_grad():
                    found.update(same(model(x).to(where.torch), resident.want[tokens]))
                return ratios(found, resident.rows[tokens])

            attempt(f"{name}, {tokens}", rows, row)
        del model
        where.clean()


COLUMNS = [("row", "row", ""), ("ms", "ms", ".1f"), ("min", "min", ".1f"), ("max", "max", ".1f"),
           ("x resid.", "x_resident", ".3f"), ("bound", "bound", ".1f"), ("x bound", "x_bound", ".3f"),
           ("predicted", "predicted", ".1f"), ("host ms", "host_ms", ".1f"), ("waits", "host_waits", "d"),
           ("model MiB", "model_mib", ".0f"), ("peak MiB", "peak_mib", ".0f"), ("set-up s", "setup_s", ".2f"),
           ("RSS MB", "rss_mb", ".0f"), ("equal", "equal", ""), ("version", "version", "")]


def readable(row: dict) -> dict:
    shown = {**row, "equal": str(row["equal"]) if "equal" in row else None}
    for key, name, unit in (("model_vram", "model_mib", 2**20), ("peak", "peak_mib", 2**20),
                            ("rss_growth", "rss_mb", 1e6)):
        if row.get(key) is not None:
            shown[name] = row[key] / unit
    return shown


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=DEFAULTS, default="blocks")
    parser.add_argument("--device", choices=("cuda", "sim"), default="cuda")
    parser.add_argument("--blocks", type=int)
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--tokens")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--budget", help="sizes, or shares of the weights, separated by commas")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--graph", action="store_true")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--trace", help="write a Chrome trace of one streamed step here")
    parser.add_argument("--json")
    args = parser.parse_args()
    defaults = (DEFAULTS if args.device == "cuda" else SIM_DEFAULTS)[args.case]
    for name, value in zip(("blocks", "hidden", "tokens", "steps", "budget"), defaults):
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def main() -> int:
    args = parse()
    if lacks_card(args.device):
        return NO_CARD
    if args.graph and args.device != "cuda":
        print("--graph needs a CUDA device", file=sys.stderr)
        return NO_CARD
    warnings.simplefilter("ignore", DeprecationWarning)  # of the peers
    where, rows = Where(args.device), []
    model = built(args, where)
    weights = nbytes(model.parameters())
    record: dict = {**where.describe(), "arguments": dict(vars(args)), "weights": weights, "rows": rows,
                    "link_gb_s": link_rate(where) / 1e9, "copy_once_s": copy_seconds(model)}
    inputs = inputs_of(args, where)
    resident = Resident(model, inputs, args, where, rows)
    for budget in args.budget.split(","):
        streamed(model, budget, inputs, resident, args, where, record, rows)
    if args.compile:
        compiled = Resident(model, inputs, args, where, rows, ", compiled")
        compile_blocks(model)
        for budget in args.budget.split(","):
            streamed(model, budget, inputs, compiled, args, where, record, rows, ", compiled")
        del compiled
    if where.cuda and not args.no_peers:
        peers(inputs, resident, args, where, rows)
    print(f"{record['card']}, torch {record['torch']}: {weights / 1e9:.2f} GB of weights in "
          f"{len(list(model.parameters()))} layers, link {record['link_gb_s']:.1f} GB/s; copying the weights once "
          f"{record['copy_once_s']['threads']:.2f} s ({record['copy_once_s']['one_thread']:.2f} s with one thread)")
    table(COLUMNS, [readable(row) for row in rows])
    if args.json:
        with open(args.json, "w") as out:
            json.dump(record, out, indent=1)
    return 1 if any("failed" in row for row in rows if "resident" in row["row"] or "ours" in row["row"]) else 0


if __name__ == "__main__":
    sys.exit(main())
