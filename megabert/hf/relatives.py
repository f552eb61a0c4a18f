"""DistilBERT, ELECTRA and NomicBERT's first files under the names of the family that their encoders are.

Sanh et al. 2019 leave out token types, whose vectors are zeros here, and the pooler. Of Clark et al. 2020 it is the generator, or the
encoder of the discriminator, where the embeddings are as wide as the layers. The files of nomic-ai/nomic-bert-2048 and its successors
are of code of their own (github.com/nomic-ai/contrastors, Nussbaum et al. 2024): fields with GPT-2's names, no biases in the head,
and rotary positions that are scaled beyond the length of training alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megabert.hf.mapping import BERT, NOMIC, Tree, read_value, refuse_others


@dataclass(frozen=True)
class Relative:
    """Parts of its tensors' names -> the family's, replaced in this order, and its fields of a config.json -> the family's."""

    names: dict[str, str]
    # Tensors that it lacks, from those under the family's names.
    zeros: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] = lambda tensors: {}
    fields: dict[str, str] = field(default_factory=dict)
    # Fields that must have a value, and their value where they are missing.
    fixed: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    # Further fields of the family, from its fields and the file's name.
    read: Callable[[Tree, str], dict[str, Any]] = lambda tree, where: {}
    family: str = "bert"
    # A field that the family's own config.json lacks.
    mark: str = "model_type"


def _zero_segments(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    words, types = (BERT.embeddings[f"embeddings.{name}"] for name in ("word.weight", "segment"))
    return {types: torch.zeros(2, tensors[words].shape[1])} if words in tensors and types not in tensors else {}


def _zero_biases(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if NOMIC.head["mlm.weight"] not in tensors:
        return {}
    tokens, width = tensors[NOMIC.embeddings["embeddings.word.weight"]].shape
    return {NOMIC.head["mlm.bias"]: torch.zeros(width), NOMIC.head["embeddings.word.bias"]: torch.zeros(tokens)}


def _read_first_nomic(tree: Tree, where: str) -> dict[str, Any]:
    usual = {"n_positions": None, "max_trained_positions": 2048}
    lengths = [read_value(tree, name, where, value, int) for name, value in usual.items()]
    positions = min((length for length in lengths if length > 0), default=0)
    if not positions:
        raise ValueError(f"{where}: {' and '.join(usual)} are {lengths}; one must be above 0")
    return {"max_position_embeddings": positions, "rope_theta": tree.get("rotary_emb_base", 10_000)}


TRANSFORM = "cls.predictions.transform"
# by the model_type of a config.json
RELATIVES = {
    "distilbert": Relative(
        {
            "distilbert.": "", "transformer.layer.": "bert.encoder.layer.",
            "attention.q_lin.": "attention.self.query.", "attention.k_lin.": "attention.self.key.",
            "attention.v_lin.": "attention.self.value.", "attention.out_lin.": "attention.output.dense.",
            "sa_layer_norm.": "attention.output.LayerNorm.", "output_layer_norm.": "output.LayerNorm.",
            "ffn.lin1.": "intermediate.dense.", "ffn.lin2.": "output.dense.",
            "vocab_transform.": f"{TRANSFORM}.dense.", "vocab_layer_norm.": f"{TRANSFORM}.LayerNorm.",
            "vocab_projector.weight": BERT.decoder, "vocab_projector.bias": BERT.head["embeddings.word.bias"],
        },
        _zero_segments,
        {
            "dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
            "hidden_dim": "intermediate_size", "activation": "hidden_act", "dropout": "hidden_dropout_prob",
            "attention_dropout": "attention_probs_dropout_prob",
        },
        # fields that its class does not read
        read=lambda tree, where: {"layer_norm_eps": 1e-12, "type_vocab_size": 2, "is_decoder": False},
    ),
    "electra": Relative(
        {
            "electra.": "", "generator_predictions.": f"{TRANSFORM}.",
            "generator_lm_head.weight": BERT.decoder, "generator_lm_head.bias": BERT.head["embeddings.word.bias"],
        },
        # 128 is the class's own default
        read=lambda tree, where: {"embedding_size": read_value(tree, "embedding_size", where, 128, int)},
    ),
    "nomic_bert": Relative(
        {"bert.": ""},
        _zero_biases,
        {
            "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
            "n_inner": "intermediate_size", "layer_norm_epsilon": "layer_norm_eps",
            "resid_pdrop": "hidden_dropout_prob", "attn_pdrop": "attention_probs_dropout_prob",
        },
        {
            "activation_function": ("swiglu", "gelu_new"),
            "rotary_emb_fraction": (1.0, 0.0),
            **dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), (False, True)),
            **dict.fromkeys(("prenorm", "parallel_block", "use_rms_norm", "causal", "rotary_emb_interleaved"), (False, False)),
            "rotary_emb_scale_base": (None, None),
        },
        _read_first_nomic,
        family="nomic_bert",
        mark="n_embd",
    ),
}  # fmt: skip


def of_config(tree: Tree) -> Relative | None:
    """The relative that a config.json is of, or None."""
    relative = RELATIVES.get(str(tree.get("model_type")))
    return relative if relative and relative.mark in tree else None


def upgrade_legacy_config(relative: Relative, tree: Tree, where: str) -> dict[str, Any]:
    """A relative's config.json as its family's. Raises ValueError naming a field whose value the family cannot have."""
    refuse_others(tree, where, relative.fixed)
    present = {relative.fields.get(name, name): value for name, value in tree.items() if name not in relative.fixed}
    return present | {"model_type": relative.family} | relative.read(tree, where)
