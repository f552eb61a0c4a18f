"""Phrases in folded words: whatever their case and punctuation, wherever they begin and end with words."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from data_prep.filters.folding import fold

if TYPE_CHECKING:
    from data_prep.filters.quality import WordFacts

LOREM_IPSUM = ("lorem ipsum",)
# Raffel et al. 2020, section 2.2: lines that ask for Javascript, and boilerplate notices of policies
NOTICES = (
    *("javascript", "terms of use", "privacy policy", "cookie policy"),
    *("uses cookies", "use of cookies", "use cookies"),
)


@cache
def _hashes(phrases: tuple[str, ...]) -> list[list[int]]:
    return [[int(h) for h in fold(phrase.split())["hash"]] for phrase in phrases]


def found(batch: WordFacts, phrases: tuple[str, ...]) -> np.ndarray:
    """bool [w]: whether one of `phrases` begins at a word. What follows a paragraph's last word may be another's."""
    assert batch.folded is not None, "the words were not folded"
    words = batch.folded["hash"]
    anywhere = np.zeros(len(words), bool)
    for parts in _hashes(phrases):
        here = words == parts[0]
        for k, part in enumerate(parts[1:], 1):
            here[: len(words) - k] &= words[k:] == part
            here[len(words) - k :] = False
        anywhere |= here
    return anywhere
