"""Several datasets as one: exact shares, every row once an epoch of its dataset, versions that join where an epoch ends."""

import os

import numpy as np
import pytest

from megabert.data import mixture
from megabert.data.loader import Loader
from megabert.data.mixture import WINDOW, Mixture, Segment, open_mixture, open_versions
from megabert.data.order import RowOrder
from megabert.data.shards import DamagedRow, Dataset
from tests.helpers.rows import make_dataset, vocabulary

SEED = 3


@pytest.fixture
def folders(tmp_path):
    make_dataset(tmp_path / "a", 60)
    make_dataset(tmp_path / "b", 44, slots=5, seed=1)
    make_dataset(tmp_path / "a" / "added-001", 20, slots=4, seed=2)
    return str(tmp_path / "a"), str(tmp_path / "b")


def test_a_mixture_holds_each_share_and_each_row_once_an_epoch(folders):
    mixed = open_mixture(folders[0], {folders[1]: 0.3})
    ids, epochs = mixed.order(SEED, np.arange(3 * WINDOW))
    second = ids >= 80
    assert mixed.counts == [2867, 1229] and second.reshape(3, -1).sum(1).tolist() == [1229] * 3
    assert np.abs(second.reshape(-1, 256).mean(1) - 0.3).max() < 0.12  # spread, not one after the other
    for first, rows, here in ((0, 80, ~second), (80, 44, second)):
        for epoch in range(int(epochs[here].max())):  # the last is not whole
            found = np.sort(ids[here & (epochs == epoch)])
            assert (found == first + np.arange(rows)).all()
    # In any order of asking, and of a part alone in the order in which it alone would give its rows.
    some = np.random.default_rng(0).permutation(3 * WINDOW)[:500]
    assert (mixed.order(SEED, some)[0] == ids[some]).all()
    other = mixed.order(SEED + 1, np.arange(WINDOW))[0]
    assert (other != ids[:WINDOW]).mean() > 0.5


def test_rows_of_all_parts_are_read_and_padded(folders):
    mixed = open_mixture(folders[0], {folders[1]: 0.3})
    a, added, b = Dataset(folders[0]), Dataset(f"{folders[0]}/added-001"), Dataset(folders[1])
    rows = mixed.read(np.array([100, 3, 61, 60]))
    for i, (part, row) in enumerate(((b, 20), (a, 3), (added, 1), (added, 0))):
        own = part.read(np.array([row]))
        slots = own.isnext.shape[1]
        assert (rows.ids[i] == own.ids[0]).all() and (rows.isnext[i, :slots] == own.isnext[0]).all()
        assert (rows.bounds[i, :slots] == own.bounds[0]).all()
        assert not rows.bounds[i, slots:].any() and (rows.isnext[i, slots:] == -1).all()
    with open(f"{folders[1]}/shard-000000.tar", "r+b") as file:
        file.seek(2000)
        file.write(b"\xff" * 2000)
    with pytest.raises(DamagedRow, match=r"b/shard-000000\.tar"):
        mixed.read(np.arange(124))
    assert set(mixed.examine(np.arange(124))[1]) <= set(range(80, 124))


def test_statistics_weigh_the_trained_rows(tmp_path):
    """Shards are not looked at: a plan may be made where there are none."""
    counts = {"a": (60, 4, 100), "a/added-001": (20, 2, 60), "b": (44, 8, 128)}  # rows; sequences, tokens a row
    for name, (rows, sequences, tokens) in counts.items():
        made = {"sequences": rows * sequences, "tokens": rows * tokens, "fill": 0.5}
        make_dataset(tmp_path / name, rows, slots=8, seq_len=128, statistics=made)
        (tmp_path / name / "shard-000000.tar").unlink()
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    grown = open_mixture(a, {}, shards=False).manifest
    assert grown.statistics == pytest.approx({"sequences": 60 * 4 + 20 * 2, "tokens": 60 * 100 + 20 * 60})
    mixed = open_mixture(a, {b: 0.25}, shards=False).manifest
    assert mixed.rows == 124 and mixed.statistics["tokens"] / 124 == pytest.approx(0.75 * 90 + 0.25 * 128)
    assert mixed.statistics["sequences"] / 124 == pytest.approx(0.75 * 3.5 + 0.25 * 8)
    with pytest.raises(ValueError, match="is missing"):
        open_mixture(a, {})


def test_added_shards_take_part_in_the_order(folders):
    ids = open_versions(folders[0]).order(SEED, np.arange(80))[0]
    assert (ids == RowOrder(np.array([60, 20]), 8).row_ids(SEED, 0, np.arange(80))).all()


@pytest.mark.parametrize("world", [1, 2])
def test_loaders_cut_a_mixture_like_a_dataset(folders, world):
    def rows(world, micro, start):
        options = {"global_batch": 24, "micro_batch": micro, "seed": SEED, "world": world, "start_step": start}
        dataset = open_mixture(folders[0], {folders[1]: 0.3})
        loaders = [Loader(dataset, vocabulary(), rank=rank, **options) for rank in range(world)]
        updates = [next(loader) for loader in loaders]
        return {
            (int(row), int(batch.epochs[i])): batch.input_ids[i].tolist()
            for update in updates
            for batch in update.batches
            for i, row in enumerate(batch.row_ids)
        }

    assert rows(world, 3, 5) == rows(1, 24, 5)


def test_added_text_joins_at_the_end_of_an_epoch(folders, tmp_path):
    before = Dataset(folders[0])
    old, _ = before.order(SEED, np.arange(180))
    state = {"dataset": before.manifest.fingerprint}
    dataset = open_versions(folders[0])
    assert dataset.rows == 80 and dataset.segments == [Segment(2, 0, 0)]
    assert mixture.resume(dataset, state, 70)  # ten rows into the second epoch
    assert dataset.segments == [Segment(1, 0, 0), Segment(2, 120, 2)]
    ids, epochs = dataset.order(SEED, np.arange(280))
    assert (ids[:120] == old[:120]).all() and epochs[:120].max() == 1
    for epoch in (2, 3):
        assert np.sort(ids[epochs == epoch]).tolist() == list(range(80))
    assert [dataset.epoch(p) for p in (0, 60, 119, 120, 199, 200)] == [0, 1, 1, 2, 2, 3]
    # What a checkpoint then says gives the same order again, and a third version replaces one that has not begun.
    state = mixture.identity(dataset)
    again = open_versions(folders[0])
    assert mixture.resume(again, state, 90) and (again.order(SEED, np.arange(280))[0] == ids).all()
    make_dataset(tmp_path / "a" / "added-002", 8, seed=4)
    third = open_versions(folders[0])
    assert mixture.resume(third, state, 90) and third.segments == [Segment(1, 0, 0), Segment(3, 120, 2)]
    late = open_versions(folders[0])
    assert mixture.resume(late, state, 121)
    assert late.segments == [Segment(1, 0, 0), Segment(2, 120, 2), Segment(3, 200, 3)]
    start = open_versions(folders[0])
    assert mixture.resume(start, {"dataset": before.manifest.fingerprint}, 0)
    assert start.segments == [Segment(3, 0, 0)]


def test_other_data_is_not_resumed(folders):
    mixed = open_mixture(folders[0], {folders[1]: 0.3})
    state = mixture.identity(mixed)
    assert [set(part) for part in state["datasets"]] == [
        {"folder", "fingerprint", "segments"},
        {"folder", "fingerprint"},
    ]
    assert mixture.resume(open_mixture(folders[0], {folders[1]: 0.3}), state, 50)
    assert not mixture.resume(open_mixture(folders[0], {folders[1]: 0.4}), state, 50)
    assert not mixture.resume(open_versions(folders[0]), state, 50)
    assert not mixture.resume(Dataset(folders[1]), state, 50)
    assert not mixture.resume(Dataset(folders[1]), {"dataset": "e" * 64}, 50)
    assert not mixture.resume(Dataset(folders[0]), mixture.identity(open_versions(folders[0])), 50)
    # Text added to a part of a mixture joins at the end of an epoch of that part.
    less = Mixture([Dataset(folders[0]), Dataset(folders[1])], [0.7, 0.3])
    more = open_mixture(folders[0], {folders[1]: 0.3})
    assert mixture.resume(more, mixture.identity(less), 5000)
    assert more.parts[0].segments == [Segment(1, 0, 0), Segment(2, 5760, 96)]  # 2 windows of 2,867 are 95.6 epochs


def test_mismatched_datasets_are_refused_by_name(folders, tmp_path):
    make_dataset(tmp_path / "long", 8, seq_len=64)
    make_dataset(tmp_path / "single", 8, options={"nsp": False})
    for name, message in (("long", "its row length is 64"), ("single", "its sentence pairs is False")):
        with pytest.raises(ValueError, match=f"{name}: {message}"):
            open_mixture(folders[1], {str(tmp_path / name): 0.5})
    for mix in ({folders[0]: 1.0}, {folders[0]: -0.1}, {folders[1]: 0.5}):
        with pytest.raises(ValueError, match=r"data\.mix"):
            open_mixture(folders[1], mix)


def test_large_datasets_together_keep_few_files_open(tmp_path, monkeypatch):
    monkeypatch.setattr(mixture, "OPEN_SHARDS", 8)
    names = [str(make_dataset(tmp_path / name, 500, seed=i)) for i, name in enumerate("abcd")]  # 8 shards each
    make_dataset(tmp_path / "a" / "added-001", 100, seed=9)
    mixed = open_mixture(names[0], dict.fromkeys(names[1:], 0.25))
    before = len(os.listdir("/proc/self/fd"))
    rows = mixed.read(np.arange(mixed.rows))
    assert len(os.listdir("/proc/self/fd")) - before <= 8
    assert (rows.ids[600:1100] == Dataset(names[1]).read(np.arange(500)).ids).all()
