"""Texts encoded and tagged in fine-tuning as by transformers on the export, for every kind of tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from megabert.commands import export
from megabert.commands.extraction import Extractor
from megabert.data.text import find_words
from megabert.data.tokenizer import Tokenizer
from megabert.finetune import datasets, prediction, save, tasks
from megabert.finetune.datasets import QuestionExample, SentenceExample, TextExample
from megabert.finetune.encoding import encode, tags_every_token
from megabert.hf import tokenizer_files
from megabert.hf.read import load
from megabert.objectives.minimal_pairs import SentenceScorer
from tests.helpers import fast_tokenizers, finetuned, runs, wordpiece

KINDS = ("uncased", "unigram", "bpe", *(f"json-{kind}" for kind in fast_tokenizers.KINDS))
TEXTS = [
    "(Dave) sells shells to Bob: the fox",
    "Bob: she  said,\t“sea\nshells” (naïvely)",
    "  Anna\u00a0and Émile's river—bank ",
    "你好 the fox。再见 \u200b",
    "the [SEP] fox </s> of [MASK]s",
]
CPU, LENGTH = torch.device("cpu"), 40
PLAIN, TAG = tasks.custom("classify", ["text"], "label"), tasks.custom("tag")


def tokenizer(folder: Path, kind: str) -> Tokenizer:
    if kind in runs.KINDS:
        return runs.tokenizer(folder, kind)
    return Tokenizer.load(fast_tokenizers.write(folder / "tokenizer.json", kind.removeprefix("json-")))


def find_peer(found: Tokenizer, folder: Path) -> Any:
    for name, data in tokenizer_files.files(found, LENGTH).items():
        (folder / name).write_bytes(data)
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_items_have_the_exports_ids(kind: str, tmp_path: Path) -> None:
    found = tokenizer(tmp_path, kind)
    peer = find_peer(found, tmp_path)
    texts = peer(TEXTS, truncation=True, max_length=LENGTH)["input_ids"]
    examples = [TextExample("0", "", text, None, None) for text in TEXTS]
    assert [item.ids.tolist() for item in encode(PLAIN, examples, found, ("x", "y"), LENGTH)] == texts
    pairs = [TextExample("0", "", text, text, None) for text in TEXTS]
    task = tasks.custom("classify", ["a", "b"], "label")
    want = peer(TEXTS, TEXTS, truncation=True, max_length=31)["input_ids"]
    assert [item.ids.tolist() for item in encode(task, pairs, found, ("x", "y"), 31)] == want
    whole = peer(TEXTS, add_special_tokens=False)["input_ids"]
    for text, ids in zip(TEXTS, whole, strict=True):
        (sentence,) = encode(TAG, [datasets._sentence("0", "", text)], found, ("O", "B-x", "I-x"), 200)
        assert sentence.ids.tolist() == [found.cls_id, *ids, found.sep_id]
        asked = QuestionExample("0", "", "who", text, None)
        (span,) = encode(tasks.preset("squad1.1"), [asked], found, (), 200)
        assert span.ids[span.second : -1].tolist() == ids


def test_features_and_pairs_have_the_exports_ids(tmp_path: Path) -> None:
    path = fast_tokenizers.write(tmp_path / "tokenizer.json")
    model = load(runs.make(tmp_path / "run", str(path), max_positions=100))
    want = find_peer(model.tokenizer, tmp_path)(TEXTS)["input_ids"]
    scorer = SentenceScorer(model.model(CPU), model.config, model.tokenizer, CPU, line=True)
    assert [ids.tolist() for ids in scorer.encode(TEXTS)] == want
    assert [ids.tolist() for ids in Extractor(model)._tokenize(TEXTS)] == want


@pytest.mark.parametrize("kind", KINDS)
def test_a_pipelines_spans_are_those_of_predict(kind: str, tmp_path: Path) -> None:
    """Of a model with random weights, whose words are cut through by many spans."""
    texts = [" ".join(text.split("\n")) for text in TEXTS[:4]]
    (tmp_path / "lines.txt").write_text("\n".join(texts) + "\n")
    spans = [{"start": 0, "end": 5, "label": "A"}, {"start": 6, "end": 9, "label": "B"}]
    (tmp_path / "train.jsonl").write_text(json.dumps({"text": "quick fox", "spans": spans}) + "\n")
    vocabulary = kind
    if kind not in runs.KINDS:
        vocabulary = str(fast_tokenizers.write(tmp_path / "tokenizer.json", kind.removeprefix("json-")))
    source = finetuned.make(tmp_path, TAG, tmp_path / "train.jsonl", {"max_length": LENGTH}, vocabulary)
    assert export.main(["--model", str(source), "--output", str(tmp_path / "hf")]) == 0
    prediction.predict_file(source, tmp_path / "lines.txt", tmp_path / "out.jsonl", lines=True)
    pipe = transformers.pipeline(
        "token-classification", str(tmp_path / "hf"), device="cpu", aggregation_strategy="simple"
    )
    count = 0
    for text, line in zip(texts, (tmp_path / "out.jsonl").read_text().splitlines(), strict=True):
        want = [{"start": e["start"], "end": e["end"], "label": e["entity_group"]} for e in pipe(text)]
        # a space that is a token of byte-level BPE has no characters
        assert json.loads(line) == {"text": text, "spans": [span for span in want if span["start"] < span["end"]]}
        assert not any(text[span["start"]] == " " for span in want if 0 < span["start"] < span["end"])
        count += len(want)
    assert count > 8


def test_all_tokens_of_a_word_are_tagged(tmp_path: Path) -> None:
    """The first one as the word, the others inside; a token between the words of an entity too."""
    found = tokenizer(tmp_path, "json-bytes")
    text = "(shells  Zoë): sea"
    words = datasets._sentence("0", "", text)
    tags = ("O", "B-x", "I-x", "O", "O", "O")
    example = SentenceExample("0", "", words.words, tags, text, words.places)
    (item,) = encode(TAG, [example], found, ("O", "B-x", "I-x"), LENGTH, every_token=True)
    assert item.words is not None and item.targets[item.words].tolist() == [0, 1, 2, 0, 0, 0]
    shown = {}
    for (start, end), target in zip(item.char_spans.tolist(), item.targets.tolist(), strict=True):
        shown.setdefault(("O", "B-x", "I-x")[target], []).append(text[start:end])
    assert "".join(shown["B-x"]) == "s" and "".join(dict.fromkeys(shown["I-x"])) == "hellsZoë"
    assert np.array_equal(item.positions, np.arange(1, len(item.ids) - 1))
    (plain,) = encode(TAG, [example], found, ("O", "B-x", "I-x"), LENGTH)
    assert plain.words is None and plain.positions.tolist() == (item.positions[item.words]).tolist()


@pytest.mark.parametrize("every_token", [False, True])
def test_words_without_tokens_have_a_place(every_token: bool, tmp_path: Path) -> None:
    """Of accents, which BERT drops: the next token's, at the end the last one's, [CLS] where there is none; in every window."""
    found = tokenizer(tmp_path, "uncased")
    for words in (["\u0301"], ["the", "\u0301", "fox", "\u0301"], [*["sea", "\u0301"] * 30, *["\u0301"] * 20]):
        text = " ".join(words)
        example = datasets._sentence("0", "", text)
        example = SentenceExample("0", "", example.words, ("B-x",) * len(words), text, example.places)
        items = encode(TAG, [example], found, ("B-x", "I-x", "O"), 12, 3, every_token)
        read = [item.positions if item.words is None else item.positions[item.words] for item in items]
        assert sum(map(len, read)) == len(words)
        for item, positions in zip(items, read, strict=True):
            assert len(item.positions) == len(item.targets) and len(item.ids) <= 12
            assert positions.max() < max(len(item.ids) - 1, 1) and (positions.min() > 0) == (len(item.ids) > 2)


@pytest.mark.parametrize("kind", ["unigram", "json-bytes"])
def test_odd_texts_are_read_in_their_windows(kind: str, tmp_path: Path) -> None:
    """Also where a token reaches across words: every word once, and never at [SEP]."""
    found = tokenizer(tmp_path, kind)
    peer = find_peer(found, tmp_path)
    texts = [text for text in wordpiece.odd_texts(100, seed=3) if find_words(text)]
    examples = [datasets._sentence(str(i), "", text) for i, text in enumerate(texts)]
    for every_token in (False, True):
        whole = encode(TAG, examples, found, ("O", "B-x", "I-x"), 10_000, 128, every_token)
        assert [item.ids.tolist() for item in whole] == peer(texts, verbose=False)["input_ids"]
        items = encode(TAG, examples, found, ("O", "B-x", "I-x"), 12, 4, every_token)
        assert all(len(item.ids) <= 12 and item.positions.max() < len(item.ids) - 1 for item in items)
        read = [item.positions if item.words is None else item.words for item in items]
        assert sum(map(len, read)) == sum(len(example.words) for example in examples)


def test_which_labels_tag_every_token() -> None:
    assert tags_every_token(TAG, ("B-x", "I-x", "O"))
    for labels in (("B-x", "O"), ("B-x", "I-x", "E-x", "O"), ("NOUN", "O")):
        assert not tags_every_token(TAG, labels)
    assert not tags_every_token(tasks.custom("tag", metrics=["accuracy"]), ("B-x", "I-x", "O"))
    assert not tags_every_token(PLAIN, ("B-x", "I-x", "O"))


def test_a_model_saved_before_is_read_at_first_tokens(tmp_path: Path) -> None:
    (tmp_path / "train.conll").write_text("quick B-x\nfox I-x\nran O\n")
    source = finetuned.make(tmp_path, TAG, tmp_path / "train.conll")
    assert save.load(source, CPU).described.every_token
    tree = json.loads((source / save.DESCRIPTION).read_text())
    del tree["every_token"]
    (source / save.DESCRIPTION).write_text(json.dumps(tree))
    model = save.load(source, CPU)
    (item,) = model.items(TAG, [SentenceExample("0", "", ("quick", "fox"), None)])
    assert item.words is None and len(item.positions) == 2
