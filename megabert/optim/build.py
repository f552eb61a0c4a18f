"""The configured optimizer over a model's parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megabert.config import OptimizerConfig
from megabert.optim import apex
from megabert.optim.adamw import AdamW
from megabert.optim.guarded import parameter_groups
from megabert.optim.lamb import Lamb, StableAdamW
from megabert.optim.muon import Muon


def build_optimizer(
    config: OptimizerConfig, model: nn.Module, use_apex: bool = False, dtype: torch.dtype = torch.float32
) -> Any:
    """An optimizer that does nothing until `attach` is called; `use_apex`: by apex's kernels, where `apex.obstacle` is "".

    `dtype`: of Muon's matrix products.
    """
    betas = (config.beta1, config.beta2)
    if config.name == "muon":
        return Muon(model, config.lr, betas, config.eps, config.weight_decay, dtype)
    rules: dict[str, Any] = (
        {"adamw": apex.ApexAdamW, "lamb": apex.ApexLamb}
        if use_apex
        else {"adamw": AdamW, "lamb": Lamb, "stable_adamw": StableAdamW}
    )
    groups = parameter_groups(model, config.weight_decay)
    return rules[config.name](groups, lr=config.lr, betas=betas, eps=config.eps)
