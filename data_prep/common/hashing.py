"""64-bit hashes of words and of runs of words.

They are the same in every process, on every machine and for every seed of Python. A word is a run of bytes and a document a
run of words. The hash of a run is a sum over its parts, each mixed with its place, so that it costs array operations and no
Python a part: a tenth of BLAKE2b a word. Two different runs are equal once in 2^64 by chance; none of it withstands
somebody who wants a collision.
"""

from __future__ import annotations

import hashlib

import numpy as np

from data_prep.common.segments import sums
from megabert.common.random_numbers import GOLDEN64, mix64


def of_bytes(data: bytes) -> int:
    """64 bits of BLAKE2b."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def of_runs(parts: np.ndarray, edges: np.ndarray, seed: int = 0) -> np.ndarray:
    """uint64 [n]: a hash of `parts` [w], in their order, in each segment of `edges` [n + 1]; 0 without parts, else not 0.

    Uniform, so that those below a limit are a fair share of all. `parts` are unsigned, `seed` is a 64-bit number.
    """
    lengths = np.diff(edges)
    place = np.arange(len(parts), dtype=np.uint64)
    place -= np.repeat(edges[:-1].astype(np.uint64), lengths)
    place *= GOLDEN64
    place += parts
    total = sums(mix64(place), edges, np.uint64)
    total += mix64(np.array([seed], np.uint64)) + lengths.astype(np.uint64)
    found = np.maximum(mix64(total), np.uint64(1))
    found[lengths == 0] = 0
    return found


def chosen(hashes: np.ndarray, share: float) -> np.ndarray:
    """bool [n]: a fair `share` of uniform `hashes`, independent of what a limit on the hashes themselves would choose."""
    return mix64(hashes ^ GOLDEN64) < np.uint64(min(int(share * (1 << 64)), (1 << 64) - 1))
