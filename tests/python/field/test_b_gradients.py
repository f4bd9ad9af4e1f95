"""Field cases, section B: gradients that are missing, stale, or counted twice."""

import card
import pytest
import support as s
import torch
from pairs import (  # noqa: F401
    Row, Shrinking, ShrinkingData, agree, both, ends, pair, same_grads, same_weights, within)
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

LINK = 3e8  # bytes/s


# ---------------------------------------------------------------------- 12: several backwards


def two_forwards(net, xs, end):
    (net(xs[0]).sum() + net(xs[1]).pow(2).sum()).backward()
    end(net)


def one_graph_twice(net, xs, end):
    loss = net(xs[0]).pow(2).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    end(net)


def four_then_end(net, xs, end):
    for x in xs:
        (net(x).pow(2).sum() / 4).backward()
    end(net)


def end_after_each(net, xs, end):
    for x in xs:
        (net(x).pow(2).sum() / 4).backward()
        end(net)


@pytest.mark.combinations("each may be the only test of a fault")
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("pattern", [two_forwards, one_graph_twice, four_then_end, end_after_each])
def test_12_several_backwards_add_up(pattern, held):
    """held: with begin_step in front, so that end_step ends something."""
    model, ref = pair(s.Stack, 6, 40, link=LINK)
    own = s.runtime(model)
    xs = [model.example()[0] for _ in range(4)]
    for _ in range(3):
        if held:
            own.begin_step()
        pattern(model, xs, lambda net: (own.end_step(), held and own.begin_step()))
        own.end_step()
        pattern(ref, xs, lambda net: None)
        same_grads(model, ref)
    assert within(model, s.tight_budget(model))


# ---------------------------------------------------------------------- 14: main_grad


def test_14_flags_attributes_and_main_grad_stay():
    def prepare(net):
        for block in net.blocks[::2]:
            block.requires_grad_(False)

    def accumulate(param):
        param.main_grad.add_(param.grad)
        param.grad = None

    model, ref = pair(s.Stack, 6, 40, link=LINK, prepare=prepare)
    kept = {}
    for net in (model, ref):
        for name, param in net.named_parameters():
            param.main_grad, param.tag = torch.zeros_like(param), object()
            kept[net, name] = param, param.main_grad, param.tag, param.requires_grad
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(accumulate)
    for _ in range(5):
        x = model.example()[0]
        for net in (model, ref):
            net(x).pow(2).sum().backward()
    for net in (model, ref):
        for name, param in net.named_parameters():
            found = param, param.main_grad, param.tag, param.requires_grad
            assert all(a is b for a, b in zip(found, kept[net, name])), name
    for mine, theirs in zip(model.parameters(), ref.parameters()):
        assert s.same(mine.main_grad, theirs.main_grad) and bool(mine.main_grad.any()) == mine.requires_grad


# ---------------------------------------------------------------------- 16: a pass between backward and step


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_16_passes_without_gradients_between_backward_and_step(context):
    model, ref = pair(s.Stack, 6, 40, link=LINK)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9) for net in (model, ref)]
    for micro in (1, 2, 1, 3):
        xs = [model.example()[0] for _ in range(micro)]
        norms, seen = [], []
        for net, optimizer in zip((model, ref), optimizers):
            optimizer.zero_grad()
            for x in xs:
                net(x).pow(2).sum().backward()
                with context():
                    seen.append(net(x))
            norms.append(nn.utils.clip_grad_norm_(net.parameters(), 1.0))
            optimizer.step()
        assert s.same(*norms) and s.same(seen[:micro], seen[micro:])
        same_grads(model, ref)
        same_weights(model, ref)


# ---------------------------------------------------------------------- 18: a kept graph


def test_18_a_kept_graph_with_a_tight_budget():
    """test_gradients.py has the same with all weights on the device; here most have left it when they are needed."""
    model, ref = pair(s.Stack, 6, 40, link=LINK, budget=lambda m: s.tight_budget(m) + 2 * s.nbytes(m.blocks[0]))
    for _ in range(2):
        x = model.example()[0]
        parts = []
        for net in (model, ref):
            loss = net(x).pow(2).sum()
            loss.backward(retain_graph=True)
            loss.backward(retain_graph=True)
            middle, = torch.autograd.grad(loss, net.blocks[3].up.weight, retain_graph=True)
            loss.backward()
            parts.append(middle)
        assert s.same(*parts)
        same_grads(model, ref)


def test_18_a_gradient_penalty():
    model, ref = pair(s.Stack, 4, 32, budget=lambda m: 3 * s.nbytes(m), link=LINK)
    for _ in range(2):
        x = model.example()[0]
        for net in (model, ref):
            given = x.clone().requires_grad_()
            slope, = torch.autograd.grad(net(given).pow(2).sum(), given, create_graph=True)
            ((slope.norm() - 1) ** 2).backward()
        same_grads(model, ref)


# ---------------------------------------------------------------------- 19: random numbers


class Dropping(s.Stack):
    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = F.dropout(block(x), 0.3, self.training)
        return self.out(x)


class DroppingAgain(s.Stack):
    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(lambda y, block=block: F.dropout(block(y), 0.3, True), x, use_reentrant=False)
        return self.out(x)


@pytest.mark.parametrize("kind", [Dropping, DroppingAgain])
def test_19_dropout_masks_are_those_of_the_unwrapped_model(kind):
    model, ref = pair(kind, 6, 40, link=LINK)
    for net in (model, ref):
        net.train()
    for step in range(3):
        x = model.example()[0]
        for net in (model, ref):
            torch.manual_seed(step)
            net(x).pow(2).sum().backward()
        same_grads(model, ref)


def test_19_no_random_number_is_drawn_by_the_product():
    model = s.made(s.Stack, 6, 40, frozen=False)
    before = torch.get_rng_state()
    s.wrap(model, s.tight_budget(model), LINK)
    own = s.runtime(model)
    x = torch.ones(2, 40)
    for _ in range(3):
        model(x).sum().backward()
    with torch.no_grad():
        model(x)
    own.set_vram_budget(s.nbytes(model))
    model(x).sum().backward()
    own.shutdown()
    assert torch.equal(torch.get_rng_state(), before)


# ---------------------------------------------------------------------- own


def shrunk(kind=Shrinking):
    return Row([kind(40, 40) for _ in range(5)], 3, 40)


def test_own_two_graphs_over_a_weight_that_each_forward_writes():
    """The first graph saved values that are gone: PyTorch raises, and so must we, in place of taking the new ones."""
    model, ref = pair(shrunk, link=LINK)
    x = model.example()[0]

    def joined(net):
        first, second = net(x).sum(), net(x).sum()
        (first + second).backward()

    errors = both(model, ref, joined)
    assert all(isinstance(error, RuntimeError) and "modified by an inplace operation" in str(error) for error in errors)
    for net in (model, ref):
        net.zero_grad()
        net(x).sum().backward()
    same_grads(model, ref)
    same_weights(model, ref)


def test_own_a_layer_that_writes_itself_trains():
    model, ref = pair(shrunk, link=LINK)
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in (model, ref)]
    for _ in range(5):
        x = model.example()[0]
        for net, optimizer in zip((model, ref), optimizers):
            optimizer.zero_grad()
            net(x).pow(2).sum().backward()
            optimizer.step()
        same_grads(model, ref)
        same_weights(model, ref)


class Recorded(nn.Linear):
    def forward(self, x):
        self.weight.mul_(0.9)
        return super().forward(x)


def test_own_a_leaf_written_while_autograd_records_is_refused_as_pytorch_does():
    """Inside a call the weight is no leaf, and PyTorch alone would let it pass."""
    model, ref = pair(lambda: shrunk(Recorded))
    errors = both(model, ref, lambda net: net(model.example()[0]))
    assert all("a leaf Variable that requires grad" in str(error) for error in errors)
    assert "blocks.0.weight" in str(errors[0])
    same_weights(model, ref)
    with torch.no_grad():
        x = model.example()[0]
        assert s.same(model(x), ref(x))


def test_own_more_forwards_than_a_step_takes_before_their_one_backward():
    """A step takes eight; the graphs of the others live on into later steps."""
    model, ref = pair(s.Stack, 5, 32, link=LINK)
    for count in (20, 9):
        xs = [model.example()[0] for _ in range(count)]
        for net in (model, ref):
            sum(net(x).pow(2).sum() for x in xs).backward()
        same_grads(model, ref)


class Reversible(torch.autograd.Function):
    """Keeps nothing of a block but its input, and computes it again in a backward of its own inside the backward."""

    @staticmethod
    def forward(ctx, x, block):
        with torch.no_grad():
            y = block(x)
        ctx.block = block
        ctx.save_for_backward(x)
        return y

    @staticmethod
    def backward(ctx, grad):
        x, = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            torch.autograd.backward(ctx.block(x), grad)
        return x.grad, None


class ReversibleStack(s.Stack):
    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = Reversible.apply(x, block)
        return self.out(x)


def test_own_a_backward_inside_the_backward():
    model, ref = pair(ReversibleStack, 6, 40, link=LINK)
    for _ in range(3):
        x = model.example()[0]
        for net in (model, ref):
            net(x).pow(2).sum().backward()
        same_grads(model, ref)
    assert s.runtime(model).stats["deviations"] <= 1, "recomputation is a part of the step's order"


@card.on_the_host
def test_own_gradients_add_into_views_of_one_flat_tensor():
    """As programs lay gradients out that reduce all of them at once: `p.grad` must stay the view that it is."""
    model, ref = pair(s.Stack, 5, 32, link=LINK)
    flats = []
    for net in (model, ref):
        flat, at = torch.zeros(sum(p.numel() for p in net.parameters())), 0
        for param in net.parameters():
            param.grad = flat[at : at + param.numel()].view_as(param)
            at += param.numel()
        flats.append(flat)
    for _ in range(3):
        x = model.example()[0]
        for net in (model, ref):
            net(x).pow(2).sum().backward()
    assert s.same(*flats) and bool(flats[0].any())


def test_own_a_weight_that_is_used_with_and_without_its_gradient():
    """`weight.data` and `weight.detach()` in a forward take part in the value, not in the gradient."""
    class Half(nn.Linear):
        def forward(self, x):
            free = F.linear(x, self.weight.data) + F.linear(x, self.weight.detach(), self.bias.data)
            return super().forward(x) + free

    model, ref = pair(lambda: shrunk(Half), link=LINK)
    for _ in range(3):
        x = model.example()[0]
        for net in (model, ref):
            net(x).pow(2).sum().backward()
        same_grads(model, ref)


def test_own_a_gradient_that_is_not_wanted_any_more_when_it_comes():
    """requires_grad is switched off between forward and backward, and the parameter is given other data after it."""
    model, ref = pair(s.Stack, 5, 32, link=LINK)
    x = model.example()[0]
    for net in (model, ref):
        loss = net(x).pow(2).sum()
        net.blocks[2].up.weight.requires_grad_(False)
        loss.backward()
        net.blocks[2].up.weight.requires_grad_(True)
        net.blocks[2].up.weight.data = torch.ones(96, 32)
    same_grads(model, ref)
    agree(model, ref, 2)


class Adversaries(nn.Module):
    """Two networks in one model; the forward switches gradients of the second on and off, as such models do."""

    def __init__(self, d=40):
        super().__init__()
        self.maker = nn.ModuleList(nn.Linear(d, d) for _ in range(3))
        self.judge = nn.ModuleList(nn.Linear(d, d) for _ in range(3))

    def forward(self, x, judging):
        for param in self.judge.parameters():
            param.requires_grad_(judging)
        self.maker[0].weight.requires_grad = not judging
        for layer in (*self.maker, *self.judge):
            x = torch.tanh(layer(x))
        return x


def test_own_a_forward_that_freezes_a_part_of_the_model():
    """The flags are the masters', not those of the tensors that a pass sees; they hold in the same pass."""
    model, ref = pair(Adversaries, budget=lambda m: 3 * s.nbytes(m.maker[0]) + 4096, link=LINK)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, ref)]
    for judging in (False, True, True, False, True):
        x = torch.randn(3, 40)
        for net, optimizer in zip((model, ref), optimizers):
            optimizer.zero_grad()
            net(x, judging).pow(2).sum().backward()
            optimizer.step()
        assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in ref.parameters()]
        same_grads(model, ref)
    same_weights(model, ref)


class Clearing(s.Stack):
    """Sets gradients to zero and looks at them in its forward."""

    def forward(self, x):
        self.seen = [None if p.grad is None else float(p.grad.sum()) for p in self.parameters()]
        self.zero_grad()
        return super().forward(x)


def test_own_gradients_are_looked_at_and_set_to_zero_inside_a_forward():
    model, ref = pair(Clearing, 5, 32, link=LINK)
    for _ in range(3):
        x = model.example()[0]
        for net in (model, ref):
            net(x).pow(2).sum().backward()
        same_grads(model, ref)
        assert [grad is None for grad in model.seen] == [grad is None for grad in ref.seen]
    assert [grad or 0.0 for grad in model.seen] == pytest.approx(
        [grad or 0.0 for grad in ref.seen], rel=card.ON_CARD * 1e-5, abs=card.ON_CARD * 1e-4)
    assert any(model.seen)


def test_own_a_model_that_is_dropped_between_forward_and_backward():
    import gc

    model, ref = pair(s.Stack, 5, 32, link=LINK)
    x, params = model.example()[0], list(model.parameters())
    loss = model(x).pow(2).sum()
    del model
    gc.collect()
    loss.backward()
    ref(x).pow(2).sum().backward()
    assert all(s.same(mine.grad, theirs.grad) for mine, theirs in zip(params, ref.parameters()))


def test_own_transforms_of_torch_func_round_a_managed_model():
    model, ref = pair(s.Stack, 3, 32, frozen=True, budget=lambda m: 2 * s.nbytes(m))
    func, x = torch.func, torch.randn(5, 32)
    ways = [
        lambda net: func.vmap(lambda row: net(row[None])[0])(x), lambda net: func.grad(lambda v: net(v).sum())(x),
        lambda net: func.jacrev(lambda row: net(row[None])[0])(x[0]),
        lambda net: func.jvp(net, (x,), (torch.ones(5, 32),))[1],
        lambda net: func.vmap(func.grad(lambda row: net(row[None]).sum()))(x),
        lambda net: func.grad(lambda given: func.functional_call(net, given, (x,)).sum())(
            {name: param.detach() for name, param in net.named_parameters()})["blocks.1.up.weight"],
    ]
    for way in ways:
        got, want = both(model, ref, way)
        assert s.near(got, want, atol=1e-6), got
    assert s.runtime(model).stats["leased_bytes"] == 0
    agree(model, ref, 2)


class WritingAgain(nn.Module):
    """Checkpointed layers that write their weights: once in forward, and once more where they are computed again."""

    def __init__(self, reentrant, kind):
        super().__init__()
        self.reentrant = reentrant
        self.blocks = nn.ModuleList(kind(40, 40) for _ in range(5))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(lambda y, block=block: torch.tanh(block(y)), x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("kind", [Shrinking, ShrinkingData])
@pytest.mark.parametrize("reentrant", [False, True])
def test_own_layers_that_write_themselves_are_computed_again(reentrant, kind):
    model, ref = pair(WritingAgain, reentrant, kind, link=LINK, budget=lambda m: 3 * s.nbytes(m.blocks[0]) + 4096)
    for _ in range(3):
        x = torch.randn(3, 40)
        for net in (model, ref):
            net(x.clone().requires_grad_()).pow(2).sum().backward()
        same_grads(model, ref)
        same_weights(model, ref)
