"""Names there and back are bit-equal, logits are transformers' own, and what does not fit is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from megabert.config import ModelConfig, OpsConfig
from megabert.hf import hf_names
from megabert.hf.hf_names import from_huggingface, to_huggingface
from megabert.model import BertForPreTraining as Ours
from tests.helpers import runs

SHAPE: dict[str, Any] = {"vocab_size": 300, "layers": 2, "hidden": 32, "heads": 2, "max_positions": 24}
CASES = [(norm, nsp) for norm in ("post", "pre") for nsp in (True, False)]
OPS = [runs.PLAIN, OpsConfig(attention="native", mlm_loss="native", layer="native")]


def peer_of(built: Ours) -> Any:
    """transformers' model of the config that export writes, with the weights that export writes."""
    tree = hf_names.to_huggingface_config(built.cfg)
    kind = getattr(transformers, tree["architectures"][0])
    config = kind.config_class.from_dict(tree)
    assert config.model_type == tree["model_type"]
    peer = kind(config).eval()
    result = peer.load_state_dict(to_huggingface(built.state_dict(), built.cfg), strict=False)
    assert not result.unexpected_keys
    assert all("position_ids" in name or "token_type_ids" in name for name in result.missing_keys)
    return peer


@pytest.mark.parametrize(("norm", "nsp"), CASES)
def test_round_trip_through_hugging_face_is_bit_equal(norm: Any, nsp: bool) -> None:
    """Ours -> a real Hugging Face model -> its state dict -> ours."""
    built = runs.model(ModelConfig(**SHAPE, norm=norm, nsp=nsp))
    peer = peer_of(built)
    back = from_huggingface(peer.state_dict(), built.cfg)
    state = built.state_dict()
    assert back.keys() == state.keys()
    assert all(back[name].equal(state[name]) for name in state)
    assert peer.cls.predictions.decoder.weight.data_ptr() == peer.bert.embeddings.word_embeddings.weight.data_ptr()


@pytest.mark.parametrize(("norm", "nsp"), CASES)
def test_every_parameter_of_the_peer_is_written(norm: Any, nsp: bool) -> None:
    built = runs.model(ModelConfig(**SHAPE, norm=norm, nsp=nsp))
    names = to_huggingface(built.state_dict(), built.cfg).keys()
    assert names == {name for name in peer_of(built).state_dict() if not name.endswith("_ids")}


def packed(lengths: list[list[int]], width: int) -> dict[str, Tensor]:
    """Rows of sequences of the given lengths, the second half of each in segment 1, padding behind them."""
    draw = torch.Generator().manual_seed(3)
    shape = (len(lengths), width)
    row = {name: torch.zeros(shape, dtype=torch.int32) for name in ("input_ids", "segment_ids", "position_ids")}
    row |= {name: torch.zeros(shape, dtype=torch.int32) for name in ("key_start", "key_end")}
    for r, parts in enumerate(lengths):
        start = 0
        for length in parts:
            here = slice(start, start + length)
            row["input_ids"][r, here] = torch.randint(5, 300, (length,), generator=draw, dtype=torch.int32)
            row["segment_ids"][r, start + length // 2 : start + length] = 1
            row["position_ids"][r, here] = torch.arange(length, dtype=torch.int32)
            row["key_start"][r, here], row["key_end"][r, here] = start, start + length
            start += length
    slots = max(map(len, lengths))
    counts = [parts + [0] * (slots - len(parts)) for parts in lengths]
    return row | {"lengths": torch.tensor(counts, dtype=torch.int32)}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("norm", ["post", "pre"])
@torch.no_grad()
def test_both_kinds_of_decoder_go_there_and_back_and_compute_the_same(norm: Any, tied: bool) -> None:
    """Bit-equal names, and logits at most 1e-5 apart, also of a decoder with weights of its own."""
    built = runs.model(ModelConfig(**SHAPE, norm=norm, tied=tied))
    peer = peer_of(built)
    back, state = from_huggingface(peer.state_dict(), built.cfg), built.state_dict()
    assert back.keys() == state.keys() and all(back[name].equal(state[name]) for name in state)
    tree = hf_names.to_huggingface_config(built.cfg)
    again = hf_names.from_huggingface_config(tree, "config.json")
    assert (again.tied, again.norm) == (tied, norm)
    batch = packed([[24]], 24)
    hidden = built.encode(**batch)[0]
    inputs = {"input_ids": batch["input_ids"].long(), "token_type_ids": batch["segment_ids"].long()}
    want = peer(**inputs).prediction_logits[0]
    assert (built.mlm_logits(hidden) - want).abs().max() <= 1e-5 and want.std() > 0.1


@pytest.mark.parametrize("ops", OPS, ids=["torch", "native"])
@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize(
    "lengths", [[[24], [24]], [[24], [7], [1]], [[5, 12, 7], [1, 2, 3, 18], [10, 10]]], ids=["full", "padded", "packed"]
)
@torch.no_grad()
def test_logits_are_transformers_own(norm: Any, lengths: list[list[int]], ops: OpsConfig) -> None:
    """Hidden states, masked-LM and next-sentence logits in fp32, at most 1e-5 apart; packed against each one alone."""
    built = runs.model(ModelConfig(**SHAPE, norm=norm), ops=ops)
    peer = peer_of(built)
    batch = packed(lengths, 24)
    hidden = built.encode(**batch)
    alone = max(map(len, lengths)) > 1
    compared = 0
    for r, parts in enumerate(lengths):
        for start, length in zip(torch.tensor([0, *parts]).cumsum(0).tolist(), parts, strict=False):
            part = slice(start, start + length) if alone else slice(None)
            inputs = {"input_ids": batch["input_ids"][r : r + 1, part].long()}
            inputs["token_type_ids"] = batch["segment_ids"][r : r + 1, part].long()
            if not alone:
                inputs["attention_mask"] = (torch.arange(24) < length).long()[None]
            want = peer(**inputs)
            here = hidden[r, start : start + length]
            differences = [
                here - peer.bert(**inputs).last_hidden_state[0, :length],
                built.mlm_logits(here) - want.prediction_logits[0, :length],
                built.nsp_logits(here[:1]) - want.seq_relationship_logits,
            ]
            assert max(float(d.abs().max()) for d in differences) <= 1e-5
            compared += length
    assert compared == sum(map(sum, lengths))


def test_a_pre_training_checkpoint_loads_without_its_nsp_head() -> None:
    peer = peer_of(runs.model(ModelConfig(**SHAPE)))
    state = from_huggingface(peer.state_dict(), ModelConfig(**SHAPE, nsp=False))
    assert not any("nsp" in name or "pooler" in name for name in state)


def test_wrong_weights_are_named() -> None:
    built = runs.model(ModelConfig(**SHAPE))
    state = to_huggingface(built.state_dict(), built.cfg)
    with pytest.raises(ValueError, match=r"no tensor named bert.encoder.layer.2.attention.output.dense.weight"):
        from_huggingface(state, ModelConfig(**(SHAPE | {"layers": 3})))
    with pytest.raises(ValueError, match=r"unexpected tensor bert.encoder.layer.1"):
        from_huggingface(state, ModelConfig(**(SHAPE | {"layers": 1})))
    with pytest.raises(ValueError, match=r"word_embeddings.weight: 300 entries, but model.vocab_size=301"):
        from_huggingface(state, ModelConfig(**(SHAPE | {"vocab_size": 301})))


@pytest.mark.parametrize(("norm", "nsp"), CASES)
def test_a_config_comes_back(norm: Any, nsp: bool) -> None:
    cfg = ModelConfig(**SHAPE, norm=norm, nsp=nsp, intermediate=48, dropout=0.0, layer_norm_eps=1e-7)
    back = hf_names.from_huggingface_config(hf_names.to_huggingface_config(cfg), "config.json")
    assert back == cfg.model_copy(update={"nsp": True})


def test_the_first_releases_configs_are_a_bert_s() -> None:
    """Google's own small models, as published in 2020: no model_type and nothing that has a default since."""
    tree = {
        "attention_probs_dropout_prob": 0.1, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 128,
        "initializer_range": 0.02, "intermediate_size": 512, "max_position_embeddings": 512, "num_attention_heads": 2,
        "num_hidden_layers": 2, "type_vocab_size": 2, "vocab_size": 30522,
    }  # fmt: skip
    want = ModelConfig(layers=2, hidden=128, heads=2, intermediate=512, vocab_size=30522)
    assert hf_names.from_huggingface_config(tree, "config.json") == want


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "roberta"}, "model_type='roberta' is not a BERT"),
        ({"model_type": None}, "model_type=None"),
        ({"hidden_act": "gelu_new"}, "hidden_act='gelu_new' is not supported, only 'gelu'"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key'"),
        ({"embedding_size": 16}, "embedding_size=16 differs from hidden_size=32"),
        ({"type_vocab_size": 1}, "type_vocab_size=1"),
        ({"add_cross_attention": True}, "add_cross_attention=True"),
        ({"tie_word_embeddings": 0}, "tie_word_embeddings must be true or false, is 0"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers must be a number, is '2'"),
        ({"hidden_size": None}, "hidden_size must be a number"),
        ({"num_attention_heads": 3}, "heads=3 does not divide"),
        ({"num_hidden_layers": 0}, "model.layers"),
    ],
)
def test_a_config_that_ours_cannot_have_is_refused_by_its_field(change: dict[str, Any], said: str) -> None:
    tree = hf_names.to_huggingface_config(ModelConfig(**SHAPE)) | change
    with pytest.raises(ValueError, match=r"config\.json: ") as caught:
        hf_names.from_huggingface_config(tree, "config.json")
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("tree", "causal"), [({}, False), ({"is_decoder": False}, False), ({"is_decoder": True}, True)]
)
def test_a_decoder_is_causal(tree: dict[str, Any], causal: bool) -> None:
    assert hf_names.is_causal(tree, "config.json") is causal


@pytest.mark.parametrize("value", ["true", 1, None])
def test_what_says_neither_decoder_nor_encoder_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^config\.json: is_decoder must be true or false"):
        hf_names.is_causal({"is_decoder": value}, "config.json")
