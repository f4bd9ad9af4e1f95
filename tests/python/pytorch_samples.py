"""PyTorch's own samples of its operators and modules: their tables, fresh inputs from a sample, comparison.

The tables belong to PyTorch's tests (torch.testing._internal), and need expecttest, which `make setup` installs.
"""

from __future__ import annotations

import random

import pytest
import torch
from support import same
from torch.utils import _pytree as pytree

pytest.importorskip("expecttest", reason="PyTorch's tables of samples need the package expecttest")
invocations = pytest.importorskip(
    "torch.testing._internal.common_methods_invocations", reason="this PyTorch comes without its tests' tables")
common = pytest.importorskip("torch.testing._internal.common_utils")
core = pytest.importorskip("torch.testing._internal.opinfo.core")
modules = pytest.importorskip("torch.testing._internal.common_modules")
# Importing them forbids `torch.backends.x.y = z` for the rest of the process, where other tests do so.
setattr(torch.backends, "__allow_nonbracketed_mutation_flag", True)

op_db, module_db = invocations.op_db, modules.module_db


def seed(number: int = 0) -> None:
    torch.default_generator.manual_seed(number)  # torch.manual_seed takes 0.9 ms for devices that are not there
    random.seed(number)


def _seed_of_samples(number=None) -> None:
    seed(common.SEED if number is None else number)
    if common.TEST_NUMPY:
        common.np.random.seed(common.SEED if number is None else number)


# Before each sample they look for a unittest.TestCase on the stack, of which there is none, and seed: that took most of
# the time of these tests.
common.set_rng_seed = _seed_of_samples
for module in (common, core):
    module.extract_test_fn = lambda: None


def tensors(values) -> list:
    return [value for value in pytree.tree_leaves(values) if isinstance(value, torch.Tensor)]


def differentiable(values) -> list:
    return [value for value in tensors(values) if value.requires_grad]


def _twin(tensor):
    """The same storage, bit for bit, and the same view of it: samples overlap, are expanded, have gaps."""
    bytes_now = tensor.detach().resolve_conj().resolve_neg()
    storage = bytes_now.untyped_storage().clone()
    return torch.empty(0, dtype=tensor.dtype).set_(
        storage, bytes_now.storage_offset(), bytes_now.shape, bytes_now.stride())


def fresh(values, used=lambda leaf: leaf):
    """(leaves, values): the same values in new memory. `used` makes what stands for a leaf that requires grad."""
    leaves = []

    def one(value):
        if not isinstance(value, torch.Tensor):
            return value
        new = _twin(value) if value.layout is torch.strided else value.detach().clone()
        if not value.requires_grad:
            return new
        leaves.append(new.requires_grad_())
        return used(new) if new.layout is torch.strided else new

    return leaves, pytree.tree_map(one, values)


def dense(tensor):
    """The values alone, as `same` wants them."""
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).reshape(-1)


def equal(found, wanted) -> bool:
    """Bit-equal, NaN included; None only where None is."""
    found, wanted = pytree.tree_leaves(found), pytree.tree_leaves(wanted)
    return len(found) == len(wanted) and all(
        a is b if a is None or b is None else a.shape == b.shape and same(dense(a), dense(b))
        for a, b in zip(found, wanted))


def cotangents(outputs, number: int = 3) -> list:
    at_random = torch.Generator().manual_seed(number)
    return [torch.randn(out.shape, dtype=out.dtype, generator=at_random) if out.layout is torch.strided
            else torch.ones_like(out).detach() for out in outputs]
