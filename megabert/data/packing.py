"""Packing of sequences of any length into rows of one width, for fine-tuning, evaluation and features.

The layout of pre-training's rows: attention stays inside a sequence, positions restart in each. A sequence's output does not
depend on what it is packed with.
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

    `seconds[i]` is where segment 1 of sequence i begins (its length where there is none). `width` tokens a row, 0: as
    many as the longest sequence has. `causal`: a token attends only to the tokens before it, and to itself. Raises ValueError
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
    shape = (len(rows), width)
    ids, segments, positions, first, last = (np.zeros(shape, np.int32) for _ in range(5))
    lengths = np.zeros((len(rows), max(map(len, rows))), np.int32)
    starts = np.empty(len(sizes), np.int64)
    for row, members in enumerate(rows):
        at = 0
        for place, i in enumerate(members):
            end = at + sizes[i]
            ids[row, at:end] = sequences[i]
            segments[row, at + seconds[i] : end] = 1
            positions[row, at:end] = np.arange(sizes[i])
            first[row, at:end] = at
            last[row, at:end] = np.arange(at + 1, end + 1) if causal else end
            lengths[row, place], starts[i] = sizes[i], row * width + at
            at = end
    a, b, c, d, e, f = map(torch.from_numpy, (ids, segments, positions, first, last, lengths))
    return Packed(a, b, c, d, e, f, starts)


def pack_line(sequences: Sequence[np.ndarray], seconds: Sequence[int], causal: bool = False) -> Packed:
    """One row that holds `sequences` in their order and no padding: for attention that takes no longer over long rows.

    Arguments as of `pack`. Raises ValueError for a sequence that is empty.
    """
    sizes = np.array([len(ids) for ids in sequences], np.int64)
    if not len(sizes) or not sizes.min():
        raise ValueError("an empty sequence, or none")
    ends = sizes.cumsum()
    starts = ends - sizes
    first = np.repeat(starts, sizes)
    places = np.arange(ends[-1])
    last = places + 1 if causal else np.repeat(ends, sizes)
    segments = places - first >= np.repeat(np.array(seconds, np.int64), sizes)
    rows = (np.concatenate(sequences), segments, places - first, first, last, sizes)
    a, b, c, d, e, f = (torch.from_numpy(row.astype(np.int32))[None] for row in rows)
    return Packed(a, b, c, d, e, f, starts)


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
