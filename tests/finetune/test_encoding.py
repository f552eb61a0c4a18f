"""Items: tokens and windows, every word once, every answer where its characters are, and transformers' ids and spans."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer as Library

from megabert.commands import export
from megabert.commands.extraction import Extractor
from megabert.data.tokenizer import Tokenizer
from megabert.finetune import files, prediction, save
from megabert.finetune.encoding import (
    MAX_QUESTION,
    TaskEncoding,
    TaskItem,
    _one_by_one,
    collect_labels,
    count_truncated,
    describe_labels,
    tags_every_token,
    warn_truncated,
)
from megabert.finetune.files import QuestionExample, SentenceExample, TextExample
from megabert.finetune.offsets import find_words
from megabert.finetune.tasks import PRESETS, Task, custom
from megabert.hf import tokenizer_folder
from megabert.hf.read import load
from megabert.hf.tokenizer_export import pad_encoded
from megabert.objectives.minimal_pairs import SentenceScorer
from tests.helpers import fast_tokenizers, finetuned, runs, tokenizers, wordpiece

PLAIN = custom("classify", text=["text"], label="label")
PAIR = custom("classify", text=["a", "b"], label="y")
TAG, SPAN = custom("tag"), PRESETS["squad1.1"]
INSIDE = ("O", "B-x", "I-x")
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "river", "sea", "shells", "by", "shore"]
CORPUS = [" ".join(random.Random(i).choices(WORDS, k=12)) + "." for i in range(200)]
KINDS = ("uncased", "unigram", "bpe", *tokenizers.FAST)
TEXTS = [
    "(Dave) sells shells to Bob: the fox",
    "Bob: she  said,\t“sea\nshells” (naïvely)",
    "  Anna\u00a0and Émile's river—bank ",
    "你好 the fox。再见 \u200b",
    "the [SEP] fox </s> of [MASK]s",
]
CPU, LENGTH = torch.device("cpu"), 40


@pytest.fixture(scope="module", params=["unigram", "uncased"])
def tokenizer(request, tmp_path_factory) -> Tokenizer:
    return tokenizers.make(tmp_path_factory.mktemp("tokenizer"), request.param)


def encode(
    task: Task, examples: list[Any], tokenizer: Tokenizer, labels: tuple[str, ...], *how: Any, **more: Any
) -> list[TaskItem]:
    return TaskEncoding(task, tokenizer, labels, *how, **more).encode(examples)


def text(a: str, b: str | None = None, label: str | float | None = "x") -> TextExample:
    return TextExample("0", "t.tsv, line 2", a, b, label)


def question(context: str, *answers: str, asked: str = "Who?") -> QuestionExample:
    found = [(answer, context.index(answer)) for answer in answers]
    return QuestionExample("q", "dev.json, question q", asked, context, tuple(found))


def plain_sentences(folder: Path, texts: list[str]) -> list[SentenceExample]:
    (folder / "plain.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return files.read(TAG, folder / "plain.jsonl", labelled=False)


def test_labels_of_task_or_training_file() -> None:
    assert collect_labels(PLAIN, [text("a", label=label) for label in ("y", "x", "y")]) == ("x", "y")
    numbered = ("10 stars", "2 stars", "10", "b", "2", "1.5", "1.25", "-1", "-1.5", "-20")
    in_order = ("-20", "-1.5", "-1", "1.25", "1.5", "2", "2 stars", "10", "10 stars", "b")
    assert collect_labels(PLAIN, [text("a", label=label) for label in numbered]) == in_order
    assert collect_labels(PRESETS["mnli"], []) == ("contradiction", "entailment", "neutral")
    tagged = [SentenceExample("0", "", ("a", "b"), ("O", "B-x")), SentenceExample("1", "", ("c",), ("I-x",))]
    assert collect_labels(TAG, tagged) == ("B-x", "I-x", "O")
    assert collect_labels(PRESETS["stsb"], []) == collect_labels(SPAN, []) == ()
    with pytest.raises(ValueError, match="'x' is the only label; two at least"):
        collect_labels(PLAIN, [text("a"), text("b")])
    three = [text("a", label=label) for label in "xyz"]
    with pytest.raises(ValueError, match="f1 is of two labels, there are 3; take macro_f1"):
        collect_labels(custom("classify", ["text"], "label", ["accuracy", "f1"]), three)
    assert collect_labels(custom("classify", ["text"], "label", ["macro_f1"]), three) == ("x", "y", "z")


def test_log_line_names_the_first_labels() -> None:
    assert describe_labels(PLAIN, ("a", "b")) == "a, b"
    both = custom("classify", ["text"], "label", ["f1", "accuracy", "auroc"])
    assert describe_labels(both, ("a", "b")) == "a, b (f1, auroc of b; --labels names another order)"
    assert describe_labels(TAG, list(map(str, range(1200)))) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, … (1,200 in all)"


@pytest.mark.parametrize(("task", "examples", "message"), [
    (PLAIN, [text("the fox"), text("the " * 6), text("the " * 7)], "1 of 3 texts are longer than 8 tokens and lost"),
    (PAIR, [text("the the", "the the the"), text("the the", "the the the the")], "1 of 2 texts are longer than 8"),
    (SPAN, [question("the " * 9, "the", asked="the the"), question("the", asked="the the the")], "1 of 2 questions are longer than 2"),
    (TAG, [SentenceExample("0", "", ("the",) * 20, None), SentenceExample("1", "", ("the", "x" * 60), None)],
     "1 of 2 sentences have words that are longer than 8 tokens and lost their end"),
])  # fmt: skip
def test_texts_that_lost_their_end_are_counted(tokenizer, task, examples, message, caplog) -> None:
    items = encode(task, examples, tokenizer, ("x",), 8, 3)
    warn_truncated("f.tsv", task, 8, count_truncated(items), len(examples))
    assert caplog.messages and f"f.tsv: {message}" in caplog.messages[0]
    caplog.clear()
    warn_truncated("f.tsv", task, 8, count_truncated(encode(task, examples[:1], tokenizer, ("x",), 8, 3)), 1)
    assert not caplog.messages


def test_layout_of_a_text_and_a_pair(tokenizer) -> None:
    a, b = tokenizer.encode_batch(["the quick fox", "sea shells"])
    (item,) = encode(PLAIN, [text("the quick fox", label="y")], tokenizer, ("x", "y"), 64)
    assert item.ids.tolist() == [tokenizer.cls_id, *a, tokenizer.sep_id] and item.second == len(item.ids)
    assert (item.positions.tolist(), item.targets.tolist(), item.example) == ([0], [1], 0)
    assert item.ids.dtype == np.int32 and item.targets.dtype == item.positions.dtype == np.int64
    (item,) = encode(PAIR, [text("the quick fox", "sea shells")], tokenizer, ("x", "y"), 64)
    assert item.ids.tolist() == [tokenizer.cls_id, *a, tokenizer.sep_id, *b, tokenizer.sep_id]
    assert item.second == len(a) + 2 and item.char_spans.shape == (0, 2)
    (two,) = encode(PAIR, [text("the quick fox", "sea shells")], tokenizer, ("x", "y"), 64, separators=2)
    assert two.ids.tolist() == [tokenizer.cls_id, *a, *[tokenizer.sep_id] * 2, *b, tokenizer.sep_id]
    assert two.second == len(a) + 3
    (score,) = encode(PRESETS["stsb"], [text("fox", "dogs", 2.5)], tokenizer, (), 64)
    assert score.targets.dtype == np.float32 and score.targets.tolist() == [2.5]
    (bare,) = encode(PLAIN, [text("fox", label=None)], tokenizer, ("x", "y"), 64)
    assert len(bare.targets) == 0


@pytest.mark.parametrize("separators", [1, 2])
def test_long_pairs_are_truncated_as_by_transformers(separators: int, tokenizer, tmp_path) -> None:
    peer, rng = tokenizers.peer(tokenizer, tmp_path), random.Random(3)
    written = tokenizer_folder.files(tokenizer, 512, separators=separators)["tokenizer.json"]
    peer.backend_tokenizer.post_processor = Library.from_str(written.decode()).post_processor
    for length in (8, 9, 16, 33):
        for equal in [False] * 20 + [True] * 3:
            texts = [" ".join(rng.choices(WORDS, k=rng.randint(1, 12))) for _ in range(2)]
            texts = [texts[0]] * 2 if equal else texts
            (item,) = encode(PAIR, [text(*texts)], tokenizer, ("x",), length, separators=separators)
            want = peer(*texts, truncation=True, max_length=length, return_token_type_ids=True)
            assert item.ids.tolist() == want["input_ids"] and item.second == want["token_type_ids"].count(0)
    (ids,) = tokenizer.encode_batch([CORPUS[0] + CORPUS[1]])
    (item,) = encode(PLAIN, [text(CORPUS[0] + CORPUS[1])], tokenizer, ("x",), 20)
    assert len(ids) > 18 and item.ids.tolist() == [tokenizer.cls_id, *ids[:18], tokenizer.sep_id]


def test_first_token_of_a_word_carries_its_tag(tokenizer) -> None:
    words, tags, labels = ("the", "foxes", "\x01", "shells"), ("O", "B-x", "O", "I-x"), ("B-x", "I-x", "O")
    (item,) = encode(TAG, [SentenceExample("0", "", words, tags)], tokenizer, labels, 64)
    tokens = [ids or [tokenizer.unk_id] for ids in tokenizer.encode_batch(words)]
    assert tokens[2] == [tokenizer.unk_id]
    assert item.ids.tolist() == [tokenizer.cls_id, *(i for p in tokens for i in p), tokenizer.sep_id]
    assert item.targets.tolist() == [2, 0, 2, 1] and item.second == len(item.ids)
    assert [item.ids[p] for p in item.positions] == [p[0] for p in tokens]
    (bare,) = encode(TAG, [SentenceExample("0", "", words, None)], tokenizer, labels, 64)
    assert bare.targets.tolist() == [] and bare.positions.tolist() == item.positions.tolist()


@pytest.mark.parametrize("stride", [1, 9, 1000])
def test_every_word_is_tagged_once_with_context(tokenizer, stride) -> None:
    rng = random.Random(stride)
    labels = tuple(f"B-{i}" for i in range(100))
    for length in (8, 12, 20):
        words = rng.choices([*WORDS, "x" * 60, "\x01"], k=60)  # one is longer than a window
        items = encode(TAG, [SentenceExample("0", "", tuple(words), labels[:60])], tokenizer, labels, length, stride)
        assert np.concatenate([i.targets for i in items]).tolist() == list(range(60))
        assert all(len(i.ids) <= length and i.positions.min() > 0 for i in items)
        first = [ids[0] if ids else tokenizer.unk_id for ids in tokenizer.encode_batch(words)]
        assert [int(i.ids[p]) for i in items for p in i.positions] == first
    plain = rng.choices(WORDS, k=60)
    items = encode(TAG, [SentenceExample("0", "", tuple(plain), None)], tokenizer, labels, 40, 12)
    if len(items) > 2:  # a word in the middle has neighbours on both sides in its window
        assert all(i.positions[0] > 1 for i in items[1:])
        assert all(i.positions[-1] < len(i.ids) - 2 for i in items[:-1])


def test_answers_map_to_their_tokens(tokenizer) -> None:
    context = "Café ﬁfty\u00a0foxes  jump;\tthe <sea> of “Ada” shells, \u200bnear (the) river bank!"
    prefix = len(tokenizer.encode_batch(["which foxes?"])[0]) + 2
    for answer in ("Café", "foxes", "foxes  jump", "Ada", "shells", "shells, \u200bnear", "the) river", "bank!"):
        (item,) = encode(SPAN, [question(context, answer, asked="which foxes?")], tokenizer, (), 256)
        start, end = item.targets
        got = context[item.char_spans[start, 0] : item.char_spans[end, 1]]
        assert answer in got and len(got) <= len(answer) + 2, (answer, got)
        assert item.second == prefix and item.positions.tolist() == [0, *range(prefix, len(item.ids) - 1)]
        assert item.ids.tolist()[prefix:-1] == tokenizer.encode_batch([context])[0]
        assert item.char_spans.shape == (len(item.positions), 2) and item.char_spans[0].tolist() == [0, 0]


def test_answer_in_each_window_that_holds_it(tokenizer) -> None:
    context, asked = " ".join(CORPUS[:5]) + " zebra stripes " + " ".join(CORPUS[5:9]), "q " * 200
    first, last = context.index("zebra"), context.index("stripes") + len("stripes")
    items = encode(SPAN, [question(context, "zebra stripes", asked=asked)], tokenizer, (), 48, 7)
    assert all(i.second == 2 + 22 and len(i.ids) <= 48 for i in items)  # a question takes half the window at most
    holding = 0
    for item in items:
        covered = item.char_spans[1, 0] <= first and item.char_spans[-1, 1] >= last
        start, end = item.targets
        assert ((start, end) != (0, 0)) == covered, [context[a:b] for a, b in item.char_spans[1:]]
        holding += covered
        assert not covered or context[item.char_spans[start, 0] : item.char_spans[end, 1]] == "zebra stripes"
    assert holding >= 1 and len(items) > 5
    (wide,) = encode(SPAN, [question("sea", "sea", asked=asked)], tokenizer, (), 512)
    assert wide.second == 2 + MAX_QUESTION


def test_questions_without_answers_or_labels(tokenizer) -> None:
    for answers, targets in (((), [0, 0]), (None, [])):
        asked = QuestionExample("q", "", "Who?", "The sea.", answers)
        (item,) = encode(PRESETS["squad2.0"], [asked], tokenizer, (), 64)
        assert item.targets.tolist() == targets
    vanished = question("sea \u200b shore", "\u200b")  # an answer that no token holds
    (item,) = encode(SPAN, [vanished], tokenizer, (), 64)
    assert item.targets.tolist() == [0, 0] and item.positions[0] == 0


def test_unknown_label_is_one_line(tokenizer) -> None:
    has = r"label 'z' is not in the training file, which has x, y; .*--labels"
    with pytest.raises(ValueError, match=rf"^t\.tsv, line 2: {has}"):
        encode(PLAIN, [text("a", label="z")], tokenizer, ("x", "y"), 64)
    sentence = SentenceExample("0", "t.conll, line 9", ("a",), ("B-z",))
    with pytest.raises(ValueError, match=r"^t\.conll, line 9: label 'B-z' is not in the training file"):
        encode(TAG, [sentence], tokenizer, ("O", "B-x"), 64)


@pytest.mark.parametrize("kind", KINDS)
def test_items_have_the_exports_ids(kind: str, tmp_path: Path) -> None:
    found = tokenizers.make(tmp_path, kind)
    peer = tokenizers.peer(found, tmp_path)
    for task, columns, length in ((PLAIN, (TEXTS,), LENGTH), (PAIR, (TEXTS, TEXTS), 31)):
        items = encode(task, [text(*row) for row in zip(*columns, strict=True)], found, ("x", "y"), length)
        want = peer(*columns, truncation=True, max_length=length)["input_ids"]
        assert [item.ids.tolist() for item in items] == want
    named = [one.replace("[MASK]", found.tokens[found.mask_id]) for one in TEXTS]
    assert [pad_encoded(found, one)[0].tolist() for one in TEXTS] == peer(named)["input_ids"]
    whole = peer(TEXTS, add_special_tokens=False)["input_ids"]
    for example, ids in zip(plain_sentences(tmp_path, TEXTS), whole, strict=True):
        (sentence,) = encode(TAG, [example], found, INSIDE, 200)
        assert sentence.ids.tolist() == [found.cls_id, *ids, found.sep_id]
        (span,) = encode(SPAN, [QuestionExample("0", "", "who", example.text, None)], found, (), 200)
        assert span.ids[span.second : -1].tolist() == ids


def test_features_and_pairs_have_the_exports_ids(tmp_path: Path) -> None:
    path = fast_tokenizers.write(tmp_path / "tokenizer.json")
    model = load(runs.make(tmp_path / "run", str(path), max_positions=100))
    want = tokenizers.peer(model.tokenizer, tmp_path)(TEXTS)["input_ids"]
    scorer = SentenceScorer(model.model(CPU), model.config, model.tokenizer, CPU, line=True)
    assert [ids.tolist() for ids in scorer.encode(TEXTS)] == want
    assert [ids.tolist() for window in Extractor(model).windows(TEXTS) for ids in window.texts] == want


@pytest.mark.parametrize("kind", KINDS)
def test_a_pipelines_spans_are_those_of_predict(kind: str, tmp_path: Path) -> None:
    """Of a model with random weights, whose words are cut through by many spans."""
    texts = [" ".join(text.split("\n")) for text in TEXTS[:4]]
    (tmp_path / "lines.txt").write_text("\n".join(texts) + "\n")
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    spans = [{"start": 0, "end": 5, "label": "A"}, {"start": 6, "end": 9, "label": "B"}]
    (tmp_path / "train.jsonl").write_text(json.dumps({"text": "quick fox", "spans": spans}) + "\n")
    vocabulary = kind if kind in runs.KINDS else str(tokenizers.make(tmp_path, kind).path)
    source = finetuned.make(tmp_path, TAG, tmp_path / "train.jsonl", {"max_length": LENGTH}, vocabulary)
    assert export.main(["--model", str(source), "--output", str(tmp_path / "hf")]) == 0
    prediction.predict_file(source, tmp_path / "lines.txt", tmp_path / "out.jsonl", lines=True)
    prediction.predict_file(source, tmp_path / "lines.jsonl", tmp_path / "again.jsonl")
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "out.jsonl").read_bytes()
    options = {"device": "cpu", "aggregation_strategy": "simple"}
    pipe = transformers.pipeline("token-classification", str(tmp_path / "hf"), **options)
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
    found, text = tokenizers.make(tmp_path, "json-bytes"), "(shells  Zoë): sea"
    (words,) = plain_sentences(tmp_path, [text])
    example = SentenceExample("0", "", words.words, ("O", "B-x", "I-x", "O", "O", "O"), text, words.places)
    (item,) = encode(TAG, [example], found, INSIDE, LENGTH, every_token=True)
    assert item.words is not None and item.targets[item.words].tolist() == [0, 1, 2, 0, 0, 0]
    shown: dict[str, list[str]] = {label: [] for label in INSIDE}
    for (start, end), target in zip(item.char_spans.tolist(), item.targets.tolist(), strict=True):
        shown[INSIDE[target]].append(text[start:end])
    assert "".join(shown["B-x"]) == "s" and "".join(dict.fromkeys(shown["I-x"])) == "hellsZoë"
    assert np.array_equal(item.positions, np.arange(1, len(item.ids) - 1))
    (plain,) = encode(TAG, [example], found, INSIDE, LENGTH)
    assert plain.words is None and plain.positions.tolist() == (item.positions[item.words]).tolist()


@pytest.mark.parametrize("every_token", [False, True])
def test_words_without_tokens_have_a_place(every_token: bool, tmp_path: Path) -> None:
    """Of accents, which BERT drops: the next token's, at the end the last one's, [CLS] where there is none."""
    found = tokenizers.make(tmp_path, "uncased")
    for words in (["\u0301"], ["the", "\u0301", "fox", "\u0301"], [*["sea", "\u0301"] * 30, *["\u0301"] * 20]):
        (plain,) = plain_sentences(tmp_path, [" ".join(words)])
        example = SentenceExample("0", "", plain.words, ("B-x",) * len(words), plain.text, plain.places)
        items = encode(TAG, [example], found, ("B-x", "I-x", "O"), 12, 3, every_token)
        read = [item.positions if item.words is None else item.positions[item.words] for item in items]
        assert sum(map(len, read)) == len(words)
        for item, positions in zip(items, read, strict=True):
            assert len(item.positions) == len(item.targets) and len(item.ids) <= 12
            assert positions.max() < max(len(item.ids) - 1, 1) and (positions.min() > 0) == (len(item.ids) > 2)


@pytest.mark.parametrize("kind", ["unigram", "json-bytes"])
def test_odd_texts_are_read_in_their_windows(kind: str, tmp_path: Path) -> None:
    """Also where a token reaches across words: every word once, and never at [SEP]."""
    found = tokenizers.make(tmp_path, kind)
    peer = tokenizers.peer(found, tmp_path)
    texts = [text for text in wordpiece.odd_texts(100, seed=3) if find_words(text)]
    examples = plain_sentences(tmp_path, texts)
    for every_token in (False, True):
        whole = encode(TAG, examples, found, INSIDE, 10_000, 128, every_token)
        assert [item.ids.tolist() for item in whole] == peer(texts, verbose=False)["input_ids"]
        items = encode(TAG, examples, found, INSIDE, 12, 4, every_token)
        assert all(len(item.ids) <= 12 and item.positions.max() < len(item.ids) - 1 for item in items)
        read = [item.positions if item.words is None else item.words for item in items]
        assert sum(map(len, read)) == sum(len(example.words) for example in examples)


@pytest.mark.parametrize("kind", ["unigram", "uncased"])
def test_words_that_are_encoded_one_by_one_are_cleaned(kind: str, tmp_path: Path) -> None:
    found, words = tokenizers.make(tmp_path, kind), ("the\u200b", "fo\u00adx", "cafe\u0301")
    ids, _ = _one_by_one(words, [(0, 1), (1, 2), (2, 3)], found)
    assert ids.tolist() == [i for word in found.encode_texts(words) for i in word]


def test_saved_models_know_if_they_tag_every_token(tmp_path: Path) -> None:
    assert tags_every_token(TAG, ("B-x", "I-x", "O"))
    for labels in (("B-x", "O"), ("B-x", "I-x", "E-x", "O"), ("NOUN", "O")):
        assert not tags_every_token(TAG, labels)
    for task in (custom("tag", metrics=["accuracy"]), PLAIN):
        assert not tags_every_token(task, ("B-x", "I-x", "O"))
    (tmp_path / "train.conll").write_text("quick B-x\nfox I-x\nran O\n")
    source = finetuned.make(tmp_path, TAG, tmp_path / "train.conll")
    assert save.load(source, CPU).described.every_token
    # one saved before did not
    tree = json.loads((source / save.DESCRIPTION).read_text())
    del tree["every_token"]
    (source / save.DESCRIPTION).write_text(json.dumps(tree))
    (item,) = save.load(source, CPU).items(TAG, [SentenceExample("0", "", ("quick", "fox"), None)])
    assert item.words is None and len(item.positions) == 2
