"""A document is judged by sums over facts of its words, and a fact of a word is found once a distinct word.

Nothing here reads text: a batch is numbers, and a verdict depends on the document alone, never on the batch it is in.
Legend: w words, p paragraphs (lines), d documents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from data_prep import hashing, repetition, sentences
from data_prep.hashing import sums
from data_prep.rules import REASONS, SHORT_LINE, Rules

FACTS = np.dtype([("hash", "<u8"), ("characters", "<u4"), ("flags", "u1")])
LETTER, BULLET, ELLIPSIS, ELLIPSIS_END, NUMBER_SIGN, SENTENCE_END = (1 << bit for bit in range(6))
BULLETS = "\u2022\u2023\u25aa\u25ab\u25cf\u25cb\u25e6\u2043\u2219\u25a0\u25a1\u25c6\u27a2"  # also glued to a word
LONE_BULLETS = ("-", "*", "\u2013", "\u2014", "\u00b7")  # only as a word of their own
ELLIPSES = ("...", "\u2026")


def describe(words: list[str]) -> np.ndarray:
    """FACTS [w] of words as `clean.clean_word` leaves them."""
    facts = np.zeros(len(words), FACTS)
    facts["hash"] = hashing.of_words(words)
    facts["characters"] = np.fromiter(map(len, words), np.uint32, len(words))
    facts["flags"] = np.fromiter(map(_flags, words), np.uint8, len(words))
    return facts


def _flags(word: str) -> int:
    if word.isalpha() or not word:
        return LETTER if word else 0
    flags = LETTER if any(map(str.isalpha, word)) else 0
    if word[0] in BULLETS or word in LONE_BULLETS:
        flags |= BULLET
    if "#" in word:
        flags |= NUMBER_SIGN
    if "..." in word or "\u2026" in word:
        flags |= ELLIPSIS
        if word.endswith(ELLIPSES):
            flags |= ELLIPSIS_END
    if word[-1] in sentences.LAST and sentences.can_end(word):
        flags |= SENTENCE_END
    return flags


@dataclass
class Batch:
    """Documents as facts of their words, in order.

    facts: FACTS [w]; documents: int64 [d + 1], paragraphs: int64 [p + 1], both edges counted in words from 0 to w.
    Every edge of a document is one of a paragraph. Documents and paragraphs may be empty.
    """

    facts: np.ndarray
    documents: np.ndarray
    paragraphs: np.ndarray

    def __post_init__(self) -> None:
        for edges in (self.documents, self.paragraphs):
            assert edges[0] == 0 and edges[-1] == len(self.facts) and (np.diff(edges) >= 0).all(), edges


def paragraph_hashes(batch: Batch) -> np.ndarray:
    """uint64 [p]: equal for equal words in equal order, whatever whitespace was between them; 0 without words."""
    return hashing.of_runs(batch.facts["hash"], batch.paragraphs)


def document_hashes(batch: Batch, seed: int) -> np.ndarray:
    """uint64 [d], as `paragraph_hashes`: neither whitespace nor paragraph ends matter. Uniform for every seed."""
    return hashing.of_runs(batch.facts["hash"], batch.documents, seed)


def _ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """float64, NaN where `whole` is 0: no limit catches that."""
    return np.divide(part, whole, out=np.full(len(whole), np.nan), where=whole > 0)


class _Measures:
    """What the rules limit, each an array [d], computed when a rule asks for it."""

    def __init__(self, batch: Batch, rules: Rules) -> None:
        self.batch, self.rules = batch, rules
        self.documents = batch.documents
        self.flags = np.ascontiguousarray(batch.facts["flags"])
        self.characters_of = np.ascontiguousarray(batch.facts["characters"])
        self.hashes = np.ascontiguousarray(batch.facts["hash"])

    def with_flag(self, flag: int) -> np.ndarray:
        return sums((self.flags & flag).view(np.uint8), self.documents) // flag

    @cached_property
    def words(self) -> np.ndarray:
        return np.diff(self.documents)

    @cached_property
    def characters(self) -> np.ndarray:
        return sums(self.characters_of, self.documents)

    @cached_property
    def _lines(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(first word, word after the last, document) of each line that has words."""
        first, end = self.batch.paragraphs[:-1], self.batch.paragraphs[1:]
        full = end > first
        first, end = first[full], end[full]
        return first, end, np.searchsorted(self.documents, first, side="right") - 1

    @cached_property
    def lines(self) -> np.ndarray:
        return np.bincount(self._lines[2], minlength=len(self.documents) - 1)

    def line_share(self, true: np.ndarray) -> np.ndarray:
        """Share of a document's lines for which the bool array `true` holds."""
        return _ratio(np.bincount(self._lines[2][true], minlength=len(self.lines)), self.lines)

    @cached_property
    def _repeats(self) -> np.ndarray:
        """bool [lines]: whether a line repeats an earlier one of its document."""
        first, end, document = self._lines
        hashes = paragraph_hashes(self.batch)[np.diff(self.batch.paragraphs) > 0]
        order = np.lexsort((hashes, document))  # stable: a group keeps the order of the text
        same = (hashes[order][1:] == hashes[order][:-1]) & (document[order][1:] == document[order][:-1])
        repeats = np.zeros(len(first), bool)
        repeats[order[1:][same]] = True
        return repeats

    def duplicate_line_characters(self) -> np.ndarray:
        first, end, document = self._lines
        sizes = sums(self.characters_of, self.batch.paragraphs)[np.diff(self.batch.paragraphs) > 0]
        repeated = np.bincount(document, np.where(self._repeats, sizes, 0), len(self.lines))
        return _ratio(repeated, self.characters)

    @cached_property
    def _n_grams(self) -> dict[int, np.ndarray]:
        limits = {n: _n_gram_limit(self.rules, n) for n in repetition.TOP + repetition.AGAIN}
        given = {n: limit for n, limit in limits.items() if limit is not None}
        return repetition.shares(self.hashes, self.characters_of, self.documents, given)

    def measure(self, rule: str) -> np.ndarray:
        if rule.endswith("_gram"):
            return self._n_grams[int(rule.split("_")[-2])]
        return MEASURES[rule](self)


def _n_gram_limit(rules: Rules, n: int) -> float | None:
    return getattr(rules, f"max_{'top' if n in repetition.TOP else 'duplicate'}_{n}_gram")


MEASURES: dict[str, Callable[[_Measures], np.ndarray]] = {
    "min_words": lambda m: m.words,
    "max_words": lambda m: m.words,
    "min_mean_word": lambda m: _ratio(m.characters, m.words),
    "max_mean_word": lambda m: _ratio(m.characters, m.words),
    "min_letter_words": lambda m: _ratio(m.with_flag(LETTER), m.words),
    "max_symbol_share": lambda m: _ratio(
        np.maximum(m.with_flag(NUMBER_SIGN), m.with_flag(ELLIPSIS)), m.words
    ),
    "max_bullet_lines": lambda m: m.line_share((m.flags[m._lines[0]] & BULLET) > 0),
    "max_ellipsis_lines": lambda m: m.line_share((m.flags[m._lines[1] - 1] & ELLIPSIS_END) > 0),
    "min_lines": lambda m: m.lines,
    "min_sentences": lambda m: m.with_flag(SENTENCE_END),
    "max_short_lines": lambda m: m.line_share(m._lines[1] - m._lines[0] < SHORT_LINE),
    "max_duplicate_lines": lambda m: m.line_share(m._repeats),
    "max_duplicate_line_characters": _Measures.duplicate_line_characters,
}


def judge(batch: Batch, rules: Rules) -> np.ndarray:
    """int8 [d]: 0 for a document that stays, else the place in `REASONS` of the first rule that it breaks."""
    measures = _Measures(batch, rules)
    verdict = np.zeros(len(batch.documents) - 1, np.int8)
    for reason, name in enumerate(REASONS[1:], 1):
        rule = name.replace("-", "_")
        limit = getattr(rules, rule)
        if limit is None:
            continue
        value = measures.measure(rule)
        broken = value < limit if rule.startswith("min_") else value > limit
        verdict[broken & (verdict == 0)] = reason
    return verdict
