"""The operations of the encoder, each behind one function with a `backend` argument; this package imports torch alone."""

from megabert.ops.attention import attend, attention_inputs, only_queries
from megabert.ops.backend import BACKENDS, LIBRARY, MISSING, Backends, Choice, choose, has_kernel, obstacles
from megabert.ops.layer import bias_geglu, bias_gelu, dropout, dropout_add_layer_norm
from megabert.ops.mlm_loss import mlm_logits, mlm_loss, mlm_loss_of_logits
from megabert.ops.packed import pack_weight, packed_linear, packs
from megabert.ops.rotary import Rotation, rotate, rotation
from megabert.ops.softmax_mask import fused_softmax_mask

__all__ = [
    "BACKENDS",
    "LIBRARY",
    "MISSING",
    "Backends",
    "Choice",
    "Rotation",
    "attend",
    "attention_inputs",
    "bias_geglu",
    "bias_gelu",
    "choose",
    "dropout",
    "dropout_add_layer_norm",
    "fused_softmax_mask",
    "has_kernel",
    "mlm_logits",
    "mlm_loss",
    "mlm_loss_of_logits",
    "obstacles",
    "only_queries",
    "pack_weight",
    "packed_linear",
    "packs",
    "rotate",
    "rotation",
]
