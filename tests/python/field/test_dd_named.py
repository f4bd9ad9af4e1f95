"""Field cases DD: what was asked for by the documentation of earlier packages, and was a name only."""

from __future__ import annotations

import json
import logging
import os

import pytest
import support as s
import torch
from torch import nn
from worlds import infer, run

import stagehand
from stagehand import StagehandConfig

MIB = 1 << 20


# ---------------------------------------------------------------------- 225


class Row(nn.Module):
    """16 layers of 257 KiB."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(256, 256) for _ in range(16))

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def on_device(runtime) -> int:
    return sum(u["bytes"] for u in runtime.stats["units"] if u["state"] == "gpu_ready")


def static(**given):
    """(lowest and highest bytes of blocks on the device behind a block, evictions of a pass); checks the results."""
    model = s.made(Row)
    ref = s.aligned_copy(model)
    config = StagehandConfig(policy="static", prefetch_window_blocks=1, **given)
    runtime = stagehand.StagehandRuntime(model, config, block_pattern=r"^blocks\.\d+$", device=s.device(64 * MIB))
    runtime.prepare()
    seen = []
    for block in model.blocks:
        block.register_forward_hook(lambda *_: seen.append(on_device(runtime)))
    x = torch.randn(3, 256)
    for _ in range(3):
        seen.clear()
        before = runtime.stats["evictions"]
        assert s.same([infer(model, x)], [infer(ref, x)])
    evictions = runtime.stats["evictions"] - before
    runtime.shutdown()
    return min(seen), max(seen), evictions


def test_225_a_low_watermark_acts_without_a_budget():
    unit = 256 * 257 * 4
    least, most, evictions = static(vram_high_watermark_mb=3, vram_low_watermark_mb=1)
    assert most <= 3 * MIB and least <= MIB + unit
    kept, most, fewer = static(vram_high_watermark_mb=3)  # 3/4 of it
    assert most <= 3 * MIB and MIB + unit < kept <= 2.25 * MIB + unit
    whole, most, fewest = static(vram_budget=3 * MIB)  # units leave only as places are needed
    assert most <= 3 * MIB and whole > 2.25 * MIB + unit
    assert evictions > fewer > fewest > 0
    least, _, _ = static(vram_budget=3 * MIB, vram_low_watermark_mb=1)
    assert least <= MIB + unit


def test_225_a_training_step_evicts_nothing_that_is_in_use():
    model = s.made(Row, frozen=False)
    ref = s.aligned_copy(model)
    config = StagehandConfig(policy="static", vram_high_watermark_mb=4, vram_low_watermark_mb=1)
    runtime = stagehand.StagehandRuntime(model, config, block_pattern=r"^blocks\.\d+$", device=s.device(64 * MIB))
    x = torch.randn(3, 256)
    for _ in range(3):
        for net in (model, ref):
            net.zero_grad()
            net(x).pow(2).sum().backward()
            with torch.no_grad():
                for p in net.parameters():
                    p -= 0.01 * p.grad
        assert s.same(list(model.parameters()), list(ref.parameters()))
    assert runtime.stats["evictions"] > 0
    runtime.shutdown()


# ---------------------------------------------------------------------- 227


@pytest.fixture
def folder(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.WARNING, "stagehand")
    return tmp_path


def records(path, key="step") -> list:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line[key] for line in lines]


def run_layer(**options):
    model = s.made(s.Stack, 4, 40)
    stagehand.layer(model, vram_budget=s.tight_budget(model), device=s.device(1 << 24), **options)
    return model


def run_block(**options):
    model = s.made(s.Stack, 4, 40)
    config = StagehandConfig(vram_budget=s.tight_budget(model), **options)
    stagehand.StagehandRuntime(model, config, block_pattern=r"^blocks\.\d+$", device=s.device(1 << 24))
    return model


def passes(model, count=4):
    x = torch.randn(2, 40)
    for _ in range(count):
        infer(model, x)


def end(model):
    run(model).shutdown()


@pytest.mark.parametrize("make", [
    lambda: run_layer(telemetry=True), lambda: run_block(telemetry_enabled=True),
    lambda: stagehand.Runtime(telemetry=True, vram_budget=30_000, device=s.device(1 << 24)).layer(
        s.made(s.Stack, 4, 40))], ids=["layer", "block", "Runtime"])
def test_227_true_writes_the_file_in_the_working_folder(folder, make, caplog):
    model = make()
    passes(model)
    assert run(model).telemetry.path == str(folder / "stagehand_telemetry.jsonl")
    end(model)
    assert os.listdir(folder) == ["stagehand_telemetry.jsonl"]
    assert records(folder / "stagehand_telemetry.jsonl") == [0, 1, 2, 3]
    model = make()  # the next run appends, and says nothing
    passes(model, 2)
    end(model)
    assert records(folder / "stagehand_telemetry.jsonl") == [0, 1, 2, 3, 0, 1]
    assert [str(folder) in text for text in caplog.messages] == [True]


@pytest.mark.parametrize("blocks", [None, r"^blocks\.\d+$"])
def test_227_load_writes_it_too(folder, blocks):
    from safetensors.torch import save_file

    model = s.made(s.Stack, 4, 40)
    save_file(model.state_dict(), folder / "m.safetensors")
    loaded = stagehand.load(lambda: s.Stack(4, 40), folder / "m.safetensors", vram_budget=s.tight_budget(model),
                            device=s.device(1 << 24), blocks=blocks, telemetry=True)
    passes(loaded)
    end(loaded)
    assert records(folder / "stagehand_telemetry.jsonl") == [0, 1, 2, 3]


def test_227_a_path_is_the_path_and_nothing_is_written_where_nobody_asked(folder, caplog):
    for make in (lambda: run_layer(), lambda: run_layer(telemetry=False), lambda: run_layer(telemetry=None),
                 lambda: run_block(), lambda: run_block(telemetry_enabled=False),
                 lambda: run_block(telemetry_enabled=False, telemetry_file="no.jsonl"),
                 lambda: run_block(telemetry_enabled=True, telemetry_file=None)):
        model = make()
        passes(model, 2)
        assert run(model).telemetry.path is None
        end(model)
    assert os.listdir(folder) == []
    for n, make in enumerate((lambda path: run_layer(telemetry=path), lambda path: run_block(telemetry_file=path),
                              lambda path: run_block(telemetry_enabled=True, telemetry_file=path))):
        model = make(f"{n}.jsonl")
        passes(model, 2)
        end(model)
        assert records(folder / f"{n}.jsonl") == [0, 1]
    assert not caplog.messages


def test_227_two_runtimes_at_once_write_a_file_each(folder, caplog):
    first, second = run_layer(telemetry=True), run_block(telemetry_enabled=True)
    passes(first, 3)
    passes(second, 2)
    passes(first, 3)
    assert run(second).telemetry.path == str(folder / "stagehand_telemetry.2.jsonl")
    end(first)
    third = run_layer(telemetry=True)  # the first has ended
    assert run(third).telemetry.path == str(folder / "stagehand_telemetry.jsonl")
    end(second)
    end(third)
    assert records(folder / "stagehand_telemetry.jsonl") == list(range(6))
    assert records(folder / "stagehand_telemetry.2.jsonl") == [0, 1]
    assert len(caplog.messages) == 2
    one = run_layer(telemetry="own.jsonl")
    with pytest.raises(stagehand.StagehandError, match="own.jsonl: another run is writing"):
        run_layer(telemetry="own.jsonl")
    end(one)


def spilling(**options):
    config = stagehand.activation.ActivationStagehandConfig(enabled=True, **options)
    return stagehand.activation.ActivationRuntime(config, s.device(1 << 24))


def conducting(**options):
    return stagehand.conductor.ConductorRuntime(stagehand.conductor.ConductorConfig(enabled=True, **options))


def step(runtime, number):
    if hasattr(runtime, "step_begin"):
        runtime.step_begin(number)
        runtime.step_end()
    else:
        runtime.begin_step(number)
        runtime.end_step()


@pytest.mark.parametrize("make, name, key", [(spilling, "activation_telemetry", "step"),
                                             (conducting, "conductor_telemetry", "step_id")])
def test_227_activations_and_the_conductor_write_theirs(folder, make, name, key, caplog, tmp_path_factory, monkeypatch):
    for options in ({}, {"telemetry_enabled": False}, {"telemetry_enabled": False, "telemetry_file": "x.jsonl"}):
        runtime = make(**options)
        step(runtime, 0)
        assert runtime.telemetry.path is None
        runtime.shutdown()
    assert os.listdir(folder) == [] and not caplog.messages
    first, second = make(telemetry_enabled=True), make(telemetry_enabled=True)
    monkeypatch.chdir(tmp_path_factory.mktemp("other"))  # the file is where the runtime was made
    for number in range(3):
        step(first, number)
        step(second, 10 + number)
    assert records(folder / f"{name}.jsonl", key) == [0, 1, 2]
    assert records(folder / f"{name}.2.jsonl", key) == [10, 11, 12]
    first.shutdown()
    monkeypatch.chdir(folder)
    third = make(telemetry_enabled=True)
    step(third, 3)
    assert records(folder / f"{name}.jsonl", key) == [0, 1, 2, 3] and len(caplog.messages) == 2
    second.shutdown()
    third.shutdown()


@pytest.mark.parametrize("mode", ["block", "layer"])
def test_227_a_session_writes_all_three_as_its_file_says(folder, mode):
    model = s.made(s.Stack, 4, 40)
    enabled = {"enabled": True, "telemetry_enabled": True}
    settings = {"mode": mode, "vram_budget": s.tight_budget(model), "telemetry_enabled": True,
                "activation_stagehand": enabled, "conductor_config": enabled}
    (folder / "train.json").write_text(json.dumps({"memory": {"strategy": "stagehand", "stagehand": settings}}))
    with stagehand.session(model, folder / "train.json", device=s.device(1 << 24)) as memory:
        for _ in range(3):
            with memory.step():
                model(torch.randn(2, 40))
    for name, key in (("stagehand", "step"), ("activation", "step"), ("conductor", "step_id")):
        assert records(folder / f"{name}_telemetry.jsonl", key) == [0, 1, 2]


def test_227_configurations_keep_the_file_when_they_are_copied():
    import copy
    import dataclasses

    config = StagehandConfig(telemetry_enabled=True)
    assert config.telemetry_file == "stagehand_telemetry.jsonl"
    for other in (dataclasses.replace(config, prefetch_window_blocks=1), copy.deepcopy(config),
                  StagehandConfig(**dataclasses.asdict(config))):
        assert other.telemetry_file == "stagehand_telemetry.jsonl"
    assert dataclasses.replace(StagehandConfig()).telemetry_file is None
