"""Other systems that train, or run, through offloaded weights, as they would be used on the models of training.py and
inference.py. Each function takes the model on the host, prepares it for a CUDA device, and returns the system's
version. It raises where the system is not installed or refuses the model."""

from __future__ import annotations

import os

import torch

from stagehand.bench.peers import accelerate as infer_accelerate
from stagehand.bench.peers import diffusers_leaf as infer_diffusers_leaf
from stagehand.bench.peers import offload_groups, version_of


def diffusers_leaf(model) -> str:
    """Group offloading at leaf level with a stream. The adapters stay on the device, outside of its groups: it
    would move them away between forward and backward, where their gradients could not be accumulated."""
    from diffusers.hooks import apply_group_offloading

    set_aside = []
    for module in model.modules():
        own = {key: p for key, p in module._parameters.items() if p is not None and p.requires_grad}
        if own:
            set_aside.append((module, own))
            for key in own:
                del module._parameters[key]
    try:
        apply_group_offloading(model, onload_device=torch.device("cuda"), offload_device=torch.device("cpu"),
                               offload_type="leaf_level", non_blocking=True, use_stream=True, record_stream=True)
    finally:
        for module, own in set_aside:
            for key, param in own.items():
                param.data = param.data.to("cuda")
                module.register_parameter(key, param)
    return version_of("diffusers")


def ramtorch(model, pin: bool = False) -> str:
    """Its linear layers in place of the base layers. pin: the weights are pinned first, which its own helper
    does not do with weights that are already there."""
    from ramtorch.helpers import replace_linear_with_ramtorch

    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and pin:
            module.weight.data = module.weight.data.pin_memory()
    adapters = [p for p in model.parameters() if p.requires_grad]
    replace_linear_with_ramtorch(model, device="cuda")
    for param in model.parameters():
        param.requires_grad_(False)
    for param in adapters:
        param.requires_grad_(True)
        param.data = param.data.to("cuda")
    return version_of("ramtorch")


def ramtorch_pinned(model) -> str:
    return ramtorch(model, pin=True)


PEERS = {"diffusers, leaf level, stream": diffusers_leaf, "RamTorch linear": ramtorch,
         "RamTorch linear, weights pinned": ramtorch_pinned}


# ---------------------------------------------------------------------- inference


def infer_diffusers_block(model) -> str:
    """Group offloading block by block with a stream, which takes one block at a time."""
    return offload_groups(model, "block_level", num_blocks_per_group=1)


def infer_ramtorch(model) -> str:
    from ramtorch.helpers import replace_linear_with_ramtorch

    replace_linear_with_ramtorch(model, device="cuda")
    return version_of("ramtorch")


def infer_mmgp(model) -> str:
    """With pinned memory, in full precision. Its budget is in MB, and it uses twice that: here about 3 GB."""
    from mmgp import offload

    default = torch.get_default_device()
    try:
        offload.all({"transformer": model}, pinnedMemory=True, quantizeTransformer=False, budgets={"transformer": 1500},
                    verboseLevel=0)
    finally:
        torch.set_default_device(default)
    return version_of("mmgp")


def infer_deepspeed(model) -> str:
    """ZeRO stage 3 with its parameters in pinned host memory; the model's own forward has the hooks."""
    import deepspeed

    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29417"), ("RANK", "0"), ("LOCAL_RANK", "0"),
                        ("WORLD_SIZE", "1")):
        os.environ.setdefault(name, value)
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True},
              "zero_optimization": {"stage": 3, "overlap_comm": True, "stage3_max_live_parameters": 1_500_000_000,
                                    "stage3_param_persistence_threshold": 0,
                                    "offload_param": {"device": "cpu", "pin_memory": True}}}
    deepspeed.initialize(model=model, config=config)[0].eval()
    return version_of("deepspeed")


INFERENCE = {"diffusers, leaf level, stream": infer_diffusers_leaf,
             "diffusers, block level, stream": infer_diffusers_block, "accelerate cpu_offload": infer_accelerate,
             "RamTorch": infer_ramtorch, "mmgp, pinned": infer_mmgp, "DeepSpeed ZeRO-3, offload_param": infer_deepspeed}
