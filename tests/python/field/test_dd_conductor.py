"""Field cases DD, 224: each setting and each hint of the conductor does what its name says."""

from __future__ import annotations

import dataclasses
import enum
import json

import card
import pytest
import support as s
import torch
from worlds import BLOCKS, infer, run

import stagehand
from stagehand.activation import ActivationRuntime, ActivationStagehandConfig
from stagehand.conductor import (
    ConductorConfig,
    ConductorRuntime,
    DenialReason,
    GrantStatus,
    Phase,
    Priority,
    RuntimeLimitHints,
    SquareQConductorAdapter,
)

MIB = 1 << 20


def conductor(**options) -> ConductorRuntime:
    return ConductorRuntime(ConductorConfig(**{"enabled": True, **options}))


def weights(n=4, d=256, **options):
    model = s.made(s.Stack, n, d)
    s.wrap(model, s.tight_budget(model), **options)
    return model


def static(window=4):
    model = s.made(s.Stack, 6, 64)
    config = stagehand.StagehandConfig(vram_budget=s.tight_budget(model), policy="static",
                                       prefetch_window_blocks=window)
    stagehand.StagehandRuntime(model, config, block_pattern=BLOCKS, device=s.device(1 << 26)).prepare()
    return model


def spilling(device=None):
    config = ActivationStagehandConfig(enabled=True, vram_high_watermark_mb=0, vram_low_watermark_mb=0,
                                       slabs_per_class=None, max_inflight_d2h=8, max_inflight_h2d=8,
                                       recompute_cheap=False)
    return ActivationRuntime(config, device or s.device(1 << 28), smallest=1024)


# ---------------------------------------------------------------------- pinned memory


def asked(runtime, nbytes, owner="other"):
    if not runtime.budget.has(owner):
        runtime.budget.register(owner)
    return runtime.budget.reserve(owner, nbytes, resource="PINNED")


def test_224_what_weights_have_pinned_counts_against_the_cap(caplog):
    model = weights()
    pinned = run(model).stats["pinned_bytes"]
    assert pinned > 3 * MIB
    small = conductor(pinned_cap_mb=1)
    small.attach(model)
    assert small.budget.headroom("PINNED") == 0
    grant = asked(small, 1)
    assert (grant.status, grant.reason) == (GrantStatus.DENIED, DenialReason.PINNED_CAP)
    assert small.budget.deny_count == 1
    assert ["pinned_cap_mb=1" in text and "ram_budget" in text for text in caplog.messages] == [True]
    x = torch.randn(2, 256)
    assert s.same([infer(model, x)], [infer(s.made(s.Stack, 4, 256), x)])
    small.shutdown()
    large = conductor(pinned_cap_mb=64)
    large.attach(model)
    assert large.budget.headroom("PINNED") == 64 * MIB - pinned
    assert asked(large, 64 * MIB - pinned + 1).status is GrantStatus.DENIED
    assert asked(large, 64 * MIB - pinned).status is GrantStatus.GRANTED
    assert large.budget.headroom("PINNED") == 0
    large.begin_step(0)
    large.end_step()
    record = large.telemetry.history[-1]
    assert record["pinned_in_use_mb"] == pinned / MIB and record["pinned_granted_mb"] == 64 - pinned / MIB
    large.unregister_adapter("stagehand")
    assert large.budget.headroom("PINNED") == pinned
    large.shutdown()
    uncapped = conductor()
    uncapped.attach(model)
    assert asked(uncapped, 1 << 50).status is GrantStatus.GRANTED
    uncapped.shutdown()
    run(model).shutdown()


def pinned(models) -> int:
    return sum(run(model).stats["ram_pinned_bytes"] for model in models)


def test_224_pinned_memory_in_which_files_are_kept_counts_and_a_shared_pool_once(tmp_path):
    from safetensors.torch import save_file

    save_file(s.made(s.Stack, 4, 256).state_dict(), tmp_path / "m.safetensors")
    pool = stagehand.PinnedPool(4, 1)
    models = [stagehand.load(lambda: s.Stack(4, 256), tmp_path / "m.safetensors", device=s.device(1 << 26),
                             vram_budget=s.tight_budget(s.made(s.Stack, 4, 256)), ram_budget="1MiB", pool=pool)
              for _ in range(2)]
    x = torch.randn(2, 256)
    for model in models:
        infer(model, x)
    stats = [run(model).stats for model in models]
    assert all(0 < now["ram_pinned_bytes"] <= now["ram_bytes"] for now in stats)
    shared = 4 * MIB if stats[0]["staging_pinned"] else 0
    runtime = conductor(pinned_cap_mb=64)
    for model in models:
        runtime.attach(model)
    kept, before = pinned(models), None
    while kept != before:  # readers may keep more meanwhile
        before, left = kept, runtime.budget.headroom("PINNED")
        kept = pinned(models)
    assert left == 64 * MIB - kept - shared
    runtime.shutdown()
    for model in models:
        run(model).shutdown()
    pool.shutdown()


def gradients(net, x, activations):
    net.zero_grad()
    with activations.managed_forward():
        out = net(x)
    out.pow(2).sum().backward()
    return [out.detach(), *(p.grad.clone() for p in net.parameters())]


@pytest.mark.parametrize("cap, pins", [(None, True), (64, True), (1, False)])
def test_224_activations_pin_no_more_than_the_cap_leaves(cap, pins):
    activations = spilling()
    runtime = conductor(pinned_cap_mb=cap)
    runtime.attach(activations)
    if cap == 1:
        assert asked(runtime, 1 * MIB).status is GrantStatus.GRANTED  # nothing is left of it
        runtime.begin_step(0)
    net, ref = (s.made(s.Stack, 3, 64, frozen=False).to(card.TORCH) for _ in range(2))
    x = card.there(torch.randn(512, 64))
    want = gradients(ref, x, spilling(s.device(1 << 28)))
    assert s.same(gradients(net, x, activations), want)
    stats = activations.stats
    assert stats["spill_bytes"] > 0 and (stats["pinned_bytes"] > 0) is pins
    if cap:
        assert runtime.budget.headroom("PINNED") == max(0, (cap - (cap == 1)) * MIB - stats["pinned_bytes"])
    runtime.shutdown()
    assert s.same(gradients(net, x, activations), want)
    activations.shutdown()


# ---------------------------------------------------------------------- configurations and snapshots


def test_224_the_example_needs_no_strategy(tmp_path):
    path = tmp_path / "train.json"
    path.write_text(json.dumps({"memory": {"stagehand": {
        "mode": "layer", "conductor_config": {"enabled": True, "vram_soft_cap_mb": 22000, "vram_hard_cap_mb": 23500,
                                              "h2d_slots": 2, "d2h_slots": 2, "debug_event_trace": False}}}}))
    with stagehand.session(s.made(s.Stack, 2, 32), path, device=s.device(1 << 24)) as memory:
        with memory.step():
            pass
        assert memory.conductor.enabled
    with pytest.raises(ValueError, match="memory.strategy is None"):
        stagehand.session(s.made(s.Stack, 2, 32), {"memory": {}})


class Bits(enum.Enum):
    FOUR = "int4"


class Slabs:
    block_precision_map = {3: Bits.FOUR, "blocks.1": torch.bfloat16}


def test_224_the_snapshot_of_a_quantised_runtime_has_its_precisions_and_requests(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runtime, slabs = conductor(h2d_slots=1, telemetry_enabled=True), Slabs()
    adapter = SquareQConductorAdapter(slabs)
    runtime.register_adapter("squareq", adapter)
    runtime.begin_step(0)
    first = adapter.request_slab_load(block_id=1, estimated_bytes=10)
    assert adapter.request_lookahead(block_id=2, estimated_bytes=10).token is None
    runtime.transfer.release_token(first.token)
    runtime.policy.block_precision_map = {3: "int8"}
    runtime.enter_optimizer()
    assert slabs.block_precision_map[3] == "int8"
    runtime.end_step()
    want = {"block_precision_map": {"3": "int8", "blocks.1": "torch.bfloat16"}, "lookaheads": 1, "slab_loads": 1,
            "refused": 1}
    assert json.loads((tmp_path / "conductor_telemetry.jsonl").read_text())["runtime_snapshots"] == {"squareq": want}
    runtime.shutdown()
    assert slabs.block_precision_map[3] is Bits.FOUR
    assert adapter.snapshot()["block_precision_map"]["3"] == "int4"
    assert SquareQConductorAdapter().snapshot() == {"block_precision_map": {}, "lookaheads": 0, "slab_loads": 0,
                                                    "refused": 0}


def test_224_the_snapshot_says_which_hints_have_no_effect():
    planned, fixed = weights(), static()
    runtime = conductor(h2d_slots=3)
    runtime.attach(planned, "planned")
    runtime.attach(fixed, "fixed")
    elsewhere = conductor()
    elsewhere.attach(fixed, "fixed")  # its copies go through the first
    for owner, name, ignored in ((runtime, "planned", True), (runtime, "fixed", False), (elsewhere, "fixed", True)):
        snapshot = owner._adapters[name].snapshot()
        assert snapshot.get("without_effect", []) == (["prefetch_window", "max_inflight"] if ignored else [])
    assert runtime._adapters["fixed"].snapshot()["max_inflight"] == 3
    for one in (elsewhere, runtime):
        one.shutdown()
    for model in (planned, fixed):
        run(model).shutdown()


# ---------------------------------------------------------------------- every hint


class Watched:
    """A core whose knobs are noted."""

    def __init__(self, core):
        self.core, self.set = core, {}

    def __getattr__(self, name):
        if not name.startswith("set_"):
            return getattr(self.core, name)
        return lambda value: (self.set.__setitem__(name, value), getattr(self.core, name)(value))[1]


USUAL = RuntimeLimitHints(max_inflight_h2d=5, max_inflight_d2h=5, prefetch_window_cap=9)


def knobs(hints, phase=Phase.FORWARD):
    """What the hints make of a runtime of each kind."""
    model, activations, slabs, runtime = static(window=4), spilling(), Slabs(), conductor()
    session = run(model).session
    session.core = watched = Watched(session.core)
    found = [runtime.attach(model), runtime.attach(activations), SquareQConductorAdapter(slabs)]
    runtime.register_adapter("squareq", found[-1])
    for adapter in found:
        adapter.on_phase(phase)
        adapter.on_hints(hints)
    transfer = activations.transfer
    result = {"window": watched.set.get("set_prefetch_window", 4), "inflight": watched.set.get("set_max_inflight", 0),
              "d2h": transfer._max_d2h, "h2d": transfer._max_h2d, "precision": dict(slabs.block_precision_map)}
    runtime.shutdown()
    assert watched.set == {**watched.set, "set_prefetch_window": 4, "set_max_inflight": 0}
    session.core = watched.core
    run(model).shutdown()
    activations.shutdown()
    return result


@pytest.mark.parametrize("field, value, phase, changes", [
    ("max_inflight_h2d", 1, Phase.FORWARD, {"inflight": 1, "h2d": 1}),
    ("max_inflight_d2h", 1, Phase.FORWARD, {"d2h": 1}),
    ("prefetch_window_cap", 2, Phase.FORWARD, {"window": 2}),
    ("suppress_speculative", True, Phase.FORWARD, {"window": 1}),
    ("suppress_speculative", True, Phase.OPTIMIZER, {"window": 1, "d2h": 0}),
    ("block_precision_map", {3: "fp8"}, Phase.FORWARD, {"precision": {**Slabs.block_precision_map, 3: "fp8"}}),
])
def test_224_each_hint_has_its_effect_and_no_other(field, value, phase, changes):
    assert knobs(dataclasses.replace(USUAL, **{field: value}), phase) == {**knobs(USUAL, phase), **changes}


def test_224_every_hint_is_tried_above():
    assert {f.name for f in dataclasses.fields(RuntimeLimitHints)} == {
        "max_inflight_h2d", "max_inflight_d2h", "prefetch_window_cap", "suppress_speculative", "block_precision_map"}


# ---------------------------------------------------------------------- every setting


def tokens(runtime, direction):
    runtime.budget.register("one")
    return sum(runtime.transfer.acquire(direction, 1, Priority.CRITICAL, "one").token is not None for _ in range(9))


def granted(runtime, mode, **options):
    runtime.budget.register("one")
    n = 1
    while runtime.budget.reserve("one", MIB, mode, **options).granted_bytes:
        n += 1
    return n - 1


def lines(runtime):
    for number in range(4):
        runtime.begin_step(number)
        runtime.enter_forward()
        runtime.end_step()
    path = runtime.telemetry.path
    return [] if path is None else [json.loads(line) for line in open(path)]


def steps_written(runtime):
    return [line["step_id"] for line in lines(runtime) if "step_id" in line]


SETTINGS = {
    "enabled": (lambda r: r.core is not None, [(False, False), (True, True)]),
    "vram_soft_cap_mb": (lambda r: granted(r, "HARD"), [(3, 3), (5, 5)]),
    "vram_hard_cap_mb": (lambda r: granted(r, "BURST"), [(12, 12), (15, 15)]),
    "pinned_cap_mb": (lambda r: granted(r, "HARD", resource="PINNED"), [(2, 2), (7, 7)]),
    "h2d_slots": (lambda r: tokens(r, "H2D"), [(1, 1), (4, 4)]),
    "d2h_slots": (lambda r: tokens(r, "D2H"), [(1, 1), (4, 4)]),
    "debug_event_trace": (lambda r: any(line.get("event") == "phase" for line in lines(r)),
                          [(False, False), (True, True)]),
    "telemetry_interval_steps": (steps_written, [(1, [0, 1, 2, 3]), (2, [1, 3])]),
    "telemetry_file": (lambda r: (steps_written(r), r.telemetry.path and r.telemetry.path[-6:]),
                       [(None, ([], None)), ("b.json", ([0, 1, 2, 3], "b.json"))]),
    "telemetry_enabled": (steps_written, [(False, []), (True, [0, 1, 2, 3])]),
}


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(ConductorConfig)])
def test_224_each_setting_has_its_effect(field, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    look, cases = SETTINGS[field]
    usual = {"vram_soft_cap_mb": 5, "vram_hard_cap_mb": 10}
    for value, want in cases:
        usual["telemetry_file"] = f"{value}.json"
        runtime = conductor(**{**usual, field: value})
        assert look(runtime) == want
        runtime.shutdown()
