"""The operations of the encoder: a file each, with two or more backends behind one function. This package imports only torch.

docs/how-to-add.md lists the files of a native operation.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from megabert.ops.attention import attend, attention_inputs, only_queries, use_kernels
from megabert.ops.backend import (
    BACKENDS,
    LIBRARY,
    MISSING,
    Backends,
    choose,
    choose_all,
    has_kernel,
    missing_kernels,
    obstacles,
)
from megabert.ops.bias_gelu import bias_geglu, bias_gelu, bias_silu
from megabert.ops.dropout_add_layer_norm import dropout, dropout_add_layer_norm, norm
from megabert.ops.embedding import embedding
from megabert.ops.mlm_loss import mlm_logits, mlm_loss, mlm_losses
from megabert.ops.rotary import Rotation, rotate, rotation
from megabert.ops.softmax_mask import fused_softmax_mask

# Most graphs of a compiled layer, above torch's 8: training, evaluation and a teacher have different shapes, and native
# operations need a graph for each layer's number.
GRAPHS = 128


class Ops:
    """The operations on a model's backends: each attribute is the function of that name in its file, without `backend`."""

    def __init__(self, backends: Backends) -> None:
        self.backends = backends
        attention, mlm, layer = (backend.name for backend in backends)
        use_kernels(attention)
        self.attention_inputs = partial(attention_inputs, attention)
        self.only_queries = partial(only_queries, attention)
        self.attention = partial(attend, backend=attention)
        # Whether `attention` computes the gradient of a `bias` that was added to its input.
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
        """The layer, with `ops.layer=compiled` under torch.compile in one graph, so that code that cannot be compiled is an error."""
        if self.backends.layer.name == "compiled":
            import torch._dynamo

            limits: Any = torch._dynamo.config
            limits.recompile_limit = max(limits.recompile_limit, GRAPHS)
            limits.specialize_float = True  # training and evaluation differ in the dropout rate
            layer.compile(fullgraph=True)
        return layer
