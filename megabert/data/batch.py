"""Batches: the tensors of a micro-batch, their collation from rows, an update of micro-batches, and the digest of rows seen.

Every array has a static shape, and every token has the range of its sequence. One rank's update is in two flat buffers, so that it
is passed between processes as two tensors, of which micro-batches are views.

Legend: B rows of a micro-batch, n rows of an update, T row length, S sequences a row, K prediction slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from megabert.common import errors
from megabert.common.random_numbers import stream_keys
from megabert.data.masking import IGNORE, Masked
from megabert.data.shards import Rows

COUNTS = ("predictions", "nsp_pairs", "tokens", "sequences")
# keeps the hashes of the row digest apart from order and masks
DIGEST_STREAM = 0x646967657374
DIGEST_MODULUS = 1 << 64


@dataclass(frozen=True)
class Batch:
    """One micro-batch of B rows, the input of the model, and its counts (ints, of this micro-batch)."""

    # int32 [B, T], masked already
    input_ids: torch.Tensor
    # int32 [B, T], 1 in B parts, 0 elsewhere
    segment_ids: torch.Tensor
    # int32 [B, T], from 0 in each sequence, 0 in padding
    position_ids: torch.Tensor
    # int32 [B, T] each, the first position a token attends to and one past the last (causal: past the token); 0 in padding
    key_start: torch.Tensor
    key_end: torch.Tensor
    # int32 [B, S], 0 after the row's last sequence; on a device `compact_lengths` [N]
    lengths: torch.Tensor
    # int32 [B, S], flat in B * T; the row's first position after the last sequence
    cls_positions: torch.Tensor
    # int64 [B, S], -100 after the last sequence and where there is no pair
    nsp_labels: torch.Tensor
    # int32 [B, K], flat in B * T, ascending; the row's first position in unused slots
    mlm_positions: torch.Tensor
    # int64 [B, K], the ids to predict, -100 in unused slots
    mlm_labels: torch.Tensor
    predictions: int
    nsp_pairs: int
    # without padding
    tokens: int
    sequences: int
    # int64 [B]; negative is a filler, which has no labels
    row_ids: np.ndarray
    # int64 [B], the epoch of each row
    epochs: np.ndarray
    # each token attends only to those before it and to itself
    causal: bool = False
    # bool [N, B, K]: which predictions come from each of N sources; set for metrics by source
    sources: torch.Tensor | None = None

    def inputs(self) -> dict[str, Any]:
        """The arguments of the model's `forward`: the tensors by name, `causal` where it is true, and `sources` if there are any."""
        values = {name: getattr(self, name) for name in TENSORS} | ({"causal": True} if self.causal else {})
        return values if self.sources is None else values | {"sources": self.sources}

    def to(self, device: torch.device | str) -> Batch:
        """The batch on `device`; copied asynchronously from pinned memory.

        On a device other than the CPU the lengths are compact, which only the host can compute without a synchronisation.
        """
        tensors = {name: tensor for name, tensor in self.inputs().items() if name != "causal"}
        if torch.device(device).type != "cpu" and self.lengths.is_cpu and self.lengths.dim() == 2:
            compact = compact_lengths(self.lengths, self.input_ids.shape[1])
            tensors["lengths"] = compact.pin_memory() if self.lengths.is_pinned() else compact
        moved: dict[str, Any] = {name: t.to(device, non_blocking=True) for name, t in tensors.items()}
        return replace(self, **moved)


TENSORS = tuple(f.name for f in fields(Batch) if f.type == "torch.Tensor")


def compact_lengths(lengths: torch.Tensor, width: int) -> torch.Tensor:
    """int32 [N] from lengths [B, S] on the CPU: for each of B rows of `width` tokens the lengths of its sequences and of its padding.

    Zeros fill it up to N, a multiple of B. So N seldom changes between batches (with 2.2 sequences and padding a row on
    average, 3 B), and a compiler or an allocator sees few shapes.
    """
    rows = lengths.numpy()
    runs = np.concatenate([rows, width - rows.sum(1, dtype=np.int32, keepdims=True)], 1).ravel()
    runs = runs[runs > 0]
    compact = np.zeros(-(-len(runs) // len(rows)) * len(rows), np.int32)
    compact[: len(runs)] = runs
    return torch.from_numpy(compact)


@dataclass(frozen=True)
class Update:
    """One rank's share of one optimizer step: A micro-batches. `epoch` is that of the global batch's first row.

    `problem` says why the data could not be read; every row is a filler then, and `problem_code` is the exit code for it.
    `objective` is "masked", or "causal" where each token predicts the next.
    """

    step: int
    epoch: int
    batches: list[Batch]
    problem: str = ""
    problem_code: int = errors.OK
    objective: str = "masked"
    # the buffers, int32 and int64, that the batches are views of, and their layout; None if there are none
    buffers: tuple[BatchLayout, torch.Tensor, torch.Tensor] | None = None

    def on(self, device: torch.device | str) -> list[Batch]:
        """The micro-batches on `device`, as `Batch.to`: a copy of each buffer and one of all lengths, not one a tensor."""
        if self.buffers is None or torch.device(device).type == "cpu":
            return [batch.to(device) for batch in self.batches]
        layout, *buffers = self.buffers
        parts = [compact_lengths(batch.lengths, layout.seq_len) for batch in self.batches]
        lengths = torch.cat(parts)
        host = [*buffers, lengths.pin_memory() if buffers[0].is_pinned() else lengths]
        narrow, wide, lengths = (buffer.to(device, non_blocking=True) for buffer in host)
        tensors = layout.tensors(layout.views(narrow, wide), len(self.batches[0].input_ids))
        compact = lengths.split([len(part) for part in parts])
        moved: list[Batch] = []
        for batch, values, own in zip(self.batches, tensors, compact, strict=True):
            fields: dict[str, Any] = dict(zip(TENSORS, values, strict=True)) | {"lengths": own}
            moved.append(replace(batch, **fields))
        return moved

    @property
    def row_ids(self) -> np.ndarray:
        """int64 [n]; -1 for fillers and places without a row."""
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
class BatchLayout:
    """The layout of n rows in one int32 and one int64 buffer, in which they are passed between processes."""

    rows: int
    seq_len: int
    max_sequences: int
    capacity: int
    causal: bool = False

    def widths(self, wide: bool) -> dict[str, int]:
        """Elements a row of each field of the int64 (`wide`) or the int32 buffer, in order."""
        t, s, k = self.seq_len, self.max_sequences, self.capacity
        if wide:
            return {"nsp_labels": s, "mlm_labels": k, "row_ids": 1, "epochs": 1, "counts": len(COUNTS)}
        names = ("input_ids", "segment_ids", "position_ids", "key_start", "key_end")
        return dict.fromkeys(names, t) | {"lengths": s, "cls_positions": s, "mlm_positions": k}

    def sizes(self) -> tuple[int, int]:
        """Elements of the int32 and the int64 buffer."""
        narrow, wide = (self.rows * sum(self.widths(wide).values()) for wide in (False, True))
        return narrow, wide

    def empty(self) -> tuple[np.ndarray, np.ndarray]:
        """Unset int32 and int64 buffers."""
        narrow, wide = self.sizes()
        return np.empty(narrow, np.int32), np.empty(wide, np.int64)

    def views(self, narrow: Any, wide: Any) -> dict[str, Any]:
        """Views [n, width] of each field over two flat buffers (arrays or tensors)."""
        views = {}
        for buffer, is_wide in ((narrow, False), (wide, True)):
            start = 0
            for name, width in self.widths(is_wide).items():
                views[name] = buffer[start : start + self.rows * width].reshape(self.rows, width)
                start += self.rows * width
        return views

    def micro_batches(self, narrow: torch.Tensor, wide: torch.Tensor, size: int) -> list[Batch]:
        """Micro-batches of `size` rows over two filled buffers, without a copy."""
        views = self.views(narrow, wide)
        counts = views["counts"].numpy().reshape(-1, size, len(COUNTS)).sum(1).tolist()
        row_ids, epochs = (views[name].numpy().reshape(-1, size) for name in ("row_ids", "epochs"))
        parts = zip(self.tensors(views, size), counts, row_ids, epochs, strict=True)
        return [Batch(*part) for part in ((*t, *c, ids, e, self.causal) for t, c, ids, e in parts)]

    @staticmethod
    def tensors(views: Mapping[str, torch.Tensor], size: int) -> Iterator[tuple[torch.Tensor, ...]]:
        """The tensors of each micro-batch of `size` rows, in the order of `TENSORS`."""
        return zip(*(views[name].unflatten(0, (-1, size)).unbind() for name in TENSORS), strict=True)


def collate(
    rows: Rows,
    masked: Masked,
    row_ids: np.ndarray,
    row_start: np.ndarray,
    out: dict[str, np.ndarray],
    causal: bool = False,
) -> None:
    """Fill `out` (`BatchLayout.views` of n rows) from rows and their masks. Rows with a negative id become fillers.

    row_start int64 [n] is the flat index of each row's first position in its micro-batch. `causal`: a token attends only to
    the tokens before it in its sequence, and to itself.
    """
    n, seq_len = rows.ids.shape
    max_sequences = rows.bounds.shape[1]
    lengths = rows.bounds[:, :, 0].astype(np.int32)
    used = lengths > 0
    ends = np.cumsum(lengths, axis=1, dtype=np.int32)
    # (n, S + 1): the sequences of a row, and last its padding
    runs = np.column_stack([lengths, seq_len - ends[:, -1]])
    # start, end and length of the A part of each of them; padding has no B part
    values = np.zeros((3, n, max_sequences + 1), np.int32)
    values[0, :, :max_sequences] = ends - lengths
    values[1, :, :max_sequences] = ends
    values[2, :, :max_sequences] = rows.bounds[:, :, 1]
    values[2, :, max_sequences] = seq_len
    key_start, key_end, a_length = (np.repeat(v.ravel(), runs.ravel()).reshape(n, seq_len) for v in values)
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


class RowDigest:
    """Digest of the rows a run saw since its first update, on all ranks together.

    A sum of hashes of (row id, epoch), so it does not depend on the order of rows, ranks and restarts. A row that is
    repeated, missing or of another epoch changes it: two runs with the same digest saw the same rows equally often, up
    to a chance of 2^-64.
    """

    def __init__(self, digest: int = 0) -> None:
        """`digest` is that of the updates before this process."""
        self._digest = digest
        # of this rank's rows since
        self._own = 0

    def add(self, update: Update) -> None:
        """Add one more update of this rank."""
        row_ids, epochs = update.row_ids, update.epochs
        real = row_ids >= 0
        self._own += int(stream_keys(DIGEST_STREAM, epochs[real], row_ids[real]).sum(dtype=np.uint64))

    @property
    def counts(self) -> dict[str, int]:
        """This rank's rows: the digest in halves, whose sums over any number of ranks fit 64 bits."""
        digest = self._own % DIGEST_MODULUS
        return {"digest high": digest >> 32, "digest low": digest & 0xFFFFFFFF}

    def total(self, sums: Mapping[str, int]) -> int:
        """The digest of all ranks, from the `sums` of their counts ({}: none since)."""
        since = (sums.get("digest high", 0) << 32) + sums.get("digest low", 0)
        return (self._digest + since) % DIGEST_MODULUS
