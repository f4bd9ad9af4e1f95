"""DeepSpeed's tests of its Adam on the CPU, on OffloadedAdamW."""

import deepspeed.ops
import deepspeed.ops.adam
import torch
from support import sort_out

from stagehand import OffloadedAdamW

NOT_OURS = {
    "*test_fused_adam_equal*": "compares with DeepSpeed's own kernel, which it compiles for the card",
    "TestCPUAdamSubgroup*subgroup*": "a step of a part of the parameters, with a state of its own number",
    "TestCPUAdamSubgroup*rollback*": "takes steps back",
    "TestCPUAdamGPUError*": "expects that parameters on a card are refused; here PyTorch updates them",
    "test_zenflow_adam_cross_process": "about DeepSpeed's own kernels in another process",
}


class DeepSpeedCPUAdam(OffloadedAdamW):
    def __init__(self, model_params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, weight_decay=0,
                 amsgrad=False, adamw_mode=True, fp32_optimizer_states=True):
        super().__init__(model_params, lr, betas, eps, weight_decay, master_dtype=None,
                         state_dtype=torch.float32 if fp32_optimizer_states else None)


deepspeed.ops.adam.DeepSpeedCPUAdam = DeepSpeedCPUAdam
deepspeed.ops.__compatible_ops__["cpu_adam"] = True


def pytest_collection_modifyitems(items):
    for item in items:
        if item.cls is not None:
            item.cls.is_dist_test = False  # one process, this one
    sort_out(items, NOT_OURS, {})
