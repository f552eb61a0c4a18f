"""Encoding of examples to items: token ids, the positions a head reads, and the targets at them.

Texts longer than the model are truncated, the longer of a pair first (Devlin et al. 2019). Contexts and sentences are split into
windows, so that each answer that fits and each word is in a window.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from megabert.data.text import prepared, stand_together
from megabert.data.tokenizer import Tokenizer
from megabert.finetune.datasets import Example, QuestionExample, SentenceExample, TextExample
from megabert.finetune.tasks import BINARY_METRICS, LABELLED, Task

# Tokens; from the code of Devlin et al. 2019.
MAX_QUESTION = 64


@dataclass(frozen=True, eq=False)
class TaskItem:
    """One input of the model, [CLS] A [SEP] or [CLS] A [SEP] B [SEP]; several of one example are its windows, in order."""

    example: int
    # int32 [n]
    ids: np.ndarray
    # Where segment 1 begins; n without a pair.
    second: int
    # int64 [p], token positions that the head reads: [0] for a text, the first token of each word (each word in one window only),
    # [CLS] and all tokens of the context for a span.
    positions: np.ndarray
    # int64 [1] class | float32 [labels] 1 where the text has the label | float32 [1] score | int64 [p] tags |
    # int64 [2] start and end as indices into `positions`, inclusive, 0 0 for a window without the answer; empty if unlabelled.
    targets: np.ndarray
    # int64 [p, 2] for a span: character offsets of the tokens in the context, 0 0 for [CLS]; else [0, 2].
    char_spans: np.ndarray


NO_SPANS = np.zeros((0, 2), np.int64)
ORIGIN = np.zeros((1, 2), np.int64)
FIRST = np.zeros(1, np.int64)
# Contexts encoded at once: libraries return some 200 bytes for each token.
CHUNK = 512


def natural_order(label: str) -> tuple[tuple[str, int, str], ...]:
    """Key by which numbers in names are ordered as numbers: "2" before "10"."""
    parts = re.findall(r"(\D*)(\d*)", label)
    return tuple((text, int(number or -1), number) for text, number in parts)


def labels_of(task: Task, examples: Sequence[Any]) -> tuple[str, ...]:
    """The labels of a task in the order of their classes; () for kinds without labels.

    Raises ValueError if the examples have fewer than two labels, or more than two for an F1 of two classes.
    """
    if task.kind not in LABELLED:
        return ()
    labels = task.labels
    if not labels:
        field = "tags" if task.kind == "tag" else "label"
        values = (getattr(example, field) for example in examples)
        distinct = {label for value in values for label in ([value] if isinstance(value, str) else value)}
        if task.kind == "tag" and any(example.text for example in examples):
            # An entity of any kind may have one word or several.
            distinct = {"O", *(start + tag[2:] for tag in distinct - {"O"} for start in ("B-", "I-"))}
        labels = tuple(sorted(distinct, key=natural_order))
    if len(labels) < 2:
        shown = f"{labels[0]!r} is the only label" if labels else "there is no label"
        raise ValueError(f"task {task.name}: {shown}; two at least are needed")
    binary = [name for name in BINARY_METRICS if task.kind == "classify" and name in task.metrics]
    if binary and len(labels) > 2:
        raise ValueError(f"task {task.name}: {binary[0]} is of two labels, there are {len(labels)}; take macro_f1")
    return labels


def encode(
    task: Task,
    examples: Sequence[Example],
    tokenizer: Tokenizer,
    labels: Sequence[str],
    max_length: int,
    stride: int = 128,
) -> list[TaskItem]:
    """The items of the examples in order, of at most `max_length` tokens.

    `stride`: tokens between the starts of windows. Raises ValueError naming file and line for a label that is not in
    `labels`.
    """
    classes = {label: i for i, label in enumerate(labels)}
    given: Any = examples
    if task.kind == "span":
        items = list(_spans(given, tokenizer, max_length, stride))
    elif task.kind == "tag":
        items = list(_tags(given, tokenizer, classes, max_length, stride))
    else:
        items = list(_texts(task, given, tokenizer, classes, max_length))
    tokenizer.warn_unknown(tokenizer.count_unknown(item.ids for item in items), len(items))
    return items


def _row(tokenizer: Tokenizer, a: np.ndarray, b: np.ndarray | None = None) -> tuple[np.ndarray, int]:
    """(int32 [CLS] a [SEP] b [SEP], where segment 1 begins)."""
    cls, sep = np.array([tokenizer.cls_id], np.int32), np.array([tokenizer.sep_id], np.int32)
    parts = [cls, a, sep] if b is None else [cls, a, sep, b, sep]
    return np.concatenate(parts), len(a) + 2


def _ids(tokenizer: Tokenizer, texts: Sequence[str]) -> list[np.ndarray]:
    return [np.array(ids, np.int32) for ids in tokenizer.encode_texts(texts)]


def _class(where: str, label: str, classes: dict[str, int]) -> int:
    if label not in classes:
        raise ValueError(
            f"{where}: label {label!r:.60} is not in the training file, which has {', '.join(classes)}; "
            "correct it, train with an example of it, or name all labels with --labels"
        )
    return classes[label]


# ---- texts


def _texts(
    task: Task, examples: Sequence[TextExample], tokenizer: Tokenizer, classes: dict[str, int], max_length: int
) -> Iterator[TaskItem]:
    firsts = _ids(tokenizer, [e.a for e in examples])
    seconds = _ids(tokenizer, [e.b or "" for e in examples]) if task.pair else None
    for i, (example, a) in enumerate(zip(examples, firsts, strict=True)):
        if isinstance(example.label, tuple):
            targets = np.zeros(len(classes), np.float32)
            targets[[_class(example.where, label, classes) for label in example.label]] = 1
        elif isinstance(example.label, str):
            targets = np.array([_class(example.where, example.label, classes)], np.int64)
        else:
            targets = np.array([] if example.label is None else [example.label], np.float32)
        if seconds is None:
            ids, second = _row(tokenizer, a[: max_length - 2])
        else:
            # Lengths after removing tokens of the longer part, of b if they are equal, until both fit.
            b, room = seconds[i], max_length - 3
            keep_a, keep_b = max(room - len(b), (room + 1) // 2), max(room - len(a), room // 2)
            ids, second = _row(tokenizer, a[:keep_a], b[:keep_b])
        yield TaskItem(i, ids, second, FIRST, targets, NO_SPANS)


# ---- words


def _tags(
    examples: Sequence[SentenceExample], tokenizer: Tokenizer, classes: dict[str, int], max_length: int, stride: int
) -> Iterator[TaskItem]:
    """Items of tagged sentences. Words are encoded separately; the tag is at the first token, outside ASCII at the first that is
    not only a space.

    After another word in a script without spaces (e.g. Chinese) a word is encoded without the space before it.
    """
    distinct = list(dict.fromkeys(word for e in examples for word in e.words))
    room = max_length - 2
    cleaned = [prepared(word, tokenizer.form) for word in distinct]
    ways = tokenizer.encode_words(cleaned), tokenizer.encode_inside(distinct)
    apart, inside = (
        {word: _word(ids, tokenizer, room) for word, ids in zip(distinct, way, strict=True)} for way in ways
    )
    for i, example in enumerate(examples):
        words = [
            inside[word] if stand_together(before, word) or (tokenizer.spaced and not before) else apart[word]
            for before, word in pairwise(("", *example.words))
        ]
        lead = np.array([_space_before(w, ids, tokenizer) for w, ids in zip(example.words, words, strict=True)])
        at = np.cumsum([0, *map(len, words)])  # [words + 1], first token of each
        targets = np.array([_class(example.where, tag, classes) for tag in example.tags or ()], np.int64)
        for first, start, end, last in _word_windows(at, room, stride):
            ids, second = _row(tokenizer, np.concatenate(words[first:last]))
            positions = 1 + at[start:end] - at[first] + lead[start:end]
            yield TaskItem(i, ids, second, positions, targets[start:end], NO_SPANS)


def _word(ids: list[int], tokenizer: Tokenizer, room: int) -> np.ndarray:
    """int32 [n]: at most `room` ids of a word; [UNK] for unknown characters."""
    return np.array(ids[:room] or [tokenizer.unk_id], np.int32)


def _space_before(word: str, ids: np.ndarray, tokenizer: Tokenizer) -> int:
    """1 if the first of a word's ids is only the space before it, else 0; 0 for ASCII words."""
    return int(len(ids) > 1 and not word[0].isascii() and tokenizer.tokens[ids[0]].isspace())


def _word_windows(at: np.ndarray, room: int, stride: int) -> Iterator[tuple[int, int, int, int]]:
    """(first word, first tagged word, one past the last tagged word, one past the last word) of each window.

    Of the words in two windows each tags one half, so that every word is tagged with context on both sides.
    """
    count, first, start = len(at) - 1, 0, 0
    while True:
        last = int(np.searchsorted(at, at[first] + room, "right")) - 1  # number of whole words that fit
        if last == count:
            yield first, start, count, count
            return
        following = int(np.searchsorted(at, at[first] + stride))
        following = min(max(following, first + 1), last)
        end = (following + last + 1) // 2
        if end > start:
            yield first, start, end, last
        first, start = following, end


# ---- spans


def _windows(tokens: int, room: int, stride: int) -> list[int]:
    """Starts of the windows of `room` tokens; the last one reaches the end."""
    starts = [0]
    while starts[-1] + room < tokens:
        starts.append(starts[-1] + min(stride, room))
    return starts


def _spans(
    examples: Sequence[QuestionExample], tokenizer: Tokenizer, max_length: int, stride: int
) -> Iterator[TaskItem]:
    distinct = list(dict.fromkeys(e.context for e in examples))
    contexts: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for at in range(0, len(distinct), CHUNK):
        part = distinct[at : at + CHUNK]
        for context, (listed, offsets) in zip(part, tokenizer.encode_with_offsets(part), strict=True):
            contexts[context] = np.array(listed, np.int32), np.concatenate([ORIGIN, offsets])
    longest = min(MAX_QUESTION, (max_length - 3) // 2)
    for i, (example, asked) in enumerate(zip(examples, _ids(tokenizer, [e.question for e in examples]), strict=True)):
        question, (tokens, char_spans) = asked[:longest], contexts[example.context]
        answer = _tokens_of(example, char_spans[1:])
        room = max_length - 3 - len(question)
        for start in _windows(len(tokens), room, stride):
            end = min(start + room, len(tokens))
            ids, second = _row(tokenizer, question, tokens[start:end])
            positions = np.concatenate([FIRST, np.arange(second, second + end - start)])
            targets = np.zeros(0 if example.answers is None else 2, np.int64)
            if answer and start <= answer[0] and answer[1] < end:
                targets[:] = answer[0] - start + 1, answer[1] - start + 1
            inside = char_spans[: end + 1]  # most contexts are one window; their questions share the array
            if start:
                inside = np.concatenate([ORIGIN, char_spans[start + 1 : end + 1]])
            yield TaskItem(i, ids, second, positions, targets, inside)


def _tokens_of(example: QuestionExample, offsets: np.ndarray) -> tuple[int, int] | None:
    """First and last token of the question's first answer; None without one, or if no token has one of its characters."""
    if not example.answers:
        return None
    text, start = example.answers[0]
    start += len(text) - len(text.lstrip())
    end = start + len(text.strip())
    first = int(np.searchsorted(offsets[:, 1], start, "right"))  # the first that ends after the start
    last = int(np.searchsorted(offsets[:, 0], end)) - 1  # the last that begins before the end
    return (first, last) if first <= last else None
