"""Names there and back are bit-equal, and what does not fit is named."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

from megabert import config
from megabert.config import ModelConfig
from megabert.hf import mapping, read
from megabert.hf.mapping import from_huggingface, from_huggingface_config, to_huggingface, to_huggingface_config
from megabert.model import BertForPreTraining as Ours
from tests.helpers import runs

SHAPE: dict[str, Any] = {"vocab_size": 300, "layers": 2, "hidden": 32, "heads": 2, "max_positions": 24}
MODERN: dict[str, Any] = SHAPE | {"kind": "modern", "norm": "pre", "nsp": False}
NOMIC: dict[str, Any] = SHAPE | {"kind": "nomic", "nsp": False, "activation": "silu"}
MODELS = {
    **{f"{norm}-{nsp}": SHAPE | {"norm": norm, "nsp": nsp} for norm in ("post", "pre") for nsp in (True, False)},
    **{f"{norm}-untied": SHAPE | {"norm": norm, "tied": False} for norm in ("post", "pre")},
    **{"modern": MODERN, "modern-untied": MODERN | {"tied": False}},
    **{"nomic": NOMIC, "nomic-untied": NOMIC | {"tied": False}},
}


def find_peer(built: Ours) -> Any:
    """transformers' model of the config that export writes, with the weights that export writes."""
    tree = to_huggingface_config(built.cfg)
    kind = getattr(transformers, tree["architectures"][0])
    peer_config = kind.config_class.from_dict(tree)
    assert peer_config.model_type == tree["model_type"]
    state = to_huggingface(built.state_dict(), built.cfg)
    peer, info = kind.from_pretrained(None, config=peer_config, state_dict=state, output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    return peer.eval()


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_round_trip_is_bit_equal(name: str) -> None:
    """Ours -> a real Hugging Face model -> its state dict and config -> ours; every parameter of the peer is written."""
    built = runs.model(ModelConfig(**MODELS[name]))
    cfg, state, peer = built.cfg, built.state_dict(), find_peer(built)
    theirs = revert_weight_conversion(peer, peer.state_dict())
    assert to_huggingface(state, cfg).keys() == {key for key in theirs if not key.endswith("_ids")}
    back = from_huggingface(theirs, cfg)
    assert back.keys() == state.keys() and all(back[key].equal(state[key]) for key in state)
    decoder, embedding = peer.get_output_embeddings().weight, peer.get_input_embeddings().weight
    assert (decoder.data_ptr() == embedding.data_ptr()) == cfg.tied
    again = from_huggingface_config(to_huggingface_config(cfg), "config.json")
    assert again == cfg.model_copy(update={"nsp": not cfg.gated, "intermediate": cfg.ffn})
    assert from_huggingface_config(peer.config.to_dict(), "config.json") == again


def test_wrong_weights_are_named() -> None:
    built = runs.model(ModelConfig(**SHAPE))
    state = to_huggingface(built.state_dict(), built.cfg)
    for change, message in (
        ({"layers": 3}, "no tensor named bert.encoder.layer.2.attention.self.query.weight"),
        ({"layers": 1}, "unexpected tensor bert.encoder.layer.1"),
        ({"vocab_size": 301}, "word_embeddings.weight: 300 entries, but model.vocab_size=301"),
    ):
        with pytest.raises(ValueError, match=message):
            from_huggingface(state, ModelConfig(**(SHAPE | change)))


def test_configs_of_the_first_releases_are_read() -> None:
    """Google's own small models, as published in 2020: no model_type and nothing that has a default since."""
    tree = {
        "attention_probs_dropout_prob": 0.1, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 128,
        "initializer_range": 0.02, "intermediate_size": 512, "max_position_embeddings": 512, "num_attention_heads": 2,
        "num_hidden_layers": 2, "type_vocab_size": 2, "vocab_size": 30522,
    }  # fmt: skip
    want = ModelConfig(layers=2, hidden=128, heads=2, intermediate=512, vocab_size=30522)
    assert from_huggingface_config(tree, "config.json") == want
    assert not mapping.is_causal(tree, "config.json") and mapping.is_causal({"is_decoder": True}, "config.json")
    with pytest.raises(ValueError, match=r"^config\.json: is_decoder must be true or false"):
        mapping.is_causal({"is_decoder": "true"}, "config.json")


@pytest.mark.parametrize(("shape", "change", "message"), [
    (SHAPE, {"model_type": "deberta-v2"}, "model_type='deberta-v2' is not supported, only bert, "),
    (SHAPE, {"model_type": "deberta-v2"}, "; the nearest is roberta"),
    (SHAPE, {"model_type": "distilbert"}, "; the nearest is bert"),
    (SHAPE, {"model_type": None}, "model_type=None"),
    (SHAPE, {"model_type": ["bert"]}, "model_type=['bert'] is not supported"),
    (MODERN, {"num_hidden_layers": 10**30}, "model.layers: Input should be less than or equal to 10000"),
    (SHAPE, {"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key' is not supported"),
    (SHAPE, {"hidden_act": "gelu_new"}, "hidden_act='gelu_new' is not supported, only 'gelu'"),
    (SHAPE, {"tie_word_embeddings": 0}, "tie_word_embeddings must be true or false, is 0"),
    (SHAPE, {"pruned_heads": {"0": [1]}}, "pruned_heads"),
    (SHAPE, {"num_hidden_layers": "2"}, "num_hidden_layers must be a number, is '2'"),
    (SHAPE, {"num_attention_heads": 3}, "heads=3 does not divide"),
    (MODERN, {"mlp_bias": False}, "mlp_bias=False is not supported beside attention_bias=True"),
    (MODERN, {"layer_types": 5}, "layer_types must be a list, is 5"),
    (MODERN, {"layer_types": ["sliding_attention", "full_attention"]}, "only full_attention in layers 0, n, 2n"),
    (MODERN, {"layer_types": ["full_attention", "chunked_attention"]}, "only full_attention in layers 0, n, 2n"),
    (MODERN | {"window": 8}, {"local_attention": 1}, "local_attention=1 is not supported, only 2 and more"),
    (MODERN | {"window": 8}, {"sliding_window": 2}, "sliding_window=2 is not supported, only 4"),
    (MODERN, {"mlp_dropout": 0.1}, "mlp_dropout=0.1 is not supported, only 0.0"),
    (MODERN, {"is_decoder": True}, "is_decoder=True is not supported, only False"),
    (SHAPE, {"is_causal": True}, "is_causal=True is not supported, only False"),
    (MODERN, {"rope_scaling": {"type": "yarn"}}, "rope_parameters: only rotary positions without scaling"),
    (MODERN, {"rope_parameters": None, "global_rope_theta": "1"}, "rope_theta must be a number, is '1'"),
    (NOMIC, {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported, only 'silu'"),
    (NOMIC, {"type_vocab_size": 1}, "type_vocab_size=1 is not supported, only 2"),
    (NOMIC, {"head_dim": {}}, "head_dim must be a number, is {}"),
    (NOMIC, {"head_dim": 8}, "head_dim=8 is not hidden_size / num_attention_heads"),
    (NOMIC, {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters: only rotary positions without scaling"),
    (NOMIC, {"rope_parameters": {"type": "yarn"}}, "rope_parameters: only rotary positions without scaling"),
    (NOMIC, {"hidden_size": None}, "hidden_size must be a number, is None"),
])  # fmt: skip
def test_unsupported_configs_are_refused_by_field(shape: dict[str, Any], change: dict[str, Any], message: str) -> None:
    tree = to_huggingface_config(ModelConfig(**shape)) | change
    with pytest.raises(ValueError, match=r"config\.json: ") as caught:
        from_huggingface_config(tree, "config.json")
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("shape", [MODERN, NOMIC], ids=["modern", "nomic"])
def test_missing_heads_of_a_folder_are_initialised(shape: dict[str, Any], tmp_path: Path) -> None:
    built = runs.model(ModelConfig(**shape))
    find_peer(built).base_model.save_pretrained(tmp_path)
    model = from_huggingface_config(read.read_json(tmp_path / "config.json"), "config.json")
    file, tensors = read.read_weights(tmp_path, model, {})
    before = torch.get_rng_state()
    weights, made, ignored = read.complete(tensors, model, str(file))
    assert (made, ignored) == (["masked-LM head"], []) and torch.get_rng_state().equal(before)
    back = from_huggingface(weights, model)
    for name, tensor in built.state_dict().items():
        assert back[name].equal(tensor) or name.startswith(("mlm.", "embeddings.word.bias")), name
    assert back["mlm.norm_weight"].equal(torch.ones(32)) and not back["embeddings.word.bias"].any()
    layer = next(name.partition(".0.")[0] for name in tensors if "layers.0." in name) + ".0.adapter.down.weight"
    with pytest.raises(ValueError, match=rf"w: {layer} is part of a layer, which ours has not"):
        read.complete(tensors | {layer: torch.zeros(2)}, model, "w")


def test_shapes_without_a_class_are_refused_by_field() -> None:
    none = "no model of Hugging Face has this shape; the nearest is"
    for changed, message in (
        ({"window": 8}, f"model.window=8: {none} bert"),
        ({"hub_type": "camembert"}, f"model.segments=2: {none} camembert"),
        (NOMIC | {"activation": "gelu"}, f"model.activation='gelu': {none} nomic_bert"),
        ({"hub_type": "camenbert"}, "model.hub_type='camenbert': choose one of bert, "),
    ):
        with pytest.raises(ValueError, match=message):
            to_huggingface_config(ModelConfig(**(SHAPE | changed)))
    for changed, message in (
        ({"kv_heads": 3}, "model.kv_heads=3 does not divide model.heads=2"),
        ({"window": 7}, "model.window=7 is odd"),
        ({"kind": "bert", "activation": "silu"}, "model.activation=silu needs model.kind=modern"),
        ({"frequency_bias": True, "decoder_bias": False}, "model.frequency_bias=true needs a bias of the decoder"),
        ({"neighbour_heads": True, "bias": False}, "model.neighbour_heads=true needs rotary positions and biases"),
        ({"neighbour_heads": True, "heads": 1}, "model.neighbour_heads=true needs two heads or more; model.heads=1"),
        ({"norm": "post"}, "model.kind=modern needs model.norm=pre; it is post"),
        ({"nsp": True}, "model.kind=modern needs model.nsp=false; it is true"),
        ({"hidden": 33, "heads": 11}, "hidden / model.heads = 3 is odd"),
        ({"kind": "nomic"}, "model.kind=nomic needs model.norm=post; it is pre"),
        ({"kind": "nomic", "norm": "post", "nsp": True}, "model.kind=nomic needs model.nsp=false; it is true"),
        ({"kind": "nomic", "embedding_norm": False}, "model.embedding_norm=false needs model.kind=modern"),
    ):
        with pytest.raises(ValueError, match=message):
            config.from_dict({"model": MODERN | changed})
