"""Encoding of examples to items: token ids, the positions a head reads, and the targets at them.

Ids and offsets are those of the tokenizer that `megabert export` writes, so a text has the same in training and in transformers. Texts
longer than the model are truncated, the longer of a pair first, as by transformers (longest_first). Contexts and sentences are split
into windows, so that each answer that fits and each word is in a window.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from megabert.common.logs import log
from megabert.data.text import prepared
from megabert.data.tokenizer import Tokenizer
from megabert.finetune.files import Example, QuestionExample, SentenceExample, TextExample
from megabert.finetune.offsets import encode_with_offsets, stand_together
from megabert.finetune.tasks import BINARY_METRICS, LABELLED, Task
from megabert.hf import tokenizer_export

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
    # int64 [p], token positions that the head reads: [0] for a text, the first token of each word (each word in one window only) or
    # all tokens of these words, [CLS] and all tokens of the context for a span.
    positions: np.ndarray
    # int64 [1] class | float32 [labels] 1 where the text has the label | float32 [1] score | int64 [p] tags |
    # int64 [2] start and end as indices into `positions`, inclusive, 0 0 for a window without the answer; empty if unlabelled.
    targets: np.ndarray
    # int64 [p, 2] for a span: character offsets of the tokens in the context, 0 0 for [CLS]; for words of which all tokens are read
    # those in the sentence; else [0, 2].
    char_spans: np.ndarray
    # int64 [w], of the positions those of the words' first tokens; None if only these are read.
    words: np.ndarray | None = None
    # Whether the text or question, or the only word of a window, has lost its end.
    truncated: bool = False


NO_SPANS = np.zeros((0, 2), np.int64)
ORIGIN = np.zeros((1, 2), np.int64)
FIRST = np.zeros(1, np.int64)
# Labels in a log line.
MOST_SHOWN = 10
# Contexts encoded at once: libraries return some 200 bytes for each token.
CHUNK = 512


def natural_order(label: str) -> tuple[tuple[str, float, str], ...]:
    """Key by which numbers, and numbers in names, are ordered as numbers: "-1.5" before "2" before "10"."""
    if re.fullmatch(r"-?\d+(\.\d+)?", label):
        return (("", float(label) if "." in label else int(label), label),)
    parts = re.findall(r"(\D*)(\d*)", label)
    return tuple((text, int(number or -1), number) for text, number in parts)


def collect_labels(task: Task, examples: Sequence[Any]) -> tuple[str, ...]:
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


def describe_labels(task: Task, labels: Sequence[str]) -> str:
    """The labels in the order of their classes, the first ones of many, and the metrics that are of the last."""
    shown = ", ".join(labels[:MOST_SHOWN]) + f", … ({len(labels):,} in all)" * (len(labels) > MOST_SHOWN)
    of_last = [name for name in task.metrics if task.kind == "classify" and name in BINARY_METRICS]
    return shown + (f" ({', '.join(of_last)} of {labels[-1]}; --labels names another order)" if of_last else "")


def warn_truncated(source: object, task: Task, max_length: int, truncated: int, texts: int) -> None:
    """Log how many of the `texts` of a source have lost their end, if any have."""
    what = f"texts are longer than {max_length} tokens"
    most = "; a larger --max-length in training keeps it, if the model takes as many"
    if task.kind == "span":
        what, most = f"questions are longer than {longest_question(max_length)} tokens", ""
    if task.kind == "tag":
        what = f"sentences have words that are longer than {max_length} tokens"
    if truncated:
        log.warning(f"{source}: {truncated:,} of {texts:,} {what} and lost their end{most}")


def count_truncated(items: Sequence[TaskItem]) -> int:
    """The number of examples that have lost their end."""
    return len({item.example for item in items if item.truncated})


def longest_question(max_length: int) -> int:
    """Tokens."""
    return min(MAX_QUESTION, (max_length - 3) // 2)


def tags_every_token(task: Task, labels: Sequence[str]) -> bool:
    """Whether tags are B- and I- of entities, so that a model can tag all tokens of a word: its further ones are inside the entity."""
    inside = {"O", *(f"I-{label[2:]}" for label in labels if label.startswith("B-"))}
    bio = all(label in inside or label[:2] in ("B-", "I-") for label in labels) and inside <= {"O", *labels}
    return task.of_entities and bio


@dataclass(frozen=True)
class TaskEncoding:
    """How examples become items of at most `max_length` tokens. `stride`: tokens between the starts of windows; `every_token`: read and
    tag all tokens of words, as of `tags_every_token`; `separators`: [SEP] between the texts of a pair."""

    task: Task
    tokenizer: Tokenizer
    labels: tuple[str, ...]
    max_length: int
    stride: int = 128
    every_token: bool = False
    separators: int = 1

    def encode(self, examples: Sequence[Example]) -> list[TaskItem]:
        """The items of the examples in order. Raises ValueError naming file and line for a label that is not in `labels`."""
        kinds: dict[str, Any] = {"span": self._spans, "tag": self._tags}
        return list(kinds.get(self.task.kind, self._texts)(examples))

    def _row(self, a: np.ndarray, b: np.ndarray | None = None) -> tuple[np.ndarray, int]:
        """(int32 [CLS] a [SEP] b [SEP], where segment 1 begins)."""
        cls, sep = ([i] for i in (self.tokenizer.cls_id, self.tokenizer.sep_id))
        before: list[Any] = [cls, a, sep if b is None else sep * self.separators]
        parts = before if b is None else [*before, b, sep]
        return np.concatenate(parts, dtype=np.int32), sum(map(len, before))

    @property
    def _pair_room(self) -> int:
        """Tokens of both texts of a pair."""
        return self.max_length - 2 - self.separators

    def _ids(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array(ids, np.int32) for ids in tokenizer_export.encode(self.tokenizer, texts)]

    def _ids_and_offsets(self, texts: Sequence[str]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(int32 [n], int64 [n, 2]) of each text."""
        for at in range(0, len(texts), CHUNK):
            for ids, offsets in encode_with_offsets(self.tokenizer, texts[at : at + CHUNK]):
                yield np.array(ids, np.int32), offsets

    @cached_property
    def _classes(self) -> dict[str, int]:
        return {label: i for i, label in enumerate(self.labels)}

    def _find_classes(self, where: str, labels: Sequence[str]) -> np.ndarray:
        """int64 [n]."""
        for label in labels:
            if label not in self._classes:
                raise ValueError(
                    f"{where}: label {label!r:.60} is not in the training file, which has {', '.join(self.labels)}; "
                    "correct it, train with an example of it, or name all labels with --labels"
                )
        return np.array([self._classes[label] for label in labels], np.int64)

    # ---- texts

    def _texts(self, examples: Sequence[TextExample]) -> Iterator[TaskItem]:
        firsts = self._ids([e.a for e in examples])
        seconds = self._ids([e.b or "" for e in examples]) if self.task.pair else None
        for i, (example, a) in enumerate(zip(examples, firsts, strict=True)):
            if seconds is None:
                ids, second = self._row(a[: self.max_length - 2])
                truncated = len(a) > self.max_length - 2
            else:
                # Of a room of odd size the longer part has one token more, b if they are equal.
                b, room = seconds[i], self._pair_room
                odd = room % 2 if len(a) > len(b) else 0
                keep_a, keep_b = max(room - len(b), room // 2 + odd), max(room - len(a), (room + 1) // 2 - odd)
                ids, second = self._row(a[:keep_a], b[:keep_b])
                truncated = len(a) + len(b) > room
            yield TaskItem(i, ids, second, FIRST, self._text_targets(example), NO_SPANS, truncated=truncated)

    def _text_targets(self, example: TextExample) -> np.ndarray:
        if isinstance(example.label, str):
            return self._find_classes(example.where, [example.label])
        if not isinstance(example.label, tuple):
            return np.array([] if example.label is None else [example.label], np.float32)
        targets = np.zeros(len(self.labels), np.float32)
        targets[self._find_classes(example.where, example.label)] = 1
        return targets

    # ---- words

    def _tags(self, examples: Sequence[SentenceExample]) -> Iterator[TaskItem]:
        """The tag is at a word's first token, outside ASCII at the first that is not only a space. A word of unknown characters alone
        that has no token is [UNK]. Words of which several are one token, as characters of a script without spaces, are encoded one by
        one."""
        room, tokenizer = self.max_length - 2, self.tokenizer
        distinct = list(dict.fromkeys(word for e in examples if not e.text for word in e.words))
        unknown = tokenizer.tokens[tokenizer.unk_id].strip()
        gone = {word for word, ids in zip(distinct, self._ids(distinct), strict=True) if not len(ids)}
        texts = [
            (e.text, e.places) if e.text else _joined([unknown if word in gone else word for word in e.words])
            for e in examples
        ]
        encoded = self._ids_and_offsets([text for text, _ in texts])
        for i, (example, (_, places), (ids, offsets)) in enumerate(zip(examples, texts, encoded, strict=True)):
            at, read = _tokens_of_words(example.words, np.array(places, np.int64), ids, offsets, tokenizer)
            if not example.text and not np.all(np.diff(read) > 0):
                ids, offsets = _one_by_one(example.words, places, tokenizer)
                at, read = _tokens_of_words(example.words, np.array(places, np.int64), ids, offsets, tokenizer)
            tags: Sequence[str] = example.tags or ()
            each = self.every_token and len(ids) > 0
            if each and tags:
                tags = _tags_of_tokens(tags, at, read, offsets, places)
            targets = self._find_classes(example.where, tags)
            for first, start, end, last in _word_windows(at, room, self.stride):
                ids_inside = ids[at[first] : min(at[last], at[first] + room)]
                truncated = at[last] - at[first] > room
                row, second = self._row(ids_inside)
                # the neighbour of a word without tokens, [CLS] where there is none
                words = np.clip(read[start:end] - at[first], -1, len(ids_inside) - 1)
                if not each:
                    yield TaskItem(i, row, second, 1 + words, targets[start:end], NO_SPANS, truncated=truncated)
                    continue
                begin = min(at[start], at[first] + len(ids_inside) - 1)
                tokens = slice(begin, max(begin + 1, min(at[end], at[first] + room)))
                positions = np.arange(tokens.start, tokens.stop) - at[first] + 1
                words = np.clip(read[start:end] - begin, 0, len(positions) - 1)
                yield TaskItem(i, row, second, positions, targets[tokens], offsets[tokens], words, truncated)

    # ---- spans

    def _spans(self, examples: Sequence[QuestionExample]) -> Iterator[TaskItem]:
        distinct = list(dict.fromkeys(e.context for e in examples))
        encoded = zip(distinct, self._ids_and_offsets(distinct), strict=True)
        contexts = {context: (ids, np.concatenate([ORIGIN, offsets])) for context, (ids, offsets) in encoded}
        longest = longest_question(self.max_length)
        for i, (example, asked) in enumerate(zip(examples, self._ids([e.question for e in examples]), strict=True)):
            question, (tokens, char_spans) = asked[:longest], contexts[example.context]
            answer = _answer_tokens(example, char_spans[1:])
            room = self._pair_room - len(question)
            step = min(self.stride, room)
            for start in range(0, max(len(tokens) - room, 0) + step, step):  # the last window reaches the end
                end = min(start + room, len(tokens))
                ids, second = self._row(question, tokens[start:end])
                positions = np.concatenate([FIRST, np.arange(second, second + end - start)])
                targets = np.zeros(0 if example.answers is None else 2, np.int64)
                if answer and start <= answer[0] and answer[1] < end:
                    targets[:] = answer[0] - start + 1, answer[1] - start + 1
                inside = char_spans[: end + 1]  # most contexts are one window; their questions share the array
                if start:
                    inside = np.concatenate([ORIGIN, char_spans[start + 1 : end + 1]])
                yield TaskItem(i, ids, second, positions, targets, inside, truncated=len(asked) > longest)


# ---- words


def _joined(words: Sequence[str]) -> tuple[str, list[tuple[int, int]]]:
    """Words as a text, and the characters of each: with spaces between them, in a script without spaces (e.g. Chinese) without."""
    text, places = "", []
    for before, word in pairwise(("", *words)):
        text += "" if not before or stand_together(before, word) else " "
        places.append((len(text), len(text) + len(word)))
        text += word
    return text, places


def _one_by_one(
    words: Sequence[str], places: Sequence[tuple[int, int]], tokenizer: Tokenizer
) -> tuple[np.ndarray, np.ndarray]:
    """(int32 [n], int64 [n, 2]) of words each for itself: ids, and the characters of the whole word."""
    # a tokenizer.json cleans by itself
    cleaned = words if tokenizer.kind == "tokenizers" else [prepared(word, tokenizer.form) for word in words]
    after_space, inside = tokenizer.encode_words(cleaned), tokenizer.encode_inside(cleaned)
    joined = [
        stand_together(before, word) or (tokenizer.spaced and not before) for before, word in pairwise(("", *words))
    ]
    ways = zip(joined, inside, after_space, strict=True)
    parts = [(part if one else other) or [tokenizer.unk_id] for one, part, other in ways]
    counts = [len(ids) for ids in parts]
    return np.array([i for ids in parts for i in ids], np.int32), np.repeat(np.array(places, np.int64), counts, axis=0)


def _tokens_of_words(
    words: Sequence[str], places: np.ndarray, ids: np.ndarray, offsets: np.ndarray, tokenizer: Tokenizer
) -> tuple[np.ndarray, np.ndarray]:
    """(int64 [w + 1] first token of each word, of the first word 0, and the number of tokens; int64 [w] the token at which each is
    read). Words may share a token; one without tokens has the next word's."""
    ends = np.maximum.accumulate(offsets[:, 1]) if len(ids) else offsets[:, 1]
    at = np.searchsorted(ends, places[:, 0], "right")
    blank = np.array([tokenizer.tokens[token].isspace() for token in ids.tolist()] + [False])
    ascii_only = np.array([word[0].isascii() for word in words])
    read = at + (blank[at] & ~ascii_only & (at + 1 < np.append(at[1:], len(ids))))
    at[0] = 0
    return np.append(at, len(ids)), read


def _tags_of_tokens(
    tags: Sequence[str], at: np.ndarray, read: np.ndarray, offsets: np.ndarray, places: Sequence[tuple[int, int]]
) -> list[str]:
    """A tag for each token: a word's at the token at which it is read, inside the entity after it. A token between words is inside the
    entity that the next word continues."""
    inner = [tag if tag == "O" else f"I-{tag[2:]}" for tag in tags]
    joins = [inside if tag == inside else "O" for tag, inside in zip(tags, inner, strict=True)] + ["O"]
    found = []
    for k, (start, end) in enumerate(pairwise(at.tolist())):
        for token in range(start, end):
            if token < read[k]:
                found.append(joins[k])
            elif offsets[token, 0] >= places[k][1]:
                found.append(joins[k + 1])
            else:
                found.append(tags[k] if token == read[k] else inner[k])
    for k, token in enumerate(read.tolist()):
        # a token that several words share
        if token < len(found) and found[token] == "O" and offsets[token, 0] < places[k][1]:
            found[token] = tags[k]
    return found


def _word_windows(at: np.ndarray, room: int, stride: int) -> Iterator[tuple[int, int, int, int]]:
    """(first word, first tagged word, one past the last tagged word, one past the last word) of each window.

    Of the words in two windows each tags one half, so that every word is tagged with context on both sides.
    """
    count, first, start = len(at) - 1, 0, 0
    while True:
        # whole words that fit; a longer one is truncated
        fit = int(np.searchsorted(at, at[first] + room, "right")) - 1
        next_one = int(np.searchsorted(at, at[first], "right"))
        last = min(max(fit, next_one), count)
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


def _answer_tokens(example: QuestionExample, offsets: np.ndarray) -> tuple[int, int] | None:
    """First and last token of the question's first answer; None without one, or if no token has one of its characters."""
    if not example.answers:
        return None
    text, start = example.answers[0]
    start += len(text) - len(text.lstrip())
    end = start + len(text.strip())
    first = int(np.searchsorted(offsets[:, 1], start, "right"))  # the first that ends after the start
    last = int(np.searchsorted(offsets[:, 0], end)) - 1  # the last that begins before the end
    return (first, last) if first <= last else None
