"""Words that one worker has learnt, for the others: learning a word takes five times as long as taking it over.

A worker leaves the words that a task was the first to hold in a file of the work folder, and takes over those of the other
workers before its next task. It keeps words to itself that it met but once: most new ones are such, hardly any comes again,
and together they would fill every worker's cache. Which words a cache holds changes nothing in what comes out of it.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_prep.filters import quality
from data_prep.filters.folding import FOLDED

TASKS = 256  # the first of a build; later ones meet few new words
FOLDER = "words"
WORD = np.dtype(
    [
        ("facts", quality.FACTS),
        ("start", "<i4"),
        ("length", "<i4"),
        ("ends", "u1"),  # kinds, as of text.sentences
        ("starts", "u1"),
    ],
    align=True,
)


class Words(NamedTuple):
    """Distinct words with what is known of them.

    hashes: uint64 [w], of lexicon.word_hashes; rows: WORD [w], `start` apart; tokens: [t], `length` of each; letters:
    folding.FOLDED [w], or None where nobody asks for them.
    """

    hashes: np.ndarray
    rows: np.ndarray
    tokens: np.ndarray
    letters: np.ndarray | None

    def select(self, chosen: np.ndarray) -> Words:
        """The words whose indices are `chosen`, or where the bool array [w] is true, in the order they have here."""
        is_chosen = np.zeros(len(self.hashes), bool)
        is_chosen[chosen] = True
        tokens = self.tokens[np.repeat(is_chosen, self.rows["length"])]
        letters = None if self.letters is None else self.letters[is_chosen]
        return Words(self.hashes[is_chosen], self.rows[is_chosen], tokens, letters)

    @staticmethod
    def join(parts: list[Words]) -> Words:
        hashes, rows, tokens, letters = zip(*parts, strict=True)
        joined = None if letters[0] is None else np.concatenate(letters)
        return Words(np.concatenate(hashes), np.concatenate(rows), np.concatenate(tokens), joined)


class SharedWords:
    """The folder of such files; `key` tells words apart that were learnt with other options."""

    def __init__(self, work: str, key: str) -> None:
        self._folder, self._key = Path(work, FOLDER), key
        self._known: set[str] = set()

    def give(self, task: int, words: Words) -> None:
        """Leave words that task number `task` was the first to hold."""
        if task >= TASKS:
            return
        self._folder.mkdir(exist_ok=True)
        name = f"{self._key}-{task:03d}.npz"
        self._known.add(name)
        letters = np.zeros(0, FOLDED) if words.letters is None else words.letters
        whole = self._folder / f"{name}.{os.getpid()}"
        with open(whole, "wb") as file:
            rows = words.rows.view(np.uint8)  # NumPy's files know no padding
            np.savez(file, hashes=words.hashes, rows=rows, tokens=words.tokens, letters=letters)
        whole.replace(self._folder / name)

    def take(self) -> Iterator[Words]:
        """Words that others left since the last call."""
        if not self._folder.is_dir():
            return
        for name in sorted(set(os.listdir(self._folder)) - self._known):
            if not (name.startswith(self._key) and name.endswith(".npz")):
                continue
            self._known.add(name)
            try:
                with np.load(self._folder / name) as found:
                    letters = found["letters"]
                    words = Words(found["hashes"], found["rows"].view(WORD), found["tokens"], letters)
                    yield words if len(letters) else words._replace(letters=None)
            except (zipfile.BadZipFile, EOFError, ValueError):
                continue  # cut off by a loss of power: who needs its words learns them
