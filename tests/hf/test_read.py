"""A Hugging Face folder loads as a run does, with transformers' own numbers; nothing of it is run, nothing is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megabert import hf as pretrained
from megabert.commands import convert, fill
from megabert.hf import read
from tests.commands.test_convert import make, one_line
from tests.helpers import fast_tokenizers, runs


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
    assert found.initialised == (("masked-LM head", "next-sentence head") if kind == "BertModel" else ())
    assert found.config.model.nsp == ("pooler.weight" in found.weights) == (kind != "BertForMaskedLM")
    assert found.step == 0 and found.tokenizer.path == tmp_path / "hf" / "vocab.txt"
    assert files_of(tmp_path) == before


def test_weights_in_several_files_are_those_of_one(tmp_path: Path) -> None:
    peer = make(tmp_path / "hf")
    whole = pretrained.load(tmp_path / "hf").weights
    (tmp_path / "hf" / "model.safetensors").unlink()
    peer.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 2
    parts = pretrained.load(tmp_path / "hf").weights
    assert parts.keys() == whole.keys() and all(parts[name].equal(whole[name]) for name in whole)


@pytest.mark.parametrize("lowercase", [True, False])
def test_a_tokenizer_json_is_enough(lowercase: bool, tmp_path: Path) -> None:
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
    convert.convert(tmp_path / "hf", tmp_path / "run")
    assert list(tokens) == (tmp_path / "run" / "vocab.txt").read_text(encoding="utf-8").splitlines()
    assert pretrained.load(tmp_path / "run").tokenizer.casing.lowercase is lowercase


def test_tokenizer_json_wins_over_a_sentencepiece_model(tmp_path: Path) -> None:
    """Whose ids are others in XLM-RoBERTa's and CamemBERT's folders."""
    fast_tokenizers.write(tmp_path / "tokenizer.json", kind="unigram")
    (tmp_path / "sentencepiece.bpe.model").write_bytes(runs.sentencepiece_model())
    assert read.read_tokenizer(tmp_path).path.name == "tokenizer.json"


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


def test_a_folder_without_a_model_is_one_line(tmp_path: Path) -> None:
    make(tmp_path / "hf")
    missing = {"config.json": "config.json: not found", "model.safetensors": "so it is not a Hugging Face folder"}
    for file, message in missing.items():
        (tmp_path / "hf" / file).unlink()
        with pytest.raises(ValueError, match=message):
            pretrained.load(tmp_path / "hf")
