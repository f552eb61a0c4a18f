"""Every row once an epoch, the same global batches however they are cut, arrays equal to hand-computed ones, workers that end."""

import errno
import gc
import mmap
import multiprocessing
import os
import pickle
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch

from megabert.common import errors
from megabert.common.processes import is_alive
from megabert.config import MaskingConfig, from_dict
from megabert.data.batch import TENSORS, RowDigest, compact_lengths
from megabert.data.loader import Loader, MaskedRows
from megabert.data.shards import Dataset
from megabert.data.shards.layout import TAR_END, shard_bytes
from megabert.data.tokenizer import Tokenizer
from megabert.evaluation import fixed_batches
from megabert.metrics import PretrainingMeter
from megabert.ops import attention_inputs
from tests.helpers import tiny, wordpiece
from tests.helpers.ranks import CONTEXT
from tests.helpers.rows import make_dataset, vocabulary
from tests.helpers.streams import key
from tests.helpers.waiting import wait_until

ROWS, GLOBAL, SEED = 180, 48, 3  # 15 updates are 4 epochs; blocks of 8, the last of 4; 3 shards


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return Dataset(make_dataset(tmp_path_factory.mktemp("loader"), ROWS))


def loader_of(dataset, **options):
    return Loader(dataset, vocabulary(), **{"global_batch": GLOBAL, "micro_batch": 8, "seed": SEED} | options)


def global_batches(dataset, steps, world, workers, micro=3, start=0):
    """For each step, every row of the global batch: (global position, row id, input ids, labels, positions in row)."""
    options = {"micro_batch": micro, "world": world, "workers": workers, "start_step": start}
    loaders = [loader_of(dataset, rank=rank, **options) for rank in range(world)]
    found = []
    for step in range(start, start + steps):
        rows = []
        for rank, update in enumerate(map(next, loaders)):
            assert (update.step, update.epoch, update.problem) == (step, step * GLOBAL // dataset.rows, "")
            assert len(update.batches) == -(-GLOBAL // (micro * world))
            assert update.predictions == sum(int((batch.mlm_labels >= 0).sum()) for batch in update.batches)
            for a, batch in enumerate(update.batches):
                seats = torch.arange(micro) + (a * world + rank) * micro
                places = batch.mlm_positions - torch.arange(micro)[:, None] * dataset.manifest.seq_len
                columns = (step * GLOBAL + seats, batch.row_ids, batch.input_ids, batch.mlm_labels, places)
                rows += [row for row in zip(*(column.tolist() for column in columns), strict=True) if row[1] >= 0]
                vacant = seats >= GLOBAL  # seats without a row, which count for nothing
                assert (batch.row_ids < 0).tolist() == vacant.tolist()
                assert (batch.mlm_labels[vacant] == -100).all() and (batch.nsp_labels[vacant] == -100).all()
        found.append(sorted(rows))
    for loader in loaders:
        loader.close()
    return found


@pytest.fixture(scope="module")
def reference(dataset):
    return global_batches(dataset, 15, world=1, workers=0)


def test_every_row_comes_once_an_epoch(reference):
    rows = [row for step in reference for row in step]
    assert [r[0] for r in rows] == list(range(15 * GLOBAL))
    orders = [tuple(r[1] for r in rows[e * ROWS : (e + 1) * ROWS]) for e in range(4)]
    assert len(set(orders)) == 4 and all(sorted(order) == list(range(ROWS)) for order in orders)
    masks = {(r[1], tuple(r[4])) for r in rows}
    assert len(masks) > 3.5 * ROWS, "each epoch masks a row again"


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores, on purpose
@pytest.mark.parametrize(
    ("world", "workers", "micro", "start"),
    [
        *((1, 0, 1, 0), (1, 0, 48, 0), (4, 3, 3, 0), (8, 0, 3, 1), (2, 2, 3, 7)),
        *((5, 0, 3, 0), (3, 0, 7, 2), (1, 1, 25, 0), (64, 0, 1, 9)),  # seats without a row
    ],
)
def test_global_batches_are_equal_however_cut_and_resumed(dataset, reference, world, workers, micro, start):
    assert global_batches(dataset, 15 - start, world, workers, micro, start) == reference[start:]


class Ahead(mmap.mmap):
    """A map that keeps what was asked to be read ahead in it, as (first byte, end)."""

    asked: ClassVar[list[tuple[int, int]]] = []

    def madvise(self, option, start, length):
        assert option == mmap.MADV_WILLNEED
        super().madvise(option, start, length)
        self.asked.append((start, start + length))


def test_the_next_update_is_read_ahead(tmp_path, monkeypatch):
    """Whole blocks of it that were not just read, and no more; its shards are open by then. The last block of all is short."""
    monkeypatch.setattr(mmap, "mmap", Ahead)
    Ahead.asked.clear()
    data = Dataset(make_dataset(tmp_path, 16 * 100 + 5, shard_rows=160))
    loader = loader_of(data, global_batch=96, rank=1, world=3)
    size, wanted = shard_bytes(8, 8, 32, 3, "uint16") - len(TAR_END), set()
    for _ in range(data.rows // 96):
        next(loader)
        section, block, _ = data._places(loader._updates.rows(loader.step)[0])
        assert set(data._maps).issuperset(section.tolist())
        before, wanted = wanted, set(zip(section.tolist(), block.tolist(), strict=True))
        fresh = len(wanted - before)
        asked = sum(end - start for start, end in Ahead.asked)
        assert fresh * size * 0.9 <= asked <= fresh * (size + mmap.PAGESIZE)
        Ahead.asked.clear()


def test_updates_go_to_devices_in_three_copies(dataset, monkeypatch):
    update = next(loader_of(dataset))
    each = [batch.to("meta") for batch in update.batches]
    copies, to = [], torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda *given, **more: (copies.append(given[0]), to(*given, **more))[1])
    moved = update.on("meta")
    assert len(copies) == 3 and len(moved) == len(each) > 1
    for one, other in zip(each, moved, strict=True):
        for name in TENSORS:
            a, b = getattr(one, name), getattr(other, name)
            assert b.is_meta and (a.shape, a.dtype) == (b.shape, b.dtype), name
        a, b = ((batch.predictions, batch.tokens, batch.row_ids.tolist()) for batch in (one, other))
        assert a == b
    first = update.batches[0].input_ids
    lengths = torch.cat([compact_lengths(batch.lengths, first.shape[1]) for batch in update.batches])
    assert copies[2].equal(lengths) and copies[0].data_ptr() == first.data_ptr()
    assert update.on("cpu")[0].input_ids is first


class Inherited:
    """Garbage of the parent whose end, as that of a process group, is not a worker's to see."""

    def __init__(self, folder):
        self.own, self.folder = self, folder

    def __del__(self):
        (self.folder / str(os.getpid())).touch()


def test_a_worker_collects_nothing_that_it_inherited(dataset, tmp_path, monkeypatch):
    inherited = Inherited(tmp_path)
    gc.collect()  # it is old, so that the parent does not collect it soon
    del inherited
    monkeypatch.setattr(Dataset, "read_ahead", lambda self, rows: gc.collect())
    loader = loader_of(dataset, workers=2)
    workers = [worker.pid for worker in loader._workers]
    assert [next(loader).problem for _ in range(4)] == [""] * 4
    loader.close()
    assert not [pid for pid in workers if (tmp_path / str(pid)).exists()]
    gc.collect()
    assert [path.name for path in tmp_path.iterdir()] == [str(os.getpid())]


def test_workers_ignore_signals_and_end_with_the_loader(dataset):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    loader = loader_of(dataset, workers=2)
    workers = list(loader._workers)
    assert len(workers) == 2 and next(loader).step == 0
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
        for worker in workers:
            os.kill(worker.pid, number)
    assert [next(loader).step for _ in range(20)] == list(range(1, 21))
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert torch.equal(torch.get_rng_state(), before), "the model's dropout must not depend on the loader"
    assert all(w.is_alive() for w in workers)
    loader.close()
    for worker in workers:
        worker.join(5)
    assert not any(w.is_alive() for w in workers) and next(loader, None) is None


@pytest.mark.parametrize(("causal_every", "ranks", "room"), [(0, 1, 0), (2, 1, 2), (0, 2, 4), (0, 3, 4)])
def test_without_room_in_shared_memory_rows_are_made_here(dataset, monkeypatch, caplog, causal_every, ranks, room):
    """For causal updates, which are larger, and for all ranks of a node; `room`: for how many updates of masked LM."""
    masking = MaskingConfig(causal_every=causal_every)
    narrow, wide = MaskedRows(dataset, vocabulary(), SEED, 8, masking).layout(GLOBAL, masking).sizes()
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=room * (4 * narrow + 8 * wide), f_frsize=1))
    with caplog.at_level("WARNING", logger="megabert"):
        loader = loader_of(dataset, masking=masking, workers=1, prefetch=2, node_ranks=ranks)
    assert bool(loader._workers) == (ranks == 2)
    warning = "/dev/shm has 0 MiB free, loader processes need 0: data.workers=0 is used"
    assert (warning in caplog.text) == (ranks != 2)
    assert [next(loader).step for _ in range(3)] == [0, 1, 2]
    loader.close()


def take_and_die(folder, connection):
    loader = loader_of(Dataset(folder), workers=2)
    batches = [next(loader).batches[0].input_ids.tolist() for _ in range(3)]
    connection.send(([worker.pid for worker in loader._workers], batches))
    os.kill(os.getpid(), signal.SIGKILL)


def test_shared_memory_that_filled_up_is_named(dataset, monkeypatch):
    """The thread of the workers' queue would drop the update, and the run wait for it until its watchdog ends it."""
    share = torch.Tensor.share_memory_

    def share_at_first(tensor: torch.Tensor) -> torch.Tensor:
        if len(shared) == 4:
            raise RuntimeError("unable to allocate shared memory(shm): No space left on device (28)")
        shared.append(tensor)
        return share(tensor)

    shared: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "share_memory_", share_at_first)
    loader = loader_of(dataset, workers=1)
    try:
        whole, last, full = next(loader), next(loader), next(loader)
    finally:
        loader.close()
    assert not whole.problem and not last.problem and whole.tokens
    assert full.problem.startswith("/dev/shm has no room for the updates of loader processes")
    assert "No space left on device" in full.problem and full.problem_code == errors.FAILED
    assert set(full.row_ids.tolist()) == {-1} and full.tokens == 0 and len(full.batches) == len(whole.batches)


def test_workers_end_with_a_killed_process(dataset):
    """What they made before is what a loader without workers makes."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = CONTEXT.Process(target=take_and_die, args=(dataset.folder, sender))
    process.start()
    assert receiver.poll(60)
    workers, batches = receiver.recv()
    process.join()
    assert process.exitcode == -signal.SIGKILL and len(workers) == 2
    wait_until(lambda: not any(map(is_alive, workers)), timeout=3)  # torch's own look at its parent comes every 5 s
    loader = loader_of(dataset)
    assert batches == [next(loader).batches[0].input_ids.tolist() for _ in range(3)]


def hand_made(folder, strategy="token"):
    """Rows of 12: [CLS] a a [SEP] b [SEP] | [CLS] c c [SEP] | pad pad, and one full single sequence; and their batch."""
    ids = np.array([[2, 10, 11, 3, 12, 3, 2, 13, 14, 3, 0, 0], [2, *range(20, 30), 3]], np.uint16)
    bounds = np.array([[[6, 4], [4, 4], [0, 0]], [[12, 12], [0, 0], [0, 0]]], np.uint16)
    isnext = np.array([[1, -1, -1], [-1, -1, -1]], np.int8)
    dataset = Dataset(make_dataset(folder, 2, seq_len=12, arrays=(ids, bounds, isnext)))
    masking = MaskingConfig(strategy=strategy)
    source = MaskedRows(dataset, vocabulary(), 1, 2, masking)
    buffers = source.make(np.arange(2), np.zeros(2, np.int64), masking)
    (batch,) = source.layout(2, masking).micro_batches(*map(torch.from_numpy, buffers), 2)
    assert (batch.tokens, batch.sequences) == (22, 3)
    assert batch.key_start.tolist() == [[0, 0, 0, 0, 0, 0, 6, 6, 6, 6, 0, 0], [0] * 12]
    return ids, batch


def test_a_batch_equals_the_hand_computed_one(tmp_path):
    ids, batch = hand_made(tmp_path)
    assert batch.row_ids.tolist() == [0, 1]
    assert batch.segment_ids.tolist() == [[0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0], [0] * 12]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 0, 0], list(range(12))]
    assert batch.key_end.tolist() == [[6, 6, 6, 6, 6, 6, 10, 10, 10, 10, 0, 0], [12] * 12]
    assert batch.lengths.tolist() == [[6, 4, 0], [12, 0, 0]] and batch.to("cpu").lengths.equal(batch.lengths)
    assert batch.cls_positions.tolist() == [[0, 6, 0], [12, 12, 12]]
    assert batch.nsp_labels.tolist() == [[1, -100, -100], [-100, -100, -100]] and batch.nsp_pairs == 1
    assert batch.mlm_positions.shape == batch.mlm_labels.shape == (2, 3)  # ceil(0.15 x 12) + 1
    used = batch.mlm_labels >= 0
    assert batch.predictions == int(used.sum()) and used[:, 0].all() and used[0, 1], "one prediction a sequence"
    assert (batch.mlm_labels[used].numpy() == ids.ravel()[batch.mlm_positions[used].numpy()]).all()
    assert (batch.mlm_positions[~used] == torch.tensor([[0], [12]]).expand(2, 3)[~used]).all()
    assert (batch.mlm_positions // 12 == torch.tensor([[0], [1]])).all()
    for name, tensor in batch.inputs().items():
        assert tensor.is_contiguous(), name
        assert tensor.dtype == (torch.int64 if name.endswith("labels") else torch.int32), name


def test_a_causal_batch_equals_the_hand_computed_one(tmp_path):
    ids, batch = hand_made(tmp_path, "causal")
    assert batch.input_ids.tolist() == ids.tolist() and batch.predictions == 19
    assert batch.key_end.tolist() == [[*range(1, 11), 0, 0], list(range(1, 13))]
    assert batch.mlm_labels.tolist() == [[10, 11, 3, 12, 3, 13, 14, 3, *[-100] * 4], [*range(20, 30), 3, -100]]
    assert batch.mlm_positions.tolist() == [[0, 1, 2, 3, 4, 6, 7, 8, 0, 0, 0, 0], [*range(12, 23), 12]]


@pytest.mark.parametrize(("strategy", "workers", "start"), [("token", 0, 0), ("word", 2, 4), ("span", 0, 1)])
def test_each_third_update_is_causal(dataset, strategy, workers, start):
    mix, plain = (MaskingConfig(strategy=strategy, causal_every=every) for every in (3, 0))
    mixed = {"masking": mix, "workers": workers}
    loaders = [loader_of(dataset, start_step=start, **options) for options in (mixed, {"masking": plain})]
    for step, (update, masked) in zip(range(start, start + 5), zip(*loaders, strict=True), strict=False):
        assert update.objective == ("causal" if step in (2, 5, 8) else "masked")
        assert (update.row_ids == masked.row_ids).all()
        for batch, other in zip(update.batches, masked.batches, strict=True):
            assert batch.causal == (update.objective == "causal")
            if batch.causal:
                assert batch.mlm_labels.shape[1] == 32 and batch.predictions == batch.tokens - batch.sequences
            else:
                assert all(batch.inputs()[name].equal(other.inputs()[name]) for name in TENSORS)
    for loader in loaders:
        loader.close()
    config = from_dict({"model": {"nsp": False}, "data": {"masking": mix.model_dump()}})
    assert not any(batch.causal for batch in fixed_batches(dataset, vocabulary(), config))


def test_lengths_are_compact_on_a_device(dataset):
    assert compact_lengths(torch.tensor([[6, 4, 0], [12, 0, 0]]).int(), 12).tolist() == [6, 4, 2, 12]
    assert compact_lengths(torch.tensor([[3, 0], [12, 0]]).int(), 12).tolist() == [3, 9, 12, 0]
    for batch in next(loader_of(dataset, micro_batch=16)).batches:
        compact = compact_lengths(batch.lengths, 32)
        there = batch.to("meta").lengths
        assert there.shape == compact.shape and there.dtype == torch.int32 and len(compact) % 16 == 0
        starts = (batch.key_start + torch.arange(16)[:, None] * 32)[batch.key_end > 0].unique()
        pads = [b * 32 + int(n) for b, n in enumerate(batch.lengths.sum(1)) if n < 32]
        offsets = attention_inputs("varlen", batch.key_start, batch.key_end, compact)[0]
        assert offsets.unique().tolist() == sorted([*starts.tolist(), *pads, 16 * 32])
        whole = attention_inputs("varlen", batch.key_start, batch.key_end, batch.lengths)[0]
        assert offsets.unique().equal(whole.unique()) and len(offsets) <= len(whole)


@pytest.mark.parametrize(("world", "micro", "limit"), [(1, 64, 1000), (2, 16, 5), (4, 7, 0)])
def test_evaluation_reads_each_row_once_under_one_mask(dataset, world, micro, limit):
    config = from_dict({"batch": {"micro_size": micro}})
    shares = [list(fixed_batches(dataset, vocabulary(), config, rank, world, limit)) for rank in range(world)]
    assert len({len(share) for share in shares}) == 1, "collectives need as many batches on every rank"
    whole = [b for share in shares for b in share]
    seen = np.concatenate([b.row_ids for b in whole])
    rows = min(ROWS, limit or ROWS)
    assert sorted(seen[seen >= 0].tolist()) == list(range(rows))
    for b in whole:
        filler = torch.from_numpy(b.row_ids < 0)
        assert b.input_ids.shape[0] == micro and (b.lengths.sum(1) > 0).all()
        assert (b.mlm_labels[filler] == -100).all() and (b.nsp_labels[filler] == -100).all()
    (reference,) = fixed_batches(dataset, vocabulary(), from_dict({"batch": {"micro_size": ROWS}}))
    masks = {int(r): b.input_ids[i].tolist() for b in whole for i, r in enumerate(b.row_ids) if r >= 0}
    assert masks == {r: reference.input_ids[r].tolist() for r in range(rows)}
    assert sum(b.predictions for b in whole) == int((reference.mlm_labels[:rows] >= 0).sum())
    assert sum(b.tokens for b in whole) == int((reference.key_end[:rows] > 0).sum())


def test_from_config_refuses_another_tokenizer(dataset, tmp_path):
    masking = {"rate": 0.3, "strategy": "word"}
    config = from_dict({"batch": {"global_size": 8, "micro_size": 4}, "data": {"workers": 0, "masking": masking}})
    ours = next(Loader.from_config(config, dataset, vocabulary(), start_step=2))
    options = {"global_batch": 8, "micro_batch": 4, "seed": config.seed, "masking": MaskingConfig(**masking)}
    assert ours.step == 2 and len(ours.batches) == 2
    for mine, other in zip(ours.batches, next(loader_of(dataset, start_step=2, **options)).batches, strict=True):
        assert not mine.causal and all(getattr(mine, name).equal(getattr(other, name)) for name in TENSORS)
        assert (mine.predictions, mine.tokens) == (other.predictions, other.tokens)
    with pytest.raises(ValueError, match=r"other\.txt: not the tokenizer"):
        Loader.from_config(config, dataset, Tokenizer.load(wordpiece.write(tmp_path / "other.txt")))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_counts_positions_from_its_origin(dataset, workers):
    """A phase whose updates are smaller or larger than those before it: update 7 begins at row 56."""
    plain = loader_of(dataset, global_batch=8, micro_batch=4, start_step=7)
    later = loader_of(dataset, global_batch=4, micro_batch=4, start_step=7, origin=28, workers=workers)
    expected = [row for _ in range(3) for row in next(plain).row_ids]
    assert [row for _ in range(6) for row in next(later).row_ids] == expected
    later.close()


def test_failed_reads_are_retried_and_then_class_4(tmp_path, monkeypatch):
    """Not a mistake of the user's, which would never be started again."""
    failures = []

    def stat(path, **options):
        if path.suffix == ".tar" and failures:
            raise failures.pop()
        return os.stat(path, **options)

    monkeypatch.setattr(errors, "WAITS", (0.0, 0.0))
    dataset = Dataset(make_dataset(tmp_path, 64))
    monkeypatch.setattr(Path, "stat", stat)
    for times, code in ((2, errors.OK), (3, errors.FAILED)):
        failures[:] = [OSError(errno.ESTALE, os.strerror(errno.ESTALE), "shard") for _ in range(times)]
        fresh = pickle.loads(pickle.dumps(dataset))
        update = next(loader_of(fresh, global_batch=8))
        assert (update.problem_code, bool(update.problem)) == (code, bool(code))
        assert (update.tokens > 0) == (not code)


@pytest.mark.parametrize("strategy", ["token", "causal"])
def test_the_work_of_an_update_does_not_depend_on_ranks(dataset, strategy):
    """Fillers, which are rows of one sequence, are none of it."""
    found, masking = [], MaskingConfig(strategy=strategy)
    for world, micro in ((1, 15), (1, 4), (4, 7), (2, 16)):
        parts = [
            next(loader_of(dataset, global_batch=60, micro_batch=micro, rank=rank, world=world, masking=masking))
            for rank in range(world)
        ]
        counts = [PretrainingMeter.count_work(SimpleNamespace(_model=tiny.config().model), part) for part in parts]
        found.append({name: sum(count[name] for count in counts) for name in counts[0]})
    assert found == [found[0]] * 4 and found[0]["attending pairs"] > found[0]["perf/tokens_per_sec"] > 0


def test_the_digest_does_not_depend_on_ranks(dataset):
    hashes = (key(int.from_bytes(b"digest"), epoch, row) for epoch in range(2) for row in range(ROWS))
    expected = (5 + sum(hashes)) % 2**64
    for world in (1, 2, 5):
        digests = [RowDigest(5) for _ in range(world)]
        for rank, digest in enumerate(digests):
            loader = loader_of(dataset, global_batch=60, micro_batch=7, rank=rank, world=world)
            for _ in range(6):
                digest.add(next(loader))
        sums = {name: sum(digest.counts[name] for digest in digests) for name in digests[0].counts}
        assert digests[0].total(sums) == expected, world
