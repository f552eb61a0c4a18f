"""Names of Hugging Face: its state dicts and configs as ours, and ours as its.

Mapping there and back is bit-equal. A post-LN model is Hugging Face's BERT. A pre-LN model is its MegatronBERT: the same
parameters with the norms before the blocks and none on the embeddings (RoBERTa-PreLayerNorm normalises the embeddings too,
so it is another function). A modern model is its ModernBERT with biases and global attention in every layer; ModernBERT as
published (Warner et al. 2024) has no biases and two layers in three with local attention, and is refused by the field that
shows it. Ours stacks queries, keys and values, pads the vocabulary to a multiple of 128 with zeros, and names a norm after
the block that ends in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megabert import config as configuration
from megabert.config import ModelConfig
from megabert.ops.rotary import THETA

# model types and class prefixes of kind `bert`, by place of the norm; of kind `modern`
TYPES = {"post": "bert", "pre": "megatron-bert"}
CLASSES = {"post": "Bert", "pre": "MegatronBert"}
MODERN_TYPE, MODERN_CLASS = "modernbert", "ModernBert"
# classes of causal models, whose weights are those of ForMaskedLM
CAUSAL = {"post": "BertLMHeadModel", "pre": "MegatronBertForCausalLM"}

# Our name -> theirs, of the parameters outside layers and norms. Where ours stacks several of theirs they are a tuple.
EMBEDDINGS = {
    "embeddings.word.weight": "bert.embeddings.word_embeddings.weight",
    "embeddings.position": "bert.embeddings.position_embeddings.weight",
    "embeddings.segment": "bert.embeddings.token_type_embeddings.weight",
}
MLM = {
    "embeddings.word.bias": "cls.predictions.bias",
    "mlm.weight": "cls.predictions.transform.dense.weight",
    "mlm.bias": "cls.predictions.transform.dense.bias",
    "mlm.norm_weight": "cls.predictions.transform.LayerNorm.weight",
    "mlm.norm_bias": "cls.predictions.transform.LayerNorm.bias",
}
NSP = {
    "pooler.weight": "bert.pooler.dense.weight",
    "pooler.bias": "bert.pooler.dense.bias",
    "nsp.weight": "cls.seq_relationship.weight",
    "nsp.bias": "cls.seq_relationship.bias",
}
# of a layer, without `.weight` and `.bias`
LAYER: dict[str, tuple[str, ...]] = {
    "qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attention_output": ("attention.output.dense",),
    "feed_forward": ("intermediate.dense",),
    "feed_forward_output": ("output.dense",),
}
MODERN_EMBEDDINGS = {"embeddings.word.weight": "model.embeddings.tok_embeddings.weight"}
MODERN_HEAD = {
    "embeddings.word.bias": "decoder.bias",
    "mlm.weight": "head.dense.weight",
    "mlm.bias": "head.dense.bias",
    "mlm.norm_weight": "head.norm.weight",
    "mlm.norm_bias": "head.norm.bias",
}
MODERN_LAYER: dict[str, tuple[str, ...]] = {
    "qkv": ("attn.Wqkv",),
    "attention_output": ("attn.Wo",),
    "feed_forward": ("mlp.Wi",),
    "feed_forward_output": ("mlp.Wo",),
}
# decoder weights, which are the word embedding where they are tied
DECODER, MODERN_DECODER = "cls.predictions.decoder.weight", "decoder.weight"
DECODER_BIAS = "cls.predictions.decoder.bias"
# buffers that some versions save beside the weights
BUFFERS = ("bert.embeddings.position_ids", "bert.embeddings.token_type_ids")
_PADDED = ("embeddings.word.weight", "embeddings.word.bias", "embeddings.word.decoder")
# fields of a config.json that must have a value for the model to be ours, and their value where they are missing
FIXED: dict[str, tuple[Any, Any]] = {
    "hidden_act": ("gelu", "gelu"),
    "position_embedding_type": ("absolute", "absolute"),
    "type_vocab_size": (2, 2),
    "add_cross_attention": (False, False),
    "pad_token_id": (0, 0),
}
MODERN_FIXED: dict[str, tuple[Any, Any]] = {
    "attention_bias": (True, False),
    "mlp_bias": (True, False),
    "norm_bias": (True, False),
    "classifier_bias": (True, False),
    "decoder_bias": (True, True),
    "classifier_activation": ("gelu", "gelu"),
    "hidden_activation": ("gelu", "gelu"),
    "pad_token_id": (0, 50283),
}
# our field -> theirs, and its value where it is missing; without one it is a count that must be there
FIELDS: dict[str, tuple[str, float | None]] = {
    "hidden": ("hidden_size", None),
    "layers": ("num_hidden_layers", None),
    "heads": ("num_attention_heads", None),
    "intermediate": ("intermediate_size", None),
    "vocab_size": ("vocab_size", None),
    "max_positions": ("max_position_embeddings", None),
    "init_std": ("initializer_range", 0.02),
}
BERT_FIELDS: dict[str, tuple[str, float | None]] = FIELDS | {
    "dropout": ("hidden_dropout_prob", 0.1),
    "attention_dropout": ("attention_probs_dropout_prob", 0.1),
    "layer_norm_eps": ("layer_norm_eps", 1e-12),
}
MODERN_FIELDS: dict[str, tuple[str, float | None]] = FIELDS | {
    "dropout": ("embedding_dropout", 0.0),
    "attention_dropout": ("attention_dropout", 0.0),
    "layer_norm_eps": ("norm_eps", 1e-5),
}


def class_of(cfg: ModelConfig) -> str:
    """The prefix of the names of a model's classes."""
    return MODERN_CLASS if cfg.modern else CLASSES[cfg.norm]


def prefix_of(cfg: ModelConfig) -> str:
    """The prefix of the encoder's tensors in a class that has heads."""
    return "model." if cfg.modern else "bert."


def word_tensors(cfg: ModelConfig) -> tuple[str, str]:
    """Their names of the word embedding and of the decoder's weights."""
    return (MODERN_EMBEDDINGS if cfg.modern else EMBEDDINGS)["embeddings.word.weight"], (
        MODERN_DECODER if cfg.modern else DECODER
    )


def _norms(cfg: ModelConfig) -> dict[str, str]:
    """Our norms without `_weight` and `_bias`, and theirs without `.weight` and `.bias`."""
    layers = range(cfg.layers)
    if cfg.modern:
        first = "model.embeddings.norm"
        middle = [f"model.layers.{i}.mlp_norm" for i in layers]
        last = [f"model.layers.{i}.attn_norm" for i in layers[1:]] + ["model.final_norm"]
    elif cfg.norm == "post":
        first = "bert.embeddings.LayerNorm"
        middle = [f"bert.encoder.layer.{i}.attention.output.LayerNorm" for i in layers]
        last = [f"bert.encoder.layer.{i}.output.LayerNorm" for i in layers]
    else:
        first, *last = [f"bert.encoder.layer.{i}.attention.ln" for i in layers] + ["bert.encoder.ln"]
        middle = [f"bert.encoder.layer.{i}.ln" for i in layers]
    names = {"embeddings.norm": first}
    for i in layers:
        names[f"layers.{i}.attention_output.norm"] = middle[i]
        names[f"layers.{i}.feed_forward_output.norm"] = last[i]
    return names


def names(cfg: ModelConfig, heads: bool = True) -> dict[str, tuple[str, ...]]:
    """Our name of each parameter -> theirs, several where ours stacks them; with the pre-training heads or without."""
    single = dict(MODERN_EMBEDDINGS if cfg.modern else EMBEDDINGS)
    if heads:
        single |= MODERN_HEAD if cfg.modern else MLM | (NSP if cfg.nsp else {})
        single |= {} if cfg.tied else {"embeddings.word.decoder": word_tensors(cfg)[1]}
    result: dict[str, tuple[str, ...]] = {ours: (theirs,) for ours, theirs in single.items()}
    layer, prefix = (MODERN_LAYER, "model.layers") if cfg.modern else (LAYER, "bert.encoder.layer")
    for kind in ("weight", "bias"):
        for i in range(cfg.layers):
            for ours, parts in layer.items():
                result[f"layers.{i}.{ours}.{kind}"] = tuple(f"{prefix}.{i}.{part}.{kind}" for part in parts)
        result |= {f"{ours}_{kind}": (f"{theirs}.{kind}",) for ours, theirs in _norms(cfg).items()}
    return result


def to_huggingface(state: Mapping[str, Tensor], cfg: ModelConfig, heads: bool = True) -> dict[str, Tensor]:
    """Our state dict as Hugging Face's (Megatron)BertForPreTraining's (without pooler and NSP: ForMaskedLM's), or
    ModernBertForMaskedLM's; without `heads` that of an encoder alone, the part of their classes that `prefix_of` names.

    Raises ValueError naming a tensor that is missing or left over.
    """
    left = dict(state)
    result: dict[str, Tensor] = {}
    for ours, theirs in names(cfg, heads).items():
        tensor = _take(left, ours)
        if ours in _PADDED:
            tensor = tensor[: cfg.vocab_size]
        # parts of one storage cannot be saved
        parts = [part.clone() for part in tensor.chunk(len(theirs))] if len(theirs) > 1 or ours in _PADDED else [tensor]
        result |= zip(theirs, parts, strict=True)
    _refuse_left(left)
    if heads and cfg.tied:
        embedding, decoder = word_tensors(cfg)
        result[decoder] = result[embedding]
    if heads and not cfg.modern:
        bias = result["cls.predictions.bias"]
        result[DECODER_BIAS] = bias if cfg.tied else bias.clone()
    return result


def from_huggingface(state: Mapping[str, Tensor], cfg: ModelConfig) -> dict[str, Tensor]:
    """Hugging Face's (Megatron)BertForPreTraining's or ForMaskedLM's state dict as ours; for the latter cfg.nsp is False.

    Raises ValueError naming a tensor that is missing, left over, or of another shape than cfg has.
    """
    copies = {MODERN_DECODER} if cfg.modern else {DECODER, DECODER_BIAS, *BUFFERS}
    copies -= set() if cfg.tied else {DECODER, MODERN_DECODER}
    copies |= set() if cfg.nsp else set(NSP.values())
    left = {name: tensor for name, tensor in state.items() if name not in copies}
    result: dict[str, Tensor] = {}
    for ours, theirs in names(cfg).items():
        tensor = _take(left, theirs[0]) if len(theirs) == 1 else torch.cat([_take(left, name) for name in theirs])
        if ours in _PADDED:
            if len(tensor) != cfg.vocab_size:
                raise ValueError(f"{theirs[0]}: {len(tensor)} entries, but model.vocab_size={cfg.vocab_size}")
            tensor = F.pad(tensor, [0, 0] * (tensor.dim() - 1) + [0, cfg.padded_vocab - cfg.vocab_size])
        result[ours] = tensor
    _refuse_left(left)
    return result


def _take(state: dict[str, Tensor], name: str) -> Tensor:
    if name not in state:
        raise ValueError(f"weights: no tensor named {name}; check that the configuration fits the weights")
    return state.pop(name)


def _refuse_left(state: Mapping[str, Tensor]) -> None:
    if state:
        raise ValueError(f"weights: unexpected tensor {min(state)}; check that the configuration fits the weights")


def to_huggingface_config(cfg: ModelConfig, causal: bool = False) -> dict[str, Any]:
    """The `config.json` of a model; `causal`: of a causal one, which has no NSP head."""
    assert not (causal and cfg.nsp)
    values = cfg.model_dump() | {"intermediate": cfg.ffn}
    tree = {theirs: values[ours] for ours, (theirs, _) in (MODERN_FIELDS if cfg.modern else BERT_FIELDS).items()}
    tree |= {field: value for field, (value, _) in (MODERN_FIXED if cfg.modern else FIXED).items()}
    tree |= {"dtype": "float32", "tie_word_embeddings": cfg.tied}
    if not cfg.modern:
        name = CLASSES[cfg.norm] + ("ForPreTraining" if cfg.nsp else "ForMaskedLM")
        kind = {"model_type": TYPES[cfg.norm], "is_decoder": causal}
        return tree | kind | {"architectures": [CAUSAL[cfg.norm] if causal else name]}
    if causal:
        raise ValueError("a causal model of model.kind=modern: Hugging Face's ModernBERT has no decoder for it")
    rope = {"rope_type": "default", "rope_theta": THETA}
    return tree | {
        "architectures": [f"{MODERN_CLASS}ForMaskedLM"],
        "model_type": MODERN_TYPE,
        "mlp_dropout": 0.0,
        # releases before 5 read this and the next
        "global_attn_every_n_layers": 1,
        "global_rope_theta": THETA,
        "layer_types": ["full_attention"] * cfg.layers,
        "rope_parameters": {"full_attention": rope, "sliding_attention": rope},
        # a sequence of theirs begins and ends as ours: of the special ids the model reads only the padding's
        **dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")),
    }


def from_huggingface_config(tree: Mapping[str, Any], where: str) -> ModelConfig:
    """The model of a Hugging Face `config.json`, with the NSP head; `where` is the file's name.

    Raises ValueError naming the field whose value our model cannot have.
    """
    norms = {theirs: norm for norm, theirs in TYPES.items()}
    # the first releases lack it
    kind = tree.get("model_type", "bert")
    if kind not in (*norms, MODERN_TYPE):
        raise ValueError(
            f"{where}: model_type={kind!r} is not a BERT; {', '.join(norms)} and {MODERN_TYPE} can be converted"
        )
    modern = kind == MODERN_TYPE
    for field, (value, default) in (MODERN_FIXED if modern else FIXED).items():
        if (found := tree.get(field, default)) != value:
            raise ValueError(f"{where}: {field}={found!r} is not supported, only {value!r}")
    if modern:
        _refuse_other_modern(tree, where)
    for field in ("pruned_heads", "quantization_config"):
        if tree.get(field):
            raise ValueError(f"{where}: {field} is not supported; save the model without it")
    if not isinstance(tied := tree.get("tie_word_embeddings", True), bool):
        raise ValueError(f"{where}: tie_word_embeddings must be true or false, is {tied!r:.40}")
    fields: dict[str, Any] = {"kind": "modern", "norm": "pre", "nsp": False} if modern else {"norm": norms[kind]}
    for ours, (theirs, usual) in (MODERN_FIELDS if modern else BERT_FIELDS).items():
        fields[ours] = _number(tree, theirs, where, usual)
    if tree.get("embedding_size", fields["hidden"]) != fields["hidden"]:
        raise ValueError(
            f"{where}: embedding_size={tree['embedding_size']!r} differs from hidden_size={fields['hidden']}"
        )
    try:
        return configuration.from_dict({"model": fields | {"tied": tied}}).model
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _refuse_other_modern(tree: Mapping[str, Any], where: str) -> None:
    """Raises ValueError for local attention and other rotations."""
    local = "full_attention" if tree.get("global_attn_every_n_layers", 3) == 1 else "sliding_attention"
    if set(tree.get("layer_types") or [local]) != {"full_attention"}:
        raise ValueError(f"{where}: layers with local attention (layer_types) are not supported")
    parameters = tree.get("rope_parameters") or {}
    rope = parameters.get("full_attention", {}) if isinstance(parameters, dict) else {}
    theta = rope.get("rope_theta", tree.get("global_rope_theta", 160_000.0)) if isinstance(rope, dict) else None
    if theta != THETA or rope.get("rope_type", "default") != "default" or tree.get("rope_scaling"):
        raise ValueError(
            f"{where}: the base of the rotation is {theta!r:.40}, only {THETA:g} without scaling is supported"
        )


def is_causal(tree: Mapping[str, Any], where: str) -> bool:
    """Whether the model of a Hugging Face `config.json` is causal. Raises ValueError for a field that is no bool."""
    value = tree.get("is_decoder", False)
    if not isinstance(value, bool):
        raise ValueError(f"{where}: is_decoder must be true or false, is {value!r:.40}")
    return value


def _number(tree: Mapping[str, Any], field: str, where: str, usual: float | None) -> float:
    """A field's value: a float where it has a usual one, else an int."""
    value = tree.get(field, usual)
    if isinstance(value, bool) or not isinstance(value, int if usual is None else int | float):
        raise ValueError(f"{where}: {field} must be a number, is {value!r:.40}")
    return value if usual is None else float(value)
