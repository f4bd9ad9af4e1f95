"""A session in layer mode, from files, with the optimiser and with other models on its device."""

from __future__ import annotations

import gc
import json
import threading
import warnings

import card
import pytest
import stagehand
import torch
from safetensors.torch import save_file
from stagehand.conductor import ConductorConfig, ConductorRuntime, Phase
from stagehand.errors import InvalidArgumentError, InvalidStateTransitionError, StagehandOOMError
from support import Stack, aligned_copy, device, made, nbytes, same, threads, tight_budget

MIB = 1 << 20


@pytest.fixture(autouse=True)
def one_thread():
    with threads(1):
        yield


def model(frozen=False, **options):
    return made(Stack, 5, 128, frozen=frozen, **options)


def config(**settings):
    return {"memory": {"strategy": "stagehand", "stagehand": settings}}


SPILLS = {"enabled": True, "vram_high_watermark_mb": 4, "vram_low_watermark_mb": 3, "slabs_per_class": None,
          "max_inflight_d2h": 2}
CAPS = {"enabled": True, "vram_soft_cap_mb": 3, "vram_hard_cap_mb": 4}


def caps() -> dict:
    """CAPS beside what else is on the card."""
    return {**CAPS, **{cap: CAPS[cap] + card.others_mb() for cap in ("vram_soft_cap_mb", "vram_hard_cap_mb")}}


def runtimes_of(net):
    return [name for name in ("_stagehand_runtime", "_stagehand_layer_runtime") if name in net.__dict__]


# ---------------------------------------------------------------------- modes, files, the optimiser


@pytest.mark.parametrize("mode", ["block", "layer"])
def test_training_with_the_sessions_optimizer_is_bit_equal_within_the_cap(mode):
    net = model()
    reference = aligned_copy(net)
    data = torch.randn(3, 256, 128, generator=torch.Generator().manual_seed(3))
    twin = stagehand.OffloadedAdamW(reference.parameters(), lr=1e-3, betas=(0.8, 0.99), threads=1)
    given = config(mode=mode, vram_budget=tight_budget(net), activation_stagehand=SPILLS, conductor_config=caps(),
                   optimizer={"enabled": True, "lr": 1e-3, "betas": [0.8, 0.99], "threads": 1,
                              "master_dtype": "float32"})
    spilled = 0
    with stagehand.session(net, json.loads(json.dumps(given)), device=device(1 << 30)) as memory:
        assert runtimes_of(net) == ["_stagehand_layer_runtime" if mode == "layer" else "_stagehand_runtime"]
        assert sorted(memory.conductor._adapters) == ["activation_stagehand", "optimizer", "stagehand"]
        for i in range(3):
            with memory.step():
                loss = net(data[i]).square().mean()
                loss.backward()
                assert memory.conductor.phases.phase is Phase.BACKWARD
                memory.enter_optimizer()
                memory.optimizer.step()
                memory.optimizer.zero_grad()
            want = reference(data[i]).square().mean()
            want.backward()
            twin.step()
            twin.zero_grad()
            assert same(loss.detach(), want.detach()), f"step {i}"
            spilled += memory.metrics.spill_bytes
            session = memory.weights.session
            outside = session.stay.reserved + memory.metrics.vram_peak_mb * MIB
            assert card.ON_CARD or outside + session.core.stats()["device_peak"] <= 4 * MIB
        assert spilled > 0 and memory.weights.stats["h2d_bytes"] > 0
        snapshot = memory.conductor.telemetry.history[-1]["runtime_snapshots"]["optimizer"]
        assert snapshot.keys() == {"reserved_mb"} and (card.ON_CARD or snapshot["reserved_mb"] == 0.0)
    for (name, a), b in zip(net.named_parameters(), reference.parameters()):
        assert same(a.detach(), b.detach()), name
    assert runtimes_of(net) == []


@pytest.mark.parametrize("mode", ["block", "layer"])
@pytest.mark.parametrize("meta", [False, True])
def test_weights_come_from_files(mode, meta, tmp_path):
    net = model(frozen=True)
    reference, x = aligned_copy(net), torch.randn(4, 128)
    path = tmp_path / "weights.safetensors"
    save_file(net.state_dict(), str(path))
    if meta:
        net = net.to("meta")
    settings = {"mode": mode, "source": str(path), "inference_mode": True, "vram_budget": tight_budget(reference),
                "name": "from files"}
    with stagehand.session(net, config(**settings), device=device(1 << 30)) as memory, torch.no_grad():
        for _ in range(2):
            with memory.step():
                assert same(net(x), reference(x))
        stats = memory.weights.stats
        assert memory.weights.name == "from files" and len(stats["files"]) == 1 and stats["h2d_bytes"] > 0
    assert same(net(x), reference(x))


@pytest.mark.parametrize("mode", ["block", "layer"])
def test_part_of_the_weights_from_files_and_the_rest_trained(mode, tmp_path):
    net = model(frozen=True)
    for block in net.blocks:
        block.down.requires_grad_(True)
        block.norm.requires_grad_(True)
    save_file({name: p for name, p in net.state_dict().items() if "up" in name}, str(tmp_path / "base.safetensors"))
    reference = aligned_copy(net)
    twin = stagehand.OffloadedAdamW([p for p in reference.parameters() if p.requires_grad], lr=1e-2, threads=1)
    given = config(mode=mode, source=str(tmp_path / "base.safetensors"), vram_budget=tight_budget(net),
                   activation_stagehand=SPILLS, conductor_config=caps(),
                   optimizer={"enabled": True, "lr": 1e-2, "threads": 1})
    with pytest.warns(RuntimeWarning, match="stay in RAM"):
        memory = stagehand.session(net, given, device=device(1 << 30))
    with memory:
        for x in torch.randn(3, 64, 128):
            with memory.step():
                loss = net(x).square().mean()
                loss.backward()
                memory.enter_optimizer()
                memory.optimizer.step()
                memory.optimizer.zero_grad()
            want = reference(x).square().mean()
            want.backward()
            twin.step()
            twin.zero_grad()
            assert same(loss.detach(), want.detach())
        assert memory.weights.stats["files"][0]["path"].endswith("base.safetensors")
    for (name, a), b in zip(net.named_parameters(), reference.parameters()):
        assert same(a.detach(), b.detach()), name


@pytest.mark.parametrize("mode", ["block", "layer"])
def test_a_session_that_fails_to_open_gives_back_what_files_had_replaced(mode, tmp_path):
    net = model(frozen=True)
    before = {name: p.data_ptr() for name, p in net.named_parameters()}
    save_file(net.state_dict(), str(tmp_path / "w.safetensors"))
    for wrong in ({"vram_budget": 4096}, {"vram_budget": 2 * MIB, "conductor_config": {
            "enabled": True, "vram_soft_cap_mb": 1, "vram_hard_cap_mb": 1}}):
        with pytest.raises(StagehandOOMError):
            stagehand.session(net, config(mode=mode, source=str(tmp_path / "w.safetensors"), **wrong),
                              device=device(1 << 30))
        assert runtimes_of(net) == []
        assert {name: p.data_ptr() for name, p in net.named_parameters()} == before


def test_a_file_without_any_of_the_names_is_refused(tmp_path):
    save_file({"other": torch.zeros(3)}, str(tmp_path / "w.safetensors"))
    for mode in ("block", "layer"):
        net = model(frozen=True)
        with pytest.raises(stagehand.CheckpointError, match="has no tensor for"):
            stagehand.session(net, config(mode=mode, source=str(tmp_path / "w.safetensors"), vram_budget="2MB"),
                              device="sim")
        assert runtimes_of(net) == []


@pytest.mark.parametrize("settings, says", [({"inference_mode": True}, "promises that no weight"),
                                            ({}, "no parameter")])
def test_an_optimizer_without_anything_to_train_is_refused(settings, says):
    net = model(frozen=True)
    with pytest.raises(InvalidArgumentError, match=says):
        stagehand.session(net, config(vram_budget=tight_budget(net), optimizer={"enabled": True}, **settings),
                          device="sim")
    assert runtimes_of(net) == []


# ---------------------------------------------------------------------- steps and their order


def test_calls_out_of_order_are_refused_and_change_nothing():
    net = model()
    x = torch.randn(8, 128)
    memory = stagehand.session(net, config(vram_budget=tight_budget(net), activation_stagehand=SPILLS,
                                           conductor_config=caps()), device=device(1 << 30))
    for call in (memory.enter_forward, memory.enter_optimizer):
        with pytest.raises(InvalidStateTransitionError, match="no step is open"):
            call()
    with memory.step():
        with pytest.raises(InvalidStateTransitionError, match="a step of this session is open"):
            memory.step().__enter__()
        with pytest.raises(InvalidStateTransitionError, match="shut the session down after it"):
            memory.shutdown()
        loss = net(x).square().mean()
        loss.backward()
        memory.enter_optimizer()
        memory.enter_optimizer()
    with pytest.raises(InvalidStateTransitionError):
        with memory.step():
            memory.enter_optimizer()
            memory.enter_forward()
    with memory.step():
        net(x).square().mean().backward()
    memory.shutdown()
    memory.shutdown()
    with pytest.raises(InvalidStateTransitionError, match="has been shut down"):
        memory.step().__enter__()
    assert runtimes_of(net) == []


def test_between_passes_parameters_are_masters_with_their_gradients():
    net = model()
    reference, x = aligned_copy(net), torch.randn(4, 128)
    with stagehand.session(net, config(vram_budget=tight_budget(net), activation_stagehand=SPILLS),
                           device=device(1 << 30)) as memory:
        with memory.step():
            net(x).sum().backward()
            norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    reference(x).sum().backward()
    assert same(norm, torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0))


def test_a_second_session_of_a_model_is_refused_and_the_first_goes_on():
    net = model()
    x = torch.randn(4, 128)
    want = aligned_copy(net)(x)
    with stagehand.session(net, config(vram_budget=tight_budget(net)), device=device(1 << 30)) as memory:
        with pytest.raises(stagehand.StagehandError, match="under stagehand already"):
            stagehand.session(net, config(mode="layer"), device="sim")
        with memory.step():
            assert same(net(x).detach(), want.detach())


# ---------------------------------------------------------------------- other models


def guest_on(card, blocks=4, seed=9, budget=None):
    other = made(Stack, blocks, 128, seed=seed)
    want = aligned_copy(other)
    stagehand.layer(other, vram_budget=budget or nbytes(other), device=card, inference_mode=True, name="guest")
    return other, want


def test_guests_count_below_the_caps_and_activations_make_room_for_them():
    card = stagehand.Device("sim", memory_bytes=1 << 30)
    net = model()
    reference, x = aligned_copy(net), torch.randn(256, 128)
    own = tight_budget(net)
    with stagehand.session(net, config(vram_budget=own, activation_stagehand=SPILLS, conductor_config=CAPS,
                                       reserve_for_resident="primary"), device=card) as memory:
        guest, want = guest_on(card)
        y = torch.randn(3, 128)
        assert card.residency()["primary"] > 0
        high = memory.activations.saver.high
        assert high == 3 * MIB - own
        with memory.step():
            loss = net(x).square().mean()
            with memory.as_guest(guest), torch.no_grad():
                assert memory.activations.saver.high == high - nbytes(want)
                assert memory.activations.stats["kept_bytes"] <= memory.activations.saver.high
                assert same(guest(y), want(y))
                books = memory.conductor.core.stats()
                assert books["vram_granted"] + books["vram_unmanaged"] <= 3 * MIB
                assert "stagehand_1" in memory.conductor._adapters
                with memory.as_guest(guest):
                    assert same(guest(y), want(y))
                assert "stagehand_1" in memory.conductor._adapters
            assert "stagehand_1" not in memory.conductor._adapters
            loss.backward()
        assert same(loss.detach(), reference(x).square().mean().detach())
        with memory.step():
            assert memory.activations.saver.high == high
        guest._stagehand_layer_runtime.shutdown()


def test_a_guest_larger_than_the_cap_is_refused_before_it_comes():
    card = stagehand.Device("sim", memory_bytes=1 << 30)
    net = model()
    with stagehand.session(net, config(vram_budget=tight_budget(net), conductor_config=CAPS), device=card) as memory:
        guest, _ = guest_on(card, 20)
        for block in (memory.as_guest(guest), memory.keep_resident(guest)):
            with pytest.raises(StagehandOOMError, match="weights of 'guest' want"):
                block.__enter__()
        with pytest.raises(StagehandOOMError, match="Device\\(budget"):
            memory.reserve_for_resident(guest)
        assert list(memory.conductor._adapters) == ["stagehand"] and memory.conductor._visits == {}
        guest._stagehand_layer_runtime.shutdown()


def test_models_that_share_a_budget_reserve_it_once():
    """Each model is larger than what the others leave: the device's budget is what counts, and it is below the cap."""
    budget = 900_000
    card = stagehand.Device("sim", memory_bytes=1 << 30, budget=budget)
    runtime = ConductorRuntime(ConductorConfig(enabled=True, vram_soft_cap_mb=1, vram_hard_cap_mb=1))
    first, want = guest_on(card, 3, 1, 700_000)
    second, want2 = guest_on(card, 3, 2, 800_000)
    y = torch.randn(3, 128)
    runtime.attach(first)
    assert runtime.core.stats()["vram_granted"] == 700_000
    with torch.no_grad():
        with first._stagehand_layer_runtime.as_guest(second):
            assert runtime.core.stats()["vram_granted"] == budget
            for _ in range(2):
                assert same(first(y), want(y)) and same(second(y), want2(y))
        assert runtime.core.stats()["vram_granted"] == 700_000
        first._stagehand_layer_runtime.reserve_for_resident(second)
        first._stagehand_layer_runtime.reserve_for_resident(second, stagehand.ResidentPriority.SECONDARY)
        assert runtime.core.stats()["vram_granted"] == budget
        runtime.unregister_adapter("stagehand")
        assert runtime.core.stats()["vram_granted"] == 800_000  # what the first had is there for it
        second._stagehand_layer_runtime.release_reservation()
        assert runtime.core.stats()["vram_granted"] == 0
    assert card.residency()["peak"] <= budget
    runtime.shutdown()
    for net in (first, second):
        net._stagehand_layer_runtime.shutdown()


def test_a_model_that_is_not_attached_is_seen_when_it_comes():
    card = stagehand.Device("sim", memory_bytes=1 << 30)
    net = model()
    with stagehand.session(net, config(vram_budget=tight_budget(net), activation_stagehand=SPILLS,
                                       conductor_config=CAPS),
                           device=card) as memory:
        high = memory.activations.saver.high
        own = card.residency()["occupied"]
        other, want = guest_on(card)
        with memory.step():
            came = card.residency()["occupied"] - own
            assert came > MIB and memory.activations.saver.high <= high - came + tight_budget(net) - own
            net(torch.randn(4, 128))
            with torch.no_grad():
                assert same(other(torch.ones(2, 128)), want(torch.ones(2, 128)))
        other._stagehand_layer_runtime.shutdown()


def test_a_guest_that_ends_inside_its_block_leaves_the_books():
    card = stagehand.Device("sim", memory_bytes=1 << 30)
    net = model()
    with stagehand.session(net, config(vram_budget=tight_budget(net), conductor_config=CAPS), device=card) as memory:
        granted = memory.conductor.core.stats()["vram_granted"]
        guest, _ = guest_on(card)
        memory.reserve_for_resident(guest)
        with memory.as_guest(guest):
            guest._stagehand_layer_runtime.shutdown()
        with memory.step():
            assert memory.conductor.core.stats()["vram_granted"] == granted
        assert list(memory.conductor._adapters) == ["stagehand"]
        with pytest.raises(ZeroDivisionError), memory.as_guest(guest_on(card)[0]) as there:
            1 / 0
        assert memory.conductor.core.stats()["vram_granted"] == granted
        there.shutdown()


def test_a_conversion_keeps_its_place_in_the_books():
    net = model()
    x = torch.randn(4, 128, dtype=torch.float64)
    with stagehand.session(net, config(vram_budget="2MB", conductor_config=caps()), device=device(1 << 30)) as memory:
        net.double()
        want = aligned_copy(net)(x)
        before = memory.conductor.core.stats()["flights"]
        with memory.step():
            assert same(net(x).detach(), want.detach())
        assert memory.weights.session.steps.at_backward is not None
        stats = memory.conductor.core.stats()
        assert stats["vram_granted"] == 2_000_000 and stats["flights"] > before


def test_guests_in_threads_beside_steps_stay_in_the_books():
    card = stagehand.Device("sim", memory_bytes=1 << 30, budget=1_200_000)
    net = model()
    reference, x = aligned_copy(net), torch.randn(16, 128)
    errors = []
    with stagehand.session(net, config(vram_budget=tight_budget(net), activation_stagehand=SPILLS,
                                       conductor_config=CAPS, reserve_for_resident="primary"), device=card) as memory:
        guests = [guest_on(card, 2, seed) for seed in (1, 2, 3)]
        y = torch.randn(3, 128)

        def visit(guest, want):
            try:
                for _ in range(4):
                    with memory.as_guest(guest), torch.no_grad():
                        assert same(guest(y), want(y))
            except BaseException as error:
                errors.append(error)

        running = [threading.Thread(target=visit, args=pair) for pair in guests]
        for thread in running:
            thread.start()
        for i in range(4):
            with memory.step():
                loss = net(x).square().mean()
                loss.backward()
            assert same(loss.detach(), reference(x).square().mean().detach())
        for thread in running:
            thread.join(120)
        assert not errors and not any(thread.is_alive() for thread in running)
        assert list(memory.conductor._adapters) == ["stagehand", "activation_stagehand"]
        assert card.residency()["peak"] <= 1_200_000
        for guest, _ in guests:
            guest._stagehand_layer_runtime.shutdown()


# ---------------------------------------------------------------------- the optimiser in the books


def test_state_beside_parameters_on_a_device_is_reserved_before_it_exists():
    """Meta tensors stand for those of a card."""
    host = torch.nn.Parameter(torch.zeros(100, 100))
    there = [torch.nn.Parameter(torch.zeros(1000, device="meta")),
             torch.nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16, device="meta"))]
    optimizer = stagehand.OffloadedAdamW([host, *there], threads=1)
    state, moment = optimizer.device_bytes_needed()
    assert state == 1000 * 8 + 1000 * 12 and moment == 2 * 2000 * 4
    with ConductorRuntime(ConductorConfig(enabled=True, vram_soft_cap_mb=1, vram_hard_cap_mb=2)) as runtime:
        adapter = runtime.attach(optimizer)
        assert adapter.name == "optimizer" and runtime.core.stats()["vram_granted"] == state + moment
        assert adapter.used_bytes() == 0
        for param in (host, *there):
            param.grad = torch.zeros_like(param)
        runtime.begin_step(0)
        runtime.enter_optimizer()
        optimizer.step()
        runtime.end_step()
        assert adapter.used_bytes() == optimizer.state_bytes.device == state == adapter.reserved_bytes()
        assert runtime.core.stats()["vram_unmanaged"] == 0
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1 << 20, device="meta"))]})
        runtime.begin_step(1)  # more than the caps: logged, and the old reservation is gone with what it was for
        runtime.end_step()
        runtime.unregister_adapter("optimizer")
        assert runtime.core.stats()["vram_granted"] == 0
        with pytest.raises(StagehandOOMError, match="the optimizer needs"):
            runtime.attach(optimizer)
        with pytest.raises(InvalidArgumentError, match="SGD is no weight runtime"):
            runtime.attach(torch.optim.SGD([host], lr=1.0))


def test_nothing_is_left_of_sessions():
    for mode in ("block", "layer"):
        net = model()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            card = device(1 << 30)
            with stagehand.session(net, config(mode=mode, vram_budget=tight_budget(net), activation_stagehand=SPILLS,
                                               conductor_config=caps(), optimizer={"enabled": True, "threads": 1}),
                                   device=card) as memory:
                with memory.step():
                    net(torch.randn(4, 128)).sum().backward()
        gc.collect()
        assert card.residency()["runtimes"] == 0 and card.residency()["occupied"] == 0


# ---------------------------------------------------------------------- several conductors, budgets that change


def test_a_second_conductor_counts_a_model_and_leaves_its_copies_to_the_first():
    card = stagehand.Device("sim", memory_bytes=1 << 30)
    nets = [model(), model()]
    given = [config(vram_budget=tight_budget(net), conductor_config=CAPS) for net in nets]
    x = torch.randn(4, 128)
    want = [aligned_copy(net)(x) for net in nets]
    with stagehand.session(nets[0], given[0], device=card) as one, \
            stagehand.session(nets[1], given[1], device=card) as two:
        with one.as_guest(two), two.keep_resident(one):
            assert sorted(one.conductor._adapters) == sorted(two.conductor._adapters) == ["stagehand", "stagehand_1"]
            for memory, net, right in zip((one, two), nets, want):
                assert memory.weights.session.arbiter is memory.conductor
                with memory.step():
                    assert same(net(x).detach(), right.detach())
        for memory, net, right in zip((one, two), nets, want):
            before = memory.conductor.core.stats()["flights"]
            assert memory.weights.session.arbiter is memory.conductor
            assert list(memory.conductor._adapters) == ["stagehand"]
            with memory.step():
                assert same(net(x).detach(), right.detach())
            assert memory.conductor.core.stats()["flights"] > before


def test_a_budget_above_the_caps_is_refused_and_the_old_one_stays():
    net = model()
    x = torch.randn(4, 128)
    want = aligned_copy(net)(x)
    with stagehand.session(net, config(vram_budget="1MB", conductor_config=caps()), device=device(1 << 30)) as memory:
        granted = memory.conductor.core.stats
        with pytest.raises(StagehandOOMError, match="raise vram_hard_cap_mb"):
            memory.weights.set_vram_budget(5_000_000 + 2 * card.others_mb() * MIB)
        assert memory.weights.session.budget == granted()["vram_granted"] == 1_000_000
        memory.weights.set_vram_budget("2MB")
        assert memory.weights.session.budget == granted()["vram_granted"] == 2_000_000
        with memory.step():
            assert same(net(x).detach(), want.detach())
        with pytest.raises(InvalidStateTransitionError, match="already, as 'stagehand'"):
            memory.conductor.attach(net)


@pytest.mark.parametrize("mode", ["block", "layer"])
def test_a_step_of_the_session_is_one_step_of_the_weights(mode):
    net = model()
    given = config(mode=mode, vram_budget=tight_budget(net), activation_stagehand=SPILLS, conductor_config=caps())
    for _ in range(2):  # a configuration may be used again
        with stagehand.session(net, given, device=device(1 << 30)) as memory:
            for i in range(3):
                with memory.step():
                    for _ in range(2):
                        memory.enter_forward()
                        net(torch.randn(8, 128)).sum().backward()
                    memory.enter_optimizer()
            assert memory.weights.stats["steps"] == 3
            with pytest.raises(ZeroDivisionError), memory.keep_resident(), memory.step():
                memory.enter_optimizer()
                1 / 0
            with memory.step():
                net(torch.randn(8, 128)).sum().backward()
            assert memory.weights.session.core.stats()["steps"] == 5


def test_updates_inside_the_last_backward_are_right():
    net = model()
    reference = aligned_copy(net)
    data = torch.randn(3, 16, 128)
    twin = stagehand.OffloadedAdamW(reference.parameters(), lr=1e-3, threads=1)
    with stagehand.session(net, config(vram_budget=tight_budget(net), activation_stagehand=SPILLS,
                                       conductor_config=caps(), optimizer={"enabled": True, "lr": 1e-3, "threads": 1}),
                           device=device(1 << 30)) as memory:
        for x in data:
            with memory.step():
                loss = net(x).square().mean()
                with memory.optimizer.last_backward():
                    loss.backward()
                memory.enter_optimizer()
                memory.optimizer.step()
                memory.optimizer.zero_grad()
            want = reference(x).square().mean()
            want.backward()
            twin.step()
            twin.zero_grad()
            assert same(loss.detach(), want.detach())


def test_weights_that_were_shut_down_by_themselves_are_said_and_the_session_ends():
    net = model()
    memory = stagehand.session(net, config(vram_budget=tight_budget(net), conductor_config=caps()),
                               device=device(1 << 30))
    memory.weights.shutdown()
    for _ in range(2):
        with pytest.raises(InvalidStateTransitionError, match="has been shut down"):
            with memory.step():
                pass
    memory.shutdown()


def test_names_and_adapters_that_the_user_takes_are_in_nobodys_way():
    card = stagehand.Device("sim", memory_bytes=1 << 30)
    net = model()
    with stagehand.session(net, config(vram_budget=tight_budget(net), conductor_config=CAPS), device=card) as memory:
        guest, want = guest_on(card)
        conductor = memory.conductor
        conductor.budget.register("stagehand_1")
        with memory.as_guest(guest), torch.no_grad():
            assert sorted(conductor._adapters) == ["stagehand", "stagehand_2"]
            conductor.unregister_adapter("stagehand_2")
            with memory.step():
                assert same(guest(torch.ones(2, 128)), want(torch.ones(2, 128)))
        with memory.as_guest(guest):
            memory.conductor.shutdown()
        with pytest.raises(stagehand.StagehandError):
            memory.step().__enter__()


def test_a_model_or_what_is_round_it_gives_its_runtime_and_is_shut_down():
    net, card = model(frozen=True), device(4 * MIB)
    ref, around = aligned_copy(net), torch.nn.ModuleDict({"a": net})
    with pytest.raises(stagehand.StagehandError, match="Stack is not under stagehand: wrap it"):
        stagehand.runtime(net)
    with pytest.raises(TypeError, match="model is of type list"):
        stagehand.runtime([net])
    stagehand.shutdown(net)
    stagehand.layer(net, vram_budget=MIB, device=card)
    other = model(seed=1)
    block = stagehand.StagehandRuntime(other, stagehand.StagehandConfig(vram_budget=MIB), device=card, name="other")
    assert stagehand.runtime(around) is stagehand.runtime(net) and stagehand.runtime(other) is block
    assert isinstance(stagehand.runtime(net), stagehand.LayerRuntime)
    around["b"] = other
    with pytest.raises(stagehand.StagehandError, match=r"holds 2 models under stagehand \('Stack.*', 'other'\)"):
        stagehand.runtime(around)
    with stagehand.runtime(net) as runtime:
        assert same(net(torch.ones(2, 128)), ref(torch.ones(2, 128)))
    assert runtime.mode == "shutdown"
    stagehand.shutdown(around)
    for one in (net, other, around):
        with pytest.raises(stagehand.StagehandError, match="not under stagehand"):
            stagehand.runtime(one)


def test_a_part_of_a_managed_model_is_told_what_it_is_a_part_of():
    """As the model that somebody gave to PEFT, which put another around it."""
    net = torch.nn.Sequential(model(frozen=True))
    stagehand.layer(net, vram_budget=MIB, device=device(4 * MIB))
    for call in (stagehand.runtime, stagehand.shutdown):
        with pytest.raises(stagehand.StagehandError, match="Stack is a part of Sequential, which is under stagehand"):
            call(net[0])
    assert stagehand.runtime(net).session.model is net
    stagehand.shutdown(net)
    stagehand.shutdown(net[0])  # plain by now
