"""Numeric guards: NumericGuard by itself, and the wiring that watches the outputs of blocks in block mode."""

from __future__ import annotations

import warnings
from collections import deque

from .._torch import aside, behind_transforms, observed, outside_transforms, torch, unseen
from ..errors import DtypeMismatchError
from ..weights.hooks import ManagedForward

# More bits of mantissa rank higher; other dtypes are not judged.
_RANK = {torch.bfloat16: 1, torch.float16: 1, torch.float32: 2, torch.float64: 3}
for _name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"):
    if hasattr(torch, _name):
        _RANK[getattr(torch, _name)] = 0


def _float8(tensor: torch.Tensor) -> bool:
    return _RANK.get(tensor.dtype) == 0


def _count(tensor: torch.Tensor) -> torch.Tensor:
    """[number of NaN, number of Inf] of a floating tensor, int64, on its device. Does not wait."""
    data = tensor.detach()
    if _float8(data):
        data = data.to(torch.float32)
    return torch.stack([torch.isnan(data).sum(), torch.isinf(data).sum()])


class NumericGuard:
    """Checks of dtypes and values. Each switch turns one check into a no-op.

    strict_bf16: check_dtype raises. fail_on_dtype_promotion: check_promotion raises. nan_inf_check:
    check_output counts.
    """

    def __init__(self, strict_bf16: bool = True, fail_on_dtype_promotion: bool = True,
                 nan_inf_check: bool = True) -> None:
        self.strict_bf16 = strict_bf16
        self.fail_on_dtype_promotion = fail_on_dtype_promotion
        self.nan_inf_check = nan_inf_check

    def check_dtype(self, tensor: torch.Tensor, expected_dtype: torch.dtype, context: str) -> None:
        """DtypeMismatchError naming both dtypes and `context` when the tensor has another dtype."""
        with unseen():
            dtype = tensor.dtype
        if self.strict_bf16 and dtype != expected_dtype:
            raise DtypeMismatchError(
                f"{context}: {dtype}, where {expected_dtype} is expected (strict_bf16=False allows it)",
                "DTYPE_MISMATCH", context)

    def check_output(self, tensor: torch.Tensor, block_id: str, step: int) -> tuple[int, int]:
        """(NaN, Inf) in the tensor, with a warning when there are any. Waits for the device."""
        with unseen():
            if not self.nan_inf_check or not tensor.is_floating_point():
                return 0, 0
            nans, infs = _count(tensor).tolist()
        if nans or infs:
            warn_of_values(block_id, step, nans, infs)
        return nans, infs

    def check_promotion(self, input_dtype: torch.dtype, output_dtype: torch.dtype, context: str) -> None:
        """DtypeMismatchError when the output's dtype is more precise than the input's."""
        if self.fail_on_dtype_promotion and promotes(input_dtype, output_dtype):
            raise DtypeMismatchError(
                f"{context}: dtype promotion from {input_dtype} to {output_dtype} "
                f"(fail_on_dtype_promotion=False allows it)", "DTYPE_MISMATCH", context)


def promotes(input_dtype: torch.dtype, output_dtype: torch.dtype) -> bool:
    known = input_dtype in _RANK and output_dtype in _RANK
    return known and _RANK[output_dtype] > _RANK[input_dtype]


def warn_of_values(block_id: str, step: int, nans: int, infs: int) -> None:
    warnings.warn(f"stagehand: step {step}: the output of {block_id} has {nans} NaN and {infs} Inf",
                  RuntimeWarning, stacklevel=2)


def first_tensor(values) -> torch.Tensor | None:
    """The first floating tensor of a module's arguments or output, one level deep."""
    if isinstance(values, torch.Tensor):
        values = (values,)
    elif isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (tuple, list)):
        return None
    return next((v for v in values if isinstance(v, torch.Tensor) and v.is_floating_point()), None)


class GuardedForward(ManagedForward):
    """Stands as `forward` of a block whose outputs are watched."""

    def __init__(self, session, module, watch: "BlockWatch", index: int) -> None:
        super().__init__(session, module, None, False)
        self.watch = watch
        self.index = index

    def __call__(self, *args, **kwargs):
        out = self.inner(*args, **kwargs)
        self.observed(args, kwargs, out)
        return out

    def observed(self, args, kwargs, out) -> None:
        """The block was given these and returned `out`."""
        if observed():
            with aside():
                return self.observed(args, kwargs, out)
        if not self.session.closed:
            self.watch.observe(self.index, first_tensor(args) if args else first_tensor(kwargs), out)


class BlockWatch:
    """Watches the outputs of bfloat16 blocks during steps.

    NaN and Inf are counted on the device, in one small tensor for all blocks; at the end of a step it is
    copied to the host without waiting and read as soon as it is there, at the latest by `flush`. The counts go
    into the record of the step in which they are read.
    """

    def __init__(self, session, names: list[str], guard: NumericGuard, expected: torch.dtype | None) -> None:
        self.session = session
        self.names = names
        self.guard = guard
        self.expected = expected  # the dtype that was asked for; None: dtypes are not judged
        with torch.inference_mode(False):
            self._counts = torch.zeros(len(names), 2, dtype=torch.int64, device=session.target.torch)
        self._used = False
        self._promotions = 0
        self._pending: deque = deque()  # (step, counts on the host, event or None)

    def observe(self, index: int, given: torch.Tensor | None, out) -> None:
        """Called with what a block was given and returned. DtypeMismatchError as the guard says."""
        out = first_tensor(out)
        if out is None:
            return
        if self.guard.nan_inf_check:
            with outside_transforms(), torch.inference_mode(False), torch.no_grad():
                self._counts[index] += _count(behind_transforms(out))
            self._used = True
        if self.expected is None:
            return
        context = f"output of {self.names[index]}"
        if given is not None and promotes(given.dtype, out.dtype):
            self._promotions += 1
            self.guard.check_promotion(given.dtype, out.dtype, context)
        self.guard.check_dtype(out, self.expected, context)

    def step_ends(self) -> None:
        """Before the core ends the step: reports what is there, sends this step's counts on their way."""
        core = self.session.core
        if self._used:
            self._send(core.stats()["steps"])
        nans, infs = self._receive(wait=False)
        if nans or infs or self._promotions:
            core.count_guards(self._promotions, nans, infs)
        self._promotions = 0

    def flush(self) -> None:
        """Waits for counts that are still on their way and warns of them."""
        self._receive(wait=True)

    def _send(self, step: int) -> None:
        with torch.inference_mode(False), torch.no_grad():
            if self.session.target.simulated:
                self._pending.append((step, self._counts.clone(), None))
            else:
                host = torch.empty_like(self._counts, device="cpu", pin_memory=True)
                host.copy_(self._counts, non_blocking=True)
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(self._counts.device))
                self._pending.append((step, host, event))
            self._counts.zero_()
        self._used = False

    def _receive(self, wait: bool) -> tuple[int, int]:
        nans = infs = 0
        while self._pending:
            step, counts, event = self._pending[0]
            if event is not None and not event.query():
                if not wait:
                    break
                event.synchronize()
            self._pending.popleft()
            for name, (block_nans, block_infs) in zip(self.names, counts.tolist()):
                if block_nans or block_infs:
                    warn_of_values(name, step, block_nans, block_infs)
                    nans += block_nans
                    infs += block_infs
        return nans, infs
