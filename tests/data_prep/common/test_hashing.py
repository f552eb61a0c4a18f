"""Hashes of runs: fixed for ever, sensitive to order and to the seed, uniform."""

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


def test_no_run_is_mistaken_for_another() -> None:
    """All 19,530 runs of at most 6 of 5 parts, and every order of 7 parts: no two hashes are equal."""
    from itertools import permutations, product

    runs = [run for size in range(1, 7) for run in product(range(5), repeat=size)]
    runs += [tuple(order) for order in permutations(range(5, 12))]
    edges = np.cumsum([0, *map(len, runs)])
    hashes = arrays.segment_hashes(np.array([x for run in runs for x in run], np.uint8), edges)
    assert len(runs) == 19_530 + 5_040
    assert len(np.unique(hashes)) == len(runs) and hashes.all()


def test_hashes_are_uniform_in_every_byte() -> None:
    """Chi-squared of each byte over 65,536 runs of three small numbers: 255 degrees of freedom, within 6 sigma."""
    numbers = np.arange(65_536, dtype=np.uint64)
    parts = np.stack([numbers >> np.uint64(8), numbers & np.uint64(255), numbers * 0], 1).ravel()
    for seed in (0, 1):
        hashes = arrays.segment_hashes(parts, np.arange(65_537) * 3, seed)
        counts = [np.bincount(hashes.view(np.uint8)[byte::8], minlength=256) for byte in range(8)]
        chi = [float(((c - 256) ** 2 / 256).sum()) for c in counts]
        assert all(abs(x - 255) < 6 * (2 * 255) ** 0.5 for x in chi), chi
