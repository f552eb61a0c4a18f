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


def test_rows_are_counted_at_even_places(tmp_path, monkeypatch):
    arrays = make_rows(100, 32, 3)
    dataset = Dataset(make_dataset(tmp_path, 100, arrays=arrays))
    monkeypatch.setattr(mixture, "COUNTED_TOKENS", 40 * 32)
    monkeypatch.setattr(mixture, "COUNTED_PLACES", 8)
    monkeypatch.setattr(mixture, "COUNTED_ROWS", 16)
    taken = [i * 100 // 8 + row for i in range(8) for row in range(5)]
    plain = Counter(arrays[0][taken].ravel().tolist())
    assert token_counts(dataset, PREDICTED).tolist() == [plain[i] if i >= 5 else 0 for i in range(VOCAB)]


def test_damaged_rows_are_left_out_or_refused(tmp_path):
    arrays = make_rows(64, 32, 3)
    folder = make_dataset(tmp_path, 64, arrays=arrays)
    flip(folder, 700)  # row 0
    plain = Counter(arrays[0][1:].ravel().tolist())
    counts = token_counts(Dataset(folder, tolerant=True), PREDICTED)
    assert counts.tolist() == [plain[i] if i >= 5 else 0 for i in range(VOCAB)]
    with pytest.raises(DamagedRow, match="block 0, row 0"):
        token_counts(Dataset(folder), PREDICTED)
