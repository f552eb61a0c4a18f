"""Folded words: their letters alone, caseless, as numbers that add up to the hash of a run of words however it is spaced.

The hash of a word is a polynomial in its letters. Shifted by the letters before them, those of several words add up to the
one of all their letters. Legend: w words.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from data_prep.common.segments import sums
from megabert.common.random_numbers import mix64

# Of a word: the polynomial of its letters, their number, and whether it ends in a full stop of any kind, an abbreviation's too.
FOLDED = np.dtype([("hash", "<u8"), ("letters", "<u4"), ("stops", "?")])
STOPS = [ord(c) for c in ".!?\u2026\u3002\uff01\uff1f\u0964\u061f"]
BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64
INVERSE = pow(BASE, -1, 1 << 64)


@cache
def _letters() -> np.ndarray:
    """bool [every code point]: whether it is a letter, a digit or a mark on one."""
    import sys
    import unicodedata

    return np.array([unicodedata.category(chr(c))[0] in "LNM" for c in range(sys.maxunicode + 1)])


_powers = {BASE: np.ones(1, np.uint64), INVERSE: np.ones(1, np.uint64)}


def power(base: int, count: int) -> np.ndarray:
    """uint64 [count or more]: base^0, base^1, … modulo 2^64."""
    if len(_powers[base]) < count:
        steps = np.full(2 * count, base, np.uint64)
        steps[0] = 1
        _powers[base] = np.cumprod(steps, dtype=np.uint64)
    return _powers[base]


def fold(words: list[str]) -> np.ndarray:
    """FOLDED [w] of words, none of which holds a NUL."""
    text = "\0".join([*words, ""]).casefold().encode("utf-32-le", "surrogatepass")
    codes = np.frombuffer(text, np.uint32)
    ends = np.flatnonzero(codes == 0)
    assert len(ends) == len(words), "a word holds a NUL"
    letter = _letters()[codes]
    edges = np.append(0, np.cumsum(letter))[np.append(0, ends)]
    values = mix64(codes[letter].astype(np.uint64))
    counts = np.diff(edges)
    place = np.arange(len(values)) - np.repeat(edges[:-1], counts)
    folded = np.zeros(len(words), FOLDED)
    folded["hash"] = sums(values * power(BASE, len(values))[place], edges, np.uint64)
    folded["letters"] = counts
    stop = np.append(0, np.cumsum(np.isin(codes, STOPS)))
    after = np.append(np.flatnonzero(letter), -1)[edges[1:] - 1] + 1  # behind the last letter of the word
    folded["stops"] = stop[ends] > stop[np.where(counts > 0, after, np.append(0, ends[:-1]))]
    return folded
