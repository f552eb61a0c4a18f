"""Sums and counts over segments of arrays, and words as segments of one array of bytes.

`edges` [n + 1] are where n neighbouring segments begin and the last one ends.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def sums(values: np.ndarray, edges: np.ndarray, dtype: type = np.int64) -> np.ndarray:
    """Sum of `values` [w] in each of the segments [edges[i], edges[i + 1]), which together are all of it."""
    found: np.ndarray = np.zeros(len(edges) - 1, dtype)
    full = edges[1:] > edges[:-1]
    if full.any():
        found[full] = np.add.reduceat(values, edges[:-1][full], dtype=dtype)
    return found


def counts(places: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """int64 [n]: how many of the ascending `places` lie in each range between two of `edges` [n + 1]."""
    return np.diff(np.searchsorted(places, edges))


def of_words(words: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """The UTF-8 bytes of words, uint8 [b], each with a NUL after it, and their edges int64 [w + 1]. No word holds a NUL."""
    # A lone surrogate half, which JSON can spell, has no UTF-8 form.
    text = np.frombuffer("\0".join([*words, ""]).encode("utf-8", "surrogatepass"), np.uint8)
    edges = np.append(0, np.flatnonzero(text == 0) + 1)
    assert len(edges) == len(words) + 1, "a word holds a NUL"
    return text, edges
