"""Random seeds of updates, functions of (seed, step) and of the rank where they must be, so that any update can be repeated
and nothing has to be saved."""

from __future__ import annotations

import hashlib

import torch


def update_seed(seed: int, step: int) -> int:
    """The seed of one update's dropout, the same on every rank; 62 bits."""
    return int.from_bytes(hashlib.blake2b(f"dropout {seed} {step}".encode(), digest_size=8).digest(), "little") >> 2


def seed_update(seed: int, step: int, rank: int, device: torch.device) -> None:
    """Seed torch's CPU generator, and `device`'s where it is a GPU, for one update on one rank."""
    digest = hashlib.blake2b(f"{seed} {step} {rank}".encode(), digest_size=8).digest()
    value = int.from_bytes(digest, "little") >> 1  # torch's seeds are signed
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(value)
