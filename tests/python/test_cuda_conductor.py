"""On a real CUDA device: weights, spilled activations and the optimiser below one cap, which is passed without it.

Skipped where there is none. Run them on a machine with a GPU:
    python -m pytest tests/python/test_cuda_conductor.py
"""

from __future__ import annotations

import copy
import gc

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)

from support import Stack  # noqa: E402

import stagehand  # noqa: E402

torch.backends.cuda.matmul.allow_tf32 = False
MIB = 1 << 20
SOFT, HARD = 800, 1400  # MiB; between them what a kernel's own tensors take for a moment


def config(conducted: bool) -> dict:
    return {"memory": {"strategy": "stagehand", "stagehand": {
        "vram_budget": "120MiB",
        "optimizer": {"enabled": True, "lr": 1e-4},
        "activation_stagehand": {"enabled": True, "slabs_per_class": None, "max_inflight_d2h": 4, "max_inflight_h2d": 2,
                                 "vram_high_watermark_mb": 2000, "vram_low_watermark_mb": 1600},
        **({"conductor_config": {"enabled": True, "vram_soft_cap_mb": SOFT, "vram_hard_cap_mb": HARD}} if conducted
           else {}),
    }}}


def train(model, x, conducted: bool, steps: int = 5):
    """(losses, gradients of the last step, MiB at most in each step, the session's conductor)"""
    losses, peaks = [], []
    with stagehand.session(model, config(conducted), device="cuda") as memory:
        optimizer = memory.optimizer
        for step in range(steps):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            with memory.step():
                loss = model(x).square().mean()
                loss.backward()
                memory.enter_optimizer()
                grads = [p.grad.detach().cpu().clone() for p in model.parameters()]
                optimizer.step()
                optimizer.zero_grad()
            torch.cuda.synchronize()
            losses.append(loss.item())
            peaks.append(torch.cuda.max_memory_allocated() / MIB)
            del loss
        stats = memory.conductor.core.stats() if conducted else None
        if conducted:  # norms stay on the card, and their state beside them
            adapter = memory.conductor._adapters["optimizer"]
            assert 0 < adapter.used_bytes() == optimizer.state_bytes.device < adapter._reserved
        del optimizer
    gc.collect()
    torch.cuda.empty_cache()
    return losses, grads, peaks, stats


def test_one_cap_over_weights_and_activations_holds_where_it_is_passed_without():
    torch.manual_seed(0)
    model = Stack(8, 1024)
    twin = copy.deepcopy(model)
    x = torch.randn(8192, 1024, device="cuda")
    free_losses, free_grads, free_peaks, _ = train(twin, x, False)
    losses, grads, peaks, stats = train(model, x, True)
    assert max(free_peaks) > HARD, free_peaks
    assert max(peaks) <= HARD, peaks
    assert losses == free_losses
    for a, b in zip(grads, free_grads):
        assert torch.equal(a, b)
    assert stats["flight_bytes_H2D"] > 0 and stats["flight_bytes_D2H"] > 0
    assert stats["bytes_per_s_H2D"] > 1e9 and stats["bytes_per_s_D2H"] > 1e9


def test_two_runtimes_with_devices_of_their_own_share_the_link():
    """Each has an sth_device; on a card they wait for each other's events all the same."""
    models = [Stack(6, 1024).eval().requires_grad_(False) for _ in range(2)]
    x = torch.randn(64, 1024, device="cuda")
    with torch.no_grad():
        want = [copy.deepcopy(m).cuda()(x) for m in models]
        with stagehand.conductor.ConductorRuntime(stagehand.conductor.ConductorConfig(enabled=True)) as conductor:
            for m in models:
                stagehand.layer(m, vram_budget="60MiB", device="cuda", inference_mode=True)
                conductor.attach(m)
            for step in range(5):
                conductor.begin_step(step)
                conductor.enter_forward()
                found = [m(x) for m in models]
                conductor.end_step()
                assert all(torch.equal(a, b) for a, b in zip(found, want))
            assert conductor.core.stats()["flights"] > 0
        for m in models:
            m._stagehand_layer_runtime.shutdown()


def test_a_guest_and_the_model_that_gives_way_leave_the_card_with_their_norms():
    models = [Stack(6, 1024).eval().requires_grad_(False) for _ in range(2)]
    x = torch.randn(64, 1024, device="cuda")
    with torch.no_grad():
        want = [copy.deepcopy(m).cuda()(x) for m in models]
        card = stagehand.Device("cuda:0", budget="200MiB")
        for m, name in zip(models, ("first", "second")):
            stagehand.layer(m, vram_budget="150MiB", device=card, inference_mode=True, name=name)
        first, second = (m._stagehand_layer_runtime for m in models)
        norm = models[1].blocks[0].norm
        for _ in range(3):
            assert torch.equal(models[0](x), want[0])
            with first.as_guest(second):
                assert torch.equal(models[1](x), want[1]) and torch.equal(models[0](x), want[0])
            assert second.session.core.parked and norm.weight.device.type == "cpu"
        assert torch.equal(models[1](x), want[1]) and norm.weight.device.type == "cuda"
        with second.as_guest():
            pass
        first.reserve_for_resident()
        card.set_budget(card.residency()["primary"] + (1 << 20))
        with pytest.raises(stagehand.StagehandOOMError, match="'first' has"):
            second.keep_resident().__enter__()
        assert card.residency()["peak"] <= 200 << 20
        first.release_reservation()
        for runtime in (first, second):
            runtime.shutdown()
