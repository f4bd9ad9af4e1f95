"""What a step was doing when, as a Chrome trace: kernels and copies as torch's profiler sees them, and threads of the
host whose processor time is read from the kernel (`schedstat`), such as those of an optimizer.

Open the file in chrome://tracing or ui.perfetto.dev. `phases` says the same in a few numbers.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time

import torch

MARK = "stagehand_bench_step"


class ThreadTimes:
    """Processor time of the process's threads whose name begins with `prefix`, sampled every `period` seconds."""

    def __init__(self, prefix: str, period: float = 0.002) -> None:
        self.prefix, self.period = prefix, period
        self.samples: list[tuple[float, int]] = []  # time.perf_counter(), ns of all of them
        self._files: list = []
        self._end = threading.Event()

    def _read(self) -> int:
        total = 0
        for file in self._files:
            file.seek(0)
            total += int(file.read().split()[0])
        return total

    def _run(self) -> None:
        while not self._end.is_set():
            self.samples.append((time.perf_counter(), self._read()))
            self._end.wait(self.period)

    def __enter__(self) -> ThreadTimes:
        for task in os.listdir("/proc/self/task"):
            with contextlib.suppress(FileNotFoundError), open(f"/proc/self/task/{task}/comm") as file:
                if file.read().startswith(self.prefix):
                    self._files.append(open(f"/proc/self/task/{task}/schedstat"))  # noqa: SIM115 - until __exit__
        self.threads = len(self._files)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._end.set()
        self._thread.join()
        for file in self._files:
            file.close()

    def busy(self, begin: float, end: float) -> float:
        """Threads at work on average between two readings of time.perf_counter()."""
        return (self._at(end) - self._at(begin)) / 1e9 / max(end - begin, 1e-9)

    def _at(self, when: float) -> float:
        before = max((s for s in self.samples if s[0] <= when), default=self.samples[0])
        after = min((s for s in self.samples if s[0] >= when), default=self.samples[-1])
        if after[0] <= before[0]:
            return before[1]
        return before[1] + (after[1] - before[1]) * (when - before[0]) / (after[0] - before[0])


def traced(call, path: str, threads: str | None = None) -> dict:
    """Calls `call` under the profiler and writes the trace to `path`. With `threads` the share of the time that threads
    with names of this beginning are at work is a counter in it. Returns `synchronize_calls`, and `phases` with it."""
    from torch.profiler import ProfilerActivity, profile, record_function

    watch = ThreadTimes(threads) if threads else contextlib.nullcontext()
    with watch, profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        with record_function(MARK):
            call()
            torch.cuda.synchronize()
        end = time.perf_counter()
    found.export_chrome_trace(path)
    calls = [e.name for e in found.events() if "ynchronize" in e.name]
    record: dict = {"synchronize_calls": {name: calls.count(name) for name in set(calls)}}
    if threads:
        record["phases"] = _with_counter(path, watch, begin, end)
    return record


def _with_counter(path: str, watch: ThreadTimes, begin: float, end: float) -> list[dict]:
    """Adds the counter to the trace, whose clock is another, and returns the phases."""
    with open(path) as file:
        trace = json.load(file)
    events = trace["traceEvents"]
    mark = next(e for e in events if e.get("name") == MARK and e.get("ph") == "X")
    to_trace = lambda when: mark["ts"] + (when - begin) * 1e6  # noqa: E731 - microseconds
    for (t0, ns0), (t1, ns1) in zip(watch.samples, watch.samples[1:]):
        events.append({"ph": "C", "name": f"threads {watch.prefix} at work", "pid": mark["pid"], "ts": to_trace(t0),
                       "args": {"threads": round((ns1 - ns0) / 1e9 / (t1 - t0), 2)}})
    with open(path, "w") as file:
        json.dump(trace, file)
    return phases(events, watch, begin, to_trace(begin), to_trace(end))


def phases(events: list[dict], watch: ThreadTimes, begin: float, first: float, last: float) -> list[dict]:
    """The step in three: until the first bytes have come down from the device, until the device's last kernel, and the
    rest. Of each: ms, GB up and down in it, share of it that kernels run, threads at work. Times of events are in
    us."""
    def device(word: str, category: str) -> list[tuple[float, float, int]]:
        return [(e["ts"], e["ts"] + e["dur"], e.get("args", {}).get("bytes", 0)) for e in events
                if e.get("ph") == "X" and e.get("cat") == category and word in e["name"] and first <= e["ts"] <= last]

    up, down, kernels = device("HtoD", "gpu_memcpy"), device("DtoH", "gpu_memcpy"), device("", "kernel")
    first_down = min((e for _, e, _ in down), default=last)
    edges = [first, first_down, max([first_down, *(e for _, e, _ in kernels)]), last]
    out = []
    for name, a, b in zip(("until the first gradient is down", "until the device is done", "the rest"), edges,
                          edges[1:]):
        a, b = min(a, last), max(min(b, last), a)
        out.append({
            "phase": name, "ms": (b - a) / 1e3, "up_gb": _within(up, a, b) / 1e9, "down_gb": _within(down, a, b) / 1e9,
            "kernels": _covered(kernels, a, b) / max(b - a, 1e-9),
            "threads": watch.busy(begin + (a - first) / 1e6, begin + (b - first) / 1e6), "of_threads": watch.threads,
        })
    return out


def _within(copies: list[tuple[float, float, int]], a: float, b: float) -> float:
    """Bytes of copies between a and b, those that reach over an end in part."""
    return sum(n * max(0.0, min(e, b) - max(s, a)) / (e - s) for s, e, n in copies if e > s)


def _covered(spans: list[tuple[float, float, int]], a: float, b: float) -> float:
    """How much of a..b at least one of the spans covers."""
    total, reached = 0.0, a
    for s, e, _ in sorted(spans):
        s, e = max(s, reached), min(e, b)
        if e > s:
            total += e - s
            reached = e
    return total
