"""What one worker has learned of a word no other worker of the machine learns again.

Each worker appends to a log of its own, in memory that all of them share, and reads those of the others as far as they
are published. Only whole records are ever seen, a record never changes, and a full log stays silent: common words come
first. Which words are in a log depends on timing; what is said of a word does not.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from multiprocessing import get_context
from typing import Any

import numpy as np

WORDS = 3 << 19  # in all logs together: at most 75 MB with their tokens, used as they fill
TOKENS_A_WORD = 8  # room for; rare words have three
KEY_BYTES = 64  # names the encoder
_here: Channels | None = None  # of this process, in a worker


class Channels:
    """The logs of `workers` processes, which are forked after this is made. Each calls `join` first."""

    def __init__(self, workers: int) -> None:
        self._words = WORDS // workers
        self._records = [
            mmap.mmap(-1, self._words * 64) for _ in range(workers)
        ]  # a record has 64 bytes or fewer
        self._tokens = [mmap.mmap(-1, self._words * TOKENS_A_WORD * 4) for _ in range(workers)]
        self._sizes = np.frombuffer(mmap.mmap(-1, 16 * workers), np.int64).reshape(workers, 2)
        self._key = mmap.mmap(-1, KEY_BYTES)
        self._joined: Any = get_context("fork").Value("i", 0)

    def join(self) -> None:
        """Give this process a log of its own."""
        global _here
        with self._joined.get_lock():
            self.own = self._joined.value
            self._joined.value += 1
        assert self.own < len(self._records), "more workers than logs"
        _here = self

    def opened_for(self, key: bytes) -> bool:
        """Whether words of the encoder `key` are shared: the first that any worker asks for."""
        key = key[:KEY_BYTES].ljust(KEY_BYTES)
        with self._joined.get_lock():
            if not any(self._key[:]):
                self._key[:] = key
        return self._key[:] == key


class Exchange:
    """One worker's end of the logs: `record` has the field "length", the number of a word's tokens."""

    def __init__(self, channels: Channels, record: np.dtype, token: np.dtype) -> None:
        assert record.itemsize <= 64 and token.itemsize <= 4, (record, token)
        self._own, self._sizes, self._words = channels.own, channels._sizes, channels._words
        self._records = [np.frombuffer(m, record, self._words) for m in channels._records]
        self._tokens = [np.frombuffer(m, token, self._words * TOKENS_A_WORD) for m in channels._tokens]
        self._seen = self._sizes.copy()
        self._seen[:] = 0

    def publish(self, records: np.ndarray, tokens: np.ndarray) -> None:
        """Tell the others of words; `tokens` are those of all `records`, in order."""
        words, used = self._sizes[self._own].tolist()
        if words + len(records) > self._words or used + len(tokens) > self._words * TOKENS_A_WORD:
            return
        self._records[self._own][words : words + len(records)] = records
        self._tokens[self._own][used : used + len(tokens)] = tokens
        self._sizes[self._own, 1] = used + len(tokens)
        self._sizes[self._own, 0] = words + len(records)  # last: what is counted is there

    def news(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(records, tokens) that each other worker has published since the last call."""
        for other, (words, used) in enumerate(self._seen.tolist()):
            end = int(self._sizes[other, 0])
            if other != self._own and end > words:
                records = self._records[other][words:end]
                after = used + int(records["length"].sum())
                self._seen[other] = end, after
                yield records, self._tokens[other][used:after]


def open_here(key: bytes, record: np.dtype, token: np.dtype) -> Exchange | None:
    """This worker's exchange for the encoder `key`; None outside of a pool, or where another encoder is shared."""
    if _here is None or not _here.opened_for(key):
        return None
    return Exchange(_here, record, token)
