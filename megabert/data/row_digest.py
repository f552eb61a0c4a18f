"""Digest of the rows a run saw: a sum of hashes, the same whatever the order, the ranks, the restarts.

Each row of each update adds the 64-bit hash of (row id, epoch) to `row_digest`, modulo 2^64. A row seen twice in an epoch,
left out or taken from another epoch changes the sum, so two runs that saw the same rows as often have the same digest,
and others do not (2^-64 by chance). Damaged rows, which were left out, are counted and not hashed.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from megabert.data.batch import VACANT, Update
from megabert.data.masking import stream_keys

DIGEST_STREAM = 0x646967657374  # keeps these hashes apart from order and masks
MODULUS = 1 << 64


def row_digest(row_ids: np.ndarray, epochs: np.ndarray) -> int:
    """Sum modulo 2^64 of the hashes of (row id, epoch), both int64 [n]; rows with a negative id are fillers."""
    real = row_ids >= 0
    return int(stream_keys(DIGEST_STREAM, epochs[real], row_ids[real]).sum(dtype=np.uint64))


class RowDigest:
    """Rows seen and rows left out since the run's first update, on all ranks together."""

    def __init__(self, digest: int = 0, damaged: int = 0) -> None:
        """`digest` and `damaged` are those of the updates before this process."""
        self._digest, self._damaged = digest, damaged
        # of this rank's rows since
        self._own_digest = self._own_damaged = 0
        self._reported: set[int] = set()

    def add(self, update: Update) -> list[str]:
        """One more update of this rank; gives what is to be said about damaged rows, once for each row."""
        row_ids = update.row_ids
        self._own_digest += row_digest(row_ids, update.epochs)
        self._own_damaged += int(((row_ids < 0) & (row_ids != VACANT)).sum())
        new = {row: text for row, text in update.damage.items() if row not in self._reported}
        self._reported |= new.keys()
        return list(new.values())

    @property
    def counts(self) -> dict[str, int]:
        """This rank's rows; the digest in halves, whose sums over any number of ranks fit 64 bits."""
        digest = self._own_digest % MODULUS
        return {"digest high": digest >> 32, "digest low": digest & 0xFFFFFFFF, "damaged": self._own_damaged}

    def totals(self, sums: Mapping[str, int]) -> dict[str, int]:
        """{"row_digest", "damaged_rows"} of all ranks, from the `sums` of their counts ({}: none since)."""
        own = (sums.get("digest high", 0) << 32) + sums.get("digest low", 0)
        return {"row_digest": (self._digest + own) % MODULUS, "damaged_rows": self._damaged + sums.get("damaged", 0)}
