"""What autograd saves is written later, where no version tells: gradients are those of the run without spilling."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import card
from support import same

import stagehand

pytestmark = pytest.mark.usefixtures("tensors_there")

BUDGETS = [1000, 20000]


def chunks(x, split):
    a, b = split(x)
    return (a.sigmoid_() * b.tanh_()).sum()


def three_parts(x):
    a, b, c = (x * 1.5).unsafe_split(x.shape[-1] // 3 + 1, -1)
    b.tanh_()
    out = a.sigmoid_().sum() + b.sum()
    c.exp_()
    return out + (c * 2).sin().sum()


def behind_data(x):
    """A result that is written, where autograd does not look, after it was saved."""
    y = x.sin()
    z = y.exp()  # saves z
    z.data.mul_(0.5)
    return (z * y).sum()


def two_counters(x):
    y = (x * 2).contiguous()
    one, other = y.data[:2].view(-1), y  # a version of its own
    z = y.cos()  # saves y
    one.add_(1)
    return (z + other.sin()).sum()


WRITTEN_LATER = {
    "202": lambda x: chunks(x * 1.0, lambda x: x.unsafe_chunk(2, -1)),
    "unsafe_split": three_parts,
    "data": behind_data,
    "two counters": two_counters,
    "203": lambda x: F.rrelu(x * 1.0, training=True).sin().sum(),
    "rrelu_": lambda x: F.rrelu(x * 1.0, training=True, inplace=True).sin().sum(),
    "chained": lambda x: F.rrelu(F.rrelu(x * 1.0, training=True) * 2, training=True).exp().sum(),
}


def run(function, x, seed=0):
    torch.manual_seed(seed)
    x.grad = None
    loss = function(x)
    loss.backward()
    return [loss.detach().clone(), x.grad.clone()]


@pytest.mark.combinations("each may be the only test of a fault")
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", WRITTEN_LATER)
def test_202_203_what_is_written_after_it_was_saved(name, budget):
    x = torch.randn(16, 128, generator=torch.Generator().manual_seed(1), device="cpu").to(card.TORCH).requires_grad_()
    function = WRITTEN_LATER[name]
    want = run(function, x)
    for _ in range(3):
        with stagehand.activation.offload(vram_budget=budget, device=card.NAME):
            assert same(run(function, x), want)
    stagehand.activation.shutdown()


CELLS = {
    "LSTMCell": lambda: nn.LSTMCell(32, 48),
    "GRUCell": lambda: nn.GRUCell(32, 48),
    "RNNCell": lambda: nn.RNNCell(32, 48),
    "LSTM": lambda: nn.LSTM(32, 48, 2),
    "LSTM with projections": lambda: nn.LSTM(32, 48, proj_size=16, bidirectional=True),
    "GRU": lambda: nn.GRU(32, 48, 2, bidirectional=True),
    "RNN": lambda: nn.RNN(32, 48, 2, nonlinearity="relu"),
}


@pytest.mark.combinations("each may be the only test of a fault")
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", CELLS)
def test_202_recurrent_layers(name, budget):
    torch.manual_seed(3)
    model = CELLS[name]().to(card.TORCH)
    x = torch.randn(7, 4, 32, requires_grad=True) if not name.endswith("Cell") else torch.randn(7, 32)

    def step():
        out = model(x)
        while isinstance(out, tuple):
            out = out[0]
        return torch.autograd.grad(out.sin().sum(), [*model.parameters()])

    want = step()
    for _ in range(3):
        with stagehand.activation.offload(vram_budget=budget, device=card.NAME):
            found = step()
        assert same(found, want)
    stagehand.activation.shutdown()


@card.simulated_only  # the array is on the host
def test_202_memory_of_an_array_that_is_written_later():
    """PyTorch does not count who else has memory that it did not allocate."""
    x = torch.randn(16, 128).requires_grad_()

    def function(x):
        array = np.ones((16, 128), np.float32)
        out = (x * torch.from_numpy(array)).sum() + x.sin().exp().sum()
        array *= 3
        return out

    want = run(function, x)
    with stagehand.activation.offload(vram_budget=1000, device="sim"):
        for _ in range(3):
            assert same(run(function, x), want)
    stagehand.activation.shutdown()


@pytest.mark.parametrize("lazy", ["conj", "imag of conj"])
def test_lazy_bits_do_not_keep_memory(lazy):
    """A conjugate shares its memory with the tensor that it is of."""
    x = torch.randn(64, 64, dtype=torch.complex64).to(card.TORCH).requires_grad_()

    def function(x):
        for _ in range(6):
            y = x.exp().conj()
            x = y * y.conj().imag if lazy == "imag of conj" else y * y.exp().conj()
            x = x / x.abs().max().detach()
        return x.real.sum()

    want = run(function, x)
    with stagehand.activation.offload(vram_budget=5 * x.nbytes, device=card.NAME) as runtime:
        for _ in range(2):
            assert same(run(function, x), want)
        assert runtime.stats["spill_bytes"] > 0
        assert card.ON_CARD or runtime.stats["peak_bytes"] <= 5 * x.nbytes
    stagehand.activation.shutdown()


def test_an_empty_view_keeps_no_memory():
    x = torch.randn(64, 64).to(card.TORCH).requires_grad_()

    def function(x):
        for _ in range(8):
            x = torch.cat([x.sin(), x[:0] * x[:0]]).exp().clamp(max=2)
        return x.sum()

    want = run(function, x)
    with stagehand.activation.offload(vram_budget=6 * x.nbytes, device=card.NAME) as runtime:
        for _ in range(2):
            assert same(run(function, x), want)
        assert runtime.stats["spill_bytes"] > 0
    stagehand.activation.shutdown()


def test_208_double_backward():
    """On a card hooks are called by a thread of autograd, without a frame of Python's below."""
    x = torch.randn(64, 64).to(card.TORCH).requires_grad_()

    def second(x):
        y = x
        for _ in range(6):
            y = F.gelu(F.layer_norm(y, (64,)) * 2)
        first, = torch.autograd.grad(y.pow(2).sum(), x, create_graph=True)
        return first.pow(2).sum()

    want = run(second, x)
    with stagehand.activation.offload(vram_budget=3 * x.nbytes, device=card.NAME) as runtime:
        for _ in range(3):
            assert same(run(second, x), want)
    stagehand.activation.shutdown()

