"""Batches: the tensors of a micro-batch, their collation from rows, and the micro-batches of one update.

Every array has a static shape, and every token knows the sequence it belongs to.
All of one rank's update lies in two flat buffers, so that it travels between processes as two tensors and micro-batches
are views of it. Legend: B rows of a micro-batch, n rows of an update, T row length, S sequences a row, K prediction slots.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch

from megabert.common import errors
from megabert.common.labels import IGNORE
from megabert.data.masking import Masked
from megabert.data.shards import Rows


@dataclass(frozen=True)
class Batch:
    """One micro-batch of B rows as the model takes it, and its counts (ints, of this micro-batch)."""

    input_ids: torch.Tensor  # int32 [B, T], masked already
    segment_ids: torch.Tensor  # int32 [B, T], 1 in B parts, 0 elsewhere
    position_ids: torch.Tensor  # int32 [B, T], from 0 in each sequence, 0 in padding
    key_start: torch.Tensor  # int32 [B, T], first position of the token's sequence; padding attends to nothing:
    key_end: torch.Tensor  # int32 [B, T], one past its last position (causal: past the token); 0 in padding
    lengths: torch.Tensor  # int32 [B, S], 0 past the row's last sequence; on a device `compact_lengths` [N]
    cls_positions: torch.Tensor  # int32 [B, S], flat in B * T; the row's first position past the last sequence
    nsp_labels: torch.Tensor  # int64 [B, S], -100 past the last sequence and where there is no pair
    mlm_positions: torch.Tensor  # int32 [B, K], flat in B * T, ascending; the row's first position in unused slots
    mlm_labels: torch.Tensor  # int64 [B, K], the ids to predict, -100 in unused slots
    predictions: int
    nsp_pairs: int
    tokens: int  # real ones, without padding
    sequences: int
    row_ids: np.ndarray  # int64 [B]; negative is a filler, which has no labels and counts for nothing
    epochs: np.ndarray  # int64 [B], the epoch each row belongs to

    def inputs(self) -> dict[str, torch.Tensor]:
        """The tensors by name, as the model's `forward` takes them."""
        return {name: getattr(self, name) for name in TENSORS}

    def to(self, device: torch.device | str) -> Batch:
        """The batch on `device`; asynchronous where the batch lies in pinned memory.

        A device other than the CPU gets the lengths compact: only the host can count them without waiting.
        """
        tensors = self.inputs()
        if torch.device(device).type != "cpu" and self.lengths.is_cpu and self.lengths.dim() == 2:
            compact = compact_lengths(self.lengths, self.input_ids.shape[1])
            tensors["lengths"] = compact.pin_memory() if self.lengths.is_pinned() else compact
        moved: dict[str, Any] = {name: t.to(device, non_blocking=True) for name, t in tensors.items()}
        return replace(self, **moved)


def compact_lengths(lengths: torch.Tensor, width: int) -> torch.Tensor:
    """int32 [N] of lengths [B, S] on the CPU: what lies in B rows of `width` tokens one after another, each row's sequences,
    then its pads, and zeros up to N, a multiple of B.

    So N seldom changes from batch to batch (with 2.2 sequences and pads a row on average, 3 B), which keeps the shapes
    that a compiler or an allocator has seen.
    """
    rows = lengths.numpy()
    pieces = np.concatenate([rows, width - rows.sum(1, dtype=np.int32, keepdims=True)], 1).ravel()
    pieces = pieces[pieces > 0]
    found = np.zeros(-(-len(pieces) // len(rows)) * len(rows), np.int32)
    found[: len(pieces)] = pieces
    return torch.from_numpy(found)


TENSORS = tuple(f.name for f in fields(Batch) if f.type == "torch.Tensor")
VACANT = (
    -2
)  # row id of a seat behind an update's last row, where the ranks' micro-batches have more seats than it has rows
COUNTS = ("predictions", "nsp_pairs", "tokens", "sequences")


@dataclass(frozen=True)
class Update:
    """One rank's share of one optimizer step: A micro-batches. `epoch` is that of the global batch's first row.

    `damage` names the rows that became fillers because they are not as written, with their row ids. `problem` is why
    the data could not be had; every row is a filler then, and `problem_code` is the exit code of that kind of problem.
    `objective` is "masked", or "causal" where each token predicts the next.
    """

    step: int
    epoch: int
    batches: list[Batch]
    damage: dict[int, str] = field(default_factory=dict)
    problem: str = ""
    problem_code: int = errors.OK
    objective: str = "masked"

    @property
    def row_ids(self) -> np.ndarray:
        """int64 [n], fillers -1, seats without a row VACANT."""
        return np.concatenate([batch.row_ids for batch in self.batches])

    @property
    def epochs(self) -> np.ndarray:
        """int64 [n]."""
        return np.concatenate([batch.epochs for batch in self.batches])

    @property
    def predictions(self) -> int:
        return sum(batch.predictions for batch in self.batches)

    @property
    def nsp_pairs(self) -> int:
        return sum(batch.nsp_pairs for batch in self.batches)

    @property
    def tokens(self) -> int:
        return sum(batch.tokens for batch in self.batches)

    @property
    def sequences(self) -> int:
        return sum(batch.sequences for batch in self.batches)


@dataclass(frozen=True)
class Shape:
    """How n rows lie in one int32 and one int64 buffer, which is how they travel between processes."""

    rows: int
    seq_len: int
    max_sequences: int
    capacity: int

    def widths(self, wide: bool) -> dict[str, int]:
        """Elements a row takes of each field of the int64 (`wide`) or the int32 buffer, in order."""
        t, s, k = self.seq_len, self.max_sequences, self.capacity
        if wide:
            return {"nsp_labels": s, "mlm_labels": k, "row_ids": 1, "epochs": 1, "counts": len(COUNTS)}
        names = ("input_ids", "segment_ids", "position_ids", "key_start", "key_end")
        return dict.fromkeys(names, t) | {"lengths": s, "cls_positions": s, "mlm_positions": k}

    def empty(self) -> tuple[np.ndarray, np.ndarray]:
        """Unset int32 and int64 buffers."""
        sizes = [self.rows * sum(self.widths(wide).values()) for wide in (False, True)]
        return np.empty(sizes[0], np.int32), np.empty(sizes[1], np.int64)

    def carve(self, narrow: Any, wide: Any) -> dict[str, Any]:
        """Views [n, width] of each field over two flat buffers (arrays or tensors)."""
        views = {}
        for buffer, is_wide in ((narrow, False), (wide, True)):
            start = 0
            for name, width in self.widths(is_wide).items():
                views[name] = buffer[start : start + self.rows * width].reshape(self.rows, width)
                start += self.rows * width
        return views

    def batches(self, narrow: torch.Tensor, wide: torch.Tensor, micro_batch: int) -> list[Batch]:
        """Micro-batches over two filled buffers, without a copy."""
        views, m = self.carve(narrow, wide), micro_batch
        tensors = zip(*(views[name].unflatten(0, (-1, m)).unbind() for name in TENSORS), strict=True)
        counts = views["counts"].numpy().reshape(-1, m, len(COUNTS)).sum(1).tolist()
        row_ids, epochs = (views[name].numpy().reshape(-1, m) for name in ("row_ids", "epochs"))
        parts = zip(tensors, counts, row_ids, epochs, strict=True)
        return [Batch(*part) for part in ((*t, *c, ids, e) for t, c, ids, e in parts)]


def collate(
    rows: Rows,
    masked: Masked,
    row_ids: np.ndarray,
    row_start: np.ndarray,
    out: dict[str, np.ndarray],
    causal: bool = False,
) -> None:
    """Fill `out` (views of n rows, see `Shape`) from rows and their masks. Rows with a negative id become fillers.

    row_start int64 [n] is the flat index of each row's first position in its micro-batch. `causal`: a token attends
    to what is before it in its sequence, and to itself.
    """
    n, seq_len = rows.ids.shape
    max_sequences = rows.bounds.shape[1]
    lengths = rows.bounds[:, :, 0].astype(np.int32)
    used = lengths > 0
    ends = np.cumsum(lengths, axis=1, dtype=np.int32)
    pieces = np.empty((n, max_sequences + 1), np.int64)  # the last one is the padding
    pieces[:, :max_sequences] = lengths
    np.subtract(seq_len, ends[:, -1], out=pieces[:, max_sequences])
    values = np.zeros((3, n, max_sequences + 1), np.int32)
    values[0, :, :max_sequences] = ends - lengths
    values[1, :, :max_sequences] = ends
    values[2, :, :max_sequences] = rows.bounds[:, :, 1]
    values[2, :, max_sequences] = seq_len  # padding has no B part
    pieces = pieces.ravel()
    key_start, key_end, a_length = (np.repeat(v.ravel(), pieces).reshape(n, seq_len) for v in values)
    out["input_ids"][:] = masked.ids
    out["key_start"][:] = key_start
    out["key_end"][:] = np.minimum(key_end, np.arange(1, seq_len + 1)) if causal else key_end
    position = out["position_ids"]
    np.subtract(np.arange(seq_len, dtype=np.int32), key_start, out=position)
    np.greater_equal(position, a_length, out=out["segment_ids"], casting="unsafe")
    position *= key_end > 0

    out["lengths"][:] = lengths
    out["cls_positions"][:] = np.where(used, values[0, :, :max_sequences], 0) + row_start[:, None]
    out["mlm_positions"][:] = masked.positions + row_start[:, None]
    out["mlm_labels"][:] = masked.labels
    pair = used & (rows.isnext >= 0)
    out["nsp_labels"][:] = np.where(pair, rows.isnext, IGNORE)
    out["row_ids"][:, 0] = row_ids
    for column, count in enumerate((masked.counts, pair.sum(1), ends[:, -1], used.sum(1))):  # as in COUNTS
        out["counts"][:, column] = count
    filler = row_ids < 0
    if filler.any():
        for name in ("mlm_labels", "nsp_labels"):
            out[name][filler] = IGNORE
        out["counts"][filler] = 0
        out["mlm_positions"][filler] = row_start[filler, None]
