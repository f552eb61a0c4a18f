"""Overlap of documents with evaluation texts, by the letters of their words: case, accents' case, punctuation don't count.

The letters of a run of words have one hash however they are spaced, since the hash of a word is a polynomial in its letters
and the polynomials of words add up: "do n't" is "don't". Two overlaps make a document contaminated:

    a stretch   of WINDOW letters (about 20 words) of a longer evaluation text, or the whole of one that has KEY letters
                (about 8 words). The 13 words of Brown et al. 2020, appendix C, are found in every article on a town that
                was made of the same census: "According to the United States Census Bureau, the city has a total area of"
    a sentence  that is the whole of a shorter evaluation text, alone or with its neighbours

Texts of fewer than MIN_WORDS words or MIN_LETTERS letters are in every book and count for nothing. Legend: w words, d documents.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from data_prep.filters.folding import BASE, INVERSE, power
from data_prep.filters.quality import WordFacts
from megabert.common.hash_mixer import mix64

STRETCH = np.dtype([("key", "<u8"), ("check", "<u8"), ("letters", "<u4"), ("text", "<u4")])
SENTENCE = np.dtype([("key", "<u8"), ("text", "<u4")])
KEY, WINDOW = 36, 100  # letters
MIN_WORDS, MIN_LETTERS = 4, 12
NEIGHBOURS = 4  # sentences that one evaluation text may be
STRIDE = 4  # words between the stretches of a text
_SLOTS = 24  # bits of the table that says of most keys that they are none


class _Runs:
    """Hashes of runs of words, whatever is between the words."""

    def __init__(self, folded: np.ndarray) -> None:
        self.at = np.append(0, np.cumsum(folded["letters"], dtype=np.int64))  # letters before each word
        powers = power(BASE, int(self.at[-1]) + 1)
        terms = folded["hash"] * powers[self.at[:-1]]
        self._sums = np.append(np.uint64(0), np.cumsum(terms, dtype=np.uint64))
        self._inverse = power(INVERSE, int(self.at[-1]) + 1)

    def hashes(self, first: np.ndarray, end: np.ndarray) -> np.ndarray:
        """uint64 [n] of the words [first, end), both int64 [n]."""
        run = (self._sums[end] - self._sums[first]) * self._inverse[self.at[first]]
        return mix64(run + (self.at[end] - self.at[first]).astype(np.uint64))

    def after(self, first: np.ndarray, letters: int | np.ndarray) -> np.ndarray:
        """int64 [n]: the end of the shortest run from `first` on with at least so many letters; w + 1 where there is none."""
        return np.searchsorted(self.at, self.at[first] + letters)


def _folded(batch: WordFacts) -> np.ndarray:
    assert batch.folded is not None, "the words were not folded"
    return batch.folded


def _stretches(batch: WordFacts, runs: _Runs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(first word, end of KEY letters, end of the document) of each word with that many letters before its document's end."""
    folded = _folded(batch)
    sizes = np.diff(batch.documents)
    first = np.flatnonzero(folded["letters"])
    last = np.repeat(batch.documents[1:], sizes)[first]
    end = runs.after(first, KEY)
    whole = end <= last
    return first[whole], end[whole], last[whole]


def _sentences(batch: WordFacts, runs: _Runs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(first word, end, document) of runs of one to NEIGHBOURS sentences with fewer than KEY letters."""
    begins = np.zeros(len(batch.facts) + 1, bool)
    begins[batch.paragraphs] = True
    begins[1:] |= _folded(batch)["stops"]
    edges = np.flatnonzero(begins)
    edges = edges[np.append(np.diff(runs.at[edges]) > 0, True)]  # the last of those with no letter between
    firsts, ends = [], []
    for count in range(1, NEIGHBOURS + 1):
        firsts.append(edges[:-count])
        ends.append(edges[count:])
    first, end = np.concatenate(firsts), np.concatenate(ends)
    document = np.searchsorted(batch.documents, first, side="right") - 1
    letters = runs.at[end] - runs.at[first]
    inside = runs.at[end] <= runs.at[batch.documents[document + 1]]
    fits = (letters >= MIN_LETTERS) & (letters < KEY) & inside
    return first[fits], end[fits], document[fits]


def index(batch: WordFacts) -> tuple[np.ndarray, np.ndarray]:
    """(STRETCH, SENTENCE) of evaluation texts, each a document of `batch`, ordered by key."""
    runs = _Runs(_folded(batch))
    words = np.diff(batch.documents)
    letters = np.diff(runs.at[batch.documents])
    counts = (words >= MIN_WORDS) & (letters >= MIN_LETTERS)
    short = np.flatnonzero(counts & (letters < KEY))
    sentences = np.zeros(len(short), SENTENCE)
    sentences["key"] = runs.hashes(batch.documents[short], batch.documents[short + 1])
    sentences["text"] = short
    first, end, last = _stretches(batch, runs)
    text = np.searchsorted(batch.documents, first, side="right") - 1
    opening = np.append(True, np.diff(text) > 0)[: len(text)]
    long = letters[text] >= WINDOW
    stop = np.where(long, runs.after(first, WINDOW), last)
    taken = np.where(long, (stop <= last) & ((first - batch.documents[text]) % STRIDE == 0), opening)
    taken = (taken.astype(bool) | opening) & (stop <= last) & counts[text]
    first, end, stop, text = first[taken], end[taken], stop[taken], text[taken]
    stretches = np.zeros(len(first), STRETCH)
    stretches["key"], stretches["check"] = runs.hashes(first, end), runs.hashes(first, stop)
    stretches["letters"], stretches["text"] = runs.at[stop] - runs.at[first], text
    return _ordered(stretches), _ordered(sentences)


def _ordered(records: np.ndarray) -> np.ndarray:
    return records[np.argsort(records["key"], kind="stable")]


@dataclass(frozen=True)
class Match:
    """A document that overlaps with evaluation text number `text`."""

    document: int
    text: int


class Evaluation:
    """Evaluation texts by their `index`, to be found in documents."""

    def __init__(self, stretches: np.ndarray, sentences: np.ndarray) -> None:
        self._stretches, self._texts = stretches, sentences
        self._keys, self._short = np.array(stretches["key"]), np.array(sentences["key"])
        self._some = np.zeros(1 << _SLOTS, bool)  # by the highest bits of a key
        self._some[(self._keys >> np.uint64(64 - _SLOTS)).astype(np.int64)] = True

    def find(self, batch: WordFacts) -> list[Match]:
        """The first overlap of each document that has one."""
        runs = _Runs(_folded(batch))
        found: dict[int, int] = {}
        first, end, document = _sentences(batch, runs)
        keys = runs.hashes(first, end)
        place = np.minimum(np.searchsorted(self._short, keys), len(self._short) - 1)
        for i in np.flatnonzero(self._short[place] == keys).tolist() if len(self._short) else ():
            found.setdefault(int(document[i]), int(self._texts["text"][place[i]]))
        first, end, last = _stretches(batch, runs)
        keys = runs.hashes(first, end)
        likely = np.flatnonzero(self._some[(keys >> np.uint64(64 - _SLOTS)).astype(np.int64)])
        low, high = (np.searchsorted(self._keys, keys[likely], side) for side in ("left", "right"))
        for i, a, b in zip(likely.tolist(), low.tolist(), high.tolist(), strict=True):
            if a < b:
                self._check(runs, batch, first[i], last[i], self._stretches[a:b], found)
        return [Match(d, text) for d, text in sorted(found.items())]

    def _check(
        self,
        runs: _Runs,
        batch: WordFacts,
        first: np.int64,
        last: np.int64,
        stretches: np.ndarray,
        found: dict[int, int],
    ) -> None:
        """Whether one of `stretches`, which begin as the words from `first` on do, goes on as they do."""
        begin = np.full(len(stretches), first)
        end = runs.after(begin, stretches["letters"].astype(np.int64))
        inside = end <= last
        end = np.where(inside, end, last)
        same = inside & (runs.hashes(begin, end) == stretches["check"])
        if same.any():
            document = int(np.searchsorted(batch.documents, first, side="right")) - 1
            found.setdefault(document, int(stretches["text"][int(np.argmax(same))]))
