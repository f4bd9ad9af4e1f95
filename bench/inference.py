"""Streamed inference against the same model resident, and against the bound, in one run.

usage: inference.py [--budget 3GiB] [--blocks 24] [--hidden 4096] [--tokens 1024,16384] [--steps 20]
                    [--trace FILE] [--json FILE]

Needs a CUDA device that holds the whole model (for the resident run). The model: blocks of attention and MLP,
bf16, no norm weights. The bound is max(C, (B - V + u) / W): C resident step, B bytes of weights, V budget, u
the largest layer, W the pinned copy rate measured here in 1 GiB copies. Prints a table, and JSON on request.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

import torch
from common import Stack, Where, fill, link_rate, rss, spread, timed, twin_on

import stagehand

CUDA = Where("cuda")


def measure(model, x, steps: int, warm: int = 6) -> dict:
    with torch.no_grad():
        for _ in range(2):  # a change of input length is learnt in the first round and planned for in the second
            timed(lambda: model(x), warm, CUDA)
        torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        times = timed(lambda: model(x), steps, CUDA)
        wall = (time.perf_counter() - begin) * 1e3 / steps
    return {**spread(times), "wall_ms": wall, "peak": torch.cuda.max_memory_allocated()}


def host_ms(model, x, times: int = 5) -> float:
    """Milliseconds until the call returns when the device was idle before it: what the host spends on a step.
    A host that waits for the device inside the step would need the step's time."""
    spent = []
    with torch.no_grad():
        for _ in range(times):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            model(x)
            spent.append((time.perf_counter() - begin) * 1e3)
    torch.cuda.synchronize()
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="3GiB")
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--tokens", default="1024,16384")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--trace", help="write a Chrome trace of one streamed step here")
    parser.add_argument("--json")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: this benchmark compares with a resident run on one", file=sys.stderr)
        return 4
    torch.manual_seed(0)
    model = fill(Stack(args.blocks, args.hidden), args.hidden)
    sizes = [p.numel() * p.element_size() for p in model.parameters()]
    weights, largest = sum(sizes), max(sizes)
    tokens = [int(t) for t in args.tokens.split(",")]
    inputs = {t: torch.randn(1, t, args.hidden, device="cuda", dtype=torch.bfloat16) for t in tokens}
    record: dict = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "weights": weights,
                    "budget": args.budget, "link_gb_s": link_rate(CUDA) / 1e9, "copy_once_s": copy_seconds(model)}

    resident = twin_on(model, "cuda")
    before = torch.cuda.memory_allocated()
    record["resident"] = {t: measure(resident, inputs[t], args.steps) for t in tokens}
    for r in record["resident"].values():
        r["activations"] = r["peak"] - before
    with torch.no_grad():
        want = {t: resident(inputs[t]) for t in tokens}
    del resident
    torch.cuda.empty_cache()

    base = rss()["VmRSS"]
    begin = time.perf_counter()
    stagehand.layer(model, vram_budget=args.budget, inference_mode=True)
    record["setup_s"] = time.perf_counter() - begin
    runtime = model._stagehand_layer_runtime
    budget = runtime.stats["budget"]
    record["streamed"] = {}
    for t in tokens:
        free_before = torch.cuda.mem_get_info()[0]
        held = sum(x.nbytes for x in inputs.values()) + sum(y.nbytes for y in want.values())
        ours = measure(model, inputs[t], args.steps)
        # The ring is mapped outside torch's allocator; the rest of the places is inside.
        ring = runtime.plan["ring_bytes"]
        ours["peak_model"] = ours["peak"] - held + ring - record["resident"][t]["activations"]
        stats = runtime.stats
        ours["host_ms"] = host_ms(model, inputs[t])
        with torch.no_grad():
            ours["equal"] = bool(torch.equal(model(inputs[t]), want[t]))
        bound = max(record["resident"][t]["ms"], (weights - budget + largest) / record["link_gb_s"] / 1e6)
        ours.update(bound_ms=bound, ratio=ours["ms"] / bound, vs_resident=ours["ms"] / record["resident"][t]["ms"],
                    predicted_ms=runtime.plan["step_ns"] / 1e6, plan=runtime.plan, host_waits=stats["host_waits"],
                    demand_loads=stats["demand_loads"], metrics=stats["last_step"],
                    device_bytes=stats["device_peak"], free_taken=free_before - torch.cuda.mem_get_info()[0],
                    runtime_link_gb_s=stats["link_bytes_per_s"] / 1e9)
        record["streamed"][t] = ours
    after = rss()
    record["rss"] = {"before": base, "after": after["VmRSS"], "peak": after["VmHWM"], "growth": after["VmRSS"] - base,
                     "allowed": int(0.05 * weights)}
    if args.trace:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace, torch.no_grad():
            model(inputs[tokens[0]])
            torch.cuda.synchronize()
        trace.export_chrome_trace(args.trace)
        calls = [e.name for e in trace.events() if "ynchronize" in e.name]
        record["synchronize_calls"] = {name: calls.count(name) for name in set(calls)}
    runtime.shutdown()

    print(f"{record['card']}, torch {record['torch']}: {weights / 1e9:.2f} GB of weights, budget {args.budget}, "
          f"link {record['link_gb_s']:.1f} GB/s")
    print(f"set-up {record['setup_s']:.2f} s; copying the weights once {record['copy_once_s']['threads']:.2f} s "
          f"({record['copy_once_s']['one_thread']:.2f} s with one thread); host memory "
          f"{record['rss']['growth'] / 1e6:+.0f} MB (allowed {record['rss']['allowed'] / 1e6:.0f})")
    print(f"{'tokens':>7} {'resident':>9} {'bound':>8} {'ours':>8} {'min-max':>15} {'x bound':>8} {'x resid.':>8} "
          f"{'predicted':>9} {'equal':>6} {'waits':>5} {'host ms':>8} {'model VRAM':>10}")
    for t in tokens:
        r, s = record["resident"][t], record["streamed"][t]
        print(f"{t:>7} {r['ms']:>9.1f} {s['bound_ms']:>8.1f} {s['ms']:>8.1f} {s['min']:>7.1f}-{s['max']:<7.1f} "
              f"{s['ratio']:>8.3f} {s['vs_resident']:>8.3f} {s['predicted_ms']:>9.1f} {str(s['equal']):>6} "
              f"{s['host_waits']:>5} {s['host_ms']:>8.1f} {s['peak_model'] / 2**20:>6.0f} MiB")
    if args.json:
        with open(args.json, "w") as out:
            json.dump(record, out, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
