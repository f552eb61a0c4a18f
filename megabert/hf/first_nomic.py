"""NomicBERT as it was published, under the names that transformers has given it since.

The files of nomic-ai/nomic-bert-2048 and its successors are of code of their own (github.com/nomic-ai/contrastors, Nussbaum et al.
2024): fields with GPT-2's names, no biases in the head, and rotary positions that are scaled beyond the length of training alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megabert.hf.mapping import NOMIC, read_value, refuse_others

# their first names -> the present ones
FIELDS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "layer_norm_epsilon": "layer_norm_eps",
    "resid_pdrop": "hidden_dropout_prob",
    "attn_pdrop": "attention_probs_dropout_prob",
}
# fields that must have a value, and their value where they are missing
FIXED: dict[str, tuple[Any, Any]] = {
    "activation_function": ("swiglu", "gelu_new"),
    "rotary_emb_fraction": (1.0, 0.0),
    **dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), (False, True)),
    **dict.fromkeys(("prenorm", "parallel_block", "use_rms_norm", "causal", "rotary_emb_interleaved"), (False, False)),
    "rotary_emb_scale_base": (None, None),
}
DENSE, DECODER_BIAS = "cls.predictions.transform.dense", "cls.predictions.bias"


def is_first(tree: Mapping[str, Any]) -> bool:
    """Whether a config.json is one of NomicBERT's own code."""
    return tree.get("model_type") == "nomic_bert" and "n_embd" in tree


def upgrade_legacy_config(tree: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Its fields under the present names. Raises ValueError naming a field whose value transformers' NomicBERT cannot have."""
    refuse_others(tree, where, FIXED)
    present = {FIELDS.get(name, name): value for name, value in tree.items() if name not in FIXED}
    usual = {"n_positions": None, "max_trained_positions": 2048}
    lengths = [read_value(tree, name, where, value, int) for name, value in usual.items()]
    present["max_position_embeddings"] = min(length for length in lengths if length > 0)
    return present | {"rope_theta": tree.get("rotary_emb_base", 10_000)}


def present_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Its tensors under the present names, with zeros as the head's biases."""
    present = {
        NOMIC.encoder + name.removeprefix("bert.") if name.startswith("bert.") else name: tensor
        for name, tensor in tensors.items()
    }
    if f"{DENSE}.weight" in present:
        embedding = present[NOMIC.embeddings["embeddings.word.weight"]]
        present |= {f"{DENSE}.bias": torch.zeros(embedding.shape[1]), DECODER_BIAS: torch.zeros(embedding.shape[0])}
    return present
