"""Random seeds of updates: a function of (seed, step, rank), so any update can be repeated and nothing has to be saved."""

from __future__ import annotations

import hashlib

import torch


def seed_update(seed: int, step: int, rank: int, device: torch.device) -> None:
    """Seed torch's CPU generator, and `device`'s where it is a GPU, for one update on one rank."""
    digest = hashlib.blake2b(f"{seed} {step} {rank}".encode(), digest_size=8).digest()
    value = int.from_bytes(digest, "little") >> 1  # torch's seeds are signed
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(value)
