"""Every operator of PyTorch that has a gradient, on PyTorch's own samples: forward and backward with all saved
tensors spilled equal those without, bit for bit.

The function and, where there is one, the operator in place; backward twice through one graph, for which everything
comes back twice. MOST samples of an operator; all of them, double precision, complex numbers and gradients of gradients
too with STH_TEST_FULL=1.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings

import pytest

torch = pytest.importorskip("torch")

import card  # noqa: E402
from pytorch_samples import cotangents, differentiable, equal, fresh, op_db, seed  # noqa: E402
from support import FULL, threads  # noqa: E402

from stagehand import activation  # noqa: E402

pytestmark = pytest.mark.skipif(card.ON_CARD, reason="the samples are the CPU's")

MOST = 12  # samples of an operator; every STRIDE-th of them, or up to the first that has a gradient
STRIDE = 8
DTYPES = [torch.float32, torch.float64, *([torch.complex64] if FULL else [])]

# Operators whose gradients PyTorch cannot differentiate again on the CPU, although its table says so.
NO_SECOND = {
    "native_layer_norm": "not where weight is None",
    "nn.functional.ctc_loss": "_ctc_loss_backward has no derivative",
    "nn.functional.linear_cross_entropy.chunked_none": "its backward writes with out=",
    "nn.functional.scaled_dot_product_attention": "the backward of flash attention has no derivative",
    "sparse.sampled_addmm": "a compressed sparse gradient has no is_coalesced",
}
# Outputs that differ from run to run without offload, so that gradients alone are compared.
OUTPUTS_VARY = {
    "linalg.lstsq": "LAPACK's gelsy rounds by what its workspace held",
    "linalg.lstsq.grad_oriented": "LAPACK's gelsy rounds by what its workspace held",
}


def dtypes_of(op) -> list:
    """Those that the samples are made in: in `make test` the first of them that has a gradient."""
    have = op.supported_backward_dtypes("cpu")
    chosen = [dtype for dtype in DTYPES if dtype in have] or sorted(have, key=str)[:1]
    return chosen if FULL else chosen[:1]


def cases() -> list:
    found = []
    for op in op_db:
        if op.supports_autograd:
            for dtype in dtypes_of(op):
                name = getattr(op, "full_name", None) or ".".join(filter(None, (op.name, op.variant_test_name)))
                found.append(pytest.param(op, dtype, id=f"{name}-{str(dtype)[6:]}"))
    return found


def as_used(leaf):
    """What an operator sees in place of a leaf, which is never spilled: a copy that dies with the graph, or a view
    where a copy would have other strides."""
    return leaf.clone() if leaf.is_contiguous() and alone(leaf) else leaf.view_as(leaf)


def alone(tensor) -> bool:
    """Whether it is all of its storage."""
    return tensor.untyped_storage().nbytes() == tensor.nbytes


def run(function, sample, context, op):
    """(outputs, gradients of two backwards, gradients of gradients), or None where nothing has a gradient."""
    seed(1)
    leaves, (first, args, kwargs) = fresh((sample.input, sample.args, sample.kwargs), as_used)
    with context:
        outputs = differentiable(sample.output_process_fn_grad(function(first, *args, **kwargs)))
        del first, args, kwargs  # what the graph alone has goes when something else is saved
        torch.ones(3, requires_grad=True).exp().exp()
        if not outputs or not leaves:
            return None
        gradients = [torch.autograd.grad(outputs, leaves, cotangents(outputs), retain_graph=True, allow_unused=True)
                     for _ in range(2)]
        second = []
        if FULL and op.supports_gradgrad and op.full_name not in NO_SECOND:
            given = [cotangent.requires_grad_() for cotangent in cotangents(outputs)]
            firsts = differentiable(
                torch.autograd.grad(outputs, leaves, given, create_graph=True, allow_unused=True))
            second = torch.autograd.grad(firsts, [*leaves, *given], cotangents(firsts), allow_unused=True) \
                if firsts else []
    return outputs, gradients, second


def in_place(op, sample, outputs):
    """The operator in place, for samples that it takes: the result must fit the input."""
    function = op.inplace_variant
    if function is None or not op.supports_inplace_autograd or sample.broadcasts_input:
        return None
    if not isinstance(sample.input, torch.Tensor) or outputs[0].dtype != sample.input.dtype:
        return None
    fits = sample.input.is_contiguous() and alone(sample.input)  # else it is a view of a leaf, which must stay
    return function if fits else None


@pytest.mark.parametrize("op, dtype", cases())
def test_gradients_are_those_of_the_run_without_offload(op, dtype):
    seed()
    compared = 0
    with threads(1), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = op.sample_inputs("cpu", dtype, requires_grad=True)
        for number, sample in enumerate(itertools.islice(samples, None if FULL else MOST)):
            if not FULL and compared and number % STRIDE:
                continue
            state = torch.get_rng_state()
            function = op
            while function is not None:
                wanted = run(function, sample, contextlib.nullcontext(), op)
                if wanted is None:
                    break
                found = run(function, sample, activation.offload(1, device="sim"), op)
                skip = op.full_name in OUTPUTS_VARY
                assert equal(found[skip:], wanted[skip:]), f"sample {number}: {sample.summary()}"
                compared += 1
                function = in_place(op, sample, wanted[0]) if function is op else None
            torch.set_rng_state(state)
    assert compared, "no sample has a gradient"


def test_what_the_samples_save_is_spilled():
    """Of operators that save their inputs, which nobody else has, something goes and comes back."""
    names = ["mul", "hypot", "sin", "matmul", "cumprod", "nn.functional.gelu", "nn.functional.layer_norm"]
    ops = {op.full_name: op for op in op_db}
    for name in names:
        seed()
        with activation.offload(1, device="sim") as runtime:
            before = runtime.stats
            samples = ops[name].sample_inputs("cpu", torch.float32, requires_grad=True)
            assert run(ops[name], next(iter(samples)), contextlib.nullcontext(), ops[name])
            after = runtime.stats
        moved = {key: after[key] - before[key] for key in ("tensors", "tensors_spilled", "tensors_dropped", "restored")}
        assert moved["tensors_spilled"] + moved["tensors_dropped"] > 0, (name, moved)
        assert moved["restored"] > 0, (name, moved)
