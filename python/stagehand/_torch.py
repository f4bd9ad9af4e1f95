"""The one place that imports torch: checks its version, and turns capsules of the core into tensors."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings

from . import _core

try:
    import torch
except ImportError as error:
    raise ImportError(
        "stagehand needs PyTorch 2.4 or newer. Install the build that fits your GPU (see pytorch.org); "
        "stagehand does not pull one in, so that it never replaces yours."
    ) from error

_VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
if _VERSION < (2, 4):
    raise ImportError(f"stagehand needs PyTorch 2.4 or newer; this is {torch.__version__}")

from . import _private  # noqa: E402

_private.check(torch.__version__)

from torch.utils.dlpack import from_dlpack as _from_dlpack  # noqa: E402

# raw(capsule): the tensor behind a capsule of the core, 1-D uint8 unless it was asked for otherwise, on the
# capsule's device. Its storage owns the bytes: they are given back when the last view of it dies.
raw = getattr(torch._C, "_from_dlpack", _from_dlpack)


# The kind of a module's `_parameters` and `_buffers`: an OrderedDict before 2.5.
MEMBERS = type(torch.nn.Module()._parameters)

# How many tensors share a storage, by its `_cdata`; None: a PyTorch that does not tell.
STORAGE_USES = getattr(torch._C, "_storage_Use_Count", None) if hasattr(torch.Tensor, "_use_count") else None


# The calling thread's pairs of hooks for tensors that autograd saves. top_hooks(True): the pair in force, or None;
# itself None: a PyTorch that does not tell. hooks_enabled(): whether pairs may be pushed.
_graph = torch._C._autograd
push_hooks, pop_hooks = _graph._push_saved_tensors_default_hooks, _graph._pop_saved_tensors_default_hooks
top_hooks = getattr(_graph, "_top_saved_tensors_default_hooks", None) or _core.find_top_hooks(push_hooks, pop_hooks)
hooks_enabled = getattr(_graph, "_saved_tensors_hooks_is_enabled",
                        lambda: _graph._saved_tensors_hooks_get_disabled_error_message() is None)


def view(base: torch.Tensor, offset: int, dtype: torch.dtype, shape, stride) -> torch.Tensor:
    """A tensor over `base` (from `raw`) that begins `offset` bytes in, a multiple of the item size. It
    shares the storage but has a version counter of its own, and is no value of torch.func's transforms."""
    if transforming():
        with outside_transforms():
            return view(base, offset, dtype, shape, stride)
    out = torch.empty(0, dtype=dtype, device=base.device)
    return out.set_(base.untyped_storage(), offset // dtype.itemsize, shape, stride)


# ---------------------------------------------------------------------- torch.func's transforms

# transforming(): whether this thread is inside a function that one of torch.func's transforms (vmap, grad, jvp) has
# under way. Not by looking at the stack of transforms: that makes one for the thread, which autograd copies three times
# for each node of each backward from then on.
transforming = torch._C._are_functorch_transforms_active


def differentiating() -> bool:
    """As `transforming`, of those that run backward (grad, vjp, jacrev)."""
    stack = torch._C._functorch.get_interpreter_stack() if transforming() else ()
    return any(level.key() == torch._C._functorch.TransformType.Grad for level in stack)


def outside_transforms():
    """A context without them: what is made inside is none of their values, as Parameters are none. Nothing where there
    are none."""
    if not transforming():
        return _NOTHING
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def transformed(tensor: torch.Tensor) -> bool:
    """Whether it is a value of a transform, which stands for another tensor."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def behind_transforms(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that a value of transforms stands for, itself where it is none. Of a batch that is all of it."""
    while transformed(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def tracing_fx() -> bool:
    """Whether make_fx is making a graph of what this thread does, before operators are dispatched or after."""
    if torch.compiler.is_dynamo_compiling() or "torch.fx.experimental.proxy_tensor" not in sys.modules:
        return False  # in the first case not in code that runs: the compiler of 2.4 takes none of what is below
    mode = torch._C._TorchDispatchModeKey.PROXY
    return (torch._C._get_dispatch_mode(mode) or torch._ops._get_dispatch_mode_pre_dispatch(mode)) is not None


# ---------------------------------------------------------------------- modes of the caller's

_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_core.know_modes((_dispatch_modes, torch._C._pop_torch_dispatch_stack, torch._C._push_on_torch_dispatch_stack),
                 (_function_modes, torch._C._pop_torch_function_stack, torch._C._push_on_torch_function_stack))
_NOTHING = contextlib.nullcontext()
aside = _core.Aside  # aside(): a context in which no mode of the caller's sees anything


def observed() -> bool:
    """Whether a mode of the caller's sees the work of this thread: a TorchDispatchMode or a TorchFunctionMode, as
    torch.set_default_device() sets one. No operator of ours is for it: where code of ours is entered, it begins with

        if observed():
            with aside():
                return self.function(argument)
    """
    return _dispatch_modes() > 0 or _function_modes() > 0


def unseen():
    """`aside()`, or a context that does nothing where no mode would see anything."""
    return aside() if observed() else _NOTHING


def apart_from_caller(function):
    """The function, which runs outside of the caller's modes and transforms: for work of ours in the middle of a
    caller's."""

    @functools.wraps(function)
    def outside(*args, **kwargs):
        if observed():
            with aside():
                return outside(*args, **kwargs)
        if not transforming():
            return function(*args, **kwargs)
        with outside_transforms():
            return function(*args, **kwargs)

    return outside


def functions_are_seen() -> bool:
    """Whether a TorchFunctionMode of the caller's is active, which sees attributes that are read, too."""
    return _function_modes() > 0


@contextlib.contextmanager
def quietly_without_gradients():
    """torch.no_grad() that no mode of the caller's sees, while what runs inside is seen."""
    before = torch.is_grad_enabled()
    with unseen():
        torch._C._set_grad_enabled(False)
    try:
        yield
    finally:
        with unseen():
            torch._C._set_grad_enabled(before)


@contextlib.contextmanager
def undisturbed():
    """A context without the caller's modes and transforms, for tensors that outlive a call: they are no inference
    tensors, no graph records them, and no mode sees or replaces the operators that make them."""
    with outside_transforms(), unseen(), torch.inference_mode(False), torch.no_grad():
        yield


def _uses_of_one() -> int:
    """What STORAGE_USES says where one tensor has the storage. Python's object for it may count as well."""
    tensor = torch.empty(1, device="cpu")
    return STORAGE_USES(tensor.untyped_storage()._cdata) if STORAGE_USES is not None else 0


with undisturbed():
    USES_OF_ONE = _uses_of_one()
    VIEW_VERSION = view(torch.zeros(8, dtype=torch.uint8, device="cpu"), 0, torch.uint8, (8,), (1,))._version


def span_bytes(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to behind its last in memory."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return (last + 1) * tensor.element_size()


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are one: same memory, seen in the same way."""
    return (
        a.data_ptr() == b.data_ptr()
        and a.dtype == b.dtype
        and a.shape == b.shape
        and a.stride() == b.stride()
    )


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two plain tensors have the same bytes, NaN included. They may be on two devices."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    if a.device != b.device:
        a, b = a.cpu(), b.cpu()
    with torch.no_grad():
        a, b = (tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b))
        return torch.equal(a, b)


_frames = torch._C._dynamo.eval_frame


def not_to_be_compiled(function, nor_what_it_calls: bool = False) -> None:
    """Calls of `function` are not traced by torch.compile; as torch._dynamo does it, without importing that. Before 2.7
    what it calls may be: the same results, later."""
    if hasattr(_frames, "set_code_exec_strategy"):
        skip, as_ever = _frames._FrameAction.SKIP, _frames._FrameAction.DEFAULT
        strategy = _frames._FrameExecStrategy(skip, skip if nor_what_it_calls else as_ever)
        _frames.set_code_exec_strategy(function.__code__, strategy)
    else:
        _frames.skip_code(function.__code__)


def uncompiled(function):
    """The function, which is not traced by torch.compile, nor is anything that it calls. Before 2.7 the compiler is
    taken from the thread meanwhile."""
    if hasattr(_frames, "set_code_exec_strategy"):
        not_to_be_compiled(function, nor_what_it_calls=True)
        return function

    @functools.wraps(function)
    def outside(*args, **kwargs):
        before = _frames.set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            _frames.set_eval_frame(before)

    not_to_be_compiled(outside)
    return outside


def _compiler():
    callback = _frames.set_eval_frame(None)  # returns the one before
    _frames.set_eval_frame(callback)
    return callback


# compiler(): not None while the calling thread's code is to be compiled. PyTorch 2.6 and 2.7 have the function too, but
# it returns a reference that is not the caller's to drop.
compiler = getattr(_frames, "get_eval_frame_callback", _compiler) if _VERSION >= (2, 8) else _compiler
not_to_be_compiled(_compiler)


def _exporting() -> bool:
    met = getattr(compiler(), "_torchdynamo_orig_callable", None)
    return torch.compiler._is_compiling_flag or getattr(met, "_export", False)


# exporting(): whether torch.export has a model's pass under way.
exporting = getattr(torch.compiler, "is_exporting", _exporting)
not_to_be_compiled(_exporting)


def graphs_keep_weights() -> bool:
    """Whether torch.compile makes a module's Parameters constants of its graphs: PyTorch 2.4 does (told not to, it
    breaks checkpointing), and others do that were told to."""
    if _VERSION < (2, 5):
        return True
    from torch._dynamo import config

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # later ones say that the setting has no effect
        return not getattr(config, "inline_inbuilt_nn_modules", True)
