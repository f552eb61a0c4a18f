"""Packing of sequences of any length into rows of one width, for fine-tuning, evaluation and features.

The layout of pre-training's rows: attention is within a sequence, and positions restart in each. The output of a sequence does not
depend on the other sequences in its row.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Packed:
    """B rows of T tokens with at most S sequences each; the inputs of `BertForPreTraining.encode`, and where each sequence starts."""

    # int32 [B, T], 0 in padding
    input_ids: Tensor
    # int32 [B, T]
    segment_ids: Tensor
    # int32 [B, T], from 0 in each sequence
    position_ids: Tensor
    # int32 [B, T] each, first position a token attends to and one past the last; both 0 in padding
    key_start: Tensor
    key_end: Tensor
    # int32 [B, S], 0 after the row's last sequence
    lengths: Tensor
    # int64 [n], flat position (in B * T) of each sequence's first token, in the given order
    starts: np.ndarray

    def inputs(self) -> dict[str, Tensor]:
        """The tensors by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.type == "Tensor"}

    def to(self, device: torch.device | str) -> Packed:
        moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in self.inputs().items()}
        return replace(self, **moved)


def pack(sequences: Sequence[np.ndarray], seconds: Sequence[int], width: int = 0, causal: bool = False) -> Packed:
    """Rows that hold `sequences` (integer ids [length], whole), the longest placed first, each in the emptiest row.

    `seconds[i]` is the start of segment 1 of sequence i (its length if there is none). `width`: tokens a row, 0 for the
    length of the longest sequence. `causal`: a token attends only to the tokens before it, and to itself. Raises ValueError
    for a sequence that is empty or longer than a row.
    """
    sizes = [len(ids) for ids in sequences]
    width = width or max(sizes, default=0)
    if not sizes or min(sizes) < 1 or max(sizes) > width:
        raise ValueError(f"sequences of {sorted(set(sizes))[:1]} to {max(sizes, default=0)} tokens, rows of {width}")
    rows: list[list[int]] = []
    emptiest: list[tuple[int, int]] = []  # (tokens used, row)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        if emptiest and emptiest[0][0] + sizes[i] <= width:
            used, row = heapq.heappop(emptiest)
            rows[row].append(i)
        else:
            used, row = 0, len(rows)
            rows.append([i])
        heapq.heappush(emptiest, (used + sizes[i], row))
    return _layout(sequences, seconds, rows, width, causal)


def pack_line(sequences: Sequence[np.ndarray], seconds: Sequence[int], causal: bool = False) -> Packed:
    """One row of all `sequences` in their order without padding, for attention whose cost does not grow with the row length.

    Arguments as of `pack`. Raises ValueError for a sequence that is empty.
    """
    sizes = [len(ids) for ids in sequences]
    if not sizes or not min(sizes):
        raise ValueError("an empty sequence, or none")
    return _layout(sequences, seconds, [list(range(len(sizes)))], sum(sizes), causal)


def _layout(
    sequences: Sequence[np.ndarray], seconds: Sequence[int], rows: list[list[int]], width: int, causal: bool
) -> Packed:
    """Rows of `width` tokens; `rows[r]` are the indices of row r's sequences in their order."""
    sizes = np.array([len(ids) for ids in sequences], np.int64)
    starts = np.empty_like(sizes)
    lengths = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for row, members in enumerate(rows):
        held = sizes[members]
        lengths[row, : len(members)] = held
        starts[members] = row * width + held.cumsum() - held
    ends = sizes.cumsum()
    positions = np.arange(ends[-1]) - np.repeat(ends - sizes, sizes)
    first = np.repeat(starts % width, sizes)
    last = first + (positions + 1 if causal else np.repeat(sizes, sizes))
    segments = positions >= np.repeat(seconds, sizes)
    flat = np.zeros((5, len(rows) * width), np.int32)
    flat[:, np.repeat(starts, sizes) + positions] = np.concatenate(sequences), segments, positions, first, last
    a, b, c, d, e = torch.from_numpy(flat.reshape(5, len(rows), width))
    return Packed(a, b, c, d, e, torch.from_numpy(lengths), starts)


def groups(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Indices of sequences of these lengths, the longest first, in groups of at most `tokens` tokens but at least one sequence."""
    grouped: list[list[int]] = []
    room = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not grouped or room < lengths[i]:
            grouped.append([])
            room = tokens
        grouped[-1].append(i)
        room -= lengths[i]
    return grouped
