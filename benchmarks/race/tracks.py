"""Tracks of the race: how much training an entry gets, in minutes on so many cores or in tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass

NAMES = (*("3min-2cores", "10min-2cores", "30min-2cores", "120min-2cores"), *("5m-tokens", "20m-tokens", "80m-tokens"))
MINUTES = re.compile(r"(\d+(?:\.\d+)?)min-(\d+)cores")
TOKENS = re.compile(r"(\d+(?:\.\d+)?)([km])-tokens")


@dataclass(frozen=True)
class Track:
    """A budget. Either `minutes` of training on `cores` threads, or `tokens`: real ones, padding not counted."""

    name: str
    minutes: float = 0.0
    tokens: int = 0
    cores: int = 2

    @property
    def official(self) -> bool:
        """Whether entries of it are compared with each other for a record."""
        return self.name in NAMES


def track_of(name: str, threads: int = 2) -> Track:
    """The track of a name: one of NAMES, or another budget written the same way, which holds no records.

    `threads` are those of a track of tokens; a track of minutes says its own. Raises ValueError for what is no budget.
    """
    if found := MINUTES.fullmatch(name):
        track = Track(name, minutes=float(found[1]), cores=int(found[2]))
        if track.minutes and track.cores:
            return track
    if (found := TOKENS.fullmatch(name)) and float(found[1]):
        return Track(name, cores=threads, tokens=round(float(found[1]) * {"k": 1e3, "m": 1e6}[found[2]]))
    raise ValueError(f"--track {name}: no budget; write one of {', '.join(NAMES)}, or as 6min-1cores or 300k-tokens")
