"""Mixer of 64-bit hashes that masks, row orders, row digests and data_prep share: fixed for ever, numpy alone."""

from __future__ import annotations

import numpy as np

# 2^64 / golden ratio: multiples of it are spread evenly (Knuth, TAOCP 6.4)
GOLDEN64 = np.uint64(0x9E3779B97F4A7C15)


def mix64(x: np.ndarray) -> np.ndarray:
    """A bijection of uint64 [...] that makes every bit of the result depend on every bit of `x`, which stays as it is.

    The finaliser of SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators").
    """
    mixed = x >> np.uint64(30)
    mixed ^= x
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed
