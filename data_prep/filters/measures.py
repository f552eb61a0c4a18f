"""Facts of words, and measures of documents and lines for quality rules, computed by sums over the facts.

A fact is computed once for each distinct word. A batch has numbers instead of text, and a measure of a document does not depend on
its batch. Legend: w words, p paragraphs (lines), d documents.
"""

from __future__ import annotations

import string
import sys
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from data_prep.common.arrays import segment_hashes, segment_sums, word_bytes
from data_prep.filters import repetition
from megabert.common.random_numbers import mix64
from megabert.data.text import SCRIPT_TERMINALS

# `unknown`: characters in [UNK] tokens, counted where words are encoded
FACTS = np.dtype([("hash", "<u8"), ("characters", "<u4"), ("unknown", "<u4"), ("flags", "u1")])
LETTER, BULLET, ELLIPSIS, ELLIPSIS_END, NUMBER_SIGN, SENTENCE_END, MARK_END, CURLY = (1 << bit for bit in range(8))
# marks at the end of a line, and closing quotes and sentence terminals of other scripts
MARKS = '.!?"'
WIDE_MARKS = SCRIPT_TERMINALS | frozenset("\u201d\u201c\u00bb\u00ab\u2039\u203a\u2026\u300d\u300f")
# bullets at the beginning of a word, and those that have to be a separate word
BULLETS = "\u2022\u2023\u25aa\u25ab\u25cf\u25cb\u25e6\u2043\u2219\u25a0\u25a1\u25c6\u27a2"
LONE_BULLETS = "-*\u2013\u2014\u00b7"
# words described at a time, so that the arrays of a step stay in a core's cache
WORDS_AT_ONCE = 1 << 12
# flag of a character outside ASCII, while a word is described
_WIDE = CURLY
_BYTES = np.arange(256)
_FLAGS_OF_BYTE = (
    np.isin(_BYTES, list(string.ascii_letters.encode())) * LETTER
    + np.isin(_BYTES, ord("#")) * NUMBER_SIGN
    + (_BYTES > 127) * _WIDE
).astype(np.uint8)
_IS_CURLY = np.isin(_BYTES, [ord("{"), ord("}")])
_IS_LONE_BULLET = np.isin(_BYTES, [ord(c) for c in LONE_BULLETS if c.isascii()])


def describe_words(words: list[str], ends: np.ndarray) -> np.ndarray:
    """FACTS [w] of words as of `clean_word`, without NULs. Hashes are not zero.

    `ends` are `sentences.ends(words)`, not 0 if a sentence may end there. Properties of ASCII characters are computed from the bytes
    of all words at once; the few words with other characters are examined one by one.
    """
    parts = [
        _describe(words[i : i + WORDS_AT_ONCE], ends[i : i + WORDS_AT_ONCE])
        for i in range(0, len(words), WORDS_AT_ONCE)
    ]
    return np.concatenate([np.zeros(0, FACTS), *parts])


def _describe(words: list[str], can_end: np.ndarray) -> np.ndarray:
    facts = np.zeros(len(words), FACTS)
    joined, edges = word_bytes(words)
    ends = edges[1:] - 1  # positions of the NULs
    begins = edges[:-1]
    facts["hash"] = segment_hashes(joined, edges)
    # without UTF-8's continuation bytes and the NUL
    facts["characters"] = segment_sums((joined & 0xC0) != 0x80, edges) - 1
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
    """Flags of a word due to characters outside ASCII."""
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

    facts: FACTS [w]; documents: int64 [d + 1], paragraphs: int64 [p + 1], edges in words from 0 to w. Every edge of a document
    is one of a paragraph. Documents and paragraphs may be empty. `folded`: `fold` [w] if a rule needs it.
    """

    facts: np.ndarray
    documents: np.ndarray
    paragraphs: np.ndarray
    folded: np.ndarray | None = None

    def __post_init__(self) -> None:
        for edges in (self.documents, self.paragraphs):
            assert edges[0] == 0 and edges[-1] == len(self.facts) and (np.diff(edges) >= 0).all(), edges

    def document_hashes(self, seed: int) -> np.ndarray:
        """uint64 [d]: equal for the same words in the same order, independent of whitespace and paragraph ends; 0 without words.
        Uniform for every seed."""
        return segment_hashes(self.facts["hash"], self.documents, seed)


def compute_share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """`part` / `whole`, float64; NaN if `whole` is 0, which is within any limit."""
    return np.divide(part, whole, out=np.full(len(whole), np.nan), where=whole > 0)


class DocumentMeasures:
    """Measures of the documents of a batch, each an array [d], computed on demand.

    `limits` are those of all rules; `verdict` [d] is 0 for documents that passed all rules so far.
    """

    def __init__(self, batch: WordFacts, limits: Mapping[str, float]) -> None:
        self.batch, self.limits = batch, limits
        self.documents = batch.documents
        self.flags = np.ascontiguousarray(batch.facts["flags"])
        self.characters_of = np.ascontiguousarray(batch.facts["characters"])
        self.hashes = np.ascontiguousarray(batch.facts["hash"])
        self.verdict = np.zeros(len(batch.documents) - 1, np.int8)

    def with_flag(self, flag: int) -> np.ndarray:
        """Number of words with a flag."""
        return segment_sums((self.flags & flag).view(np.uint8), self.documents) // flag

    def flag_share(self, flag: int) -> np.ndarray:
        return compute_share(self.with_flag(flag), self.words)

    @cached_property
    def words(self) -> np.ndarray:
        return np.diff(self.documents)

    @cached_property
    def characters(self) -> np.ndarray:
        return segment_sums(self.characters_of, self.documents)

    @cached_property
    def line_spans(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(first word, word after the last, document) of each line that has words."""
        first, end = self.batch.paragraphs[:-1], self.batch.paragraphs[1:]
        full = end > first
        first, end = first[full], end[full]
        return first, end, np.searchsorted(self.documents, first, side="right") - 1

    @cached_property
    def lines(self) -> np.ndarray:
        return np.bincount(self.line_spans[2], minlength=len(self.documents) - 1)

    def line_share(self, true: np.ndarray) -> np.ndarray:
        """Share of a document's lines with true in the bool array `true`."""
        return compute_share(np.bincount(self.line_spans[2][true], minlength=len(self.lines)), self.lines)

    @cached_property
    def repeated_lines(self) -> np.ndarray:
        """bool [lines]: whether a line repeats an earlier one of its document."""
        document = self.line_spans[2]
        hashes = segment_hashes(self.hashes, self.batch.paragraphs)[np.diff(self.batch.paragraphs) > 0]
        hashes += mix64(document.astype(np.uint64))  # different between documents
        order = np.argsort(hashes, kind="stable")  # stable: equal lines keep their order in the text
        repeats = np.zeros(len(document), bool)
        repeats[order[1:][hashes[order][1:] == hashes[order][:-1]]] = True
        return repeats

    def repeated_share(self) -> np.ndarray:
        """Share of characters in repeated lines."""
        sizes = segment_sums(self.characters_of, self.batch.paragraphs)[np.diff(self.batch.paragraphs) > 0]
        repeated = np.bincount(self.line_spans[2], np.where(self.repeated_lines, sizes, 0), len(self.lines))
        return compute_share(repeated, self.characters)

    @cached_property
    def n_gram_shares(self) -> dict[int, np.ndarray]:
        """n -> share of n-grams, in the documents that passed all rules so far."""
        limits = {n: self.limits[name] for n, name in N_GRAM_RULES.items() if name in self.limits}
        return repetition.shares(self.hashes, self.characters_of, self.documents, limits, self.verdict == 0)


# names of the rules that limit n-grams of each order
N_GRAM_RULES = {n: f"max-top-{n}-gram" for n in repetition.TOP}
N_GRAM_RULES |= {n: f"max-duplicate-{n}-gram" for n in repetition.REPEATED}


@dataclass(frozen=True)
class QualityRule:
    """A rule `name` (min-… or max-…) that limits `what`; `limit` is the published one, of the set `preset` ("" for none).

    `measure` returns an array [d] for a batch of documents, [p] for a rule of `lines`. `share`: limits are in 0..1. `folded`: the
    measure needs `WordFacts.folded`.
    """

    preset: str
    name: str
    what: str
    measure: Callable[[DocumentMeasures], np.ndarray]
    limit: float
    share: bool = False
    lines: bool = False
    folded: bool = False

    def broken(self, measures: DocumentMeasures) -> np.ndarray:
        """bool: the documents, or lines, beyond the limit; at the limit they are kept."""
        value, limit = self.measure(measures), measures.limits[self.name]
        return value < limit if self.name.startswith("min-") else value > limit


@cache
def _letters() -> np.ndarray:
    """bool [all code points]: whether it is a letter, a digit or a mark on one."""
    return np.array([unicodedata.category(chr(c))[0] in "LNM" for c in range(sys.maxunicode + 1)])


def fold(words: list[str]) -> np.ndarray:
    """uint64 [w]: hashes of the letters of words, caseless and without punctuation; 0 without letters. Words contain no NUL."""
    text = "\0".join([*words, ""]).casefold().encode("utf-32-le", "surrogatepass")
    codes = np.frombuffer(text, np.uint32)
    ends = np.flatnonzero(codes == 0)
    assert len(ends) == len(words), "a word holds a NUL"
    letter = _letters()[codes]
    return segment_hashes(codes[letter], np.append(0, np.cumsum(letter))[np.append(0, ends)])


@cache
def _phrase_hashes(phrases: tuple[str, ...]) -> list[list[int]]:
    return [[int(h) for h in fold(phrase.split())] for phrase in phrases]


def phrase_begins(batch: WordFacts, phrases: tuple[str, ...], edges: np.ndarray) -> np.ndarray:
    """bool [w]: whether one of `phrases` begins at a word, ignoring case and punctuation, and ends in the same document or line, which
    have these `edges`."""
    words = batch.folded
    assert words is not None, "the words were not folded"
    left = np.repeat(edges[1:], np.diff(edges)) - np.arange(len(words))
    begins = np.zeros(len(words), bool)
    for hashes in _phrase_hashes(phrases):
        hits = (words == hashes[0]) & (left >= len(hashes))
        for k, item in enumerate(hashes[1:], 1):
            hits[: len(words) - k] &= words[k:] == item
        begins |= hits
    return begins
