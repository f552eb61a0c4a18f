"""Random numbers depend on what they are for, and on nothing drawn before."""

import itertools

import torch

from megabert.common.random_numbers import seed_update, update_seed


def draw(seed: int, step: int, rank: int) -> tuple[float, ...]:
    seed_update(seed, step, rank, torch.device("cpu"))
    return tuple(torch.rand(8).tolist())


def test_updates_are_seeded_by_seed_step_and_rank() -> None:
    first = draw(42, 7, 1)
    torch.rand(1000)
    draw(1, 2, 3)
    assert draw(42, 7, 1) == first
    # also where sums, or digits written together, are the same
    cases = [*itertools.product((0, 1, 42), (0, 1, 11, 1000), (0, 1, 11)), (0, 111, 1), (2**63 - 1, 0, 0)]
    assert len({draw(*case) for case in cases}) == len(cases)
    seeds = {update_seed(seed, step) for seed in (1, 2) for step in range(100)}
    assert len(seeds) == 200 and all(0 <= seed < 2**62 for seed in seeds)
