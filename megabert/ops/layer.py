"""The element-wise rest of an encoder layer: bias + GELU, and bias + dropout + residual + LayerNorm."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def bias_gelu(x: Tensor, bias: Tensor, backend: str) -> Tensor:
    """Exact GELU, y = z * Phi(z) with z = x + bias (Hendrycks & Gimpel 2016). x [..., D], bias [D] -> [..., D]."""
    return F.gelu(x + bias)


def dropout_add_layer_norm(
    x: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, shift: Tensor,
    p: float, eps: float, seed: Tensor, stream: int, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """z = residual + dropout(x + bias) and LayerNorm(z) * weight + shift; returns (normed, z).

    x, residual [..., D]; bias, weight, shift [D]. seed int64 [1] and stream number the dropout mask of the native
    backend; the torch backend draws from torch's generator.
    """
    z = residual + F.dropout(x + bias, p, training=p > 0)
    return F.layer_norm(z, z.shape[-1:], weight, shift, eps), z
