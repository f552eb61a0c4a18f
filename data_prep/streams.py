"""A file is a stream of unpacked byte chunks, found by content, bounded in memory, never silently short.

gzip, bzip2, xz and zstd are told by their first bytes. A compressed file that ends inside its stream, or
is damaged, is an error with its name and the number of bytes that could be unpacked.
"""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Iterator
from typing import Any

import zstandard

from data_prep.problems import BadInput

MAGIC = ((b"\x1f\x8b", "gz"), (b"BZh", "bz2"), (b"\xfd7zXZ\x00", "xz"), (b"\x28\xb5\x2f\xfd", "zst"))
SUFFIXES = {".gz": "gz", ".bz2": "bz2", ".xz": "xz", ".zst": "zst"}
PLAIN_CHUNK = 1 << 20
# Input bytes given to a decompressor at once. zstd can't bound its output, and one 4-byte block may stand
# for 128 KiB, so it is fed little: a bomb then costs 32 MB at a time.
FEED = {"gz": 1 << 15, "bz2": 1 << 17, "xz": 1 << 17, "zst": 1 << 10}
MAX_OUT = 4 << 20
ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError)


def compression_of(head: bytes) -> str:
    """Name of the compression whose magic bytes open `head`, or ""."""
    return next((name for magic, name in MAGIC if head.startswith(magic)), "")


class _Gzip:
    """zlib's decompressor with the (data, max_length) interface of bz2 and lzma."""

    def __init__(self) -> None:
        self._inner = zlib.decompressobj(wbits=31)

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data

    @property
    def needs_input(self) -> bool:
        return not self._inner.unconsumed_tail

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return self._inner.decompress(self._inner.unconsumed_tail + data, max_length)


class _Zstd:
    """zstandard's decompressor with the same interface; its output is bounded by FEED alone."""

    needs_input = True

    def __init__(self) -> None:
        self._inner = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompressobj()

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return self._inner.decompress(data)


def _decompressor(kind: str) -> Any:
    if kind == "bz2":
        return bz2.BZ2Decompressor()
    if kind == "xz":
        return lzma.LZMADecompressor(memlimit=512 << 20)
    return _Gzip() if kind == "gz" else _Zstd()


def read_chunks(path: str, compression: str = "", start: int = 0) -> Iterator[bytes]:
    """Unpacked bytes of a file in chunks of at most a few MB.

    `start` is a byte offset, for uncompressed files only. Concatenated streams are read through; zeros
    after the last one are padding. Raises BadInput where the compressed stream is damaged or cut short.
    """
    with open(path, "rb") as file:
        if not compression:
            file.seek(start)
            while chunk := file.read(PLAIN_CHUNK):
                yield chunk
            return
        unpacked = 0
        inner = _decompressor(compression)
        began = False
        while data := file.read(FEED[compression]):
            while True:
                if not began and not data.strip(b"\0"):
                    break
                began = True
                try:
                    out = inner.decompress(data, MAX_OUT)
                except ERRORS as error:
                    raise BadInput(
                        f"{path}: damaged {compression} data after {unpacked} unpacked bytes ({error})"
                    ) from None
                unpacked += len(out)
                if out:
                    yield out
                if inner.eof:
                    data, inner, began = inner.unused_data, _decompressor(compression), False
                elif inner.needs_input:
                    break
                else:
                    data = b""
        if began:
            raise BadInput(
                f"{path}: truncated: the {compression} stream ends early, after {unpacked} unpacked bytes"
            )
