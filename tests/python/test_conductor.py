"""The conductor: what is disabled costs nothing, phases, reservations, knobs that come back, one cap for weights and
activations, and training under it that is bit-equal to the unwrapped model's."""

from __future__ import annotations

import json
import random
import sys

import card
import pytest
import torch
from support import Stack, aligned_copy, device, made, same, threads, tight_budget

import stagehand
from stagehand import _core
from stagehand.activation import ActivationRuntime, ActivationStagehandConfig
from stagehand.conductor import (
    AcquireStatus,
    Adapter,
    ConductorConfig,
    ConductorRuntime,
    DenialReason,
    GrantStatus,
    Mode,
    Phase,
    Priority,
    SquareQConductorAdapter,
)
from stagehand.errors import InvalidStateTransitionError, StagehandOOMError

MIB = 1 << 20
# test_cuda_conductor.py has the cap of a card.
caps_of_few_mib = pytest.mark.skipif(card.ON_CARD, reason="caps of a few MiB, of which cuBLAS's workspace takes more")


def conductor(soft=100, hard=120, **options) -> ConductorRuntime:
    return ConductorRuntime(ConductorConfig(enabled=True, vram_soft_cap_mb=soft, vram_hard_cap_mb=hard, **options))


def owned(runtime, *names):
    for name in names:
        runtime.budget.register(name)
    return runtime


# ---------------------------------------------------------------------- settings


@pytest.mark.parametrize("field, value, error", [
    ("enabled", 1, TypeError), ("debug_event_trace", "yes", TypeError), ("vram_soft_cap_mb", 0, ValueError),
    ("vram_hard_cap_mb", 21999, ValueError), ("vram_hard_cap_mb", 1.5, TypeError), ("h2d_slots", 0, ValueError),
    ("d2h_slots", 257, ValueError), ("d2h_slots", True, TypeError), ("pinned_cap_mb", -1, ValueError),
    ("telemetry_interval_steps", 0, ValueError), ("telemetry_file", 3, TypeError)])
def test_a_bad_setting_is_named(field, value, error):
    with pytest.raises(error, match=f"ConductorConfig.{field}"):
        ConductorConfig(**{field: value})


# ---------------------------------------------------------------------- disabled


def test_disabled_makes_nothing_and_each_call_returns_at_once():
    off = ConductorRuntime()
    assert off.core is off.phases is off.budget is off.transfer is off.policy is off.telemetry is None
    assert not off.enabled
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        count += event == "line"
        return trace

    calls = [(off.begin_step, 1), (off.enter_forward,), (off.enter_backward,), (off.enter_optimizer,), (off.end_step,),
             (off.backward_seen,), (off.attach, None), (off.register_adapter, "a", None), (off.unregister_adapter, "a"),
             (off.shutdown,)]
    before = sys.gettrace()
    for call, *args in calls:
        count = 0
        sys.settrace(trace)
        try:
            call(*args)
        finally:
            sys.settrace(before)
        assert 0 < count < 6, f"{call.__name__}: {count} lines"
    assert set(vars(off)) == {"config", "core", "phases", "budget", "transfer", "policy", "telemetry"}


def test_adapters_of_a_disabled_conductor_arrange_nothing():
    adapter = SquareQConductorAdapter()
    ConductorRuntime().register_adapter("squareq", adapter)
    assert adapter.request_lookahead(block_id=1, estimated_bytes=10, step_id=0) is None


# ---------------------------------------------------------------------- phases, reservations, tokens


def test_phases_and_what_is_against_them():
    runtime = conductor()
    with pytest.raises(InvalidStateTransitionError, match="no step is open"):
        runtime.enter_forward()
    runtime.begin_step(5)
    for enter, phase in ((runtime.enter_forward, Phase.FORWARD), (runtime.enter_backward, Phase.BACKWARD),
                         (runtime.enter_forward, Phase.FORWARD), (runtime.enter_backward, Phase.BACKWARD),
                         (runtime.enter_backward, Phase.BACKWARD), (runtime.enter_optimizer, Phase.OPTIMIZER)):
        enter()
        assert runtime.phases.phase is phase
    with pytest.raises(InvalidStateTransitionError, match="OPTIMIZER cannot enter FORWARD"):
        runtime.enter_forward()
    runtime.begin_step(6)  # as after an exception
    assert runtime.phases.phase is Phase.STEP_BEGIN
    runtime.end_step()
    with pytest.raises(InvalidStateTransitionError):
        runtime.end_step()
    assert [record["step_id"] for record in runtime.telemetry.history] == [6]


class Recorder(Adapter):
    def __init__(self, fails=False):
        self.fails, self.phases, self.hints = fails, [], []

    def on_phase(self, phase):
        self.phases.append(phase)
        if self.fails:
            raise RuntimeError("on purpose")

    def on_hints(self, hints):
        self.hints.append(hints)


def test_adapters_are_told_in_order_and_one_that_fails_is_logged(caplog):
    runtime = conductor()
    first, second = Recorder(fails=True), Recorder()
    runtime.register_adapter("first", first)
    runtime.register_adapter("second", second)
    with pytest.raises(InvalidStateTransitionError, match="second"):
        runtime.register_adapter("second", Recorder())
    runtime.begin_step(1)
    runtime.enter_forward()
    runtime.end_step()
    assert first.phases == second.phases == [Phase.STEP_BEGIN, Phase.FORWARD, Phase.STEP_END]
    assert len(caplog.records) == 3
    runtime.unregister_adapter("first")
    runtime.unregister_adapter("first")
    runtime.begin_step(2)
    assert len(first.phases) == 3 and len(second.phases) == 4


def test_an_adapter_that_cannot_attach_leaves_nothing():
    class Fails(Adapter):
        def attach(self, runtime, name):
            raise ValueError("not this one")

    runtime = conductor()
    with pytest.raises(ValueError, match="not this one"):
        runtime.register_adapter("it", Fails())
    assert runtime.budget.reserve("it", 10).reason is DenialReason.NOT_REGISTERED
    runtime.register_adapter("it", Recorder())


def test_reservations_by_name_with_reasons():
    runtime = owned(conductor(), "weights", "guest")
    assert runtime.budget.reserve("weights", 60 * MIB, "hard", "required").status is GrantStatus.GRANTED
    part = runtime.budget.reserve("guest", 60 * MIB, Mode.SOFT, Priority.SPECULATIVE)
    assert part[:3] == (GrantStatus.PARTIAL, 40 * MIB, DenialReason.VRAM_SOFT_CAP)
    denied = runtime.budget.reserve("weights", 61 * MIB, "burst")
    assert denied[:3] == (GrantStatus.DENIED, 0, DenialReason.VRAM_HARD_CAP)
    runtime.begin_step(1)
    scoped = runtime.budget.reserve("weights", 30 * MIB, phase_scope="optimizer")
    assert scoped.status is GrantStatus.GRANTED and runtime.budget.granted(part) == 10 * MIB
    runtime.enter_optimizer()
    runtime.end_step()
    assert runtime.budget.granted(scoped) == 0 and runtime.budget.granted(part) == 10 * MIB
    assert (runtime.budget.grant_count, runtime.budget.deny_count) == (1, 0)
    runtime.begin_step(2)
    assert runtime.budget.granted(part) == 40 * MIB and runtime.budget.headroom() == 0
    runtime.budget.unregister("guest")
    assert runtime.budget.headroom() == 40 * MIB and runtime.budget.headroom(hard=True) == 60 * MIB
    with pytest.raises(ValueError, match="HARD, SOFT, BURST"):
        runtime.budget.reserve("weights", 1, "most")


def test_pinned_memory_has_a_cap():
    runtime = owned(conductor(pinned_cap_mb=10), "weights")
    assert runtime.budget.reserve("weights", 11 * MIB, resource="pinned").reason is DenialReason.PINNED_CAP
    assert runtime.budget.reserve("weights", 10 * MIB, resource="pinned").status is GrantStatus.GRANTED


def test_tokens_through_an_adapter():
    runtime = conductor(h2d_slots=2, d2h_slots=1)
    adapter = SquareQConductorAdapter()
    runtime.register_adapter("squareq", adapter)
    one = adapter.request_lookahead(block_id="blocks.0", estimated_bytes=4 * MIB, step_id=1)
    two = adapter.request_slab_load(block_id=1, estimated_bytes=4 * MIB, step_id=1)
    assert one.status.value == two.status.value == AcquireStatus.ACQUIRED.value == "acquired"
    late = adapter.request_slab_load(block_id=2, estimated_bytes=1, step_id=1)
    assert late.token is None and late.status is AcquireStatus.DEFERRED
    assert late.reason is DenialReason.H2D_SLOTS_EXHAUSTED and runtime.transfer.inflight("h2d") == 2
    adapter._conductor.transfer.complete_transfer(one.token, 4 * MIB, 2.0)
    for _ in range(2):
        adapter._conductor.transfer.release_token(one.token)
    assert runtime.transfer.inflight("h2d") == 1
    assert runtime.transfer.bandwidth("h2d") == pytest.approx(4 * MIB / 2e-3)
    runtime.begin_step(1)
    runtime.enter_optimizer()
    denied = adapter.request_prefetch(block_id=3, estimated_bytes=1)
    assert denied.status is AcquireStatus.DENIED
    assert denied.reason is DenialReason.PHASE_RULE_SUPPRESSED_SPECULATIVE
    runtime.unregister_adapter("squareq")
    assert runtime.transfer.inflight("h2d") == 0
    assert adapter.request_prefetch(block_id=3, estimated_bytes=1) is None


def test_precision_hints_reach_a_quantised_runtime_and_leave_with_it():
    class Slabs:
        block_precision_map = {"a": "int8"}

    slabs, before = Slabs(), Slabs.block_precision_map
    runtime = conductor()
    runtime.policy.block_precision_map = {"b": "int4"}
    runtime.register_adapter("squareq", SquareQConductorAdapter(slabs))
    assert slabs.block_precision_map == {"a": "int8", "b": "int4"}
    runtime.shutdown()
    assert slabs.block_precision_map is before


# ---------------------------------------------------------------------- training


class Trained:
    """A model whose weights stream and whose activations are spilled, each within a limit of its own."""

    def __init__(self, activations=5 * MIB, link=None, budget=None, **config):
        model = made(Stack, 6, 160, frozen=False)
        self.reference = aligned_copy(model)
        self.model = model
        self.device = device(1 << 30, link)
        self.budget = budget or tight_budget(model)
        self.weights = stagehand.StagehandRuntime(
            model, stagehand.StagehandConfig(vram_budget=self.budget, **config), device=self.device)
        self.activations = ActivationRuntime(
            ActivationStagehandConfig(enabled=True, slabs_per_class=None, max_inflight_d2h=4, max_inflight_h2d=4),
            self.device, smallest=256, high=activations, low=activations * 3 // 4)
        self.data = torch.randn(3, 192, 160, generator=torch.Generator().manual_seed(1))

    def step(self, step, runtime=None, optimizer=None):
        runtime = runtime or ConductorRuntime()
        runtime.begin_step(step)
        self.activations.step_begin(step)
        runtime.enter_forward()
        with self.activations.managed_forward():
            loss = self.model(self.data[step % 3]).square().mean()
        loss.backward()
        runtime.enter_optimizer()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        runtime.end_step()
        metrics = self.activations.step_end()
        session = self.weights.session
        self.peak = session.stay.reserved + session.core.stats()["device_peak"] + int(metrics.vram_peak_mb * MIB)
        return loss.detach(), metrics

    def close(self):
        self.activations.shutdown()
        self.weights.shutdown()


@pytest.fixture
def trained():
    made_here = []
    with threads(1):
        yield from _trained(made_here)


def _trained(made_here):

    def make(*args, **kwargs):
        made_here.append(Trained(*args, **kwargs))
        return made_here[-1]

    yield make
    for thing in made_here:
        thing.close()


def attached(thing, soft=4, hard=5, **options):
    runtime = conductor(soft, hard, **options)
    runtime.attach(thing.model)
    runtime.attach(thing.activations)
    return runtime


@caps_of_few_mib
def test_training_is_bit_equal_and_the_cap_holds_where_it_is_passed_without(trained):
    thing = trained()
    hard = 5 * MIB
    thing.step(0)
    thing.step(1)
    assert thing.peak > hard, "without a conductor each keeps its own limit, and together they pass the cap"
    thing.close()
    thing = trained(link=2e9)
    optimizer = torch.optim.SGD(thing.model.parameters(), lr=0.1, momentum=0.9)
    twin = torch.optim.SGD(thing.reference.parameters(), lr=0.1, momentum=0.9)
    runtime = attached(thing)
    spilled = 0
    for step in range(3):
        loss, metrics = thing.step(step, runtime, optimizer)
        want = thing.reference(thing.data[step % 3]).square().mean()
        want.backward()
        twin.step()
        twin.zero_grad()
        assert same(loss, want.detach()), f"step {step}"
        assert thing.peak <= hard, f"step {step}: {thing.peak / MIB:.2f} MiB"
        spilled += metrics.spill_bytes
    assert spilled > 0 and thing.weights.session.core.stats()["h2d_bytes"] > 0
    for (name, a), b in zip(thing.model.named_parameters(), thing.reference.parameters()):
        assert same(a.detach(), b.detach()), name
    stats = runtime.core.stats()
    assert stats["flight_bytes_H2D"] > 0 and stats["flight_bytes_D2H"] >= spilled
    assert runtime.transfer.bandwidth("h2d") > 0 and runtime.transfer.bandwidth("d2h") > 0
    runtime.shutdown()


@caps_of_few_mib
def test_what_the_optimizer_reserves_is_spilled_first(trained):
    thing = trained()
    runtime = owned(attached(thing, 7, 8), "optimizer")
    thing.step(0, runtime)
    high = thing.activations.saver.high
    runtime.begin_step(1)
    runtime.enter_forward()
    thing.activations.step_begin(1)
    with thing.activations.managed_forward():
        loss = thing.model(thing.data[1]).square().mean()
    kept = thing.activations.stats["kept_bytes"]
    grant = runtime.budget.reserve("optimizer", 3 * MIB, "hard", "required", "optimizer")
    assert grant.status is GrantStatus.GRANTED
    assert thing.activations.saver.high <= high - 2 * MIB
    assert thing.activations.stats["kept_bytes"] <= thing.activations.saver.high < kept
    loss.backward()
    runtime.enter_optimizer()
    runtime.end_step()
    thing.activations.step_end()
    runtime.begin_step(2)
    assert thing.activations.saver.high == high
    runtime.shutdown()


def test_weights_that_do_not_fit_below_the_cap_are_refused_and_left_alone(trained):
    thing = trained()
    runtime = conductor(1, 1)
    with pytest.raises(StagehandOOMError, match="vram_hard_cap_mb"):
        runtime.attach(thing.model)
    thing.step(0)
    assert thing.weights.session.steps.at_backward is None


@caps_of_few_mib
def test_weights_that_are_on_the_device_already_are_counted_once(trained):
    thing = trained(budget=3 * MIB)
    thing.step(0)
    runtime = conductor(4, 4)
    runtime.attach(thing.model)
    assert runtime.core.stats()["vram_granted"] == 3 * MIB and runtime.core.stats()["vram_unmanaged"] == 0
    runtime.shutdown()


@pytest.mark.parametrize("which", ["weights", "activations"])
def test_backward_is_entered_when_it_begins(trained, which):
    thing = trained()
    runtime = conductor()
    runtime.attach(thing.model if which == "weights" else thing.activations)
    seen = []

    class Sees(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            seen.append(runtime.phases.phase)
            return grad

    first = thing.model.blocks[0]
    inner = first.forward
    first.forward = lambda x: inner(Sees.apply(x))  # its backward is among the last
    runtime.begin_step(0)
    runtime.enter_forward()
    with thing.activations.managed_forward():
        loss = thing.model(thing.data[0].requires_grad_()).square().mean()
    assert runtime.phases.phase is Phase.FORWARD
    loss.backward()
    assert seen == [Phase.BACKWARD]
    runtime.enter_backward()  # what the documents of others say to call: nothing any more
    runtime.enter_optimizer()
    runtime.end_step()
    assert runtime.telemetry.history[-1]["phase_durations"]["backward"] > 0
    runtime.shutdown()


@caps_of_few_mib
def test_a_budget_for_activations_is_capped_and_given_back(trained):
    thing = trained()
    thing.weights.prepare()
    saver = thing.activations.saver
    saver.mark = _core.Watermark(saver.mark.high, saver.mark.low, 5 * MIB)  # as offload() sets it on a card
    before = knobs(thing)
    runtime = attached(thing)
    budget = saver.mark.budget
    assert budget == saver.mark.ceiling == saver.high == 4 * MIB - thing.budget
    runtime.begin_step(0)
    assert saver.mark.follow(2 * budget - budget // 128 - 1 * MIB, True)  # as the saver finds it
    assert saver.high == 1 * MIB
    runtime.enter_forward()
    assert saver.high == 1 * MIB
    runtime.shutdown()
    assert knobs(thing) == before and saver.mark.ceiling == 5 * MIB


def knobs(thing):
    saver, transfer = thing.activations.saver, thing.activations.transfer
    return (saver.mark.high, saver.mark.low, saver.mark.budget, transfer._max_d2h, transfer._max_h2d, saver.at_backward,
            thing.weights.session.steps.at_backward, thing.weights.session.grads._conductor)


@caps_of_few_mib
def test_every_knob_is_what_it_was_after_random_schedules(trained):
    thing = trained(policy="static", prefetch_window_blocks=4)
    thing.step(0)
    before = knobs(thing)
    for seed in range(6):
        rng = random.Random(seed)
        runtime = owned(attached(thing, rng.choice([3, 5, 30]), 32, h2d_slots=rng.randint(1, 3)), "other")
        assert knobs(thing) != before
        windows = []
        for step in range(3):
            runtime.begin_step(step)
            hints = runtime.policy.hints()
            for _ in range(8):
                deed = rng.randrange(6)
                if deed == 0:
                    runtime.budget.reserve("other", rng.randint(1, 12) * MIB, rng.choice(list(Mode)),
                                           rng.choice(list(Priority)), rng.choice([None, *Phase]))
                elif deed == 1:
                    runtime.transfer.acquire("h2d", 10, rng.choice(list(Priority)), "other")
                elif deed == 2 and runtime.phases.phase <= Phase.BACKWARD:
                    rng.choice([runtime.enter_forward, runtime.enter_backward])()
                elif deed == 3:
                    runtime.enter_optimizer()
                elif deed == 4:
                    runtime.core.set_unmanaged(rng.randint(0, 4) * MIB)
                else:
                    runtime._push()
                now = runtime.policy.hints()
                assert now.max_inflight_h2d <= hints.max_inflight_h2d
                assert now.max_inflight_d2h <= hints.max_inflight_d2h
                assert now.prefetch_window_cap <= hints.prefetch_window_cap
                assert now.suppress_speculative >= hints.suppress_speculative
                hints = now
                windows.append(runtime._adapters["stagehand"].snapshot()["prefetch_window"])
        assert min(windows) <= 4
        runtime.shutdown()
        assert knobs(thing) == before, f"seed {seed}"
        assert runtime._adapters == {}
    loss, _ = thing.step(1)
    assert same(loss, thing.reference(thing.data[1]).square().mean().detach())


@caps_of_few_mib
def test_the_window_of_the_static_policy_follows_the_hints(trained):
    thing = trained(policy="static", prefetch_window_blocks=4)
    runtime = attached(thing, 30, 30)
    windows = []
    thing.weights.session.core = Watched(thing.weights.session.core, windows)
    loss, _ = thing.step(0, runtime)
    assert same(loss, thing.reference(thing.data[0]).square().mean().detach())
    assert windows == [1], "OPTIMIZER stops speculation"
    thing.step(1, runtime)
    assert windows == [1, 4, 1]
    runtime.shutdown()
    assert windows[-1] == 4
    thing.weights.session.core = thing.weights.session.core.core


class Watched:
    def __init__(self, core, windows):
        self.core, self.windows = core, windows

    def __getattr__(self, name):
        return getattr(self.core, name)

    def set_prefetch_window(self, units):
        self.windows.append(units)
        self.core.set_prefetch_window(units)


@caps_of_few_mib
def test_a_step_that_fails_leaves_a_conductor_that_goes_on(trained):
    thing = trained()
    runtime = attached(thing)
    for step in range(4):
        if step % 2:
            runtime.begin_step(step)
            runtime.enter_forward()
            with pytest.raises(ZeroDivisionError), thing.activations.managed_forward():
                thing.model(thing.data[0])
                1 / 0
        else:
            loss, _ = thing.step(step, runtime)
            assert same(loss, thing.reference(thing.data[step % 3]).square().mean().detach())
    assert [record["step_id"] for record in runtime.telemetry.history] == [0, 2]
    runtime.shutdown()


@caps_of_few_mib
def test_runtimes_that_end_first_do_not_hinder_the_end(trained):
    thing = trained()
    runtime = attached(thing)
    thing.step(0, runtime)
    thing.close()
    runtime.begin_step(1)
    runtime.end_step()
    runtime.shutdown()
    runtime.shutdown()


def test_two_weight_runtimes_share_a_cap():
    shared = device(1 << 30)
    models = [made(Stack, 4, 128, seed=i) for i in range(2)]
    references = [aligned_copy(model) for model in models]
    runtime = conductor(100, 120)
    for model in models:
        stagehand.layer(model, vram_budget=tight_budget(model), device=shared)
        runtime.attach(model)
    assert sorted(runtime._adapters) == ["stagehand", "stagehand_1"]
    assert runtime.core.stats()["vram_granted"] == sum(tight_budget(reference) for reference in references)
    x = torch.randn(4, 128)
    with torch.no_grad(), threads(1):
        for step in range(3):
            runtime.begin_step(step)
            runtime.enter_forward()
            for model, reference in zip(models, references):
                assert same(model(x), reference(x))
            runtime.end_step()
    runtime.shutdown()
    for model in models:
        model._stagehand_layer_runtime.shutdown()


# ---------------------------------------------------------------------- telemetry


@caps_of_few_mib
def test_telemetry_goes_only_where_it_is_told(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    thing = trained()
    runtime = attached(thing)
    thing.step(0, runtime)
    runtime.shutdown()
    assert not list(tmp_path.iterdir())
    runtime = attached(thing, telemetry_file="lines.jsonl", telemetry_interval_steps=2, debug_event_trace=True)
    for step in range(4):
        thing.step(step, runtime)
    runtime.shutdown()
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    records = [line for line in lines if "step_id" in line]
    assert [record["step_id"] for record in records] == [1, 3] and records == list(runtime.telemetry.history)
    assert set(records[0]["phase_durations"]) == {"forward", "backward", "optimizer"}
    assert min(records[0]["phase_durations"].values()) > 0
    assert set(records[0]["runtime_snapshots"]) == {"stagehand", "activation_stagehand"}
    assert records[0]["vram_allocated_mb"] > 0 and records[0]["vram_headroom_mb"] == 0
    events = [line for line in lines if "event" in line]
    phases = [event["phase"] for event in events if event["event"] == "phase"]
    assert phases[:5] == ["STEP_BEGIN", "FORWARD", "BACKWARD", "OPTIMIZER", "STEP_END"]
    assert [event["bytes"] for event in events if event["event"] == "grant"][0] == thing.budget


def test_a_telemetry_file_that_cannot_be_written_is_an_error_once(tmp_path):
    runtime = conductor(telemetry_file=str(tmp_path / "no" / "such.jsonl"))
    runtime.begin_step(1)
    with pytest.raises(OSError):
        runtime.end_step()
    runtime.begin_step(2)
    runtime.end_step()
