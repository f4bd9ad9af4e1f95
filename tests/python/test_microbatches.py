"""Micro-batches block by block: results and gradients of separate passes, the bytes of one."""

import copy
import weakref

import pytest
import torch
from support import (
    HostMasterGuard, Stack, TinyLM, aligned_copy, assert_near, device, made, nbytes, runtime, same, tight_budget, wrap)
from torch import nn

import stagehand
from stagehand.weights.hooks import ManagedForward

HANDLES = "saver" in ManagedForward._call.__code__.co_names
needs_handles = pytest.mark.skipif(not HANDLES, reason="here a weight that autograd saves holds its place")

M = 5
SLOW = 1e8  # bytes/s: steps wait for the link, so that plans save bytes


def loss_of(y):
    return y.pow(2).sum()


def stages_of(model):
    return [model.inp, *model.blocks, model.out, loss_of]


def block_budget(model):
    """For training: where leases are held until backward, two more blocks."""
    return tight_budget(model) + (0 if HANDLES else 3 * nbytes(model.blocks[0]))


def managed(model, mode, budget, link=SLOW):
    """The model's runtime in layer or block mode."""
    if mode == "layer":
        return runtime(wrap(model, budget, link))
    return stagehand.StagehandRuntime(model, stagehand.StagehandConfig(vram_budget=str(budget)),
                                      device=device(budget, link))


def moved(managed_runtime, step, times=1) -> list[int]:
    """Bytes to the device in each step."""
    found = []
    for _ in range(times):
        before = managed_runtime.stats["h2d_bytes"]
        step()
        found.append(managed_runtime.stats["h2d_bytes"] - before)
    return found


def passes(model, batches, stages=stages_of):
    """m separate passes with accumulation; their losses."""
    losses = []
    for x in batches:
        for stage in stages(model):
            x = stage(x)
        x.backward()
        losses.append(x.detach())
    return losses


def trained(model, batches, stages=stages_of, **options):
    losses = stagehand.block_major(model, stages(model), batches, **options)
    torch.autograd.backward(losses)
    return [loss.detach() for loss in losses]


def grads_equal(model, ref):
    for (name, mine), theirs in zip(model.named_parameters(), ref.parameters()):
        assert theirs.grad is not None and same(mine.grad, theirs.grad), name


# ---------------------------------------------------------------------- results and bytes


@pytest.mark.parametrize("mode", ["layer", "block"])
def test_inference_moves_the_bytes_of_one_pass(mode):
    model = made(Stack, 8, 48)
    ref = aligned_copy(model)
    rt = managed(model, mode, tight_budget(model))
    batches = [torch.randn(3 + j, 48) for j in range(M)]

    def step():
        outs = stagehand.block_major(model, [model.inp, *model.blocks, model.out], batches)
        assert all(same(a, ref(x)) for a, x in zip(outs, batches)) and len(outs) == M

    with torch.no_grad():
        if mode == "layer":
            with HostMasterGuard(model):
                step()
        step()  # block mode opens here
        together = moved(rt, step, 6)[-1]
        model(batches[0])
        one = moved(rt, lambda: model(batches[0]), 6)[-1]
        separate = moved(rt, lambda: [model(x) for x in batches], 2)[-1]
    assert one > 0 and together <= 1.3 * one
    assert separate >= (M - 1) * one  # what it would be
    assert rt.stats["device_peak"] + rt.stats["reserved_bytes"] <= tight_budget(model)


@pytest.mark.parametrize("mode", ["layer", "block"])
@pytest.mark.parametrize("checkpoint", [True, False])
def test_gradients_are_those_of_separate_passes(mode, checkpoint):
    model = made(Stack, 8, 48, frozen=False)
    ref = aligned_copy(model)
    managed(model, mode, block_budget(model) if checkpoint or HANDLES else 3 * nbytes(model), 1e9)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.01) for net in (model, ref)]
    for _ in range(4):
        batches = [torch.randn(3 + j, 48) for j in range(M)]
        if mode == "layer":
            with HostMasterGuard(model):
                losses = trained(model, batches, checkpoint=checkpoint)
        else:
            losses = trained(model, batches, checkpoint=checkpoint)
        assert same(losses, passes(ref, batches))
        grads_equal(model, ref)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@needs_handles
@pytest.mark.parametrize("checkpoint", [True, False])
@pytest.mark.parametrize("mode", ["layer", "block"])
@pytest.mark.parametrize("frozen", [False, True])
def test_training_moves_the_bytes_of_one_pass(mode, checkpoint, frozen):
    model = made(Stack, 8, 48, frozen=frozen)
    batches = [torch.randn(4, 48, requires_grad=True) for _ in range(M)]
    rt = managed(model, mode, tight_budget(model))
    step = lambda count: lambda: trained(model, batches[:count], checkpoint=checkpoint)
    step(M)()
    together = moved(rt, step(M), 8)[-1]
    one = moved(rt, step(1), 8)[-1]
    assert one > 0 and together <= 1.4 * one
    assert rt.stats["device_peak"] + rt.stats["reserved_bytes"] <= tight_budget(model)


def test_inside_the_forward_of_a_model():
    class Own(Stack):
        def forward(self, batches):
            return stagehand.block_major(self, [self.inp, *self.blocks, self.out], batches)

    model = made(Own, 6, 48, frozen=False)
    ref = aligned_copy(model)
    wrap(model, block_budget(model), SLOW)
    batches = [torch.randn(4, 48) for _ in range(M)]
    for _ in range(3):
        for net in (model, ref):  # a plain model takes it as well
            net.zero_grad()
            torch.autograd.backward([y.pow(2).sum() for y in net(batches)])
        grads_equal(model, ref)


# ---------------------------------------------------------------------- order


class Logged(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, log, where):
        ctx.log, ctx.where = log, where
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.log.append(ctx.where)
        return grad, None, None


@pytest.mark.parametrize("checkpoint", [True, False])
def test_backward_goes_block_by_block_and_meets_micro_batches_in_order(checkpoint):
    calls, log = [], []
    blocks = [nn.Linear(8, 8) for _ in range(4)]

    def stage(i):
        def call(x, j):
            calls.append((i, j))
            return blocks[i](Logged.apply(x, log, (i, j))).relu()

        return call

    model = nn.ModuleList(blocks)
    extra = [{"j": j} for j in range(3)]
    batches = [torch.randn(2, 8, requires_grad=True) for _ in range(3)]
    outs = stagehand.block_major(model, [stage(i) for i in range(4)], batches, kwargs=extra, checkpoint=checkpoint)
    assert calls == [(i, j) for i in range(4) for j in (2, 1, 0)]
    del calls[:]
    sum(out.sum() for out in outs).backward()  # losses made in whatever order
    expected = [(i, j) for i in (3, 2, 1, 0) for j in range(3)]
    assert [i for i, _ in log] == [i for i, _ in expected]
    assert log[3:] == expected[3:]
    assert not checkpoint or calls == log
    del calls[:], log[:]
    stages = [*(stage(i) for i in range(4)), lambda y, j: y.sum()]
    torch.autograd.backward(stagehand.block_major(model, stages, batches, kwargs=extra, checkpoint=checkpoint))
    assert log == expected and (not checkpoint or calls[-12:] == expected)


def test_the_sum_is_added_once_to_a_gradient_that_is_there():
    model = made(Stack, 4, 32, frozen=False)
    sums, ref = aligned_copy(model), aligned_copy(model)
    wrap(model, block_budget(model))
    first, second = ([torch.randn(4, 32) for _ in range(3)] for _ in range(2))
    fired = []
    model.blocks[1].up.weight.register_post_accumulate_grad_hook(lambda p: fired.append(1))
    for batches in (first, second):
        trained(model, batches)
    passes(ref, first)
    passes(sums, second)
    for mine, theirs, more in zip(model.parameters(), ref.parameters(), sums.parameters()):
        assert same(mine.grad, theirs.grad + more.grad)
    assert len(fired) == 2


def test_gradients_by_autograd_grad():
    model = made(Stack, 4, 32, frozen=False)
    ref = aligned_copy(model)
    wrap(model, block_budget(model))
    batches = [torch.randn(4, 32) for _ in range(3)]
    losses = stagehand.block_major(model, stages_of(model), batches)
    found = torch.autograd.grad(losses, list(model.parameters()))
    passes(ref, batches)
    assert all(same(a, p.grad) for a, p in zip(found, ref.parameters()))
    assert all(p.grad is None for p in model.parameters())


# ---------------------------------------------------------------------- arguments


class Conditioned(nn.Module):
    """A block that takes and gives several things."""

    def __init__(self, d, gain):
        super().__init__()
        self.lin, self.gain = nn.Linear(d, d), gain

    def forward(self, x, count, *, shift, scale=1.0):
        return torch.tanh(self.lin(x) * scale + shift) * self.gain, count + 1


class Pair(nn.Module):
    def __init__(self, d=48, n=4):
        super().__init__()
        self.blocks = nn.ModuleList(Conditioned(d, 1 + 0.1 * i) for i in range(n))
        self.embed = nn.Linear(d, d)


@pytest.mark.parametrize("form", ["list", "function"])
def test_tuples_and_keyword_arguments(form):
    model = made(Pair, frozen=False)
    ref = aligned_copy(model)
    wrap(model, 3 * nbytes(model))
    batches = [(torch.randn(3, 48), torch.tensor(j)) for j in range(3)]
    given = [torch.randn(3, 48) for _ in range(3)]
    counts = []
    for net in (model, ref):
        shifts = [net.embed(c) for c in given]  # a graph of their own, shared by all blocks
        if net is model:
            by_call = lambda i, j: {"shift": shifts[j], "scale": 1.0 + i}
            each = [{"shift": shift} for shift in shifts]
            outs = stagehand.block_major(net, net.blocks, batches, kwargs=by_call if form == "function" else each)
            torch.autograd.backward([y.sum() for y, _ in outs][::-1])
            counts = [int(n) for _, n in outs]
        else:
            for j, (x, n) in enumerate(batches):
                for i, block in enumerate(net.blocks):
                    x, n = block(x, n, shift=shifts[j], scale=1.0 + i if form == "function" else 1.0)
                x.sum().backward()
    assert counts == [4, 5, 6]
    for (name, mine), theirs in zip(model.named_parameters(), ref.named_parameters()):
        if "blocks" in name:
            assert same(mine.grad, theirs[1].grad), name
        else:  # outside of the stages: summed in another order
            assert_near(mine.grad, theirs[1].grad)


def test_mappings_are_keyword_arguments():
    outs = stagehand.block_major(nn.Identity(), [lambda a, b: {"x": a + b, "y": b}, lambda x, y, z: (x * y, z),
                                                 lambda product, z: product - z],
                                 [{"a": j, "b": 2} for j in range(3)],
                                 kwargs=lambda i, j: {"z": 10 * j} if i == 1 else None)
    assert outs == [(j + 2) * 2 - 10 * j for j in range(3)]


def test_what_cannot_be_is_refused_before_anything_runs():
    ran = []
    call = lambda: stagehand.block_major(nn.Identity(), [ran.append], [1, 2], kwargs=[{}])
    with pytest.raises(ValueError, match="kwargs has 1 entries for 2 micro-batches"):
        call()
    with pytest.raises(TypeError, match="kwargs of micro-batch 1 must be a mapping or None, not a list"):
        stagehand.block_major(nn.Identity(), [ran.append], [1, 2], kwargs=[{}, []])
    with pytest.raises(ValueError, match="3 seeds for 2 micro-batches"):
        stagehand.block_major(nn.Identity(), [ran.append], [1, 2], seeds=[1, 2, 3])
    with pytest.raises(ValueError, match="stages is empty"):
        stagehand.block_major(nn.Identity(), [], [1, 2])
    with pytest.raises(TypeError, match="stage 1 is a int"):
        stagehand.block_major(nn.Identity(), [ran.append, 3], [1, 2])
    assert ran == [] and stagehand.block_major(nn.Identity(), [ran.append], []) == []


def test_inference_keeps_one_activation_for_each_micro_batch():
    alive, most = [], []

    def stage(x):
        y = x + 1
        alive.append(weakref.ref(y))
        most.append(sum(ref() is not None for ref in alive))
        return y

    with torch.no_grad():
        stagehand.block_major(nn.Identity(), [stage] * 6, [torch.zeros(2) for _ in range(4)])
    assert max(most) == 5


# ---------------------------------------------------------------------- random numbers


class Dropping(Stack):
    def __init__(self, n=4, d=48):
        super().__init__(n, d)
        self.drop = nn.Dropout(0.3)

    def stages(self):
        return [self.inp, *(lambda x, block=block: self.drop(block(x)) for block in self.blocks), self.out, loss_of]


@pytest.mark.parametrize("checkpoint", [True, False])
def test_seeds_give_each_micro_batch_the_masks_of_its_own_pass(checkpoint):
    model = made(Dropping, frozen=False).train()
    ref = aligned_copy(model)
    wrap(model, block_budget(model) if checkpoint else 3 * nbytes(model))
    batches = [torch.randn(4, 48) for _ in range(3)]
    torch.manual_seed(77)
    expected = torch.rand(4)
    torch.manual_seed(77)
    losses = stagehand.block_major(model, model.stages(), batches, seeds=[5, 6, 7], checkpoint=checkpoint)
    assert same(torch.rand(4), expected)  # the caller's numbers are as they were
    torch.autograd.backward(losses)
    for j, x in enumerate(batches):
        torch.manual_seed(5 + j)
        assert same(passes(ref, [x], Dropping.stages), [losses[j].detach()])
    grads_equal(model, ref)


def test_without_seeds_masks_are_the_same_from_run_to_run():
    model = made(Dropping, frozen=False).train()
    wrap(model, block_budget(model))
    batches = [torch.randn(4, 48) for _ in range(3)]
    runs = []
    for _ in range(2):
        model.zero_grad()
        torch.manual_seed(3)
        runs.append((trained(model, batches, Dropping.stages), [p.grad.clone() for p in model.parameters()]))
    assert same(runs[0][0], runs[1][0]) and same(runs[0][1], runs[1][1])


# ---------------------------------------------------------------------- failure


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_an_exception_gradients_are_whole_or_untouched(where):
    model = made(Stack, 6, 48, frozen=False)
    ref = aligned_copy(model)
    wrap(model, block_budget(model), 1e9)
    batches = [torch.randn(4, 48) for _ in range(3)]
    calls = []

    def failing(x):
        calls.append(1)
        if len(calls) == (2 if where == "forward" else 5):  # the second micro-batch's recomputation
            raise ValueError("on purpose")
        return model.blocks[3](x)

    with pytest.raises(ValueError, match="on purpose"):
        trained(model, batches, lambda m: [m.inp, *m.blocks[:3], failing, *m.blocks[4:], m.out, loss_of])
    passes(ref, batches)
    for (name, mine), theirs in zip(model.named_parameters(), ref.parameters()):
        done = where == "backward" and name.startswith(("blocks.4", "blocks.5", "out"))
        assert same(mine.grad, theirs.grad) if done else mine.grad is None, name
    model.zero_grad()
    trained(model, batches)
    grads_equal(model, ref)


def test_tied_weights_and_integer_inputs():
    model = made(TinyLM, 300, 32, 3, frozen=False)
    ref = aligned_copy(model)
    wrap(model, 3 * nbytes(model))

    def stages(m):
        start = lambda ids: m.embed(ids) + m.pos(torch.arange(ids.shape[1]))
        return [start, *m.blocks, lambda x: m.head(m.norm(x)), loss_of]

    batches = [torch.randint(300, (2, 7)) for _ in range(3)]
    losses = trained(model, batches, stages)
    assert same(losses, passes(ref, batches, stages))
    for (name, mine), theirs in zip(model.named_parameters(), ref.parameters()):
        if theirs is ref.embed.weight:  # used by two stages: the head's sum comes first
            assert_near(mine.grad, theirs.grad, rtol=1e-4, atol=1e-4)
        else:
            assert same(mine.grad, theirs.grad), name


def test_a_closed_runtime_leaves_a_plain_model():
    model = made(Stack, 4, 32, frozen=False)
    ref = copy.deepcopy(model)
    wrap(model, 3 * nbytes(model))
    runtime(model).shutdown()
    batches = [torch.randn(4, 32) for _ in range(3)]
    trained(model, batches)
    assert all(p.grad is not None for p in model.parameters())
    passes(ref, batches)
