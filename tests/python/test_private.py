"""Private names of PyTorch: all that the code uses are listed, and each may be missing."""

from __future__ import annotations

import ast
import pathlib

import pytest
import torch
from torch import nn

import children
from stagehand import _private

PACKAGE = pathlib.Path(__file__).parents[2] / "python/stagehand"
here = pytest.mark.skipif(not PACKAGE.exists(), reason="the repository is not here")
# Those that may be missing here. PyTorch's own functions take the dlpack one, and it makes no difference on a CPU where
# the CUDA ones are; a class of C's keeps its own; a setting is looked at when a block is compiled.
NOT_HIDDEN = ("torch._C._cuda_", "torch._C._from_dlpack", "torch.Tensor.", "torch._dynamo.config.", "torch.amp.")
NEEDED = [line for line in _private.LINES if " " not in line]
EITHER = [line.split(" or ") for line in _private.LINES if " or torch." in line and ": " not in line]
WITHOUT = dict(line.split(": ", 1) for line in _private.LINES if ": " in line)
OF_OBJECTS = [name.split(".") for name in WITHOUT if not name.startswith("torch.")]
THERE = [name for name in WITHOUT
         if name.startswith("torch.") and _private.is_there(name) and not name.startswith(NOT_HIDDEN)]


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def path_of(node, aliases: dict) -> str:
    """"torch._C._x" of such an expression, also where it begins with a name that stands for another path, or is a
    getattr() of a name; "" of others."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id, "")
    if isinstance(node, ast.Attribute):
        below = path_of(node.value, aliases)
        return f"{below}.{node.attr}" if below else ""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
        below = path_of(node.args[0], aliases)
        return f"{below}.{node.args[1].value}" if below and isinstance(node.args[1], ast.Constant) else ""
    return ""


def used_in(tree: ast.AST) -> set:
    """Private paths of torch in a module."""
    aliases, found = {"torch": "torch", "nn": "torch.nn"}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for name in node.names:
                aliases[name.asname or name.name] = f"{node.module}.{name.name}"
                found.add(f"{node.module}.{name.name}")
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            path = path_of(node.value, aliases)
            if path:
                aliases[node.targets[0].id] = path
    found |= {path_of(node, aliases) for node in ast.walk(tree)}
    return {path for path in found if is_private(path)}


def used() -> dict:
    return {path: file for file in PACKAGE.rglob("*.py") if file.name != "_private.py"
            for path in used_in(ast.parse(file.read_text()))}


def covers(name: str, path: str) -> bool:
    return f"{name}.".startswith(f"{path}.") or f"{path}.".startswith(f"{name}.")


@here
def test_every_private_name_that_the_code_uses_is_listed():
    listed = {name for name in (*NEEDED, *WITHOUT, *sum(EITHER, [])) if name.startswith("torch.")}
    paths = used()
    assert not {path: file for path, file in paths.items() if not any(covers(name, path) for name in listed)}
    assert not [name for name in listed if not any(covers(name, path) for path in paths)]
    assert len(paths) > 40


def test_those_that_are_needed_are_there():
    _private.check(torch.__version__)
    recurrent = nn.LSTM(2, 2)
    leaf = torch.ones(2, requires_grad=True)
    samples = {"Module": recurrent, "RNN": recurrent, "Tensor": leaf, "Storage": leaf.untyped_storage(),
               "Node": nn.functional.gelu(leaf).grad_fn}
    assert OF_OBJECTS
    for kind, name in OF_OBJECTS:
        assert hasattr(samples[kind], name), (kind, name)


def test_a_pytorch_that_lacks_one_is_refused_by_name():
    """One after the other is hidden, of those that can be."""
    done = children.run("""
        import pkgutil
        from stagehand import _private
        hidden = 0
        for name in [line for line in _private.LINES if " " not in line]:
            owner, _, last = name.rpartition(".")
            owner = pkgutil.resolve_name(owner)
            own = getattr(owner, last)
            try:
                delattr(owner, last)
            except (AttributeError, TypeError):
                continue  # of a class of C's
            try:
                if _private.is_there(name):
                    continue  # a module, which is found again
                hidden += 1
                try:
                    _private.check("9.9")
                except ImportError as error:
                    assert name in str(error) and "9.9" in str(error) and "newer stagehand" in str(error)
                else:
                    raise AssertionError(name)
            finally:
                setattr(owner, last, own)
        assert hidden > 25, hidden
        _private.check("9.9")
    """)
    assert done.status == 0, done.stderr


HIDE = """
owner, _, last = {name!r}.rpartition(".")
import importlib, torch
owner = eval(owner)
delattr(owner, last)
for other in (torch.autograd,):  # which has some of them again
    if last in vars(other):
        delattr(other, last)
assert not hasattr(owner, last)
"""

TRAIN = """
import support as s
import stagehand
from stagehand.activation import ActivationRuntime, ActivationStagehandConfig

def train(net, x, optimizer):
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = net(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses

model = s.made(s.Stack, 6, 48, frozen=False)
ref = s.aligned_copy(model)
s.wrap(model, s.tight_budget(model))
x = model.example()[0]
optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, ref)]
want = train(ref, x, optimizers[1])
config = ActivationStagehandConfig(enabled=True, slabs_per_class=None)
spilling = ActivationRuntime(config, s.device(1 << 30), smallest=256, high=4096, low=2048, ahead_bytes=1024)
with spilling.managed_forward():
    got = train(model, x, optimizers[0])
assert s.same(got, want)
assert all(s.same(p, q) for p, q in zip(model.parameters(), ref.parameters()))
assert spilling.stats["spilled"] > 0
spilling.shutdown()
s.runtime(model).shutdown()
"""


@pytest.mark.parametrize("name", THERE)
def test_training_is_right_without_one_that_is_optional(name):
    """Where two stand for each other one is left: a PyTorch with neither is none that is accepted."""
    hide = HIDE.format(name=name)
    if name.endswith("_is_compiling_flag") and (not hasattr(torch.compiler, "is_exporting") or
                                                "is_compiling" in torch.nn.Module._call_impl.__code__.co_names):
        pytest.skip("this PyTorch has nothing else, or needs it itself")
    done = children.run_bare(hide + TRAIN, children.OPTIMIZERS)
    assert done.status == 0, done.stderr
