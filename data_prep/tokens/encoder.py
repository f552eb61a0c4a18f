"""Encoder of documents to token ids, through a cache of distinct words.

A word costs a lookup instead of a Viterbi search. No token of a SentencePiece model that splits at whitespace and adds a dummy
prefix crosses a word, and scores are sums over tokens, so the best segmentation of a sentence is the concatenation of those of its
words. (In models not trained by data_prep rounding of the running sum can break a near tie differently.) The contents of the cache
do not affect the output. The cache also has the facts of words for filters and deduplication (`measures.FACTS`).

Legend: w words, t tokens, s sentences, p paragraphs, d documents.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain, pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_prep.common.arrays import range_indices, segment_counts, segment_sums
from data_prep.common.errors import BadInput
from data_prep.filters.measures import FACTS, WordFacts, describe_words, fold
from data_prep.text import sentences
from data_prep.tokens.word_cache import WORD, EncodedWords, WordNumbers, word_hashes
from megabert.data.text import MAX_WORD, Form, clean_word, slice_ends
from megabert.data.tokenizer import Tokenizer

# distinct words in the cache, about 150 MB
MAX_WORDS = 2_000_000
# tokens of all those words, with 32-bit indices
MAX_TOKENS = 1 << 25
# Prefix of a document's first word, if the tokenizer encodes it unlike the same word after a space; in no cleaned text.
FIRST = "\x02"


@dataclass
class Encoded:
    """Documents as token ids, without empty sentences.

    tokens: uint16 or uint32 [t]; sentence_lengths: int64 [s] in tokens; document_sizes: int64 [d] in sentences (0 for a document
    without text); texts: on request a string for each sentence [s] with the space or blank line after it.
    """

    tokens: np.ndarray
    sentence_lengths: np.ndarray
    document_sizes: np.ndarray
    texts: pa.StringArray | pa.LargeStringArray | None = None

    def select(self, keep: np.ndarray) -> Encoded:
        """The documents where the bool array `keep` [d] is true, in order."""
        if keep.all():
            return self
        left = self.select_sentences(np.repeat(keep, self.document_sizes))
        return replace(left, document_sizes=self.document_sizes[keep])

    def select_sentences(self, keep: np.ndarray) -> Encoded:
        """The sentences where the bool array `keep` [s] is true; a document without any left has size 0."""
        if keep.all():
            return self
        document = np.repeat(np.arange(len(self.document_sizes)), self.document_sizes)
        sizes = np.bincount(document[keep], minlength=len(self.document_sizes)).astype(np.int64)
        tokens = self.tokens[np.repeat(keep, self.sentence_lengths)]
        texts = None if self.texts is None else self.texts.filter(pa.array(keep))
        return Encoded(tokens, self.sentence_lengths[keep], sizes, texts)

    def document_texts(self) -> list[str]:
        """The text of each document: cleaned words with a space between, a blank line between paragraphs."""
        assert self.texts is not None
        edges = pa.array(np.append(0, np.cumsum(self.document_sizes)).astype(np.int32))
        joined = pc.binary_join(pa.ListArray.from_arrays(edges, self.texts), pa.scalar("", self.texts.type))
        return pc.utf8_rtrim_whitespace(joined).to_pylist()

    def document_tokens(self) -> np.ndarray:
        """int64 [d]: tokens of each document."""
        return segment_sums(self.sentence_lengths, np.append(0, np.cumsum(self.document_sizes)))


@dataclass
class DocumentBatch:
    """Documents from the encoder: facts of their words for filters and hashes, and their tokens.

    paragraph_sizes: int64 [p] in sentences, including empty paragraphs. unspaced: bool [d], whether a document has words in a
    script without spaces.
    """

    words: WordFacts
    encoded: Encoded
    paragraph_sizes: np.ndarray
    unspaced: np.ndarray

    def select_paragraphs(self, keep: np.ndarray) -> DocumentBatch:
        """The paragraphs where the bool array `keep` [p] is true; the others become empty."""
        words = self.words
        kept = np.repeat(keep, np.diff(words.paragraphs))
        at = np.append(0, np.cumsum(kept))
        facts = WordFacts(
            words.facts[kept],
            at[words.documents],
            at[words.paragraphs],
            None if words.folded is None else words.folded[kept],
        )
        sentences = self.encoded.select_sentences(np.repeat(keep, self.paragraph_sizes))
        return DocumentBatch(facts, sentences, np.where(keep, self.paragraph_sizes, 0), self.unspaced)


def word_facts(documents: list[list[str]], folded: bool = False, form: Form = "NFC") -> WordFacts:
    """Facts of the words of a few documents, each a list of paragraphs, without a cache; `form`: as of `clean_word`."""
    words: list[str] = []
    cleaned: dict[str, str] = {}
    ends, edges = [0], [0]
    for paragraphs in documents:
        for paragraph in paragraphs:
            split = paragraph.split()
            cleaned |= {word: clean_word(word, form) for word in split if word not in cleaned}
            words += filter(cleaned.get, split)
            edges.append(len(words))
        ends.append(len(words))
    distinct = {word: i for i, word in enumerate(filter(cleaned.get, cleaned))}
    plain = list(map(cleaned.__getitem__, distinct))
    facts = describe_words(plain, sentences.ends(plain))
    numbers = np.fromiter(map(distinct.__getitem__, words), np.int64, len(words))
    hashes = fold(plain)[numbers] if folded else None
    return WordFacts(facts[numbers], np.array(ends, np.int64), np.array(edges, np.int64), hashes)


class WordEncoder:
    """Collects documents as word numbers and converts them to tokens together.

    `dtype` is that of the ids in shards. `folded`: also fold words. `texts`: keep the texts of sentences.
    """

    def __init__(self, tokenizer: Tokenizer, dtype: np.dtype, folded: bool = False, texts: bool = False) -> None:
        if not tokenizer.word_local:
            added = f": added tokens {', '.join(map(repr, tokenizer.crossing[:4]))}" if tokenizer.crossing else ""
            raise BadInput(
                f"{tokenizer.path}: its tokens cross word boundaries or hold whitespace{added} (trained with split_by_whitespace or "
                "add_dummy_prefix off, or without a pre-tokenizer that splits at spaces), which data_prep does not support; train "
                "one with data_prep build"
            )
        self.tokenizer, self.dtype, self.folded, self.texts = tokenizer, np.dtype(dtype), folded, texts
        # of each token
        self._characters = np.array([len(token.strip()) for token in tokenizer.tokens])
        self._characters[tokenizer.unk_id] = 0
        self._reset_cache()
        self._reset_documents()

    def _reset_cache(self) -> None:
        self._numbers = WordNumbers()
        self._flat = np.zeros(1 << 16, self.dtype)
        self._used = 0
        self._table = np.zeros(1 << 14, WORD)
        self._folded = np.zeros(0, np.uint64)
        self._new_words: list[EncodedWords] = []

    def _reset_documents(self) -> None:
        # paragraphs of all waiting documents, and their number in each
        self._paragraphs: list[str] = []
        self._sizes: list[int] = []
        # characters waiting
        self.pending = 0

    def add(self, paragraphs: list[str]) -> None:
        """Add one document. Paragraph ends are sentence ends."""
        if self.tokenizer.spaced:
            first = next((i for i, paragraph in enumerate(paragraphs) if paragraph.strip()), 0)
            paragraphs = [p if i != first else FIRST + p.lstrip() for i, p in enumerate(paragraphs)]
        self._paragraphs += paragraphs
        self._sizes.append(len(paragraphs))
        self.pending += sum(map(len, paragraphs))

    def _split(self) -> tuple[np.ndarray, np.ndarray, pa.StringArray | None]:
        """Numbers int64 [w] of the waiting words, edges int64 [p + 1] of paragraphs, cleaned words with `texts`."""
        # Arrow reads the byte after the last string: if it continues a character, space before it would belong to the word.
        lists = pc.utf8_split_whitespace(pa.array([*self._paragraphs, "."], pa.string()))[:-1]
        encoded = lists.flatten().dictionary_encode()
        # place: index of each word among the distinct ones
        distinct, place = encoded.dictionary, encoded.indices.to_numpy()
        hashes = word_hashes(distinct)
        full = hashes != 0
        numbers = np.full(len(hashes), -1, np.int64)
        numbers[full], new = self._numbers.numbers(hashes[full])
        if len(new):
            new = np.flatnonzero(full)[new]
            added = self._encode_words(hashes[new], distinct.take(pa.array(new)).to_pylist())
            self._put(added)
            again = np.bincount(place, minlength=len(distinct))[new] > 1
            if again.any():
                self._new_words.append(added.select(again))
        full &= self._table["facts"]["characters"][numbers] > 0  # of invisible characters alone is no word
        word_numbers = np.where(full, numbers, -1)[place]
        words = None
        if self.texts:
            form = self.tokenizer.form
            cleaned = (clean_word(word.lstrip(FIRST), form) for word in distinct.to_pylist())
            words = pa.array(cleaned, pa.string()).take(encoded.indices)
        edges = lists.offsets.to_numpy().astype(np.int64)
        # Arrow returns an empty word for space at either end, unlike Python's split.
        if not full.all():
            empty = word_numbers < 0
            edges -= np.searchsorted(np.flatnonzero(empty), edges)
            word_numbers = word_numbers[~empty]
            words = words.filter(pa.array(~empty)) if words is not None else None
        return word_numbers, edges, words

    def _put(self, words: EncodedWords) -> None:
        """Add the last numbered words to the tables."""
        first, last = self._numbers.size - len(words.rows), self._numbers.size
        while last > len(self._table):
            self._table = np.concatenate([self._table, np.zeros_like(self._table)])
        used, self._used = self._used, self._used + len(words.tokens)
        while self._used > len(self._flat):
            self._flat = np.concatenate([self._flat, np.zeros_like(self._flat)])
        self._flat[used : self._used] = words.tokens
        lengths = words.rows["length"]
        self._table[first:last] = words.rows
        self._table["start"][first:last] = used + np.cumsum(lengths) - lengths
        if words.folded is not None:
            if len(self._folded) < len(self._table):
                self._folded = np.resize(self._folded, len(self._table))
            self._folded[first:last] = words.folded

    def add_words(self, words: EncodedWords) -> None:
        """Add words encoded by another encoder with the same options, unless the cache is half full."""
        if self._numbers.size + len(words.hashes) <= MAX_WORDS // 2:
            new = self._numbers.numbers(words.hashes)[1]
            self._put(words.select(new))

    def take_new_words(self) -> EncodedWords | None:
        """The words encoded since the last call that occurred more than once in their documents."""
        new, self._new_words = self._new_words, []
        return EncodedWords.join(new) if new else None

    def _encode_words(self, hashes: np.ndarray, new: list[str]) -> EncodedWords:
        """Encode words that are not in the cache."""
        parts, edges = new, np.arange(len(new) + 1)
        if max(map(len, new)) > MAX_WORD:
            slices = [_slices(word) for word in new]
            parts = list(chain.from_iterable(slices))
            edges = np.append(0, np.cumsum(list(map(len, slices))))
        plain = [w if w.isascii() else clean_word(w, self.tokenizer.form) for w in parts]
        encoded = self._encode(plain)
        lengths = np.fromiter(map(len, encoded), np.int32, len(parts))
        tokens = np.fromiter(chain.from_iterable(encoded), self.dtype, int(lengths.sum()))
        unknown = self._unknown(plain, lengths, tokens)
        if parts is not new:
            plain = ["".join(plain[first:end]) for first, end in pairwise(edges.tolist())]
        ends = sentences.ends(plain)
        rows = np.zeros(len(plain), WORD)
        rows["length"] = segment_sums(lengths, edges)
        rows["ends"], rows["starts"] = ends, sentences.starts(plain)
        rows["facts"] = describe_words(plain, ends)
        rows["facts"]["unknown"] = segment_sums(unknown, edges)
        return EncodedWords(hashes, rows, tokens, fold(plain) if self.folded else None)

    def _unknown(self, words: list[str], lengths: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """int64 [w]: characters in [UNK] tokens of each of the words with these tokens: those in none of the others.

        Inexact in words with [UNK] whose number of characters the tokenizer's own normalisation changes.
        """
        counts = np.zeros(len(words), np.int64)
        edges = np.append(0, np.cumsum(lengths))
        at = np.flatnonzero(tokens == self.tokenizer.unk_id)
        some = np.unique(np.searchsorted(edges, at, side="right")) - 1
        known = segment_sums(self._characters[tokens], edges)[some]
        counts[some] = np.maximum([len(words[i]) for i in some.tolist()] - known, 1)
        return counts

    def _encode(self, words: list[str]) -> list[list[int]]:
        """Tokens of cleaned words; FIRST is removed from those at the beginning of a document."""
        encoded = self.tokenizer.encode_words(words)
        if first := [i for i, word in enumerate(words) if word.startswith(FIRST)] if self.tokenizer.spaced else []:
            for i in first:
                words[i] = words[i].removeprefix(FIRST)
            for i, ids in zip(first, self.tokenizer.encode_batch([words[i] for i in first]), strict=True):
                encoded[i] = ids
        return encoded

    def finish(self) -> DocumentBatch:
        """All documents added since the last call, in order."""
        if self._numbers.size > MAX_WORDS or self._used > MAX_TOKENS:
            self._reset_cache()
        numbers, paragraphs, cleaned = self._split()
        documents = paragraphs[np.append(0, np.cumsum(np.array(self._sizes, np.int64)))]
        self._reset_documents()
        facts = np.empty(len(numbers), FACTS)
        for name in FACTS.names or ():  # field by field: five times as fast as whole records
            facts[name] = self._table["facts"][name][numbers]
        folded = self._folded[numbers] if self.folded else None
        words = WordFacts(facts, documents, paragraphs, folded)
        begins = np.zeros(len(numbers) + 1, bool)  # a sentence begins at this word
        begins[paragraphs] = True
        kinds = self._table["starts"][numbers]
        begins[1:-1] |= self._sentence_begins(numbers, kinds, documents)
        edges = np.flatnonzero(begins)  # of sentences, in words
        word_lengths = self._table["length"][numbers]
        sentence_lengths = segment_sums(word_lengths, edges)
        kept = sentence_lengths > 0  # words of only invisible characters have no token
        sizes = segment_counts(edges[:-1][kept], documents)
        paragraph_sizes = segment_counts(edges[:-1][kept], paragraphs)
        tokens = self._flat[range_indices(self._table["start"][numbers], word_lengths, np.int32)]
        texts = None if cleaned is None else _sentence_texts(cleaned, edges, kept, paragraph_sizes)
        encoded = Encoded(tokens, sentence_lengths[kept], sizes, texts)
        unspaced = segment_counts(np.flatnonzero(kinds & sentences.UNSPACED), documents) > 0
        return DocumentBatch(words, encoded, paragraph_sizes, unspaced)

    def _sentence_begins(self, numbers: np.ndarray, starts: np.ndarray, documents: np.ndarray) -> np.ndarray:
        """bool [w - 1]: whether a sentence begins at each word after the first."""
        shared = self._table["ends"][numbers[:-1]] & starts[1:]
        kinds = sentences.allowed(starts, documents)
        return (shared & np.repeat(kinds, np.diff(documents))[1:]) > 0


def _slices(word: str) -> list[str]:
    """The slices in which a word is encoded, FIRST with the first of them."""
    first = len(word) - len(word.removeprefix(FIRST))
    edges = [0, *(first + end for end in slice_ends(word[first:]))]
    return [word[start:end] for start, end in pairwise(edges)]


def _sentence_texts(
    words: pa.StringArray, edges: np.ndarray, kept: np.ndarray, paragraph_sizes: np.ndarray
) -> pa.StringArray:
    """The text of each kept sentence, followed by a space, or by a blank line at the end of its paragraph."""
    lists = pa.ListArray.from_arrays(pa.array(edges.astype(np.int32)), words)
    texts = pc.binary_join(lists, " ").filter(pa.array(kept))
    last = np.zeros(len(texts), bool)
    last[np.cumsum(paragraph_sizes)[paragraph_sizes > 0] - 1] = True
    return pc.binary_join_element_wise(texts, pc.if_else(pa.array(last), "\n\n", " "), "")
