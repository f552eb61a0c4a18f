"""Random access to the unpacked text of a file: the file itself, or the spools of a packed one.

A spool is a zstd file of some MB of text in the work folder. An index, a JSON list of (name, unpacked bytes), gives the
spools of a file in order.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate

import zstandard

from data_prep.common.errors import BadInput
from data_prep.common.records import FileRange
from data_prep.readers.decompress import PLAIN_CHUNK, read_chunks
from data_prep.readers.files import open_regular

Spool = tuple[str, int]  # name in the work folder, and unpacked bytes


class PlainText:
    """Text of a plain file."""

    def __init__(self, path: str) -> None:
        self._path = path

    def chunks(self, begin: int) -> Iterator[bytes]:
        """The bytes from `begin` on, about 1 MB at a time."""
        return read_chunks(self._path, "", begin)

    def read(self, begin: int, size: int) -> bytes:
        with open_regular(self._path) as file:
            file.seek(begin)
            return file.read(size)


class SpooledText:
    """Text in the spools of an index."""

    def __init__(self, part: FileRange, folder: str) -> None:
        self._folder = folder
        path = os.path.join(folder, part.index)
        status = os.stat(path)
        self._spools, self._edges = _loaded(path, status.st_ino, status.st_mtime_ns)
        self._last: tuple[int, bytes] = (-1, b"")

    def chunks(self, begin: int) -> Iterator[bytes]:
        for i in range(bisect_right(self._edges, begin) - 1, len(self._spools)):
            skip = max(begin - self._edges[i], 0)
            for chunk in self._unpack(i):
                if skip < len(chunk):
                    yield chunk[skip:] if skip else chunk
                skip = max(skip - len(chunk), 0)

    def read(self, begin: int, size: int) -> bytes:
        """`size` bytes from `begin` on. The last spool is cached, for short look-backs."""
        parts = []
        i = bisect_right(self._edges, begin) - 1
        while size > 0 and i < len(self._spools):
            if self._last[0] != i:
                self._last = (i, b"".join(self._unpack(i)))
            part = self._last[1][begin - self._edges[i] :][:size]
            parts.append(part)
            begin, size, i = begin + len(part), size - len(part), i + 1
        return b"".join(parts)

    def _unpack(self, i: int) -> Iterator[bytes]:
        name, size = self._spools[i]
        path = os.path.join(self._folder, name)
        unpacked = 0
        try:
            with open(path, "rb") as file:
                reader = zstandard.ZstdDecompressor().stream_reader(file)
                while chunk := reader.read(PLAIN_CHUNK):
                    unpacked += len(chunk)
                    yield chunk
        except zstandard.ZstdError as error:
            raise BadInput(f"{path}: damaged ({error})") from None
        if unpacked != size:
            raise BadInput(f"{path}: truncated: {unpacked} bytes of text, {size} were written")


@lru_cache(maxsize=4)
def _loaded(path: str, inode: int, changed: int) -> tuple[list[Spool], list[int]]:
    """Spools, and the offset of each in the text. `inode` and `changed`, the modification time, are part of the cache's key."""
    with open(path, "rb") as file:
        spools: list[Spool] = [(name, size) for name, size in json.load(file)]
    return spools, list(accumulate((size for _, size in spools), initial=0))[:-1]
