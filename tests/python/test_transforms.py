"""torch.func's transforms and functional_call round a managed model: the numbers are those of the resident model."""

import copy
import os
import subprocess
import sys

import pytest
import stagehand
import torch
from stagehand._torch import hooks_enabled
from support import Stack, aligned_copy, made, nbytes, runtime, same, tight_budget, wrap
from torch import func
from torch.utils import _pytree
from wrapping_support import aligned, held, quantised

D = 32
X = torch.randn(5, D, generator=torch.Generator().manual_seed(1))
ONES = torch.ones(5, D)


def given(net):
    return {name: param.detach().clone() for name, param in net.named_parameters()}


def batched(net):
    """Parameters of three models, and a function of one's."""
    nets = [copy.deepcopy(net) for _ in range(3)]
    with torch.no_grad():
        for i, other in enumerate(nets):
            for param in other.parameters():
                param.add_(0.01 * i)
    return func.stack_module_state(nets)


def backward(net, out):
    """The gradients that `out` gives the parameters."""
    net.zero_grad()
    out.sum().backward()
    return [param.grad for param in net.parameters()]


def through(net, params):
    return func.functional_call(net, params, (X,))


KEEP_NOTHING = {
    "vmap": lambda net: func.vmap(net)(X[None]),
    "vmap of rows, twice": lambda net: func.vmap(lambda row: net(row[None])[0] + net(2 * row[None])[0])(X),
    "vmap in chunks": lambda net: func.vmap(net, chunk_size=2)(X[:, None]),
    "jvp": lambda net: func.jvp(net, (X,), (ONES,)),
    "jacfwd": lambda net: func.jacfwd(lambda row: net(row[None])[0])(X[0]),
    "functional_call": lambda net: through(net, {name: value + 1 for name, value in given(net).items()}),
    "functional_call with its own": lambda net: through(net, dict(net.named_parameters())),
    "functional_call with one other": lambda net: through(net,
                                                          {"blocks.1.up.weight": given(net)["blocks.1.up.weight"] * 2}),
    "functional_call of a state": lambda net: through(net, net.state_dict()),
    "functional_call with a batch": lambda net: func.vmap(lambda *state: through(net, state))(*batched(net)),
    "grad of parameters": lambda net: func.grad(lambda params: through(net, params).sum())(given(net)),
    "grad of parameters by row": lambda net: func.vmap(func.grad(
        lambda params, row: func.functional_call(net, params, (row[None],)).sum()), in_dims=(None, 0))(given(net), X),
}
KEEP_WEIGHTS = {  # on the device until they return
    "grad": lambda net: func.grad(lambda v: net(v).sum())(X),
    "grad and value": lambda net: func.grad_and_value(lambda v: net(v).sum())(X),
    "grad by row": lambda net: func.vmap(func.grad(lambda row: net(row[None]).sum()))(X),
    "grad of grad": lambda net: func.grad(lambda v: func.grad(lambda w: net(w).square().sum())(v).square().sum())(X),
    "grad of one parameter": lambda net: func.grad(lambda params: through(net, params).sum())(
        {"blocks.1.up.weight": given(net)["blocks.1.up.weight"]}),
    "grad beside a weight of its own": lambda net: func.grad(
        lambda v: (net(v) * net.blocks[0].up.weight.sum()).sum())(X),
    "vjp": lambda net: (lambda out, back: back(ONES.to(out.device)))(*func.vjp(net, X)),
    "jacrev": lambda net: func.jacrev(lambda row: net(row[None])[0])(X[0]),
    "hessian": lambda net: func.hessian(lambda row: net(row[None]).square().sum())(X[0]),
}
TRAIN = {
    "backward of vmap": lambda net: backward(net, func.vmap(lambda row: net(row[None])[0])(X)),
    "backward of grad": lambda net: backward(net, func.grad(lambda v: net(v).square().sum())(X)),
}


def hooks_work_inside() -> bool:
    """Whether PyTorch calls hooks for saved tensors inside vmap and jvp, as 2.5 and newer do. Weights stay else."""
    found = []
    func.vmap(lambda x: (found.append(hooks_enabled()), x)[1])(X)
    return found[0]


def agree(model, ref, way, mode=torch.enable_grad) -> None:
    for _ in range(2):
        with mode():
            got, want = (_pytree.tree_leaves(way(net)) for net in (model, ref))
        assert same(got, want)
        del got, want
    if not hooks_work_inside():
        with torch.no_grad():  # leases that autograd held end when the next pass looks
            assert same(model(X), ref(X))
    assert runtime(model).stats["leased_bytes"] == 0


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("inference_mode", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("way", KEEP_NOTHING)
def test_transforms_of_a_model_that_streams(way, frozen, inference_mode, mode):
    model = made(Stack, 3, D, frozen=frozen)
    ref = aligned_copy(model)
    others = "functional_call" in way or "of parameters" in way  # weights that do not stream
    kept = not (others or frozen or mode is torch.no_grad or hooks_work_inside())
    wrap(model, 2 * nbytes(model) if kept else tight_budget(model), inference_mode=inference_mode)
    agree(model, ref, KEEP_NOTHING[way], mode)
    assert others or kept or runtime(model).stats["copies"] > 8


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("way", KEEP_WEIGHTS)
def test_transforms_that_keep_all_weights(way, frozen, mode):
    model = made(Stack, 3, D, frozen=frozen)
    ref = aligned_copy(model)
    wrap(model, 2 * nbytes(model))
    agree(model, ref, KEEP_WEIGHTS[way], mode)


@pytest.mark.parametrize("way", TRAIN)
def test_gradients_reach_the_parameters_outside_of_a_transform(way):
    model = made(Stack, 3, D, frozen=False)
    ref = aligned_copy(model)
    wrap(model, 2 * nbytes(model))
    agree(model, ref, TRAIN[way])


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("way", [way for way in KEEP_WEIGHTS if way != "grad of one parameter"])
def test_what_does_not_fit_says_what_can_be_done(way, frozen):
    model = made(Stack, 3, D, frozen=frozen)
    ref = aligned_copy(model)
    wrap(model, tight_budget(model))
    with pytest.raises(stagehand.StagehandOOMError,
                       match=r"unit 'blocks.*torch.func's grad, vjp, jacrev .* use autograd itself"):
        KEEP_WEIGHTS[way](model)
    with torch.no_grad():
        assert same(model(X), ref(X))


def test_weights_around_tensors_that_take_a_gradient():
    model = quantised(made(Stack, 3, 64)).requires_grad_(True)
    x = torch.randn(3, 5, 64)
    ref = aligned(model)
    wrap(model, held(model) // 2, inference_mode=True)
    with torch.no_grad():
        assert same(func.vmap(model)(x), func.vmap(ref)(x))


NO_STACK = """
import torch
stacks = []
functorch = torch._C._functorch
for name in ("peek_interpreter_stack", "get_interpreter_stack", "maybe_get_level"):
    setattr(functorch, name, lambda *args, name=name: stacks.append(name))
import support
from torch import nn
model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
model[2].requires_grad_(False)
support.wrap(model, support.nbytes(model) // 2)
x = torch.randn(2, 64, requires_grad=True)
for _ in range(2):
    torch.utils.checkpoint.checkpoint_sequential(model, 2, x, use_reentrant=False)
    torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum().backward()
support.runtime(model).shutdown()
print(stacks)
"""


def test_training_makes_no_stack_of_transforms():
    """Once a thread has one, autograd copies it for each node of each backward."""
    done = subprocess.run([sys.executable, "-c", NO_STACK], capture_output=True, text=True, timeout=120,
                          cwd=os.path.dirname(__file__))
    assert done.returncode == 0 and done.stdout.strip() == "[]", done.stdout + done.stderr
