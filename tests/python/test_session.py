"""One configuration for weights, activations and the conductor: what is refused and how, and a step from end to end."""

from __future__ import annotations

import contextlib
import json
import warnings

import card
import pytest
import torch
from support import Stack, aligned_copy, device, made, same, threads, tight_budget

import stagehand
from stagehand.conductor import Phase
from stagehand.errors import InvalidArgumentError, StagehandOOMError

MIB = 1 << 20


@pytest.fixture(autouse=True)
def one_thread():
    with threads(1):
        yield


def model(**options):
    return made(Stack, 5, 128, frozen=False, **options)


def config(net, **memory):
    return {"memory": {"strategy": "stagehand", "stagehand": {
        "vram_budget": tight_budget(net),
        "activation_stagehand": {"enabled": True, "vram_high_watermark_mb": 4, "vram_low_watermark_mb": 3,
                                 "slabs_per_class": None, "max_inflight_d2h": 2},
        "conductor_config": {"enabled": True, "vram_soft_cap_mb": 3 + card.others_mb(),
                             "vram_hard_cap_mb": 4 + card.others_mb()}, **memory}}}


def inside(**settings):
    return {"memory": {"strategy": "stagehand", "stagehand": settings}}


@contextlib.contextmanager
def opened(net, given=None):
    with stagehand.session(net, given or config(net), device=device(1 << 30)) as memory:
        yield memory


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("given, says", [
    ({}, 'no key "memory"'),
    ({"memmory": {}}, "has no key 'memmory': did you mean 'memory'"),
    ({"memory": []}, "memory must be an object"),
    ({"memory": {"strategy": "ramtorch"}}, "memory.strategy is 'ramtorch'"),
    ({"memory": {}}, "memory.strategy is None"),
    ({"memory": {"strategy": "stagehand", "stagehnd": {}}}, "did you mean 'stagehand'"),
    ({"memory": {"strategy": "stagehand", "stagehand": {"vram_bugdet": 1}}},
     "memory.stagehand has no key 'vram_bugdet': did you mean 'vram_budget'"),
    ({"memory": {"strategy": "stagehand", "conductor_config": {"enabled": True}}}, "it goes into memory.stagehand"),
    (inside(activation_stagehand={"enable": True}), "did you mean 'enabled'"),
    (inside(activation_stagehand=3), "memory.stagehand.activation_stagehand must be an object"),
    (inside(conductor_config={"vram_softcap": 3}), "did you mean 'vram_soft_cap_mb'"),
    (inside(conductor_config={"zzz": 3}), "it has enabled, vram_soft_cap_mb"),
    (inside(optimizer={"learning_rate": 3}), "memory.stagehand.optimizer has no key 'learning_rate'"),
    (inside(optimizer={"enabled": True, "master_dtype": "float31"}), "optimizer.master_dtype is 'float31'"),
    (inside(mode="blok"), "memory.stagehand.mode is 'blok': it is one of 'block', 'layer'"),
    (inside(mode="layer", block_pattern="x"), "no key 'block_pattern': it is for mode \"block\""),
    (inside(mode="layer", vram_bugdet=1), "did you mean 'vram_budget'"),
    (inside(reserve_for_resident="first"), "it is one of 'primary', 'secondary'"),
    ({"memory": {"strategy": "stagehand", "stagehand": {"dtype": "bfloat61"}}}, "memory.stagehand.dtype is 'bfloat61'"),
])
def test_what_is_not_there_is_named_with_the_nearest(given, says):
    net = model()
    with pytest.raises(InvalidArgumentError, match="(?s).*" + says.replace("(", r"\(")):
        stagehand.session(net, given, device="sim")
    assert "_stagehand_runtime" not in net.__dict__


def test_fields_are_checked_by_their_configurations():
    net = model()
    for section, field, value in (("stagehand", "prefetch_window_blocks", "3"),
                                  ("activation_stagehand", "max_inflight_d2h", 1.5),
                                  ("conductor_config", "h2d_slots", "2")):
        with pytest.raises(TypeError, match=field):
            settings = {field: value}
            if section != "stagehand":
                settings = {section: {"enabled": True, **settings}}
            stagehand.session(net, inside(**settings), device="sim")
    assert "_stagehand_runtime" not in net.__dict__


def test_settings_of_what_is_not_enabled_warn():
    net = model()
    with pytest.warns(RuntimeWarning, match="memory.stagehand.conductor_config has settings"):
        given = config(net, conductor_config={"vram_soft_cap_mb": 100})
        stagehand.session(net, given, device=device(1 << 30)).shutdown()


def test_a_file_is_read_and_its_mistakes_are_named(tmp_path):
    net, path = model(), tmp_path / "train.json"
    path.write_text(json.dumps(config(net)))
    with opened(net, path) as memory:
        assert memory.conductor.enabled and memory.activations.enabled
        assert memory.activations.config.vram_high_watermark_mb == 4
    path.write_text('{"memory": {"strategy": "stagehand", "strategy": "stagehand"}}')
    with pytest.raises(InvalidArgumentError, match="'strategy' twice"):
        stagehand.session(net, path)
    path.write_text('{"memory": ')
    with pytest.raises(InvalidArgumentError, match="train.json is not JSON"):
        stagehand.session(net, path)
    with pytest.raises(FileNotFoundError):
        stagehand.session(net, tmp_path / "no.json")
    with pytest.raises(TypeError, match="mapping or the path"):
        stagehand.session(net, 3)


def test_weights_above_the_cap_are_refused_and_the_model_is_as_it_was():
    net = model()
    x = torch.randn(2, 128)
    want = net(x)
    given = config(net, conductor_config={"enabled": True, "vram_soft_cap_mb": 1, "vram_hard_cap_mb": 1})
    given["memory"]["stagehand"]["vram_budget"] = 2 * MIB
    with pytest.raises(StagehandOOMError, match="vram_hard_cap_mb"):
        stagehand.session(net, given, device=device(1 << 30))
    assert "_stagehand_runtime" not in net.__dict__ and same(net(x).detach(), want.detach())


# ---------------------------------------------------------------------- steps


def test_training_in_a_session_is_bit_equal_within_the_cap():
    net = model()
    reference = aligned_copy(net)
    data = torch.randn(3, 256, 128, generator=torch.Generator().manual_seed(3))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    twin = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    spilled = 0
    with opened(net) as memory:
        for i in range(4):
            with memory.step() as here:
                assert here is memory and memory.conductor.phases.phase is Phase.FORWARD
                loss = net(data[i % 3]).square().mean()
                loss.backward()
                assert memory.conductor.phases.phase is Phase.BACKWARD
                memory.enter_optimizer()
                assert memory.conductor.phases.phase is Phase.OPTIMIZER
                optimizer.step()
                optimizer.zero_grad()
            want = reference(data[i % 3]).square().mean()
            want.backward()
            twin.step()
            twin.zero_grad()
            assert same(loss.detach(), want.detach()), f"step {i}"
            spilled += memory.metrics.spill_bytes
            session = memory.weights.session
            peak = session.stay.reserved + session.core.stats()["device_peak"] + memory.metrics.vram_peak_mb * MIB
            assert card.ON_CARD or peak <= 4 * MIB
        assert spilled > 0 and memory.steps == 4
        assert [record["step_id"] for record in memory.conductor.telemetry.history] == [0, 1, 2, 3]
    for (name, a), b in zip(net.named_parameters(), reference.parameters()):
        assert same(a.detach(), b.detach()), name
    assert "_stagehand_runtime" not in net.__dict__


def test_accumulation_without_a_call_of_the_optimizers():
    net = model()
    reference = aligned_copy(net)
    data = torch.randn(2, 64, 128)
    with opened(net) as memory, memory.step(7):
        for i in range(2):
            memory.enter_forward()
            net(data[i]).square().mean().backward()
    for i in range(2):
        reference(data[i]).square().mean().backward()
    assert memory.steps == 8
    for (name, a), b in zip(net.named_parameters(), reference.parameters()):
        assert same(a.grad, b.grad), name


def test_after_an_exception_the_next_step_is_as_any_other():
    net = model()
    reference = aligned_copy(net)
    x = torch.randn(64, 128)
    with opened(net) as memory:
        with pytest.raises(ZeroDivisionError), memory.step():
            net(x)
            1 / 0
        assert memory.steps == 0
        with memory.step():
            loss = net(x).square().mean()
            loss.backward()
    want = reference(x).square().mean()
    want.backward()
    assert same(loss.detach(), want.detach())
    for (name, a), b in zip(net.named_parameters(), reference.parameters()):
        assert same(a.grad, b.grad), name


def test_weights_alone():
    net = model()
    reference = aligned_copy(net)
    x = torch.randn(4, 128)
    given = {"memory": {"strategy": "stagehand", "stagehand": {"vram_budget": tight_budget(net), "inference_mode": True,
                                                               "block_pattern": r"^blocks\.\d+$"}}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        memory = stagehand.session(net, given, device=device(1 << 30))
    assert not memory.conductor.enabled and not memory.activations.enabled
    with torch.no_grad(), memory.step():
        assert same(net(x), reference(x))
    memory.shutdown()
    memory.shutdown()
