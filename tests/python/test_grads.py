"""How gradients of streamed weights come to the host: what p.grad is, that every wait is there (the link is slow),
and that memory, threads and objects come back. The simulated device's tensors are the host's: the copies are real."""

import copy
import gc
import io
import os
import pickle
import signal
import textwrap
import threading
import time
import warnings
import weakref

import children
import pytest
import torch
from card import ON_CARD, settle_autograd, simulated_only, there
from support import (
    Stack, TinyLM, aligned_copy, assert_near, device, made, nbytes, near, runtime, same, threads)
from test_gradients import Checkpointed, grads_equal
from torch import nn
from torch.nn import functional as F

import stagehand
from stagehand import amp

SLOW = 2e7  # bytes/s: some milliseconds for a weight


@pytest.fixture(autouse=True)
def one_thread():
    with threads(1):  # small models: more only spin
        yield


def wrapped(model, link=SLOW, **options):
    """(wrapped model, reference), with a budget that all weights fit into."""
    ref = aligned_copy(model)
    budget = 3 * nbytes(model) + (1 << 20)
    stagehand.layer(model, vram_budget=budget, device=device(budget, link, **options))
    return model, ref


def wrapped_small(model, link=SLOW, **options):
    """The same for block-less models: every weight streams, however small."""
    ref = aligned_copy(model)
    budget = 3 * nbytes(model) + (1 << 20)
    config = stagehand.StagehandConfig(vram_budget=budget)
    run = stagehand.StagehandRuntime(model, config, block_pattern=r"^\w+$", device=device(budget, link, **options))
    return model, ref, run


def transport(model):
    return runtime(model).session.grads


def stats(model) -> dict:
    return transport(model).stats()


def streamed(model) -> dict:
    """name -> Parameter of the weights that stream."""
    return {entry.name: entry.param for unit in runtime(model).session.units for entry in unit.entries}


def train(net, x):
    out = net(x)
    out.pow(2).sum().backward()
    return out.detach()


# ---------------------------------------------------------------------- what p.grad is


def test_a_gradient_is_the_memory_it_was_copied_to():
    model, ref = wrapped(made(Stack, 3, 48, frozen=False))
    pointers, start = set(), transport(model).start

    def noted(grad):
        host, ticket = start(grad)
        pointers.add(host.data_ptr())
        return host, ticket

    transport(model).start = noted
    x = model.example()[0]
    train(model, x), train(ref, x)
    assert len(pointers) == len(streamed(model)) > 6
    for name, param in streamed(model).items():
        assert param.grad.data_ptr() in pointers, name  # no second copy
        assert param.grad.data_ptr() % 512 == 0 and param.grad.device == param.device
        assert not hasattr(param.grad, "_stagehand_ticket")
    for (name, mine), theirs in zip(model.named_parameters(), ref.parameters()):
        assert same(mine.grad, theirs.grad) and mine.grad.stride() == theirs.grad.stride(), name
        assert mine.grad.dtype == theirs.grad.dtype and mine.grad.is_leaf and not mine.grad.requires_grad
    assert stats(model)["blocks_in_use"] == len(pointers)


def test_the_wait_of_the_gate_is_needed():
    """What Upload returns is not there yet: so a Gate that did not wait would show in all tests here."""
    model, _ = wrapped(made(Stack, 3, 48, frozen=False))
    grads = transport(model)
    grad = there(torch.full((1 << 20,), 3.0))  # 200 ms
    host, ticket = grads.start(grad)
    host_before = host.clone()
    assert ON_CARD or not ticket.done
    ticket.wait()
    assert ticket.done and same(host, grad) and (ON_CARD or not same(host_before, grad))  # a card may be that fast
    ticket.wait()  # again is fine


def test_accumulation_gives_the_stand_in_back():
    model, ref = wrapped(made(Stack, 3, 48, frozen=False))
    count = len(streamed(model))
    for i in range(3):
        x = model.example()[0]
        train(model, x), train(ref, x)
        assert stats(model)["blocks_in_use"] == count and stats(model)["tickets"] == 0
        if i == 0:
            first = {name: p.grad.data_ptr() for name, p in streamed(model).items()}
    grads_equal(model, ref)
    assert first == {name: p.grad.data_ptr() for name, p in streamed(model).items()}


@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad(to_none):
    model, ref = wrapped(made(Stack, 3, 48, frozen=False))
    for _ in range(3):
        x = model.example()[0]
        for net in (model, ref):
            net.zero_grad(set_to_none=to_none)
            train(net, x)
        grads_equal(model, ref)
    regions = stats(model)["regions"]
    model.zero_grad(set_to_none=to_none)
    assert stats(model)["blocks_in_use"] == (0 if to_none else len(streamed(model)))
    train(model, x)
    assert stats(model)["regions"] == regions


def test_copies_and_files_of_a_gradient_hold_its_bytes_alone():
    model, _ = wrapped(made(Stack, 3, 48, frozen=False))
    train(model, model.example()[0])
    grad = model.blocks[1].up.weight.grad
    assert grad.untyped_storage().nbytes() == grad.numel() * 4 and grad.storage_offset() == 0
    in_use = stats(model)["blocks_in_use"]
    twin = copy.deepcopy(grad)
    assert same(twin, grad) and stats(model)["blocks_in_use"] == in_use
    assert same(pickle.loads(pickle.dumps(grad)), grad)
    file = io.BytesIO()
    torch.save(grad, file)
    assert len(file.getvalue()) < grad.numel() * 4 + 4096
    file.seek(0)
    assert same(torch.load(file), grad)
    model.zero_grad()
    assert stats(model)["blocks_in_use"] == 1 and bool(torch.isfinite(grad).all())


def test_gradients_outlive_the_runtime():
    model, ref = wrapped(made(Stack, 3, 48, frozen=False))
    x = model.example()[0]
    train(model, x), train(ref, x)
    runtime(model).shutdown()
    gc.collect()
    grads_equal(model, ref)
    for net in (model, ref):
        torch.optim.SGD(net.parameters(), lr=0.1).step()
        net.zero_grad()
        train(net, x)
    grads_equal(model, ref)


# ---------------------------------------------------------------------- graphs


class Reused(nn.Module):
    """One weight several times in one forward, in several calls of its module, and from outside."""

    def __init__(self, d=600):
        super().__init__()
        self.a = nn.Linear(d, d)
        self.b = nn.Linear(d, d)
        self.twice = nn.Linear(d, d)
        self.b.weight = self.a.weight  # tied
        self.tripled = Tripled(d)

    def forward(self, x):
        x = self.twice(torch.tanh(self.twice(self.b(self.a(x)))))
        x = self.tripled(self.tripled(x) * 0.1)
        return x + F.linear(x, self.a.weight[:, :]) * 0.01


class Tripled(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.w = nn.Parameter(torch.randn(d, d) / d)

    def forward(self, x):
        return F.linear(x, self.w).pow(2) + F.linear(x * 2, self.w).sin() + x @ self.w


def test_weights_that_are_used_several_times():
    torch.manual_seed(1)
    model, ref = wrapped(Reused(), 2e8)
    for _ in range(2):
        x = torch.randn(3, 600)
        assert same(train(model, x), train(ref, x))
    for (name, mine), theirs in zip(model.named_parameters(), ref.parameters()):
        if name == "tripled.w":  # each call of its module is summed first: rounding differs
            assert_near(mine.grad, theirs.grad, rtol=1e-5, atol=1e-10)
        else:
            assert same(mine.grad, theirs.grad), name
    assert len(streamed(model)) == 3 and stats(model)["tickets"] == 0
    assert stats(model)["blocks_in_use"] <= 3  # autograd makes the sum, perhaps in memory of its own


def test_tied_embedding_and_head():
    model, ref = wrapped(made(TinyLM, 300, 32, frozen=False))
    for _ in range(2):
        x = model.example()[0]
        train(model, x), train(ref, x)
    grads_equal(model, ref)


def test_two_backwards_of_one_graph():
    model, ref = wrapped(made(Stack, 3, 48, frozen=False))
    x = model.example()[0]
    for net in (model, ref):
        out = net(x).pow(2).sum()
        out.backward(retain_graph=True)
        out.backward(retain_graph=True)
        out.backward()
    grads_equal(model, ref)
    assert stats(model)["blocks_in_use"] == len(streamed(model))


def test_gradients_of_gradients_take_the_differentiable_way():
    model, ref = wrapped(made(Stack, 3, 48, frozen=False))
    x = model.example()[0]
    results = []
    for net in (model, ref):
        weight = net.blocks[1].up.weight
        slope, = torch.autograd.grad(net(x).pow(2).sum(), weight, create_graph=True)
        assert slope.requires_grad
        slope.pow(2).sum().backward()
        net(x).pow(3).sum().backward(create_graph=True)
        results.append([p.grad.detach().clone() for p in net.parameters()])
        for p in net.parameters():
            p.grad = None
    assert all(same(a, b) for a, b in zip(*results))


def test_gates_of_one_weight_are_ordered_by_its_uses():
    """On a card they meet in a queue, and three gradients have one sum alone in one order."""
    class Thrice(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(600, 600)

        def forward(self, x):
            return self.lin(self.lin(self.lin(x)))

    model, _ = wrapped(nn.Sequential(made(Thrice, frozen=False)), 1e9)
    for _ in range(2):
        out = model(torch.randn(2, 600))
        nodes, gates = [out.grad_fn], {}
        while nodes:
            node = nodes.pop()
            below = [next_node for next_node, _ in node.next_functions if next_node is not None]
            if "Gate" in node.name():
                gates.setdefault(below[0], set()).add((id(node), node._sequence_nr()))
            nodes += below
        assert gates
        for found in gates.values():
            assert len(found) == len({number for _, number in found}) == 3


def test_autograd_grad_and_batched_gradients():
    model, ref = wrapped(made(Stack, 3, 24, frozen=False))
    x = model.example(1)[0]
    results = []
    for net in (model, ref):
        weights = [net.blocks[0].up.weight, net.out.bias]
        out = net(x)
        single = torch.autograd.grad(out.sum(), weights, retain_graph=True)
        rows = torch.eye(out.numel(), device=out.device).view(-1, *out.shape)[:4]
        results.append((*single, *torch.autograd.grad(out, weights, rows, is_grads_batched=True)))
        assert all(p.grad is None for p in net.parameters())
    assert all(same(a, b) for a, b in zip(*results))


class Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        return x + weight.sum()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Part(torch.autograd.Function):
    """x + w.sum(), with a gradient of w that is a part of a larger tensor, in steps."""

    @staticmethod
    def forward(ctx, x, weight):
        return x + weight.sum()

    @staticmethod
    def backward(ctx, grad):
        large = torch.arange(3 * 48 * 100.0, device=grad.device).view(3 * 48, 100) * grad.sum()
        return grad, large[::3, 1:97:2]


class Kinds(nn.Module):
    """Weights whose gradients are odd: undefined, expanded, transposed, with gaps, summed, of one element."""

    def __init__(self, d=48):
        super().__init__()
        self.undefined = Holder(d, lambda x, w: Nothing.apply(x, w))
        self.expanded = Holder(d, lambda x, w: x + w.sum())
        self.transposed = Holder(d, lambda x, w: x + (w.t() * there(torch.arange(48.0 * 48)).view(48, 48)).sum())
        self.part = Holder(d, lambda x, w: Part.apply(x, w))
        self.summed = Holder(d, lambda x, w: x + torch.cat([w, w * 2], 1)[:, 3:51].sin().sum())
        self.viewed = Holder(d, lambda x, w: x @ w.view(-1)[: d * d].view(d, d))
        self.used_in_part = Holder(d, lambda x, w: x * w[2, 5])
        self.unused = Holder(d, lambda x, w: x)

    def forward(self, x):
        for part in self.children():
            x = part(x)
        return x


class Holder(nn.Module):
    def __init__(self, d, function, dtype=None):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d, d, dtype=dtype))
        self.function = function

    def forward(self, x):
        return self.function(x, self.weight)


def test_undefined_expanded_and_strided_gradients():
    torch.manual_seed(2)
    model, ref, run = wrapped_small(Kinds())
    for _ in range(2):
        x = torch.randn(3, 48)
        for net, managed in ((model, run.managed_forward), (ref, None)):
            if managed:
                with managed():
                    train(net, x)
            else:
                train(net, x)
        grads_equal(model, ref)
        for (name, mine), theirs in zip(model.named_parameters(), ref.parameters()):
            if mine.grad is not None:
                assert mine.grad.stride() == theirs.grad.stride(), name
    streaming = {entry.name for unit in run.session.units for entry in unit.entries}
    assert streaming == {name for name, _ in model.named_parameters()}
    assert model.undefined.weight.grad is None and model.unused.weight.grad is None
    run.shutdown()


class Typed(nn.Module):
    def __init__(self):
        super().__init__()
        self.complex = Holder(48, lambda x, w: (x.to(w.dtype) @ w.conj() @ w).real, torch.complex64)
        self.lazily = Holder(48, lambda x, w: x + (w.conj() * 2).imag.sum(), torch.complex64)
        self.double = Holder(48, lambda x, w: (x.double() @ w).float(), torch.float64)
        self.brain = Holder(48, lambda x, w: (x.bfloat16() @ w).float(), torch.bfloat16)
        self.half = Holder(48, lambda x, w: (x.half() @ w).float() * 0.01, torch.float16)

    forward = Kinds.forward


def test_dtypes():
    torch.manual_seed(3)
    model, ref, run = wrapped_small(Typed())
    x = torch.randn(3, 48)
    for _ in range(2):
        with run.managed_forward():
            out = model(x)
        out.sum().backward()
        ref(x).sum().backward()
        for (name, mine), theirs in zip(model.named_parameters(), ref.parameters()):
            assert same(mine.grad.resolve_conj(), theirs.grad.resolve_conj()), name
    streaming = {entry.name for unit in run.session.units for entry in unit.entries}
    assert streaming == {name for name, _ in model.named_parameters()}
    for param in model.parameters():
        assert param.grad.dtype == param.dtype and not param.grad.is_conj() and not param.grad.is_neg()
    run.shutdown()


def test_sparse_gradients():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(5000, 64, sparse=True)
            self.out = nn.Linear(64, 64)

        def forward(self, ids):
            return self.out(self.table(ids))

    torch.manual_seed(4)
    model, ref = wrapped(Words())
    for _ in range(2):
        ids = torch.randint(5000, (3, 5))
        train(model, ids), train(ref, ids)
    mine, theirs = model.table.weight.grad, ref.table.weight.grad
    assert mine.layout is torch.sparse_coo
    assert same(mine.coalesce().values(), theirs.coalesce().values())
    assert same(model.out.weight.grad, ref.out.weight.grad)


def test_channels_last_keeps_its_strides():
    torch.manual_seed(5)
    net = nn.Sequential(nn.Conv2d(32, 96, 3), nn.ReLU(), nn.Conv2d(96, 96, 3)).to(memory_format=torch.channels_last)
    model, ref = wrapped(net, 2e8)
    x = torch.randn(2, 32, 8, 8).to(memory_format=torch.channels_last)
    train(model, x), train(ref, x)
    grads_equal(model, ref)
    for mine, theirs in zip(model.parameters(), ref.parameters()):
        assert mine.grad.stride() == theirs.grad.stride()


def test_autocast():
    model, ref = wrapped(made(Stack, 3, 48, frozen=False))
    x = model.example()[0]
    for net in (model, ref):
        with torch.autocast("cpu", torch.bfloat16):
            out = net(x)
        out.float().pow(2).sum().backward()
    grads_equal(model, ref)
    assert model.blocks[0].up.weight.grad.dtype == torch.float32


# ---------------------------------------------------------------------- hooks, optimizers, checkpoints, threads


def test_hooks_see_and_replace_values():
    model, ref = wrapped(made(Stack, 3, 48, frozen=False))
    seen = ([], [])
    for net, log in zip((model, ref), seen):
        net.blocks[0].up.weight.register_hook(lambda grad, log=log: log.append(grad.clone()))
        net.blocks[1].up.weight.register_hook(lambda grad: grad * 2)
        net.blocks[2].up.weight.register_hook(lambda grad, log=log: log.append(grad))  # kept

        def take(param, log=log):
            log.append(param.grad.clone())
            param.grad = None

        net.blocks[0].down.weight.register_post_accumulate_grad_hook(take)
    for _ in range(2):
        x = model.example()[0]
        train(model, x), train(ref, x)
    assert all(same(a, b) for a, b in zip(*seen)) and len(seen[0]) == 6
    assert model.blocks[0].down.weight.grad is None
    grads_equal(model, ref)


@pytest.mark.parametrize("how", ["sgd", "adamw", "foreach", "fused"])
def test_clipping_and_optimizers(how):
    model, ref = wrapped(made(Stack, 3, 48, frozen=False), 2e8)
    make = {"sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
            "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
            "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True)}[how]
    optimizers = [make(net.parameters()) for net in (model, ref)]
    for _ in range(4):
        x = model.example()[0]
        for net, optimizer in zip((model, ref), optimizers):
            optimizer.zero_grad()
            train(net, x)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
    for (name, mine), theirs in zip(model.named_parameters(), ref.named_parameters()):
        assert same(mine, theirs[1]), name


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant):
    model = made(Checkpointed, 4, 48, frozen=False)
    model.reentrant = reentrant
    model, ref = wrapped(model)
    for _ in range(2):
        x = model.example()[0]
        train(model, x.clone().requires_grad_()), train(ref, x.clone().requires_grad_())
        grads_equal(model, ref)
    assert stats(model)["blocks_in_use"] == len(streamed(model))


def test_backward_on_several_threads():
    """Each thread has its own graph; their sums go to the same p.grad one after the other in any order, so that
    gradients of whole numbers are compared."""
    torch.manual_seed(6)
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    with torch.no_grad():
        for param in net.parameters():
            param.copy_(torch.randint(-1, 2, param.shape))
    model, ref = wrapped(net)
    xs = [torch.randint(-2, 3, (4, 64)).float() for _ in range(6)]
    outs = [model(x) for x in xs]
    errors = []

    def back(out):
        try:
            out.sum().backward()
        except BaseException as error:
            errors.append(error)

    runners = [threading.Thread(target=back, args=(out,)) for out in outs]
    [runner.start() for runner in runners], [runner.join() for runner in runners]
    assert not errors
    for x in xs:
        ref(x).sum().backward()
    grads_equal(model, ref)
    assert stats(model)["blocks_in_use"] == len(streamed(model)) and stats(model)["tickets"] == 0


def test_backward_of_one_graph_on_several_threads():
    torch.manual_seed(7)
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    with torch.no_grad():
        for param in net.parameters():
            param.copy_(torch.randint(-1, 2, param.shape))
    model, ref = wrapped(net)
    x = torch.randint(-2, 3, (4, 64)).float()
    out = model(x).sum()
    runners = [threading.Thread(target=out.backward, kwargs={"retain_graph": True}) for _ in range(5)]
    [runner.start() for runner in runners], [runner.join() for runner in runners]
    (ref(x).sum() * 5).backward()
    grads_equal(model, ref)
    assert stats(model)["tickets"] == 0


def test_detecting_anomalies_sees_the_gradient_that_has_come():
    model, ref = wrapped(made(Stack, 3, 48, frozen=False))
    x = model.example()[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly():
            for _ in range(2):  # blocks that come back hold what they held
                model.zero_grad()
                train(model, x)
            train(ref, x)
            for param in model.parameters():
                param.grad.fill_(float("nan"))  # what the blocks of the next ones hold
            model.zero_grad()
            train(model, x)
            grads_equal(model, ref)
            with pytest.raises(RuntimeError, match="nan"):
                (model(x) * float("nan")).sum().backward()


# ---------------------------------------------------------------------- failures


def failing_at(model, place):
    """Backward fails at the input of a block, after some weights have had their gradients."""
    def fail(grad):
        if place["on"]:
            raise place["error"]("on purpose")

    def hook(module, args):
        args[0].register_hook(fail)

    return model.blocks[1].register_forward_pre_hook(hook)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_after_a_backward_that_fails_nothing_is_lost_or_half_done(error):
    model, ref = wrapped(made(Stack, 3, 48, frozen=False))
    x = model.example()[0]
    place = {"on": True, "error": error}
    failing_at(model, place)
    for _ in range(3):
        with pytest.raises(error, match="on purpose"):
            train(model, x)
        gc.collect()
        held = [p for p in streamed(model).values() if p.grad is not None]
        assert ON_CARD or 0 < len(held)  # there a thread of its own makes them, and none may have come yet
        assert len(held) < len(streamed(model))
        settle_autograd()
        assert stats(model)["blocks_in_use"] == len(held) and stats(model)["tickets"] == 0
        for (name, mine), theirs in zip(model.named_parameters(), ref.parameters()):
            assert mine.grad is None or torch.isfinite(mine.grad).all(), name
        model.zero_grad()
    place["on"] = False
    train(model, x), train(ref, x)
    grads_equal(model, ref)


@pytest.mark.parametrize("where", ["start", "wait"])
def test_a_copy_that_fails_names_its_weight(where):
    model, ref = wrapped(made(Stack, 3, 48, frozen=False))
    grads, start = transport(model), transport(model).start
    x = model.example()[0]

    class Broken:
        def wait(self):
            raise stagehand.TransferError("the link is down", "DEVICE_ERROR")

    def broken(grad):
        if grad.shape != model.blocks[1].up.weight.shape:
            return start(grad)
        if where == "start":
            raise stagehand.TransferError("the link is down", "DEVICE_ERROR")
        host, ticket = start(grad)
        ticket.wait()
        return host, Broken()

    grads.start = broken
    model.blocks[0].requires_grad_(False), model.blocks[2].requires_grad_(False)
    ref.blocks[0].requires_grad_(False), ref.blocks[2].requires_grad_(False)
    with pytest.raises(stagehand.TransferError, match=r"gradient of blocks\.1\.up\.weight.*link is down") as caught:
        train(model, x)
    assert caught.value.object == "blocks.1.up.weight" and caught.value.status == "DEVICE_ERROR"
    assert model.blocks[1].up.weight.grad is None
    del grads.start, caught
    model.zero_grad()
    settle_autograd()
    gc.collect()
    assert stats(model)["blocks_in_use"] == 0
    train(model, x), train(ref, x)
    grads_equal(model, ref)


@pytest.mark.alone
def test_a_signal_in_the_middle_of_a_backward():
    model, ref = wrapped(made(Stack, 6, 48, frozen=False), 5e6)
    x = model.example()[0]
    train(model, x)
    model.zero_grad()
    interrupted = 0
    for delay in (0.005, 0.02, 0.05):
        out = model(x).pow(2).sum()
        timer = threading.Timer(delay, signal.raise_signal, (signal.SIGINT,))
        try:
            timer.start()  # where this thread is slow, the signal comes in here
            out.backward()
            timer.join()
            time.sleep(60)  # cut short by the signal, if the backward was not
        except KeyboardInterrupt:
            interrupted += 1
        timer.join()
        out = None
        model.zero_grad()
        settle_autograd()
        gc.collect()
        assert stats(model)["blocks_in_use"] == 0 and stats(model)["tickets"] == 0
    assert interrupted == 3
    train(model, x), train(ref, x)
    grads_equal(model, ref)


@pytest.mark.parametrize("again", [False, True])
def test_shutdown_between_forward_and_backward(again):
    model, ref = wrapped(made(Stack, 3, 48, frozen=False))
    x = model.example()[0]
    if again:
        train(model, x), train(ref, x)
    out = model(x).pow(2).sum()
    runtime(model).shutdown()
    if ON_CARD:  # the weights that it needs are on the host
        with pytest.raises(stagehand.StagehandError, match="run backward first"):
            out.backward()
        return
    out.backward()
    ref(x).pow(2).sum().backward()
    grads_equal(model, ref)


def test_a_dropped_ticket_waits_before_its_source_goes():
    model, _ = wrapped(made(Stack, 3, 48, frozen=False))
    grads = transport(model)
    grad = there(torch.full((1 << 15,), 3.0))
    alive = weakref.ref(grad)
    host, ticket = grads.start(grad)
    del grad
    assert ON_CARD or alive() is not None
    del ticket
    assert alive() is None and bool((host == 3.0).all())
    del host
    assert grads.stats()["blocks_in_use"] == 0 and grads.stats()["tickets"] == 0


def test_sources_go_when_their_copies_are_done():
    """Not only when somebody waits: the host may be far behind the device."""
    model, _ = wrapped(made(Stack, 3, 48, frozen=False))
    grads = transport(model)
    first, second = there(torch.ones(4096)), there(torch.ones(4096))
    alive = weakref.ref(first)
    sent = grads.start(first)
    del first
    assert ON_CARD or alive() is not None
    for _ in range(24_000):
        time.sleep(0.005)
        grads.start(second)
        if alive() is None:
            break
    assert alive() is None and bool((sent[0] == 1).all())


# ---------------------------------------------------------------------- memory, processes


def test_a_model_that_is_never_trained_takes_little_host_memory(monkeypatch):
    monkeypatch.setattr("stagehand.weights.grads.FIRST_RESERVE", 1 << 20)
    model, _ = wrapped(made(Stack, 6, 128, frozen=False), 1e9)
    x = model.example()[0]
    with torch.no_grad():
        model(x)
    assert stats(model) == {}

    def pinned(size):
        end = time.monotonic() + 120
        while stats(model)["pinned_bytes"] < size and time.monotonic() < end:
            time.sleep(0.01)

    out = model(x)  # as in evaluation without no_grad
    pinned(1 << 20)
    time.sleep(0.1)
    assert stats(model)["pinned_bytes"] == 1 << 20 < nbytes(model) / 2
    out.sum().backward()
    size = sum(-(-p.numel() * 4 // 512) * 512 for p in streamed(model).values())
    pinned(size)
    assert size <= stats(model)["pinned_bytes"] <= size + (2 << 20)


@simulated_only  # the limit is its option
def test_where_memory_cannot_be_pinned():
    model, ref = wrapped(made(Stack, 3, 48, frozen=False), 1e8, pin_limit_bytes=600_000)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            x = model.example()[0]
            train(model, x), train(ref, x)
    grads_equal(model, ref)
    assert stats(model)["pageable_copies"] > 0 and stats(model)["pageable_bytes"] > 0


def test_telemetry_counts_the_bytes():
    model, _ = wrapped(made(Stack, 3, 48, frozen=False))
    x = model.example()[0]
    size = sum(p.numel() * 4 for p in streamed(model).values())
    for _ in range(3):
        train(model, x)
    with torch.no_grad():
        model(x)
        model(x)
    assert runtime(model).stats["d2h_bytes"] == 3 * size == stats(model)["d2h_bytes"]
    runtime(model).synchronize()
    assert sum(step.d2h_bytes for step in runtime(model).telemetry.history) == 3 * size


def test_200_steps_grow_nothing():
    model, ref = wrapped(made(Stack, 4, 32, frozen=False), 1e9)
    optimizers = [torch.optim.SGD(net.parameters(), lr=1e-3) for net in (model, ref)]
    marks, objects = [], []
    for step in range(201):
        x = model.example()[0]
        for net, optimizer in zip((model, ref), optimizers):
            train(net, x)
            if step % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
        if step in (20, 200):
            gc.collect()
            now = stats(model)
            objects.append(len(gc.get_objects()))
            marks.append((now["regions"], now["pinned_bytes"], now["blocks_in_use"], now["tickets"],
                          len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    assert marks[0] == marks[1]
    assert abs(objects[1] - objects[0]) < 300  # telemetry's window was not full yet
    for mine, theirs in zip(model.parameters(), ref.parameters()):
        assert same(mine, theirs)
    before = len(os.listdir("/proc/self/task"))
    runtime(model).shutdown()
    assert len(os.listdir("/proc/self/task")) < before + ON_CARD  # a card's copies need no thread


SCRIPT = """
    import os, sys, torch
    torch.set_num_threads(1)
    from torch import nn
    import stagehand
    from stagehand import _core
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(600, 600) for _ in range(3)))
    device = _core.Device("sim", memory_bytes=20 << 20, link_bytes_per_s=10 ** 8)
    stagehand.layer(model, vram_budget=20 << 20, device=device)
    model(torch.randn(2, 600)).sum().backward()
"""


def run(script: str) -> str:
    done = children.run(textwrap.dedent(SCRIPT) + textwrap.dedent(script))
    assert done.status == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("script", [
    "print('end')",
    "keep = [p.grad for p in model.parameters()]; sys.modules['keep'] = keep; print('end')",
    """
    grads = model._stagehand_layer_runtime.session.grads
    flying = grads.start(torch.ones(1 << 22))  # 160 ms
    print('end')
    """,
    """
    model._stagehand_layer_runtime.session.grads.start(torch.ones(1 << 20))
    import threading
    def loop():
        while True:
            model(torch.randn(2, 600)).sum().backward()
    threading.Thread(target=loop, daemon=True).start()
    import time
    time.sleep(0.3)
    print('end')
    """,
])
def test_the_interpreter_ends_with_gradients_alive(script):
    assert run(script) == "end\n"


def test_a_forked_child_reads_gradients_and_ends():
    out = run("""
        import gc, warnings
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons': there are threads
        want = float(model[0].weight.grad.sum())
        out = model(torch.randn(2, 600)).sum()
        flying = model._stagehand_layer_runtime.session.grads.start(torch.ones(1 << 20))
        pid = os.fork()
        if pid == 0:
            ok = float(model[0].weight.grad.sum()) == want
            model.zero_grad()
            del flying
            gc.collect()
            out = None
            os._exit(0 if ok else 1)
        assert os.waitpid(pid, 0)[1] == 0
        flying[1].wait()
        assert bool((flying[0] == 1).all())
        out.backward()
        print("end")
    """)
    assert out == "end\n"


# ---------------------------------------------------------------------- scaling


class Late:
    """Stands for a scale on a GPU: its replica on the host has the right value only after synchronization."""

    def __init__(self, value, wrong, pending):
        self.device = torch.device("cuda")
        self.value, self.wrong, self.pending = value, wrong, pending

    def to(self, device, non_blocking=False, copy=False):
        assert torch.device(device).type == "cpu"
        if not non_blocking:
            return torch.full((), self.value)
        replica = torch.full((), self.wrong)
        self.pending.append(lambda: replica.fill_(self.value))
        return replica


@pytest.fixture
def pending(monkeypatch):
    """Copies under way on the fake GPU's stream."""
    queue = []

    def synchronize(device):
        assert device.type == "cuda"
        while queue:
            queue.pop()()

    monkeypatch.setattr(amp, "_synchronize", synchronize)
    return queue


def unscaled(scaler, pending):
    param = nn.Parameter(torch.zeros(4))
    param.grad = torch.full((4,), 8.0)
    optimizer = torch.optim.SGD([param], lr=0.1)
    found = scaler._unscale_grads_(optimizer, Late(0.25, 77.0, pending), Late(0.0, 1.0, pending), False)
    return param.grad[0].item(), found[torch.device("cpu")].item()


def test_the_scaler_is_found_without_importing_its_module():
    script = "import stagehand; print(stagehand.amp.GradScaler.__module__)"
    done = children.run_bare(script)
    assert done.stdout == "stagehand.amp\n", done.stderr


def test_torchs_scaler_reads_a_late_scale_and_ours_waits(pending):
    before = amp._theirs._MultiDeviceReplicator.get
    if amp._users:
        pytest.skip("a model of another test is still open on the card, and has torch's scalers wait")
    assert unscaled(torch.amp.GradScaler("cpu"), pending) != (2.0, 0.0)  # the trap is real
    pending.clear()
    assert unscaled(amp.GradScaler("cpu"), pending) == (2.0, 0.0)
    assert amp._theirs._MultiDeviceReplicator.get is before


def test_torchs_scaler_waits_while_it_is_made_to(pending):
    before = amp._theirs._MultiDeviceReplicator.get
    amp.install()
    amp.install()
    assert unscaled(torch.amp.GradScaler("cpu"), pending) == (2.0, 0.0)
    amp.remove()
    assert unscaled(torch.amp.GradScaler("cpu"), pending) == (2.0, 0.0)
    amp.remove()
    assert amp._theirs._MultiDeviceReplicator.get is before


def test_sessions_on_a_real_device_make_it_wait(monkeypatch):
    counts = []
    monkeypatch.setattr(amp, "install", lambda: counts.append(1))
    monkeypatch.setattr(amp, "remove", lambda: counts.append(-1))
    model, _ = wrapped(made(Stack, 3, 48, frozen=False), 1e9)
    transport(model)._target.simulated = False
    transport(model)._target.stream = lambda: 0
    transport(model).expect()
    transport(model).expect()
    assert counts == [1]
    transport(model).close()
    transport(model).close()
    assert counts == [1, -1]


def fused_step(pending, found):
    """How far a fused optimizer, which a scaler has told so late whether there is an infinity, moves its weight."""
    param = nn.Parameter(torch.zeros(4))
    param.grad = torch.ones(4)
    optimizer = torch.optim.AdamW([param], lr=0.5, weight_decay=0.0, fused=True)
    optimizer.grad_scale, optimizer.found_inf = None, Late(found, 1.0 - found, pending)
    optimizer.step()
    return -param[0].item()


def test_a_fused_optimizers_own_reading_of_the_scale_waits(pending):
    model, _ = wrapped(made(Stack, 3, 48, frozen=False), 1e9)
    assert fused_step(pending, 1.0) == 0.0 and fused_step(pending, 0.0) > 0.4
    assert not pending
    transport(model).close()


def test_somebody_elses_patch_stays(pending):
    before = amp._theirs._MultiDeviceReplicator.get
    amp.install()
    ours = amp._theirs._MultiDeviceReplicator.get

    def theirs(self, where):
        return ours(self, where)

    amp._theirs._MultiDeviceReplicator.get = theirs
    try:
        amp.remove()
        assert amp._theirs._MultiDeviceReplicator.get is theirs
        amp.install()  # not twice
        assert amp._theirs._MultiDeviceReplicator.get is theirs
        amp._theirs._MultiDeviceReplicator.get = ours
    finally:
        amp.remove()
    assert amp._theirs._MultiDeviceReplicator.get is before


@pytest.mark.parametrize("how", ["foreach", "fused"])
def test_training_with_the_scaler(how):
    model, ref = wrapped(made(Stack, 3, 48, frozen=False), 2e8)
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01, **{how: True}) for net in (model, ref)]
    scalers = [amp.GradScaler("cpu", init_scale=1024.0), torch.amp.GradScaler("cpu", init_scale=1024.0)]
    for step in range(4):
        x = model.example()[0]
        for net, optimizer, scaler in zip((model, ref), optimizers, scalers):
            optimizer.zero_grad()
            loss = net(x).pow(2).sum() * (float("inf") if step == 2 else 1.0)
            scaler.scale(loss).backward()
            if step == 1:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    assert scalers[0].get_scale() == scalers[1].get_scale() == 512.0
    assert optimizers[0]._step_supports_amp_scaling is True if how == "fused" else True
    for mine, theirs in zip(model.parameters(), ref.parameters()):
        assert near(mine, theirs, rtol=1e-5, atol=1e-3 if ON_CARD else 1e-7)
