"""Which rank owns which of Muon's matrices, and what travels to it and back."""

from __future__ import annotations

from itertools import pairwise

import pytest

from megabert.optim.guarded import FlatSegment
from megabert.optim.muon import Matrix, assign_owners, plan_exchange


def cut(sizes: list[int], ranks: int, padding: int) -> list[list[list[FlatSegment]]]:
    """Segments by rank of one flat tensor a rank: parameters 0, 1, ... one after the other, cut into equal parts."""
    share = -(-(sum(sizes) + padding) // ranks)
    found = []
    for rank in range(ranks):
        begin, held = 0, []
        for index, size in enumerate(sizes):
            first, last = max(begin, rank * share), min(begin + size, (rank + 1) * share)
            if first < last:
                held.append(FlatSegment(index, first - rank * share, last - rank * share, first - begin))
            begin += size
        found.append([held])
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_every_element_travels_to_one_owner_and_back(ranks):
    """Each sends what the other expects, piece by piece, and the owner gets whole matrices."""
    matrices = {0: tuple(Matrix(0, n * 12, 3, 4) for n in range(3)), 1: (Matrix(1, 0, 5, 2),), 2: (Matrix(2, 0, 6, 7),)}
    segments = cut([36, 10, 42], ranks, padding=40)  # the last of 7 ranks holds padding alone
    plans = [plan_exchange(matrices, segments, rank) for rank in range(ranks)]
    covered: list[tuple[int, int]] = []
    for rank, plan in enumerate(plans):
        assert plan.matrices == plans[0].matrices and len(plan.matrices) == 5
        whole: dict[int, list[tuple[int, int]]] = {}
        for other in range(ranks):
            assert plan.owned[other] == plans[other].held[rank]
            for part in plan.held[other]:  # where it says, counted over all ranks' tensors
                matrix = plan.matrices[part.matrix]
                there = (0, 36, 46)[matrix.index] + matrix.begin + part.offset
                assert rank * -(-128 // ranks) + part.start == there
            for part in plan.owned[other]:
                whole.setdefault(part.matrix, []).append((part.offset, part.offset + part.size))
        for number, stretches in whole.items():
            stretches.sort()
            assert stretches[0][0] == 0 and stretches[-1][1] == plan.matrices[number].size
            assert all(a[1] == b[0] for a, b in pairwise(stretches))
        covered += [(number, rank) for number in whole]
    assert sorted(number for number, _ in covered) == list(range(5))


def test_owners_have_equal_work():
    costs = [Matrix(0, 0, *shape).flops for shape in [(1024, 1024)] * 96 + [(4096, 1024)] * 48]
    assert costs[0] == 5 * 6 * 1024**3 and costs[-1] == 5 * (4 * 4 + 2) * 1024**3
    for ranks in (1, 3, 8, 64):
        owners = assign_owners(costs, ranks)
        load = [sum(c for c, owner in zip(costs, owners, strict=True) if owner == r) for r in range(ranks)]
        assert max(load) <= max(1.1 * sum(costs) / ranks, max(costs)), load
    assert sorted(assign_owners(costs, 512)) == list(range(144))
