"""Loader of a rank's updates; worker processes read, mask and collate them ahead of time. Its only state is the number
of the next update, because an update is a range of one fixed order of rows.

Update `step` takes global positions [step * G, (step + 1) * G), counted from `origin`. Position P is the row that the dataset's
order (`order`) has at P % rows of epoch P // rows (of several datasets: `mixture`), masked by (seed, epoch, row id). Ranks,
workers, accumulation and micro-batch size only split that range, so a global batch has the same rows and masks for any of them.
Every array has a static shape. Where m W does not divide G, the last micro-steps of some ranks have places without a row.

Legend: G global batch, W ranks, m micro-batch, A accumulation = G / (m W) rounded up, n = A m places of one rank's update,
T row length, S sequences a row, K prediction slots a row.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

from megabert.common import errors
from megabert.common.environment import disable_malloc_trimming
from megabert.common.logs import log
from megabert.config import Config, MaskingConfig, accumulation
from megabert.data.batch import BatchLayout, Update, collate
from megabert.data.masking import MaskingVocabulary, mask
from megabert.data.mixture import AnyDataset
from megabert.data.shards import Rows
from megabert.data.tokenizer import Tokenizer
from megabert.distributed.ranks import SETTLE_SECONDS
from megabert.distributed.signals import SIGNALS

# file system of the memory that workers share with their parent
SHARED_MEMORY = "/dev/shm"
# tokens masked at once: more exceeds the cache, with fewer the cost of numpy calls shows
CHUNK_TOKENS = 1 << 18


class Loader:
    """Endless iterator over this rank's updates from `start_step` on; `step` is the next one's number.

    `workers` processes each keep `prefetch` updates ready; with 0, or too little shared memory, this process makes each
    update on request. Workers ignore the signals that stop a run, since the run still needs batches until it has saved;
    `close` ends them. `origin`: global position of update 0, below 0 where earlier phases took fewer rows an update.
    `node_ranks`: ranks that share this machine's memory. Raises ValueError for a tokenizer that is not the dataset's.
    """

    def __init__(
        self,
        dataset: AnyDataset,
        tokenizer: Tokenizer | MaskingVocabulary,
        *,
        global_batch: int,
        micro_batch: int,
        seed: int,
        masking: MaskingConfig | None = None,
        rank: int = 0,
        world: int = 1,
        workers: int = 0,
        prefetch: int = 2,
        start_step: int = 0,
        origin: int = 0,
        pin_memory: bool = False,
        node_ranks: int = 1,
    ) -> None:
        assert 0 <= rank < world and start_step >= 0 and global_batch > 0
        self.step = start_step
        self._source = MaskedRows(dataset, tokenizer, seed, micro_batch, masking)
        self._updates = _UpdateDataset(self._source, global_batch, rank, world, origin)
        # places of this rank's update
        self.rows = self._updates.micro_steps * micro_batch
        self._pin = pin_memory
        steps = itertools.count(start_step)
        self._items: Any = map(self._updates.__getitem__, steps)
        self._workers: list[Any] = []
        if workers and self._room_for(node_ranks * workers * prefetch):
            self._start_workers(steps, workers, prefetch)
        # Also when `close` is not called: Python waits for its children before it exits, and these ignore TERM.
        self._end_workers = weakref.finalize(self, _kill, self._workers)

    @staticmethod
    def from_config(
        config: Config, dataset: AnyDataset, tokenizer: Tokenizer | MaskingVocabulary, **sharding: int
    ) -> Loader:
        """The loader for a phase's configuration, with pinned memory on CUDA. `sharding`: rank, world, start_step,
        origin, node_ranks."""
        return Loader(
            dataset,
            tokenizer,
            global_batch=config.batch.global_size,
            micro_batch=config.batch.micro_size,
            seed=config.seed,
            masking=config.data.masking,
            workers=config.data.workers,
            prefetch=-(-config.data.prefetch // accumulation(config, sharding.get("world", 1))),
            pin_memory=torch.cuda.is_available(),
            **sharding,
        )

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Update:
        if self._items is None:
            raise StopIteration
        made: _WorkerUpdate = next(self._items)
        buffers = (made.narrow, made.wide)
        if not made.narrow.numel():
            buffers = self._updates.fillers(self.step)
        if self._pin and not buffers[0].is_pinned():
            buffers = (buffers[0].pin_memory(), buffers[1].pin_memory())
        first, masking = self._updates.first(self.step), self._source.masking.of_update(self.step)
        self._source.dataset.fetch_ahead(self._source.seed, first)
        layout = self._source.layout(self.rows, masking)
        update = Update(
            self.step,
            self._source.dataset.epoch(first),
            layout.micro_batches(*buffers, self._source.micro_batch),
            made.problem,
            made.problem_code,
            masking.objective,
            (layout, *buffers),
        )
        self.step += 1
        return update

    def close(self) -> None:
        """End the worker processes; the loader is exhausted then."""
        self._items = None
        self._end_workers()
        self._source.dataset.stop_fetching()

    def _room_for(self, updates: int) -> bool:
        """Whether shared memory has room for `updates` updates of this rank's size; logs a warning if not."""
        if not os.path.isdir(SHARED_MEMORY):
            return True
        masking = self._source.masking
        masking = masking.of_update(masking.causal_every - 1)  # causal, if any update is: it has the most predictions
        narrow, wide = self._source.layout(self.rows, masking).sizes()
        stat = os.statvfs(SHARED_MEMORY)
        needed, free = updates * (4 * narrow + 8 * wide), stat.f_bavail * stat.f_frsize
        if needed > free:
            log.warning(
                f"{SHARED_MEMORY} has {free >> 20:,} MiB free, loader processes need {needed >> 20:,}: data.workers=0 is used"
            )
        return needed <= free

    def _start_workers(self, steps: Iterable[int], workers: int, prefetch: int) -> None:
        """Fork the workers, which takes milliseconds, with the signals below blocked.

        Forking a process with threads (gloo, watchdog, OpenMP) is safe here: a worker uses only numpy and one torch
        thread, and Python and glibc reset their locks in the child. Python 3.11 forgets one, which gloo's threads hold for a moment
        when they release the tensors of the last collectives: of 8,000 forks right after these 2 hung, none after a sleep.
        """
        if torch.distributed.is_initialized():
            time.sleep(SETTLE_SECONDS)
        loader = torch.utils.data.DataLoader(
            self._updates,
            batch_size=None,
            sampler=steps,
            num_workers=workers,
            prefetch_factor=prefetch,
            multiprocessing_context="fork",
            worker_init_fn=_start_worker,
            pin_memory=self._pin,
            generator=torch.Generator(),  # not the global generator, whose state the model uses
        )
        others = multiprocessing.active_children()
        # Signals blocked at the fork stay blocked in the workers, so they cannot be killed in between.
        before, collects = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS), gc.isenabled()
        gc.disable()  # until `_start_worker`
        self._items = iter(loader)
        if collects:
            gc.enable()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._workers = [p for p in multiprocessing.active_children() if p not in others]


class _WorkerUpdate(NamedTuple):
    """An update as a worker sends it: the error that left it without buffers, or "", and its buffers."""

    problem: str
    problem_code: int
    narrow: torch.Tensor = torch.empty(0)
    wide: torch.Tensor = torch.empty(0)


class _UpdateDataset(torch.utils.data.Dataset):
    """Step -> `_WorkerUpdate` of one rank.

    If a rank's rows cannot be read it gets the reason and an exit code; with `fillers` it still takes part in collectives.
    """

    def __init__(self, source: MaskedRows, global_batch: int, rank: int, world: int, origin: int) -> None:
        self.source, self.global_batch, self.origin = source, global_batch, origin
        self.micro_steps = -(-global_batch // (source.micro_batch * world))
        # places of this rank in the global batch, int64 [n], micro-step by micro-step
        micro_steps, m = np.arange(self.micro_steps)[:, None], source.micro_batch
        self.places = ((micro_steps * world + rank) * m + np.arange(m)).ravel()
        # the update being read ahead: its step, row ids and epochs
        self.ahead: tuple[int, np.ndarray, np.ndarray] | None = None

    def first(self, step: int) -> int:
        """Global position of the update's first row."""
        return self.origin + step * self.global_batch

    def rows(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Row ids (-1 in places without a row) and epochs of this rank's rows, both int64 [n]."""
        vacant = self.places >= self.global_batch
        positions = self.first(step) + np.where(vacant, 0, self.places)
        row_ids, epochs = self.source.dataset.order(self.source.seed, positions)
        row_ids[vacant] = -1
        return row_ids, epochs

    def __getitem__(self, step: int) -> _WorkerUpdate:
        """The next update of a process; the one after it is read ahead meanwhile."""
        if self.ahead is None or self.ahead[0] != step:
            self.ahead = step, *self.rows(step)
        _, row_ids, epochs = self.ahead
        worker = torch.utils.data.get_worker_info()
        following = step + (worker.num_workers if worker else 1)
        self.ahead = following, *self.rows(following)
        ahead = self.ahead[1]
        try:
            self.source.dataset.read_ahead(ahead[ahead >= 0])
            buffers = self.source.make(row_ids, epochs, self.source.masking.of_update(step))
        except (ValueError, OSError) as error:
            return _WorkerUpdate(errors.describe(error), errors.exit_code(error))
        narrow, wide = map(torch.from_numpy, buffers)
        if worker is not None:
            try:
                # not left to the thread of the workers' queue, which drops an update for which there is no room
                narrow, wide = narrow.share_memory_(), wide.share_memory_()
            except RuntimeError as error:
                full = f"{SHARED_MEMORY} has no room for the updates of loader processes: give it more, or set data.workers=0"
                return _WorkerUpdate(f"{full} ({str(error).splitlines()[0]})", errors.FAILED)
        return _WorkerUpdate("", errors.OK, narrow, wide)

    def fillers(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The buffers of an update without rows."""
        row_ids, epochs = self.rows(step)
        narrow, wide = self.source.make(np.full_like(row_ids, -1), epochs, self.source.masking.of_update(step))
        return torch.from_numpy(narrow), torch.from_numpy(wide)


class MaskedRows:
    """Buffers of masked rows by (row id, epoch), for training and evaluation."""

    def __init__(
        self,
        dataset: AnyDataset,
        tokenizer: Tokenizer | MaskingVocabulary,
        seed: int,
        micro_batch: int,
        masking: MaskingConfig | None,
    ) -> None:
        manifest = dataset.manifest
        if isinstance(tokenizer, MaskingVocabulary):
            self.vocabulary = tokenizer
        elif tokenizer.sha256 == manifest.tokenizer["sha256"]:
            self.vocabulary = MaskingVocabulary.of(tokenizer)
        else:
            raise ValueError(
                f"{tokenizer.path}: not the tokenizer that {dataset.folder} was built with (SHA-256 differs); "
                "use the one in the dataset's folder"
            )
        if (size := len(self.vocabulary.special)) != manifest.vocab_size:
            raise ValueError(
                f"{dataset.folder}: vocab_size is {manifest.vocab_size}, but the tokenizer has {size} tokens; "
                "rebuild the dataset with this tokenizer"
            )
        if micro_batch < 1:
            raise ValueError(f"batch.micro_size={micro_batch} must be at least 1")
        self.dataset, self.seed, self.micro_batch = dataset, seed, micro_batch
        # masking of update 0; `of_update` gives that of the others, which may be causal
        self.masking = masking or MaskingConfig()

    def layout(self, rows: int, masking: MaskingConfig) -> BatchLayout:
        m = self.dataset.manifest
        return BatchLayout(rows, m.seq_len, m.max_sequences, masking.capacity(m.seq_len), masking.causal)

    def make(self, row_ids: np.ndarray, epochs: np.ndarray, masking: MaskingConfig) -> tuple[np.ndarray, np.ndarray]:
        """The buffers of rows `row_ids` (int64 [n], -1 = filler) masked for `epochs` (int64 [n]). Raises as `Dataset.read` does."""
        layout = self.layout(len(row_ids), masking)
        buffers = layout.empty()
        out = layout.views(*buffers)
        chunk = max(1, CHUNK_TOKENS // layout.seq_len)
        row_start = np.arange(len(row_ids)) % self.micro_batch * layout.seq_len
        for first in range(0, len(row_ids), chunk):
            part = slice(first, first + chunk)
            ids = row_ids[part]
            rows = self._read(ids)
            masked = mask(
                rows.ids,
                rows.bounds,
                np.maximum(ids, 0),
                seed=self.seed,
                epoch=epochs[part],
                vocabulary=self.vocabulary,
                masking=masking,
            )
            out["epochs"][part, 0] = epochs[part]
            views = {name: view[part] for name, view in out.items()}
            collate(rows, masked, ids, row_start[part], views, masking.causal)
        return buffers

    def _read(self, row_ids: np.ndarray) -> Rows:
        """Rows `row_ids`. A filler (-1) is one sequence that fills the row, so that its activations are finite; it has no labels."""
        filler = row_ids < 0
        if filler.all():  # fillers replace rows that could not be read, so nothing is read
            rows = Rows.without_sequences(len(row_ids), self.dataset.manifest)
        else:
            rows = self.dataset.read(np.where(filler, row_ids.max(), row_ids))
        if filler.any():
            rows.ids[filler] = self.vocabulary.ordinary[0]
            rows.bounds[filler] = 0
            rows.bounds[filler, 0] = self.dataset.manifest.seq_len
            rows.isnext[filler] = -1
        return rows


# -- worker processes ------------------------------------------------------------------------------------------------


def _start_worker(_: int) -> None:
    """Initialise a worker: exit with the parent process at once (torch checks every 5 s), and exempt inherited objects
    from garbage collection, since destroying an inherited process group would wait for threads that a fork does not
    have."""
    gc.freeze()
    gc.enable()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    disable_malloc_trimming()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _kill(workers: list[Any]) -> None:
    """Kill loader workers; they have no state to save."""
    for worker in workers:
        worker.kill()
