"""Field cases DD, 228: names that programs written for earlier packages import do what they say."""

from __future__ import annotations

import importlib
import itertools
import os

import pytest
import support as s
import torch
from card import TORCH, there
from torch import nn
from worlds import BLOCKS, infer, needs_cuda, run

import stagehand
from stagehand import (
    AsyncTransferEngine,
    BlockRegistry,
    BlockState,
    BudgetManager,
    NumericGuard,
    PinnedPool,
    ResidencyMap,
    StagehandConfig,
    StagehandScheduler,
    StaticLookaheadPolicy,
)
from stagehand.activation import (
    ActivationBudgetManager,
    ActivationHookContext,
    ActivationRegistry,
    ActivationRuntime,
    ActivationScheduler,
    ActivationStagehandConfig,
    ActivationState,
    ActivationTransferEngine,
    CPUSpillBackend,
)
from stagehand.compat.ramtorch import move_model_to_device, replace_linear_with_ramtorch
from stagehand.errors import InvalidStateTransitionError, StagehandOOMError, TransferError

MIB = 1 << 20


@pytest.mark.parametrize("module, names", [
    ("stagehand", "AsyncTransferEngine BlockEntry BlockRegistry BlockState BudgetManager PinnedPool PinnedSlab "
                  "ResidencyEntry ResidencyMap StagehandScheduler StaticLookaheadPolicy TransferHandle"),
    ("stagehand.budget", "BudgetManager"), ("stagehand.budget_manager", "BudgetManager"),
    ("stagehand.pinned_pool", "PinnedPool PinnedSlab"), ("stagehand.registry", "BlockEntry BlockRegistry"),
    ("stagehand.residency", "BlockState ResidencyEntry ResidencyMap VALID_TRANSITIONS ResidentPriority"),
    ("stagehand.scheduler", "StagehandScheduler StaticLookaheadPolicy"),
    ("stagehand.transfer", "AsyncTransferEngine TransferHandle"),
    ("stagehand.activation", "ActivationBudgetManager ActivationHookContext ActivationRecord ActivationRegistry "
                             "ActivationScheduler ActivationState ActivationTransferEngine CPUSpillBackend"),
    ("stagehand.activation.registry", "ActivationRecord ActivationRegistry ActivationState"),
    ("stagehand.activation.backend_cpu", "CPUSpillBackend"), ("stagehand.activation.hooks", "ActivationHookContext"),
    ("stagehand.activation.transfer", "ActivationTransferEngine"),
    ("stagehand.activation.budget", "ActivationBudgetManager"),
    ("stagehand.activation.scheduler", "ActivationScheduler")])
def test_228_the_names_are_where_programs_import_them(module, names):
    found = importlib.import_module(module)
    assert all(getattr(found, name).__name__ == name for name in names.split() if name != "VALID_TRANSITIONS")


# ---------------------------------------------------------------------- budget


@pytest.fixture
def card(monkeypatch):
    """A card's allocator whose figures (MiB in use and held) the test sets."""
    figures = {"used": 0, "held": 0}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: figures["used"] * MIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *_: figures["held"] * MIB)
    return figures


def test_228_a_budget_follows_what_the_allocator_says(card):
    budget = BudgetManager(high_watermark_mb=100, low_watermark_mb=60)
    seen = []
    for used in (0, 59, 60, 99, 100, 120):
        card.update(used=used, held=used + 5)
        assert (budget.vram_used_mb(), budget.vram_reserved_mb(), budget.headroom_mb()) == (used, used + 5, 100 - used)
        seen.append((budget.above_high_watermark(), budget.below_low_watermark()))
        assert budget.should_evict() is seen[-1][0] and budget.can_prefetch() is not seen[-1][0]
    assert seen == [(False, True), (False, True), (False, False), (False, False), (True, False), (True, False)]
    card.update(used=50)
    assert budget.can_guest_allocate(40 * MIB, 10) and not budget.can_guest_allocate(40 * MIB + 1, 10)
    budget.reserve_bytes(30 * MIB, "primary")
    assert budget.can_guest_allocate(10 * MIB, 10) and not budget.can_guest_allocate(10 * MIB + 1, 10)
    budget.release_reserved_bytes(50 * MIB)
    assert budget.reserved_bytes == 0 and "reserved=0" in repr(budget)
    with pytest.raises(ValueError, match="must be greater"):
        BudgetManager(60, 60)


def test_228_without_a_card_nothing_is_in_use(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    budget = BudgetManager()
    assert budget.vram_used_mb() == budget.vram_reserved_mb() == 0 and budget.headroom_mb() == 22000


# ---------------------------------------------------------------------- registry, residency


def registry(model=None, pattern=BLOCKS):
    found = BlockRegistry()
    found.build_from_model(model if model is not None else s.made(s.Stack, 4, 40), pattern, "transformer", None)
    return found


def test_228_a_registry_has_the_blocks_in_order_with_their_bytes():
    model = s.made(s.Stack, 4, 40)
    model.blocks[1].half()
    blocks = registry(model)
    assert [entry.block_id for entry in blocks.blocks_in_order()] == [f"blocks.{i}" for i in range(4)]
    assert [entry.exec_order for entry in blocks.blocks_in_order()] == [0, 1, 2, 3]
    assert blocks.groups() == ["transformer"]
    entry = blocks.get("blocks.1")
    assert entry.module_ref() is model.blocks[1] and entry.dtype is torch.float16
    assert entry.size_bytes == sum(p.nbytes for p in model.blocks[1].parameters())
    assert 2 * entry.size_bytes == blocks.get("blocks.0").size_bytes
    with pytest.raises(StagehandOOMError, match="exceeds pool capacity"):
        blocks.validate(entry.size_bytes)
    blocks.build_from_module_list([("again", model.blocks[0]), ("more", model.out)], "rest")
    assert len(blocks) == 5 and "more" in blocks and "again" not in blocks
    blocks.validate(MIB)
    with pytest.raises(RuntimeError, match="frozen"):
        blocks.build_from_module_list([("x", nn.Linear(2, 2))])
    with pytest.raises(KeyError):
        blocks.get("none")


def test_228_states_move_as_the_table_says():
    legal = {("UNLOADED", "HOST_STAGED"), ("HOST_STAGED", "PREFETCHING"), ("PREFETCHING", "GPU_READY"),
             ("GPU_READY", "EVICTING"), ("GPU_READY", "GPU_FREEING"), ("EVICTING", "HOST_STAGED"),
             ("EVICTING", "UNLOADED"), ("GPU_FREEING", "UNLOADED")}
    states = ResidencyMap(registry())
    for before, after in itertools.product(BlockState, BlockState):
        states.get_entry("blocks.0").state = before
        if (before.name, after.name) in legal:
            states.transition("blocks.0", after)
            assert states.get_state("blocks.0") is after
        else:
            with pytest.raises(InvalidStateTransitionError, match=f"{before.name} to {after.name}"):
                states.transition("blocks.0", after)
    with pytest.raises(KeyError):
        states.get_state("none")


def test_228_only_blocks_that_nobody_uses_or_protects_may_leave():
    states = ResidencyMap(registry())
    for i in range(3):
        entry = states.get_entry(f"blocks.{i}")
        entry.state, entry.last_used_step = BlockState.GPU_READY, 3 - i
    assert states.gpu_resident_blocks() == ["blocks.0", "blocks.1", "blocks.2"]
    states.increment_ref("blocks.0")
    assert [block for block, _ in states.eviction_candidates(3, 1)] == ["blocks.1", "blocks.2"]
    assert [block for block, _ in states.eviction_candidates(3, 2)] == ["blocks.2"]
    for _ in range(2):
        states.protect_blocks(["blocks.1", "blocks.2"])
    states.unprotect_blocks(["blocks.1", "blocks.2"])  # counted: one is left
    assert not states.can_evict("blocks.2")
    assert [block for block, _ in states.protected_eviction_candidates()] == ["blocks.2", "blocks.1"]
    states.unprotect_blocks(["blocks.1", "blocks.2", "none"])
    assert states.can_evict("blocks.2") and not states.can_evict("blocks.0") and not states.can_evict("blocks.3")
    states.decrement_ref("blocks.0")
    with pytest.raises(ValueError, match="below zero"):
        states.decrement_ref("blocks.0")
    states.reset_all_to_unloaded()
    assert states.gpu_resident_blocks() == [] and len(states) == 4


# ---------------------------------------------------------------------- transfers


def copies_through(engine, pool, device):
    source = torch.randn(3, 100, 1024, device=device)
    slabs = pool.acquire(source.nbytes)
    assert isinstance(slabs, list)  # two
    out = engine.submit_d2h("a", source, slabs)
    engine.wait(out)
    to = torch.zeros_like(source)
    back = engine.submit_h2d("a", slabs, to)
    engine.wait(back)
    assert s.same(to, source) and engine.poll(back) and back.completed
    assert (back.direction, back.size_bytes, back.block_id) == ("h2d", source.nbytes, "a")
    pool.release(slabs)
    for dtype in (torch.bfloat16, torch.int8, torch.bool):
        small = torch.ones(7, dtype=dtype, device=device)
        slab = pool.acquire(small.nbytes)
        engine.submit_d2h("b", small, slab)
        engine.submit_h2d("b", slab, again := torch.zeros_like(small))
        engine.drain()
        assert torch.equal(again, small) and engine.inflight_count() == 0 and engine.reap() == 0
        pool.release(slab)
    slab = pool.acquire(1)
    with pytest.raises(StagehandOOMError, match="do not fit into slabs"):
        engine.submit_d2h("c", source, slab)
    with pytest.raises(ValueError, match="not contiguous"):
        engine.submit_d2h("c", source.transpose(0, 1), slab)


def test_228_an_engine_copies_between_slabs_and_tensors():
    pool = PinnedPool(total_mb=4, slab_mb=1)
    copies_through(AsyncTransferEngine(pool, max_inflight=2), pool, "cpu")
    with pytest.raises(ValueError, match="max_inflight"):
        AsyncTransferEngine(pool, max_inflight=0)


@needs_cuda
def test_228_an_engine_on_a_card():
    pool = PinnedPool(total_mb=4, slab_mb=1)
    engine = AsyncTransferEngine(pool, max_inflight=1)
    copies_through(engine, pool, "cuda")
    slabs = [pool.acquire(MIB) for _ in range(4)]
    device = [torch.full((MIB,), i, dtype=torch.uint8, device="cuda") for i in range(4)]
    for slab, tensor in zip(slabs, device):
        engine.submit_d2h("x", tensor, slab)
        assert engine.inflight_count() <= 1
    engine.drain()
    assert all(bool((slab.buffer == i).all()) for i, slab in enumerate(slabs))


# ---------------------------------------------------------------------- scheduler


def test_228_a_policy_looks_ahead_and_scores():
    policy = StaticLookaheadPolicy(prefetch_window=3, eviction_cooldown_steps=2)
    assert policy.blocks_to_prefetch(0, 10, {}) == [1, 2, 3] and policy.blocks_to_prefetch(8, 10, {}) == [9]
    scores = [policy.score_for_eviction("b", 4, order, 10, 100) for order in (6, 4, 3)]
    assert scores == [200, 1000, 900]
    assert policy.should_evict(1, 4) and not policy.should_evict(2, 4)


class Told:
    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *args: self.calls.append((name, *args))

    def count(self, name):
        return sum(call[0] == name for call in self.calls)


def driven(net, scheduler, x, step):
    """The model's pass as a program writes it that calls blocks itself."""
    scheduler.begin_step(step)
    x = net.inp(x)
    for i, block in enumerate(net.blocks):
        scheduler.before_block(f"blocks.{i}")
        states = scheduler._residency
        assert states.get_state(f"blocks.{i}") is BlockState.GPU_READY and not states.can_evict(f"blocks.{i}")
        x = block(x)
        scheduler.after_block(f"blocks.{i}", x)
    x = net.out(x)
    scheduler.end_step()
    return x


def made_scheduler(net, **options):
    return StagehandScheduler(registry(net), config=StagehandConfig(vram_budget=2 * s.nbytes(net) // 3),
                              device=s.device(1 << 26), **options)


def test_228_before_block_brings_a_block_that_stays_until_after_block():
    net, told, policy = s.made(s.Stack, 6, 48), Told(), StaticLookaheadPolicy(1)
    ref = s.aligned_copy(net)
    pool = PinnedPool(4, 1)
    states = ResidencyMap(registry(net))
    scheduler = made_scheduler(net, residency=states, policy=policy, telemetry=told, guards=NumericGuard(),
                               transfer_engine=AsyncTransferEngine(pool, max_inflight=1))
    x = there(torch.randn(3, 48))
    with torch.no_grad():
        for step in range(3):
            assert s.same(driven(net, scheduler, x, step), ref(x))
    assert told.count("begin_step") == told.count("end_step") == 3
    assert told.count("record_prefetch_hit") + told.count("record_prefetch_miss") == 18
    assert told.count("record_prefetch_miss") > 0 and told.count("record_nan_inf") == 18
    assert scheduler.runtime.stats["evictions"] > 0 and len(states.gpu_resident_blocks()) < 6
    assert states.get_entry("blocks.0").last_used_step == 2
    with torch.no_grad():
        scheduler.begin_step(3)
        scheduler.before_block("blocks.0")
        for i in range(1, 6):
            scheduler.before_block(f"blocks.{i}")
            net.blocks[i](x)
            scheduler.after_block(f"blocks.{i}")
            assert states.get_state("blocks.0") is BlockState.GPU_READY
        with pytest.warns(RuntimeWarning, match="NaN"):
            scheduler.after_block("blocks.0", x * float("nan"))
        with pytest.raises(ValueError, match="below zero"):
            scheduler.after_block("blocks.0")
        with pytest.raises(KeyError):
            scheduler.before_block("none")
        with pytest.raises(InvalidStateTransitionError, match="the runtime moves block"):
            states.transition("blocks.0", BlockState.EVICTING)
        scheduler.before_block("blocks.1")  # an exception: the step's end lets go of it
        scheduler.end_step()
        assert states.get_entry("blocks.1").refcount == 0
        states.protect_blocks(["blocks.2"])
        for step in range(4, 6):
            assert s.same(driven(net, scheduler, x, step), ref(x))
            assert states.get_state("blocks.2") is BlockState.GPU_READY
        scheduler.unprotect_blocks(["blocks.2"])
        scheduler.close()
        assert s.same(net(x), ref(x)) and "_stagehand_runtime" not in net.__dict__
    scheduler.close()
    pool.shutdown()


def test_228_a_driven_model_trains_as_a_plain_one():
    net = s.made(s.Stack, 5, 48, frozen=False)
    ref = s.aligned_copy(net)
    scheduler = made_scheduler(net, policy=StaticLookaheadPolicy(1))
    scheduler.protect_blocks(["blocks.1"])
    x = there(torch.randn(3, 48))
    for step in range(3):
        outs = [driven(net, scheduler, x, step), ref(x)]
        for one, out in zip((net, ref), outs):
            one.zero_grad()
            out.pow(2).sum().backward()
            with torch.no_grad():
                for p in one.parameters():
                    p -= 0.01 * p.grad
        assert s.same(*outs) and s.same(list(net.parameters()), list(ref.parameters()))
    scheduler.close()


def test_228_watermarks_and_window_of_the_parts_count():
    net = s.made(s.Stack, 12, 160)  # blocks of 0.6 MiB
    policy = StaticLookaheadPolicy(1)
    scheduler = StagehandScheduler(registry(net), budget=BudgetManager(5, 3), policy=policy, device=s.device(1 << 26))
    config = scheduler.runtime.config
    assert (config.policy, config.vram_high_watermark_mb, config.vram_low_watermark_mb) == ("static", 5, 3)
    x, least = there(torch.randn(2, 160)), []
    with torch.no_grad():
        for step in range(2):
            driven(net, scheduler, x, step)
            least.append(len(scheduler._residency.gpu_resident_blocks()))
        policy.prefetch_window = 0
        stats = scheduler.runtime.stats
        assert stats["evictions"] > 0
        before = stats["demand_loads"]
        driven(net, scheduler, x, 2)
        assert scheduler.runtime.stats["demand_loads"] - before >= 6  # nothing is fetched ahead
    scheduler.close()
    with pytest.raises(ValueError, match="build_from_model"):
        StagehandScheduler(BlockRegistry())


# ---------------------------------------------------------------------- parts of spilling


def test_228_a_backend_gives_slabs_by_class_and_counts_what_it_has_not():
    backend = CPUSpillBackend(class_sizes_mb=(1, 4), slabs_per_class=(2, 1))
    small = [backend.allocate(n) for n in (1, MIB, 5)]
    assert [len(buffer) for buffer in small] == [1, MIB, 5]
    assert [backend.size_class(buffer) for buffer in small] == [MIB, MIB, 4 * MIB]  # the third in the next class
    over = [backend.allocate(5), backend.allocate(4 * MIB), backend.allocate(9 * MIB)]
    assert [backend.size_class(buffer) for buffer in over] == [None, None, None]
    assert (backend.hits, backend.misses) == (3, 3)
    assert backend.stats() == {"hits": 3, "misses": 3, "bytes_in_use": 6 * MIB}
    address = small[1].data_ptr()
    for buffer in (*small, *over):
        backend.release(buffer)
    backend.release(over[0])  # unknown: nothing
    taken = {backend.allocate(10).data_ptr() for _ in range(2)}
    assert address in taken and backend.hits == 5
    backend.shutdown()
    assert backend.size_class(backend.allocate(3)) is None
    assert CPUSpillBackend((1, 2), 3).classes == {MIB: 3, 2 * MIB: 3}
    for bad in ({"class_sizes_mb": (4, 1)}, {"slabs_per_class": (1,)}, {"slabs_per_class": None}):
        with pytest.raises(ValueError, match=next(iter(bad)) if "class_sizes_mb" not in bad else "growing"):
            CPUSpillBackend(**bad)
    with pytest.raises(ValueError, match="positive"):
        CPUSpillBackend().allocate(0)


def spilled_and_restored(device, checks):
    backend, records = CPUSpillBackend((1, 4), (3, 1)), ActivationRegistry()
    engine = ActivationTransferEngine(backend, max_d2h=2, max_h2d=1, debug_checksums=checks)
    base = torch.randn(6, 8, 10, device=device)
    tensors = [base, base.transpose(0, 2), base[::2, 1:, ::3], base.to(torch.bfloat16), base > 0, base.new_empty(0, 3),
               base[0, 0, 0], base.expand(2, 6, 8, 10), torch.randn(700, 1024, device=device)]
    kept = [records.create(tensor, step=4) for tensor in tensors]
    for record, tensor in zip(kept, tensors):
        engine.spill(record, tensor)
    assert len(list(records.iter_spilling())) == len(tensors) and backend.hits and backend.misses
    engine.finalize_all_spills(records.iter_spilling())
    assert not list(records.iter_spilling()) and engine.can_spill()
    for record, tensor in reversed(list(zip(kept, tensors))):
        assert records.get(record.record_id) is record and record.state is ActivationState.SPILLED
        back = engine.restore(record)
        assert record.state is ActivationState.RESTORED and record.buffer is None and record.step == 4
        assert (back.dtype, back.shape, back.device) == (tensor.dtype, tensor.shape, tensor.device)
        assert torch.equal(back, tensor)
    assert engine.restore(_spilled(engine, records, base.transpose(0, 2))).stride() == base.transpose(0, 2).stride()
    engine.drain()
    assert backend.stats()["bytes_in_use"] == 0
    records.clear()
    assert len(records) == 0


def _spilled(engine, records, tensor):
    record = records.create(tensor)
    engine.spill(record, tensor)
    return record


@pytest.mark.parametrize("checks", [False, True])
def test_228_a_tensor_comes_back_as_it_was_spilled(checks):
    spilled_and_restored("cpu", checks)


@needs_cuda
def test_228_a_tensor_comes_back_on_a_card():
    spilled_and_restored("cuda", False)
    spilled_and_restored("cuda", True)


def test_228_records_move_as_they_may_and_changed_bytes_are_an_error():
    engine, records = ActivationTransferEngine(CPUSpillBackend((1,), 2), debug_checksums=True), ActivationRegistry()
    x = torch.randn(20)
    record = _spilled(engine, records, x)
    with pytest.raises(InvalidStateTransitionError, match="SPILLING to SPILLING"):
        engine.spill(record, x)
    engine.finalize_all_spills([record])
    record.buffer[3] ^= 1
    with pytest.raises(TransferError, match="other bytes"):
        engine.restore(record)
    fresh = records.create(x)
    with pytest.raises(InvalidStateTransitionError, match="KEPT to RESTORING"):
        engine.restore(fresh)
    with pytest.raises(ValueError, match="shape"):
        engine.spill(fresh, x[:3])
    engine._max_d2h = 0
    assert not engine.can_spill()
    with pytest.raises(InvalidStateTransitionError, match="_max_d2h is 0"):
        engine.spill(fresh, x)
    legal = {("KEPT", "SPILLING"), ("KEPT", "RELEASED"), ("SPILLING", "SPILLED"), ("SPILLING", "RELEASED"),
             ("SPILLED", "RESTORING"), ("SPILLED", "RELEASED"), ("RESTORING", "RESTORED"), ("RESTORED", "RELEASED")}
    for before, after in itertools.product(ActivationState, ActivationState):
        fresh.state = before
        if (before.name, after.name) in legal:
            fresh.move(after)
            continue
        with pytest.raises(InvalidStateTransitionError):
            fresh.move(after)


def test_228_spilling_goes_on_from_the_high_to_the_low_watermark(card):
    scheduler = ActivationScheduler(ActivationBudgetManager(high_watermark_mb=100, low_watermark_mb=50))
    x = torch.zeros(3)
    found = []
    for used in (90, 100, 101, 80, 50, 49, 80):
        card["used"] = used
        found.append(scheduler.should_spill(x))
        assert not scheduler.should_spill(x[:0]) and not scheduler.should_spill(nn.Parameter(x))
    assert found == [False, False, True, True, True, False, False]
    assert scheduler.budget.peak_mb == 101
    scheduler.budget.reset_peak()
    assert scheduler.budget.peak_mb == 0 and scheduler.budget.above_high() is False and not scheduler.budget.below_low()


def test_228_the_hook_context_is_the_runtimes():
    config = ActivationStagehandConfig(enabled=True, vram_high_watermark_mb=0, vram_low_watermark_mb=0,
                                       slabs_per_class=None, max_inflight_d2h=8, recompute_cheap=False)
    runtime = ActivationRuntime(config, s.device(1 << 28), smallest=1024)
    net, ref = (s.made(s.Stack, 3, 64, frozen=False).to(TORCH) for _ in range(2))
    x = there(torch.randn(256, 64))
    context = ActivationHookContext(runtime)
    with context:
        net(x).pow(2).sum().backward()
    with torch.autograd.graph.saved_tensors_hooks(context.pack, context.unpack):
        net(x).pow(2).sum().backward()
    for _ in range(2):
        ref(x).pow(2).sum().backward()
    assert s.same([p.grad for p in net.parameters()], [p.grad for p in ref.parameters()])
    assert runtime.stats["spill_bytes"] > 0
    runtime.shutdown()
    with pytest.raises(ValueError, match="enabled"):
        ActivationHookContext(ActivationRuntime())


# ---------------------------------------------------------------------- pools, flags


def test_228_a_model_in_ram_leaves_a_pool_for_the_next(tmp_path):
    from safetensors.torch import save_file

    first, second = s.made(s.Stack, 4, 256), s.made(s.Stack, 4, 256)
    save_file(first.state_dict(), tmp_path / "m.safetensors")
    budget, x = s.tight_budget(first), torch.randn(2, 256)
    want = infer(s.aligned_copy(first), x)
    stagehand.layer(first, vram_budget=budget, device=s.device(1 << 26))
    infer(first, x)
    stagehand.StagehandRuntime(second, StagehandConfig(vram_budget=budget), block_pattern=BLOCKS,
                               device=s.device(1 << 26))
    infer(second, x)
    for model in (first, second):
        pool = run(model).shutdown_keep_pool()
        assert isinstance(pool, PinnedPool) and pool.num_slabs == 7 and pool.slab_bytes == MIB
        third = stagehand.load(lambda: s.Stack(4, 256), tmp_path / "m.safetensors", vram_budget=budget, pool=pool,
                               device=s.device(1 << 26))
        assert s.same([infer(third, x)], [want]) and run(third).stats["staging_bytes"] == 7 * MIB
        assert run(third).shutdown_keep_pool() is pool
        assert pool.stats()["free"] == 7
        pool.shutdown()
    never = stagehand.StagehandRuntime(s.made(s.Stack, 2, 32), block_pattern=BLOCKS)
    assert isinstance(never.shutdown_keep_pool(), PinnedPool)


def test_228_small_layers_are_flagged_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(256, 256), nn.Embedding(3, 2), nn.Conv2d(1, 1, 1))
    replace_linear_with_ramtorch(model, "sim", vram_budget="1MB")
    flagged = [hasattr(part, "is_ramtorch") for part in model]
    assert flagged == [True, False, True, True, True]
    for part, flag in zip(model, flagged):
        assert all(getattr(param, "is_ramtorch", False) is flag for param in part.parameters())
    assert move_model_to_device(model, "meta")[0].weight.device.type == "cpu"
    run(model).shutdown()
    assert os.listdir(tmp_path) == []
