"""A Hugging Face folder loads as a run does, with transformers' own numbers; nothing of it is run, nothing is written."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megabert import hf as pretrained
from megabert.commands import export, fill
from megabert.hf import read
from tests.commands.test_convert import make, one_line
from tests.helpers import runs


def files_of(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize("binary", [False, True], ids=["safetensors", "bin"])
@pytest.mark.parametrize("kind", ["BertModel", "BertForMaskedLM", "BertForPreTraining", "MegatronBertForPreTraining"])
@torch.no_grad()
def test_hidden_states_are_transformers_own(kind: str, binary: bool, tmp_path: Path) -> None:
    peer = make(tmp_path / "hf", kind, binary)
    before = files_of(tmp_path)
    found = pretrained.load(tmp_path / "hf")
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(5, found.config.model.vocab_size, (2, 30), generator=draw)
    whole = torch.full((2, 30), 30, dtype=torch.int32)
    positions = torch.arange(30, dtype=torch.int32).expand(2, -1)
    segments = (positions > 12).int()
    states = found.model(torch.device("cpu")).hidden_states(
        ids.int(), segments, positions, torch.zeros_like(whole), whole, whole[:, :1]
    )
    want = getattr(peer, "bert", peer)(ids, token_type_ids=segments.long(), output_hidden_states=True)
    assert len(states) == len(want.hidden_states) == 3
    for got, state in zip(states, want.hidden_states, strict=True):
        assert (got - state).abs().max() <= 1e-5
    missing = {
        "BertModel": ("masked-LM head", "next-sentence head"),
        "BertForMaskedLM": ("pooler", "next-sentence head"),
    }
    assert found.initialised == missing.get(kind, ())
    assert found.step == 0 and found.tokenizer.path == tmp_path / "hf" / "vocab.txt"
    assert files_of(tmp_path) == before


@pytest.mark.parametrize("kind", runs.KINDS)
def test_an_exported_folder_is_the_run_again(kind: str, tmp_path: Path) -> None:
    run = pretrained.load(runs.make(tmp_path / "run", kind))
    export.export(tmp_path / "run", tmp_path / "hf")
    found = pretrained.load(tmp_path / "hf")
    assert found.weights.keys() == run.weights.keys() and not found.initialised
    assert all(found.weights[name].equal(run.weights[name]) for name in run.weights)
    assert found.tokenizer.sha256 == run.tokenizer.sha256
    assert found.config.model.model_dump() == run.config.model.model_dump() | {"intermediate": 128}
    export.export(tmp_path / "hf", tmp_path / "again")
    weights = [folder / "model.safetensors" for folder in (tmp_path / "hf", tmp_path / "again")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.parametrize("lowercase", [True, False])
def test_a_tokenizer_json_is_enough(lowercase: bool, tmp_path: Path, capsys) -> None:
    make(tmp_path / "hf")
    vocabulary = tmp_path / "hf" / "vocab.txt"
    tokens = {token: i for i, token in enumerate(vocabulary.read_text(encoding="utf-8").splitlines())}
    vocabulary.unlink()
    transformers.BertTokenizer(vocab=tokens, do_lower_case=lowercase).save_pretrained(tmp_path / "hf")
    found = pretrained.load(tmp_path / "hf")
    peer = transformers.BertTokenizer.from_pretrained(tmp_path / "hf")
    text = "The quick caf\u00e9"
    assert found.tokenizer.path.name == "tokenizer.json" and found.tokenizer.casing.lowercase is lowercase
    assert found.tokenizer.encode_batch([text]) == [peer(text, add_special_tokens=False)["input_ids"]]
    assert fill.main(["--model", str(tmp_path / "hf"), "the [MASK]"]) == 0
    assert not capsys.readouterr().err


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_a_vocabulary_of_another_tokenizer_is_refused(file: str, tmp_path: Path) -> None:
    make(tmp_path / "hf")
    path = tmp_path / "hf" / file
    config = json.loads(path.read_text()) if path.is_file() else {"do_lower_case": False}
    path.write_text(json.dumps(config | {"tokenizer_class": "BertTokenizerFast"}))
    assert read.read(tmp_path / "hf").tokenizer.kind == "wordpiece"
    for field, value in {"tokenizer_class": "BertJapaneseTokenizer", "word_tokenizer_type": "mecab"}.items():
        path.write_text(json.dumps(config | {field: value}))
        with pytest.raises(ValueError, match=f"{file}: {field} is '{value}'"):
            read.read(tmp_path / "hf")


@pytest.mark.parametrize(
    "part, stage",
    [("normalizer", {"type": "Lowercase"}), ("normalizer", None), ("pre_tokenizer", {"type": "Whitespace"})],
)
def test_a_tokenizer_json_that_splits_otherwise_is_refused(part: str, stage: Any, tmp_path: Path) -> None:
    tokens = {token: i for i, token in enumerate(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"))}
    model = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "vocab": tokens}
    tree = {"model": model | {"max_input_chars_per_word": 100}, "normalizer": {"type": "BertNormalizer"}}
    tree["pre_tokenizer"] = {"type": "BertPreTokenizer"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    assert read.read_tokenizer(tmp_path).vocab_size == 6
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree | {part: stage}))
    kind = stage["type"] if stage else None
    with pytest.raises(ValueError, match=f"tokenizer.json: {part} is {kind!r}, only 'Bert"):
        read.read_tokenizer(tmp_path)


def test_a_missing_head_is_not_used(tmp_path: Path, capsys) -> None:
    make(tmp_path / "encoder", "BertModel")
    assert fill.main(["--model", str(tmp_path / "encoder"), "the [MASK]"]) == 2
    assert "has no masked-LM head" in one_line(capsys)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (shutil.rmtree, "no such folder"),
        (lambda f: (f / "model.safetensors").unlink(), "so it is no Hugging Face folder"),
        (lambda f: (f / "config.json").unlink(), "config.json: not found"),
        (lambda f: (f / "vocab.txt").unlink(), "name one with --tokenizer"),
        (lambda f: os.truncate(f / "model.safetensors", 5000), "cannot be read as weights"),
        (lambda f: (f / "vocab.txt").write_text((f / "vocab.txt").read_text() + "more\n"), "says vocab_size="),
    ],
)
def test_a_folder_without_a_model_is_one_line(change: Any, message: str, tmp_path: Path) -> None:
    make(tmp_path / "hf")
    change(tmp_path / "hf")
    with pytest.raises(ValueError) as caught:
        pretrained.load(tmp_path / "hf")
    assert message in str(caught.value) and "\n" not in str(caught.value)
