"""accelerate's tests of big models, on stagehand: `cpu_offload`, `disk_offload`, `dispatch_model` and
`load_checkpoint_and_dispatch` stream the model, `remove_hook_from_submodules` ends that.

Where parts of a model lie is stagehand's to decide: device maps are not read.
"""

import accelerate
import accelerate.big_modeling
import accelerate.hooks
import accelerate.test_utils
import torch
from safetensors.torch import save_file
from support import DEVICE, shut_down, sort_out, stream

NOT_OURS = {
    "*gpt2*": "fetches a model",
    "*init_empty_weights*": "about making models on the meta device",
    "*init_on_device*": "about making models on a device",
    "*multi_device*": "about several devices",
    "*move_model_warning": "about several devices",
    "*tied_weights_memory*": "measures a card's memory by device map",
    "*bnb*": "about bitsandbytes",
    "*int8_simple*": "about bitsandbytes",
    "*fp4_simple*": "about bitsandbytes",
    "*test_cpu_offload_with_hook": "hooks that move whole models by hand",
    "*test_dispatch_model_force_hooks": "asks for accelerate's own hook object",
    "*test_dispatch_model_copy": "copies of a dispatched model share its device map",
    "*test_dispatch_model_move_offloaded_model": "expects that moving is refused",
    "*test_dispatch_model_with_non_persistent_buffers": "a model of buffers alone, of which nothing streams",
    "*test_load_checkpoint_and_dispatch": "asks for weights on the meta device",
    "*test_load_checkpoint_and_dispatch_with_unused_submodules": "asks for weights on the meta device",
}
KNOWN = {}


ROOM = 1 << 20  # for modules that run as a whole (preload_module_classes): more than any model of these tests has


def _stream(model, *args, preload_module_classes=None, **kwargs):
    shut_down(model)
    stream(model, ROOM if preload_module_classes else 1)
    return model


def disk_offload(model, offload_dir, *args, preload_module_classes=None, **kwargs):
    shut_down(model)
    path = f"{offload_dir}/model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, path)
    model.requires_grad_(False)
    stream(model, ROOM if preload_module_classes else 1, source=path)
    return model


def load_checkpoint_and_dispatch(model, checkpoint, *args, **kwargs):
    shut_down(model)
    model.load_state_dict(torch.load(checkpoint, weights_only=True))
    return _stream(model, **kwargs)


def remove_hook_from_submodules(model):
    shut_down(model)


for _module in (accelerate, accelerate.big_modeling):
    for _name, _function in (("cpu_offload", _stream), ("dispatch_model", _stream), ("disk_offload", disk_offload),
                             ("load_checkpoint_and_dispatch", load_checkpoint_and_dispatch)):
        setattr(_module, _name, _function)
accelerate.hooks.remove_hook_from_submodules = remove_hook_from_submodules
if DEVICE == "sim":
    accelerate.test_utils.require_non_cpu = lambda test: test  # the simulated device stands in


def pytest_collection_modifyitems(items):
    sort_out(items, NOT_OURS, KNOWN)
