"""Field cases P: silent no-ops, speed, telemetry."""

from __future__ import annotations

import gc
import itertools
import json
import os
import time
import tracemalloc

import card
import pytest
import support as s
import torch
from stagehand.activation import ActivationRuntime, ActivationStagehandConfig
from worlds import Checkpointed, infer, managed, needs_cuda, run

import stagehand
from stagehand import _core


def test_104_each_switch_has_its_own_effect_in_every_combination():
    """Bytes of weights on the device, bytes that left it, tensors that are saved."""
    effects = {}
    for streams, spills, checkpoints in itertools.product((False, True), repeat=3):
        model = s.made(Checkpointed if checkpoints else s.Stack, 5, 32, frozen=False)
        ref = s.aligned_copy(model)
        device = s.device(1 << 30)
        if streams:
            stagehand.layer(model, vram_budget=s.tight_budget(model), device=device)
        else:
            stagehand.layer(model, vram_budget=4 * s.nbytes(model), device=device)
        config = ActivationStagehandConfig(enabled=spills, slabs_per_class=None, max_inflight_d2h=8,
                                           vram_high_watermark_mb=0, vram_low_watermark_mb=0, recompute_cheap=False)
        x = torch.randn(64, 32, requires_grad=True)
        activations = ActivationRuntime(config, device, smallest=1024, high=0, low=0) if spills else None
        kept = []

        def step(net, spilled):
            net.zero_grad()
            with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes) or t, lambda t: t):
                if spilled:
                    with activations.managed_forward():
                        out = net(x)
                else:
                    out = net(x)
            out.pow(2).sum().backward()
            return [out.detach(), *(p.grad for p in net.parameters())]

        for _ in range(2):
            kept.clear()
            want = step(ref, False)
            saved = sum(kept)
            assert s.same(step(model, spills), want)
        stats = run(model).stats
        effects[streams, spills, checkpoints] = (
            stats["device_peak"], activations.stats["spill_bytes"] if spills else 0, saved)
        run(model).shutdown()
        if spills:
            activations.shutdown()
    for a, b, c in itertools.product((False, True), repeat=3):
        resident, spilled, saved = effects[a, b, c]
        assert effects[True, b, c][0] < effects[False, b, c][0] * 2 / 3
        assert (spilled > 0) == b
        assert effects[a, b, True][2] < effects[a, b, False][2] / 2, effects


def test_106_buffers_of_spilled_activations_are_made_once():
    net, x = s.made(s.Stack, 6, 64, frozen=False).to(card.TORCH), card.there(torch.randn(32, 64))
    config = ActivationStagehandConfig(enabled=True, slabs_per_class=None, max_inflight_d2h=8, recompute_cheap=False)
    runtime = ActivationRuntime(config, s.device(1 << 30), smallest=1024, high=0, low=0)
    misses = []
    for step in range(20):
        runtime.step_begin(step)
        with runtime.managed_forward():
            net(x).sum().backward()
        metrics = runtime.step_end()
        misses.append(metrics.pool_misses)
        assert metrics.pool_hits + metrics.pool_misses > 10
    assert sum(misses[:3]) > 0 and not any(misses[3:]), misses
    runtime.shutdown()


def test_106_buffers_of_gradients_and_weights_are_made_once():
    model, _ = managed(s.Stack, 6, 48, frozen=False, link=None)
    x = model.example()[0]
    pinned = []
    for step in range(20):
        model.zero_grad()
        model(x).sum().backward()
        stats = run(model).session.grads.stats()
        pinned.append((stats["pinned_bytes"], stats["pageable_bytes"], stats["regions"]))
    assert len(set(pinned[3:])) == 1, pinned


@needs_cuda
@pytest.mark.alone
def test_106_on_cuda_no_pinned_allocation_after_the_third_step():
    net, x = s.Stack(8, 1024).cuda(), torch.randn(4096, 1024, device="cuda", requires_grad=True)
    for _ in range(3):
        net(x).sum().backward()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(10):
        net(x).sum().backward()
    torch.cuda.synchronize()
    plain = (time.perf_counter() - start) / 10
    held = torch.cuda.max_memory_allocated()
    with stagehand.activation.offload(held * 2 // 3, "cuda") as runtime:
        for _ in range(5):
            net(x).sum().backward()
        before = runtime.stats
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            net(x).sum().backward()
        assert not [e for e in profile.events() if "HostAlloc" in e.name or "HostRegister" in e.name]
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(10):
            net(x).sum().backward()
        torch.cuda.synchronize()
        ours = (time.perf_counter() - start) / 10
        moved = (runtime.stats["spill_bytes"] + runtime.stats["restore_bytes"]
                 - before["spill_bytes"] - before["restore_bytes"]) / 11
    stagehand.activation.shutdown()
    assert ours < (plain + moved / 20e9) * 1.15


def test_108_a_model_that_gave_way_streams_as_before_when_it_comes_back():
    """Virtual time: the plans are the same every time."""
    a, b = s.made(s.Stack, 8, 48), s.made(s.Stack, 8, 48, seed=1)
    refs = {id(a): s.aligned_copy(a), id(b): s.aligned_copy(b)}
    budget = s.tight_budget(a) + 3 * s.nbytes(a.blocks[0])
    device = _core.Device("sim", memory_bytes=budget + budget // 4, virtual_time=True, link_bytes_per_s=10**9)
    for model in (a, b):
        stagehand.layer(model, vram_budget=budget, device=device, inference_mode=True)

    def passes(model):
        moved = []
        for _ in range(4):
            before = run(model).stats["h2d_bytes"]
            x = model.example()[0]
            assert s.same(infer(model, x), infer(refs[id(model)], x))
            moved.append(run(model).stats["h2d_bytes"] - before)
        return moved

    passes(a)  # what it knows nothing of yet
    first = {id(m): passes(m) for m in (a, b, a, b)}
    for _ in range(3):
        for model in (a, b):
            again = passes(model)
            for moved in again[1:]:
                assert moved <= 1.1 * max(first[id(model)][1:]), (again, first)
    assert run(a).stats["yields"] + run(b).stats["yields"] > 0


@pytest.mark.alone
def test_110_telemetry_does_not_grow(tmp_path):
    """Some hundred steps: nothing that Python keeps, a bounded file, and no more than a few microseconds a step."""
    model = s.made(s.Stack, 2, 40)
    config = stagehand.StagehandConfig(vram_budget=1 << 20, telemetry_file=str(tmp_path / "t.jsonl"))
    runtime = stagehand.StagehandRuntime(model, config, block_pattern=r"^blocks\.\d+$", device=s.device(1 << 20))
    x = model.example()[0]
    with torch.no_grad():
        for _ in range(150):
            model(x)
        gc.collect()
        tracemalloc.start()
        try:
            for _ in range(100):
                model(x)
            gc.collect()
            before = tracemalloc.get_traced_memory()[0]
            for _ in range(400):
                model(x)
            gc.collect()
            grown = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
    assert grown < 25_000, grown  # 1 MB in 19,000 steps are 21 kB in 400
    assert len(runtime.telemetry.history) == 100
    runtime.shutdown()
    lines = (tmp_path / "t.jsonl").read_text().splitlines()
    assert len(lines) == 650 and json.loads(lines[-1])["step"] == 649


# ---------------------------------------------------------------------- own cases


def activation_writer(path):
    runtime = ActivationRuntime(ActivationStagehandConfig(enabled=True, telemetry_file=str(path)), s.device(1 << 20))
    runtime.step_begin(0)
    try:
        runtime.step_end()
    finally:
        runtime.shutdown()


def conductor_writer(path):
    runtime = stagehand.conductor.ConductorRuntime(
        stagehand.conductor.ConductorConfig(enabled=True, telemetry_file=str(path)))
    try:
        runtime.begin_step(0)
        runtime.end_step()
    finally:
        runtime.shutdown()


def layer_writer(path):
    model = s.made(s.Stack, 2, 40)
    s.wrap(model, s.tight_budget(model), telemetry=str(path))
    infer(model, model.example()[0])
    run(model).shutdown()


WRITERS = {"layer": layer_writer, "activation": activation_writer, "conductor": conductor_writer}


@pytest.mark.parametrize("writer", WRITERS)
def test_own_telemetry_is_written_to_its_own_file_alone(writer, tmp_path):
    """Links of both kinds, a pipe that nobody reads, a folder, a device, a model's file, a path below a file."""
    write, target = WRITERS[writer], tmp_path / "target"
    model = b"\x08\x00\x00\x00\x00\x00\x00\x00{}      "
    target.write_bytes(model)
    (tmp_path / "link").symlink_to(target)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    empty = tmp_path / "empty"
    empty.touch()
    (tmp_path / "hard").hardlink_to(empty)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("link", "dangling", "hard", "pipe", "folder", "target", "target/below"):
        with pytest.raises((stagehand.StagehandError, OSError)) as caught:
            write(tmp_path / name)
        assert name.split("/")[0] in str(caught.value), caught.value
    with pytest.raises((stagehand.StagehandError, OSError), match="null"):
        write("/dev/null")
    assert target.read_bytes() == model and empty.read_bytes() == b""
    assert not (tmp_path / "nowhere").exists() and os.listdir(tmp_path / "folder") == []


@pytest.mark.parametrize("writer", WRITERS)
def test_own_telemetry_is_readable_by_its_owner_alone_and_added_to(writer, tmp_path):
    path, before = tmp_path / "t.jsonl", os.umask(0)
    try:
        WRITERS[writer](path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    lines = path.read_text()
    assert all(json.loads(line) for line in lines.splitlines())
    WRITERS[writer](path)
    assert path.read_text().startswith(lines) and len(path.read_text()) > len(lines)


def test_own_a_telemetry_file_that_is_full_says_so_once(tmp_path):
    from stagehand.jsonlines import JsonLines

    file = JsonLines(tmp_path / "t.jsonl", max_bytes=200)
    for step in range(50):
        file.append([{"step": step}])
    lines = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert lines[-1] == {"truncated": True} and [line["step"] for line in lines[:-1]] == list(range(len(lines) - 1))
    assert (tmp_path / "t.jsonl").stat().st_size <= 200
    JsonLines(tmp_path / "t.jsonl", max_bytes=200).append([{"step": 1}])
    assert (tmp_path / "t.jsonl").stat().st_size <= 200


def test_own_a_telemetry_file_that_is_taken_away_hurts_nobody(tmp_path):
    """Deleted, and replaced by a link while the run goes on: the lines stay with the file that was opened."""
    model, ref = managed(s.Stack, 4, 40, telemetry=str(tmp_path / "t.jsonl"))
    other = tmp_path / "other"
    other.touch()
    for i in range(4):
        x = model.example()[0]
        assert s.same(infer(model, x), infer(ref, x))
        if i == 1:
            (tmp_path / "t.jsonl").unlink()
            (tmp_path / "t.jsonl").symlink_to(other)
    run(model).shutdown()
    assert other.read_bytes() == b""


def test_own_a_file_that_must_stay_empty_is_warned_of(tmp_path):
    model = s.made(s.Stack, 2, 8)
    with pytest.warns(RuntimeWarning, match=r"t\.jsonl stays empty"):
        s.wrap(model, 1 << 20, telemetry=str(tmp_path / "t.jsonl"))
    run(model).shutdown()


def test_own_metrics_of_a_step_that_raised_are_not_those_of_the_next():
    model, ref = managed(s.Router, 8, 40)
    x = model.example()[0]
    for _ in range(4):
        infer(model, x)
    usual = run(model).stats["last_step"]["h2d_bytes"]
    for _ in range(3):
        with torch.no_grad(), pytest.raises(ValueError):
            model(x, fail=3)
    with torch.no_grad():
        for _ in range(3):
            assert s.same(model(x), ref(x))
    last = run(model).stats["last_step"]
    assert last["h2d_bytes"] <= usual + s.nbytes(model.blocks[0]) and last["prefetch_hits"] > 0
    numbers = [m.step for m in run(model).telemetry.history]
    assert numbers == sorted(set(numbers))
