"""NomicBERT's first files: transformers' logits on the same weights under its own names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megabert.commands import convert
from megabert.data.packing import pack
from megabert.hf import read
from tests.helpers import wordpiece
from tests.hf import published
from tests.hf.test_architectures import find_peer

# nomic-ai/nomic-bert-2048's config.json, small, without the fields of GPT-2 that its code does not read
FIRST: dict[str, Any] = {
    "activation_function": "swiglu", "architectures": ["NomicBertForPreTraining"], "attn_pdrop": 0.0, "causal": False,
    "embd_pdrop": 0.0, "initializer_range": 0.02, "layer_norm_epsilon": 1e-12, "max_trained_positions": 66,
    "mlp_fc1_bias": False, "mlp_fc2_bias": False, "model_type": "nomic_bert", "n_embd": 48, "n_head": 6, "n_inner": 80,
    "n_layer": 4, "n_positions": 8192, "pad_vocab_size_multiple": 64, "parallel_block": False, "prenorm": False,
    "qkv_proj_bias": False, "resid_pdrop": 0.0, "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False, "rotary_emb_scale_base": None, "rotary_scaling_factor": 2, "type_vocab_size": 2,
    "use_rms_norm": False,
}  # fmt: skip


def write(folder: Path, prefix: str, heads: bool) -> tuple[Any, int]:
    """A folder as its own code saves one, of a vocabulary padded to a multiple of 64; transformers' model of the same weights and
    the number of tokens."""
    folder.mkdir()
    tokens = len(wordpiece.write(folder / "vocab.txt").read_text(encoding="utf-8").splitlines())
    rows = tokens // 64 * 64 + 64
    peer = find_peer(published.shrunk("nomic-embed-text") | {"vocab_size": rows, "pad_token_id": 0})
    torch.nn.init.zeros_(peer.cls.predictions.transform.dense.bias)
    torch.nn.init.zeros_(peer.cls.predictions.bias)
    peer.save_pretrained(folder)
    weights = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.startswith("nomic_bert."):
            weights[prefix + name.removeprefix("nomic_bert.")] = tensor
        elif heads and not name.endswith(("dense.bias", "predictions.bias")):
            weights[name] = tensor
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(FIRST | {"vocab_size": rows}))
    return peer, tokens


@torch.no_grad()
def test_the_published_form_is_the_present_one(tmp_path: Path, capsys) -> None:
    peer, tokens = write(tmp_path / "hf", "bert.", heads=True)
    found = read.read(tmp_path / "hf")
    assert (found.config.model.vocab_size, found.config.model.max_positions) == (tokens, 66)
    assert not found.initialised and "which have no tokens" in found.ignored[0]
    ids = torch.randint(5, tokens, (1, 60))
    model, batch = found.model(torch.device("cpu")), pack([ids[0].int().numpy()], [60])
    hidden = model.encode(**batch.inputs()).flatten(0, 1)
    wanted = peer(ids).logits[0, :, :tokens]
    torch.testing.assert_close(model.mlm_logits(hidden)[:60, :tokens], wanted, rtol=0, atol=1e-5)
    assert wanted.std() > 0.05
    assert convert.main(["--model", str(tmp_path / "hf"), "--run", str(tmp_path / "run")]) == 0
    assert f"the embeddings of ids {tokens:,} to " in capsys.readouterr().out


def test_its_encoder_alone_gets_a_new_head(tmp_path: Path) -> None:
    write(tmp_path / "hf", "", heads=False)
    assert read.read(tmp_path / "hf").initialised == ("masked-LM head",)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rotary_emb_fraction": 0.5}, "rotary_emb_fraction=0.5 is not supported, only 1.0"),
        ({"qkv_proj_bias": True}, "qkv_proj_bias=True is not supported, only False"),
        ({"prenorm": True}, "prenorm=True is not supported, only False"),
        ({"n_positions": None}, "n_positions must be a number, is None"),
        ({"n_inner": "80"}, "intermediate_size must be a number, is '80'"),
    ],
)
def test_what_it_cannot_be_is_refused_by_field(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path / "hf", "bert.", heads=True)
    tree = json.loads((tmp_path / "hf/config.json").read_text()) | change
    (tmp_path / "hf/config.json").write_text(json.dumps(tree))
    with pytest.raises(ValueError, match=r"config\.json: ") as caught:
        read.read(tmp_path / "hf")
    assert message in str(caught.value)
