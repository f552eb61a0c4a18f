"""Names of Hugging Face: its state dicts and configs as ours, and ours as its.

Mapping there and back is bit-equal. An architecture of Hugging Face is a `Family`: the settings of our one model that make it,
its names of the parameters, and its fields of a config.json. Ours stacks queries, keys and values (and a gate and what it
gates), pads the vocabulary to a multiple of 128 with zeros, and names a norm after the block that ends in it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megabert import config as configuration
from megabert.config import ModelConfig
from megabert.config.schema import MOST_LAYERS

Tree = Mapping[str, Any]
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
# their special ids -> the tokenizer's
IDS = {"pad_token_id": "pad", "bos_token_id": "cls", "eos_token_id": "sep"}
BUFFERS = ("position_ids", "token_type_ids")
# tensors with an entry for each token
PADDED = ("embeddings.word.weight", "embeddings.word.bias", "embeddings.word.decoder")


@dataclass(frozen=True)
class Family:
    """An architecture of Hugging Face. Names of layers' parameters are without `.weight` and `.bias`."""

    # Prefix of the classes' names.
    prefix: str
    # Fields of our model that have this value; those that no family names are free.
    ours: dict[str, Any]
    # Our name -> theirs, of the parameters outside layers and norms.
    embeddings: dict[str, str]
    head: dict[str, str]
    # The decoder's weights, which are the word embedding where they are tied.
    decoder: str
    # Prefix of the layers, and our names of a layer -> theirs, several where ours stacks them.
    layers: str
    layer: dict[str, tuple[str, ...]]
    # The norms: of the embeddings (pre-LN without one: of the first layer), inside a layer, at its end (pre-LN: at the next
    # one's start), behind the last layer (pre-LN).
    norms: tuple[str, str, str, str]
    # Our field -> theirs, as in FIELDS.
    fields: dict[str, tuple[str, float | None]]
    # Fields of theirs that must have a value, and their value where they are missing.
    fixed: dict[str, tuple[Any, Any]]
    nsp: dict[str, str] = field(default_factory=dict)
    # The class of causal models, whose weights are those of ForMaskedLM.
    causal: str = ""
    # Copy of the decoder's bias.
    bias_copy: str = ""
    ids: dict[str, str] = field(default_factory=lambda: {"pad_token_id": "pad"})
    # Further fields: of ours from theirs (and the file's name), of theirs from ours.
    read: Callable[[Tree, str], dict[str, Any]] = lambda tree, where: {}
    write: Callable[[ModelConfig], dict[str, Any]] = lambda cfg: {}
    # Of a model fine-tuned on texts: the layer behind the pooler, and the pooler; empty: its class has another head.
    text_layer: str = "classifier"
    pooler: str = "bert.pooler.dense"
    # Whether it has a class for answers in texts, ForQuestionAnswering.
    spans: bool = True

    @property
    def encoder(self) -> str:
        """Prefix of the encoder's tensors in a class that has heads."""
        return self.embeddings["embeddings.word.weight"].partition(".")[0] + "."


def read_value(tree: Tree, name: str, where: str, usual: Any, allowed: type | tuple[type, ...]) -> Any:
    """A field's value, checked, or its usual one where it is missing."""
    value = tree.get(name, usual)
    if not isinstance(value, allowed) or (isinstance(value, bool) and allowed is not bool):
        kinds = {bool: "true or false", (list, NoneType): "a list"}
        raise ValueError(f"{where}: {name} must be {kinds.get(allowed, 'a number')}, is {value!r:.40}")
    return value


def refuse_others(tree: Tree, where: str, fixed: Mapping[str, tuple[Any, Any]]) -> None:
    """Raises ValueError naming a field that has another value than `fixed` gives it first; the second is that of a missing one."""
    for name, (value, default) in fixed.items():
        if (found := tree.get(name, default)) != value:
            raise ValueError(f"{where}: {name}={found!r:.40} is not supported, only {value!r}")


def _theta(tree: Tree, where: str, kind: str, old: str, usual: float) -> float:
    """Base of the rotary positions, of the layers of a `kind` where theirs have several; `old`: the field in releases before 5."""
    given = tree.get("rope_parameters") or {}
    rope = (given.get(kind) or {} if kind else given) if isinstance(given, dict) else None
    if (
        not isinstance(rope, dict)
        or rope.get("rope_type", rope.get("type", "default")) != "default"
        or tree.get("rope_scaling")
    ):
        raise ValueError(f"{where}: rope_parameters: only rotary positions without scaling are supported")
    value = rope.get("rope_theta", tree.get(old, usual))
    return float(read_value({"rope_theta": value}, "rope_theta", where, usual, (int, float)))


# Published are all four of ModernBERT false, and those of its ancestor true.
MODERN_BIASES = ("attention_bias", "mlp_bias", "norm_bias", "classifier_bias")


def _read_modern(tree: Tree, where: str) -> dict[str, Any]:
    biases = {name: read_value(tree, name, where, False, bool) for name in MODERN_BIASES}
    for name, value in biases.items():
        if value != biases["attention_bias"]:
            raise ValueError(f"{where}: {name}={value} is not supported beside attention_bias={not value}")
    layers = read_value(tree, "num_hidden_layers", where, None, int)
    if layers > MOST_LAYERS:
        return {}  # refused as model.layers, before there is a list of them
    every = max(1, read_value(tree, "global_attn_every_n_layers", where, 3, int))
    given = read_value(tree, "layer_types", where, None, (list, NoneType))
    types = given or ["sliding_attention" if i % every else "full_attention" for i in range(layers)]
    full = [i for i, name in enumerate(types) if name == "full_attention"]
    if full != list(range(0, layers, every)):  # what releases before 5 read is not there
        every = full[1] if len(full) > 1 else layers
    others = [name for name in types if name not in ("sliding_attention", "full_attention")]
    if others or len(types) != layers or full != list(range(0, layers, every)):
        supported = "only full_attention in layers 0, n, 2n, ... and sliding_attention in the others"
        raise ValueError(f"{where}: layer_types: {supported}")
    window = read_value(tree, "local_attention", where, 128, int)
    refuse_others(tree, where, {"sliding_window": (window // 2, window // 2)})  # it would replace local_attention
    local = {"window": window // 2 * 2, "global_every": every} if every > 1 else {}
    if local and not local["window"]:
        raise ValueError(f"{where}: local_attention={window} is not supported, only 2 and more")
    if local:
        local["local_rope_theta"] = _theta(tree, where, "sliding_attention", "local_rope_theta", 10_000.0)
    theta = _theta(tree, where, "full_attention", "global_rope_theta", 160_000.0)
    bias = {"bias": biases["attention_bias"], "decoder_bias": read_value(tree, "decoder_bias", where, True, bool)}
    return bias | local | {"rope_theta": theta}


def _write_modern(cfg: ModelConfig) -> dict[str, Any]:
    local = [bool(cfg.layer_window(i)) for i in range(cfg.layers)]
    full, sliding = ({"rope_type": "default", "rope_theta": theta} for theta in (cfg.rope_theta, cfg.local_rope_theta))
    return dict.fromkeys(MODERN_BIASES, cfg.bias) | {
        "decoder_bias": cfg.decoder_bias,
        "local_attention": cfg.window or 128,
        "layer_types": ["sliding_attention" if here else "full_attention" for here in local],
        "rope_parameters": {"full_attention": full, "sliding_attention": sliding},
        # releases before 5 read these three
        "global_attn_every_n_layers": cfg.global_every if any(local) else 1,
        "global_rope_theta": cfg.rope_theta,
        "local_rope_theta": cfg.local_rope_theta,
    }


def _read_roberta(tree: Tree, where: str) -> dict[str, Any]:
    """Positions count from the one behind the padding's, whose row is there but not used."""
    first = read_value(tree, "pad_token_id", where, 1, int) + 1
    rows = read_value(tree, "max_position_embeddings", where, None, int)
    return {"first_position": first, "max_positions": rows - first}


def _write_roberta(cfg: ModelConfig) -> dict[str, Any]:
    return {"max_position_embeddings": cfg.max_positions + cfg.first_position, "pad_token_id": cfg.first_position - 1}


def _heads(tree: Tree, where: str) -> int:
    """Number of heads, which are as wide as their share of the residual stream."""
    heads = read_value(tree, "num_attention_heads", where, None, int)
    hidden = read_value(tree, "hidden_size", where, None, int)
    size = read_value(tree, "head_dim", where, None, (int, NoneType))
    if size is not None and size * heads != hidden:
        raise ValueError(f"{where}: head_dim={size!r:.40} is not hidden_size / num_attention_heads")
    return heads


def _read_euro(tree: Tree, where: str) -> dict[str, Any]:
    heads = _heads(tree, where)
    shared = read_value(tree, "num_key_value_heads", where, None, int) if tree.get("num_key_value_heads") else heads
    theta = _theta(tree, where, "", "rope_theta", 10_000.0)
    return {"kv_heads": 0 if shared == heads else shared, "rope_theta": theta, "dropout": 0.0}


def _write_rope(cfg: ModelConfig) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": cfg.rope_theta}}


def _write_euro(cfg: ModelConfig) -> dict[str, Any]:
    # releases before 5 read the last one
    return _write_rope(cfg) | {"num_key_value_heads": cfg.key_heads, "rope_theta": cfg.rope_theta}


def _read_nomic(tree: Tree, where: str) -> dict[str, Any]:
    _heads(tree, where)
    return {"rope_theta": _theta(tree, where, "", "rope_theta", 1000.0)}


def _head(bias: str, dense: str, norm: str) -> dict[str, str]:
    """The names of a masked-LM head: its bias of each token, and of its transform the dense layer and the norm."""
    parts = {"mlm.": dense, "mlm.norm_": norm}
    layers = {f"{ours}{kind}": f"{theirs}.{kind}" for ours, theirs in parts.items() for kind in ("weight", "bias")}
    return {"embeddings.word.bias": bias} | layers


# what a family has unless it says otherwise
PLAIN = {"rms_norm": False, "bias": True, "decoder_bias": True, "window": 0, "transform": True, "kv_heads": 0}
GATED = {"kind": "modern", "norm": "pre", "nsp": False}
LEARNED = PLAIN | {"kind": "bert", "segments": 2, "first_position": 0}
DROPOUTS: dict[str, tuple[str, float | None]] = {
    "dropout": ("hidden_dropout_prob", 0.1),
    "attention_dropout": ("attention_probs_dropout_prob", 0.1),
    "layer_norm_eps": ("layer_norm_eps", 1e-12),
}
BERT = Family(
    prefix="Bert",
    ours=LEARNED | {"norm": "post"},
    embeddings={
        "embeddings.word.weight": "bert.embeddings.word_embeddings.weight",
        "embeddings.position": "bert.embeddings.position_embeddings.weight",
        "embeddings.segment": "bert.embeddings.token_type_embeddings.weight",
    },
    head=_head("cls.predictions.bias", "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm"),
    decoder="cls.predictions.decoder.weight",
    layers="bert.encoder.layer",
    layer={
        "qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
        "attention_output": ("attention.output.dense",),
        "feed_forward": ("intermediate.dense",),
        "feed_forward_output": ("output.dense",),
    },
    norms=("bert.embeddings.LayerNorm", "attention.output.LayerNorm", "output.LayerNorm", ""),
    fields=FIELDS | DROPOUTS,
    fixed={
        "hidden_act": ("gelu", "gelu"),
        "position_embedding_type": ("absolute", "absolute"),
        "type_vocab_size": (2, 2),
        "add_cross_attention": (False, False),
    },
    nsp={
        "pooler.weight": "bert.pooler.dense.weight",
        "pooler.bias": "bert.pooler.dense.bias",
        "nsp.weight": "cls.seq_relationship.weight",
        "nsp.bias": "cls.seq_relationship.bias",
    },
    causal="BertLMHeadModel",
    bias_copy="cls.predictions.decoder.bias",
)
# Norms before the blocks and none on the embeddings (RoBERTa-PreLayerNorm normalises the embeddings too).
MEGATRON = replace(
    BERT,
    prefix="MegatronBert",
    ours=LEARNED | {"norm": "pre"},
    norms=("bert.encoder.layer.0.attention.ln", "ln", "attention.ln", "bert.encoder.ln"),
    causal="MegatronBertForCausalLM",
)
# Liu et al. 2019.
ROBERTA = replace(
    BERT,
    prefix="Roberta",
    ours=PLAIN | {"kind": "bert", "segments": 1, "norm": "post", "nsp": False},
    embeddings={ours: theirs.replace("bert.", "roberta.") for ours, theirs in BERT.embeddings.items()},
    head=_head("lm_head.bias", "lm_head.dense", "lm_head.layer_norm"),
    decoder="lm_head.decoder.weight",
    layers="roberta.encoder.layer",
    norms=("roberta.embeddings.LayerNorm", *BERT.norms[1:]),
    fields={name: theirs for name, theirs in BERT.fields.items() if name != "max_positions"},
    fixed=BERT.fixed | {"type_vocab_size": (1, 2)},
    nsp={},
    causal="RobertaForCausalLM",
    bias_copy="lm_head.decoder.bias",
    ids=IDS,
    read=_read_roberta,
    write=_write_roberta,
    text_layer="classifier.out_proj",
    pooler="classifier.dense",
)
# Nussbaum et al. 2024. The names are those of its files, which transformers renames when it reads and writes them.
NOMIC = replace(
    BERT,
    prefix="NomicBert",
    ours=PLAIN | {"kind": "nomic", "norm": "post", "nsp": False, "segments": 2, "activation": "silu"},
    embeddings={
        "embeddings.word.weight": "nomic_bert.embeddings.word_embeddings.weight",
        "embeddings.segment": "nomic_bert.embeddings.token_type_embeddings.weight",
    },
    head=_head("cls.predictions.bias", "cls.predictions.transform.dense", "cls.predictions.transform.layer_norm"),
    layers="nomic_bert.encoder.layers",
    layer={
        "qkv": ("attn.Wqkv",),
        "attention_output": ("attn.out_proj",),
        "feed_forward": ("mlp.fc12", "mlp.fc11"),
        "feed_forward_output": ("mlp.fc2",),
    },
    norms=("nomic_bert.emb_ln", "norm1", "norm2", ""),
    fields=BERT.fields
    | {"dropout": ("hidden_dropout_prob", 0.0), "attention_dropout": ("attention_probs_dropout_prob", 0.0)},
    fixed={"hidden_act": ("silu", "silu"), "type_vocab_size": (2, 2)},
    nsp={},
    causal="",
    read=_read_nomic,
    write=_write_rope,
    pooler="nomic_bert.pooler.dense",
    spans=False,
)
# Warner et al. 2024; Ettin and mmBERT are it too.
MODERN = Family(
    prefix="ModernBert",
    ours=GATED
    | {"activation": "gelu", "embedding_norm": True}
    | {name: PLAIN[name] for name in ("rms_norm", "transform", "kv_heads")},
    embeddings={"embeddings.word.weight": "model.embeddings.tok_embeddings.weight"},
    head=_head("decoder.bias", "head.dense", "head.norm"),
    decoder="decoder.weight",
    layers="model.layers",
    layer={
        "qkv": ("attn.Wqkv",),
        "attention_output": ("attn.Wo",),
        "feed_forward": ("mlp.Wi",),
        "feed_forward_output": ("mlp.Wo",),
    },
    norms=("model.embeddings.norm", "mlp_norm", "attn_norm", "model.final_norm"),
    fields=FIELDS
    | {
        "dropout": ("embedding_dropout", 0.0),
        "attention_dropout": ("attention_dropout", 0.0),
        "layer_norm_eps": ("norm_eps", 1e-5),
    },
    fixed={"classifier_activation": ("gelu", "gelu"), "hidden_activation": ("gelu", "gelu"), "mlp_dropout": (0.0, 0.0)},
    ids=IDS | {"cls_token_id": "cls", "sep_token_id": "sep"},
    read=_read_modern,
    write=_write_modern,
)
# Boizard et al. 2025.
EURO = replace(
    MODERN,
    prefix="EuroBert",
    ours=GATED
    | {"activation": "silu", "embedding_norm": False, "dropout": 0.0}
    | {"rms_norm": True, "transform": False, "bias": False, "decoder_bias": False, "window": 0},
    embeddings={"embeddings.word.weight": "model.embed_tokens.weight"},
    head={},
    decoder="lm_head.weight",
    layer={
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention_output": ("self_attn.o_proj",),
        "feed_forward": ("mlp.gate_proj", "mlp.up_proj"),
        "feed_forward_output": ("mlp.down_proj",),
    },
    norms=("model.layers.0.input_layernorm", "post_attention_layernorm", "input_layernorm", "model.norm"),
    fields=FIELDS | {"attention_dropout": ("attention_dropout", 0.0), "layer_norm_eps": ("rms_norm_eps", 1e-5)},
    fixed={"hidden_act": ("silu", "silu"), "attention_bias": (False, False), "mlp_bias": (False, False)},
    ids=IDS | {"mask_token_id": "mask"},
    read=_read_euro,
    write=_write_euro,
    text_layer="",
)
FAMILIES = {
    "bert": BERT,
    "megatron-bert": MEGATRON,
    "roberta": ROBERTA,
    "xlm-roberta": replace(ROBERTA, prefix="XLMRoberta", causal="XLMRobertaForCausalLM"),
    "camembert": replace(ROBERTA, prefix="Camembert", causal="CamembertForCausalLM"),
    "modernbert": MODERN,
    "eurobert": EURO,
    "nomic_bert": NOMIC,
}
# their untied embeddings are the rule
UNTIED = ("eurobert",)
# what is closest to a model_type that is not supported, where its name does not show it
NEAREST = {
    **dict.fromkeys(("albert", "mobilebert", "convbert"), "bert"),
    **dict.fromkeys(("deberta", "deberta-v2", "mpnet", "data2vec-text", "bart"), "roberta"),
    **dict.fromkeys(("longformer", "big_bird", "modernbert-decoder", "gte"), "modernbert"),
    **dict.fromkeys(("neobert", "llama", "qwen2", "qwen3", "mistral"), "eurobert"),
}


def find_model_type(cfg: ModelConfig) -> str:
    """The model_type of Hugging Face that has a model's shape. Raises ValueError naming a field that none has."""
    values = cfg.model_dump() | {"kv_heads": 0 if cfg.key_heads == cfg.heads else cfg.kv_heads}
    wrong = {}
    for name in [cfg.hub_type] if cfg.hub_type else FAMILIES:
        if name not in FAMILIES:
            raise ValueError(f"model.hub_type={name!r}: choose one of {', '.join(FAMILIES)}")
        wrong[name] = [ours for ours, value in FAMILIES[name].ours.items() if values[ours] != value]
        if not wrong[name]:
            return name
    nearest = min(wrong, key=lambda name: ("kind" in wrong[name], len(wrong[name])))
    ours = wrong[nearest][0]
    raise ValueError(
        f"model.{ours}={values[ours]!r}: no model of Hugging Face has this shape; the nearest is {nearest}, with "
        f"model.{ours}={FAMILIES[nearest].ours[ours]!r}"
    )


def pair_separators(model: ModelConfig) -> int:
    """The number of [SEP] between the texts of a pair; RoBERTa's layout, whose positions follow the padding's id, has two (Liu et al.
    2019)."""
    return 2 if model.first_position and not model.nsp else 1


def find_family(cfg: ModelConfig) -> Family:
    """The architecture of Hugging Face that a model is. Errors as of `find_model_type`."""
    return FAMILIES[find_model_type(cfg)]


def names(cfg: ModelConfig, heads: bool = True) -> dict[str, tuple[str, ...]]:
    """Our name of each parameter -> theirs, several where ours stacks them; with the pre-training heads or without."""
    family = find_family(cfg)
    single = dict(family.embeddings)
    if heads:
        single |= family.head | (family.nsp if cfg.nsp else {})
        single |= {} if cfg.tied else {"embeddings.word.decoder": family.decoder}
    result: dict[str, tuple[str, ...]] = {ours: (theirs,) for ours, theirs in single.items()}
    first, middle, end, final = family.norms
    norms = {"embeddings.norm": first}
    for i in range(cfg.layers):
        last = f"{family.layers}.{i + 1 if final else i}.{end}"
        norms[f"layers.{i}.attention_output.norm"] = f"{family.layers}.{i}.{middle}"
        norms[f"layers.{i}.feed_forward_output.norm"] = final if final and i == cfg.layers - 1 else last
    present = {"embeddings.word.bias": cfg.decoder_bias}
    for kind in ("weight", "bias"):
        for i in range(cfg.layers):
            for ours, parts in family.layer.items():
                result[f"layers.{i}.{ours}.{kind}"] = tuple(f"{family.layers}.{i}.{part}.{kind}" for part in parts)
                present[f"layers.{i}.{ours}.bias"] = cfg.layer_bias
        result |= {f"{ours}_{kind}": (f"{theirs}.{kind}",) for ours, theirs in norms.items()}
    return {o: theirs for o, theirs in result.items() if not o.endswith("bias") or present.get(o, cfg.bias)}


def to_huggingface(state: Mapping[str, Tensor], cfg: ModelConfig, heads: bool = True) -> dict[str, Tensor]:
    """Our state dict as that of Hugging Face's class for pre-training (without pooler and NSP: ForMaskedLM's); without `heads`
    that of an encoder alone, the part of their classes that `Family.encoder` names.

    Raises ValueError naming a tensor that is missing or left over.
    """
    family, left = find_family(cfg), dict(state)
    result: dict[str, Tensor] = {}
    for ours, theirs in names(cfg, heads).items():
        tensor = _take(left, ours)
        if ours in PADDED:
            tensor = tensor[: cfg.vocab_size]
        # parts of one storage cannot be saved
        copied = len(theirs) > 1 or ours in PADDED
        parts = [part.clone() for part in tensor.split(_sizes(len(theirs), len(tensor), cfg))] if copied else [tensor]
        result |= zip(theirs, parts, strict=True)
    _refuse_left(left)
    if heads and cfg.tied:
        result[family.decoder] = result[family.embeddings["embeddings.word.weight"]]
    if heads and family.bias_copy:
        bias = result[family.head["embeddings.word.bias"]]
        result[family.bias_copy] = bias if cfg.tied else bias.clone()
    return result


def _sizes(parts: int, size: int, cfg: ModelConfig) -> list[int]:
    """Lines of what is stacked: of queries, keys and values, or of equal parts."""
    shared = cfg.hidden // cfg.heads * cfg.key_heads
    return [cfg.hidden, shared, shared] if parts == 3 else [size // parts] * parts


def from_huggingface(state: Mapping[str, Tensor], cfg: ModelConfig) -> dict[str, Tensor]:
    """The inverse of `to_huggingface`; of ForMaskedLM's state dict cfg.nsp is False.

    Raises ValueError naming a tensor that is missing, left over, or of another shape than cfg has.
    """
    family = find_family(cfg)
    copies = {family.bias_copy, *([family.decoder] if cfg.tied else []), *({} if cfg.nsp else family.nsp.values())}
    left = {name: tensor for name, tensor in state.items() if name not in copies and not name.endswith(BUFFERS)}
    result: dict[str, Tensor] = {}
    for ours, theirs in names(cfg).items():
        tensor = _take(left, theirs[0]) if len(theirs) == 1 else torch.cat([_take(left, name) for name in theirs])
        if ours in PADDED:
            if len(tensor) != cfg.vocab_size:
                raise ValueError(f"{theirs[0]}: {len(tensor)} entries, but model.vocab_size={cfg.vocab_size}")
            tensor = F.pad(tensor, [0, 0] * (tensor.dim() - 1) + [0, cfg.padded_vocab - cfg.vocab_size])
        result[ours] = tensor
    _refuse_left(left)
    return result


def of_tokens(state: Mapping[str, Tensor], cfg: ModelConfig) -> dict[str, Tensor]:
    """A Hugging Face state dict with the embeddings of the first cfg.vocab_size ids alone."""
    padded = {theirs for ours, parts in names(cfg).items() if ours in PADDED for theirs in parts}
    return {name: tensor[: cfg.vocab_size] if name in padded else tensor for name, tensor in state.items()}


def _take(state: dict[str, Tensor], name: str) -> Tensor:
    if name not in state:
        raise ValueError(f"weights: no tensor named {name}; check that the configuration fits the weights")
    return state.pop(name)


def _refuse_left(state: Mapping[str, Tensor]) -> None:
    if state:
        raise ValueError(f"weights: unexpected tensor {min(state)}; check that the configuration fits the weights")


def to_huggingface_config(
    cfg: ModelConfig, causal: bool = False, ids: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """The `config.json` of a model; `causal`: of a causal one, which has no NSP head; `ids`: the tokenizer's special ids.

    Raises ValueError where Hugging Face has no such model.
    """
    assert not (causal and cfg.nsp)
    kind = find_model_type(cfg)
    family = FAMILIES[kind]
    if causal and not family.causal:
        raise ValueError(
            f"a causal model of model.kind={cfg.kind}: Hugging Face's {family.prefix} has no decoder for it"
        )
    values = cfg.model_dump() | {"intermediate": cfg.ffn}
    tree = {theirs: values[ours] for ours, (theirs, _) in family.fields.items()}
    tree |= {theirs: value for theirs, (value, _) in family.fixed.items()}
    tree |= {theirs: ids[ours] if ids else 0 if ours == "pad" else None for theirs, ours in family.ids.items()}
    tree |= {"dtype": "float32", "tie_word_embeddings": cfg.tied, "model_type": kind} | family.write(cfg)
    if ids and tree["pad_token_id"] != ids["pad"]:
        raise ValueError(
            f"model.first_position={cfg.first_position}: in {kind} it follows the padding's id, {ids['pad']}"
        )
    tree |= {"is_decoder": causal} if family.causal else {}
    ending = "ForPreTraining" if cfg.nsp else "ForMaskedLM"
    return tree | {"architectures": [family.causal if causal else family.prefix + ending]}


def from_huggingface_config(tree: Mapping[str, Any], where: str) -> ModelConfig:
    """The model of a Hugging Face `config.json`, with the NSP head where its class has one; `where` is the file's name.

    Raises ValueError naming the field whose value our model cannot have, and the nearest that it can.
    """
    # the first releases lack it
    kind = tree.get("model_type", "bert")
    if str(kind) not in FAMILIES:
        near = NEAREST.get(str(kind)) or difflib.get_close_matches(str(kind), FAMILIES, 1, 0)[0]
        supported = ", ".join([*FAMILIES, "distilbert", "electra"])
        raise ValueError(
            f"{where}: model_type={kind!r:.40} is not supported, only {supported}; the nearest is {near}. Continue from one of these "
            "in its language, or train a model with its tokenizer: megabert prep build --tokenizer FOLDER/tokenizer.json"
        )
    family = FAMILIES[kind]
    # is_causal makes any class a decoder, is_decoder only those with a causal class; others ignore it
    one_way = ("is_causal",) if family.causal else ("is_causal", "is_decoder")
    refuse_others(tree, where, family.fixed | dict.fromkeys(one_way, (False, False)))
    for name in ("pruned_heads", "quantization_config"):
        if tree.get(name):
            raise ValueError(f"{where}: {name} is not supported; save the model without it")
    tied = read_value(tree, "tie_word_embeddings", where, kind not in UNTIED, bool)
    fields: dict[str, Any] = family.ours | {"tied": tied}
    for ours, (theirs, usual) in family.fields.items():
        fields[ours] = read_value(tree, theirs, where, usual, int if usual is None else (int, float))
        fields[ours] = fields[ours] if usual is None else float(fields[ours])
    fields |= family.read(tree, where)
    if tree.get("embedding_size", fields["hidden"]) != fields["hidden"]:
        raise ValueError(
            f"{where}: embedding_size={tree['embedding_size']!r} differs from hidden_size={fields['hidden']}, and a projection "
            "between them (embeddings_project) is not supported"
        )
    try:
        model = configuration.from_dict({"model": fields}).model
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return model if find_model_type(model) == kind else configuration.replace(model, "hub_type", kind)


def is_causal(tree: Mapping[str, Any], where: str) -> bool:
    """Whether the model of a Hugging Face `config.json` is causal. Raises ValueError for a field that is not a bool."""
    return bool(read_value(tree, "is_decoder", where, False, bool))
