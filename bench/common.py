"""What the benchmarks share: the model, a clock, the rates of link and memory, and how tables are printed.

On the simulated device ("sim") everything runs on the CPU, as a smoke test of the scripts: times there say nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import sys
import time

import torch

import stagehand
from stagehand.bench import stack
from stagehand.bench.peers import version_of  # noqa: F401 - for the scripts
from stagehand.bench.stack import Block, Stack, fill, linear, nbytes, spread, twin_on  # noqa: F401 - for the scripts

SIM_LINK = int(4e9)  # bytes/s of the simulated link
NO_CARD = 4  # exit status


# ---------------------------------------------------------------------- the machine


class Where:
    """The device that a benchmark runs on. name: "cuda" or "sim"."""

    def __init__(self, name: str) -> None:
        self.cuda = name != "sim"
        self.torch = torch.device("cuda" if self.cuda else "cpu")

    def target(self, budget: int):
        """What `stagehand.layer` is given as its device."""
        if self.cuda:
            return "cuda"
        return stagehand.Device("sim", memory_bytes=budget, link_bytes_per_s=SIM_LINK)

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.cuda else 0

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated() if self.cuda else 0

    def taken(self) -> int:
        """Bytes that are taken on the card, whoever took them."""
        if not self.cuda:
            return 0
        free, total = torch.cuda.mem_get_info()
        return total - free

    def reset_peak(self) -> None:
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()

    def clean(self) -> None:
        gc.collect()
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def describe(self) -> dict:
        """Card and versions."""
        said = {"card": torch.cuda.get_device_name() if self.cuda else "simulated device", "torch": torch.__version__,
                "stagehand": stagehand.__version__, "python": platform.python_version(),
                "cpus": len(os.sched_getaffinity(0)), "threads": torch.get_num_threads()}
        with contextlib.suppress(OSError, StopIteration), open("/proc/cpuinfo") as cpuinfo:
            said["cpu"] = next(line for line in cpuinfo if line.startswith("model name")).partition(":")[2].strip()
        if self.cuda:
            said["cuda"] = torch.version.cuda
        return said


def rss() -> dict[str, int]:
    """Resident set and its peak, in bytes."""
    with open("/proc/self/status") as status:
        fields = dict(line.split(":", 1) for line in status if ":" in line)
    return {key: int(fields[key].split()[0]) * 1024 for key in ("VmRSS", "VmHWM")}


# ---------------------------------------------------------------------- time


def timed(step, times: int, where: Where) -> list[float]:
    """Milliseconds of each call of `step`, back to back, by events on a CUDA device."""
    return stack.timed(step, times, where.cuda)


# ---------------------------------------------------------------------- rates


def link_rate(where: Where, size: int = 1 << 30) -> float:
    """Bytes per second of pinned host-to-device copies: the best of a few rounds, for a bound must not be
    set by a slow moment."""
    if not where.cuda:
        return float(SIM_LINK)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    device.copy_(host, non_blocking=True)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    best = 0.0
    for _ in range(5):
        begin.record()
        for _ in range(5):
            device.copy_(host, non_blocking=True)
        end.record()
        torch.cuda.synchronize()
        best = max(best, 5 * size / begin.elapsed_time(end) * 1e3)
    return best


def both_ways_rate(where: Where, size: int = 1 << 30) -> float:
    """Bytes per second in each direction while pinned copies run in both: the best of a few rounds."""
    if not where.cuda:
        return float(SIM_LINK)
    hosts = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    devices = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    best = 0.0
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(5):
            with torch.cuda.stream(streams[0]):
                devices[0].copy_(hosts[0], non_blocking=True)
            with torch.cuda.stream(streams[1]):
                hosts[1].copy_(devices[1], non_blocking=True)
        torch.cuda.synchronize()
        best = max(best, 5 * size / (time.perf_counter() - begin))
    return best


def memory_rate(size: int = 1 << 30) -> float:
    """Bytes per second that host memory gives torch's threads, read and written bytes together: the best of a few
    rounds of a copy and of a change in place (a copy also reads the lines that it is going to write)."""
    source, target = (torch.ones(size // 4) for _ in range(2))
    best = 0.0
    for _ in range(5):
        for work in (lambda: target.copy_(source), lambda: target.mul_(1.5)):
            begin = time.perf_counter()
            work()
            best = max(best, 2 * size / (time.perf_counter() - begin))
    return best


# ---------------------------------------------------------------------- tables


def table(columns: list[tuple[str, str, str]], rows: list[dict]) -> None:
    """columns: (title, key, format of the value); a row that lacks the key shows "-" there, and a row with
    "failed" shows that at its end."""
    cells = [[title for title, *_ in columns]]
    for row in rows:
        cells.append([format(row[key], form) if row.get(key) is not None else "-" for _, key, form in columns])
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line, row in zip(cells, [{}, *rows]):
        text = "  ".join(cell.ljust(width) if i == 0 else cell.rjust(width)
                         for i, (cell, width) in enumerate(zip(line, widths)))
        print(text + (f"  failed: {row['failed']}" if "failed" in row else ""))


# ---------------------------------------------------------------------- a script


def parse(doc: str, defaults: dict[str, dict], *switches: str) -> argparse.Namespace:
    """--device, --json, an option for each key of `defaults`, whose values are those of the device where it is not
    given, and switches."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=tuple(defaults), default="cuda")
    for name, value in defaults["cuda"].items():
        parser.add_argument(f"--{name}", type=type(value))
    for name in switches:
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--json")
    args = parser.parse_args()
    for name, value in defaults[args.device].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def lacks_card(device: str) -> bool:
    """Whether `device` is "cuda" and there is none, which is said then."""
    lacks = device == "cuda" and not torch.cuda.is_available()
    if lacks:
        print("no CUDA device: --device sim runs a smoke test on the CPU", file=sys.stderr)
    return lacks


def main(args: argparse.Namespace, run, columns, readable, may_fail=()) -> int:
    """run(args, where, record) -> rows, which are printed, and written with the record where --json is given. The exit
    status: 1 where a row failed that is not among may_fail."""
    if lacks_card(args.device):
        return NO_CARD
    where = Where(args.device)
    record: dict = {**where.describe(), "arguments": vars(args)}
    print(", ".join(f"{key} {value}" for key, value in where.describe().items()))
    record["rows"] = rows = run(args, where, record)
    table(columns, [readable(row) for row in rows])
    if args.json:
        with open(args.json, "w") as out:
            json.dump(record, out, indent=1)
    return 1 if any("failed" in row for row in rows if row["row"] not in may_fail) else 0
