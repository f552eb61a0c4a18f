"""Decompression: a file as a stream of unpacked byte chunks, in bounded memory; truncation is an error.

gzip, bzip2, xz and zstd are recognised by their first bytes. A compressed file that is damaged or truncated is an error
with its name and the number of bytes that were unpacked. Several workers can share a bzip2 file of many streams: a range of its bytes
includes the streams that start in it.
"""

from __future__ import annotations

import bz2
import contextlib
import lzma
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

import zstandard

from data_prep.common.errors import BadInput
from data_prep.readers.files import open_regular

MAGIC = (
    (b"\x1f\x8b", "gz"),
    (b"BZh", "bz2"),
    (b"\xfd7zXZ\x00", "xz"),
    (b"\x28\xb5\x2f\xfd", "zst"),
    # a skippable frame, the beginning of files of pzstd
    (b"\x50\x2a\x4d\x18", "zst"),
)
LONGEST_MAGIC = max(len(magic) for magic, _ in MAGIC)
SUFFIXES = {".gz": "gz", ".bz2": "bz2", ".xz": "xz", ".zst": "zst"}
# the header of a bzip2 stream and the mark of its first block
BZ2_STREAM = re.compile(rb"BZh[1-9]1AY&SY")
# Text compresses 3 to 40 times. A file that unpacks to more than this is a decompression bomb. Output up to
# BOMB_BYTES, the largest task of reading (`tasks`), is always accepted.
BOMB_BYTES, BOMB_RATIO = 96 << 20, 200
PLAIN_CHUNK = 1 << 20
# Input bytes for a decompressor at once. zstd can't bound its output, and a 4-byte block may unpack to 128 KiB, so its input is
# small: a decompression bomb then costs 32 MB at a time.
FEED = {"gz": 1 << 15, "bz2": 1 << 17, "xz": 1 << 17, "zst": 1 << 10}
MAX_OUT = 4 << 20
ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError)


@dataclass
class RangeEnd:
    """The end of a range in unpacked bytes; None for a range of a bzip2 file until it is reached."""

    end: int | None = None


def compression_of(head: bytes) -> str:
    """Name of the compression whose magic bytes are at the beginning of `head`, or ""."""
    return next((name for magic, name in MAGIC if head.startswith(magic)), "")


class _Inner:
    """A decompressor of zlib or zstandard with the (data, max_length) interface of bz2 and lzma."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    @property
    def eof(self) -> bool:
        return bool(self._inner.eof)

    @property
    def unused_data(self) -> bytes:
        return bytes(self._inner.unused_data)


class _Gzip(_Inner):
    @property
    def needs_input(self) -> bool:
        return not self._inner.unconsumed_tail

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return bytes(self._inner.decompress(self._inner.unconsumed_tail + data, max_length))


class _Zstd(_Inner):
    """zstd, whose output is bounded only by FEED."""

    needs_input = True

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return bytes(self._inner.decompress(data))


def _decompressor(kind: str) -> Any:
    if kind == "bz2":
        return bz2.BZ2Decompressor()
    if kind == "xz":
        return lzma.LZMADecompressor(memlimit=512 << 20)
    if kind == "gz":
        return _Gzip(zlib.decompressobj(wbits=31))
    return _Zstd(zstandard.ZstdDecompressor(max_window_size=1 << 27).decompressobj())


def ratio(head: bytes, compression: str) -> float:
    """Unpacked size of the first bytes of a compressed file over their size."""
    inner = _decompressor(compression)
    fed = unpacked = 0
    with contextlib.suppress(*ERRORS):  # errors are reported when the file is read
        while fed < len(head) and not inner.eof and unpacked < MAX_OUT:
            data = head[fed : fed + FEED[compression]] if inner.needs_input else b""
            fed += len(data)
            unpacked += len(inner.decompress(data, MAX_OUT))
    return unpacked / max(fed, 1)


def first_stream(path: str, start: int, end: int) -> int | None:
    """Offset of the first bzip2 stream that starts in bytes [start, end) of a file; 0 if `start` is 0."""
    if start == 0:
        return 0
    with open_regular(path) as file:
        file.seek(start)
        kept = b""
        while data := file.read(max(0, min(PLAIN_CHUNK, end + 9 - start))):  # 9: a stream begins at the last byte
            data, start = kept + data, start + len(data)
            if match := BZ2_STREAM.search(data):
                return start - len(data) + match.start()
            kept = data[-9:]
    return None


def read_chunks(
    path: str,
    compression: str = "",
    start: int = 0,
    stop: int | None = None,
    range_end: RangeEnd | None = None,
    file: IO[bytes] | None = None,
) -> Iterator[bytes]:
    """Unpacked bytes of a file (or of `file`), in chunks of 1 to a few MB, from byte `start` (the start of a stream) to the end.

    Concatenated streams are read one after another; zeros after the last one are padding. `range_end.end` is set to the unpacked
    bytes before the first stream that starts at byte `stop` or later when it is reached. Raises BadInput for a compressed stream
    that is damaged, truncated, or unpacks to more than BOMB_RATIO times its size.
    """
    parts: list[bytes] = []
    size = 0
    try:
        for chunk in _unpack(path, compression, start, stop, range_end, file):
            parts.append(chunk)
            size += len(chunk)
            if size >= PLAIN_CHUNK:
                yield b"".join(parts)
                parts, size = [], 0
    except BadInput:
        if parts:
            yield b"".join(parts)  # the bytes before the damage
        raise
    if parts:
        yield b"".join(parts)


def _unpack(
    path: str, compression: str, start: int, stop: int | None, range_end: RangeEnd | None, stream: IO[bytes] | None
) -> Iterator[bytes]:
    with open_regular(path) if stream is None else contextlib.nullcontext(stream) as file:
        if start:
            file.seek(start)
        if not compression:
            while chunk := file.read(PLAIN_CHUNK):
                yield chunk
            return
        packed, unpacked = 0, 0
        inner = _decompressor(compression)
        began = False
        while data := file.read(FEED[compression]):
            packed += len(data)
            while True:
                if not began:
                    data = data.lstrip(b"\0")
                    if range_end and range_end.end is None and stop is not None and start + packed - len(data) >= stop:
                        range_end.end = unpacked
                    if not data:
                        break
                began = True
                try:
                    out = inner.decompress(data, MAX_OUT)
                except ERRORS as error:
                    raise BadInput(
                        f"{path}: damaged {compression} data after {unpacked} unpacked bytes ({error})"
                    ) from None
                unpacked += len(out)
                if unpacked > max(BOMB_BYTES, BOMB_RATIO * packed):
                    raise BadInput(
                        f"{path}: unpacks to more than {BOMB_RATIO} times its size, as a decompression bomb does; "
                        "if it is real, unpack it first"
                    )
                if out:
                    yield out
                if inner.eof:
                    data, inner, began = inner.unused_data, _decompressor(compression), False
                elif inner.needs_input:
                    break
                else:
                    data = b""
        if began:
            raise BadInput(f"{path}: truncated: the {compression} stream ends early, after {unpacked} unpacked bytes")
