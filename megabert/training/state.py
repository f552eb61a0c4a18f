"""State of a run: how far it is, and the updates that were done and not yet looked at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from megabert.engine import UpdateResult


@dataclass
class TrainState:
    """How far a run is.

    `step`: updates done. `cursor`: updates of the data consumed, those passed over after a spike included. `seconds` of
    training, evaluations and saves not counted. `bad`: updates in a row that were not applied; `skipped` and `spiked`:
    updates not applied, and spikes. `tokens`: real ones of all ranks, counted where the schedule goes by them.
    `objective`: what the newest update trained ("": there was none).
    """

    step: int = 0
    cursor: int = 0
    seconds: float = 0.0
    bad: int = 0
    skipped: int = 0
    spiked: int = 0
    tokens: int = 0
    objective: str = ""

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> TrainState:
        """That of a checkpoint; those of earlier versions have neither tokens nor objective."""
        known: dict[str, Any] = {"tokens": 0, "objective": ""} | dict(saved)
        return cls(**{field.name: known[field.name] for field in fields(cls)})


@dataclass(frozen=True)
class Unjudged:
    """An update that was done and not looked at: its step, its place and rows in the data (not its batches, whose memory
    the loader uses again), and what came of it."""

    step: int
    cursor: int
    epoch: int
    row_ids: list[int]
    result: UpdateResult
