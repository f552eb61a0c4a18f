"""Random numbers as functions of their use: hashes for rows, masks and data_prep, seeds for updates.

They have no state to save. The hashes need only numpy and must never change: datasets and runs depend on them.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

GOLDEN64 = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: its multiples are spread evenly (Knuth, TAOCP 6.4)


def mix64(x: np.ndarray) -> np.ndarray:
    """A bijection of uint64 [...] in which every bit of the result depends on every bit of `x`, which is not changed.

    The finaliser of SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators").
    """
    mixed = x >> np.uint64(30)
    mixed ^= x
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def stream_keys(*parts: int | np.ndarray) -> np.ndarray:
    """uint64 key of a random stream for each tuple of non-negative ints below 2^63; array parts broadcast."""
    key = np.zeros(1, np.uint64)
    for part in parts:
        key = mix64((key ^ np.asarray(part).astype(np.uint64)) + GOLDEN64)
    return key


def update_seed(seed: int, step: int) -> int:
    """The seed of one update's dropout, the same on every rank; 62 bits."""
    return int.from_bytes(hashlib.blake2b(f"dropout {seed} {step}".encode(), digest_size=8).digest(), "little") >> 2


def seed_update(seed: int, step: int, rank: int, device: torch.device) -> None:
    """Seed torch's CPU generator, and `device`'s where it is a GPU, for one update on one rank."""
    import torch

    digest = hashlib.blake2b(f"{seed} {step} {rank}".encode(), digest_size=8).digest()
    value = int.from_bytes(digest, "little") >> 1  # torch's seeds are signed
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(value)
