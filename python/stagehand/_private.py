"""The private names of PyTorch that the package uses, and what the absence of each one means.

A private name may go in any release. Without those in `NEEDED` nothing is right: `check` refuses a PyTorch that lacks
one, by name, when stagehand is imported. The package does without those in `OPTIONAL`; the text says how. A name is the
path from `torch`. tests/python/test_private.py compares both lists with the code, and hides each name in turn.
"""

from __future__ import annotations

import importlib

OLDEST, NEWEST = "2.4", "2.15"

NEEDED = """
    torch._C.DisableTorchFunctionSubclass
    torch._C._are_functorch_transforms_active
    torch._C._autograd._pop_saved_tensors_default_hooks
    torch._C._autograd._push_saved_tensors_default_hooks
    torch._C._current_graph_task_id
    torch._C._disabled_torch_function_impl
    torch._C._dynamo.eval_frame.set_eval_frame
    torch._C._functorch.TransformType.Grad
    torch._C._functorch.get_interpreter_stack
    torch._C._functorch.get_unwrapped
    torch._C._functorch.is_functorch_wrapped_tensor
    torch._C._get_dispatch_mode
    torch._C._get_dispatch_stack_at
    torch._C._get_tracing_state
    torch._C._len_torch_dispatch_stack
    torch._C._len_torch_function_stack
    torch._C._nn.gelu
    torch._C._pop_torch_dispatch_stack
    torch._C._pop_torch_function_stack
    torch._C._push_on_torch_dispatch_stack
    torch._C._push_on_torch_function_stack
    torch._C._set_grad_enabled
    torch._C._storage_Use_Count
    torch._C._TorchDispatchModeKey.PROXY
    torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack
    torch._neg_view
    torch._ops._get_dispatch_mode_pre_dispatch
    torch.Tensor._make_subclass
    torch.Tensor._make_wrapper_subclass
    torch.autograd.Variable._execution_engine.queue_callback
    torch.nn.Module._call_impl
    torch.nn.modules.module._global_forward_hooks
    torch.nn.modules.module._global_forward_pre_hooks
    torch.ops.aten._to_copy.default
    torch.utils._python_dispatch.TorchDispatchMode
    torch.utils._python_dispatch._disable_current_modes
    torch.utils._python_dispatch.is_traceable_wrapper_subclass
    torch.utils._pytree
    torch.utils.checkpoint._StopRecomputationError
""".split()

OPTIONAL = {
    "torch._C._autograd._get_sequence_nr": "a TorchDispatchMode sees `detach` of an operator's output at another time; "
                                           "no saved tensor is computed again in place of being spilled",
    "torch._C._autograd._saved_tensors_hooks_get_disabled_error_message": "asked where the next one is missing",
    "torch._C._autograd._saved_tensors_hooks_is_enabled": "the message above tells",
    "torch._C._autograd._top_saved_tensors_default_hooks": "_savedstack.py reads the thread's stack; where it cannot, "
                                                           "a weight that autograd saves holds its place",
    "torch._C._cuda_getCurrentRawStream": "asked on CUDA alone",
    "torch._C._cuda_memoryStats": "asked on CUDA alone",
    "torch._C._current_autograd_node": "what a backward saves counts as computed again, and is not spilled",
    "torch._C._dynamo.eval_frame.get_eval_frame_callback": "the callback is set to none and back",
    "torch._C._from_dlpack": "torch.utils.dlpack has it",
    "torch.amp.grad_scaler._MultiDeviceReplicator": "imported with stagehand.amp alone",
    "torch._dynamo.config.inline_inbuilt_nn_modules": "all graphs take a module's weights as inputs",
    "torch.Tensor._use_count": "a lease is told to last by other means",
    "torch.compiler._is_compiling_flag": "asked where torch.compiler.is_exporting is missing",
}
# Of each pair one is there: 2.7 and newer have the first, older ones the second.
EITHER = {
    "torch._C._dynamo.eval_frame.set_code_exec_strategy": "torch._C._dynamo.eval_frame.skip_code",
    "torch._C._dynamo.eval_frame._FrameAction": "torch._C._dynamo.eval_frame.skip_code",
    "torch._C._dynamo.eval_frame._FrameExecStrategy": "torch._C._dynamo.eval_frame.skip_code",
}
# Attributes of objects, none of which the package does without.
OF_OBJECTS = {
    "Module": "_parameters _buffers _modules _forward_hooks _forward_pre_hooks _non_persistent_buffers_set",
    "RNN": "_flat_weights _flat_weights_names",
    "Tensor": "_cdata _version _base _is_view _is_zerotensor _backward_hooks",
    "Storage": "_cdata",
    "Node": "_sequence_nr _saved_self _saved_approximate",
}


def find(name: str):
    """What a name stands for. Raises AttributeError or ImportError where PyTorch lacks it."""
    first, *rest = name.split(".")
    found, path = importlib.import_module(first), first
    for part in rest:
        path = f"{path}.{part}"
        try:
            found = getattr(found, part)
        except AttributeError:
            if part.startswith("_") or not hasattr(found, "__path__"):
                raise
            found = importlib.import_module(path)
    return found


def _is_there(name: str) -> bool:
    try:
        find(name)
    except (AttributeError, ImportError):
        return False
    return True


def check(version: str) -> None:
    """Raises ImportError where this PyTorch, of that version, lacks a name that is needed."""
    missing = [name for name in NEEDED if not _is_there(name)]
    missing += [name for name, older in EITHER.items() if not (_is_there(name) or _is_there(older))]
    if missing:
        raise ImportError(
            f"stagehand uses {', '.join(missing)}, which this PyTorch ({version}) does not have. Use PyTorch "
            f"{OLDEST} to {NEWEST}, which it was tried with, or a newer stagehand")
