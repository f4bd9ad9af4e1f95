"""Field cases R: several models and runtimes."""

from __future__ import annotations

import copy
import gc
import os
import re

import card
import pytest
import support as s
import torch
from torch import nn
from worlds import infer, managed, needs_cuda, run, state, train

import stagehand
from stagehand import _core


@pytest.mark.parametrize("mode", ["layer", "block"])
def test_117_memory_that_is_taken_before_the_first_forward_leaves_fewer_blocks_resident(mode):
    """Somebody takes device memory between wrapping and the first forward: fewer resident blocks, or an error with the
    numbers; what is given back later is used again."""
    model = s.made(s.Stack, 8, 48)
    ref = s.aligned_copy(model)
    block, total = s.nbytes(model.blocks[0]), s.nbytes(model)
    device = _core.Device("sim", memory_bytes=total)
    budget = total - block // 2
    config = stagehand.StagehandConfig(vram_budget=budget)
    runtime = stagehand.StagehandRuntime(model, config, block_pattern=r"^blocks\.\d+$", device=device)
    if mode == "layer":
        runtime.shutdown()
        runtime = run(stagehand.layer(model, vram_budget=budget, device=device))
    taken = device.empty(3 * block) if mode == "block" else None
    x = model.example()[0]
    for _ in range(3):
        assert s.same(infer(model, x), infer(ref, x))
    if mode == "layer":  # places are there from wrapping on: it is the other one who is refused
        with pytest.raises(stagehand.StagehandOOMError, match=r"\d+"):
            device.empty(3 * block)
        runtime.set_vram_budget(budget - 4 * block)
        taken = device.empty(3 * block)
        for _ in range(2):
            assert s.same(infer(model, x), infer(ref, x))
    stats = runtime.stats
    assert stats["device_bytes"] + stats["reserved_bytes"] <= total - 3 * block
    del taken
    gc.collect()
    runtime.set_vram_budget(budget)
    for _ in range(3):
        assert s.same(infer(model, x), infer(ref, x))
    assert runtime.stats["h2d_bytes"] > 0
    runtime.shutdown()
    assert device.residency()["occupied"] == 0


@needs_cuda
@pytest.mark.alone
def test_117_on_cuda_memory_that_somebody_else_took_is_no_crash():
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(24))).requires_grad_(False)
    x = torch.randn(4, 2048)
    want = infer(copy.deepcopy(model).cuda(), x.cuda()).cpu()
    torch.cuda.empty_cache()
    hoard = torch.empty(torch.cuda.mem_get_info()[0] - (600 << 20), dtype=torch.uint8, device="cuda")
    stagehand.layer(model, vram_budget=torch.cuda.mem_get_info()[0] - (200 << 20), device="cuda")
    try:
        other = torch.empty(300 << 20, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:  # the places are there since wrapping: it is the other one who is refused
        other = None
    try:
        torch.testing.assert_close(infer(model, x.cuda()).cpu(), want, rtol=1e-4, atol=1e-4)
    except stagehand.StagehandOOMError as error:
        assert re.search(r"\d+", str(error))
    del other, hoard
    torch.cuda.empty_cache()
    for _ in range(3):
        torch.testing.assert_close(infer(model, x.cuda()).cpu(), want, rtol=1e-4, atol=1e-4)
    run(model).shutdown()


def address_space():
    with open("/proc/self/status") as file:
        size = int(re.search(r"VmSize:\s*(\d+) kB", file.read())[1]) << 10
    with open("/proc/self/maps") as file:
        return size, len(file.readlines()), len(os.listdir("/proc/self/fd"))


@pytest.mark.alone
def test_119_wrapping_and_shutting_down_300_times_grows_nothing():
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
    ref, x = s.aligned_copy(model), torch.randn(2, 40)
    budget = s.nbytes(model)
    device = s.device(budget)
    for i in range(300):
        stagehand.layer(model, vram_budget=budget, device=device)
        if i % 10 == 0:
            model(x).sum().backward()
        run(model).shutdown()
        if i == 40:
            gc.collect()
            before = address_space()
    gc.collect()
    after = address_space()
    assert after[0] - before[0] < 8 << 20 and abs(after[1] - before[1]) < 40 and after[2] == before[2], (before, after)
    model.zero_grad()
    assert s.same(train(s.aligned_copy(model), x), train(ref, x))


class TwoPatterns(nn.Module):
    """Two lists of blocks, of which a pattern may name one or both."""

    def __init__(self, d=32):
        super().__init__()
        self.down = nn.ModuleList(s.Block(d, 0.5 + 0.1 * i) for i in range(4))
        self.up = nn.ModuleList(s.Block(d, 0.9 - 0.1 * i, 2) for i in range(4))
        self.out = nn.Linear(d, d)

    def forward(self, x):
        kept = []
        for block in self.down:
            x = block(x)
            kept.append(x)
        for block in self.up:
            x = block(x + kept.pop())
        return self.out(x)


def test_121_a_teacher_is_right_whatever_happens_to_the_student():
    """One device; the student is shut down, wrapped again, converted, made a guest, while the teacher is in use."""
    teacher, student = s.made(s.Stack, 6, 32), s.made(s.Stack, 6, 32, frozen=False, seed=1)
    refs = s.aligned_copy(teacher), s.aligned_copy(student)
    budget = s.tight_budget(student)
    device = _core.Device("sim", memory_bytes=2 * budget, link_bytes_per_s=10**9)
    stagehand.layer(teacher, vram_budget=budget, device=device, inference_mode=True)
    x = teacher.example()[0]

    def both():
        assert s.same(infer(teacher, x), infer(refs[0], x))
        assert s.same(train(student, x), train(refs[1], x))
        assert s.same(infer(teacher, x), infer(refs[0], x))

    for _ in range(3):
        stagehand.layer(student, vram_budget=budget, device=device)
        both()
        run(student).shutdown()
        assert s.same(infer(teacher, x), infer(refs[0], x))
        student_alone, ref_alone = s.aligned_copy(student), s.aligned_copy(refs[1])
        assert s.same(infer(student_alone, x), infer(ref_alone, x))
    stagehand.layer(student, vram_budget=budget, device=device)
    with run(teacher).as_guest(run(student)):
        both()
    both()
    run(teacher).shutdown()
    assert s.same(infer(s.aligned_copy(teacher), x), infer(refs[0], x))
    assert s.same(train(student, x), train(refs[1], x))


@pytest.mark.parametrize("pattern", [r"^(down|up)\.\d+$", r"^up\.\d+$", r"^down\.\d+$"])
def test_121_a_model_with_two_block_patterns(pattern):
    model = s.made(TwoPatterns, frozen=False)
    ref = s.aligned_copy(model)
    blocks = sorted(s.nbytes(block) for block in (*model.down, *model.up))
    listed = [block for name, block in model.named_modules() if re.search(pattern, name)]
    budget = s.nbytes(model) - sum(s.nbytes(block) for block in listed) + 2 * blocks[-1] + 4096
    runtime = stagehand.StagehandRuntime(model, stagehand.StagehandConfig(vram_budget=budget), block_pattern=pattern,
                                         device=s.device(budget))
    x = torch.randn(3, 32)
    for _ in range(3):
        assert s.same(train(model, x), train(ref, x))
    assert {unit["name"].split(".")[0] for unit in runtime.stats["units"]} == set(
        re.findall("down|up", pattern))
    runtime.shutdown()
    assert s.same(state(model), state(ref))


def test_122_moments_that_come_in_the_first_step_are_in_host_memory_and_change_nothing():
    student, teacher = s.made(s.Stack, 8, 32, frozen=False), s.made(s.Stack, 6, 32, seed=1)
    refs = s.aligned_copy(student), s.aligned_copy(teacher)
    a, b = s.tight_budget(student), s.tight_budget(teacher)
    device = s.device(a + b + (a + b) // 10)
    stagehand.layer(student, vram_budget=a, device=device)
    stagehand.layer(teacher, vram_budget=b, device=device, inference_mode=True)
    for build in (torch.optim.AdamW, stagehand.OffloadedAdamW):
        ours, theirs = (build(net.parameters(), lr=0.01) for net in (student, refs[0]))
        moved, x = [], student.example()[0]
        for _ in range(4):
            before = run(student).stats["h2d_bytes"]
            for net, optimizer, other in ((student, ours, teacher), (refs[0], theirs, refs[1])):
                optimizer.zero_grad()
                (net(x) - infer(other, x)).pow(2).sum().backward()
                optimizer.step()
            moved.append(run(student).stats["h2d_bytes"] - before)
            assert s.same(state(student), state(refs[0]))
            assert device.residency()["occupied"] <= a + b
        assert max(moved[1:]) <= 1.1 * moved[0] + s.nbytes(student.blocks[0]), moved
        moments = ours.state[student.blocks[2].up.weight]["exp_avg"]
        assert moments.device.type == "cpu" and moments.shape == student.blocks[2].up.weight.shape


# ---------------------------------------------------------------------- own cases


@card.on_the_host
def test_own_a_parameter_that_two_managed_models_share_is_right_in_both():
    """Not a module: one Parameter object, in two models that are wrapped one after the other, and trained."""
    a, b = s.made(s.Stack, 4, 32, frozen=False), s.made(s.Stack, 4, 32, frozen=False, seed=1)
    b.blocks[1].up.weight = a.blocks[2].up.weight
    refs = copy.deepcopy((a, b))
    x = a.example()[0]
    assert refs[1].blocks[1].up.weight is refs[0].blocks[2].up.weight
    budget = s.tight_budget(a)
    device = s.device(2 * budget)
    for model in (a, b):
        stagehand.layer(model, vram_budget=budget, device=device)
    shared = a.blocks[2].up.weight
    assert b.blocks[1].up.weight is shared
    for _ in range(3):
        for model, ref in zip((a, b), refs):
            ours, theirs = train(model, x), train(ref, x)
            for mine, other in zip(ours, theirs):
                torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
            assert b.blocks[1].up.weight is a.blocks[2].up.weight
    run(a).shutdown()
    torch.testing.assert_close(infer(b, x), infer(refs[1], x), rtol=1e-5, atol=1e-6)
    run(b).shutdown()
    for model, ref in zip((a, b), refs):
        torch.testing.assert_close(infer(model, x), infer(ref, x), rtol=1e-5, atol=1e-6)


def test_own_a_model_that_calls_another_managed_model_trains():
    """The inner one is no submodule (a frozen teacher, held in a list): passes and backward of two runtimes nest."""
    class Student(s.Stack):
        def forward(self, x):
            return super().forward(x) + self.others[0](x * 2)

    inner, outer = s.made(s.Stack, 4, 32, frozen=False, seed=1), s.made(Student, 4, 32, frozen=False)
    refs = s.aligned_copy(inner), s.aligned_copy(outer)
    outer.others, refs[1].others = [inner], [refs[0]]
    budget = s.tight_budget(outer)
    device = s.device(2 * budget, link=1e8)
    for model in (inner, outer):
        stagehand.layer(model, vram_budget=budget, device=device)
    x = outer.example()[0]
    for _ in range(3):
        for net in (inner, refs[0]):
            net.zero_grad()
        assert s.same(train(outer, x), train(refs[1], x))
        assert s.same([p.grad for p in inner.parameters()], [p.grad for p in refs[0].parameters()])


def test_own_shutdown_of_one_model_inside_a_pass_of_another():
    """From a hook, in the middle of its forward and of its backward."""
    a, ref = managed(s.Stack, 6, 32, frozen=False)
    x = a.example()[0]
    for where in ("forward", "backward"):
        b, _ = managed(s.Stack, 4, 32, seed=1)
        infer(b, x)
        if where == "forward":
            handle = a.blocks[3].register_forward_hook(lambda *_: run(b).shutdown())
        else:
            handle = a.blocks[3].register_full_backward_hook(lambda *_: run(b).shutdown())
        reference = ref.blocks[3].register_full_backward_hook(lambda *_: None)
        assert s.same(train(a, x), train(ref, x))
        handle.remove(), reference.remove()
        assert "_stagehand_layer_runtime" not in vars(b)


def test_own_a_copy_of_a_managed_model_may_be_wrapped_beside_it():
    a, ref = managed(s.Stack, 6, 32, frozen=False)
    x = a.example()[0]
    train(a, x), train(ref, x)
    b = copy.deepcopy(a)
    s.wrap(b, s.tight_budget(b))
    other = s.aligned_copy(ref)
    for _ in range(2):
        assert s.same(train(b, x * 2), train(other, x * 2))
        assert s.same(train(a, x), train(ref, x))
    run(a).shutdown()
    assert s.same(train(b, x), train(other, x))


def test_own_moving_between_devices_and_modes_keeps_the_bits():
    model = s.made(s.TinyLM, frozen=False)
    ref = s.aligned_copy(model)
    x = model.example()[0]
    budget = s.nbytes(model)
    devices = [s.device(budget), s.device(budget, link=1e8),
               _core.Device("sim", memory_bytes=budget, virtual_time=True)]
    for i in range(9):
        if i % 2:
            stagehand.layer(model, vram_budget=budget, device=devices[i % 3])
        else:
            stagehand.StagehandRuntime(model, stagehand.StagehandConfig(vram_budget=budget), device=devices[i % 3],
                                       block_pattern=r"^blocks\.\d+$")
        assert s.same(train(model, x), train(ref, x)), i
        run(model).shutdown()
        assert model.head.weight is model.embed.weight
        assert devices[i % 3].residency()["occupied"] == 0


@card.on_the_host
def test_own_a_runtime_that_cannot_be_made_leaves_nothing_on_a_shared_device():
    """The second model does not fit beside the first: error with bytes, the first goes on, the second is plain."""
    a, b = s.made(s.Stack, 4, 32), s.made(s.Stack, 12, 64, seed=1)
    ref, x = s.aligned_copy(a), a.example()[0]
    budget = s.tight_budget(a)
    device = s.device(budget + 4096)
    stagehand.layer(a, vram_budget=budget, device=device)
    with run(a).keep_resident():
        infer(a, x)
        occupied = device.residency()["occupied"]
        before = [p.data_ptr() for p in b.parameters()]
        for _ in range(5):
            with pytest.raises(stagehand.StagehandOOMError, match=r"\d+ bytes"):
                stagehand.layer(b, vram_budget=s.tight_budget(b), device=device)
                infer(b, torch.randn(1, 64))
            if "_stagehand_layer_runtime" in vars(b):
                run(b).shutdown()
            else:
                assert [p.data_ptr() for p in b.parameters()] == before
            assert s.same(infer(a, x), infer(ref, x))
        assert device.residency()["occupied"] == occupied and device.residency()["runtimes"] == 1
