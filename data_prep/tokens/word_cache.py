"""Cache of encoded words: a hash table from words to numbers, and the words that workers share through files.

`WordNumbers` looks up arrays of 64-bit hashes at once: with a dictionary of strings instead a build takes a fifth to a quarter
more CPU (30 MB of Wikipedia, 1 and 2 workers). With a million words in the cache a looked-up word gets the number of another one
with a probability of 10^-13.

Encoding a word takes five times as long as reading its tokens from another worker's file. A worker writes a task's new
words into the work folder, and reads those of others before its next task. Words that occurred once are not shared:
most new words are such, hardly ever occur again, and would fill every cache. A cache does not affect the output.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from data_prep.common.arrays import segment_hashes
from data_prep.filters.measures import FACTS
from megabert.common.files import atomic_file

# only the first tasks of a build share words, since later ones have few new ones
SHARING_TASKS = 256
FOLDER = "words"
# `start`: index of the first token; `ends`, `starts`: kinds, as of text.sentences
WORD = np.dtype([("facts", FACTS), ("start", "<i4"), ("length", "<i4"), ("ends", "u1"), ("starts", "u1")], align=True)


def word_hashes(words: pa.StringArray) -> np.ndarray:
    """uint64 [n]: hashes of the UTF-8 bytes, the same in every process; 0 only for the empty word."""
    _, offsets, data = words.buffers()
    if data is None:
        return np.zeros(len(words), np.uint64)
    edges = np.frombuffer(offsets, np.int32)[words.offset : words.offset + len(words) + 1].astype(np.int64)
    text = np.frombuffer(data, np.uint8)[edges[0] : edges[-1]]
    return segment_hashes(text, edges - edges[0])


class WordNumbers:
    """Numbers of words in order of first occurrence, in a hash table with open addressing."""

    def __init__(self) -> None:
        self._keys = np.zeros(1 << 16, np.uint64)  # hashes; 0 is a free slot
        self._values = np.zeros(1 << 16, np.int32)
        self.size = 0

    def numbers(self, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Numbers int64 [n] of distinct nonzero hashes uint64 [n], and the indices of the new ones in the order of their numbers."""
        while 2 * (self.size + len(hashes)) > len(self._keys):
            self._grow()
        values = np.full(len(hashes), -1, np.int64)
        waiting = np.arange(len(hashes))
        # the length is a power of two
        slot = (hashes >> np.uint64(20) & np.uint64(len(self._keys) - 1)).astype(np.int64)
        fresh = []
        while len(waiting):
            keys, wanted = self._keys[slot], hashes[waiting]
            hit = keys == wanted
            values[waiting[hit]] = self._values[slot[hit]]
            free = keys == 0
            if free.any():
                self._keys[slot[free]] = wanted[free]  # of several for a slot the last is stored
                won = free & (self._keys[slot] == wanted)
                fresh.append((waiting[won], slot[won]))
                hit |= won
            waiting = waiting[~hit]
            slot = (slot[~hit] + 1) & (len(self._keys) - 1)
        if not fresh:
            return values, np.zeros(0, np.int64)
        new, slots = (np.concatenate(parts) for parts in zip(*fresh, strict=True))
        order = np.argsort(new)
        new, slots = new[order], slots[order]
        values[new] = np.arange(self.size, self.size + len(new))
        self._values[slots] = values[new]
        self.size += len(new)
        return values, new

    def _grow(self) -> None:
        """Double the table."""
        full = np.flatnonzero(self._keys)
        hashes = self._keys[full][np.argsort(self._values[full])]
        self._keys, self._values = (np.zeros(2 * len(old), old.dtype) for old in (self._keys, self._values))
        self.size = 0
        self.numbers(hashes)  # in the order of their numbers, so each gets its own again


class EncodedWords(NamedTuple):
    """Distinct words with their tokens and properties.

    hashes: uint64 [w], of `word_hashes`; rows: WORD [w], without `start`; tokens: [t], `length` of each; folded: uint64 [w], of
    `filters.measures.fold`, or None if no rule needs it.
    """

    hashes: np.ndarray
    rows: np.ndarray
    tokens: np.ndarray
    folded: np.ndarray | None

    def select(self, chosen: np.ndarray) -> EncodedWords:
        """The words with indices `chosen`, or true in the bool array [w], in the same order."""
        is_chosen = np.zeros(len(self.hashes), bool)
        is_chosen[chosen] = True
        tokens = self.tokens[np.repeat(is_chosen, self.rows["length"])]
        folded = None if self.folded is None else self.folded[is_chosen]
        return EncodedWords(self.hashes[is_chosen], self.rows[is_chosen], tokens, folded)

    @staticmethod
    def join(parts: list[EncodedWords]) -> EncodedWords:
        hashes, rows, tokens, folded = zip(*parts, strict=True)
        joined = None if folded[0] is None else np.concatenate(folded)
        return EncodedWords(np.concatenate(hashes), np.concatenate(rows), np.concatenate(tokens), joined)


class SharedWords:
    """The files by which workers share words; `key` separates words encoded with other options."""

    def __init__(self, work: str, key: str) -> None:
        self._folder, self._key = Path(work, FOLDER), key
        self._known: set[str] = set()

    def write(self, task: int, words: EncodedWords) -> None:
        """Share the new words of task number `task`."""
        if task >= SHARING_TASKS:
            return
        self._folder.mkdir(exist_ok=True)
        name = f"{self._key}-{task:03d}.npz"
        self._known.add(name)
        folded = np.zeros(0, np.uint64) if words.folded is None else words.folded
        with atomic_file(self._folder / name, synced=False) as file:
            rows = words.rows.view(np.uint8)  # npz files have no padded types
            np.savez(file, hashes=words.hashes, rows=rows, tokens=words.tokens, folded=folded)

    def read_new(self) -> Iterator[EncodedWords]:
        """Words shared by other workers since the last call."""
        if not self._folder.is_dir():
            return
        for name in sorted(set(os.listdir(self._folder)) - self._known):
            if not (name.startswith(self._key) and name.endswith(".npz")):
                continue
            self._known.add(name)
            try:
                with np.load(self._folder / name) as file:
                    folded = file["folded"]
                    words = EncodedWords(file["hashes"], file["rows"].view(WORD), file["tokens"], folded)
                    yield words if len(folded) else words._replace(folded=None)
            except (zipfile.BadZipFile, EOFError, ValueError):
                continue  # truncated by a loss of power: its words are encoded again
