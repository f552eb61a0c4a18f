"""Linear layers for inference on the CPU, whose weight lies as oneDNN's product reads it.

torch's own fp32 product on the CPU is MKL's, which uses half of the vector width on processors of other makers; oneDNN uses all
of it, and its packed weight is not rearranged at every call.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROWS = 1024  # that a product has about; the layout is right for any number


def packs(device: str, dtype: torch.dtype) -> bool:
    """Whether this torch packs weights of a type for a device type."""
    if device != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def pack_weight(weight: Tensor) -> Tensor:
    """[out, in] -> an opaque tensor for `packed_linear`. Later changes of `weight` are not seen."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None, gelu: bool = False) -> Tensor:
    """x [..., in] -> x W^T + bias [..., out], or the exact GELU of it. No gradients."""
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "gelu" if gelu else "none", [], "none" if gelu else "")
