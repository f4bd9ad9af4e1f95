"""Block mode: the blocks that a pattern names stream through the device, in steps that the caller may mark.

    runtime = stagehand.StagehandRuntime(model, stagehand.StagehandConfig(vram_budget="8GB"))
    with runtime.managed_forward():
        out = model(inputs)

What is outside the blocks stays on the device and counts towards the budget. Pieces that move are the modules
inside a block that own parameters, so that a block need not fit as a whole.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import threading
import warnings

from torch.utils import _pytree

from .. import device as devices
from .._torch import not_to_be_compiled, torch, transformed, uncompiled, unseen
from ..arguments import Path, Size, check, switches
from ..device import DeviceLike
from ..errors import InvalidArgumentError, InvalidStateTransitionError, NotFoundError
from ..files.filesource import FileSource, Undo
from ..files.pool import PinnedPool, pool_for_next
from ..files.quantsource import stream_from_files
from ..report import budget_bytes
from ..session.answers import Answer
from ..session.finding import Finding, model_bytes
from ..session.plain import stands_for_copies
from ..session.session import Session
from ..weights.hooks import Opener, forward_below, plain_forward
from ..weights.units import full_name, owned
from ..managed import RUNTIMES
from .common import SessionRuntime, about_to_wrap
from .config import MIB, StagehandConfig
from .guards import BlockWatch, GuardedForward, NumericGuard
from .telemetry import StagehandTelemetry

nn = torch.nn
log = logging.getLogger("stagehand")

BLOCK_PATTERN = (r"(^|\.)(blocks?|layers?|transformer_blocks|single_transformer_blocks|double_blocks|"
                 r"single_blocks|h)\.\d+$")
SLABS = 7  # of a pool made for pinned_slab_mb, where pinned_pool_mb was not set
STAGING_BYTES = 64 * MIB  # or four of the largest unit: what staging gets of a limit that the user set
POOL_FIELDS = ("pinned_pool_mb", "pinned_slab_mb", "pinned_slab_alignment")


def find_blocks(model: nn.Module, pattern: str) -> list[tuple[str, nn.Module]]:
    """(name, module) of every block: modules with parameters whose name the pattern matches by regex search.

    Raises InvalidArgumentError (a ValueError): no match names the pattern and some module names, nested
    matches name both.
    """
    try:
        search = re.compile(pattern).search
    except re.error as error:
        raise InvalidArgumentError(f"block_pattern {pattern!r} is not a regular expression: {error}",
                                   object="block_pattern") from error
    names = [name for name, _ in model.named_modules() if name]
    found = [(name, module) for name, module in model.named_modules()
             if name and search(name) and next(module.parameters(), None) is not None]
    if not found:
        examples = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        raise InvalidArgumentError(
            f"block_pattern {pattern!r} matches no module with parameters of {type(model).__name__}: its modules "
            f"are called {examples or '(none)'}", object="block_pattern")
    for outer, _ in found:
        for inner, _ in found:
            if inner.startswith(outer + "."):
                raise InvalidArgumentError(
                    f"block_pattern {pattern!r} matches {outer} and, inside it, {inner}: blocks must not be "
                    f"nested, make the pattern match one of them", object="block_pattern")
    return found


def targets_of(blocks) -> list[tuple[str, nn.Module, str]]:
    """(name, module, block name) of every module in the blocks that owns parameters, each once."""
    seen, targets = set(), []
    for block, module in blocks:
        for name, part in module.named_modules(prefix=block):
            if id(part) not in seen and any(p is not None for p in part._parameters.values()):
                seen.add(id(part))
                targets.append((name, part, block))
    return targets


_plain = threading.local()  # runtime: whose model this thread calls as it is, with its parts, before it has opened


class _OpensAtCall(Opener):
    """Stands as the forward of the model, or of a part of it, until the runtime opens: pipelines call a model's parts
    alone (`vae.decode()` calls the decoder)."""

    _torchdynamo_disable = True

    def __init__(self, runtime: "StagehandRuntime", module: nn.Module) -> None:
        self.runtime = runtime
        self.module = module
        own, forward = forward_below(module)
        functools.update_wrapper(self, forward, updated=())
        self.own, self.inner = own, forward  # own: the instance had a forward of its own
        self.stands = stands_for_copies(None, module)

    def install(self) -> None:
        self.module.__dict__["forward"] = self
        for stand in self.stands:
            stand.install()

    def __call__(self, *args, **kwargs):
        exchanged = self._exchanged()
        outer = getattr(_plain, "runtime", None)
        if exchanged is not None or outer is self.runtime:
            if exchanged is not None:
                self._refuse_to_part(exchanged, args, kwargs)
            _plain.runtime = self.runtime
            try:
                return self.inner(*args, **kwargs)
            finally:
                _plain.runtime = outer
        try:
            session = self.runtime.prepare()
        except InvalidStateTransitionError:
            if not self.runtime._closed:
                raise
            with self.runtime._life:  # another thread is shutting it down, or has: the model is plain then
                return self.inner(*args, **kwargs)
        if self.module.__dict__.get("forward") is self:  # the part was taken out of the model
            self.remove()
        elif session.local.depth:  # a program has put another forward over this one, which calls it
            return self.inner(*args, **kwargs)
        return self.module.forward(*args, **kwargs)

    def _exchanged(self) -> str | None:
        """The name of a tensor that functional_call has put in place of a Parameter: it is no part of the model, which
        is not taken over then."""
        for name, _, key, value in owned(self.module):
            if not isinstance(value, nn.Parameter) or transformed(value):
                return full_name(name, key)
        return None

    def _refuse_to_part(self, name: str, args, kwargs) -> None:
        """Such a call is plain, which it can be on one device."""
        tensors = [*self.module.parameters(), *self.module.buffers(), *_pytree.tree_leaves((args, kwargs))]
        with torch._C.DisableTorchFunctionSubclass():  # a class of the caller's may refuse to be asked
            devices = {tensor.device for tensor in tensors if isinstance(tensor, torch.Tensor)}
        if len(devices) > 1:
            raise InvalidStateTransitionError(
                f"{name} is another tensor than the model's own (torch.func.functional_call puts those there) at the "
                f"model's first call, which would take the model over: call runtime.prepare() before", object=name)

    def make_way(self) -> None:
        """Copies find it no more. As the forward it stays, so that calls of other threads wait for the session's."""
        for stand in self.stands:
            stand.remove()
        self.stands = ()

    def remove(self) -> None:
        self.make_way()
        if self.module.__dict__.get("forward") is not self:
            return
        if self.own:
            self.module.__dict__["forward"] = self.inner
        else:
            del self.module.__dict__["forward"]

    def __deepcopy__(self, memo):
        return plain_forward(memo.get(id(self.module), self.module))

    def __reduce__(self):
        return plain_forward, (self.module,)


not_to_be_compiled(_OpensAtCall.__call__)


class _Unopened:
    """Until it is removed: calls of the model and its parts open the runtime, and they answer with its device."""

    answer = None

    def __init__(self, runtime: "StagehandRuntime") -> None:
        model = runtime.model
        self.opening = []
        runtime._unopened = self  # first: an interrupt leaves nothing that is not removed
        for part in model.modules():
            if part is model or next(part.parameters(), None) is not None:
                self.opening.append(_OpensAtCall(runtime, part))
                self.opening[-1].install()
        self.answer = Answer(model, lambda: runtime.device)

    def make_way(self) -> None:
        """The model answers and copies as under a session; calls of other threads wait for it."""
        if self.answer is not None:
            self.answer.end()
        for opening in self.opening:
            opening.make_way()

    def remove(self) -> None:
        """May be called again."""
        self.make_way()
        while self.opening:
            self.opening.pop().remove()


class StagehandRuntime(SessionRuntime):
    """Manages the blocks of one model; `stagehand.runtime(model)` gives it until shutdown.

    model: nn.Module on the host. config: StagehandConfig, None for the defaults. block_pattern: regular
    expression searched in module names. group: name of this model in log lines. dtype: floating parameters
    are cast to it; None keeps each its own. inference_mode: True promises that weights are only written inside
    `writing()`. pool: PinnedPool for file-backed weights; stays the caller's. device: as for `layer`.
    ram_budget: bytes of host memory, or a size string, in which file-backed weights are kept so that they are read once
    only; where none comes from a file, how much of the weights in RAM is pinned, the rest being staged. Beside it there
    are the staging slabs. None: nothing of files is kept, all in RAM is pinned. name: of the model in errors, where
    there are several; None: its class.

    It takes the model over at the first begin_step, managed_forward or call of the model or a part of it, or at
    prepare(); convert_registry_to_file_backed() comes before that. Several forwards inside one managed_forward() or
    between begin_step and end_step are one step; a call of the model outside is a step of its own.
    """

    def __init__(self, model: torch.nn.Module, config: StagehandConfig | None = None,
                 block_pattern: str = BLOCK_PATTERN, group: str = "transformer", dtype: torch.dtype | None = None,
                 inference_mode: bool = False, pool: PinnedPool | None = None, device: DeviceLike | None = None,
                 ram_budget: Size | None = None, name: str | None = None) -> None:
        switches(inference_mode=inference_mode)
        check("name", name, "text", none=True)
        super().__init__()
        with about_to_wrap(model):
            self.config = config if config is not None else StagehandConfig()
            self.config.validate()
            self.blocks = find_blocks(model, block_pattern)
            self.model = model
            self.group = group
            self._name = name
            self.inference_mode = inference_mode
            self.session: Session | None = None
            self._dtype = dtype
            self._pool = pool
            self._own_pool: PinnedPool | None = None
            self._device = device
            self._target: devices.Target | None = None  # once the model was managed
            self._runs_on: torch.device | None = None  # once somebody asked for it before that
            self._ram_budget = budget_bytes(ram_budget, "ram_budget")
            self._source: FileSource | None = None
            self._watch: BlockWatch | None = None
            self._telemetry: StagehandTelemetry | None = None
            self._unopened: _Unopened | None = None
            self._closed = self._ended = False  # _ended: shutdown has come to its end
            self.config.warn_without_effect(stacklevel=3)
            # First: whatever is interrupted, there is a handle to shut down.
            model.__dict__["_stagehand_runtime"] = self
            _Unopened(self)

    # ------------------------------------------------------------------ files

    def convert_registry_to_file_backed(self, source_path: Path, *, strict: bool = True, map: bool = True) -> int:
        """The blocks' frozen parameters (all of them with inference_mode=True) stream from model files from now
        on; what they held is dropped. Before the first step.

        source_path: model files as for `load`, quantised ones too. strict=False: parameters without a tensor
        stay in RAM, with a warning. map: as for `load`. Returns the number of parameters converted. Raises
        FileNotFoundError, CheckpointError, DtypeMismatchError naming parameter and file; the model is then as it was.
        """
        switches(strict=strict)
        with unseen(), self._life:
            self._may_convert()
            undo = Undo(self.model)
            try:
                self._source, bindings = stream_from_files(
                    self.model, [module for _, module, _ in targets_of(self.blocks)], source_path, self._dtype,
                    self.inference_mode, map, strict)
            except BaseException:
                undo()
                raise
            return sum(len(binding.wanted.params) for binding in bindings)

    def convert_registry_to_file_backed_sharded(self, source_dir: Path, *, strict: bool = True,
                                                map: bool = True) -> int:
        """The same for a folder with an index of shards (or a single file)."""
        if not os.path.isdir(source_dir):
            raise NotFoundError(f"{source_dir} is not a folder: give the folder of the shards", "NOT_FOUND",
                                str(source_dir))
        return self.convert_registry_to_file_backed(source_dir, strict=strict, map=map)

    def attach(self, source: FileSource) -> None:
        """Opens with a source whose parameters are bound already, as `load` makes it; takes it over."""
        with self._life:
            self._may_convert()
            self._source = source
            self.prepare()

    def _may_convert(self) -> None:
        if self._closed or self.session is not None:
            raise InvalidStateTransitionError(
                "weights can be made file-backed before the first step only: make a new runtime for it")
        if self._source is not None:
            raise InvalidStateTransitionError(
                f"the weights are file-backed already, by {self._source.checkpoint.path}: make another runtime")

    # ------------------------------------------------------------------ opening

    @uncompiled
    def prepare(self) -> Session:
        """Takes the model over now, if that has not happened. Raises StagehandOOMError when the budget is too
        small; the model is then as it was."""
        if self._closed:
            raise InvalidStateTransitionError("the runtime has been shut down; make a new one")
        session = self.session  # without the lock where it is there: a call of the model may be under way
        if session is None:
            with unseen(), self._life:
                if self._closed:
                    raise InvalidStateTransitionError("the runtime has been shut down; make a new one")
                if self.session is None:
                    self._open()
                session = self.session
        return session

    def _open(self) -> None:
        self._unopened.make_way()
        try:
            session = self._make_session()
            self._take(session)
            self._telemetry = StagehandTelemetry(session)
            self._install_guards(session)
            session.steps.before_end = self._before_end
            self._unopened.remove()
        except BaseException:  # also a warning of the guards that was made an error
            if self.session is not None:
                self.session.close()
                self.session = self._watch = None
            self._drop_own_pool()
            self._unopened.remove()
            _Unopened(self)
            raise

    def _pause(self) -> None:
        if self._watch is not None:
            self._watch.flush()
            self._watch = None
        self._telemetry.freeze()
        self.session.close()
        self._target = self.session.target
        self.session = None

    def _resume(self, dtype) -> None:
        self._dtype = dtype
        self._open()
        self._protect_again()

    def _manage(self) -> Session:
        return self.prepare()

    def _make_session(self) -> Session:
        target, budget = self._resolved()
        finding = None
        if budget is None:
            finding = Finding(target, model_bytes(self.model, self._dtype, self.config.trainables != "host"))
            budget = finding.first()
        session = Session(self.model, targets_of(self.blocks), budget=budget, target=target, dtype=self._dtype,
                          inference_mode=self.inference_mode, options=self.config.options(), source=self._source,
                          transfer=self.config.transfer, name=self._name, finding=finding,
                          trainables=self.config.trainables)
        session.options.update(self._staging(session))
        return session

    def _resolved(self) -> tuple[devices.Target, int | None]:
        """The device, and the budget that the user gave."""
        budget = self._given_budget if self._given_budget is not None else self.config.budget_bytes()
        return self._target or devices.resolve(self._device, budget), budget

    @property
    def device(self) -> torch.device:
        """The device on which the model runs, or is going to run; the simulated one is torch's "cpu"."""
        if self._runs_on is None:
            self._runs_on = self._resolved()[0].torch
        return self._runs_on

    def _staging(self, session: Session) -> dict:
        """The core's options about host memory for units that come from files."""
        sizes = [unit.nbytes for unit in session.units if unit.in_file]
        config, options = self.config, {"ram_budget": self._ram_budget or 0}
        in_ram = [unit.nbytes for unit in session.units]
        if not sizes and self._ram_budget is not None and self._ram_budget < sum(in_ram):
            sizes = in_ram  # those that are not pinned are staged
        if not sizes:
            self._warn_no_staging()
            return options
        if self._pool is not None:
            options["pool"] = self._pool._core
        elif config.pinned_slab_mb is not None:
            self._own_pool = self._make_pool()
            options["pool"] = self._own_pool._core
        elif config.was_set("pinned_pool_mb"):
            options["staging_bytes"] = min(config.pinned_pool_mb * MIB, max(STAGING_BYTES, 4 * max(sizes)))
        return options

    def _make_pool(self) -> PinnedPool:
        config = self.config
        slabs = config.pinned_pool_mb // config.pinned_slab_mb
        if not config.was_set("pinned_pool_mb"):
            slabs = min(slabs, SLABS)
        return PinnedPool(slabs * config.pinned_slab_mb, config.pinned_slab_mb, config.pinned_slab_alignment)

    def _warn_no_staging(self) -> None:
        given = [f"StagehandConfig.{name}" for name in POOL_FIELDS if self.config.was_set(name)]
        given += ["pool="] if self._pool is not None else []
        for name in given:
            warnings.warn(f"stagehand: {name} was set and has no effect: no weights stream from files",
                          RuntimeWarning, stacklevel=6)

    # ------------------------------------------------------------------ guards

    def _install_guards(self, session: Session) -> None:
        config = self.config
        asked = self._dtype is torch.bfloat16
        watched = [(name, module) for name, module in self.blocks
                   if asked or any(p.dtype is torch.bfloat16 for p in module.parameters())]
        guard = NumericGuard(config.strict_bf16, config.fail_on_dtype_promotion, config.nan_inf_check)
        switches = {"nan_inf_check": bool(watched), "strict_bf16": asked, "fail_on_dtype_promotion": asked}
        for name, works in switches.items():
            if not works and getattr(config, name) and config.was_set(name):
                warnings.warn(f"stagehand: StagehandConfig.{name} has no effect: nothing here is bfloat16"
                              + (" by dtype=" if watched else ""), RuntimeWarning, stacklevel=5)
        if not any(works and getattr(config, name) for name, works in switches.items()):
            return
        expected = torch.bfloat16 if asked else None
        self._watch = BlockWatch(session, [name for name, _ in watched], guard, expected)
        for index, (_, module) in enumerate(watched):
            wrapper = GuardedForward(session, module, self._watch, index)
            session.takeover.add(wrapper)

    def _before_end(self) -> None:
        if self._watch is not None:
            self._watch.step_ends()
        self._log_line()

    def _log_line(self) -> None:
        core = self.session.core
        number = core.stats()["steps"]
        due = number % self.config.telemetry_interval_steps == 0
        if not due or not self.config.telemetry_enabled or not log.isEnabledFor(logging.INFO):
            return
        record = core.metrics(0)
        if record is None:
            return
        log.info("[STAGEHAND %s step=%d] hit=%.1f%% stall=%.1fms evict=%d vram=%.1fG pool=%d/%d", self.group,
                 self._step if self._step is not None else number, 100 * self._telemetry.hit_rate(),
                 record["stall_time_ms"], record["evictions"], record["vram_used_mb"] / 1024,
                 record["host_pool_free"], record["host_pool_free"] + record["host_pool_in_use"])

    # ------------------------------------------------------------------ reports and the end

    def set_defer_backward_eviction(self, enabled: bool) -> None:
        """Kept for programs that call it. Weights are never evicted between two uses that the plan serves with one
        copy, in backward as in forward, so True changes nothing; False has no counterpart, and says so."""
        if not enabled:
            warnings.warn("stagehand: set_defer_backward_eviction(False) has no effect: the plan decides what stays "
                          "between forward and backward", RuntimeWarning, stacklevel=2)

    def _opened(self) -> Session:
        if self.session is None:
            raise InvalidStateTransitionError(
                "the runtime opens at its first step; call prepare() to read its numbers before that")
        return self.session

    @property
    def telemetry(self) -> StagehandTelemetry:
        """The last 100 steps; see StagehandTelemetry."""
        self._opened()
        return self._telemetry

    def shutdown(self) -> None:
        """The model is plain again, on the host; file-backed weights stay views of their files. May be called again."""
        self._may_end()
        with unseen(), self._life:
            if self._ended:
                return
            self._closed = True
            if self._unopened is not None:
                self._unopened.remove()
            if self.session is not None:
                self.session.ending = True
                self.end_step()
                if self._watch is not None:
                    self._watch.flush()
                self._telemetry.freeze()
                self.session.close()
            if self._source is not None:
                self._source.close()
            self._drop_own_pool()
            if self.model.__dict__.get(RUNTIMES[1]) is self:
                del self.model.__dict__[RUNTIMES[1]]
            self._ended = True

    def shutdown_keep_pool(self) -> PinnedPool:
        """Like shutdown; returns a PinnedPool for the next model: the one given, the one made for pinned_slab_mb,
        else a new one. A model whose weights are all in RAM needs none."""
        if self._closed:
            raise RuntimeError("stagehand: the runtime has been shut down already; make a new one")
        pool, self._own_pool = self._pool or self._own_pool, None
        largest = self.session.largest_unit() if self.session is not None else 0
        self.shutdown()
        return pool or pool_for_next(largest)

    def _drop_own_pool(self) -> None:
        if self._own_pool is not None:
            self._own_pool.shutdown()
            self._own_pool = None
