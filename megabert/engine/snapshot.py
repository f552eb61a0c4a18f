"""Snapshot of the training state in host memory, between two updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megabert.engine.zero_layout import Piece


@dataclass(frozen=True)
class Snapshot:
    """What one rank saves of the training state: stretches that cover, over all ranks, every parameter exactly once."""

    shapes: dict[str, tuple[int, ...]]  # of all parameters, the same on every rank
    weights: list[Piece]  # fp32 masters, as `weight`
    moments: list[Piece]  # of the same stretches; [] before the first update
    counters: dict[str, Any]  # JSON: the same on every rank
