"""The configured optimizer over a model's parameters."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megabert.config import OptimizerConfig
from megabert.optim import apex
from megabert.optim.adamw import AdamW
from megabert.optim.guarded import parameter_groups
from megabert.optim.lamb import Lamb, StableAdamW
from megabert.optim.muon import Muon

LAYER, EMBEDDINGS = re.compile(r"\blayers\.(\d+)\."), "embeddings."  # in names of parameters
DECODER = ("embeddings.word.decoder", "embeddings.word.bias")  # in the module that also holds the word embedding


def build_optimizer(
    config: OptimizerConfig, model: nn.Module, use_apex: bool = False, dtype: torch.dtype = torch.float32
) -> Any:
    """An optimizer that is idle until `attach` is called; `use_apex`: with apex's kernels, which needs `apex.obstacle` to be "".

    `dtype`: type of Muon's matrix products.
    """
    betas = (config.beta1, config.beta2)
    groups = parameter_groups(model, config.weight_decay, build_rate_factors(config, model))
    if config.name == "muon":
        return Muon(model, groups, config.lr, betas, config.eps, dtype)
    rules: dict[str, Any] = (
        {"adamw": apex.ApexAdamW, "lamb": apex.ApexLamb}
        if use_apex
        else {"adamw": AdamW, "lamb": Lamb, "stable_adamw": StableAdamW}
    )
    return rules[config.name](groups, lr=config.lr, betas=betas, eps=config.eps)


def build_rate_factors(config: OptimizerConfig, model: nn.Module) -> Callable[[str], float]:
    """Factor of the learning rate by a parameter's name: `layer_decay` for each layer above it, with the embeddings below all layers
    (Clark et al. 2020, ELECTRA, appendix B), and `embedding_lr` for the embeddings. A tied decoder's weight is the word embedding; one
    of its own, and the decoder's bias, belong to the head."""
    depth = {name: int(match[1]) for name, _ in model.named_parameters() if (match := LAYER.search(name))}
    layers = max(depth.values(), default=-1) + 1

    def rate(name: str) -> float:
        embedding = EMBEDDINGS in name and not name.endswith(DECODER)
        above = layers if embedding else layers - 1 - depth.get(name, layers - 1)
        return config.layer_decay**above * (config.embedding_lr if embedding else 1.0)

    return rate
