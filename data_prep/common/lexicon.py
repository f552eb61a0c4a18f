"""Hash table of distinct words over numpy arrays: 64-bit hashes of words to their numbers.

Whole arrays are looked up at once: with a dictionary of strings in its place a build takes a fifth to a quarter more CPU
(30 MB of Wikipedia, 1 and 2 workers). Two different words of a cache of a million get one number with a probability of
10^-13 a word looked up.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from data_prep.common import hashing


def word_hashes(words: pa.StringArray) -> np.ndarray:
    """uint64 [n]: hashes of the UTF-8 bytes, the same in every process; 0 is that of the empty word alone."""
    _, offsets, data = words.buffers()
    if data is None:
        return np.zeros(len(words), np.uint64)
    edges = np.frombuffer(offsets, np.int32)[words.offset : words.offset + len(words) + 1].astype(np.int64)
    text = np.frombuffer(data, np.uint8)[edges[0] : edges[-1]]
    return hashing.of_runs(text, edges - edges[0])


class Lexicon:
    """Numbers of words, in the order in which they were first met. Open addressing over arrays."""

    def __init__(self) -> None:
        self._keys = np.zeros(1 << 16, np.uint64)  # hashes; 0 is a free place
        self._values = np.zeros(1 << 16, np.int32)
        self.size = 0

    def numbers(self, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Numbers int64 [n] of distinct nonzero hashes uint64 [n], and the indices of the new ones in the order of their numbers."""
        while 2 * (self.size + len(hashes)) > len(self._keys):
            self._grow()
        found = np.full(len(hashes), -1, np.int64)
        waiting = np.arange(len(hashes))
        place = _first(self._keys, hashes)
        fresh = []
        while len(waiting):
            keys, wanted = self._keys[place], hashes[waiting]
            hit = keys == wanted
            found[waiting[hit]] = self._values[place[hit]]
            free = keys == 0
            if free.any():
                self._keys[place[free]] = wanted[free]  # of several that want a place the last one gets it
                won = free & (self._keys[place] == wanted)
                fresh.append((waiting[won], place[won]))
                hit |= won
            waiting = waiting[~hit]
            place = (place[~hit] + 1) & (len(self._keys) - 1)
        if not fresh:
            return found, np.zeros(0, np.int64)
        new, places = (np.concatenate(parts) for parts in zip(*fresh, strict=True))
        order = np.argsort(new)
        new, places = new[order], places[order]
        found[new] = np.arange(self.size, self.size + len(new))
        self._values[places] = found[new]
        self.size += len(new)
        return found, new

    def _grow(self) -> None:
        full = np.flatnonzero(self._keys)
        hashes, values = self._keys[full], self._values[full]
        self._keys, self._values = (np.zeros(2 * len(old), old.dtype) for old in (self._keys, self._values))
        insert(self._keys, self._values, hashes, values)


def insert(keys: np.ndarray, values: np.ndarray, hashes: np.ndarray, numbers: np.ndarray) -> None:
    """Put nonzero hashes that are not there yet, with their numbers, into the table of `keys` and `values`."""
    waiting, place = np.arange(len(hashes)), _first(keys, hashes)
    while len(waiting):
        free = keys[place] == 0
        keys[place[free]] = hashes[waiting[free]]  # of several that want a place the last one gets it
        won = free & (keys[place] == hashes[waiting])
        values[place[won]] = numbers[waiting[won]]
        waiting, place = waiting[~won], (place[~won] + 1) & (len(keys) - 1)


def find(keys: np.ndarray, values: np.ndarray, hashes: np.ndarray) -> np.ndarray:
    """int64 [n]: the numbers of nonzero hashes, -1 of those that are not in the table."""
    found = np.full(len(hashes), -1, np.int64)
    waiting, place = np.arange(len(hashes)), _first(keys, hashes)
    while len(waiting):
        here = keys[place]
        hit = here == hashes[waiting]
        found[waiting[hit]] = values[place[hit]]
        on = (here != 0) & ~hit
        waiting, place = waiting[on], (place[on] + 1) & (len(keys) - 1)
    return found


def _first(keys: np.ndarray, hashes: np.ndarray) -> np.ndarray:
    """Where to look first: `keys` is as long as a power of two."""
    return (hashes >> np.uint64(20) & np.uint64(len(keys) - 1)).astype(np.int64)
