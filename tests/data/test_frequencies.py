"""Counts of tokens against a plain count of the same rows."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from megabert.data import mixture
from megabert.data.mixture import token_counts
from megabert.data.shards import DamagedRow, Dataset
from tests.data.test_loader_damage import flip
from tests.helpers.rows import VOCAB, make_dataset, make_rows

PREDICTED = np.arange(VOCAB) >= 5


def test_every_id_is_counted_and_no_special_one(tmp_path):
    arrays = make_rows(100, 32, 3)
    counts = token_counts(Dataset(make_dataset(tmp_path, 100, arrays=arrays)), PREDICTED)
    plain = Counter(arrays[0].ravel().tolist())
    assert counts.tolist() == [plain[i] if i >= 5 else 0 for i in range(VOCAB)]


def test_of_a_large_dataset_rows_are_taken_evenly(tmp_path, monkeypatch):
    arrays = make_rows(100, 32, 3)
    dataset = Dataset(make_dataset(tmp_path, 100, arrays=arrays))
    monkeypatch.setattr(mixture, "COUNTED_TOKENS", 40 * 32)
    monkeypatch.setattr(mixture, "COUNTED_PLACES", 8)
    monkeypatch.setattr(mixture, "COUNTED_ROWS", 16)
    taken = [i * 100 // 8 + row for i in range(8) for row in range(5)]
    plain = Counter(arrays[0][taken].ravel().tolist())
    assert token_counts(dataset, PREDICTED).tolist() == [plain[i] if i >= 5 else 0 for i in range(VOCAB)]


def test_a_damaged_row_is_left_out_or_refused_as_the_dataset_says(tmp_path):
    arrays = make_rows(64, 32, 3)
    folder = make_dataset(tmp_path, 64, arrays=arrays)
    flip(folder, 700)  # row 0
    plain = Counter(arrays[0][1:].ravel().tolist())
    counts = token_counts(Dataset(folder, tolerant=True), PREDICTED)
    assert counts.tolist() == [plain[i] if i >= 5 else 0 for i in range(VOCAB)]
    with pytest.raises(DamagedRow, match="block 0, row 0"):
        token_counts(Dataset(folder), PREDICTED)
