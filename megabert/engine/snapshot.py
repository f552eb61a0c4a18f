"""Snapshot of the training state in host memory, between two updates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megabert.engine.zero_layout import Piece


@dataclass(frozen=True)
class Snapshot:
    """The training state in host memory, as no ZeRO stage and no number of ranks lays it out."""

    weights: dict[str, Tensor]  # whole fp32 masters on rank 0, {} elsewhere
    pieces: list[Piece]  # this rank's moments; [] where another rank has them all
    counters: dict[str, Any]  # JSON: the same on every rank
    average: dict[str, Tensor] = field(
        default_factory=dict
    )  # of the weights, whole, on rank 0; {} where none is taken
