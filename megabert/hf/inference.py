"""Inference: hidden states of chosen layers; on the CPU packed weights, and one batch a core.

A core with its own batch does not synchronise with other cores after every operation, keeps intermediate values in its cache,
and gives the same results whatever the number of cores.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from megabert.common.arguments import parse_layers
from megabert.common.streaming import in_order
from megabert.config import ModelConfig
from megabert.model import BertForPreTraining, FeedForward, Linear

J = TypeVar("J")
R = TypeVar("R")

# typical rows of a product; the packed layout is valid for any number
ROWS = 1024


def vector_width(layers: str, cfg: ModelConfig) -> int:
    """D' of `read_layers`. Raises ValueError for a layer that the model lacks."""
    return cfg.hidden * (1 if "+" in layers else len(parse_layers(layers, cfg.layers)))


def read_layers(model: BertForPreTraining, layers: str, at: Tensor | None = None, **inputs: Tensor) -> Tensor:
    """(P, D') at the flat positions `at`, without them (B * T, D'): hidden states of the layers named as by `LAYERS`.

    They are those of `BertForPreTraining.hidden_states`, so in a pre-LN model only the last one is normalised.
    """
    numbers = parse_layers(layers, len(model.layers))
    if at is not None and numbers == [len(model.layers)]:
        return model.encode(**inputs, keep=at)
    states = model.hidden_states(**inputs, count=1 + max(numbers))
    chosen = [states[number].flatten(0, 1) for number in numbers]
    hidden = torch.stack(chosen).sum(0) if "+" in layers else torch.cat(chosen, -1)
    return hidden if at is None else hidden[at]


def pack_weights(module: nn.Module) -> bool:
    """Pack the weights of a module's linear layers as oneDNN's product reads them, where it can; whether it did.

    torch's own fp32 product on the CPU is MKL's, which uses half of the vector width on processors of other makers; oneDNN uses
    all of it, and its packed weight is not rearranged at every call. To be called in eval mode, on the module's device and in
    its type: no gradients, and weights that change later are not seen.
    """
    linears = [m for m in module.modules() if isinstance(m, Linear)]
    able = bool(linears) and can_pack(linears[0].weight.device.type, linears[0].weight.dtype)
    for linear in linears if able else []:
        product = partial(_packed_linear, torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS))
        linear.matmul = product  # type: ignore[method-assign]
        if isinstance(linear, FeedForward) and not linear.gated:
            linear.forward = partial(product, bias=linear.bias, gelu=True)  # type: ignore[method-assign]
    return able


def can_pack(device: str, dtype: torch.dtype) -> bool:
    """Whether this torch packs weights of a type for a device type."""
    if device != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def _packed_linear(packed: Tensor, x: Tensor, bias: Tensor | None = None, gelu: bool = False) -> Tensor:
    """x [..., in] -> x W^T + bias [..., out], or the exact GELU of it."""
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "gelu" if gelu else "none", [], "none" if gelu else "")


def one_row(model: BertForPreTraining) -> bool:
    """Whether batches should be one row without padding: with native attention on the CPU a row as long as a batch costs no more
    than short ones."""
    return model.embeddings.word.weight.device.type == "cpu" and model.backends.attention.name == "native"


def on_every_core(compute: Callable[[J], R], jobs: Iterable[J], device: torch.device) -> Generator[R, None, None]:
    """What `compute` gives for each job, in their order: a job a core, each on one thread, or one at a time for a GPU. To be closed."""
    before = torch.get_num_threads()
    threads = before if device.type == "cpu" else 1
    try:
        with closing(in_order(compute, jobs, threads, 2 * threads, partial(torch.set_num_threads, 1))) as results:
            yield from results
    finally:
        torch.set_num_threads(before)  # torch sets a thread's number for the whole process
