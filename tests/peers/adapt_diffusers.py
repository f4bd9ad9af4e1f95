"""diffusers' tests of group offloading, on stagehand.layer: the model streams, whatever grouping is asked for.

Memory that it wants in files (`offload_to_disk_path`) is read from one file with the model's weights.
"""

import torch
from diffusers.models.modeling_utils import ModelMixin
from safetensors.torch import save_file
from support import DEVICE, shut_down, sort_out, stream

NOT_OURS = {}


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


def pytest_collection_modifyitems(items):
    sort_out(items, NOT_OURS, {}, drop=("test requires accelerator",) if DEVICE == "sim" else ())
