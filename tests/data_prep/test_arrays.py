"""Hashes of segments against plain Python integers, and bytes of words."""

import random
from itertools import pairwise

import numpy as np

from data_prep.common import arrays
from megabert.common.random_numbers import GOLDEN64


def test_runs_equal_a_plain_sum_with_python_integers() -> None:
    def mix(x):
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    rng = random.Random(5)
    runs = [[rng.getrandbits(64) for _ in range(size)] for size in (3, 0, 1, 40, 0)]
    edges = np.cumsum([0, *map(len, runs)])
    parts = np.array([x for run in runs for x in run], np.uint64)
    for seed in (0, 7, 2**64 - 1):
        expected = [
            mix((sum(mix((x + i * int(GOLDEN64)) % 2**64) for i, x in enumerate(run)) + mix(seed) + len(run)) % 2**64)
            if run
            else 0
            for run in runs
        ]
        assert arrays.segment_hashes(parts, edges, seed).tolist() == expected


def test_sums_of_empty_segments_are_zero() -> None:
    values = np.array([1, 2, 4, 8], np.uint8)
    assert arrays.segment_sums(values, np.array([0, 0, 1, 1, 4, 4])).tolist() == [0, 1, 0, 14, 0]
    assert arrays.segment_sums(values[:0], np.array([0, 0, 0])).tolist() == [0, 0]


def test_words_are_bytes_with_a_nul_after_each() -> None:
    text, edges = arrays.word_bytes(["ab", "", "\u00e9", "\ud800"])
    cut = [text[a:b].tobytes() for a, b in pairwise(edges)]
    assert cut == [b"ab\0", b"\0", b"\xc3\xa9\0", b"\xed\xa0\x80\0"]
    assert [array.tolist() for array in arrays.word_bytes([])] == [[], [0]]
