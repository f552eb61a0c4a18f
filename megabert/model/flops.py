"""Floating-point operations of training, counted from shapes."""

from __future__ import annotations

from megabert.config import ModelConfig


def attending_pairs(squares: float, tokens: float, causal: bool) -> float:
    """How many (query, key) pairs sequences have whose lengths sum to `tokens` and their squares to `squares`."""
    return (squares + tokens) / 2 if causal else squares


def training_flops(model: ModelConfig, tokens: int, pairs: int, predictions: int, sequences: int) -> float:
    """FLOPs of forward and backward over `tokens` real tokens in `sequences`, with `pairs` of a query and a key.

    6 per weight and token for the matrix products, 12·d a layer for each pair of attending tokens, and the vocabulary
    product on predicted positions only (Kaplan et al. 2020, section 2.1, without embeddings).
    """
    d, ffn = model.hidden, model.ffn
    encoder = 6 * model.layers * (4 * d * d + 2 * d * ffn) * tokens
    attention = 12 * model.layers * d * pairs
    heads = 6 * (model.vocab_size * d + d * d) * predictions + (6 * d * d * sequences if model.nsp else 0)
    return float(encoder + attention + heads)
