"""Block mode on the simulated device: results equal to the unwrapped model, steps, limits, files, guards."""

import contextlib
import faulthandler
import gc
import logging
import os
import pickle
import re
import subprocess
import sys
import warnings

import pytest

torch = pytest.importorskip("torch")

import card  # noqa: E402
from file_support import (  # noqa: E402
    BLOCKS, Block, Stack, TinyLM, from_outside, made, nbytes, open_files, same_state, save, save_sharded, sim, state,
    tight_budget, twin,
)
from support import same  # noqa: E402
from torch import nn  # noqa: E402

import stagehand  # noqa: E402
from stagehand import (  # noqa: E402
    DtypeMismatchError, InvalidStateTransitionError, NumericGuard, PinnedPool, StagehandConfig, StagehandError,
    StagehandOOMError, StagehandRuntime, TransferError,
)
from stagehand.modes.block import BLOCK_PATTERN, find_blocks  # noqa: E402


@pytest.fixture(autouse=True)
def watchdog():
    faulthandler.dump_traceback_later(120, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def world(tmp_path):
    """(model, reference, input, path of its weights)."""
    model = made(Stack)
    save(tmp_path / "stack.safetensors", state(model))
    return model, twin(model), torch.randn(3, 64), tmp_path / "stack.safetensors"


def runtime_of(model, budget=None, *, device=None, config=None, **kwargs):
    budget = tight_budget(model) if budget is None else budget
    kwargs.setdefault("block_pattern", BLOCKS)
    kwargs.setdefault("inference_mode", True)
    config = config if config is not None else StagehandConfig(vram_budget=budget)
    return StagehandRuntime(model, config, device=device if device is not None else sim(budget), **kwargs)


# ---- results


@pytest.mark.parametrize("link", [0, 50e6], ids=["fast", "slow"])
@pytest.mark.parametrize("grain", ["leaf", "block"])
@pytest.mark.parametrize("window", [None, 0, 1, 3])
@pytest.mark.parametrize("tier", ["ram", "disk"])
def test_every_way_of_streaming_gives_the_same_values(tmp_path, tier, window, grain, link):
    model = made(Stack, 8, 32)
    reference, x = twin(model), torch.randn(2, 32)
    save(tmp_path / "w.safetensors", state(model))
    budget = tight_budget(model)
    device = sim(budget, link_bytes_per_s=int(link), copy_latency_ns=500_000 if link else 2_000)
    given = {} if window is None else {"policy": "static", "prefetch_window_blocks": window}
    pattern = BLOCKS if grain == "block" else r"^blocks\.\d+\.(up|down)$"
    runtime = runtime_of(model, device=device, block_pattern=pattern,
                         config=StagehandConfig(vram_budget=budget, **given))
    if tier == "disk":
        runtime.convert_registry_to_file_backed(tmp_path / "w.safetensors")
    want = reference(x)
    for _ in range(3):
        with runtime.managed_forward():
            assert same(model(x), want)
    stats = runtime.stats
    assert stats["copies"] > len(stats["units"]), "something streams again and again"
    assert stats["device_peak"] + stats["reserved_bytes"] <= budget
    runtime.shutdown()
    assert same(model(x), want)


@pytest.mark.parametrize("window", [1, 2, 4])
def test_the_budget_holds_at_every_depth(window):
    model = made(Stack)
    reference, x = twin(model), torch.randn(2, 64)
    one = nbytes(model) - sum(nbytes(b) for b in model.blocks) + nbytes(model.blocks[0]) + 64 * 1024
    for budget in (one, one + nbytes(model.blocks[0])):
        config = StagehandConfig(vram_budget=budget, policy="static", prefetch_window_blocks=window)
        runtime = runtime_of(model, budget, config=config)  # the device refuses more than the budget
        for _ in range(3):
            assert same(model(x), reference(x))
        assert runtime.stats["device_peak"] + runtime.stats["reserved_bytes"] <= budget
        runtime.shutdown()


def test_a_tied_table_is_on_the_device_once():
    model = made(TinyLM, 2, 32, 2000)
    reference, ids = twin(model), torch.randint(0, 2000, (2, 5))
    budget = nbytes(model.embed) + nbytes(model.blocks[0]) + 64 * 1024
    runtime = runtime_of(model, budget)
    for _ in range(3):
        assert same(model(ids), reference(ids))
    runtime.shutdown()
    assert model.head.weight is model.embed.weight


def test_a_tied_table_in_the_file_is_read_once(tmp_path):
    model = made(TinyLM)
    reference, ids = twin(model), torch.randint(0, 500, (2, 5))
    save(tmp_path / "lm.safetensors", state(model))
    runtime = runtime_of(model, nbytes(model) + 64 * 1024, block_pattern=r"^(embed|head|blocks\.\d+)$")
    runtime.convert_registry_to_file_backed(tmp_path / "lm.safetensors")
    for _ in range(3):
        assert same(model(ids), reference(ids))
    assert len([u for u in runtime.stats["units"] if u["name"] in ("embed", "head")]) == 1
    runtime.shutdown()
    assert model.head.weight is model.embed.weight


def test_two_parameters_with_one_memory_stay_one(tmp_path):
    model = made(Stack, 3)
    model.blocks[1].up.weight = nn.Parameter(model.blocks[0].up.weight.data, requires_grad=False)
    reference, x = twin(model), torch.randn(2, 64)
    save(tmp_path / "w.safetensors", state(model))
    runtime = runtime_of(model)
    runtime.convert_registry_to_file_backed(tmp_path / "w.safetensors")
    assert same(model(x), reference(x))
    runtime.shutdown()
    assert model.blocks[1].up.weight.data_ptr() == model.blocks[0].up.weight.data_ptr()


def test_buffers_that_are_not_saved_work_from_files(tmp_path):
    class Rotary(Block):
        def __init__(self, d):
            super().__init__(d)
            self.register_buffer("table", torch.randn(d), persistent=False)
            self.cache = None

        def forward(self, x):
            return super().forward(x) * self.table

    torch.manual_seed(0)
    model = nn.ModuleDict({"blocks": nn.ModuleList(Rotary(32) for _ in range(4))}).requires_grad_(False)
    model.forward = lambda x: [x := block(x) for block in model["blocks"]][-1]
    blocks, x = twin(model["blocks"]), torch.randn(2, 32)
    save(tmp_path / "w.safetensors", state(model))
    runtime = runtime_of(model, 64 * 1024)
    runtime.convert_registry_to_file_backed(tmp_path / "w.safetensors")
    want = x
    for block in blocks:
        want = block(want)
    for _ in range(3):
        assert same(model(x), want)
    assert not any("table" in name for name in model.state_dict())
    runtime.shutdown()


def test_blocks_may_be_called_one_by_one(world):
    model, reference, x, _ = world
    runtime = runtime_of(model)
    for _ in range(3):
        with runtime.managed_forward():
            y = model.inp(card.there(x))
            for block in model.blocks:
                y = block(y)
            y = model.out(y)
        assert same(y, reference(x))
    assert runtime.stats["steps"] == 3
    runtime.shutdown()


# ---- which blocks


def test_the_default_pattern_finds_the_usual_names():
    for name in ("block.0", "blocks.3", "model.layers.11", "transformer_blocks.2", "single_transformer_blocks.0",
                 "transformer.h.5"):
        assert re.search(BLOCK_PATTERN, name), name
    assert [name for name, _ in find_blocks(made(Stack, 2), BLOCK_PATTERN)] == ["blocks.0", "blocks.1"]
    top = nn.ModuleDict({"block": nn.ModuleList([nn.Linear(2, 2)])})
    assert [name for name, _ in find_blocks(top, BLOCK_PATTERN)] == ["block.0"]


@pytest.mark.parametrize(
    "pattern, words",
    [
        (r"decoder\.\d+", r"decoder.*matches no module.*inp, blocks, blocks\.0"),
        (r"^blocks\.\d+(\.up)?$", r"blocks\.0 and, inside it, blocks\.0\.up"),
        (r"blocks.(", r"blocks\.\(.*not a regular expression"),
    ],
)
def test_a_bad_pattern_is_refused_and_the_model_stays_plain(pattern, words):
    model = made(Stack)
    before = dict(model.__dict__)
    with pytest.raises(ValueError, match=words) as caught:
        StagehandRuntime(model, block_pattern=pattern, device="sim")
    assert isinstance(caught.value, StagehandError)
    assert model.__dict__ == before


# ---- life


def test_steps_nest_and_count(world):
    model, reference, x, _ = world
    runtime = runtime_of(model)
    with pytest.raises(InvalidStateTransitionError, match="prepare"):
        runtime.stats
    runtime.begin_step(7)
    with runtime.managed_forward():
        model(x)
        model(x)
    model(x)
    assert runtime.stats["steps"] == 0, "begin_step .. end_step is one step"
    runtime.end_step()
    assert runtime.stats["steps"] == 1
    with runtime.managed_forward():
        model(x)
        model(x)
    assert runtime.stats["steps"] == 2, "managed_forward alone is one step"
    runtime.end_step()
    assert runtime.stats["steps"] == 2, "nothing was left to end"
    assert same(model(x), reference(x))
    assert runtime.stats["steps"] == 3, "a plain call is one step"
    runtime.shutdown()


def test_a_step_given_up_by_an_exception_is_ended_by_the_next(world):
    model, reference, x, _ = world
    runtime = runtime_of(model)
    runtime.begin_step(0)
    with pytest.raises(RuntimeError):
        with runtime.managed_forward():
            model(torch.randn(2, 5))
    runtime.begin_step(1)
    with runtime.managed_forward():
        assert same(model(x), reference(x))
    runtime.end_step()
    runtime.shutdown()


def test_weights_read_between_begin_and_end_are_the_masters(world):
    model, _, x, _ = world
    runtime = runtime_of(model)
    runtime.begin_step(0)
    model(x)
    assert model.blocks[0].up.weight is dict(model.named_parameters())["blocks.0.up.weight"]
    runtime.end_step()
    runtime.shutdown()


def test_a_plain_call_opens_the_runtime(world):
    model, reference, x, _ = world
    runtime = runtime_of(model)
    assert same(model(x), reference(x))
    assert runtime.stats["copies"] > 0
    runtime.shutdown()


def test_shutdown_leaves_a_plain_model_opened_or_not(world):
    model, reference, x, _ = world
    before = set(model.__dict__)
    runtime_of(model).shutdown()
    assert set(model.__dict__) == before
    runtime = runtime_of(model)
    runtime.prepare()
    with pytest.raises(StagehandError, match="under stagehand already"):
        stagehand.layer(model, device="sim")
    with pytest.raises(StagehandError, match="under stagehand already"):
        runtime_of(model)
    runtime.shutdown()
    runtime.shutdown()
    assert set(model.__dict__) == before and same_state(model, reference)
    assert same(model(x), reference(x))
    with pytest.raises(InvalidStateTransitionError, match="shut down"):
        runtime.begin_step()


def test_copies_of_the_model_are_plain(world):
    model, reference, x, _ = world
    runtime = runtime_of(model)
    for copied in (twin(model), pickle.loads(pickle.dumps(model))):
        card.as_managed(copied)
        assert same(copied(x), reference(x))
    model(x)
    for copied in (twin(model), pickle.loads(pickle.dumps(model))):
        card.as_managed(copied)
        assert same(copied(x), reference(x)) and copied.__dict__.get("_stagehand_runtime") is None
    runtime.shutdown()


def test_a_budget_that_is_too_small_says_which_works_and_changes_nothing(world):
    model, reference, x, _ = world
    device = sim(64 << 20)
    runtime = runtime_of(model, config=StagehandConfig(vram_budget=80 * 1024), device=device)
    with pytest.raises(StagehandOOMError, match=r"blocks\.\d+.*smallest budget"):
        runtime.prepare()
    assert same_state(model, reference)
    gc.collect()  # the exception's frames
    assert card.ON_CARD or device.info()["memory_free"] == device.info()["memory_total"]
    runtime.shutdown()
    assert same(card.as_managed(model)(x), reference(x))


def test_budget_and_free_change_between_steps(world):
    model, reference, x, _ = world
    runtime = runtime_of(model, 2 << 20)
    model(x)
    runtime.set_vram_budget(tight_budget(model))
    model(x)
    assert same(model(x), reference(x))
    assert runtime.stats["budget"] == tight_budget(model)
    runtime.free(1024)
    assert same(model(x), reference(x))
    assert runtime.stats["budget"] == tight_budget(model) - 1024
    assert runtime.plan["streamed_bytes"] > 0
    runtime.shutdown()


def test_two_runtimes_do_not_disturb_each_other(tmp_path):
    models = [made(Stack, seed=i) for i in range(2)]
    references, x = [twin(m) for m in models], torch.randn(2, 64)
    runtimes = [runtime_of(m) for m in models]
    for i, (model, runtime) in enumerate(zip(models, runtimes)):
        save(tmp_path / f"{i}.safetensors", state(model))
        runtime.convert_registry_to_file_backed(tmp_path / f"{i}.safetensors")
    for _ in range(2):
        for model, reference in zip(models, references):
            assert same(model(x), reference(x))
    runtimes[0].shutdown()
    assert same(models[1](x), references[1](x))
    again = runtime_of(models[0])
    assert same(models[0](x), references[0](x))
    again.shutdown()
    runtimes[1].shutdown()


# ---- files


def test_shards_stream(tmp_path):
    model = made(Stack)
    reference, x = twin(model), torch.randn(2, 64)
    save_sharded(tmp_path, state(model), 3)
    runtime = runtime_of(model)
    with pytest.raises(FileNotFoundError, match="not a folder"):
        runtime.convert_registry_to_file_backed_sharded(tmp_path / "model.safetensors.index.json")
    assert runtime.convert_registry_to_file_backed_sharded(tmp_path) == 42
    with pytest.raises(InvalidStateTransitionError, match="already"):
        runtime.convert_registry_to_file_backed_sharded(tmp_path)
    for _ in range(3):
        assert same(model(x), reference(x))
    stats = runtime.stats
    assert stats["host_bytes"] == 0 and stats["staging_bytes"] > 0
    runtime.shutdown()
    assert open_files(tmp_path) == [] and same(model(x), reference(x))


def test_conversion_comes_before_the_first_step(world):
    model, _, x, path = world
    runtime = runtime_of(model)
    model(x)
    with pytest.raises(InvalidStateTransitionError, match="before the first step"):
        runtime.convert_registry_to_file_backed(path)
    runtime.shutdown()


def test_trainable_weights_stay_in_ram_beside_those_in_files(world):
    model, reference, x, path = world
    model.blocks[2].up.weight.requires_grad_(True)
    runtime = runtime_of(model, 1 << 20, inference_mode=False)
    assert runtime.convert_registry_to_file_backed(path) == 41
    with torch.no_grad():
        assert same(model(x), reference(x))
    assert 0 < runtime.stats["host_bytes"] < nbytes(model.blocks[2])
    with torch.no_grad():
        model.blocks[2].up.weight.mul_(0.5)
        reference.blocks[2].up.weight.mul_(0.5)
        for _ in range(2):
            assert same(model(x), reference(x))
    runtime.shutdown()


def test_nothing_to_convert_is_said(world):
    model, _, _, path = world
    model.requires_grad_(True)
    runtime = runtime_of(model, inference_mode=False)
    with pytest.raises(StagehandError, match="trainable.*inference_mode=True"):
        runtime.convert_registry_to_file_backed(path)
    runtime.shutdown()


def test_parameters_without_a_tensor_may_stay_in_ram(world, tmp_path):
    model, reference, x, _ = world
    tensors = state(model)
    del tensors["blocks.1.up.weight"]
    save(tmp_path / "part.safetensors", tensors)
    runtime = runtime_of(model)
    with pytest.warns(RuntimeWarning, match=r"blocks\.1\.up\.weight have no tensor"):
        assert runtime.convert_registry_to_file_backed(tmp_path / "part.safetensors", strict=False) == 41
    for _ in range(2):
        assert same(model(x), reference(x))
    runtime.shutdown()


@pytest.mark.parametrize("opened", [False, True])
def test_a_write_to_a_file_backed_weight_is_used(world, opened):
    model, reference, x, path = world
    runtime = runtime_of(model, inference_mode=False)
    runtime.convert_registry_to_file_backed(path)
    if opened:
        model(x)
    with torch.no_grad():
        model.blocks[1].up.weight.add_(1)
        reference.blocks[1].up.weight.add_(1)
    with pytest.warns(RuntimeWarning, match=r"blocks\.1.*RAM") if opened else contextlib.nullcontext():
        assert same(model(x), reference(x)), "its unit streams from RAM"
    runtime.shutdown()
    assert same(stagehand.open_checkpoint(path)["blocks.1.up.weight"] + 1, reference.blocks[1].up.weight)


def test_a_file_rewritten_or_cut_after_wrapping_is_an_error(world):
    model, _, x, path = world
    content = path.read_bytes()
    for damage in ("cut", "rewritten", "emptied"):
        runtime = runtime_of(model)
        runtime.convert_registry_to_file_backed(path)
        runtime.prepare()
        if damage == "cut":
            from_outside(path, size=len(content) - 1000)
        elif damage == "emptied":
            from_outside(path, size=0)
        else:
            from_outside(path, content[:8])
        with pytest.raises(TransferError, match="stack.safetensors"):
            for _ in range(3):
                model(x)
        from_outside(path, content)
        runtime.shutdown()
        assert open_files(path.parent) == []


@pytest.mark.parametrize("how", ["replaced", "deleted"])
def test_a_file_replaced_or_deleted_keeps_its_old_values(world, tmp_path, how):
    model, reference, x, path = world
    runtime = runtime_of(model)
    runtime.convert_registry_to_file_backed(path)
    if how == "replaced":
        save(tmp_path / "other", {n: t * 0 for n, t in state(reference).items()})
        os.replace(tmp_path / "other", path)
    else:
        path.unlink()
    for _ in range(3):
        assert same(model(x), reference(x))
    assert same_state(model, reference)
    runtime.shutdown()


def test_wrapping_again_and_again_leaks_no_descriptor_and_mixes_no_file(tmp_path):
    x = torch.randn(2, 32)
    for i in range(10):
        model = made(Stack, 3, 32, seed=i)
        reference = twin(model)
        save(tmp_path / "same-name.safetensors", state(model))
        runtime = runtime_of(model)
        runtime.convert_registry_to_file_backed(tmp_path / "same-name.safetensors")
        assert same(model(x), reference(x))
        if i % 2:
            runtime.shutdown()
        del model, runtime
        gc.collect()
    assert open_files(tmp_path) == []


MEMORY_CHILD = """
import sys, torch, stagehand
from file_support import Stack, made, anonymous_bytes, nbytes, BLOCKS
from stagehand import _core
model = made(Stack, 8, 500)
x, block = torch.randn(2, 500), nbytes(model.blocks[0])
budget = nbytes(model) - 8 * block + 2 * block
runtime = stagehand.StagehandRuntime(model, stagehand.StagehandConfig(vram_budget=budget), block_pattern=BLOCKS,
                                     device=_core.Device("sim", memory_bytes=budget), inference_mode=True)
runtime.convert_registry_to_file_backed(sys.argv[1])
before = anonymous_bytes()
for _ in range(2):
    with torch.no_grad():
        model(x)
print((anonymous_bytes() - before - budget) / block)
"""


@pytest.mark.parametrize("odd", [False, True], ids=["aligned", "unaligned"])
def test_memory_does_not_depend_on_alignment_in_the_file(tmp_path, odd):
    """8 blocks of 6 MB stream from a file; beside the simulated device only staging may grow."""
    tensors = state(made(Stack, 8, 500))
    if odd:
        tensors = {"pad": torch.zeros(3, dtype=torch.uint8), **tensors}
    save(tmp_path / "w.safetensors", tensors)
    done = subprocess.run([sys.executable, "-c", MEMORY_CHILD, tmp_path / "w.safetensors"], capture_output=True,
                          text=True, cwd=os.path.dirname(__file__), timeout=300)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 3, f"grew by {done.stdout} blocks"


# ---- pools and settings


def test_a_pool_of_the_users_is_used_and_kept(world):
    model, reference, x, path = world
    pool = PinnedPool(total_mb=4, slab_mb=1)
    runtime = runtime_of(model, pool=pool)
    runtime.convert_registry_to_file_backed(path)
    assert same(model(x), reference(x))
    assert pool.stats()["peak_in_use"] > 0
    assert runtime.shutdown_keep_pool() is pool
    assert pool.stats()["in_use"] == 0
    pool.release(pool.acquire(1))
    with pytest.raises(RuntimeError, match="shut down already"):
        runtime.shutdown_keep_pool()


def test_a_slab_size_makes_a_pool_and_units_may_be_larger_than_a_slab(tmp_path):
    model = made(Stack, 2, 400)  # 1.9 MB in one weight
    reference, x = twin(model), torch.randn(2, 400)
    save(tmp_path / "w.safetensors", state(model))
    budget = tight_budget(model)
    config = StagehandConfig(vram_budget=budget, pinned_slab_mb=1, pinned_pool_mb=3)
    runtime = runtime_of(model, config=config, device=sim(budget))
    runtime.convert_registry_to_file_backed(tmp_path / "w.safetensors")
    for _ in range(2):
        assert same(model(x), reference(x))
    assert runtime.stats["staging_bytes"] == 3 << 20
    pool = runtime.shutdown_keep_pool()
    assert pool.num_slabs == 3 and pool.stats()["in_use"] == 0
    pool.release(pool.acquire(1))


def test_a_ram_budget_keeps_a_share_that_is_read_once(world):
    model, reference, x, path = world
    runtime = runtime_of(model, ram_budget=256 * 1024)
    runtime.convert_registry_to_file_backed(path)
    read = []
    for _ in range(6):
        assert same(model(x), reference(x))
        read.append(runtime.stats["file_bytes"])
    stats, streamed = runtime.stats, sum(u["bytes"] for u in runtime.stats["units"])
    assert 192 * 1024 <= stats["ram_bytes"] <= 256 * 1024
    assert (read[-1] - read[1]) / 4 <= (streamed - stats["ram_bytes"]) * 1.25
    runtime.shutdown()


def test_settings_without_effect_warn_once(world):
    model, _, x, _ = world
    config = StagehandConfig(vram_budget="2MiB", max_inflight_transfers=5, pinned_slab_mb=64, nan_inf_check=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runtime = runtime_of(model, config=config, device=sim(2 << 20), ram_budget="1GB")
        model(x)
        model(x)
    texts = [str(w.message) for w in caught]
    for name in ("max_inflight_transfers", "pinned_slab_mb", "nan_inf_check"):
        assert sum(name in text for text in texts) == 1, (name, texts)
    runtime.shutdown()


def test_the_default_settings_warn_of_nothing(world):
    model, _, x, _ = world
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runtime = runtime_of(model)
        model(x)
        runtime.shutdown()


def test_telemetry_goes_only_where_told(world, tmp_path, monkeypatch, caplog):
    model, _, x, _ = world
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    budget = tight_budget(model)
    runtime = runtime_of(model)
    model(x)
    runtime.shutdown()
    assert os.listdir(".") == []
    config = StagehandConfig(vram_budget=budget, telemetry_file="t.jsonl", telemetry_interval_steps=2)
    runtime = runtime_of(model, config=config, device=sim(budget), group="unet")
    with caplog.at_level(logging.INFO, "stagehand"):
        for _ in range(6):
            model(x)
    runtime.shutdown()
    with open("t.jsonl") as file:
        assert len(file.readlines()) == 6
    lines = [r.message for r in caplog.records if "STAGEHAND unet" in r.message]
    assert len(lines) == 2 and "hit=" in lines[0], lines
    assert runtime.telemetry.history and runtime.telemetry.hit_rate() >= 0


# ---- guards


class Spoilt(Block):
    """Adds NaN and Inf to its output when told."""

    spoil = False

    def forward(self, x):
        out = super().forward(x)
        if self.spoil:
            out = out.clone()
            out[0, :2] = float("nan")
            out[0, 5] = float("inf")
        return out


def spoilt_stack(dtype=torch.bfloat16):
    model = made(Stack, 4).to(dtype)
    model.blocks[2].__class__ = Spoilt
    return model


def test_nan_and_inf_are_counted_and_the_block_is_named():
    model = spoilt_stack()
    runtime = runtime_of(model)
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.inference_mode():
            model(x)
    model.blocks[2].spoil = True
    with pytest.warns(RuntimeWarning, match=r"step 1: the output of blocks\.2 has 2 NaN and 1 Inf"):
        with torch.inference_mode():
            model(x)
            card.finish()
            if card.ON_CARD:
                model(x)  # counts of a pass are read once the card has them, without waiting
        assert runtime.telemetry.history
    model.blocks[2].spoil = False
    model(x)
    runtime.synchronize()
    card.finish()
    records = runtime.telemetry.history
    assert [r.nan_count for r in records][:1] == [0]
    # what the spoilt block returns makes NaN of what follows it
    assert sum(r.nan_count for r in records) >= 2 and sum(r.inf_count for r in records) >= 1
    runtime.shutdown()


def test_guards_are_off_where_nothing_is_bfloat16():
    model = spoilt_stack(torch.float32)
    model.blocks[2].spoil = True
    runtime = runtime_of(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.randn(2, 64))
    runtime.synchronize()
    card.finish()
    assert runtime.telemetry.history[-1].nan_count == 0
    runtime.shutdown()


class Promoting(Block):
    def forward(self, x):
        return super().forward(x).float()


def test_dtypes_are_judged_where_bfloat16_was_asked_for():
    model = made(Stack, 2)
    model.blocks[1].__class__ = Promoting
    runtime = runtime_of(model, dtype=torch.bfloat16)
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    with pytest.raises(DtypeMismatchError, match=r"blocks\.1: dtype promotion from torch.bfloat16 to torch.float32"):
        model(x)
    runtime.shutdown()
    config = StagehandConfig(vram_budget="2MiB", fail_on_dtype_promotion=False)
    runtime = runtime_of(model, config=config, device=sim(2 << 20), dtype=torch.bfloat16)
    with pytest.raises(DtypeMismatchError, match="torch.bfloat16 is expected"):
        model(x)
    runtime.shutdown()
    config = StagehandConfig(vram_budget="2MiB", fail_on_dtype_promotion=False, strict_bf16=False)
    runtime = runtime_of(model, config=config, device=sim(2 << 20), dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="dtype"):  # torch's own: the last layer is bfloat16
        model(x)
    runtime.synchronize()
    card.finish()
    assert runtime.telemetry.history[-1].dtype_promotions == 1
    runtime.shutdown()


def test_the_guard_by_itself():
    guard = NumericGuard()
    with pytest.raises(DtypeMismatchError, match="torch.float32.*torch.bfloat16"):
        guard.check_dtype(torch.ones(1), torch.bfloat16, "here")
    with pytest.raises(DtypeMismatchError, match="promotion"):
        guard.check_promotion(torch.bfloat16, torch.float32, "here")
    for pair in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16), (torch.int8, torch.float32)):
        guard.check_promotion(*pair, "here")
    bad = torch.tensor([1.0, float("nan"), float("inf"), -float("inf")])
    with pytest.warns(RuntimeWarning, match="b3 has 1 NaN and 2 Inf"):
        assert guard.check_output(bad, "b3", 0) == (1, 2)
    off = NumericGuard(False, False, False)
    off.check_dtype(torch.ones(1), torch.bfloat16, "here")
    off.check_promotion(torch.bfloat16, torch.float64, "here")
    assert off.check_output(bad, "b3", 0) == (0, 0)
