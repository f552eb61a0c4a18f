"""Verdicts of the quality rules on documents, from sums over facts of their words.

A fact of a word is found once a distinct word. Nothing here reads text: a batch is numbers, and a verdict depends on the
document alone, never on the batch it is in. Legend: w words, p paragraphs (lines), d documents.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from data_prep.common import hashing, segments
from data_prep.common.segments import sums
from data_prep.filters import phrases, repetition
from data_prep.filters.rules import LINE_RULES, REASONS, SHORT_LINE, Rules
from megabert.common.random_numbers import mix64

FACTS = np.dtype([("hash", "<u8"), ("characters", "<u4"), ("flags", "u1")])
LETTER, BULLET, ELLIPSIS, ELLIPSIS_END, NUMBER_SIGN, SENTENCE_END, MARK_END, CURLY = (1 << bit for bit in range(8))
MARKS = '.!?"'  # that a line may end in; closing quotes and full stops of other scripts:
WIDE_MARKS = "\u201d\u00bb\u2026\u3002\uff01\uff1f\u300d\u300f\u0964\u061f\u06d4"
BULLETS = "\u2022\u2023\u25aa\u25ab\u25cf\u25cb\u25e6\u2043\u2219\u25a0\u25a1\u25c6\u27a2"  # also glued to a word
LONE_BULLETS = "-*\u2013\u2014\u00b7"  # only as a word of their own
CHUNK_WORDS = 1 << 16  # judged at a time, so that the arrays of a step stay in a core's cache: twice as fast as 1 << 18
WORDS_AT_ONCE = 1 << 12  # described at a time, for the same reason
_WIDE = CURLY  # while a word is described: has a character outside ASCII
_BYTES = np.arange(256)
_FLAGS_OF_BYTE = (
    np.isin(_BYTES, list(string.ascii_letters.encode())) * LETTER
    + np.isin(_BYTES, ord("#")) * NUMBER_SIGN
    + (_BYTES > 127) * _WIDE
).astype(np.uint8)
_IS_CURLY = np.isin(_BYTES, [ord("{"), ord("}")])
_IS_LONE_BULLET = np.isin(_BYTES, [ord(c) for c in LONE_BULLETS if c.isascii()])


def describe(words: list[str], ends: np.ndarray) -> np.ndarray:
    """FACTS [w] of words as `clean.clean_word` leaves them; none holds a NUL. A hash is never zero.

    `ends` are `sentences.ends(words)`, not 0 where a sentence may end. What ASCII decides is found in the bytes of all
    words at once; the few words with other characters are looked at alone.
    """
    parts = [
        _describe(words[i : i + WORDS_AT_ONCE], ends[i : i + WORDS_AT_ONCE])
        for i in range(0, len(words), WORDS_AT_ONCE)
    ]
    return np.concatenate([np.zeros(0, FACTS), *parts])


def _describe(words: list[str], can_end: np.ndarray) -> np.ndarray:
    facts = np.zeros(len(words), FACTS)
    joined, edges = segments.of_words(words)
    ends = edges[1:] - 1  # where the NULs are
    begins = edges[:-1]
    facts["hash"] = hashing.of_runs(joined, edges)
    facts["characters"] = sums((joined & 0xC0) != 0x80, edges) - 1  # UTF-8's continuation bytes and the NUL
    flags = np.bitwise_or.reduceat(_FLAGS_OF_BYTE[joined], begins)
    flags[(ends - begins == 1) & _IS_LONE_BULLET[joined[begins]]] |= BULLET
    dot = joined == ord(".")
    dots = np.flatnonzero(dot[:-2] & dot[1:-1] & dot[2:])
    word = np.searchsorted(ends, dots)
    flags[word] |= ELLIPSIS
    flags[word[dots + 3 == ends[word]]] |= ELLIPSIS_END
    last = joined[np.maximum(ends - 1, 0)]
    flags[np.isin(last, np.frombuffer(MARKS.encode(), np.uint8)) & (ends > begins)] |= MARK_END
    for i in np.flatnonzero(flags & _WIDE).tolist():
        flags[i] |= _beyond_ascii(words[i])
    flags[can_end > 0] |= SENTENCE_END
    flags &= ~np.uint8(_WIDE)
    flags[np.searchsorted(ends, np.flatnonzero(_IS_CURLY[joined]))] |= CURLY
    facts["flags"] = flags
    return facts


def _beyond_ascii(word: str) -> int:
    """The flags of a word that characters outside ASCII can set."""
    flags = LETTER if any(map(str.isalpha, word)) else 0
    if word[0] in BULLETS or word in LONE_BULLETS:
        flags |= BULLET
    if word[-1] in WIDE_MARKS:
        flags |= MARK_END
    if "\u2026" in word:
        flags |= ELLIPSIS
        if word[-1] == "\u2026":
            flags |= ELLIPSIS_END
    return flags


@dataclass
class WordFacts:
    """Documents as facts of their words, in order.

    facts: FACTS [w]; documents: int64 [d + 1], paragraphs: int64 [p + 1], both edges counted in words from 0 to w.
    Every edge of a document is one of a paragraph. Documents and paragraphs may be empty. `folded` is folding.FOLDED [w]
    where something looks at it.
    """

    facts: np.ndarray
    documents: np.ndarray
    paragraphs: np.ndarray
    folded: np.ndarray | None = None

    def __post_init__(self) -> None:
        for edges in (self.documents, self.paragraphs):
            assert edges[0] == 0 and edges[-1] == len(self.facts) and (np.diff(edges) >= 0).all(), edges


def paragraph_hashes(batch: WordFacts) -> np.ndarray:
    """uint64 [p]: equal for equal words in equal order, whatever whitespace was between them; 0 without words."""
    return hashing.of_runs(batch.facts["hash"], batch.paragraphs)


def document_hashes(batch: WordFacts, seed: int) -> np.ndarray:
    """uint64 [d], as `paragraph_hashes`: neither whitespace nor paragraph ends matter. Uniform for every seed."""
    return hashing.of_runs(batch.facts["hash"], batch.documents, seed)


def _ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """float64, NaN where `whole` is 0: no limit catches that."""
    return np.divide(part, whole, out=np.full(len(whole), np.nan), where=whole > 0)


class _Measures:
    """What the rules limit, each an array [d], computed when a rule asks for it."""

    def __init__(self, batch: WordFacts, rules: Rules) -> None:
        self.batch, self.rules = batch, rules
        self.documents = batch.documents
        self.flags = np.ascontiguousarray(batch.facts["flags"])
        self.characters_of = np.ascontiguousarray(batch.facts["characters"])
        self.hashes = np.ascontiguousarray(batch.facts["hash"])
        self.verdict = np.zeros(len(batch.documents) - 1, np.int8)

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
        document = self._lines[2]
        hashes = hashing.of_runs(self.hashes, self.batch.paragraphs)[np.diff(self.batch.paragraphs) > 0]
        hashes += mix64(document.astype(np.uint64))  # differing between documents
        order = np.argsort(hashes, kind="stable")  # lines that are equal keep the order of the text
        repeats = np.zeros(len(document), bool)
        repeats[order[1:][hashes[order][1:] == hashes[order][:-1]]] = True
        return repeats

    def duplicate_line_characters(self) -> np.ndarray:
        sizes = sums(self.characters_of, self.batch.paragraphs)[np.diff(self.batch.paragraphs) > 0]
        repeated = np.bincount(self._lines[2], np.where(self._repeats, sizes, 0), len(self.lines))
        return _ratio(repeated, self.characters)

    @cached_property
    def _n_grams(self) -> dict[int, np.ndarray]:
        """Of the documents that no rule has caught so far."""
        limits = {n: _n_gram_limit(self.rules, n) for n in repetition.TOP + repetition.AGAIN}
        given = {n: limit for n, limit in limits.items() if limit is not None}
        return repetition.shares(self.hashes, self.characters_of, self.documents, given, self.verdict == 0)

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
    "max_symbol_share": lambda m: _ratio(np.maximum(m.with_flag(NUMBER_SIGN), m.with_flag(ELLIPSIS)), m.words),
    "max_bullet_lines": lambda m: m.line_share((m.flags[m._lines[0]] & BULLET) > 0),
    "max_ellipsis_lines": lambda m: m.line_share((m.flags[m._lines[1] - 1] & ELLIPSIS_END) > 0),
    "min_lines": lambda m: m.lines,
    "min_sentences": lambda m: m.with_flag(SENTENCE_END),
    "max_short_lines": lambda m: m.line_share(m._lines[1] - m._lines[0] < SHORT_LINE),
    "max_duplicate_lines": lambda m: m.line_share(m._repeats),
    "max_duplicate_line_characters": _Measures.duplicate_line_characters,
    "max_curly_brackets": lambda m: m.with_flag(CURLY),
    "max_lorem_ipsum": lambda m: sums(phrases.found(m.batch, phrases.LOREM_IPSUM), m.documents),
}
# Of lines: from the facts of words to an array [p].
LINE_MEASURES: dict[str, Callable[[WordFacts], np.ndarray]] = {
    "min_line_words": lambda batch: np.diff(batch.paragraphs),
    "min_line_ends": lambda batch: (
        batch.facts["flags"][np.maximum(batch.paragraphs[1:] - 1, 0)] & MARK_END > 0
    ).astype(np.int64),
    "max_line_notices": lambda batch: sums(phrases.found(batch, phrases.NOTICES), batch.paragraphs),
}


def judge_lines(batch: WordFacts, rules: Rules) -> np.ndarray:
    """int8 [p]: 0 for a line that stays, else the place in `REASONS` of the first rule of lines that it breaks."""
    verdict = np.zeros(len(batch.paragraphs) - 1, np.int8)
    full = np.diff(batch.paragraphs) > 0
    for reason, name in enumerate(REASONS):
        if name in LINE_RULES and full.any() and (limit := getattr(rules, name.replace("-", "_"))) is not None:
            value = LINE_MEASURES[name.replace("-", "_")](batch)
            broken = value < limit if name.startswith("min-") else value > limit
            verdict[broken & full & (verdict == 0)] = reason
    return verdict


def judge(batch: WordFacts, rules: Rules) -> np.ndarray:
    """int8 [d]: 0 for a document that stays, else the place in `REASONS` of the first rule that it breaks."""
    return np.concatenate([np.zeros(0, np.int8), *(_judge(chunk, rules) for chunk in _chunks(batch))])


def _chunks(batch: WordFacts) -> Iterator[WordFacts]:
    """The documents of a batch in order, some CHUNK_WORDS at a time."""
    d, last = 0, len(batch.documents) - 1
    while d < last:
        first = batch.documents[d]
        after = max(d + 1, int(np.searchsorted(batch.documents, first + CHUNK_WORDS, side="right")) - 1)
        end = batch.documents[after]
        p, q = np.searchsorted(batch.paragraphs, [first, end])  # empty paragraphs between chunks don't matter
        yield WordFacts(
            batch.facts[first:end],
            batch.documents[d : after + 1] - first,
            batch.paragraphs[p : q + 1] - first,
            None if batch.folded is None else batch.folded[first:end],
        )
        d = after


def _judge(batch: WordFacts, rules: Rules) -> np.ndarray:
    measures = _Measures(batch, rules)
    verdict = measures.verdict
    for reason, name in enumerate(REASONS[1:], 1):
        rule = name.replace("-", "_")
        limit = getattr(rules, rule)
        if limit is None or name in LINE_RULES:
            continue
        value = measures.measure(rule)
        broken = value < limit if rule.startswith("min_") else value > limit
        verdict[broken & (verdict == 0)] = reason
    return verdict
