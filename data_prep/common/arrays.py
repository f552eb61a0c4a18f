"""Hashes and sums over segments of arrays: the words of many documents are one array of bytes, or one of hashes.

`edges` [n + 1] are the beginnings of n adjacent segments and the end of the last.

Hashes are 64-bit numbers, the same in every process, on every machine and for every seed of Python. The hash of a segment is a sum
over its items, each mixed with its index, so that it needs array operations only: a tenth of the cost of BLAKE2b for each word. Two
different segments collide with a probability of 2^-64; the hash is not secure against deliberate collisions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megabert.common.random_numbers import GOLDEN64, mix64


def segment_sums(values: np.ndarray, edges: np.ndarray, dtype: type = np.int64) -> np.ndarray:
    """Sum of `values` [w] in each of the segments [edges[i], edges[i + 1]), which cover all of it."""
    sums: np.ndarray = np.zeros(len(edges) - 1, dtype)
    full = edges[1:] > edges[:-1]
    if full.any():
        sums[full] = np.add.reduceat(values, edges[:-1][full], dtype=dtype)
    return sums


def segment_counts(places: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """int64 [n]: number of the ascending `places` in each segment."""
    return np.diff(np.searchsorted(places, edges))


def range_indices(starts: np.ndarray | int, lengths: np.ndarray, dtype: type = np.int64) -> np.ndarray:
    """The indices of adjacent ranges, one after the other: `lengths` [n] from `starts` [n] on; `dtype` holds the last of them."""
    indices = np.repeat((starts - (np.cumsum(lengths) - lengths)).astype(dtype), lengths)
    indices += np.arange(len(indices), dtype=dtype)
    return indices


def word_bytes(words: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """The UTF-8 bytes of words, uint8 [b], each followed by a NUL, and their edges int64 [w + 1]. Words contain no NUL."""
    # A lone surrogate, possible in JSON, has no UTF-8 form.
    text = np.frombuffer("\0".join([*words, ""]).encode("utf-8", "surrogatepass"), np.uint8)
    edges = np.append(0, np.flatnonzero(text == 0) + 1)
    assert len(edges) == len(words) + 1, "a word holds a NUL"
    return text, edges


def segment_hashes(items: np.ndarray, edges: np.ndarray, seed: int = 0) -> np.ndarray:
    """uint64 [n]: a hash of the unsigned `items` [w] of each segment, in order; 0 only for an empty one.

    Uniform, so that those below a limit are the expected share. `seed` is a 64-bit number.
    """
    lengths = np.diff(edges)
    place = np.arange(len(items), dtype=np.uint64)
    place -= np.repeat(edges[:-1].astype(np.uint64), lengths)
    place *= GOLDEN64
    place += items
    total = segment_sums(mix64(place), edges, np.uint64)
    total += mix64(np.array([seed], np.uint64)) + lengths.astype(np.uint64)
    hashes = np.maximum(mix64(total), np.uint64(1))
    hashes[lengths == 0] = 0
    return hashes


def choose_share(hashes: np.ndarray, share: float) -> np.ndarray:
    """bool [n]: a `share` of uniform `hashes`, chosen independently of limits on the hashes themselves."""
    return mix64(hashes ^ GOLDEN64) < np.uint64(min(int(share * (1 << 64)), (1 << 64) - 1))
