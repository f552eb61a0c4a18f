"""Token frequencies of a dataset, from rows at places spread evenly over it."""

from __future__ import annotations

import numpy as np

from megabert.data.mixture import AnyDataset

TOKENS = 1 << 22  # counted at most: the error of a frequency of 1e-5 is then a sixth of it
PLACES = 64  # where rows are taken that lie together, so that few shards are opened, or fetched
CHUNK = 1 << 12  # rows read at once


def token_counts(dataset: AnyDataset, predicted: np.ndarray) -> np.ndarray:
    """int64 [V]: how often each id that is `predicted` (bool [V]; not padding) occurs in about TOKENS tokens, 0 for the others.

    The same for the same dataset. Damaged rows of a tolerant one are left out; otherwise the first one raises DamagedRow.
    """
    manifest = dataset.manifest
    places = np.arange(PLACES) * manifest.rows // PLACES
    together = -(-TOKENS // manifest.seq_len // PLACES)
    chosen = (places[:, None] + np.arange(together)).ravel()
    if len(chosen) >= manifest.rows:
        chosen = np.arange(manifest.rows)
    counts = np.zeros(len(predicted), np.int64)
    for first in range(0, len(chosen), CHUNK):
        some = chosen[first : first + CHUNK]
        dataset.read_ahead(some)
        # a damaged row is padding
        found = dataset.examine(some)[0] if dataset.tolerant else dataset.read(some)
        counts += np.bincount(found.ids.ravel(), minlength=len(predicted))
    return counts * predicted
