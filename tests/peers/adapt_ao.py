"""torchao's tests of optimizers that are offloaded, on OffloadedAdamW. Without a card the parameters are on the CPU."""

import torch
import torchao.optim
from support import DEVICE, sort_out

from stagehand import OffloadedAdamW

NOT_OURS = {}


class CPUOffloadOptimizer(OffloadedAdamW):
    def __init__(self, params, optimizer_class=torch.optim.AdamW, *, offload_gradients=False, minimal_size=4096,
                 **kwargs):
        assert optimizer_class is torch.optim.AdamW
        super().__init__(params, **{"lr": 1e-3, "weight_decay": 1e-2, **kwargs})


torchao.optim.CPUOffloadOptimizer = CPUOffloadOptimizer


def pytest_collection_modifyitems(items):
    sort_out(items, NOT_OURS, {}, drop=("optim CPU offload requires",))
