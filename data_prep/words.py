"""Text becomes token ids through a cache of distinct words, so a word costs a lookup and not a Viterbi search.

No piece of a SentencePiece model that splits at whitespace and puts a dummy prefix crosses a word, and its
score is a sum over pieces: the best segmentation of a sentence is the concatenation of its words' best ones.
(Rounding of the running sum can break a near tie differently; tests count how seldom.) The contents of
the cache never change what comes out. Legend: w words, t tokens, s sentences, d documents.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from data_prep import clean, sentences

MAX_WORDS = 1_000_000  # distinct words kept, about 200 MB
MAX_CHARACTERS = 24_000_000  # of those words together
MAX_WORD = 512  # characters; a longer run without whitespace is encoded in pieces of this size
WORD_MARK = "\u2581"


@dataclass
class Encoded:
    """Documents as token ids. No sentence and no document in it is empty.

    tokens: uint16 or uint32 [t]; sentence_lengths: int64 [s] in tokens; document_sizes: int64 [d] in sentences
    (0 for a document that held no text).
    """

    tokens: np.ndarray
    sentence_lengths: np.ndarray
    document_sizes: np.ndarray

    @staticmethod
    def join(parts: list[Encoded], dtype: np.dtype) -> Encoded:
        if not parts:
            none = np.zeros(0, np.int64)
            return Encoded(np.zeros(0, dtype), none, none)
        return Encoded(
            np.concatenate([p.tokens for p in parts]),
            np.concatenate([p.sentence_lengths for p in parts]),
            np.concatenate([p.document_sizes for p in parts]),
        )

    def select(self, keep: np.ndarray) -> Encoded:
        """The documents where the bool array `keep` [d] is true, in order."""
        keep_sentence = np.repeat(keep, self.document_sizes)
        keep_token = np.repeat(keep_sentence, self.sentence_lengths)
        return Encoded(
            self.tokens[keep_token], self.sentence_lengths[keep_sentence], self.document_sizes[keep]
        )


class _Numbers(dict[str, int]):
    """Word to number; a new word takes the next number and waits in `new`."""

    def __init__(self) -> None:
        super().__init__()
        self.new: list[str] = []

    def __missing__(self, word: str) -> int:
        number = self[word] = len(self)
        self.new.append(word)
        return number


def is_word_local(processor: Any) -> bool:
    """Whether this SentencePiece model encodes a sentence as its words one by one, so that the cache is exact."""
    if processor.encode("a a", out_type=str)[:1] != processor.encode("a", out_type=str)[:1]:
        return False
    if not processor.id_to_piece(processor.encode("a")[0]).startswith(WORD_MARK):
        return False
    return not any(WORD_MARK in processor.id_to_piece(i)[1:].lstrip(WORD_MARK) for i in range(len(processor)))


class WordEncoder:
    """Collects documents as word numbers and turns them into tokens in one go.

    `processor` is a sentencepiece.SentencePieceProcessor, `dtype` that of the ids in shards.
    """

    def __init__(self, processor: Any, dtype: np.dtype) -> None:
        if not is_word_local(processor):
            raise ValueError(
                "tokenizer: its pieces cross word boundaries (trained with split_by_whitespace or "
                "add_dummy_prefix off), which data_prep does not support; train one with data_prep build"
            )
        self.processor = processor
        self.dtype = dtype
        self._reset_cache()
        self._reset_documents()

    def _reset_cache(self) -> None:
        self._numbers = _Numbers()
        self._known = 0
        self._characters = 0
        self._flat = np.zeros(1 << 16, self.dtype)
        self._used = 0
        self._start = np.zeros(1 << 14, np.int64)
        self._length = np.zeros(1 << 14, np.int32)
        self._ends = np.zeros(1 << 14, bool)
        self._starts = np.zeros(1 << 14, bool)

    def _reset_documents(self) -> None:
        self._words: list[np.ndarray] = []  # word numbers of each document
        self._breaks: list[np.ndarray] = []  # word counts at paragraph ends, inside the document
        self.pending = 0  # words waiting

    def add(self, paragraphs: list[str]) -> None:
        """Take one document. Paragraph ends are sentence ends."""
        words: list[str] = []
        breaks: list[int] = []
        for paragraph in paragraphs:
            words += paragraph.split()
            breaks.append(len(words))
        numbers = np.fromiter(map(self._numbers.__getitem__, words), np.int32, len(words))
        self._words.append(numbers)
        self._breaks.append(np.array(breaks, np.int64))
        self.pending += len(words)
        if len(self._numbers.new) >= 1 << 16:
            self._learn()

    def _learn(self) -> None:
        """Encode the words met for the first time and append them to the tables."""
        new = self._numbers.new
        if not new:
            return
        self._numbers.new = []
        plain = [w if w.isascii() and "&" not in w else clean.clean_word(w[:MAX_WORD]) for w in new]
        encoded = self.processor.encode([w[:MAX_WORD] for w in plain], num_threads=1)
        for i, word in enumerate(new):
            if len(word) > MAX_WORD:
                pieces = [clean.clean_word(word[k : k + MAX_WORD]) for k in range(0, len(word), MAX_WORD)]
                encoded[i] = [
                    token for piece in self.processor.encode(pieces, num_threads=1) for token in piece
                ]
        lengths = np.fromiter(map(len, encoded), np.int32, len(new))
        total = int(lengths.sum())
        first, last = self._known, self._known + len(new)
        while last > len(self._start):
            for name in ("_start", "_length", "_ends", "_starts"):
                table = getattr(self, name)
                setattr(self, name, np.concatenate([table, np.zeros_like(table)]))
        while self._used + total > len(self._flat):
            self._flat = np.concatenate([self._flat, np.zeros_like(self._flat)])
        self._flat[self._used : self._used + total] = np.fromiter(
            chain.from_iterable(encoded), self.dtype, total
        )
        self._start[first:last] = self._used + np.cumsum(lengths) - lengths
        self._length[first:last] = lengths
        marks = sentences.LAST
        self._ends[first:last] = [w[-1] in marks and sentences.can_end(w) for w in new]
        self._starts[first:last] = [not w[0].islower() and sentences.can_start(w) for w in new]
        self._known, self._used = last, self._used + total
        self._characters += sum(map(len, new))

    def finish(self) -> Encoded:
        """Tokens of all documents added since the last call, in order, one entry a document."""
        self._learn()
        counts = np.array([len(w) for w in self._words], np.int64)
        if not counts.sum():
            self._reset_documents()
            return Encoded(np.zeros(0, self.dtype), np.zeros(0, np.int64), np.zeros(len(counts), np.int64))
        numbers = np.concatenate(self._words)  # [w]
        base = np.cumsum(counts) - counts
        edges = np.concatenate([b + o for b, o in zip(self._breaks, base, strict=True)])
        begins = np.zeros(len(numbers) + 1, bool)  # a sentence begins at this word
        begins[edges] = True
        begins[base] = True
        begins[1:-1] |= self._ends[numbers[:-1]] & self._starts[numbers[1:]]
        sentence_words = np.flatnonzero(begins[:-1])  # first word of each sentence
        word_lengths = self._length[numbers].astype(np.int64)
        sentence_lengths = np.add.reduceat(word_lengths, sentence_words)
        document_of = np.searchsorted(base + counts, sentence_words, side="right")
        kept = sentence_lengths > 0  # words of invisible characters alone give no token
        sizes = np.bincount(document_of[kept], minlength=len(counts)).astype(np.int64)
        total = int(word_lengths.sum())
        source = np.repeat(self._start[numbers] - (np.cumsum(word_lengths) - word_lengths), word_lengths)
        source += np.arange(total)
        tokens = self._flat[source]
        self._reset_documents()
        if self._known > MAX_WORDS or self._characters > MAX_CHARACTERS:
            self._reset_cache()
        return Encoded(tokens, sentence_lengths[kept], sizes)
