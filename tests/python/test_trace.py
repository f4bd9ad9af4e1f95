"""Traces: every unit's copy ends before its use begins, and sums equal the telemetry. Perfetto's own reader of such
files is not at hand in tests: `Trace` reads what it would."""

import collections
import gzip
import json
import time

import pytest
import stagehand
import torch
from stagehand import _core
from support import Stack, aligned_copy, made, runtime, same
from torch import nn

NS = 2e-3  # us: a time in the file is rounded to a nanosecond


class Trace:
    """The events of a file, checked for what any reader needs."""

    def __init__(self, path):
        data = path.read_bytes()
        self.file = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
        self.events = self.file["traceEvents"]
        self.processes = {e["pid"]: e["args"]["name"] for e in self.events if e["name"] == "process_name"}
        self.threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in self.events if e["name"] == "thread_name"}
        for e in self.events:
            assert e["ph"] in ("X", "C", "M", "s", "f") and e["pid"] in self.processes
            if e["ph"] == "X":
                assert e["dur"] >= 0 and (e["pid"], e["tid"]) in self.threads

    def slices(self, category):
        return sorted((e for e in self.events if e["ph"] == "X" and e["cat"] == category), key=lambda e: e["ts"])

    def counter(self, name):
        return [(e["ts"], e["args"]["value"]) for e in self.events if e["ph"] == "C" and e["name"] == name]

    def arrows(self):
        """Number -> (slice from which it comes, slice to which it goes)."""
        ends = collections.defaultdict(dict)
        for e in self.events:
            if e["ph"] in "sf":
                found = [x for x in self.events if x["ph"] == "X" and (x["pid"], x["tid"], x["ts"]) ==
                         (e["pid"], e["tid"], e["ts"]) and x["cat"].startswith(("copies", "compute"))]
                ends[e["id"]].setdefault(e["ph"], found[-1])
        return {number: (pair["s"], pair["f"]) for number, pair in ends.items() if len(pair) == 2}


def stack(n=8, d=128):
    return made(lambda: nn.Sequential(*[nn.Linear(d, d) for _ in range(n)]))


BUDGET = 4 * 128 * 129 * 4


def passes(model, count):
    with torch.inference_mode():
        return [model(torch.ones(2, 128)) for _ in range(count)][-1]


@pytest.fixture(scope="module")
def inference(tmp_path_factory):
    """A trace of three passes, and their records."""
    model = stagehand.layer(stack(), vram_budget=BUDGET, device="sim")
    passes(model, 5)
    path = tmp_path_factory.mktemp("trace") / "run.json.gz"
    with stagehand.trace(path) as recording:
        passes(model, 3)
    assert recording.lost == 0
    own = runtime(model)
    steps = own.telemetry.history[-3:]
    name = own.name
    stagehand.shutdown(model)
    return Trace(path), steps, name


def test_every_copy_ends_before_the_use_that_it_is_for(inference):
    trace, _, _ = inference
    arrows = trace.arrows()
    assert len(arrows) >= 8
    for copy, use in arrows.values():
        assert copy["name"] == use["name"]
        assert copy["ts"] + copy["dur"] <= use["ts"] + NS, (copy, use)


def test_every_streamed_use_has_its_copy(inference):
    """A unit that is copied in each step has an arrow to each use but those whose copy came before the recording."""
    trace, steps, _ = inference
    copied = collections.Counter(e["name"] for e in trace.slices("copies up"))
    reached = collections.Counter(use["name"] for _, use in trace.arrows().values())
    assert copied and all(reached[name] >= count - 1 for name, count in copied.items())


def test_sums_are_those_of_the_telemetry(inference):
    trace, steps, _ = inference
    numbers = [s.step for s in steps]
    for step in steps:
        own = [e for e in trace.events if e.get("args", {}).get("step") == step.step]
        compute = [e for e in own if e["cat"] == "compute"]
        stalls = [e for e in compute if e["name"].startswith("waits for ")]
        total = lambda events: sum(e["dur"] for e in events) / 1e3  # noqa: E731
        assert total(stalls) == pytest.approx(step.stall_time_ms, abs=1e-3)
        assert total(compute) - total(stalls) == pytest.approx(step.compute_time_ms, rel=1e-3, abs=1e-3)
        whole, = (e for e in own if e["cat"] == "steps")
        assert whole["dur"] / 1e3 == pytest.approx(step.step_time_ms, rel=1e-6, abs=1e-5)
        copies = [e for e in own if e["cat"].startswith("copies up")]
        if step.step != numbers[0]:  # some of the first one's began before the recording
            assert sum(e["args"]["bytes"] for e in copies) == step.h2d_bytes
            assert total(copies) == pytest.approx(step.copy_time_ms, rel=1e-3, abs=1e-3)


def test_slices_of_a_track_do_not_overlap(inference):
    trace, _, _ = inference
    tracks = collections.defaultdict(list)
    for e in trace.events:
        if e["ph"] == "X" and e["cat"] in ("compute", "copies up", "steps"):
            tracks[e["pid"], e["tid"]].append(e)
    assert len(tracks) == 3
    for events in tracks.values():
        events.sort(key=lambda e: e["ts"])
        for a, b in zip(events, events[1:]):
            assert a["ts"] + a["dur"] <= b["ts"] + 2 * NS


def test_tracks_and_counters_have_their_names(inference):
    trace, steps, name = inference
    assert f"stagehand: {name}" in trace.processes.values() and "stagehand: host" in trace.processes.values()
    assert {"compute", "copies up", "steps"} <= set(trace.threads.values())
    assert [value for _, value in trace.counter("device memory, MiB")] == pytest.approx(
        [s.vram_used_mb for s in steps], rel=1e-4)
    assert any(value > 0 for _, value in trace.counter("link, GB/s"))
    assert trace.counter("memory of the process, MB")[0][1] > 10
    assert min(value for _, value in trace.counter("prefetched, MB")) >= 0


def test_the_ring_is_counted_within_its_size(tmp_path):
    model = stagehand.layer(stack(), vram_budget=BUDGET, device="sim")
    passes(model, 8)  # the plan is followed from end to end
    with stagehand.trace(tmp_path / "run.json"):
        passes(model, 3)
    ring = runtime(model).plan["ring_bytes"] / 2**20
    stagehand.shutdown(model)
    trace = Trace(tmp_path / "run.json")
    values = [value for _, value in trace.counter("in the ring, MiB")]
    assert len(values) > len(trace.slices("steps"))
    assert min(values) >= 0 and 0 < max(values) <= ring * 1.001
    assert trace.file["stagehand"] == 1 and trace.file["lost"] == 0


def test_host_calls_are_on_the_thread_that_made_them(inference):
    trace, _, name = inference
    calls = trace.slices("host call")
    assert {"step begin", "step end"} <= {e["name"] for e in calls}
    acquired = collections.Counter(e["name"] for e in calls)
    assert sum(acquired[f"{i}"] for i in range(8)) == 24


def test_times_are_those_of_the_profiler(tmp_path):
    """Both files count from the same moment, and a pass lies in both at the same time."""
    from torch.profiler import ProfilerActivity, profile, record_function
    model = stagehand.layer(stack(), vram_budget=BUDGET, device="sim")
    passes(model, 4)
    with profile(activities=[ProfilerActivity.CPU]) as profiler, stagehand.trace(tmp_path / "own.json"):
        with record_function("first pass"):
            passes(model, 1)
            runtime(model).end_step()
        time.sleep(0.2)
    profiler.export_chrome_trace(str(tmp_path / "theirs.json"))
    own, theirs = Trace(tmp_path / "own.json"), json.loads((tmp_path / "theirs.json").read_text())
    mark = next(e for e in theirs["traceEvents"] if e.get("name") == "first pass" and e["ph"] == "X")
    if "baseTimeNanoseconds" not in theirs:
        pytest.skip("this PyTorch's traces count from 1970")
    assert own.file["baseTimeNanoseconds"] == theirs["baseTimeNanoseconds"]
    for e in own.slices("compute"):
        assert mark["ts"] - 5e4 <= e["ts"] and e["ts"] + e["dur"] <= mark["ts"] + mark["dur"] + 5e4


def test_training_with_downloads_spills_and_an_optimizer(tmp_path):
    """A LoRA-like step: frozen layers stream, adapters train on the host, activations spill."""
    model = made(Stack)
    for name, param in model.named_parameters():
        param.requires_grad_("up" in name)
    ref = aligned_copy(model)
    stagehand.layer(model, vram_budget="150KB", device="sim", trainables="host")
    optimizer = stagehand.optim.OffloadedAdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    x, = model.example()
    path = tmp_path / "train.json.gz"

    def step():
        with stagehand.activation.offload(vram_budget="1KB", device="sim"):
            loss = model(x).pow(2).mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    with stagehand.trace(path):
        losses = [step() for _ in range(3)]
    trace = Trace(path)
    assert same(losses[0], ref(x).pow(2).mean().detach())
    own = runtime(model)
    assert sum(e["args"]["bytes"] for e in trace.slices("copies down")) == own.stats["d2h_bytes"] > 0
    assert trace.slices("spills") and trace.slices("restores")
    assert sum(e["args"]["bytes"] for e in trace.slices("optimizer")) == 3 * sum(
        p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    for copy, use in trace.arrows().values():
        assert copy["ts"] + copy["dur"] <= use["ts"] + NS
    # Each step goes forward, then backward, and says so.
    uses = [e for e in trace.slices("compute") if "bytes" in e["args"]]
    for number in {e["args"]["step"] for e in uses}:
        ways = [e["name"].endswith(", backward") for e in uses if e["args"]["step"] == number]
        assert ways == sorted(ways) and any(ways) and not all(ways)
    names = {e["name"] for e in uses}
    assert any(name + ", backward" in names for name in names)
    optimizer.shutdown() if hasattr(optimizer, "shutdown") else None


def test_values_are_the_same_under_a_trace(tmp_path):
    model = stack()
    ref = aligned_copy(model)
    stagehand.layer(model, vram_budget=BUDGET, device="sim")
    with stagehand.trace(tmp_path / "run.json"):
        out = passes(model, 4)
    assert same(out, passes(ref, 1))


def test_reads_of_files_are_seen(tmp_path):
    from safetensors.torch import save_file
    model = stack()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    stagehand.layer(model, source=tmp_path / "model.safetensors", vram_budget=BUDGET, device="sim")
    passes(model, 3)
    before = runtime(model).stats["file_bytes"]
    with stagehand.trace(tmp_path / "run.json"):
        passes(model, 2)
        runtime(model).end_step()
    trace = Trace(tmp_path / "run.json")
    seen = sum(e["args"]["bytes"] for e in trace.slices("disk"))
    assert 0 < seen and runtime(model).stats["file_bytes"] > before


def test_the_oldest_events_give_way(tmp_path):
    model = stagehand.layer(stack(), vram_budget=BUDGET, device="sim")
    with pytest.warns(RuntimeWarning, match="lacks its first"), \
            stagehand.trace(tmp_path / "run.json", events=1024) as recording:
        passes(model, 60)
    trace = Trace(tmp_path / "run.json")
    kept = [e for e in trace.events if e["ph"] in "XC"]
    assert len(kept) == 1024 and recording.lost == trace.file["lost"] > 0
    last = max(e["args"]["step"] for e in kept if "step" in e.get("args", {}))
    assert last == runtime(model).telemetry.history[-1].step


def test_what_is_wrong_is_said_before_the_run(tmp_path):
    other = tmp_path / "model.safetensors"
    other.write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    with pytest.raises(stagehand.StagehandError, match="holds something else than a trace"):
        with stagehand.trace(other):
            raise AssertionError("it was entered")
    assert other.read_bytes() == b"\x08\0\0\0\0\0\0\0{}      "
    with pytest.raises(stagehand.StagehandError), stagehand.trace(tmp_path / "no" / "run.json"):
        raise AssertionError("it was entered")
    with pytest.raises(ValueError, match="1024"), stagehand.trace(tmp_path / "run.json", events=5):
        raise AssertionError("it was entered")
    with stagehand.trace(tmp_path / "a.json"):
        with pytest.raises(stagehand.InvalidStateTransitionError, match="is under way"):
            stagehand.trace(tmp_path / "b.json").__enter__()
    with pytest.raises(stagehand.InvalidStateTransitionError, match="nothing is being recorded"):
        _core.timeline_end()


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
def test_a_trace_replaces_a_trace(tmp_path, name):
    model = stagehand.layer(stack(), vram_budget=BUDGET, device="sim")
    for count in (4, 1):
        with stagehand.trace(tmp_path / name):
            passes(model, count)
            runtime(model).end_step()
    assert len(Trace(tmp_path / name).slices("steps")) == 1


def test_a_failure_inside_leaves_a_file_and_no_recording(tmp_path):
    model = stagehand.layer(stack(), vram_budget=BUDGET, device="sim")
    with pytest.raises(ZeroDivisionError), stagehand.trace(tmp_path / "run.json"):
        passes(model, 2)
        1 / 0  # noqa: B018
    assert Trace(tmp_path / "run.json").slices("compute")
    with stagehand.trace(tmp_path / "again.json"):
        pass
    assert Trace(tmp_path / "again.json").events == []


def test_names_are_text_in_any_reader(tmp_path):
    model = made(lambda: nn.ModuleDict({"a\"b\\c\nd": nn.Linear(128, 128), "ü": nn.Linear(128, 128)}))
    model.forward = lambda x: [x := part(x) for part in model.values()][-1]
    stagehand.layer(model, vram_budget=2 * 128 * 129 * 4, device="sim")
    with stagehand.trace(tmp_path / "run.json"):
        passes(model, 3)
        runtime(model).end_step()
    names = {e["name"] for e in Trace(tmp_path / "run.json").slices("compute")}
    assert {"a\"b\\c?d", "ü"} <= names
