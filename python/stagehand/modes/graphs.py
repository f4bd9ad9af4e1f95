"""A pass of a managed model as a CUDA graph.

    model = stagehand.layer(model, vram_budget="8GB", inference_mode=True)
    with torch.no_grad():
        step = stagehand.capture(model, x)   # example inputs
        y = step(x)                          # as model(x), from one launch

docs/graphs.md says what is in the graph, what makes it stale, and what it costs.
"""

from __future__ import annotations

import operator
import weakref

from torch.utils import _pytree

from .._torch import aside, observed, torch
from ..errors import InvalidArgumentError, InvalidStateTransitionError, StagehandError
from ..session.compiled import watches
from ..weights.wrapping import inside_of, wraps
from ..managed import RUNTIMES, check_module

WARM = 4  # passes before a capture: libraries choose kernels, the plan learns order and times
MORE = 10  # passes after which a layer that came and went is in the order again


def _session(model):
    check_module(model)
    for name in RUNTIMES:
        runtime = model.__dict__.get(name)
        if runtime is not None:
            session = runtime._opened()
            if not session.closed:
                return session
    raise StagehandError(f"{type(model).__name__} is not under stagehand: give capture() the model that layer() "
                         "returned, or that a StagehandRuntime manages, before its shutdown")


_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)  # arguments beside tensors


def _same(plain, other) -> bool:
    """Of two arguments that are no tensors. True is not 1, nor -0.0 0.0."""
    return type(plain) is type(other) and repr(plain) == repr(other)


def _tf32() -> tuple:
    """How libraries multiply float32."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    if hasattr(matmul, "fp32_precision"):  # of these versions the older names warn, or raise when both are in use
        return torch.backends.fp32_precision, matmul.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision
    return torch.get_float32_matmul_precision(), matmul.allow_tf32, cudnn.allow_tf32


def _settings(device: str) -> tuple:
    """Of this thread and of the program: what chooses kernels."""
    cast = torch.is_autocast_enabled(device)
    return cast, cast and torch.get_autocast_dtype(device), *_tf32()


class _Seen:
    """What a pass of the model depends on beside its inputs and the core's places, as far as it can be seen cheaply:
    modules and their forwards, parameters, buffers, hooks, training flags, where tensors are that do not stream, and
    settings that choose kernels. Objects are compared by identity, and held, so that none gets the identity of
    another."""

    def __init__(self, session) -> None:
        managed = session.takeover.managed_ids()
        self._device = session.target.torch.type
        self._settings = _settings(self._device)
        self._modules = [(module, *self._of(module)) for module in session.model.modules()]
        self._tensors = [tensor for *_, params, buffers in self._modules for tensor in (*params, *buffers)
                         if tensor is not None and id(tensor) not in managed]
        self._memory = self._where()

    @staticmethod
    def _of(module) -> tuple:
        """Values, and then tuples of objects."""
        kind = type(module)
        return ((module.training, *module._forward_pre_hooks, None, *module._forward_hooks),  # ids do not repeat
                (kind, getattr(kind, "forward", None), module.__dict__.get("forward"), *module._modules.values()),
                tuple(dict.values(module._parameters)), tuple(module._buffers.values()))

    def _where(self) -> list:
        """(tensor, its address) of plain tensors that do not stream, those inside others too, which have no memory."""
        return [(tensor, tensor.data_ptr()) for outer in self._tensors
                for tensor in (inside_of([outer]) if wraps(outer) else [outer])]

    def holds(self) -> bool:
        if _settings(self._device) != self._settings:
            return False
        for module, values, *objects in self._modules:
            now_values, *now = self._of(module)
            if values != now_values or not all(map(_identical, objects, now)):
                return False
        memory = self._where()
        return len(memory) == len(self._memory) and all(
            tensor is before and address == at for (tensor, address), (before, at) in zip(memory, self._memory))


def _identical(before: tuple, after: tuple) -> bool:
    return len(before) == len(after) and all(map(operator.is_, before, after))


class CapturedModel:
    """A pass of `model` that was captured; `capture` makes it. A call copies its inputs to where the graph reads them,
    launches the graph on the current stream and returns the graph's outputs: the same tensors each time, which the
    next call overwrites.

    stats: captures and replays so far; h2d_bytes and copies of each replay; read_bytes of weights that stay on the
    device; pool_bytes that torch's allocator holds for the graph beside the budget.
    """

    def __init__(self, model, args: tuple, kwargs: dict) -> None:
        if observed():
            with aside():
                return self.__init__(model, args, kwargs)
        self.model = model
        session = _session(model)
        leaves, self._spec = _pytree.tree_flatten((args, kwargs))
        for i, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor) and type(leaf) not in _PLAIN:
                raise InvalidArgumentError(
                    f"input {i} of a captured model is a {type(leaf).__name__}, which may change under the graph: give "
                    f"it tensors, and constants ({', '.join(kind.__name__ for kind in _PLAIN)}), in containers or not")
        with torch.inference_mode(False), torch.no_grad():
            self._leaves = [leaf.detach().to(session.target.torch, copy=True) if isinstance(leaf, torch.Tensor)
                            else leaf
                            for leaf in leaves]
        self._counts = {"captures": 0, "replays": 0}
        self._done = None  # an event behind the last replay
        self._stream = None  # of that replay
        self._made = None  # (graph, its outputs); other threads may release it at any moment
        self._capture(session, warm=True)

    def __call__(self, *args, **kwargs):
        if observed():
            with aside():
                return self(*args, **kwargs)
        session = _session(self.model)
        leaves = self._check_inputs(args, kwargs)
        with session.steps.pass_lock:
            made = self._made
            if made is None or self._of() is not session or not self._seen.holds():
                made = self._capture(session, warm=True)
            with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(session.target.torch):
                current = torch.cuda.current_stream(session.target.torch)
                if self._stream is not None and self._stream != current:
                    self._done.record(self._stream)  # behind what reads the last outputs there
                current.wait_event(self._done)
                for static, leaf in zip(self._leaves, leaves):
                    if isinstance(leaf, torch.Tensor) and leaf is not static:
                        static.copy_(leaf, non_blocking=True)
                if not session.captures.replay(self._info.get("edition", 0), made[0].replay):
                    made = self._capture(session, warm=False)
                    if not session.captures.replay(self._info.get("edition", 0), made[0].replay):
                        raise StagehandError(
                            f"'{session.name}': its places change while it is captured; other models take its memory "
                            "meanwhile. Keep it on the device (keep_resident()) for a graph")
                self._done.record(current)
                self._stream = current
            self._counts["replays"] += 1
            return made[1]

    @property
    def stats(self) -> dict:
        return {**self._counts, **{key: value for key, value in self._info.items() if key != "edition"}}

    def recapture(self) -> None:
        """For what cannot be seen from outside: a plain attribute that the forward reads has another value."""
        if observed():
            with aside():
                return self.recapture()
        session = _session(self.model)
        with session.steps.pass_lock:
            self._capture(session, warm=True)

    def release(self) -> None:
        """Gives the graph's memory back, when another thread's call that uses it has returned. A call captures
        again."""
        self._made = None

    def _check_inputs(self, args, kwargs) -> list:
        leaves, spec = _pytree.tree_flatten((args, kwargs))
        if spec != self._spec:
            raise InvalidArgumentError(f"the graph was captured with other arguments: {self._spec}, not {spec}")
        for i, (static, leaf) in enumerate(zip(self._leaves, leaves)):
            if isinstance(static, torch.Tensor):
                if not isinstance(leaf, torch.Tensor) or leaf.shape != static.shape or leaf.dtype != static.dtype:
                    what = type(leaf).__name__
                    if isinstance(leaf, torch.Tensor):
                        what = f"{tuple(leaf.shape)}, {leaf.dtype}"
                    raise InvalidArgumentError(
                        f"input {i} of a captured model is {tuple(static.shape)}, {static.dtype}, and was given "
                        f"{what}: capture another graph for it, or call the model itself")
                if leaf.requires_grad and torch.is_grad_enabled():
                    raise InvalidArgumentError(f"input {i} requires a gradient, and a captured model has no backward: "
                                               "call the model itself, or under torch.no_grad()")
            elif not _same(leaf, static):
                raise InvalidArgumentError(
                    f"input {i} was {static!r} when the model was captured, and is part of the graph: capture "
                    f"another graph for {leaf!r}")
        return leaves

    def _capture(self, session, warm: bool) -> tuple:
        """What there is to replay, and its outputs. warm: with passes before, after which the plan may be another."""
        with session.steps.pass_lock:  # behind passes of other threads
            session.captures.refuse_inside()
        _check(session)
        self._done = self._done or torch.cuda.Event()
        self.release()
        tries = [WARM, MORE] if warm else [0, WARM, MORE]
        for passes in tries:
            try:
                return self._try(session, passes)
            except InvalidStateTransitionError:  # the steps before this one have not shown its order
                if passes == tries[-1]:
                    raise

    def _try(self, session, passes: int) -> tuple:
        device = session.target.torch
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(device):
            args, kwargs = _pytree.tree_unflatten(self._leaves, self._spec)
            stream, current = torch.cuda.Stream(device), torch.cuda.current_stream(device)
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                for _ in range(passes):
                    self.model(*args, **kwargs)
                    stream.synchronize()  # so that times are known at once
            graph = torch.cuda.CUDAGraph()
            out, info = session.captures.capture_pass(graph, stream, lambda: self.model(*args, **kwargs))
            current.wait_stream(stream)
        pool = graph.pool()
        info["pool_bytes"] = sum(segment["total_size"] for segment in torch.cuda.memory_snapshot()
                                 if tuple(segment.get("segment_pool_id", ())) == tuple(pool))
        self._of, self._seen = weakref.ref(session), _Seen(session)
        self._made, self._info = (graph, out), info
        self._counts["captures"] += 1
        return graph, out


def _check(session) -> None:
    """StagehandError where a pass cannot be captured at all; the core refuses the rest."""
    if session.simulated:
        raise StagehandError(f"'{session.name}' is on the simulated device, which has no graphs: they need a card")
    if torch.is_grad_enabled() and any(param.requires_grad for param in session.model.parameters()):
        raise StagehandError(
            f"'{session.name}' would be captured for training, which is not possible: gradients of weights that stream "
            "go to the host, where accumulation and the optimizer run between the copies. Capture under "
            "torch.no_grad(), or freeze the model with requires_grad_(False)")
    if torch.is_autocast_enabled() and torch.is_autocast_cache_enabled():
        raise StagehandError("a graph must not hold what autocast has cached outside of it: use torch.autocast(..., "
                             "cache_enabled=False)")
    if any(watches(module.__dict__.get("forward")) for module in session.model.modules()):
        raise StagehandError(
            f"blocks of '{session.name}' are watched (nan_inf_check, strict_bf16), which the host does after each of "
            "them: turn that off to capture it")


def capture(model: torch.nn.Module, *args: object, **kwargs: object) -> CapturedModel:
    """A pass of a managed model as a CUDA graph, for inference: model(*args, **kwargs) from one launch, the copies of
    weights that stream included.

    model: under `layer` or a StagehandRuntime, with its weights in pinned RAM. args, kwargs: example inputs; their
    shapes, dtypes and all constants are part of the graph, and other objects are refused. Runs the model a few times
    first. Returns a CapturedModel. It notices what makes the graph stale (places that moved, weights with other data,
    modules added, other settings of autocast and TF32) and captures again; weights written in place are used as they
    are. With inference_mode=False and weights that require a gradient each call waits for its copies.
    Raises StagehandError with the reason where the model cannot be captured: weights that come from files or from
    memory that is not pinned, training, the simulated device.
    """
    return CapturedModel(model, args, kwargs)
