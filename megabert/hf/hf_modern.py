"""A model of kind `modern` as Hugging Face's ModernBERT: rotary positions, gated feed-forward layers, and biases everywhere.

ModernBERT as published (Warner et al. 2024) has no biases and two layers in three with local attention: such a model is refused
by the field that says so. Ours attends to the whole sequence in every layer, with one base of the rotation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megabert.config import ModelConfig
from megabert.ops.rotary import THETA

TYPE, CLASS = "modernbert", "ModernBert"
_ENCODER = {"embeddings.word.weight": "model.embeddings.tok_embeddings.weight"}
HEAD = {
    "embeddings.word.bias": "decoder.bias",
    "mlm.weight": "head.dense.weight",
    "mlm.bias": "head.dense.bias",
    "mlm.norm_weight": "head.norm.weight",
    "mlm.norm_bias": "head.norm.bias",
}
DECODER = "decoder.weight"  # the word embedding's where it is tied
_LAYER = {"qkv": "attn.Wqkv", "attention_output": "attn.Wo", "feed_forward": "mlp.Wi", "feed_forward_output": "mlp.Wo"}
# Fields that must have a value for the model to be ours, and what they are without one.
FIXED: dict[str, tuple[Any, Any]] = {
    "attention_bias": (True, False),
    "mlp_bias": (True, False),
    "norm_bias": (True, False),
    "classifier_bias": (True, False),
    "decoder_bias": (True, True),
    "classifier_activation": ("gelu", "gelu"),
    "hidden_activation": ("gelu", "gelu"),
    "pad_token_id": (0, 50283),
}


def encoder_names(cfg: ModelConfig) -> dict[str, str]:
    """Our name -> theirs, of every tensor of the encoder."""
    norms = {"embeddings.norm": "model.embeddings.norm"}
    names = dict(_ENCODER)
    for i in range(cfg.layers):
        for ours, theirs in _LAYER.items():
            for kind in ("weight", "bias"):
                names[f"layers.{i}.{ours}.{kind}"] = f"model.layers.{i}.{theirs}.{kind}"
        last = i == cfg.layers - 1
        norms[f"layers.{i}.attention_output.norm"] = f"model.layers.{i}.mlp_norm"
        norms[f"layers.{i}.feed_forward_output.norm"] = (
            "model.final_norm" if last else f"model.layers.{i + 1}.attn_norm"
        )
    return names | {
        f"{ours}_{kind}": f"{theirs}.{kind}" for ours, theirs in norms.items() for kind in ("weight", "bias")
    }


def names(cfg: ModelConfig) -> dict[str, str]:
    """Our name -> theirs, of every tensor."""
    return encoder_names(cfg) | HEAD | ({} if cfg.tied else {"embeddings.word.decoder": DECODER})


def config(cfg: ModelConfig) -> dict[str, Any]:
    """The `config.json`. A sequence of theirs begins and ends as ours: no field of it but the padding is read by the model."""
    rope = {"rope_type": "default", "rope_theta": THETA}
    return {field: value for field, (value, _) in FIXED.items()} | {
        "architectures": [f"{CLASS}ForMaskedLM"],
        "model_type": TYPE,
        "dtype": "float32",
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.hidden,
        "num_hidden_layers": cfg.layers,
        "num_attention_heads": cfg.heads,
        "intermediate_size": cfg.ffn,
        "max_position_embeddings": cfg.max_positions,
        "embedding_dropout": cfg.dropout,
        "attention_dropout": cfg.attention_dropout,
        "mlp_dropout": 0.0,
        "initializer_range": cfg.init_std,
        "norm_eps": cfg.layer_norm_eps,
        "tie_word_embeddings": cfg.tied,
        "global_attn_every_n_layers": 1,  # releases before 5 read these two
        "global_rope_theta": THETA,
        "layer_types": ["full_attention"] * cfg.layers,
        "rope_parameters": {"full_attention": rope, "sliding_attention": rope},
        "bos_token_id": None,
        "eos_token_id": None,
        "cls_token_id": None,
        "sep_token_id": None,
    }


def refuse_other(tree: Mapping[str, Any], where: str) -> None:
    """Raises ValueError naming the field by which attention or positions of a `config.json` are not ours."""
    types = tree.get("layer_types") or [
        "full_attention" if tree.get("global_attn_every_n_layers", 3) == 1 else "sliding_attention"
    ]
    if set(types) != {"full_attention"}:
        raise ValueError(f"{where}: layers with local attention (layer_types) are not supported")
    said = tree.get("rope_parameters") or {}
    rope = said.get("full_attention", {}) if isinstance(said, dict) else {}
    theta = rope.get("rope_theta", tree.get("global_rope_theta", 160_000.0)) if isinstance(rope, dict) else None
    if theta != THETA or rope.get("rope_type", "default") != "default" or tree.get("rope_scaling"):
        raise ValueError(
            f"{where}: the base of the rotation is {theta!r:.40}, only {THETA:g} without scaling is supported"
        )
