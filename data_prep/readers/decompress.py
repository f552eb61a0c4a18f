"""Decompression: a file as a stream of unpacked byte chunks, in bounded memory; truncation is an error.

gzip, bzip2, xz and zstd are recognised by their first bytes. A compressed file that is damaged or truncated is an error
with its name and the number of bytes that were unpacked. Several workers can share a bzip2 file of many streams: a range of its bytes
includes the streams that start in it.
"""

from __future__ import annotations

import bz2
import contextlib
import io
import lzma
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

import zstandard

from data_prep.common.errors import BadInput, Damaged, Problems
from data_prep.readers.files import open_regular, status

# zst may begin with a skippable frame, as files of pzstd do
MAGIC = {
    "gz": re.compile(rb"\x1f\x8b"),
    "bz2": re.compile(rb"BZh"),
    "xz": re.compile(rb"\xfd7zXZ\x00"),
    "zst": re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),
}
LONGEST_MAGIC = 6
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
# a reason of lost bytes
BEHIND = "other data behind packed text"
ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError)


@dataclass
class RangeEnd:
    """The end of a range in unpacked bytes; None for a range of a bzip2 file until it is reached."""

    end: int | None = None


def detect_compression(head: bytes) -> str:
    """Name of the compression whose magic bytes are at the beginning of `head`, or ""."""
    return next((name for name, magic in MAGIC.items() if magic.match(head)), "")


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
    return _Zstd(zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj())


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


class _Chunks(io.RawIOBase):
    """A file of chunks."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._rest = chunks, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._rest = self._rest or next(self._chunks, b"")
        data, self._rest = self._rest[: len(buffer)], self._rest[len(buffer) :]
        buffer[: len(data)] = data
        return len(data)


def as_file(chunks: Iterator[bytes]) -> io.BufferedReader:
    return io.BufferedReader(_Chunks(chunks), PLAIN_CHUNK)


def until_damage(chunks: Iterator[bytes], path: str, problems: Problems, reason: str) -> Iterator[bytes]:
    """Chunks of a file; under "skip" they end at the last line end before its damage, which is counted."""
    last = b""
    try:
        for chunk in chunks:
            if last:
                yield last
            last = chunk
    except Damaged as error:
        if problems.policy == "stop":
            raise
        end = len(last) if error.whole else last.rfind(b"\n") + 1 or len(last)
        problems.add(path, BEHIND if error.whole else reason, error.lost + len(last) - end)
        last = last[:end]
    if last:
        yield last


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
        packed, unpacked, streams = 0, 0, 0
        inner = _decompressor(compression)
        began = False

        def damaged(what: str, whole: bool = False) -> Damaged:
            end = stop or (start + packed if stream else status(path)[0])
            lost = max(end - start - packed + len(data), 0)
            return Damaged(f"{path}: {what}", lost, whole)

        while data := file.read(FEED[compression]):
            packed += len(data)
            while True:
                if not began:
                    data = data.lstrip(b"\0")
                    if range_end and range_end.end is None and stop is not None and start + packed - len(data) >= stop:
                        range_end.end = unpacked
                    if not data:
                        break
                    if len(data) < LONGEST_MAGIC:  # a stream whose magic bytes are not all read
                        data += (more := file.read(FEED[compression]))
                        packed += len(more)
                    if streams and not MAGIC[compression].match(data):
                        raise damaged(
                            f"something else follows the {compression} data after {unpacked} unpacked bytes; remove it if the "
                            "text before it is complete",
                            whole=True,
                        )
                began = True
                try:
                    out = inner.decompress(data, MAX_OUT)
                except ERRORS as error:
                    raise damaged(f"damaged {compression} data after {unpacked} unpacked bytes ({error})") from None
                unpacked += len(out)
                if unpacked > max(BOMB_BYTES, BOMB_RATIO * packed):
                    raise damaged(
                        f"unpacks to more than {BOMB_RATIO} times its size, as a decompression bomb does; "
                        "if it is real, unpack it first"
                    )
                if out:
                    yield out
                if inner.eof:
                    data, inner, began = inner.unused_data, _decompressor(compression), False
                    streams += 1
                elif inner.needs_input:
                    break
                else:
                    data = b""
        if began:
            raise damaged(f"truncated: the {compression} stream ends early, after {unpacked} unpacked bytes")
