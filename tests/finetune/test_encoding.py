"""Items: tokens and windows, every word once, every answer where its characters are."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import transformers

from megabert.data.tokenizer import SPECIAL_TOKENS, Tokenizer
from megabert.finetune.datasets import QuestionExample, SentenceExample, TextExample
from megabert.finetune.encoding import MAX_QUESTION, collect_labels, encode
from megabert.finetune.tasks import PRESETS, custom
from megabert.hf import tokenizer_files
from tests.helpers import wordpiece

PLAIN = custom("classify", text=["text"], label="label")
PAIR = custom("classify", text=["a", "b"], label="y")
TAG = custom("tag")
SPAN = PRESETS["squad1.1"]
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "river", "sea", "shells", "by", "shore"]  # fmt: skip
CORPUS = [" ".join(random.Random(i).choices(WORDS, k=12)) + "." for i in range(200)]


@pytest.fixture(scope="module", params=["sentencepiece", "wordpiece"])
def tokenizer(request, tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    if request.param == "wordpiece":
        return Tokenizer.load(wordpiece.write(folder / "vocab.txt"))
    model = io.BytesIO()
    options: dict = {"control_symbols": ["[MASK]"], "vocab_size": 60, "hard_vocab_limit": False, "minloglevel": 2}
    for i, (name, token) in enumerate(zip(("pad", "unk", "bos", "eos"), SPECIAL_TOKENS, strict=False)):
        options |= {f"{name}_id": i, f"{name}_piece": token}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(CORPUS), model_writer=model, **options)
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    return Tokenizer.load(folder / "tokenizer.model")


def text(a: str, b: str | None = None, label: str | float | None = "x") -> TextExample:
    return TextExample("0", "t.tsv, line 2", a, b, label)


def question(context: str, *answers: str, asked: str = "Who?", start: int | None = None) -> QuestionExample:
    found = [(answer, context.index(answer) if start is None else start) for answer in answers]
    return QuestionExample("q", "dev.json, question q", asked, context, tuple(found))


def exported(tokenizer: Tokenizer, folder: Path) -> Any:
    """AutoTokenizer of the exported files."""
    for name, data in tokenizer_files.files(tokenizer, 512).items():
        (folder / name).write_bytes(data)
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


def test_labels_of_task_or_training_file() -> None:
    assert collect_labels(PLAIN, [text("a", label=label) for label in ("y", "x", "y")]) == ("x", "y")
    numbered = ("10 stars", "2 stars", "10", "b", "2", "1.5")
    in_order = ("1.5", "2", "2 stars", "10", "10 stars", "b")
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


def test_layout_of_a_text_and_a_pair(tokenizer) -> None:
    a, b = tokenizer.encode_batch(["the quick fox", "sea shells"])
    (item,) = encode(PLAIN, [text("the quick fox", label="y")], tokenizer, ("x", "y"), 64)
    assert item.ids.tolist() == [tokenizer.cls_id, *a, tokenizer.sep_id] and item.second == len(item.ids)
    assert (item.positions.tolist(), item.targets.tolist(), item.example) == ([0], [1], 0)
    assert item.ids.dtype == np.int32 and item.targets.dtype == item.positions.dtype == np.int64
    (item,) = encode(PAIR, [text("the quick fox", "sea shells")], tokenizer, ("x", "y"), 64)
    assert item.ids.tolist() == [tokenizer.cls_id, *a, tokenizer.sep_id, *b, tokenizer.sep_id]
    assert item.second == len(a) + 2 and item.char_spans.shape == (0, 2)
    (score,) = encode(PRESETS["stsb"], [text("fox", "dogs", 2.5)], tokenizer, (), 64)
    assert score.targets.dtype == np.float32 and score.targets.tolist() == [2.5]
    (bare,) = encode(PLAIN, [text("fox", label=None)], tokenizer, ("x", "y"), 64)
    assert len(bare.targets) == 0


def test_long_pairs_are_truncated_as_by_transformers(tokenizer, tmp_path) -> None:
    peer = exported(tokenizer, tmp_path)
    rng = random.Random(3)
    for length in (8, 9, 16, 33):
        for equal in [False] * 20 + [True] * 3:
            texts = [" ".join(rng.choices(WORDS, k=rng.randint(1, 12))) for _ in range(2)]
            texts = [texts[0]] * 2 if equal else texts
            (item,) = encode(PAIR, [text(*texts)], tokenizer, ("x",), length)
            want = peer(*texts, truncation=True, max_length=length, return_token_type_ids=True)
            assert item.ids.tolist() == want["input_ids"] and item.second == want["token_type_ids"].count(0)
    (ids,) = tokenizer.encode_batch([CORPUS[0] + CORPUS[1]])
    (item,) = encode(PLAIN, [text(CORPUS[0] + CORPUS[1])], tokenizer, ("x",), 20)
    assert len(ids) > 18 and item.ids.tolist() == [tokenizer.cls_id, *ids[:18], tokenizer.sep_id]


def test_first_token_of_a_word_carries_its_tag(tokenizer) -> None:
    words, tags = ("the", "foxes", "\x01", "shells"), ("O", "B-x", "O", "I-x")
    (item,) = encode(TAG, [SentenceExample("0", "", words, tags)], tokenizer, ("B-x", "I-x", "O"), 64)
    tokens = [ids or [tokenizer.unk_id] for ids in tokenizer.encode_batch(words)]
    assert tokens[2] == [tokenizer.unk_id]
    assert item.ids.tolist() == [tokenizer.cls_id, *(i for p in tokens for i in p), tokenizer.sep_id]
    assert item.targets.tolist() == [2, 0, 2, 1] and item.second == len(item.ids)
    assert [item.ids[p] for p in item.positions] == [p[0] for p in tokens]
    (bare,) = encode(TAG, [SentenceExample("0", "", words, None)], tokenizer, ("B-x", "I-x", "O"), 64)
    assert bare.targets.tolist() == [] and bare.positions.tolist() == item.positions.tolist()


@pytest.mark.parametrize("stride", [1, 9, 1000])
def test_every_word_is_tagged_once_with_context(tokenizer, stride) -> None:
    rng = random.Random(stride)
    labels = tuple(f"B-{i}" for i in range(100))
    for length in (8, 12, 20):
        words = rng.choices([*WORDS, "x" * 60, "\x01"], k=60)  # one is longer than a window
        (example,) = [SentenceExample("0", "", tuple(words), labels[:60])]
        items = encode(TAG, [example], tokenizer, labels, length, stride)
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
    asked = "which foxes?"
    prefix = len(tokenizer.encode_batch([asked])[0]) + 2
    for answer in ("Café", "foxes", "foxes  jump", "Ada", "shells", "shells, \u200bnear", "the) river", "bank!"):
        (item,) = encode(SPAN, [question(context, answer, asked=asked)], tokenizer, (), 256)
        start, end = item.targets
        got = context[item.char_spans[start, 0] : item.char_spans[end, 1]]
        assert answer in got and len(got) <= len(answer) + 2, (answer, got)
        assert item.second == prefix and item.positions.tolist() == [0, *range(prefix, len(item.ids) - 1)]
        assert item.ids.tolist()[prefix:-1] == tokenizer.encode_batch([context])[0]
        assert item.char_spans.shape == (len(item.positions), 2) and item.char_spans[0].tolist() == [0, 0]


def test_answer_in_each_window_that_holds_it(tokenizer) -> None:
    context = " ".join(CORPUS[:5]) + " zebra stripes " + " ".join(CORPUS[5:9])
    asked = "q " * 200
    items = encode(SPAN, [question(context, "zebra stripes", asked=asked)], tokenizer, (), 48, 7)
    assert all(i.second == 2 + 22 and len(i.ids) <= 48 for i in items)  # a question takes half the window at most
    holding = 0
    for item in items:
        inside = [context[a:b] for a, b in item.char_spans[1:]]
        covered = item.char_spans[1, 0] <= context.index("zebra") and item.char_spans[-1, 1] >= (
            context.index("stripes") + len("stripes")
        )
        assert (item.targets.tolist() != [0, 0]) == covered, inside
        if covered:
            holding += 1
            start, end = item.targets
            assert context[item.char_spans[start, 0] : item.char_spans[end, 1]] == "zebra stripes"
    assert holding >= 1 and len(items) > 5
    (wide,) = encode(SPAN, [question("sea", "sea", asked=asked)], tokenizer, (), 512)
    assert wide.second == 2 + MAX_QUESTION


def test_questions_without_answers_or_labels(tokenizer) -> None:
    none = QuestionExample("q", "", "Who?", "The sea.", ())
    (item,) = encode(PRESETS["squad2.0"], [none], tokenizer, (), 64)
    assert item.targets.tolist() == [0, 0]
    (item,) = encode(PRESETS["squad2.0"], [QuestionExample("q", "", "Who?", "The sea.", None)], tokenizer, (), 64)
    assert item.targets.tolist() == []
    vanished = question("sea \u200b shore", "\u200b")  # an answer that no token holds
    (item,) = encode(SPAN, [vanished], tokenizer, (), 64)
    assert item.targets.tolist() == [0, 0] and item.positions[0] == 0


def test_unknown_label_is_one_line(tokenizer) -> None:
    with pytest.raises(
        ValueError, match=r"^t\.tsv, line 2: label 'z' is not in the training file, which has x, y; .*--labels"
    ):
        encode(PLAIN, [text("a", label="z")], tokenizer, ("x", "y"), 64)
    sentence = SentenceExample("0", "t.conll, line 9", ("a",), ("B-z",))
    with pytest.raises(ValueError, match=r"^t\.conll, line 9: label 'B-z' is not in the training file"):
        encode(TAG, [sentence], tokenizer, ("O", "B-x"), 64)
