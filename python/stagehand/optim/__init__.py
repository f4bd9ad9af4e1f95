"""Optimizers for parameters that stay in host memory.

    opt = stagehand.optim.OffloadedAdamW(model.parameters(), lr=1e-4)

`OffloadedAdamW` is torch.optim.AdamW with its arithmetic in the library's own threads: it reads and writes each
parameter's memory once, can run while backward goes on, keeps float32 masters of low-precision weights, and
can keep its state in a file. `clip_grad_norm_` is torch.nn.utils.clip_grad_norm_ by the same threads.
"""

from __future__ import annotations

from .adamw import OffloadedAdamW, StateBytes
from .clip import clip_grad_norm_

__all__ = ["OffloadedAdamW", "StateBytes", "clip_grad_norm_"]
