"""What one worker has learned of a word no other worker of the machine learns again.

Each worker appends to a log of its own, in memory that all of them share, and looks into those of the others for words that it
does not know. A record never changes, and a full log takes no more: common words come first. Which words are in a log
depends on timing; what is said of a word does not.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from multiprocessing import get_context
from typing import Any

import numpy as np

from data_prep.common import lexicon

WORDS = 3 << 19  # in all logs together: at most 130 MB with tokens and indices, used as they fill
TOKENS_A_WORD = 8  # room for; rare words have three
RECORD_BYTES, TOKEN_BYTES = 64, 4  # room for
KEY_BYTES = 64  # name the encoder
_here: Channels | None = None  # of this process, in a worker


class Channels:
    """The logs of `workers` processes, which are forked after this is made. Each calls `join` first."""

    def __init__(self, workers: int) -> None:
        self.words = WORDS // workers
        places = 1 << (2 * self.words).bit_length()
        sizes = (self.words * RECORD_BYTES, self.words * TOKENS_A_WORD * TOKEN_BYTES, places * 8, places * 4)
        self.logs = [[mmap.mmap(-1, size) for size in sizes] for _ in range(workers)]
        self.sizes = np.frombuffer(mmap.mmap(-1, 16 * workers), np.int64).reshape(workers, 2)  # words, tokens
        # Whoever holds it sees all that was written before it was let go, on every kind of processor.
        self.lock: Any = get_context("fork").Lock()
        self._key = mmap.mmap(-1, KEY_BYTES)
        self._joined: Any = get_context("fork").Value("i", 0)

    def join(self) -> None:
        """Give this process a log of its own."""
        global _here
        with self._joined.get_lock():
            self.own = self._joined.value
            self._joined.value += 1
        assert self.own < len(self.logs), "more workers than logs"
        _here = self

    def opened_for(self, key: bytes) -> bool:
        """Whether words of the encoder `key` are shared: the first that any worker asks for."""
        key = key[:KEY_BYTES].ljust(KEY_BYTES)
        with self.lock:
            if not any(self._key[:]):
                self._key[:] = key
        return self._key[:] == key


class Exchange:
    """One worker's end of the logs: `record` has the fields "key", a nonzero hash, "start" and "length" (of its tokens)."""

    def __init__(self, channels: Channels, record: np.dtype, token: np.dtype) -> None:
        assert record.itemsize <= RECORD_BYTES and token.itemsize <= TOKEN_BYTES, (record, token)
        self._channels, self._words = channels, channels.words
        types: Any = (
            (record, self._words),
            (token, self._words * TOKENS_A_WORD),
            (np.uint64, -1),
            (np.int32, -1),
        )
        self._logs = [
            [np.frombuffer(m, dtype, count) for m, (dtype, count) in zip(log, types, strict=True)]
            for log in channels.logs
        ]

    def publish(self, records: np.ndarray, tokens: np.ndarray) -> None:
        """Tell the others of words that are in no log; `tokens` are those of all `records`, in order."""
        size = self._channels.sizes[self._channels.own]
        words, used = size.tolist()
        if words + len(records) > self._words or used + len(tokens) > self._words * TOKENS_A_WORD:
            return
        log, all_tokens, keys, values = self._logs[self._channels.own]
        new = log[words : words + len(records)]
        new[:] = records
        new["start"] = used + np.cumsum(records["length"]) - records["length"]
        all_tokens[used : used + len(tokens)] = tokens
        lexicon.insert(keys, values, records["key"], np.arange(words, words + len(records)))
        with self._channels.lock:
            size[:] = words + len(records), used + len(tokens)

    def find(self, wanted: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """(which of the hashes `wanted`, their records, tokens of all these records in order) of each log that has any."""
        with self._channels.lock:
            published = self._channels.sizes[:, 0].tolist()
        left = np.arange(len(wanted))
        for (records, tokens, keys, values), count in zip(self._logs, published, strict=True):
            if not count:
                continue
            number = lexicon.find(keys, values, wanted[left])
            # A place of the index that is being filled may show its key before its number.
            known = (number >= 0) & (number < count)
            known[known] = records["key"][number[known]] == wanted[left[known]]
            if known.any():
                found = records[number[known]]
                lengths = found["length"].astype(np.int64)
                source = np.repeat(found["start"] - (np.cumsum(lengths) - lengths), lengths)
                yield left[known], found, tokens[source + np.arange(len(source))]
                left = left[~known]


def open_here(key: bytes, record: np.dtype, token: np.dtype) -> Exchange | None:
    """This worker's exchange for the encoder `key`; None outside of a pool, or where another encoder is shared."""
    if _here is None or not _here.opened_for(key):
        return None
    return Exchange(_here, record, token)
