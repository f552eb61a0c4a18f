"""Hugging Face's configuration of a BERT of our size."""

from __future__ import annotations

from typing import Any

from megabert.config import ModelConfig


def bert_config(size: ModelConfig) -> Any:
    """`BertConfig` of this size and dropout, with sdpa attention."""
    from transformers import BertConfig

    fields: dict[str, Any] = {
        "vocab_size": size.vocab_size,
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "intermediate_size": size.ffn,
        "max_position_embeddings": size.max_positions,
        "hidden_dropout_prob": size.dropout,
        "attention_probs_dropout_prob": size.attention_dropout,
        "attn_implementation": "sdpa",
    }
    return BertConfig(**fields)
