"""The weights are the same numbers under two sets of names: ours and Hugging Face's BertForPreTraining.

Mapping there and back is bit-equal. Ours stacks queries, keys and values, pads the vocabulary to a multiple of 128 with
zeros, and names a norm after the branch that ends in it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from megabert.config import ModelConfig

_TOP = {
    "embeddings.word.weight": "bert.embeddings.word_embeddings.weight",
    "embeddings.word.bias": "cls.predictions.bias",
    "embeddings.position": "bert.embeddings.position_embeddings.weight",
    "embeddings.segment": "bert.embeddings.token_type_embeddings.weight",
    "embeddings.norm_weight": "bert.embeddings.LayerNorm.weight",
    "embeddings.norm_bias": "bert.embeddings.LayerNorm.bias",
    "mlm.weight": "cls.predictions.transform.dense.weight",
    "mlm.bias": "cls.predictions.transform.dense.bias",
    "mlm.norm_weight": "cls.predictions.transform.LayerNorm.weight",
    "mlm.norm_bias": "cls.predictions.transform.LayerNorm.bias",
}
_NSP = {
    "pooler.weight": "bert.pooler.dense.weight",
    "pooler.bias": "bert.pooler.dense.bias",
    "nsp.weight": "cls.seq_relationship.weight",
    "nsp.bias": "cls.seq_relationship.bias",
}
_LAYER = {
    "attention_output.weight": "attention.output.dense.weight",
    "attention_output.bias": "attention.output.dense.bias",
    "attention_output.norm_weight": "attention.output.LayerNorm.weight",
    "attention_output.norm_bias": "attention.output.LayerNorm.bias",
    "feed_forward.weight": "intermediate.dense.weight",
    "feed_forward.bias": "intermediate.dense.bias",
    "feed_forward_output.weight": "output.dense.weight",
    "feed_forward_output.bias": "output.dense.bias",
    "feed_forward_output.norm_weight": "output.LayerNorm.weight",
    "feed_forward_output.norm_bias": "output.LayerNorm.bias",
}
_OPTIONAL = {  # copies and buffers that some Hugging Face versions save beside the weights
    "bert.embeddings.position_ids",
    "cls.predictions.decoder.weight",
    "cls.predictions.decoder.bias",
}
_PADDED = ("embeddings.word.weight", "embeddings.word.bias")


def _names(cfg: ModelConfig) -> dict[str, str]:
    names = dict(_TOP) | (_NSP if cfg.nsp else {})
    for i in range(cfg.layers):
        names |= {f"layers.{i}.{ours}": f"bert.encoder.layer.{i}.{theirs}" for ours, theirs in _LAYER.items()}
    return names


def _qkv(layer: int, kind: str) -> tuple[str, list[str]]:
    parts = [f"bert.encoder.layer.{layer}.attention.self.{part}.{kind}" for part in ("query", "key", "value")]
    return f"layers.{layer}.qkv.{kind}", parts


def to_huggingface(state: Mapping[str, Tensor], cfg: ModelConfig) -> dict[str, Tensor]:
    """Our state dict as Hugging Face BertForPreTraining's (without pooler and NSP: BertForMaskedLM's).

    Raises ValueError naming a tensor that is missing or left over, and for a pre-LN model, which BertModel cannot express.
    """
    if cfg.norm != "post":
        raise ValueError("model.norm=pre: Hugging Face's BERT is post-LN only")
    left = dict(state)
    result: dict[str, Tensor] = {}
    for ours, theirs in _names(cfg).items():
        tensor = _take(left, ours)
        result[theirs] = tensor[: cfg.vocab_size].clone() if ours in _PADDED else tensor
    for layer in range(cfg.layers):
        for kind in ("weight", "bias"):
            ours, parts = _qkv(layer, kind)
            for part, piece in zip(parts, _take(left, ours).chunk(3), strict=True):
                result[part] = piece.clone()
    _refuse_left(left)
    result["cls.predictions.decoder.weight"] = result["bert.embeddings.word_embeddings.weight"]
    result["cls.predictions.decoder.bias"] = result["cls.predictions.bias"]
    return result


def from_huggingface(state: Mapping[str, Tensor], cfg: ModelConfig) -> dict[str, Tensor]:
    """Hugging Face BertForPreTraining's or BertForMaskedLM's state dict as ours; for the latter cfg.nsp is False.

    Raises ValueError naming a tensor that is missing, left over, or of another shape than cfg says.
    """
    left = {k: v for k, v in state.items() if k not in _OPTIONAL}
    if not cfg.nsp:
        left = {k: v for k, v in left.items() if k not in _NSP.values()}
    result: dict[str, Tensor] = {}
    for ours, theirs in _names(cfg).items():
        tensor = _take(left, theirs)
        if ours in _PADDED:
            if len(tensor) != cfg.vocab_size:
                raise ValueError(f"{theirs}: {len(tensor)} entries, but model.vocab_size={cfg.vocab_size}")
            padding = [0, 0] * (tensor.dim() - 1) + [0, cfg.padded_vocab - cfg.vocab_size]
            tensor = F.pad(tensor, padding)
        result[ours] = tensor
    for layer in range(cfg.layers):
        for kind in ("weight", "bias"):
            ours, parts = _qkv(layer, kind)
            result[ours] = torch.cat([_take(left, part) for part in parts])
    _refuse_left(left)
    return result


def _take(state: dict[str, Tensor], name: str) -> Tensor:
    if name not in state:
        raise ValueError(f"weights: no tensor named {name}; check that the configuration fits the weights")
    return state.pop(name)


def _refuse_left(state: Mapping[str, Tensor]) -> None:
    if state:
        raise ValueError(
            f"weights: unexpected tensor {min(state)}; check that the configuration fits the weights"
        )
