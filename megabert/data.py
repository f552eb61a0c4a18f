"""The order of rows is a function, and the cursor of a run is one integer: its step.

Update `step` takes global positions [step * G, (step + 1) * G). Position P is row `row_order(P % rows)` of epoch P // rows,
masked by (seed, epoch, row id). Ranks, workers, accumulation and micro-batch size only cut that range in different
places, so every global batch holds the same rows under the same masks whatever they are. Every array has a static shape.
Legend: G global batch, W ranks, m micro-batch, A accumulation = G / (m W), n = A m rows of one rank's update, T row
length, S sequences a row, K prediction slots a row.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from megabert.batches import COUNTS, TENSORS, Batch, Shape, Update, collate
from megabert.masking import Masking, Vocabulary, mask, stream_keys
from megabert.memory import keep_freed_memory
from megabert.shards import Dataset
from megabert.tokenizer import Tokenizer

__all__ = ["Batch", "Loader", "Update", "eval_batches", "row_order"]

if TYPE_CHECKING:
    from megabert.config import Config

WINDOW = 16  # blocks whose rows are shuffled together: 16 reads near each other serve 4,096 rows
BLOCK_STREAM, ROW_STREAM = (
    0x626C6F636B,
    0x726F77,
)  # keep the two permutations apart from each other and from masks
CHUNK_TOKENS = (
    1 << 18
)  # tokens masked at once: more falls out of the cache, fewer leaves numpy's call cost visible


def _permutation(n: int, *key: int) -> np.ndarray:
    """Permutation of range(n), int64 [n], a function of `key` alone (no library's random stream is involved)."""
    low = np.uint64((1 << n.bit_length()) - 1)
    drawn = stream_keys(*key, np.arange(n)) & ~low | np.arange(n, dtype=np.uint64)
    drawn.sort()  # all distinct: the index is in the low bits
    return (drawn & low).astype(np.int64)


@lru_cache(maxsize=4)
def _blocks(blocks: int, seed: int, epoch: int) -> np.ndarray:
    return _permutation(blocks, BLOCK_STREAM, seed, epoch)


@lru_cache(maxsize=64)
def _window(rows: int, seed: int, epoch: int, window: int) -> np.ndarray:
    return _permutation(rows, ROW_STREAM, seed, epoch, window)


def row_order(rows: int, block_rows: int, seed: int, epoch: int, positions: np.ndarray) -> np.ndarray:
    """Row ids at `positions` (int64 [n], in 0..rows - 1) of an epoch: a bijection of the epoch's positions to its rows.

    Blocks are permuted, then rows within windows of 16 permuted blocks; the last block of a dataset may be short.
    """
    blocks = -(-rows // block_rows)
    order = _blocks(blocks, seed, epoch)
    missing = blocks * block_rows - rows  # rows the last block falls short by
    short_window, short_slot = divmod(int(np.flatnonzero(order == blocks - 1)[0]), WINDOW)
    span = WINDOW * block_rows
    # Positions as if the last block were full: those after it move on by what it lacks.
    virtual = positions + np.where(positions >= (short_window + 1) * span - missing, missing, 0)
    window, at = np.divmod(virtual, span)
    for w in np.unique(window).tolist():
        here = window == w
        size = min(span, blocks * block_rows - w * span) - (missing if w == short_window else 0)
        at[here] = _window(size, seed, epoch, w)[at[here]]
    cut = short_slot * block_rows + block_rows - missing
    at += np.where((window == short_window) & (at >= cut), missing, 0)
    slot, row = np.divmod(at, block_rows)
    return order[window * WINDOW + slot] * block_rows + row


@dataclass(frozen=True)
class _Source:
    """What makes rows of (row id, epoch) pairs; shared by training and evaluation."""

    dataset: Dataset
    vocabulary: Vocabulary
    masking: Masking
    seed: int
    micro_batch: int

    def shape(self, rows: int) -> Shape:
        m = self.dataset.manifest
        return Shape(rows, m.seq_len, m.max_sequences, self.masking.capacity(m.seq_len))

    def make(self, row_ids: np.ndarray, epochs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The buffers of rows `row_ids` (int64 [n], -1 = filler) masked for `epochs` (int64 [n])."""
        shape = self.shape(len(row_ids))
        buffers = shape.empty()
        out = shape.carve(*buffers)
        chunk = max(1, CHUNK_TOKENS // shape.seq_len)
        row_start = np.arange(len(row_ids)) % self.micro_batch * shape.seq_len
        for first in range(0, len(row_ids), chunk):
            part = slice(first, first + chunk)
            wanted = np.maximum(row_ids[part], 0)
            rows = self.dataset.read(wanted)
            masked = mask(
                rows.ids,
                rows.bounds,
                wanted,
                seed=self.seed,
                epoch=epochs[part],
                vocabulary=self.vocabulary,
                masking=self.masking,
            )
            collate(rows, masked, row_ids[part], row_start[part], {k: v[part] for k, v in out.items()})
        return buffers

    def batches(self, narrow: torch.Tensor, wide: torch.Tensor, rows: int) -> list[Batch]:
        """Micro-batches over the buffers of `rows` rows, without a copy."""
        views = self.shape(rows).carve(narrow, wide)
        m = self.micro_batch
        tensors = zip(*(views[name].unflatten(0, (-1, m)).unbind() for name in TENSORS), strict=True)
        counts = views["counts"].numpy().reshape(-1, m, len(COUNTS)).sum(1).tolist()
        row_ids = views["row_ids"].numpy().reshape(-1, m)
        return [
            Batch(*parts) for parts in ((*t, *c, r) for t, c, r in zip(tensors, counts, row_ids, strict=True))
        ]


class MaskingOptions(Protocol):
    """The fields of `config.MaskingConfig`, or of `masking.Masking`."""

    @property
    def strategy(self) -> str: ...
    @property
    def rate(self) -> float: ...
    @property
    def mask(self) -> float: ...
    @property
    def random(self) -> float: ...
    @property
    def max_predictions(self) -> int: ...


def _source(
    dataset: Dataset, tokenizer: Tokenizer | Vocabulary, masking: MaskingOptions, seed: int, micro_batch: int
) -> _Source:
    manifest = dataset.manifest
    if isinstance(tokenizer, Tokenizer):
        if tokenizer.sha256 != manifest.tokenizer["sha256"]:
            raise ValueError(
                f"{tokenizer.path}: not the tokenizer that {dataset.folder} was built with (SHA-256 differs)"
            )
        vocabulary = Vocabulary(
            tokenizer.vocab_size, tokenizer.mask_id, tokenizer.special_ids.values(), tokenizer.word_start
        )
    else:
        vocabulary = tokenizer
    if len(vocabulary.special) != manifest.vocab_size:
        raise ValueError(
            f"{dataset.folder}: manifest says {manifest.vocab_size} pieces, the tokenizer has {len(vocabulary.special)}"
        )
    if micro_batch < 1:
        raise ValueError(f"batch.micro_size={micro_batch} must be at least 1")
    options = Masking(masking.strategy, masking.rate, masking.mask, masking.random, masking.max_predictions)
    return _Source(dataset, vocabulary, options, seed, micro_batch)


class _Updates(torch.utils.data.Dataset):
    """Step -> the buffers of one rank's update. A damaged row comes back as its exception: its text stays one line."""

    def __init__(self, source: _Source, global_batch: int, rank: int, world: int) -> None:
        self.source, self.global_batch, self.rank, self.world = source, global_batch, rank, world

    def positions(self, step: int) -> np.ndarray:
        """Global positions of this rank's rows, int64 [n], micro-step by micro-step."""
        m = self.source.micro_batch
        micro_steps = np.arange(self.global_batch // (m * self.world))[:, None]
        return (step * self.global_batch + (micro_steps * self.world + self.rank) * m + np.arange(m)).ravel()

    def __getitem__(self, step: int) -> tuple[torch.Tensor, torch.Tensor] | ValueError:
        manifest = self.source.dataset.manifest
        epochs, positions = np.divmod(self.positions(step), manifest.rows)
        row_ids = np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            row_ids[here] = row_order(
                manifest.rows, manifest.block_rows, self.source.seed, epoch, positions[here]
            )
        try:
            narrow, wide = self.source.make(row_ids, epochs)
        except ValueError as error:
            return error
        return torch.from_numpy(narrow), torch.from_numpy(wide)


class _StepsFrom(torch.utils.data.Sampler):
    def __init__(self, start: int) -> None:
        self.start = start

    def __iter__(self) -> Iterator[int]:
        return itertools.count(self.start)


def _start_worker(_: int) -> None:
    keep_freed_memory()


def _as_it_is(item: Any) -> Any:
    return item


class Loader:
    """Endless iterator over this rank's updates from `start_step` on; `step` is the next one's number.

    `workers` processes each keep `prefetch` updates ready (0: made when asked for, in this process). Raises
    ValueError for a batch that does not divide or a tokenizer that is not the dataset's, and, from `next`, DamagedRow.
    `close` ends the workers.
    """

    def __init__(
        self,
        dataset: Dataset,
        tokenizer: Tokenizer | Vocabulary,
        *,
        global_batch: int,
        micro_batch: int,
        seed: int,
        masking: MaskingOptions | None = None,
        rank: int = 0,
        world: int = 1,
        workers: int = 0,
        prefetch: int = 2,
        start_step: int = 0,
        pin_memory: bool = False,
    ) -> None:
        self.source = _source(dataset, tokenizer, masking or Masking(), seed, micro_batch)
        if global_batch < 1 or global_batch % (micro_batch * world):
            raise ValueError(
                f"batch.global_size={global_batch} is not a multiple of batch.micro_size={micro_batch} x {world} ranks"
            )
        assert 0 <= rank < world and start_step >= 0
        self.step, self.global_batch, self.rows = start_step, global_batch, global_batch // world
        updates = _Updates(self.source, global_batch, rank, world)
        self._pin = pin_memory
        self._items: Any = map(updates.__getitem__, itertools.count(start_step))
        if workers:
            loader = torch.utils.data.DataLoader(
                updates,
                batch_size=None,
                sampler=_StepsFrom(start_step),
                num_workers=workers,
                prefetch_factor=prefetch,
                collate_fn=_as_it_is,
                worker_init_fn=_start_worker,
                pin_memory=pin_memory,
                generator=torch.Generator(),  # not the global one, whose state belongs to the model
            )
            self._items = iter(loader)

    @staticmethod
    def from_config(
        config: Config,
        dataset: Dataset,
        tokenizer: Tokenizer | Vocabulary,
        *,
        rank: int = 0,
        world: int = 1,
        start_step: int = 0,
    ) -> Loader:
        """The loader that a configuration asks for; memory is pinned where there is a CUDA device."""
        accumulation = max(1, config.batch.global_size // (config.batch.micro_size * world))
        return Loader(
            dataset,
            tokenizer,
            global_batch=config.batch.global_size,
            micro_batch=config.batch.micro_size,
            seed=config.seed,
            masking=config.data.masking,
            rank=rank,
            world=world,
            workers=config.data.workers,
            prefetch=-(-config.data.prefetch // accumulation),
            start_step=start_step,
            pin_memory=torch.cuda.is_available(),
        )

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Update:
        if self._items is None:
            raise StopIteration
        item = next(self._items)
        if isinstance(item, ValueError):
            raise item
        epoch = self.step * self.global_batch // self.source.dataset.rows
        narrow, wide = item
        if self._pin and not narrow.is_pinned():
            narrow, wide = narrow.pin_memory(), wide.pin_memory()
        update = Update(self.step, epoch, self.source.batches(narrow, wide, self.rows))
        self.step += 1
        return update

    def close(self) -> None:
        """End the worker processes; no update comes after it."""
        self._items = None


def eval_batches(
    dataset: Dataset,
    tokenizer: Tokenizer | Vocabulary,
    *,
    micro_batch: int,
    seed: int,
    masking: MaskingOptions | None = None,
    rank: int = 0,
    world: int = 1,
    max_rows: int | None = None,
) -> Iterator[Batch]:
    """This rank's share of the first `max_rows` rows (all without it), each once over all ranks, always the same mask.

    Every rank gets the same number of batches of `micro_batch` rows, as collectives need; what is left over is filled
    with copies of row 0 without labels (row id -1), which count for nothing.
    """
    source = _source(dataset, tokenizer, masking or Masking(), seed, micro_batch)
    rows = min(dataset.rows, max_rows or dataset.rows)
    for first in range(0, rows, micro_batch * world):
        row_ids = first + rank * micro_batch + np.arange(micro_batch)
        row_ids[row_ids >= rows] = -1
        narrow, wide = source.make(row_ids, np.zeros_like(row_ids))
        yield from source.batches(torch.from_numpy(narrow), torch.from_numpy(wide), micro_batch)
