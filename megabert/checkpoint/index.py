"""Index of a checkpoint: which rank's files hold which stretch of each parameter.

A parameter's stretches follow each other from its first element to its last, so a run `[rank, ranks, length]` says all of
so many ranks from `rank` on that hold `length` elements each. A parameter that ZeRO cuts into 512 is one or two runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

Piece = tuple[str, int, int]  # parameter, first element, number of elements


class Uncovered(ValueError):
    """The pieces of all ranks do not cover a parameter exactly once."""


def build(shapes: Mapping[str, Sequence[int]], pieces: Iterable[Iterable[Piece]]) -> dict[str, Any]:
    """Shape and runs by parameter, from the pieces of every rank in rank order. Raises Uncovered."""
    stretches: dict[str, list[tuple[int, int, int]]] = {name: [] for name in shapes}
    for rank, held in enumerate(pieces):
        for name, offset, length in held:
            stretches.setdefault(name, []).append((offset, length, rank))
    found = {}
    for name, parts in stretches.items():
        runs: list[list[int]] = []
        covered, size = 0, math.prod(shapes[name]) if name in shapes else 0
        for offset, length, rank in sorted(parts):
            if offset != covered or length < 1:
                raise Uncovered(f"rank {rank}'s piece of {name} at {offset} does not start at {covered}")
            covered += length
            if runs and rank == runs[-1][0] + runs[-1][1] and length == runs[-1][2]:
                runs[-1][1] += 1
            else:
                runs.append([rank, 1, length])
        if covered != size:
            raise Uncovered(f"the ranks hold {covered} of the {size} elements of {name}")
        found[name] = {"shape": list(shapes[name]), "pieces": runs}
    return found


class Index:
    """The index that a manifest holds, looked up by parameter and by rank."""

    def __init__(self, parameters: Mapping[str, Mapping[str, Any]]) -> None:
        self._parameters = parameters
        self._spans: dict[str, list[tuple[int, int, int]]] = {}

    @property
    def shapes(self) -> dict[str, list[int]]:
        return {name: entry["shape"] for name, entry in self._parameters.items()}

    def check(self, ranks: int) -> None:
        """Raises Uncovered unless each parameter's runs are as long as it is and name none but the first `ranks` ranks."""
        for name, entry in self._parameters.items():
            size = math.prod(entry["shape"])
            covered = sum(count * length for _, count, length in entry["pieces"])
            if covered != size:
                raise Uncovered(f"the ranks hold {covered} of the {size} elements of {name}")
            if any(rank + count > ranks or count < 1 or length < 1 for rank, count, length in entry["pieces"]):
                raise Uncovered(f"{name} has pieces that none of the {ranks} ranks can hold")

    def spans(self, name: str) -> list[tuple[int, int, int]]:
        """(first element, number of elements, rank) of a parameter's stretches, in order."""
        if name not in self._spans:
            found, position = [], 0
            for first, count, length in self._parameters[name]["pieces"]:
                for rank in range(first, first + count):
                    found.append((position, length, rank))
                    position += length
            self._spans[name] = found
        return self._spans[name]

    @cached_property
    def held(self) -> dict[int, list[Piece]]:
        """The pieces of each rank that holds any."""
        found: dict[int, list[Piece]] = {}
        for name in self._parameters:
            for offset, length, rank in self.spans(name):
                found.setdefault(rank, []).append((name, offset, length))
        return found
