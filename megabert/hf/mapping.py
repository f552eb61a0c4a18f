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

_EMBEDDINGS = {
    "embeddings.word.weight": "bert.embeddings.word_embeddings.weight",
    "embeddings.position": "bert.embeddings.position_embeddings.weight",
    "embeddings.segment": "bert.embeddings.token_type_embeddings.weight",
}
_MLM = {
    "embeddings.word.bias": "cls.predictions.bias",
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
    "attention_output": "attention.output.dense",
    "feed_forward": "intermediate.dense",
    "feed_forward_output": "output.dense",
}
_MODERN_EMBEDDINGS = {"embeddings.word.weight": "model.embeddings.tok_embeddings.weight"}
MODERN_HEAD = {
    "embeddings.word.bias": "decoder.bias",
    "mlm.weight": "head.dense.weight",
    "mlm.bias": "head.dense.bias",
    "mlm.norm_weight": "head.norm.weight",
    "mlm.norm_bias": "head.norm.bias",
}
_MODERN_LAYER = {
    "qkv": "attn.Wqkv",
    "attention_output": "attn.Wo",
    "feed_forward": "mlp.Wi",
    "feed_forward_output": "mlp.Wo",
}
# decoder weights, which are the word embedding where they are tied
DECODER, MODERN_DECODER = "cls.predictions.decoder.weight", "decoder.weight"
DECODERS = (DECODER, MODERN_DECODER)
# copies and buffers that some versions save beside the weights
_OPTIONAL = {
    "bert.embeddings.position_ids",
    "bert.embeddings.token_type_ids",
    "cls.predictions.decoder.weight",
    "cls.predictions.decoder.bias",
}
_PADDED = ("embeddings.word.weight", "embeddings.word.bias", "embeddings.word.decoder")
# fields of a config.json that must have a value for the model to be ours, and their value where they are missing
_FIXED: dict[str, tuple[Any, Any]] = {
    "hidden_act": ("gelu", "gelu"),
    "position_embedding_type": ("absolute", "absolute"),
    "type_vocab_size": (2, 2),
    "add_cross_attention": (False, False),
    "pad_token_id": (0, 0),
}
_MODERN_FIXED: dict[str, tuple[Any, Any]] = {
    "attention_bias": (True, False),
    "mlp_bias": (True, False),
    "norm_bias": (True, False),
    "classifier_bias": (True, False),
    "decoder_bias": (True, True),
    "classifier_activation": ("gelu", "gelu"),
    "hidden_activation": ("gelu", "gelu"),
    "pad_token_id": (0, 50283),
}


def class_of(cfg: ModelConfig) -> str:
    """The prefix of the names of a model's classes."""
    return MODERN_CLASS if cfg.modern else CLASSES[cfg.norm]


def prefix_of(cfg: ModelConfig) -> str:
    """The prefix of the encoder's tensors in a class that has heads."""
    return "model." if cfg.modern else "bert."


def _encoder_names(cfg: ModelConfig) -> dict[str, str]:
    """Our name -> theirs, of the encoder's tensors that are not stacked."""
    names = dict(_MODERN_EMBEDDINGS if cfg.modern else _EMBEDDINGS)
    layer, prefix = (_MODERN_LAYER, "model.layers") if cfg.modern else (_LAYER, "bert.encoder.layer")
    linears = {f"layers.{i}.{ours}": f"{prefix}.{i}.{layer[ours]}" for i in range(cfg.layers) for ours in layer}
    kinds = ("weight", "bias")
    names |= {f"{ours}.{kind}": f"{theirs}.{kind}" for ours, theirs in linears.items() for kind in kinds}
    return names | {f"{ours}_{kind}": f"{theirs}.{kind}" for ours, theirs in _norms(cfg).items() for kind in kinds}


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


def _names(cfg: ModelConfig) -> dict[str, str]:
    """Our name -> theirs, of every tensor that is not stacked."""
    decoder = {} if cfg.tied else {"embeddings.word.decoder": MODERN_DECODER if cfg.modern else DECODER}
    heads = MODERN_HEAD if cfg.modern else _MLM | (_NSP if cfg.nsp else {})
    return _encoder_names(cfg) | heads | decoder


def _stacked(cfg: ModelConfig) -> dict[str, list[str]]:
    """Our name -> theirs, of tensors that ours stacks and theirs does not."""
    if cfg.modern:
        return {}
    return {
        f"layers.{i}.qkv.{kind}": [
            f"bert.encoder.layer.{i}.attention.self.{part}.{kind}" for part in ("query", "key", "value")
        ]
        for i in range(cfg.layers)
        for kind in ("weight", "bias")
    }


def to_huggingface(state: Mapping[str, Tensor], cfg: ModelConfig) -> dict[str, Tensor]:
    """Our state dict as Hugging Face's (Megatron)BertForPreTraining's (without pooler and NSP: ForMaskedLM's), or
    ModernBertForMaskedLM's.

    Raises ValueError naming a tensor that is missing or left over.
    """
    result = _renamed(state, cfg, _names(cfg))
    if cfg.modern:
        if cfg.tied:
            result[MODERN_DECODER] = result["model.embeddings.tok_embeddings.weight"]
        return result
    if cfg.tied:
        result[DECODER] = result["bert.embeddings.word_embeddings.weight"]
    bias = result["cls.predictions.bias"]
    result["cls.predictions.decoder.bias"] = bias if cfg.tied else bias.clone()
    return result


def encoder_to_huggingface(state: Mapping[str, Tensor], cfg: ModelConfig) -> dict[str, Tensor]:
    """The state dict of an encoder without heads as the part of Hugging Face's classes that `prefix_of` names.

    Raises ValueError naming a tensor that is missing or left over.
    """
    return _renamed(state, cfg, _encoder_names(cfg))


def _renamed(state: Mapping[str, Tensor], cfg: ModelConfig, names: Mapping[str, str]) -> dict[str, Tensor]:
    left = dict(state)
    result: dict[str, Tensor] = {}
    for ours, theirs in names.items():
        tensor = _take(left, ours)
        result[theirs] = tensor[: cfg.vocab_size].clone() if ours in _PADDED else tensor
    for ours, parts in _stacked(cfg).items():
        for part, chunk in zip(parts, _take(left, ours).chunk(len(parts)), strict=True):
            result[part] = chunk.clone()
    _refuse_left(left)
    return result


def from_huggingface(state: Mapping[str, Tensor], cfg: ModelConfig) -> dict[str, Tensor]:
    """Hugging Face's (Megatron)BertForPreTraining's or ForMaskedLM's state dict as ours; for the latter cfg.nsp is False.

    Raises ValueError naming a tensor that is missing, left over, or of another shape than cfg has.
    """
    optional = {MODERN_DECODER} if cfg.modern else _OPTIONAL
    left = {k: v for k, v in state.items() if k not in optional or (k in DECODERS and not cfg.tied)}
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
    for ours, parts in _stacked(cfg).items():
        result[ours] = torch.cat([_take(left, part) for part in parts])
    _refuse_left(left)
    return result


def expected(cfg: ModelConfig) -> dict[str, str]:
    """Every name of Hugging Face's that `from_huggingface` needs, and the name of ours that it goes into."""
    names = {theirs: ours for ours, theirs in _names(cfg).items()}
    for ours, parts in _stacked(cfg).items():
        names |= dict.fromkeys(parts, ours)
    return names


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
    tree: dict[str, Any] = {
        "dtype": "float32",
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.hidden,
        "num_hidden_layers": cfg.layers,
        "num_attention_heads": cfg.heads,
        "intermediate_size": cfg.ffn,
        "max_position_embeddings": cfg.max_positions,
        "initializer_range": cfg.init_std,
        "tie_word_embeddings": cfg.tied,
    }
    if cfg.modern:
        if causal:
            raise ValueError("a causal model of model.kind=modern: Hugging Face's ModernBERT has no decoder for it")
        return tree | _modern_fields(cfg)
    name = CLASSES[cfg.norm] + ("ForPreTraining" if cfg.nsp else "ForMaskedLM")
    return {field: value for field, (value, _) in _FIXED.items()} | tree | {
        "architectures": [CAUSAL[cfg.norm] if causal else name],
        "is_decoder": causal,
        "model_type": TYPES[cfg.norm],
        "hidden_dropout_prob": cfg.dropout,
        "attention_probs_dropout_prob": cfg.attention_dropout,
        "layer_norm_eps": cfg.layer_norm_eps,
    }  # fmt: skip


def _modern_fields(cfg: ModelConfig) -> dict[str, Any]:
    """A sequence of theirs begins and ends as ours: of the special ids the model reads only the padding's."""
    rope = {"rope_type": "default", "rope_theta": THETA}
    return {field: value for field, (value, _) in _MODERN_FIXED.items()} | {
        "architectures": [f"{MODERN_CLASS}ForMaskedLM"],
        "model_type": MODERN_TYPE,
        "embedding_dropout": cfg.dropout,
        "attention_dropout": cfg.attention_dropout,
        "mlp_dropout": 0.0,
        "norm_eps": cfg.layer_norm_eps,
        "global_attn_every_n_layers": 1,  # releases before 5 read this and the next
        "global_rope_theta": THETA,
        "layer_types": ["full_attention"] * cfg.layers,
        "rope_parameters": {"full_attention": rope, "sliding_attention": rope},
        "bos_token_id": None,
        "eos_token_id": None,
        "cls_token_id": None,
        "sep_token_id": None,
    }


def from_huggingface_config(tree: Mapping[str, Any], where: str) -> ModelConfig:
    """The model of a Hugging Face `config.json`, with the NSP head; `where` is the file's name.

    Raises ValueError naming the field whose value our model cannot have.
    """
    kinds = {theirs: ours for ours, theirs in TYPES.items()}
    kind = tree.get("model_type", "bert")  # the first releases lack it
    if kind == MODERN_TYPE:
        return _modern_model(tree, where)
    if kind not in kinds:
        raise ValueError(
            f"{where}: model_type={kind!r} is not a BERT; {', '.join(kinds)} and {MODERN_TYPE} can be converted"
        )
    _refuse_others(tree, _FIXED, where)
    for field in ("pruned_heads", "quantization_config"):
        if tree.get(field):
            raise ValueError(f"{where}: {field} is not supported; save the model without it")
    hidden = _number(tree, "hidden_size", where, int)
    if tree.get("embedding_size", hidden) != hidden:
        raise ValueError(f"{where}: embedding_size={tree['embedding_size']!r} differs from hidden_size={hidden}")
    fields = {
        "norm": kinds[kind],
        "dropout": _number(tree, "hidden_dropout_prob", where, float, 0.1),
        "attention_dropout": _number(tree, "attention_probs_dropout_prob", where, float, 0.1),
        "layer_norm_eps": _number(tree, "layer_norm_eps", where, float, 1e-12),
    }
    return _model(tree, fields, where)


def _modern_model(tree: Mapping[str, Any], where: str) -> ModelConfig:
    _refuse_others(tree, _MODERN_FIXED, where)
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
    fields = {
        "kind": "modern",
        "norm": "pre",
        "nsp": False,
        "dropout": _number(tree, "embedding_dropout", where, float, 0.0),
        "attention_dropout": _number(tree, "attention_dropout", where, float, 0.0),
        "layer_norm_eps": _number(tree, "norm_eps", where, float, 1e-5),
    }
    return _model(tree, fields, where)


def _refuse_others(tree: Mapping[str, Any], fixed: Mapping[str, tuple[Any, Any]], where: str) -> None:
    for field, (value, default) in fixed.items():
        if (found := tree.get(field, default)) != value:
            raise ValueError(f"{where}: {field}={found!r} is not supported, only {value!r}")


def _model(tree: Mapping[str, Any], fields: dict[str, Any], where: str) -> ModelConfig:
    """The model of `fields` and of the fields that every kind of `config.json` has."""
    if not isinstance(tied := tree.get("tie_word_embeddings", True), bool):
        raise ValueError(f"{where}: tie_word_embeddings must be true or false, is {tied!r:.40}")
    fields |= {
        "tied": tied,
        "hidden": _number(tree, "hidden_size", where, int),
        "layers": _number(tree, "num_hidden_layers", where, int),
        "heads": _number(tree, "num_attention_heads", where, int),
        "intermediate": _number(tree, "intermediate_size", where, int),
        "vocab_size": _number(tree, "vocab_size", where, int),
        "max_positions": _number(tree, "max_position_embeddings", where, int),
        "init_std": _number(tree, "initializer_range", where, float, 0.02),
    }
    try:
        return configuration.from_dict({"model": fields}).model
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def is_causal(tree: Mapping[str, Any], where: str) -> bool:
    """Whether the model of a Hugging Face `config.json` is causal. Raises ValueError for a field that is no bool."""
    value = tree.get("is_decoder", False)
    if not isinstance(value, bool):
        raise ValueError(f"{where}: is_decoder must be true or false, is {value!r:.40}")
    return value


def _number(tree: Mapping[str, Any], field: str, where: str, kind: type, default: Any = None) -> Any:
    value = tree.get(field, default)
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        raise ValueError(f"{where}: {field} must be a number, is {value!r:.40}")
    return kind(value)
