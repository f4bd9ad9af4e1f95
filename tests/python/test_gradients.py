"""Gradients of wrapped models: equal to the reference's where the budget allows, an error with advice where not."""

import card
import pytest
import torch
from support import (
    AttentionNet, ConvNet, HostMasterGuard, NormedNet, RawNet, RecurrentNet, Router, Stack, TinyLM, aligned_copy, made,
    nbytes, runtime, same, tight_budget, wrap)
from torch import nn
from torch.utils.checkpoint import checkpoint

import stagehand


def grads_equal(model, ref):
    for (name, mine), theirs in zip(model.named_parameters(), ref.parameters()):
        assert (mine.grad is None) == (theirs.grad is None), name
        if mine.grad is not None:
            assert same(mine.grad, theirs.grad), name
            assert mine.grad.device == mine.device


@pytest.mark.parametrize("kind", [Stack, TinyLM, RecurrentNet, ConvNet, AttentionNet, RawNet, NormedNet])
def test_gradients_equal_the_reference(kind):
    model = made(kind, frozen=False).train()
    ref = aligned_copy(model).train()
    wrap(model, 3 * nbytes(model) + (1 << 20), 1e9)
    for _ in range(3):
        x = model.example()
        with HostMasterGuard(model):
            out = model(*x)
            out.pow(2).sum().backward()
        wanted = ref(*x)
        wanted.pow(2).sum().backward()
        assert same(out, wanted)
        del out
    grads_equal(model, ref)  # accumulated over three backwards


@pytest.mark.parametrize("frozen", [False, True])
def test_without_checkpointing_a_tight_budget_is_enough(frozen):
    """What autograd saves of the weights are handles: forward lets go of each place, backward leases it again."""
    model = made(Stack, 8, 48, frozen=frozen)
    ref = aligned_copy(model)
    budget = tight_budget(model)
    wrap(model, budget, 1e9)
    for _ in range(4):
        x = model.example()[0]
        mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        with HostMasterGuard(model):
            out = model(mine)
            out.pow(2).sum().backward()
        ref(theirs).pow(2).sum().backward()
        assert same(mine.grad, theirs.grad)
        grads_equal(model, ref)
    stats = runtime(model).stats
    assert stats["device_peak"] + stats["reserved_bytes"] <= budget
    assert stats["deviations"] == 1  # the first step, whose order was a guess: from then on all is planned


def test_where_hooks_are_off_a_too_small_budget_says_what_to_do():
    model = made(Stack, 8, 48)
    for module in model.modules():
        module.stagehand_saved_handles = False
    wrap(model, tight_budget(model))
    x = model.example()[0].requires_grad_()
    for _ in range(2):
        with pytest.raises(stagehand.StagehandOOMError, match="no_grad.*checkpoint.*use_reentrant=False.*budget"):
            model(x)
    with torch.no_grad():
        model(x)
    with torch.no_grad(), torch.enable_grad(), pytest.raises(stagehand.StagehandOOMError, match="checkpoint"):
        model(x)


class Checkpointed(Router):
    reentrant = False

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.out(x)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_checkpointed_blocks_work_with_a_tight_budget(frozen, reentrant):
    model = made(Checkpointed, 8, 48, frozen=frozen)
    model.reentrant = reentrant
    ref = aligned_copy(model)
    # inp and out are not checkpointed: autograd keeps them beside what two blocks need
    budget = tight_budget(model) + 3 * nbytes(model.blocks[0])
    assert budget < nbytes(model) * 3 // 4
    wrap(model, budget, 1e9)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.01) for net in (model, ref)] if not frozen else []
    for _ in range(4):
        x = model.example()[0]
        mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        with HostMasterGuard(model):
            model(mine).pow(2).sum().backward()
        ref(theirs).pow(2).sum().backward()
        assert same(mine.grad, theirs.grad)
        grads_equal(model, ref)
        for optimizer in optimizers:
            optimizer.step()
    stats = runtime(model).stats
    assert stats["device_peak"] + stats["reserved_bytes"] <= budget
    for (name, mine), theirs in zip(model.named_parameters(), ref.parameters()):
        assert same(mine, theirs), name


def test_kept_graphs_double_backward_and_autograd_grad():
    """Field case 18."""
    model = made(Stack, 4, 32, frozen=False)
    ref = aligned_copy(model)
    wrap(model, 3 * nbytes(model))
    for _ in range(2):
        x = model.example()[0]
        results = []
        for net in (model, ref):
            given = x.clone().requires_grad_()
            out = net(given).pow(2).sum()
            out.backward(retain_graph=True)
            out.backward(retain_graph=True)
            part, = torch.autograd.grad(out, net.blocks[2].up.weight, retain_graph=True)
            slope, = torch.autograd.grad(out, given, create_graph=True)
            slope.pow(2).sum().backward()
            results.append((part, slope, given.grad))
            del out, slope, part, given
        assert all(same(a.detach(), b.detach()) for a, b in zip(*results))
        grads_equal(model, ref)


def test_switching_between_training_and_evaluation():
    """Field case 91."""
    model = made(Stack, 5, 32, frozen=False)
    ref = aligned_copy(model)
    wrap(model, 3 * nbytes(model), 1e9)
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in (model, ref)]
    for step in range(5):
        x, y = model.example(4)[0], model.example(7)[0]
        model.eval(), ref.eval()
        with torch.inference_mode():
            assert same(model(y), ref(y))
            if step == 0:
                assert same(model(y), ref(y))
        model.train(), ref.train()
        for net, optimizer in zip((model, ref), optimizers):
            net(x).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, mine), theirs in zip(model.named_parameters(), ref.parameters()):
        assert same(mine, theirs) and not mine.is_inference(), name


@card.on_the_host
def test_hooks_on_parameters_fire_once_and_flags_stay():
    """Field case 14."""
    model = made(Stack, 4, 32, frozen=False)
    for block in model.blocks[::2]:
        block.requires_grad_(False)
    flags = {name: param.requires_grad for name, param in model.named_parameters()}
    fired = []

    def accumulate(param):
        param.main_grad.add_(param.grad)

    for name, param in model.named_parameters():
        param.main_grad = torch.zeros_like(param)
        if param.requires_grad:
            param.register_hook(lambda grad, name=name: fired.append(name))
            param.register_post_accumulate_grad_hook(accumulate)
    mains = {name: param.main_grad for name, param in model.named_parameters()}
    ref = made(Stack, 4, 32, frozen=False)
    for block in ref.blocks[::2]:
        block.requires_grad_(False)
    ref = aligned_copy(ref)
    wrap(model, 3 * nbytes(model))
    for _ in range(2):
        x = model.example()[0]
        fired.clear()
        model(x).sum().backward()
        ref(x).sum().backward()
        assert sorted(fired) == sorted(name for name, flag in flags.items() if flag)
    for (name, param), theirs in zip(model.named_parameters(), ref.parameters()):
        assert param.requires_grad == flags[name] and param.main_grad is mains[name]
        if theirs.grad is not None:
            assert same(param.grad, theirs.grad)


def test_a_trainable_head_on_a_frozen_body_after_wrapping():
    model = made(Stack, 4, 32)
    ref = aligned_copy(model)
    wrap(model, 3 * nbytes(model))
    for net in (model, ref):
        net.out.requires_grad_()
        net.blocks[3].down.requires_grad_()
    for _ in range(3):
        x = model.example()[0]
        for net in (model, ref):
            net(x).pow(2).sum().backward()
            with torch.no_grad():
                for param in net.parameters():
                    if param.grad is not None:
                        param.sub_(0.01 * param.grad)
    grads_equal(model, ref)
    for (name, mine), theirs in zip(model.named_parameters(), ref.parameters()):
        assert same(mine, theirs), name


def test_grad_mode_switched_on_inside_a_managed_forward():
    """The weight is leased under no_grad and used under enable_grad: its gradient must not be lost."""
    class Inner(nn.Linear):
        def forward(self, x):
            with torch.enable_grad():
                return super().forward(x)

    torch.manual_seed(0)
    model = nn.Sequential(*(Inner(64, 64) for _ in range(3)))
    ref = aligned_copy(model)
    wrap(model, 1 << 20)
    x = torch.randn(2, 64)
    for net in (model, ref):
        with torch.no_grad():
            out = net(x)
        out.sum().backward()
    grads_equal(model, ref)


@pytest.mark.parametrize("where", ["forward", "recomputation", "backward"])
def test_after_an_exception_in_training_the_next_step_is_right(where):
    """Field case 67."""
    model = made(Checkpointed, 6, 48, frozen=False)
    ref = aligned_copy(model)
    wrap(model, tight_budget(model) + 3 * nbytes(model.blocks[0]), 1e9)
    state = {"calls": 0, "fail_at": None}

    def count(*_):
        state["calls"] += 1
        if state["calls"] == state["fail_at"]:
            raise ValueError("on purpose")

    model.blocks[2].register_forward_pre_hook(count)
    for _ in range(3):
        x = model.example()[0]
        state.update(calls=0, fail_at={"forward": 1, "recomputation": 2, "backward": None}[where])
        given = x.clone().requires_grad_()
        with pytest.raises(ValueError, match="on purpose"):
            out = model(given)
            if where == "backward":
                out.register_hook(lambda grad: None)
                given.register_hook(lambda grad: (_ for _ in ()).throw(ValueError("on purpose")))
            out.sum().backward()
        out = given = None
        model.zero_grad()
        ref.zero_grad()
        state["fail_at"] = None
        model(x).sum().backward()
        ref(x).sum().backward()
        grads_equal(model, ref)


def test_kernels_are_picked_as_for_the_masters():
    """PyTorch's matmul folds by whether the weight takes a gradient, also where none is recorded."""
    class Swapped(nn.Linear):
        def forward(self, x):
            return super().forward(x.transpose(0, 1)).transpose(0, 1)

    torch.manual_seed(0)
    model = nn.Sequential(*(Swapped(192, 192) for _ in range(3)))
    ref = aligned_copy(model)
    wrap(model, nbytes(model))
    x = torch.randn(2, 3, 192)
    for context in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with context():
            assert same(model(x), ref(x))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD,
                                  *([] if card.ON_CARD else [torch.optim.Adagrad])])  # whose kernel is the CPU's
def test_fused_optimizers_that_leave_no_trace(kind):
    """A step so small that it changes next to nothing: sampling would miss it."""
    model = made(Stack, 4, 64, frozen=False)
    ref = aligned_copy(model)
    wrap(model, nbytes(model))
    optimizers = [kind(net.parameters(), lr=1e-3, fused=True) for net in (model, ref)]
    for _ in range(4):
        x = model.example()[0]
        for net, optimizer in zip((model, ref), optimizers):
            optimizer.zero_grad()
            net(x).sum().backward()
            for name, param in net.named_parameters():  # all but one element stay as they are
                keep = torch.zeros_like(param)
                keep.view(-1)[param.numel() // 3] = 1
                param.grad.mul_(keep)
            optimizer.step()
        assert same(model(x), ref(x))
    for (name, mine), theirs in zip(model.named_parameters(), ref.parameters()):
        assert same(mine, theirs), name
