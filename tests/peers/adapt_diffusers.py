"""diffusers' tests of group offloading, on stagehand.layer: the model streams, whatever grouping is asked for.

Memory that it wants in files (`offload_to_disk_path`) is read from one file with the model's weights.
"""

import importlib.util

import pytest
from diffusers.models.modeling_utils import ModelMixin
from safetensors.torch import save_file
from support import DEVICE, shut_down, sort_out, stream

NOT_OURS = {
    "*test_error_raised_if_streams_used_and_no_accelerator_device": "the simulated device has streams",
    "*test_error_raised_if_*_offloading_applied_on_*": "about diffusers' own ways of offloading beside each other",
    "*test_group_offloading*[True*": "record_stream, which streams here do not need: as [False]",
    "*test_group_offloading_with_disk*block_level*": "asks for a file for each group",
    "*antiz*": "about quantized models of other libraries",
}
# What fails, with the reason.
KNOWN = {
    "*test_group_offloading_with_layerwise_casting*": "converts modules inside a pass: refused",
}
NEEDS = {"test_models_autoencoder_rae.py": "torchvision"}  # files that cannot be imported without


def enable_group_offload(self, onload_device, offload_type="block_level", num_blocks_per_group=None,
                         offload_to_disk_path=None, **options):
    if not self._supports_group_offloading:
        raise ValueError(f"{type(self).__name__} does not support group offloading")
    shut_down(self)
    source = None
    if offload_to_disk_path is not None:
        source = f"{offload_to_disk_path}/model.safetensors"
        save_file({name: tensor.detach().clone().contiguous() for name, tensor in self.state_dict().items()}, source)
        self.requires_grad_(False)
    stream(self, source=source)


ModelMixin.enable_group_offload = enable_group_offload


def pytest_ignore_collect(collection_path):
    needed = NEEDS.get(collection_path.name)
    if needed and importlib.util.find_spec(needed) is None:
        print(f"{collection_path.name} is left out: {needed} is not installed")
        return True
    return None


@pytest.hookimpl(tryfirst=True)  # before -k leaves some out
def pytest_collection_modifyitems(items):
    sort_out(items, NOT_OURS, KNOWN, drop=("test requires a", ) if DEVICE == "sim" else ())
