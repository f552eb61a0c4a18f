"""What an update draws depends on (seed, step, rank) and on nothing that was drawn before."""

from __future__ import annotations

import itertools

import torch

from megabert.common.rng import seed_update, update_seed

CPU = torch.device("cpu")


def draw(seed: int, step: int, rank: int) -> tuple[float, ...]:
    seed_update(seed, step, rank, CPU)
    return tuple(torch.rand(8).tolist())


def test_an_update_can_be_repeated_exactly_whatever_came_between():
    first = draw(42, 7, 1)
    torch.rand(1000)
    draw(1, 2, 3)
    assert draw(42, 7, 1) == first


def test_seeds_steps_and_ranks_draw_different_numbers():
    """Also where their sums or their digits written together are the same."""
    cases = [*itertools.product((0, 1, 42), (0, 1, 11, 1000), (0, 1, 11)), (0, 111, 1), (2**63 - 1, 0, 0)]
    assert len({draw(*case) for case in cases}) == len(cases)


def test_an_updates_seed_of_dropout_is_the_same_on_every_rank_and_another_for_each_update() -> None:
    seeds = {update_seed(seed, step) for seed in (1, 2) for step in range(100)}
    assert len(seeds) == 200 and all(0 <= seed < 2**62 for seed in seeds)
