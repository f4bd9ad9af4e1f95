"""Field cases O: host memory: pinning, doubling, leaks."""

from __future__ import annotations

import copy
import gc
import json
import os
import re
import warnings

import children
import file_support as f
import card
import pytest
import support as s
import torch
from torch import nn
from worlds import Checkpointed, infer, managed, needs_cuda, run, train

import stagehand
from stagehand import _core


def resident_bytes():
    """Of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def host_peak(work):
    """Most bytes of host memory that this process took meanwhile."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    work()
    with open("/proc/self/status") as file:
        return int(re.search(r"VmHWM:\s+(\d+)", file.read())[1]) << 10


@card.on_the_host
def test_wrapping_again_takes_the_memory_of_one_copy():
    """Also while runtimes that were shut down are still referenced: an arena's memory is the weights'."""
    done = children.run("""
        import sys
        from torch import nn
        sys.path.insert(0, "field")
        from test_o_host_memory import host_peak
        model = nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(16)])  # 1 GiB, in windows of 256 MiB
        kept, want = [], [layer.weight[7].clone() for layer in model]
        def again():
            device = stagehand._core.Device("sim", memory_bytes=1 << 28)
            stagehand.layer(model, vram_budget=160 << 20, device=device)
            kept.append(support.runtime(model))
            kept[-1].shutdown()
        again()
        peaks = [host_peak(again) >> 20 for _ in range(2)]
        same = all(torch.equal(layer.weight[7], row) for layer, row in zip(model, want))
        print(peaks, "right" if max(peaks) < 1024 + 2 * 256 + 450 and same else "wrong")
    """)
    assert done.status == 0 and "right" in done.stdout, done.stdout + done.stderr


@card.on_the_host
def test_93_past_the_limit_of_pinned_memory_it_works_and_says_so_once():
    model = s.made(s.Stack, 8, 96, frozen=False)
    ref = s.aligned_copy(model)
    budget = s.tight_budget(model)
    device = s.device(budget, pin_limit_bytes=1 << 20)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        stagehand.layer(model, vram_budget=budget, device=device)
        x = model.example()[0]
        for _ in range(3):
            assert s.same(train(model, x), train(ref, x))
    texts = [str(w.message) for w in said]
    pinned = [text for text in texts if "pinned" in text]
    assert len(pinned) == 1 and re.search(r"could not be pinned.*pageable|staged", pinned[0]), texts
    assert not any("device memory" in text for text in texts)
    stats = run(model).stats
    assert stats["pinned_bytes"] <= 1 << 20 < stats["host_bytes"]


def test_93_pinning_leaves_memory_to_the_rest_of_the_machine():
    done = children.run("""
        import warnings
        from torch import nn
        from stagehand import _core
        model = nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(7)])  # windows of 256 and 192 MiB
        with torch.no_grad():
            want = model(x := torch.randn(2, 4096))
        _core._assume_available(3_000_000_000)
        device = _core.Device("sim", memory_bytes=1 << 28)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            stagehand.layer(model, vram_budget=160 << 20, device=device)
            with torch.no_grad():
                assert torch.equal(model(x), want)
        stats = stagehand.runtime(model).stats
        print([str(w.message) for w in said], stats["host_bytes"], stats["pinned_bytes"])
    """)
    assert done.status == 0, done.stderr
    assert done.stdout.count("could not be pinned") == 1, done.stdout
    assert "pinning leaves 4000000000 to the rest of the machine" in done.stdout, done.stdout


def test_93_a_pool_that_cannot_be_pinned_is_pageable_and_tells():
    device = _core.Device("sim", memory_bytes=1 << 20, pin_limit_bytes=1 << 20)
    pool = _core.Pool(4 << 20, 1 << 20, 512, device=device)
    assert not pool.pinned and pool.slab_count == 4


@needs_cuda
def test_93_on_cuda_with_a_small_memlock_limit():
    done = children.run("""
        import resource
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
        model = support.made(support.Stack, 6, 512)
        want = torch.nn.Module.__call__(model, x := torch.ones(2, 512))
        stagehand.layer(model, vram_budget=support.tight_budget(model) + (8 << 20), device="cuda")
        with torch.no_grad():
            torch.testing.assert_close(model(x.cuda()).cpu(), want.detach(), rtol=1e-3, atol=1e-3)
        print("right")
    """)
    assert done.status == 0 and "right" in done.stdout, done.stderr


def test_95_a_pool_that_cannot_be_had_leaves_nothing_behind():
    """More than there is, 20 times: one error each, that says what was asked, and no growth."""
    before, fds = resident_bytes(), len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with pytest.raises(stagehand.StagehandOOMError, match=r"[Pp]in|host|slab|pool"):
            stagehand.PinnedPool(1 << 30, 1 << 20)  # an exbibyte
    gc.collect()
    assert resident_bytes() - before < 8 << 20
    assert len(os.listdir("/proc/self/fd")) == fds


@needs_cuda
@pytest.mark.alone
def test_95_on_cuda_a_pinned_pool_above_what_there_is():
    def available():
        with open("/proc/meminfo") as file:
            return int(re.search(r"MemAvailable:\s*(\d+)", file.read())[1]) << 10

    torch.cuda.init()
    asked = (available() + available() // 10) >> 20
    before = available(), resident_bytes()
    for _ in range(20):
        with pytest.raises(stagehand.StagehandOOMError):
            stagehand.PinnedPool(asked // 64 * 64, 64)
    assert before[0] - available() < 1 << 30 and resident_bytes() - before[1] < 256 << 20


@card.on_the_host
@pytest.mark.parametrize("reentrant", [False, True])
def test_97_residency_does_not_add_up_over_checkpointed_steps(reentrant):
    model, ref = managed(Checkpointed, 7, 32, frozen=False, link=None)
    model.reentrant = reentrant
    ref.reentrant = reentrant
    x = model.example()[0].requires_grad_()
    peaks, budget = [], s.tight_budget(model)
    device = run(model).session.target.core
    for step in range(8 if reentrant else 30):
        ours = train(model, x, lr=0)
        if step % 7 == 0:
            assert s.same(ours, train(ref, x, lr=0))
        stats = run(model).stats
        assert stats["device_bytes"] + stats["reserved_bytes"] <= budget
        assert stats["leased_bytes"] == 0
        peaks.append((stats["device_peak"], device.info()["memory_free"]))
    assert peaks[2] == peaks[-1] and device.residency()["peak"] <= budget


SHARDS = """
import gc, json, os, re, threading
import file_support as f
from torch import nn
D, N = 1024, 8
folder, tier = {folder!r}, {tier!r}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(D, 2 * D, bias=False) for _ in range(N))
    def forward(self, x):
        for block in self.blocks:
            x = block(x)[:, :D]
        return x

def now(field):
    with open("/proc/self/status") as file:
        return int(re.search(field + r":\\s*(\\d+) kB", file.read())[1]) << 10

block, total = 8 * D * D, 8 * D * D * N
small = stagehand.load(lambda: nn.Linear(64, 64, bias=False), folder + "/small.safetensors", vram_budget=1 << 20,
                       device="sim")
with torch.no_grad():
    small(torch.ones(1, 64))
small._stagehand_layer_runtime.shutdown()
del small
gc.collect()
base, budget = now("RssAnon"), 2 * block
peak, ending = [0], threading.Event()

def watch():
    while not ending.wait(0.0005):
        peak[0] = max(peak[0], now("RssAnon") - base)

thread = threading.Thread(target=watch, daemon=True)
thread.start()
options = dict(vram_budget=budget, device=stagehand._core.Device("sim", memory_bytes=budget))
if tier == "ram":
    options["ram_budget"] = total
model = stagehand.load(Net, folder, **options)
x = torch.full((1, D), 0.5)
with torch.no_grad():
    outs = [model(x).sum().item() for _ in range(2)]
ending.set()
thread.join()
print(json.dumps([outs, peak[0] - budget, block, total]), flush=True)
os._exit(0)
"""


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """8 shards of 8 MiB; what a net of them gives."""
    folder = tmp_path_factory.mktemp("shards")
    weights = {f"blocks.{i}.weight": torch.eye(1024).repeat(2, 1) * (1 + i / 16) for i in range(8)}
    f.save_sharded(folder, weights, 8)
    f.save(folder / "small.safetensors", {"weight": torch.ones(64, 64)})
    want = 512.0
    for i in range(8):
        want *= 1 + i / 16
    return folder, want


@pytest.mark.alone
@pytest.mark.parametrize("tier", ["disk", "ram"])
def test_99_the_peak_while_loading_is_not_two_copies(shards, tier):
    folder, want = shards
    done = children.run(SHARDS.format(folder=str(folder), tier=tier))
    assert done.status == 0, done.stderr
    outs, peak, block, total = json.loads(done.stdout)
    assert outs == [pytest.approx(want, rel=1e-5)] * 2
    constant = 24 << 20
    if tier == "disk":
        assert peak < 2 * block + constant, f"{peak >> 20} MiB"
    else:
        assert peak < 1.25 * total + 2 * block + constant, f"{peak >> 20} MiB"


@pytest.mark.parametrize("build", [s.Stack, Checkpointed])
@pytest.mark.parametrize("depth", [1, 4, None])
def test_101_fetching_ahead_stays_within_the_budget(depth, build):
    """depth: of the fixed lookahead; None: the planner's. Then room for one block only."""
    model = s.made(build, 8, 24, frozen=False)
    ref = s.aligned_copy(model)
    one = max(s.nbytes(block) for block in model.blocks)
    options = {} if depth is None else {"policy": "static", "prefetch_window_blocks": depth}
    for budget in (s.tight_budget(model), s.tight_budget(model) - one):
        config = stagehand.StagehandConfig(vram_budget=budget, **options)
        device = s.device(budget)
        runtime = stagehand.StagehandRuntime(model, config, block_pattern=r"^blocks\.\d+$", device=device)
        x = model.example()[0].requires_grad_()
        for _ in range(3):
            assert s.same(train(model, x), train(ref, x))
            stats = runtime.stats
            assert stats["device_peak"] + stats["reserved_bytes"] <= budget
        assert device.residency()["peak"] <= budget
        runtime.shutdown()


# ---------------------------------------------------------------------- own cases


@pytest.mark.alone
def test_own_wrapping_a_model_in_ram_holds_no_second_copy_of_it():
    """64 MiB in 16 modules: at no time two copies, and none of the old memory stays, also where it came from the heap
    of the C library, which it does in a process that has freed a large block before. In a process of its own: what
    other tests left in the heap would be counted."""
    done = children.run("""
        import gc, re, sys

        def status(field):
            with open("/proc/self/status") as file:
                return int(re.search(field + r":\\s*(\\d+) kB", file.read())[1]) << 10

        warm = support.made(support.Stack, 4, 32)
        support.wrap(warm, support.tight_budget(warm))  # starts what starts once
        with torch.no_grad():
            warm(warm.example()[0])
        warm._stagehand_layer_runtime.shutdown()
        block = torch.empty(30 << 20, dtype=torch.uint8)
        del block, warm
        model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(16))).requires_grad_(False)
        gc.collect()
        try:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")
        except OSError:
            print("unknown")
            sys.exit()
        before = status("VmRSS")
        support.wrap(model, 3 * 4 << 20)
        with torch.no_grad():
            model(torch.ones(1, 1024))
        model._stagehand_layer_runtime.shutdown()
        peak = status("VmHWM") - before
        gc.collect()
        print(support.nbytes(model), peak, status("VmRSS") - before)
    """)
    assert done.status == 0, done.stderr
    if done.stdout.strip() == "unknown":
        pytest.skip("this kernel does not reset the peak of resident memory")
    total, peak, stays = (int(word) for word in done.stdout.split())
    assert peak < total // 2 + (12 << 20), f"{peak >> 20} MiB more than the model's {total >> 20}"
    simulated = 2 * (12 << 20)  # the device's memory and its mirror, as much of both as the timing of copies touched
    assert stays < simulated + (8 << 20), f"{stays >> 20} MiB stay"


def test_own_no_address_space_for_the_arena_is_an_error_and_the_model_stays():
    done = children.run("""
        import resource
        from torch import nn
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(24))).requires_grad_(False)
        small = support.made(support.Stack, 4, 32)
        support.wrap(small, support.tight_budget(small))  # starts what starts once
        x = torch.ones(2, 1024)
        with torch.no_grad():
            small(small.example()[0])
            want = model(x)
        space = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        before = [p.data_ptr() for p in model.parameters()]
        resource.setrlimit(resource.RLIMIT_AS, (space + (40 << 20), resource.RLIM_INFINITY))
        for _ in range(3):
            try:
                stagehand.layer(model, vram_budget="12MiB", device="sim")
                print("no error")
            except stagehand.StagehandOOMError as error:
                print("refused:", error)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        with torch.no_grad():
            assert [p.data_ptr() for p in model.parameters()] == before and torch.equal(model(x), want)
            stagehand.layer(model, vram_budget="12MiB", device="sim")
            torch.testing.assert_close(model(x), want)
        import os, sys
        sys.stdout.flush()
        os._exit(0)
    """)
    assert done.status == 0, done.stderr
    assert done.stdout.count("refused:") == 3 and re.search("host|memory", done.stdout), done.stdout


def test_own_gradients_that_are_kept_for_long_hold_no_more_than_themselves():
    """A program that keeps the gradients of every tenth step, as averages do: host memory is theirs, and comes back."""
    model, _ = managed(s.Stack, 6, 48, frozen=False, link=None)
    x, kept = model.example()[0], []
    one = sum(p.numel() * 4 for p in model.parameters())
    for step in range(24):
        model.zero_grad()
        model(x).sum().backward()
        if step % 6 == 0:
            kept.append([p.grad for p in model.parameters()])
    model.zero_grad()
    stats = run(model).session.grads.stats()
    assert stats["bytes_in_use"] <= 5 * one + (1 << 20)
    copies = [[g.clone() for g in grads] for grads in kept]
    kept.clear()
    gc.collect()
    assert run(model).session.grads.stats()["bytes_in_use"] == 0
    assert all(g.isfinite().all() for grads in copies for g in grads)


@card.on_the_host
def test_own_a_small_view_of_a_huge_storage_is_taken_alone():
    """Parameters that are slices of one storage that nothing else needs: it goes when the model is wrapped."""
    huge = torch.randn(64, 256, 256)  # 16 MiB
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4))).requires_grad_(False)
    for i, layer in enumerate(model):
        layer.weight.data = huge[7 * i]
    want, x = infer(copy.deepcopy(model), torch.ones(2, 256)), torch.ones(2, 256)
    del huge
    gc.collect()
    s.wrap(model, 3 << 18)
    torch.testing.assert_close(infer(model, x), want)
    assert run(model).stats["host_bytes"] == 4 * 256 * 256 * 4
    assert all(p.untyped_storage().nbytes() == 256 * 256 * 4 for p in model.parameters())
    run(model).shutdown()
    torch.testing.assert_close(infer(model, x), want)
    assert all(p.untyped_storage().nbytes() < 1 << 20 for p in model.parameters())
