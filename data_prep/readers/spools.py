"""Unpacked text of a large packed file in the work folder, which can be read from any byte.

A spool is a zstd file of some MB of text. An index, a JSON list of (name, unpacked bytes), gives the spools of a file in order.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import lru_cache

import zstandard

from data_prep.common.errors import BadInput
from data_prep.readers.decompress import PLAIN_CHUNK

Spool = tuple[str, int]  # name in the work folder, and unpacked bytes


def read_spools(folder: str, index: str, begin: int) -> Iterator[bytes]:
    """The text from byte `begin` on, at most PLAIN_CHUNK at a time. Raises BadInput for a damaged spool."""
    with open(os.path.join(folder, index), "rb") as file:
        spools: list[Spool] = json.load(file)
    for name, size in spools:
        if begin < size:
            path = os.path.join(folder, name)
            text = _unpack(path, size, os.stat(path).st_mtime_ns)
            yield from (text[at : at + PLAIN_CHUNK] for at in range(begin, size, PLAIN_CHUNK))
        begin = max(begin - size, 0)


@lru_cache(maxsize=1)
def _unpack(path: str, size: int, changed: int) -> bytes:
    """The text of a spool. The last one is cached, for short look-backs; `changed` is part of the cache's key."""
    try:
        with open(path, "rb") as file:
            text = zstandard.ZstdDecompressor().decompress(file.read())
    except zstandard.ZstdError as error:
        raise BadInput(f"{path}: damaged ({error})") from None
    if len(text) != size:
        raise BadInput(f"{path}: truncated: {len(text)} bytes of text, {size} were written")
    return text
