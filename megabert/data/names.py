"""Names of datasets and inputs by their paths."""

from __future__ import annotations

from collections.abc import Sequence


def distinct_ends(paths: Sequence[Sequence[str]]) -> list[str]:
    """A name for each path, given by its parts: the last ones joined, as few as distinguish all paths; numbered if none do."""
    for kept in range(1, max(map(len, paths)) + 1):
        names = ["_".join(parts[-kept:]) for parts in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{number}_{parts[-1]}" for number, parts in enumerate(paths, 1)]
