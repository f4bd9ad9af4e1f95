"""Micro-batches block by block: all of them through one block, then all through the next.

    losses = stagehand.block_major(model, [*model.blocks, head], micro_batches)
    torch.autograd.backward(losses)

A model that streams moves its weights once for each pass. m passes move them m times; in this order they move
about once for all m, because the calls of a block follow each other while its weights are there. Backward goes
block by block as well: autograd runs nodes in the reverse of the order in which they were made.
docs/microbatches.md has the order and what is guaranteed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint as _checkpoint

from .._torch import torch, unseen
from ..managed import RUNTIMES, check_module


def block_major(model: torch.nn.Module, stages: Iterable[Callable], micro_batches: Iterable, *,
                kwargs: Sequence[Mapping] | Callable | None = None, checkpoint: bool = True,
                seeds: Sequence[int] | None = None) -> list:
    """Runs m micro-batches through the stages, each stage on all of them before the next. One step of the model.

    model: the model that the stages are parts of, under `layer` or `StagehandRuntime`; a plain one works too.
    stages: callables in their order: blocks, and what comes before, between or after them as functions (an
        embedding, a head with its loss). Functions among the stages sum gradients in that order, too.
    micro_batches: sequence of m inputs of the first stage, of any shapes and dtypes, on any device. A tuple is
        given as positional arguments, a mapping as keyword arguments, all else as the one argument; so is each
        stage's output to the next stage.
    kwargs: keyword arguments besides: None, a sequence of m mappings, of which micro-batch j's goes to each of
        its calls, or a function of (stage index, micro-batch index) that returns a mapping or None.
    checkpoint: under autograd each call is checkpointed (without reentering), so that only the stages' inputs are
        kept: m for each stage. False: autograd keeps all that it saves.
    seeds: None, or a sequence of m ints: micro-batch j draws the random numbers that a pass of its own right after
        `torch.manual_seed(seeds[j])` would draw. Without, masks depend on the order of the calls.

    Returns the last stage's m outputs, in the order of the micro-batches. Under autograd run ONE backward through
    all of them; each weight's gradient is then the sum over micro-batches 0, 1, ... m-1, added to `grad` once.
    Raises ValueError and TypeError before anything has run; an exception of a stage passes through.
    Threads: as a call of the model.
    """
    stages, values = list(stages), list(micro_batches)
    extras = _extras(kwargs, len(values))
    if not stages:
        raise ValueError("stages is empty: give the model's blocks in the order in which they run")
    for i, stage in enumerate(stages):
        if not callable(stage):
            raise TypeError(f"stage {i} is a {type(stage).__name__}, which cannot be called: give modules or functions")
    if seeds is not None and len(seeds) != len(values):
        raise ValueError(f"{len(seeds)} seeds for {len(values)} micro-batches: give one for each")
    session = _session(model)
    if session is None:
        return _run(stages, values, extras, checkpoint, _random(seeds, values), None)
    (values,), _ = session.inputs_on_device((values,), {})
    with session.steps.step():
        return _run(stages, values, extras, checkpoint, _random(seeds, values), session)


def _run(stages, values: list, extras, checkpoint: bool, random, session) -> list:
    recorded = torch.is_grad_enabled()
    order = range(len(values))
    if recorded:  # backward runs the last call first: so it meets the micro-batches in their order
        order = order[::-1]
    for i, stage in enumerate(stages):
        for j in order:
            extra = extras(i, j) or {}
            if session is not None and extra:
                _, extra = session.inputs_on_device((), dict(extra))
            with random(j):
                if recorded and checkpoint:
                    values[j] = _checkpoint(_call, stage, values[j], extra, use_reentrant=False)
                else:
                    values[j] = _call(stage, values[j], extra)
    return values


def _call(stage, value, extra):
    if isinstance(value, tuple):
        return stage(*value, **extra)
    if isinstance(value, Mapping):
        return stage(**value, **extra)
    return stage(value, **extra)


def _session(model):
    """The session that manages the model, opened; None for a plain model."""
    check_module(model)
    for name in RUNTIMES:
        runtime = model.__dict__.get(name)
        if runtime is not None:
            return runtime.prepare() if hasattr(runtime, "prepare") else runtime.session
    return None


def _extras(kwargs, count: int):
    """(stage index, micro-batch index) -> mapping or None."""
    if kwargs is None:
        return lambda i, j: None
    if callable(kwargs):
        return kwargs
    given = list(kwargs)
    if len(given) != count:
        raise ValueError(f"kwargs has {len(given)} entries for {count} micro-batches: give one for each")
    for j, extra in enumerate(given):
        if extra is not None and not isinstance(extra, Mapping):
            raise TypeError(f"kwargs of micro-batch {j} must be a mapping or None, not a {type(extra).__name__}")
    return lambda i, j: given[j]


# ---------------------------------------------------------------------- random numbers


def _random(seeds, values):
    """Micro-batch index -> context in which it draws its own random numbers."""
    if seeds is None:
        nothing = contextlib.nullcontext()
        return lambda j: nothing
    with unseen():
        cuda = next((leaf.device for leaf in _pytree.tree_leaves(values)
                     if isinstance(leaf, torch.Tensor) and leaf.is_cuda), None)
    return _Streams(seeds, cuda)


class _Streams:
    """A stream of random numbers for each micro-batch, on the CPU and on one card. The caller's go on as they
    were once a call is over."""

    def __init__(self, seeds, cuda) -> None:
        self.cuda = cuda
        before = self._get()
        try:
            self.states = [self._seeded(seed) for seed in seeds]
        finally:
            self._set(before)

    def _seeded(self, seed: int) -> tuple:
        torch.default_generator.manual_seed(seed)
        if self.cuda is not None:
            with torch.cuda.device(self.cuda):
                torch.cuda.manual_seed(seed)
        return self._get()

    def _get(self) -> tuple:
        with unseen():
            return torch.get_rng_state(), torch.cuda.get_rng_state(self.cuda) if self.cuda is not None else None

    def _set(self, state: tuple) -> None:
        with unseen():
            torch.set_rng_state(state[0])
            if self.cuda is not None:
                torch.cuda.set_rng_state(state[1], self.cuda)

    @contextlib.contextmanager
    def __call__(self, j: int):
        before = self._get()
        self._set(self.states[j])
        try:
            yield
        finally:
            self.states[j] = self._get()
            self._set(before)
