"""DistilBERT and ELECTRA as the BERT that their encoders are, under its names.

Sanh et al. 2019 leave out token types, whose vectors are zeros here, and the pooler. Of Clark et al. 2020 it is the generator, or the
encoder of the discriminator, where the embeddings are as wide as the layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megabert.hf.mapping import BERT, read_value


@dataclass(frozen=True)
class Relative:
    """Its fields of a config.json -> BERT's, and parts of its tensors' names -> BERT's, replaced in this order."""

    names: dict[str, str]
    fields: dict[str, str] = field(default_factory=dict)


TRANSFORM = "cls.predictions.transform"
RELATIVES = {
    "distilbert": Relative(
        {
            "distilbert.": "",
            "transformer.layer.": "bert.encoder.layer.",
            **{f"attention.{theirs}_lin.": f"attention.self.{ours}." for theirs, ours in zip("qkv", ("query", "key", "value"), strict=True)},
            "attention.out_lin.": "attention.output.dense.",
            "sa_layer_norm.": "attention.output.LayerNorm.",
            "ffn.lin1.": "intermediate.dense.",
            "ffn.lin2.": "output.dense.",
            "output_layer_norm.": "output.LayerNorm.",
            "vocab_transform.": f"{TRANSFORM}.dense.",
            "vocab_layer_norm.": f"{TRANSFORM}.LayerNorm.",
            "vocab_projector.weight": BERT.decoder,
            "vocab_projector.bias": BERT.head["embeddings.word.bias"],
        },
        {
            "dim": "hidden_size",
            "n_layers": "num_hidden_layers",
            "n_heads": "num_attention_heads",
            "hidden_dim": "intermediate_size",
            "activation": "hidden_act",
            "dropout": "hidden_dropout_prob",
            "attention_dropout": "attention_probs_dropout_prob",
        },
    ),
    "electra": Relative(
        {
            "electra.": "",
            "generator_predictions.": f"{TRANSFORM}.",
            "generator_lm_head.weight": BERT.decoder,
            "generator_lm_head.bias": BERT.head["embeddings.word.bias"],
        }
    ),
}  # fmt: skip


def of_config(tree: Mapping[str, Any]) -> Relative | None:
    """The relative of BERT that a config.json is of, or None."""
    return RELATIVES.get(str(tree.get("model_type")))


def upgrade_legacy_config(relative: Relative, tree: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A relative's config.json as BERT's. Raises ValueError for embeddings of another width than the layers."""
    present = {relative.fields.get(name, name): value for name, value in tree.items()} | {"model_type": "bert"}
    if tree["model_type"] == "electra":  # 128 is the class's own default
        present["embedding_size"] = read_value(tree, "embedding_size", where, 128, int)
    return present


def present_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A relative's tensors, under BERT's names, with zeros for the token types that DistilBERT lacks."""
    words, types = (BERT.embeddings[f"embeddings.{name}"] for name in ("word.weight", "segment"))
    missing = {types: torch.zeros(2, tensors[words].shape[1])} if words in tensors and types not in tensors else {}
    return dict(tensors) | missing
