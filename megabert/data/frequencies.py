"""Token frequencies of a dataset, from rows spread evenly over it."""

from __future__ import annotations

import numpy as np

from megabert.data.mixture import AnyDataset

TOKENS = 1 << 22  # counted at most: the error of a frequency of 1e-5 is then a sixth of it
CHUNK = 1 << 10  # rows read at once


def token_counts(dataset: AnyDataset, predicted: np.ndarray) -> np.ndarray:
    """int64 [V]: how often each id that is `predicted` (bool [V]; not padding) occurs in about TOKENS tokens, 0 for the others.

    The same for the same dataset. Damaged rows of a tolerant one are left out; otherwise the first one raises DamagedRow.
    """
    manifest = dataset.manifest
    rows = min(manifest.rows, -(-TOKENS // manifest.seq_len))
    chosen = np.arange(rows) * manifest.rows // rows
    counts = np.zeros(len(predicted), np.int64)
    for first in range(0, rows, CHUNK):
        some = chosen[first : first + CHUNK]
        found = (
            dataset.examine(some)[0] if dataset.tolerant else dataset.read(some)
        )  # a damaged row is padding
        counts += np.bincount(found.ids.ravel(), minlength=len(predicted))
    return counts * predicted
