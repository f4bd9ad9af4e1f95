"""Streaming a model from its file against the disk's own rate, in one run.

usage: disk.py --dir DIR [--device cuda|sim] [--blocks 24] [--hidden 4096] [--budget 966MB] [--tokens 16] [--steps 5]
               [--keep] [--json FILE]

Writes the weights (bf16, random, 9.66 GB by default) to DIR, then measures, in this order:
    disk      reads of the file around the page cache (O_DIRECT), 4 to 32 at once: the best of a few ways
    cold      stagehand.load and the first output, nothing in the page cache, against reading the file once, the best
              way
    disk run  the steps that follow: bytes read a second; growth of the resident set against slabs. A shared disk's rate
              changes from second to second: plain reads, the best way, run before the load and between all steps, and
              each step (and the first output) is judged by the mean of those before and behind it
    half      the same with half of the model in RAM (ram_budget): against the steps before
    buffered  the file in the page cache: parallel plain reads of it, alone and while the link is busy
    warm      the steps from the page cache: bytes read a second against the link's or those reads' rate
Outputs of all runs are compared, on a card that holds the model also with the resident model. `--device sim` runs on
the CPU, as a smoke test; times there say little. Status 1 when outputs differ.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import gc
import json
import mmap
import os
import statistics
import struct
import sys
import threading
import time

import torch
from common import NO_CARD, SIM_LINK, Stack, Where, lacks_card, link_rate, rss, table

import stagehand
from stagehand.files.checkpoint import Checkpoint

FILE = "stagehand-bench.safetensors"
MIB = 1 << 20


# ---------------------------------------------------------------------- the file


def stack_shapes(blocks: int, hidden: int) -> dict[str, tuple[int, int]]:
    return {name: tuple(p.shape) for name, p in Stack(blocks, hidden).named_parameters()}


def write(path: str, shapes: dict[str, tuple[int, int]]) -> int:
    """Weights of these shapes, which differ from one to the next. Returns their bytes."""
    header, at = {}, 0
    for name, shape in shapes.items():
        nbytes = shape[0] * shape[1] * 2
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    if os.path.exists(path) and os.path.getsize(path) == 8 + len(text) + at:
        return at
    base = (torch.randn(max(rows * columns for rows, columns in shapes.values())) * 0.02).to(torch.bfloat16)
    with open(path, "wb", buffering=0) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for i, shape in enumerate(shapes.values()):
            data = base[: shape[0] * shape[1]].roll(i * 977)
            rest = memoryview(data.view(torch.uint8).numpy())
            while rest:
                rest = rest[file.write(rest):]
        os.fsync(file.fileno())
    return at


def drop_cache(path: str) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_rate(path: str, flags: int, at_once: int, size: int, limit: int) -> float:
    """Bytes per second of plain reads of `size` bytes, `at_once` of them under way."""
    file = os.open(path, os.O_RDONLY | flags)
    total = min(os.path.getsize(path), limit) // size * size
    buffers = [mmap.mmap(-1, size) for _ in range(at_once)]  # pages: aligned for O_DIRECT
    for buffer in buffers:
        buffer.write(b"\0" * size)

    def reader(number: int) -> int:
        done = 0
        for at in range(number * size, total, at_once * size):
            done += os.preadv(file, [buffers[number]], at)
        return done

    try:
        with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
            list(pool.map(lambda _: time.sleep(0.01), range(at_once)))  # the threads are there
            begin = time.perf_counter()
            done = sum(pool.map(reader, range(at_once)))
            return done / (time.perf_counter() - begin)
    finally:
        os.close(file)


def takes_direct_reads(path: str) -> bool:
    try:
        read_rate(path, os.O_DIRECT, 1, MIB, MIB)
        return True
    except OSError as error:
        print(f"O_DIRECT is refused where {path} is ({error.strerror}): its rate is that of buffered reads",
              file=sys.stderr)
        return False


class Plain:
    """Plain reads in the best way that was found, as often as they are asked for."""

    def __init__(self, path: str, best: dict, limit: int) -> None:
        self.path, self.best, self.limit = path, best, limit
        self.rates: list[float] = []

    def __call__(self) -> float:
        self.rates.append(read_rate(self.path, self.best["flags"], *most(self.best["how"]), self.limit))
        return self.rates[-1]

    def beside(self, number: int) -> float:
        """The mean of the rates before and behind what ran between reads `number` and `number` + 1."""
        return (self.rates[number] + self.rates[number + 1]) / 2


def beside_copies(where: Where, read) -> dict:
    """`read()` while pinned memory is copied to the device all the time: both rates."""
    source = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device=where.torch)
    ended, copied = threading.Event(), 0

    def copy() -> None:
        nonlocal copied
        while not ended.is_set():
            target.copy_(source, non_blocking=True)
            torch.cuda.current_stream().synchronize()
            copied += source.numel()

    thread = threading.Thread(target=copy)
    thread.start()
    try:
        begin, before = time.perf_counter(), copied
        rate = read()
        return {"read": rate, "link": (copied - before) / (time.perf_counter() - begin)}
    finally:
        ended.set()
        thread.join()


def best_rate(path: str, direct: bool, limit: int) -> dict:
    found, flags = {}, os.O_DIRECT if direct and takes_direct_reads(path) else 0
    for at_once in (4, 8, 16, 32):
        for size in (MIB, 4 * MIB):
            if direct:
                drop_cache(path)
            found[f"{at_once} x {size // MIB} MiB"] = read_rate(path, flags, at_once, size, limit)
    how = max(found, key=found.get)
    return {"rate": found[how], "how": how, "flags": flags, "all": found}


# ---------------------------------------------------------------------- a run


def reset_peak() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def run(path: str, args, where: Where, x, ram_budget=None, warm: int = 3, plain: Plain | None = None) -> dict:
    """load, the first output, then steps; the model is given up at the end. `plain`: reads in between."""
    where.clean()
    between = plain or (lambda: None)
    between()
    reset_peak()
    base = rss()["VmRSS"]
    begin = time.perf_counter()
    model = stagehand.load(lambda: Stack(args.blocks, args.hidden), path, vram_budget=args.budget,
                           ram_budget=ram_budget, device=where.target(args.budget_bytes))
    loaded = time.perf_counter() - begin
    runtime = stagehand.runtime(model)
    with torch.no_grad():
        first = model(x)
        where.synchronize()
        first_s = time.perf_counter() - begin
        between()
        for _ in range(warm):
            model(x)
        where.synchronize()
        before, times, rates = runtime.stats, [], []
        between()
        for _ in range(args.steps):
            here, begin = runtime.stats["file_bytes"], time.perf_counter()
            out = model(x)
            where.synchronize()
            times.append(time.perf_counter() - begin)
            rates.append((runtime.stats["file_bytes"] - here) / times[-1])
            between()
    stats, plan = runtime.stats, runtime.plan
    grown = rss()["VmHWM"] - base - (0 if where.cuda else stats["device_peak"])  # the simulated device is host memory
    read = (stats["file_bytes"] - before["file_bytes"]) / args.steps
    moved = (stats["h2d_bytes"] - before["h2d_bytes"]) / args.steps
    step = statistics.median(times)
    runtime.shutdown()
    del model
    gc.collect()
    where.clean()
    return {"load_s": loaded, "first_s": first_s, "step_ms": step * 1e3, "min_ms": min(times) * 1e3,
            "max_ms": max(times) * 1e3, "read": read, "moved": moved, "read_rate": statistics.median(rates),
            "x_plain": [rate / plain.beside(2 + i) for i, rate in enumerate(rates)] if plain else None,
            "predicted_ms": plan["step_ns"] / 1e6, "bound_by": plan["bound_by"], "rss_growth": grown,
            "slabs": stats["staging_bytes"], "ram": stats["ram_bytes"], "ways": stats["files"],
            "disk_seen": stats["disk_bytes_per_s"], "pinned": stats["staging_pinned"],
            "out": first.cpu(), "equal_steps": bool(torch.equal(first, out))}


def resident_output(path: str, args, where: Where, x):
    """Of the model with all weights on the device; None where they do not fit."""
    if where.cuda and torch.cuda.mem_get_info()[0] < 1.3 * os.path.getsize(path):
        return None
    checkpoint = Checkpoint(path)
    model = Stack(args.blocks, args.hidden)
    for name, _ in list(model.named_parameters()):
        owner, _, key = name.rpartition(".")
        value = torch.nn.Parameter(checkpoint[name].to(where.torch), requires_grad=False)
        setattr(model.get_submodule(owner), key, value)
    with torch.no_grad():
        out = model(x).cpu()
    checkpoint.close()
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", required=True)
    parser.add_argument("--device", choices=("cuda", "sim"), default="cuda")
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--budget", default="966MB")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--keep", action="store_true", help="leave the file where it is")
    parser.add_argument("--json")
    args = parser.parse_args()
    if lacks_card(args.device):
        return NO_CARD
    where = Where(args.device)
    args.budget_bytes = stagehand._core.parse_size(args.budget)
    torch.manual_seed(0)
    path = os.path.join(args.dir, FILE)
    os.makedirs(args.dir, exist_ok=True)
    try:
        return measure(path, args, where)
    finally:
        if not args.keep and os.path.exists(path):
            os.unlink(path)


def measure(path: str, args, where: Where) -> int:
    begin = time.perf_counter()
    weights = write(path, stack_shapes(args.blocks, args.hidden))
    record: dict = {**where.describe(), "weights": weights, "budget": args.budget, "tokens": args.tokens,
                    "write_s": time.perf_counter() - begin}
    x = (torch.randn(1, args.tokens, args.hidden) * 0.5).to(torch.bfloat16).to(where.torch)
    record["link"] = link_rate(where) if where.cuda else float(SIM_LINK)
    run_small(args, where)
    limit = min(weights, 4 << 30)
    disk = record["disk"] = best_rate(path, True, limit)
    drop_cache(path)
    plain = Plain(path, disk, limit)
    cold = record["cold"] = run(path, args, where, x, warm=2, plain=plain)
    drop_cache(path)
    half = record["half"] = run(path, args, where, x, ram_budget=weights // 2, warm=4)
    warm_up(path)
    buffered = record["buffered"] = best_rate(path, False, limit)
    warm_up(path)
    if where.cuda:
        record["buffered_beside_copies"] = beside_copies(where, Plain(path, buffered, weights))
    cached = record["warm"] = run(path, args, where, x, warm=4)
    record["plain"] = plain.rates
    want = resident_output(path, args, where, x)
    outputs = [r.pop("out") for r in (cold, half, cached)]
    equal = all(torch.equal(out, outputs[0]) for out in outputs) and all(
        r["equal_steps"] for r in (cold, half, cached)) and (want is None or torch.equal(want, outputs[0]))
    record["equal"], record["compared_with_resident"] = equal, want is not None
    figures = record["figures"] = {
        "disk-backed rate / O_DIRECT rate, in turn": statistics.median(cold["x_plain"]),
        "time to first output / reading the file once": cold["first_s"] / (os.path.getsize(path) / plain.beside(0)),
        "speed with half in RAM / without": cold["step_ms"] / half["step_ms"],
        "warm rate / min(link, buffered)": cached["read_rate"] / min(record["link"], buffered["rate"]),
        "host RAM, none kept: growth - slabs, MB": (cold["rss_growth"] - cold["slabs"]) / 1e6,
        "host RAM, half kept: growth - slabs - ram_budget, MB":
            (half["rss_growth"] - half["slabs"] - weights // 2) / 1e6,
    }
    rate = statistics.median(plain.rates)
    bounds = {"cold": rate, "half": rate, "warm": min(record["link"], buffered["rate"])}
    record["rows"] = [
        {"row": name, "ms": r["step_ms"], "min": r["min_ms"], "max": r["max_ms"], "steps": args.steps,
         "setup_s": r["load_s"], "bound": r["read"] / bounds[name] * 1e3, "rss_growth": r["rss_growth"],
         "predicted": r["predicted_ms"], "equal": equal}
        for name, r in (("cold", cold), ("half", half), ("warm", cached))]
    for row in record["rows"]:
        row["x_bound"] = row["ms"] / row["bound"] if row["bound"] else None
    show(record, figures)
    if args.json:
        with open(args.json, "w") as out:
            json.dump(record, out, indent=1)
    return 0 if equal else 1


def run_small(args, where: Where) -> None:
    """What torch and the device load and start once comes before the first measurement of memory."""
    blocks, hidden = args.blocks, args.hidden
    args.blocks, args.hidden = 2, 256
    path = os.path.join(args.dir, "small-" + FILE)
    try:
        write(path, stack_shapes(args.blocks, args.hidden))
        run(path, args, where, torch.zeros(1, 8, 256, dtype=torch.bfloat16, device=where.torch), warm=1)
    finally:
        args.blocks, args.hidden = blocks, hidden
        os.unlink(path)


def warm_up(path: str) -> None:
    with open(path, "rb", buffering=0) as file:
        while file.read(16 * MIB):
            pass


def most(how: str) -> tuple[int, int]:
    at_once, _, size = how.split()[:3]
    return int(at_once), int(size) * MIB


def show(record: dict, figures: dict) -> None:
    print(f"{record['card']}, torch {record['torch']}, {record['cpus']} cpus: {record['weights'] / 1e9:.2f} GB of "
          f"weights, budget {record['budget']}, {record['tokens']} tokens, link {record['link'] / 1e9:.1f} GB/s")
    rates = ", ".join(f"{rate / 1e9:.2f}" for rate in record["plain"])
    print(f"disk {record['disk']['rate'] / 1e9:.2f} GB/s around the page cache ({record['disk']['how']}; "
          f"in turn with the steps {rates}), {record['buffered']['rate'] / 1e9:.2f} out of it "
          f"({record['buffered']['how']})")
    print("steps / plain reads beside them: " + ", ".join(f"{x:.3f}" for x in record["cold"]["x_plain"]))
    if both := record.get("buffered_beside_copies"):
        print(f"page cache and link at once: {both['read'] / 1e9:.1f} GB/s read, {both['link'] / 1e9:.1f} GB/s copied")
    rows = []
    for name in ("cold", "half", "warm"):
        r = record[name]
        rows.append({"run": name, "way": r["ways"][0]["way"], **r, "read_gb": r["read"] / 1e9,
                     "rate": r["read_rate"] / 1e9, "rss_mb": r["rss_growth"] / 1e6, "slabs_mb": r["slabs"] / 1e6,
                     "ram_mb": r["ram"] / 1e6})
    table([("run", "run", ""), ("read", "way", ""), ("load s", "load_s", ".2f"), ("first s", "first_s", ".2f"),
           ("step ms", "step_ms", ".1f"), ("min", "min_ms", ".1f"), ("max", "max_ms", ".1f"),
           ("predicted", "predicted_ms", ".1f"), ("bound by", "bound_by", ""), ("GB read", "read_gb", ".3f"),
           ("GB/s", "rate", ".2f"), ("RSS MB", "rss_mb", ".0f"), ("slabs", "slabs_mb", ".0f"),
           ("RAM", "ram_mb", ".0f")], rows)
    for name, value in figures.items():
        print(f"{name:<55} {value:.3f}")
    print(f"outputs equal: {record['equal']}" + ("" if record["compared_with_resident"]
                                                 else " (not compared with the resident model)"))


if __name__ == "__main__":
    sys.exit(main())
