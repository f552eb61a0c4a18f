"""Hashes of segments against plain Python integers."""

import random

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
