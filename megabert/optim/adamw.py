"""AdamW by torch's fused kernel."""

from __future__ import annotations

from typing import Any

import torch

from megabert.optim.guarded import GuardedOptimizer


class AdamW(GuardedOptimizer, torch.optim.AdamW):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019), on the CPU and on CUDA.

    Element-wise, so ZeRO's flat partitions need no special treatment.
    """

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float) -> None:
        torch.optim.AdamW.__init__(self, params, lr=lr, betas=betas, eps=eps, fused=True)

    def _update(self) -> None:
        torch.optim.AdamW.step(self)
