"""The operations of the encoder: a file each, with two or more backends behind one function. This package imports torch alone.

A new native operation takes four places: its schema in csrc/registration.cpp, its folder under csrc/, its line in the table
of CPU kernels (csrc/cpu/kernels.h), and its file here with the function, its shapes for tracing and its gradient.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from megabert.ops.attention import attend, attention_inputs, only_queries
from megabert.ops.backend import (
    BACKENDS,
    LIBRARY,
    MISSING,
    Backend,
    Backends,
    choose,
    choose_all,
    has_kernel,
    missing_kernels,
    obstacles,
)
from megabert.ops.bias_gelu import bias_geglu, bias_gelu, bias_silu
from megabert.ops.dropout_add_layer_norm import dropout, dropout_add_layer_norm, norm
from megabert.ops.mlm_loss import mlm_logits, mlm_loss, mlm_losses
from megabert.ops.rotary import Rotation, rotate, rotation
from megabert.ops.softmax_mask import fused_softmax_mask

# Graphs of one compiled layer at most: training, evaluation and a teacher have shapes of their own, and native operations
# one for each layer's number. More than torch's 8.
GRAPHS = 128


class Ops:
    """The operations on a model's backends: each attribute is the function of that name in its file, without `backend`."""

    def __init__(self, backends: Backends) -> None:
        self.backends = backends
        attention, mlm, layer = (backend.name for backend in backends)
        self.attention_inputs = partial(attention_inputs, attention)
        self.only_queries = partial(only_queries, attention)
        self.attention = partial(attend, backend=attention)
        # Whether `attention` gives the gradient of a `bias` that was added to its input.
        self.attention_sums_bias = attention == "native"
        self.rotate = partial(rotate, backend=layer)
        self.bias_gelu = partial(bias_gelu, backend=layer)
        self.bias_geglu = partial(bias_geglu, backend=layer)
        self.bias_silu = bias_silu
        self.dropout = partial(dropout, backend=layer)
        self.dropout_add_layer_norm = partial(dropout_add_layer_norm, backend=layer)
        self.mlm_loss = partial(mlm_loss, backend=mlm)
        self.mlm_logits, self.mlm_losses = mlm_logits, mlm_losses

    def layer(self, layer: nn.Module) -> nn.Module:
        """A layer as it runs: by `ops.layer=compiled` under torch.compile, in one graph, so that what cannot be compiled is an
        error and not slow."""
        if self.backends.layer.name == "compiled":
            import torch._dynamo

            limits: Any = torch._dynamo.config
            limits.recompile_limit = max(limits.recompile_limit, GRAPHS)
            limits.specialize_float = True  # training and evaluation differ in the dropout rate
            layer.compile(fullgraph=True)
        return layer
