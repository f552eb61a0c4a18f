"""Names there and back are bit-equal, and a tensor that is missing, left over or of the wrong size is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, BertForPreTraining

from megabert.config import ModelConfig, OpsConfig
from megabert.convert import from_huggingface, to_huggingface
from megabert.model import BertForPreTraining as Ours

SHAPE: dict[str, Any] = {"vocab_size": 300, "layers": 2, "hidden": 32, "heads": 2, "max_positions": 24}
PEER: dict[str, Any] = {
    "vocab_size": 300, "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 128,
    "max_position_embeddings": 24, "add_pooling_layer": False,
}  # fmt: skip
PLAIN = OpsConfig(attention="sdpa", mlm_loss="torch", layer="torch")


def ours(nsp: bool = True) -> Ours:
    torch.manual_seed(1)
    built = Ours(ModelConfig(**SHAPE, nsp=nsp), PLAIN)
    for name, p in built.named_parameters():
        torch.nn.init.normal_(p)
        if name.startswith("embeddings.word."):
            torch.nn.init.zeros_(p[300:])
    return built


@pytest.mark.parametrize("nsp", [True, False])
def test_round_trip_through_hugging_face_is_bit_equal(nsp: bool) -> None:
    """Ours -> a real Hugging Face model -> its state dict -> ours."""
    built = ours(nsp)
    peer = (BertForPreTraining if nsp else BertForMaskedLM)(BertConfig(**PEER))
    result = peer.load_state_dict(to_huggingface(built.state_dict(), built.cfg), strict=False)
    assert not result.unexpected_keys
    assert all("position_ids" in name or "token_type_ids" in name for name in result.missing_keys)
    back = from_huggingface(peer.state_dict(), built.cfg)
    state = built.state_dict()
    assert back.keys() == state.keys()
    assert all(back[name].equal(state[name]) for name in state)
    assert (
        peer.cls.predictions.decoder.weight.data_ptr()
        == peer.bert.embeddings.word_embeddings.weight.data_ptr()
    )


def test_every_parameter_of_the_peer_is_written() -> None:
    built = ours()
    names = to_huggingface(built.state_dict(), built.cfg).keys()
    assert names == BertForPreTraining(BertConfig(**PEER)).state_dict().keys()


def test_a_pre_training_checkpoint_loads_without_its_nsp_head() -> None:
    peer = BertForPreTraining(BertConfig(**PEER))
    state = from_huggingface(peer.state_dict(), ModelConfig(**SHAPE, nsp=False))
    assert not any("nsp" in name or "pooler" in name for name in state)


def test_wrong_weights_are_named() -> None:
    built = ours()
    state = to_huggingface(built.state_dict(), built.cfg)
    with pytest.raises(
        ValueError, match=r"no tensor named bert.encoder.layer.2.attention.output.dense.weight"
    ):
        from_huggingface(state, ModelConfig(**(SHAPE | {"layers": 3})))
    with pytest.raises(ValueError, match=r"unexpected tensor bert.encoder.layer.1"):
        from_huggingface(state, ModelConfig(**(SHAPE | {"layers": 1})))
    with pytest.raises(ValueError, match=r"word_embeddings.weight: 300 entries, but model.vocab_size=301"):
        from_huggingface(state, ModelConfig(**(SHAPE | {"vocab_size": 301})))
    with pytest.raises(ValueError, match="post-LN only"):
        to_huggingface(built.state_dict(), ModelConfig(**SHAPE, norm="pre"))
