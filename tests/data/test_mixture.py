"""Several datasets as one: exact shares, every row once an epoch of its dataset, counts of tokens."""

import os
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from megabert.data import mixture
from megabert.data.mixture import WINDOW, open_mixture, token_counts
from megabert.data.shards import DamagedRow, Dataset
from tests.helpers.rows import VOCAB, flip, make_dataset, make_rows

SEED = 3
PREDICTED = np.arange(VOCAB) >= 5


@pytest.fixture
def folders(tmp_path):
    make_dataset(tmp_path / "a", 60)
    make_dataset(tmp_path / "b", 44, slots=5, seed=1)
    return str(tmp_path / "a"), str(tmp_path / "b")


def test_mixtures_hold_each_share_and_row_once(folders):
    mixed = open_mixture(folders[0], {folders[1]: 0.3})
    ids, epochs = mixed.order(SEED, np.arange(3 * WINDOW))
    second = ids >= 60
    assert mixed.counts == [2867, 1229] and second.reshape(3, -1).sum(1).tolist() == [1229] * 3
    assert np.abs(second.reshape(-1, 256).mean(1) - 0.3).max() < 0.12  # spread, not one after the other
    for first, rows, here in ((0, 60, ~second), (60, 44, second)):
        for epoch in range(int(epochs[here].max())):  # the last is not whole
            found = np.sort(ids[here & (epochs == epoch)])
            assert (found == first + np.arange(rows)).all()
    some = np.random.default_rng(0).permutation(3 * WINDOW)[:500]
    assert (mixed.order(SEED, some)[0] == ids[some]).all()
    other = mixed.order(SEED + 1, np.arange(WINDOW))[0]
    assert (other != ids[:WINDOW]).mean() > 0.5


def test_rows_of_all_parts_are_read_and_padded(folders):
    mixed = open_mixture(folders[0], {folders[1]: 0.3})
    rows = mixed.read(np.array([80, 3, 61, 60]))
    for i, (part, row) in enumerate(((1, 20), (0, 3), (1, 1), (1, 0))):
        own = Dataset(folders[part]).read(np.array([row]))
        slots = own.isnext.shape[1]
        assert (rows.ids[i] == own.ids[0]).all() and (rows.isnext[i, :slots] == own.isnext[0]).all()
        assert (rows.bounds[i, :slots] == own.bounds[0]).all()
        assert not rows.bounds[i, slots:].any() and (rows.isnext[i, slots:] == -1).all()
    flip(Path(folders[1], "shard-000000.tar"), 700)  # row 0
    with pytest.raises(DamagedRow, match=r"b/shard-000000\.tar"):
        mixed.read(np.arange(104))


def test_statistics_weigh_the_trained_rows(tmp_path):
    """Shards are not looked at: a plan may be made where there are none."""
    counts = {"a": (60, 4, 100), "b": (44, 8, 128)}  # rows; sequences, tokens a row
    for name, (rows, sequences, tokens) in counts.items():
        made = {"sequences": rows * sequences, "tokens": rows * tokens, "fill": 0.5}
        (make_dataset(tmp_path / name, rows, slots=8, seq_len=128, statistics=made) / "shard-000000.tar").unlink()
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    mixed = open_mixture(a, {b: 0.25}, shards=False).manifest
    assert mixed.rows == 104 and mixed.statistics["tokens"] / 104 == pytest.approx(0.75 * 100 + 0.25 * 128)
    assert mixed.statistics["sequences"] / 104 == pytest.approx(0.75 * 4 + 0.25 * 8)
    with pytest.raises(ValueError, match="is missing"):
        open_mixture(a, {})


def test_a_mixture_is_identified_by_parts_and_shares(folders):
    mixed = open_mixture(folders[0], {folders[1]: 0.3})
    alone = Dataset(folders[0]).identity
    assert alone == {"dataset": Dataset(folders[0]).manifest.fingerprint}
    found = mixed.identity
    assert found["datasets"][0] == {"folder": folders[0], "fingerprint": alone["dataset"]}
    others = [open_mixture(folders[0], {folders[1]: 0.4}), open_mixture(folders[1], {folders[0]: 0.7})]
    assert len({one["dataset"] for one in (alone, found, *(other.identity for other in others))}) == 4
    assert mixture.from_json(mixture.to_json(mixed), {folders[1]: 0.3}).identity == found


def test_mismatched_datasets_are_refused_by_name(folders, tmp_path):
    make_dataset(tmp_path / "long", 8, seq_len=64)
    make_dataset(tmp_path / "single", 8, options={"nsp": False})
    for name, message in (("long", "its row length is 64"), ("single", "its sentence pairs is False")):
        with pytest.raises(ValueError, match=f"{name}: {message}"):
            open_mixture(folders[1], {str(tmp_path / name): 0.5})
    for mix in ({folders[0]: 1.0}, {folders[0]: -0.1}, {folders[1]: 0.5}, {folders[0]: 0.9 / WINDOW}):
        with pytest.raises(ValueError, match=r"data\.mix"):
            open_mixture(folders[1], mix)
    for share, counts in ((1 / WINDOW, [WINDOW - 1, 1]), (1 - 1 / WINDOW, [1, WINDOW - 1])):
        assert open_mixture(folders[1], {folders[0]: share}).counts == counts
    with pytest.raises(ValueError, match=rf"copy: is the dataset of {folders[1]}; name it once"):
        open_mixture(folders[1], {str(shutil.copytree(folders[1], tmp_path / "copy")): 0.5})
    with pytest.raises(ValueError, match=r"^file:///data/manifest.json: unsupported URL scheme; "):
        open_mixture("file:///data", {})


def test_large_datasets_together_keep_few_files_open(tmp_path, monkeypatch):
    monkeypatch.setattr(mixture, "OPEN_SHARDS", 8)
    names = [str(make_dataset(tmp_path / name, 500, seed=i)) for i, name in enumerate("abcd")]  # 8 shards each
    mixed = open_mixture(names[0], dict.fromkeys(names[1:], 0.25))
    before = len(os.listdir("/proc/self/fd"))
    rows = mixed.read(np.arange(mixed.rows))
    assert len(os.listdir("/proc/self/fd")) - before <= 8
    assert (rows.ids[500:1000] == Dataset(names[1]).read(np.arange(500)).ids).all()


def test_tokens_are_counted_at_even_places(tmp_path, monkeypatch):
    arrays = make_rows(100, 32, 3)
    dataset = Dataset(make_dataset(tmp_path, 100, arrays=arrays))
    monkeypatch.setattr(mixture, "COUNTED_TOKENS", 40 * 32)
    monkeypatch.setattr(mixture, "COUNTED_PLACES", 8)
    monkeypatch.setattr(mixture, "COUNTED_ROWS", 16)
    taken = [i * 100 // 8 + row for i in range(8) for row in range(5)]
    ids, bounds, _ = arrays
    plain = Counter(token for row in taken for token in ids[row, : bounds[row, :, 0].sum()].tolist())
    assert token_counts(dataset, PREDICTED).tolist() == [plain[i] if i >= 5 else 0 for i in range(VOCAB)]
    assert plain[0] == 0 and (ids[taken] == 0).any(), "id 0 may be a token: padding is not counted"
    assert token_counts(dataset, np.ones(VOCAB, bool)).tolist() == [plain[i] for i in range(VOCAB)]
    flip(dataset.folder / "shard-000000.tar", 700)
    with pytest.raises(DamagedRow, match="block 0, row 0"):
        token_counts(Dataset(dataset.folder), PREDICTED)


def test_tokens_of_a_mixture_are_counted_in_its_shares(folders):
    mixed, (one, two) = open_mixture(folders[0], {folders[1]: 0.75}), map(Dataset, folders)
    a_row = [token_counts(part, PREDICTED) / part.rows for part in (one, two)]
    found = token_counts(mixed, PREDICTED)
    assert np.abs(found - (0.25 * a_row[0] + 0.75 * a_row[1]) * mixed.rows).max() <= 0.5 and found.sum() > 1000
