"""Encoders of transformers' fine-tuned classes, of DistilBERT and ELECTRA, and of compiled modules: its own numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from megabert import hf
from megabert.commands import convert, export, fill
from megabert.data.packing import pack
from tests.commands.test_convert import make, one_line, rewrite

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 7, "eos_token_id": 8, "cls_token_id": 7, "sep_token_id": 8}
DISTIL: dict[str, Any] = {"n_layers": 2, "dim": 32, "n_heads": 2, "hidden_dim": 48, "max_position_embeddings": 40}
ENDINGS = ("SequenceClassification", "TokenClassification", "QuestionAnswering")


def made(folder: Path, kind: str) -> Any:
    """A model of that class with every parameter random; DistilBERT's fields have names of their own."""
    changes = DISTIL if kind.startswith("DistilBert") else {}
    changes |= SIZES if kind.startswith("ModernBert") else {}
    changes |= {"embedding_size": 32} if kind.startswith("Electra") else {}
    return make(folder, kind, **changes)


def compare(folder: Path, peer: Any) -> hf.Pretrained:
    """The last hidden states of two sequences, packed by us, with the encoder of `peer`; the model read."""
    found = hf.load(folder)
    draw = np.random.default_rng(2)
    texts = [draw.integers(10, found.config.model.vocab_size, length, np.int32) for length in (9, 23)]
    batch, states = pack(texts, [9, 23], 40), []
    for text in texts:
        states.append(peer.base_model(torch.from_numpy(text).long()[None]).last_hidden_state[0])
    hidden = found.model(CPU).encode(**batch.inputs()).flatten(0, 1)
    for text, start, want in zip(texts, batch.starts, states, strict=True):
        assert want.std() > 0.1 and (hidden[start : start + len(text)] - want).abs().max() <= 1e-5
    return found


@pytest.mark.parametrize("family", ["Bert", "ModernBert", "DistilBert", "Electra"])
@pytest.mark.parametrize("ending", ENDINGS)
@torch.no_grad()
def test_encoder_of_a_fine_tuned_class_is_read(family: str, ending: str, tmp_path: Path, capsys) -> None:
    peer = made(tmp_path / "hf", f"{family}For{ending}")
    found = compare(tmp_path / "hf", peer)
    added = "qa_outputs" if ending == "QuestionAnswering" and family != "ModernBert" else "classifier"
    assert any(name.startswith(f"{added}.") for name in found.ignored)
    if family == "ModernBert":  # its classes share the transform in front of their last layers
        states = torch.randn(3, 32)
        assert (found.model(CPU).mlm(states) - peer.head(states)).abs().max() <= 1e-6
        assert found.initialised == ("masked-LM head (decoder.bias)",)
    pooled = family == "Bert" and ending == "SequenceClassification"
    assert ("pooler.weight" in found.weights) == found.config.model.nsp == pooled
    capsys.readouterr()
    assert fill.main(["--model", str(tmp_path / "hf"), "the [MASK]"]) == 2
    assert "has no masked-LM head" in one_line(capsys)


@pytest.mark.parametrize("kind", ["DistilBertForMaskedLM", "ElectraForMaskedLM"])
@torch.no_grad()
def test_logits_of_a_relative_are_transformers_own(kind: str, tmp_path: Path) -> None:
    """Of its folder, and of the BERT that it is exported as."""
    peer = made(tmp_path / "hf", kind)
    found = compare(tmp_path / "hf", peer)
    assert found.initialised == found.ignored == () and not found.config.model.nsp
    ids = torch.arange(10, 40)
    model, batch = found.model(CPU), pack([ids.int().numpy()], [30])
    logits = model.mlm_logits(model.encode(**batch.inputs())[0, :30])
    want = peer(ids[None]).logits[0]
    assert want.std() > 0.05 and (logits - want).abs().max() <= 1e-5
    convert.convert(tmp_path / "hf", tmp_path / "run")
    export.export(tmp_path / "run", tmp_path / "back")
    back = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "back").eval()
    assert type(back).__name__ == "BertForMaskedLM" and (back(ids[None]).logits[0] - want).abs().max() <= 1e-5


@pytest.mark.parametrize("kind", ["DistilBertModel", "ElectraModel", "ElectraForPreTraining"])
@torch.no_grad()
def test_a_relative_without_masked_lm_head_is_read(kind: str, tmp_path: Path) -> None:
    found = compare(tmp_path / "hf", made(tmp_path / "hf", kind))
    assert found.initialised == ("masked-LM head",)


def test_embeddings_narrower_than_the_layers_are_refused(tmp_path: Path) -> None:
    make(tmp_path / "hf", "ElectraForMaskedLM", embedding_size=16)
    message = (
        r"embedding_size=16 differs from hidden_size=32, and a projection between them \(embeddings_project\) is not"
    )
    with pytest.raises(ValueError, match=message):
        hf.load(tmp_path / "hf")
    tree = json.loads((tmp_path / "hf" / "config.json").read_text())
    del tree["embedding_size"]  # 128 in transformers' class
    (tmp_path / "hf" / "config.json").write_text(json.dumps(tree))
    with pytest.raises(ValueError, match="embedding_size=128 differs from hidden_size=32"):
        hf.load(tmp_path / "hf")


def test_state_dict_of_a_compiled_module_is_read(tmp_path: Path, capsys) -> None:
    make(tmp_path / "hf")
    whole = hf.load(tmp_path / "hf").weights
    rewrite(tmp_path / "hf", lambda state: {f"_orig_mod.{name}": tensor for name, tensor in state.items()})
    capsys.readouterr()
    found = hf.load(tmp_path / "hf")
    assert found.ignored == found.initialised == () and all(found.weights[n].equal(w) for n, w in whole.items())
    assert (
        "model.safetensors: names contain _orig_mod. (torch.compile); they are read without it"
        in capsys.readouterr().err
    )
