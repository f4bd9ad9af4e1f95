"""Gradients of streamed weights, from the device to the host masters.

A module sees a trainable master as `Upload(Gate(master))`. In backward, Upload (autograd's thread of the device)
starts the copy of the gradient into pinned host memory, behind the stream that made it, and returns a host tensor
over that memory; Gate (the thread that called backward) waits for the copy and passes the tensor on. What comes
after, AccumulateGrad, hooks, clipping, the optimizer, is on the host as usual, and `p.grad` is that tensor.

    device thread   ... Upload: start ─────────────── next layers' backward ...
    copy stream              └── copy ──┐
    calling thread                      Gate: wait ── AccumulateGrad, hooks

A gradient has a storage of its own over its block of host memory; the block goes back when that storage dies
(`zero_grad`). While `p.grad` holds one, the next gradient is copied into another, which goes back as soon as it
has been added. Other ways of travelling, all by `grad.to()`: with create_graph (differentiable), sparse gradients,
those of torch.func's transforms and of tensor subclasses, and after shutdown.
"""

from __future__ import annotations

import contextlib
import os
import threading

from .. import _core, amp
from .._torch import aside, observed, outside_transforms, raw, torch, undisturbed, view
from ..errors import StagehandError
from .units import round_up

FIRST_RESERVE = 64 << 20  # bytes of host memory taken when a weight with a gradient is first used

_functorch = getattr(torch._C, "_functorch", None)
_IS_WRAPPED = [getattr(_functorch, name) for name in ("is_functorch_wrapped_tensor", "is_legacy_batchedtensor")
               if hasattr(_functorch, name)]


class Gradients:
    """The gradients of one session.

    target: device.Target. units: all that may stream. core: the runtime, whose step records count the bytes.
    Nothing is made before the first weight with a gradient is used. Threads: any.
    """

    def __init__(self, target, units: list, core: _core.Runtime) -> None:
        self._target = target
        self._units = units
        self._core = core
        self._download: _core.Download | None = None
        self._conductor: _core.Conductor | None = None
        self._lock = threading.Lock()
        self._closed = self._scaling = False
        self.homes: dict[int, Home] = {}  # by id(entry)
        self._pid = os.getpid()
        self._seen_backward = False
        self.last_stats: dict = {}  # kept at close

    def _open(self) -> _core.Download | None:
        """The download, made if need be; None after close and in a forked child."""
        download = self._download
        if download is None and not self._closed and os.getpid() == self._pid:
            with self._lock:
                if self._download is None and not self._closed:
                    download = _core.Download(self._target.core)
                    download.set_conductor(self._conductor)
                    self._download = download
                    if not self._target.simulated:
                        amp.install()
                        self._scaling = True
                download = self._download
        return download if os.getpid() == self._pid else None

    def set_conductor(self, conductor: _core.Conductor | None) -> None:
        """Copies pass through it from now on; None: not any more."""
        with self._lock:
            self._conductor = conductor
            if self._download is not None and not self._closed:
                self._download.set_conductor(conductor)

    def expect(self) -> None:
        """A weight with a gradient is used. A model may run so without ever being trained, so that little memory is
        taken before a backward is seen."""
        if self._download is None and self._open() is not None:
            self._reserve(FIRST_RESERVE)

    def _reserve(self, most: int) -> None:
        """Memory for all gradients, `most` bytes at most, is taken in the background."""
        nbytes = sum(round_up(entry.nbytes) for unit in self._units for entry in unit.entries
                     if entry.param.requires_grad)
        if nbytes:
            with contextlib.suppress(StagehandError):  # without it the first gradients wait for memory
                self._download.reserve(min(nbytes, most))

    def start(self, grad: torch.Tensor):
        """Starts the copy of a dense strided gradient. Returns (host tensor of the same dtype, shape and strides,
        ticket), or None where the session has ended. The tensor may be read after `ticket.wait()`."""
        download = self._open()
        if download is None:
            return None
        if not self._seen_backward:
            self._seen_backward = True
            self._reserve(1 << 62)
        nbytes = grad.numel() * grad.element_size()
        try:
            capsule, ticket = download.start(grad, grad.data_ptr(), nbytes, self._target.stream())
        except StagehandError as error:
            if error.status == "SHUT_DOWN":
                return None
            raise
        return view(raw(capsule), 0, grad.dtype, grad.shape, grad.stride()), ticket

    def arrived(self, nbytes: int) -> None:
        """Counts a gradient in the step's record."""
        if not self._closed:
            with contextlib.suppress(StagehandError):  # shut down meanwhile
                self._core.count_d2h(nbytes)

    def stats(self) -> dict:
        """Counters of the download (`_core.Download.stats`); {} before the first use."""
        with self._lock:
            if self._download is None or self._closed:
                return dict(self.last_stats)
            return self._download.stats()

    def close(self) -> None:
        """Waits for copies under way; gradients that are alive keep their memory. May be called again."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._closed:
                return
            download = self._download
            if download is not None:
                self.last_stats = download.stats()
                self._download = None
                download.close()
            if self._scaling:
                self._scaling = False
                amp.remove()
            self.homes.clear()
            self._closed = True


class Home:
    """Of one weight: what its graph needs to know, and no more, since graphs keep it. strides: of a gradient that
    AccumulateGrad takes over without a copy. uses: how often it was used so far."""

    __slots__ = ("grads", "entry", "strides", "uses")

    def __init__(self, grads: Gradients, entry) -> None:
        self.grads = grads
        self.entry = entry
        self.uses = 0
        self.strides = entry.stride if _dense(entry.shape, entry.stride) else _contiguous(entry.shape)


def upload(session, entry, master: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    """`copy`, a tensor over the place of `entry`, as a differentiable function of its host master."""
    home = _home(session, entry)
    with outside_transforms():
        with _of_dtype(master, copy.dtype) if entry.is_cast else contextlib.nullcontext():
            gate = Gate.apply(master, home)
        tensor = Upload.apply(gate, copy, home)
        home.uses += 1
        _at_once(gate.grad_fn, home.uses)
        _at_once(tensor.grad_fn, home.uses)
        return tensor


def upload_of_use(session, entry, end: torch.Tensor, copy: torch.Tensor, use) -> tuple:
    """As `upload`, for a use of which autocast keeps the cast, and its gate. end: where the gradient goes. use:
    autocast.Use, if this is the first one of it."""
    home = _home(session, entry)
    gate = Gate.apply(end, home, copy.dtype, use)
    return Upload.apply(gate, copy, home, use), gate


def _home(session, entry) -> Home:
    grads = session.grads
    home = grads.homes.get(id(entry))
    if home is None:
        grads.expect()
        home = grads.homes[id(entry)] = Home(grads, entry)
        session.trained.seen(entry)
    return home


def stand_in(shape, dtype: torch.dtype) -> torch.Tensor:
    """A tensor on the host without values, of which autograd needs shape and dtype."""
    with undisturbed():
        return torch.empty((), dtype=dtype, device="cpu").expand(shape)


@contextlib.contextmanager
def _of_dtype(master: torch.Tensor, dtype: torch.dtype):
    """Inside it the master is of that dtype, without values: autograd takes gradients of that dtype for it then."""
    if master.dtype is dtype:
        yield
        return
    before = master.data
    master.data = stand_in(master.shape, dtype)
    try:
        yield
    finally:
        master.data = before


def _at_once(node, use: int) -> None:
    """Backward runs it as soon as it has its gradient, as it does AccumulateGrad: operators and hooks come in the order
    in which they come without the two nodes between. Of several uses of a weight the last one's comes first, as its
    gradient is made first: on a card gates wait together in the calling thread's queue, and sums of gradients would be
    in any order there."""
    if hasattr(node, "_set_sequence_nr"):  # else a PyTorch without
        node._set_sequence_nr(_BEHIND_ALL + use)


_BEHIND_ALL = 1 << 63  # no operator of a forward has such a number


class Gate(torch.autograd.Function):
    """The host's end: its backward waits until the gradient that Upload sent has come. dtype: of that gradient.
    use: of a weight of which autocast keeps the cast: sums of several gradients are rounded to the cast's dtype."""

    @staticmethod
    def forward(ctx, master: torch.Tensor, home: Home, dtype: torch.dtype | None = None, use=None) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.home, ctx.use = home, use
        return master.view_as(master) if dtype is None else stand_in(master.shape, dtype)

    @staticmethod
    def backward(ctx, grad):
        if observed():
            with aside():
                return Gate.backward(ctx, grad)
        ticket = getattr(grad, "_stagehand_ticket", None)
        if ticket is not None:
            try:
                ticket.wait()
            except StagehandError as error:
                raise _named(error, ctx.home.entry.name) from error
            del grad._stagehand_ticket
            ctx.home.grads.arrived(grad.numel() * grad.element_size())
        if ctx.use is not None and ctx.use.count > 1 and grad is not None:
            grad = grad.to(ctx.use.dtype).to(grad.dtype)
        return grad, None, None, None


class Upload(torch.autograd.Function):
    """The device's end: forward gives the device copy, backward sends the gradient to the host."""

    @staticmethod
    def forward(ctx, gate: torch.Tensor, copy: torch.Tensor, home: Home, use=None) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.home, ctx.use = home, use
        return torch.Tensor.detach(copy)  # of one version with it, and no view: the call may write its weight and go on

    @staticmethod
    def backward(ctx, grad):
        if grad is None:
            return None, None, None, None
        if observed():
            with aside():
                return Upload.backward(ctx, grad)
        if torch.is_grad_enabled() or not _plain(grad):
            return grad.to("cpu"), None, None, None
        home = ctx.home
        try:
            sent = home.grads.start(_laid_out(grad, home.strides))
            if sent is None:
                return grad.to("cpu"), None, None, None
            host, ticket = sent
            # Autograd reads what this function returns, on this thread: to check it, or to add another to it.
            if torch.is_anomaly_enabled() or (ctx.use is not None and ctx.use.count > 1):
                ticket.wait()
        except StagehandError as error:
            raise _named(error, home.entry.name) from error
        host._stagehand_ticket = ticket
        return host, None, None, None


def _named(error: StagehandError, name: str) -> StagehandError:
    return type(error)(f"the gradient of {name} could not be brought to the host: {error}", error.status,
                       name, error.native_code)


def _plain(grad: torch.Tensor) -> bool:
    """Whether the gradient is bytes in memory."""
    return (type(grad) is torch.Tensor and grad.layout is torch.strided and grad.numel() > 0
            and not grad.is_meta and not grad.is_quantized
            and not any(wrapped(grad) for wrapped in _IS_WRAPPED))


def _laid_out(grad: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """The gradient in memory of its own laid out as `strides` say: itself where it is. Views that are expanded,
    have gaps or another order, or are lazily conjugated are copied on the device, as AccumulateGrad would there."""
    same = all(size == 1 or a == b for size, a, b in zip(grad.shape, grad.stride(), strides))
    if same and not grad.is_conj() and not grad.is_neg():
        return grad
    return torch.empty_strided(grad.shape, strides, dtype=grad.dtype, device=grad.device).copy_(grad)


def _contiguous(shape) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _dense(shape, strides) -> bool:
    """Whether the elements fill their memory without gaps and without sharing any."""
    step = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides) if size != 1):
        if stride != step:
            return False
        step *= size
    return True
