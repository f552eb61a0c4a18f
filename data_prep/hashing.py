"""64-bit hashes of words and of runs of words are the same in every process, on every machine and for every seed of Python.

A word's hash is BLAKE2b of its bytes; a run's is a sum of its words' hashes, each mixed with its place, so that it costs
array operations and no Python a word. None of it withstands somebody who wants a collision. Legend: w words.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

ODD = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: multiples of it are spread evenly (Knuth, TAOCP 6.4)


def mix(x: np.ndarray) -> np.ndarray:
    """A bijection of uint64 that makes every bit of the result depend on every bit of `x`.

    The finaliser of SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators").
    """
    x = x ^ (x >> np.uint64(30))
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def of_words(words: list[str]) -> np.ndarray:
    """uint64 [w], never zero: the first 64 bits of BLAKE2b of each word's UTF-8 bytes."""
    # A lone surrogate half, which JSON can spell, has no UTF-8 form.
    digests = [blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest() for word in words]
    return np.maximum(np.frombuffer(b"".join(digests), "<u8"), np.uint64(1))


def sums(values: np.ndarray, edges: np.ndarray, dtype: type = np.int64) -> np.ndarray:
    """Sum of `values` [w] in each of the segments [edges[i], edges[i + 1]), which together are all of it."""
    found = np.zeros(len(edges) - 1, dtype)
    full = edges[1:] > edges[:-1]
    if full.any():
        found[full] = np.add.reduceat(values, edges[:-1][full], dtype=dtype)
    return found


def of_runs(hashes: np.ndarray, edges: np.ndarray, seed: int = 0) -> np.ndarray:
    """uint64 [n]: a hash of the words `hashes` [w] in each segment of `edges` [n + 1], in their order; 0 without words.

    Uniform, so that those below a limit are a fair share of all. `seed` is a 64-bit number.
    """
    lengths = np.diff(edges)
    place = np.arange(len(hashes), dtype=np.uint64)
    place -= np.repeat(edges[:-1].astype(np.uint64), lengths)
    place *= ODD
    place += hashes
    total = sums(mix(place), edges, np.uint64)
    total += mix(np.array([seed], np.uint64)) + lengths.astype(np.uint64)
    found = np.maximum(mix(total), np.uint64(1))
    found[lengths == 0] = 0
    return found
