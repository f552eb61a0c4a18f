"""A model of kind `modern` is transformers' ModernBERT: names there and back, logits, folders, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from megabert import ops
from megabert.config import ModelConfig, OpsConfig
from megabert.hf import hf_names, hf_read
from tests.helpers import runs
from tests.hf.test_hf_names import SHAPE, packed, peer_of

MODERN: dict[str, Any] = SHAPE | {"kind": "modern", "norm": "pre", "nsp": False}
CHOICES = [runs.PLAIN, OpsConfig(attention="native", mlm_loss="native", layer="native")]


@pytest.mark.parametrize("tied", [True, False])
def test_names_go_there_and_back_bit_equal(tied: bool) -> None:
    built = runs.model(ModelConfig(**MODERN, tied=tied))
    peer, state = peer_of(built), built.state_dict()
    assert type(peer) is transformers.ModernBertForMaskedLM
    assert peer.state_dict().keys() == hf_names.to_huggingface(state, built.cfg).keys()
    back = hf_names.from_huggingface(peer.state_dict(), built.cfg)
    assert back.keys() == state.keys() and all(back[name].equal(state[name]) for name in state)
    assert (peer.decoder.weight.data_ptr() == peer.model.embeddings.tok_embeddings.weight.data_ptr()) == tied
    again = hf_names.from_huggingface_config(peer.config.to_dict(), "config.json")
    assert again.model_copy(update={"intermediate": 0}) == built.cfg and again.intermediate == built.cfg.ffn == 64


@pytest.mark.skipif(bool(ops.MISSING), reason=ops.MISSING or "-")
@pytest.mark.parametrize("choice", CHOICES, ids=["torch", "native"])
@torch.no_grad()
def test_logits_are_transformers_own_however_sequences_are_packed(choice: OpsConfig) -> None:
    built = runs.model(ModelConfig(**MODERN), ops=choice)
    for parameter in built.parameters():  # so that a bias or a norm that goes astray shows
        parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(parameter))) * 0.05)
    built.embeddings.word.weight[300:] = 0
    peer = peer_of(built)
    lengths = [[5, 12, 7], [1, 2, 3, 18], [24]]
    batch = packed(lengths, 24)
    logits = built.mlm_logits(built.encode(**batch).flatten(0, 1)).view(3, 24, -1)
    for r, parts in enumerate(lengths):
        for start, length in zip(torch.tensor([0, *parts]).cumsum(0).tolist(), parts, strict=False):
            want = peer(input_ids=batch["input_ids"][r : r + 1, start : start + length].long()).logits[0]
            assert (logits[r, start : start + length] - want).abs().max() <= 1e-5
    assert want.std() > 0.1


@torch.no_grad()
def test_what_a_token_is_given_depends_on_its_place_and_not_on_segments() -> None:
    built = runs.model(ModelConfig(**MODERN))
    batch = packed([[24]], 24)
    batch["input_ids"][:] = 7
    batch["input_ids"][0, 0] = 9
    hidden = built.encode(**batch)[0]
    assert (hidden[5] - hidden[6]).abs().max() > 1e-3, "the distance to the first token differs"
    assert torch.equal(built.encode(**batch | {"segment_ids": 1 - batch["segment_ids"]})[0], hidden)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"mlp_bias": False}, "mlp_bias=False is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layers with local attention"),
        ({"layer_types": None, "global_attn_every_n_layers": 3}, "layers with local attention"),
        ({"rope_parameters": None, "global_rope_theta": 160000.0}, "base of the rotation is 160000.0"),
        ({"hidden_activation": "silu"}, "hidden_activation='silu' is not supported"),
    ],
)
def test_a_modernbert_that_is_not_ours_is_refused_by_its_field(fields: dict[str, Any], said: str) -> None:
    tree = hf_names.to_huggingface_config(ModelConfig(**MODERN)) | fields
    with pytest.raises(ValueError, match=said):
        hf_names.from_huggingface_config(tree, "config.json")


def test_a_folder_without_heads_is_read_and_its_head_is_made(tmp_path: Path) -> None:
    built = runs.model(ModelConfig(**MODERN))
    peer = peer_of(built)
    peer.model.save_pretrained(tmp_path)
    model = hf_names.from_huggingface_config(hf_read.read_json(tmp_path / "config.json"), "config.json")
    file, tensors = hf_read.read_weights(tmp_path, model)
    weights, made, ignored = hf_read.complete(tensors, model, str(file))
    assert (made, ignored) == (["masked-LM head"], [])
    back = hf_names.from_huggingface(weights, model)
    for name, tensor in built.state_dict().items():
        assert back[name].equal(tensor) or name.startswith(("mlm.", "embeddings.word.bias")), name
    assert back["mlm.norm_weight"].equal(torch.ones(32)) and not back["embeddings.word.bias"].any()
    save_file({"model.embeddings.norm.weight": torch.ones(32)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="too few tensors"):
        hf_read.complete({}, model, "w")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"norm": "post"}, "model.kind=modern needs model.norm=pre; it is post"),
        ({"nsp": True}, "model.kind=modern needs model.nsp=false; it is true"),
        ({"hidden": 33, "heads": 11}, "hidden / model.heads = 3 is odd"),
    ],
)
def test_settings_that_it_cannot_have_are_named(changed: dict[str, Any], said: str) -> None:
    from megabert import config

    with pytest.raises(ValueError, match=said):
        config.from_dict({"model": MODERN | changed})
