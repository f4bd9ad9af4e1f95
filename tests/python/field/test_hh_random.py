"""Section HH of docs/field-cases.md: small cases of what random models and programs have found."""

import sys

import card
import pytest
import support as s
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import stagehand
from pairs import Row, Shrinking, blocks, ends, pair  # noqa: F401: the fixture

class Inside(nn.Module):
    """Its layer runs in a checkpointed part."""

    def __init__(self, inner, selective=False):
        super().__init__()
        self.inner, self.selective = inner, selective

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False, **(s.keeping_products() if self.selective else {}))


class Beside(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


class Output(nn.Module):
    """The first of what a recurrent layer gives."""

    def __init__(self, rnn):
        super().__init__()
        self.rnn = rnn

    def forward(self, x):
        return self.rnn(x)[0]


def computed(norm, d=64):
    with torch.no_grad():  # torch cannot copy the computed weight otherwise
        return norm(nn.Linear(d, d))


def train_both(model, ref, steps=3, lr=0.1):
    opts = [torch.optim.SGD(net.parameters(), lr=lr) for net in (model, ref)]
    for _ in range(steps):
        x, = model.example()
        for net, opt in zip((model, ref), opts):
            net.train()  # else cuDNN computes no gradients
            opt.zero_grad()
            net(x).pow(2).mean().backward()
            opt.step()
        for mine, theirs in zip(model.parameters(), ref.parameters()):
            assert s.same(mine.grad, theirs.grad) and s.same(mine, theirs)


@pytest.mark.parametrize("selective", [False, True], ids=["all", "selective"])
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_own_weights_that_old_hooks_compute_in_a_checkpointed_part(norm, selective):
    """The part that was computed again kept its last graph, with the places of its weights, and the next pass after a
    write failed. A module that is found to be a reader in between saved another number of tensors the second time."""
    model, ref = pair(lambda: Row([nn.Linear(64, 64), Inside(Beside(computed(norm)), selective)], 3, 64),
                      budget=200_000)
    train_both(model, ref)
    assert s.runtime(model).session.core.stats()["leased_bytes"] == 0


def train_in_a_region(model, ref, steps=1):
    """Gradients of a step each under autocast are the same."""
    for _ in range(steps):
        x, = model.example()
        for net in (model, ref):
            net.train()
            with torch.autocast(card.TORCH.type, torch.bfloat16):
                y = net(x)
            y.float().pow(2).mean().backward()
    for mine, theirs in zip(model.parameters(), ref.parameters()):
        assert s.same(mine.grad, theirs.grad)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_own_an_rnn_of_which_one_weight_streams(kind, monkeypatch):
    """The others are small and stay on the device. Its list of weights kept the lease after the call."""
    monkeypatch.setattr(sys.modules[stagehand.layer.__module__], "OWNED_BYTES", 1000)
    model, ref = pair(lambda: Row([Output(kind(2048, 2, batch_first=True)), nn.Linear(2, 64)], 2, 4, 2048),
                      budget=1 << 20)
    session = s.runtime(model).session
    assert [key for plan in session.plans.values() for key in plan.managed if plan.flat_names] == ["weight_ih_l0"]
    x, = model.example()
    for _ in range(2):
        with torch.no_grad():
            assert s.same(model(x), ref(x))
        assert session.core.stats()["leased_bytes"] == 0
        train_both(model, ref, steps=1)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_own_recurrent_layers_under_autocast(kind, monkeypatch):
    """On the CPU each step of time casts the weights, and PyTorch adds their gradients in the lower dtype: it keeps the
    casts of leaves."""
    monkeypatch.setattr(sys.modules[stagehand.layer.__module__], "OWNED_BYTES", 1000)
    model, ref = pair(lambda: Row([nn.Linear(64, 64), Output(kind(64, 64, batch_first=True))], 2, 5, 64),
                      budget=1 << 20)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            ref(*ref.example())
    except RuntimeError as error:  # oneDNN of PyTorch 2.4 to 2.8
        pytest.skip(f"the plain model fails in this PyTorch: {error}")
    train_in_a_region(model, ref, steps=2)


class Averages(nn.Module):
    """Replaces its buffer by another in each forward."""

    def __init__(self, d):
        super().__init__()
        self.lin = nn.Linear(d, d)
        self.register_buffer("mean", torch.zeros(d))

    def forward(self, x):
        self.mean = self.mean * 0.9 + x.mean(0) * 0.1
        return self.lin(x) + self.mean


def test_own_a_buffer_that_is_a_value_of_a_transform_at_shutdown():
    model, ref = pair(lambda: Row([Averages(64)], 3, 64), budget=1 << 20)
    x, = model.example()
    mine, theirs = (torch.func.grad(lambda x, net=net: net(x).pow(2).sum())(x) for net in (model, ref))
    assert s.same(mine, theirs)
    s.runtime(model).shutdown()
    assert s.same(model(x), ref(x))


@pytest.mark.parametrize("grad", [torch.enable_grad, torch.no_grad])
def test_own_a_write_without_a_version_inside_a_region_of_autocast(grad):
    """PyTorch goes on with the casts from before it. Casts of what stays on the device are such, too: not mixed."""
    model, ref = pair(lambda: Row([nn.Linear(64, 64), nn.Linear(64, 64)], 3, 64), budget=1 << 20)
    x, = model.example()
    with grad(), torch.autocast(card.TORCH.type, torch.bfloat16):
        assert s.same(model(x), ref(x)) and s.same(model(x), ref(x))
        for p in model.parameters():
            p.data.mul_(2)
        with pytest.raises(stagehand.StagehandError, match=r"weight was written inside a region"):
            model(x)
    for p in ref.parameters():
        p.data.mul_(2)
    with grad(), torch.autocast(card.TORCH.type, torch.bfloat16):
        assert s.same(model(x), ref(x)) and s.same(model(x), ref(x))


class Gains(nn.Module):
    """Weights of no dimensions, of another dtype than in calls."""

    def __init__(self):
        super().__init__()
        self.gains = nn.ParameterList(nn.Parameter(torch.tensor(0.5 + i)) for i in range(8))
        self.to(torch.bfloat16)
        self.register_forward_pre_hook(lambda module, args: module.to(torch.float32) and None)

    def forward(self, x):
        for gain in self.gains:
            x = x + gain
        return x


def test_own_weights_of_no_dimensions_that_a_hook_casts():
    """Small ones stay on the device where its budget has room; here it has none, so they stream."""
    model = s.made(lambda: Row([Gains() for _ in range(5)], 3, 4), frozen=False)
    ref = s.aligned_copy(model)
    runtime = blocks(model, 12 * s.ALIGN)
    train_both(model, ref, steps=1)
    assert any(plan.managed for plan in runtime.session.plans.values())
    runtime.shutdown()


class Attends(nn.Module):
    """Twice, to itself or to other keys and values."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.mha = nn.MultiheadAttention(64, 2, batch_first=True, kdim=66 if how == "wider" else 64)

    def forward(self, x):
        for _ in range(2):
            keys = {"self": x, "other": x.flip(1), "wider": nn.functional.pad(x, (0, 2))}[self.how]
            x = torch.tanh(self.mha(x, keys, keys if self.how == "other" else x)[0])
        return x


@pytest.mark.parametrize("how", ["self", "other", "wider"])
def test_own_attention_twice_in_a_region_of_autocast(how, monkeypatch):
    """Its operator casts the weights that it is given, of which autocast keeps casts, or views of them."""
    monkeypatch.setattr(sys.modules[stagehand.layer.__module__], "OWNED_BYTES", 256)
    model, ref = pair(lambda: Row([Attends(how), nn.Linear(64, 64)], 3, 4, 64), budget=1 << 20)
    assert any(plan.name == "blocks.0.mha" and plan.managed for plan in s.runtime(model).session.plans.values())
    train_in_a_region(model, ref)


class Shifts(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.shifts = nn.ParameterList(torch.randn(d) for _ in range(30))

    def forward(self, x):
        for shift in self.shifts:
            x = torch.tanh(x + shift)
        return x


def test_own_a_silent_write_to_the_bias_behind_a_large_weight():
    """Samples of the unit were lines of its weight, and its end was what fills the place up. All stays in its place
    between passes; what else is small has taken the share of small ones."""
    model = s.made(lambda: Row([Shifts(80), nn.Linear(80, 80)], 3, 80))
    ref = s.aligned_copy(model)
    runtime = blocks(model, 45_000)
    x, = model.example()
    with torch.no_grad():
        for factor in (2, -1, 3):
            assert s.same(model(x), ref(x))
            for net in (model, ref):
                net.blocks[1].bias.data.mul_(factor)
        assert s.same(model(x), ref(x))
    assert len(runtime.session.plans[id(model.blocks[1])].managed) == 2
    runtime.shutdown()


class Copies(nn.Module):
    """Hooks keep copies of what autograd saves in its layer."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
            return self.inner(x)


@pytest.mark.parametrize("write", ["fused", "data", "own", "nothing"])
def test_own_a_silent_write_before_the_backward_of_what_hooks_copy(write):
    """A fused optimizer's step leaves no version. PyTorch goes on with the copies, here without weights that stream."""
    kind = Shrinking if write == "own" else nn.Linear
    model, ref = pair(lambda: Row([nn.Linear(64, 64), Copies(kind(64, 64))], 3, 64), budget=1 << 20)
    x, = model.example()
    for net in (model, ref):
        loss = net(x).pow(2).mean()
        weight = net.blocks[1].inner.weight
        if write == "fused":
            weight.grad = torch.ones_like(weight)
            torch.optim.AdamW([weight], fused=True).step()
            weight.grad = None
        elif write == "data":
            weight.data.mul_(2)
        if net is model and write in ("fused", "data"):
            with pytest.raises(RuntimeError, match=r"blocks\.1\.inner\.weight .* modified by an inplace operation"):
                loss.backward()
        else:
            loss.backward()
    if write in ("own", "nothing"):
        for mine, theirs in zip(model.parameters(), ref.parameters()):
            assert s.same(mine.grad, theirs.grad)


@pytest.mark.parametrize("mode", ["layer", "block"])
@pytest.mark.parametrize("factor", [0.5, 0.9])  # 0.9: values that bfloat16 does not have
def test_own_a_silent_write_to_a_weight_in_the_dtype_that_a_hook_left(mode, factor):
    nets = []
    for _ in range(2):
        torch.manual_seed(0)
        blocks = nn.ModuleList(nn.Linear(48, 48).to(torch.bfloat16) for _ in range(3))
        for block in blocks:
            block.register_forward_pre_hook(lambda m, args: m.to(torch.float32) and None)
        nets.append(nn.Sequential(*blocks))
    model, ref = nets[0], s.aligned_copy(nets[1])
    device = s.device(1 << 20)
    if mode == "layer":
        stagehand.layer(model, vram_budget=40_000, device=device)
        runtime = s.runtime(model)
    else:
        config = stagehand.StagehandConfig(vram_budget=40_000)
        runtime = stagehand.StagehandRuntime(model, config, block_pattern=r"^\d+$", device=device)
    x = torch.randn(2, 48)
    for _ in range(3):
        with torch.no_grad():
            assert s.same(model(x), ref(x))
        for net in (model, ref):
            net[1].weight.data.mul_(factor)
            net[2].bias.data.add_(1 / 3)
    runtime.shutdown()
