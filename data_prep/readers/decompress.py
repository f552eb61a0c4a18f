"""Decompression: a file as a stream of unpacked byte chunks, in bounded memory; truncation is an error.

gzip, bzip2, xz and zstd are recognised by their first bytes. A damaged or truncated file raises an error with its name
and the number of decompressed bytes. Several workers can share a bzip2 file of many streams: a range of its bytes
includes the streams that start in it.
"""

from __future__ import annotations

import bz2
import contextlib
import io
import json
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from itertools import count
from typing import IO, Any, NamedTuple

import zstandard

from data_prep.common.errors import Damaged, Problems, refuse_failure
from data_prep.common.records import JOURNAL, UNPACK
from data_prep.readers.files import open_regular, status
from megabert.common.errors import describe


class _Unbounded:
    """A decompressor of zlib or zstandard with the interface of those of bz2 and lzma; only its input bounds its output."""

    needs_input = True

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return bytes(self._inner.decompress(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # eof, unused_data


class Compression(NamedTuple):
    """A compression: pattern of the first bytes, input bytes per call (`feed`), and factory of decompressors."""

    magic: re.Pattern[bytes]
    feed: int
    decompressor: Callable[[], Any]


# A decompression bomb costs at most 32 MB at a time: 1 KB of zstd, whose 4-byte blocks may unpack to 128 KiB, or 32 KB of gzip.
COMPRESSIONS = {
    "gz": Compression(re.compile(rb"\x1f\x8b"), 1 << 15, lambda: _Unbounded(zlib.decompressobj(wbits=31))),
    "bz2": Compression(re.compile(rb"BZh"), 1 << 17, bz2.BZ2Decompressor),
    "xz": Compression(re.compile(rb"\xfd7zXZ\x00"), 1 << 17, partial(lzma.LZMADecompressor, memlimit=512 << 20)),
    # may begin with a skippable frame, as files of pzstd do
    "zst": Compression(
        re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),
        1 << 10,
        lambda: _Unbounded(zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()),
    ),
}
SUFFIXES = {f".{name}": name for name in COMPRESSIONS}
LONGEST_MAGIC = 6
# the header of a bzip2 stream and the mark of its first block
BZ2_STREAM = re.compile(rb"BZh[1-9]1AY&SY")
# Text compresses 3 to 40 times. A file that unpacks to more than this is a decompression bomb. Output up to
# BOMB_BYTES, the largest task of reading (`tasks`), is always accepted.
BOMB_BYTES, BOMB_RATIO = 96 << 20, 200
PLAIN_CHUNK = 1 << 20
MAX_OUT = 4 << 20
# reason in the report for bytes after the last compressed stream
TRAILING = "trailing data after the compressed text"
ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError)


def detect_compression(head: bytes) -> str:
    """Name of the compression whose magic bytes are at the beginning of `head`, or ""."""
    return next((name for name, kind in COMPRESSIONS.items() if kind.magic.match(head)), "")


def ratio(file: IO[bytes], compression: str) -> float:
    """Unpacked size of the beginning of a compressed file over its size."""
    unpacked = 0
    with contextlib.suppress(Damaged):  # reported when the file is read
        for part in _unpack("", compression, 0, None, None, file):
            unpacked += len(part)
            if unpacked >= PLAIN_CHUNK:
                break
    return unpacked / max(file.tell(), 1)


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
    at_stop: Callable[[int], None] | None = None,
    file: IO[bytes] | None = None,
) -> Iterator[bytes]:
    """Unpacked bytes of a file (or of `file`), in chunks of 1 to a few MB, from byte `start` (the start of a stream) to the end.

    Concatenated streams are read one after another; zeros after the last one are padding. `at_stop` is called with the number of
    unpacked bytes before the first stream that starts at byte `stop` or later. Raises BadInput for a compressed stream that is
    damaged, truncated, or unpacks to more than BOMB_RATIO times its size.
    """
    parts: list[bytes] = []
    size = 0
    try:
        for part in _unpack(path, compression, start, stop, at_stop, file):
            parts.append(part)
            size += len(part)
            if size >= PLAIN_CHUNK:
                yield b"".join(parts)
                parts, size = [], 0
    except Exception:
        if parts:
            yield b"".join(parts)  # the bytes before the damage
        raise
    if parts:
        yield b"".join(parts)


def _unpack(
    path: str,
    compression: str,
    start: int,
    stop: int | None,
    at_stop: Callable[[int], None] | None,
    member: IO[bytes] | None,
) -> Iterator[bytes]:
    with open_regular(path) if member is None else contextlib.nullcontext(member) as file:
        if start:
            file.seek(start)
        if not compression:
            yield from iter(partial(file.read, PLAIN_CHUNK), b"")
            return
        kind = COMPRESSIONS[compression]
        data, packed, unpacked = b"", 0, 0

        def feed() -> bytes:
            nonlocal packed
            more = file.read(kind.feed)
            packed += len(more)
            return more

        def damaged(what: str, whole: bool = False) -> Damaged:
            end = stop or (start + packed if member else status(path)[0])
            return Damaged(f"{path}: {what}", max(end - start - packed + len(data), 0), whole)

        for streams in count():
            # zeros between streams are padding
            while len(data := data.lstrip(b"\0")) < LONGEST_MAGIC and (more := feed()):
                data += more
            if at_stop and stop is not None and start + packed - len(data) >= stop:
                at_stop(unpacked)
                at_stop = None
            if not data:
                return
            if streams and not kind.magic.match(data):
                raise damaged(
                    f"trailing data after the {compression} stream of {unpacked} decompressed bytes; remove it if the "
                    "text before it is complete",
                    whole=True,
                )
            inner = kind.decompressor()
            while not inner.eof:
                if inner.needs_input and not data and not (data := feed()):
                    raise damaged(f"truncated: the {compression} stream ends early, after {unpacked} unpacked bytes")
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
                data = b""
            data = inner.unused_data


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
        problems.add(path, TRAILING if error.whole else reason, error.lost + len(last) - end)
        last = last[:end]
    if last:
        yield last


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


def read_spools(folder: str, index: str, begin: int) -> Iterator[bytes]:
    """The unpacked text of a large packed file from byte `begin` on, at most PLAIN_CHUNK at a time. Raises ValueError, not BadInput, which
    would be damage of the input, for a spool that is damaged or missing.

    A spool is a zstd file of some MB of text in the work folder; `index`, a JSON list of (name, unpacked bytes), gives those of a
    file in order.
    """
    path = os.path.join(folder, index)
    try:
        with open(path, "rb") as file:
            spools: list[tuple[str, int]] = json.load(file)
        for name, size in spools:
            if begin < size:
                path = os.path.join(folder, name)
                text = _unpack_spool(path, size, os.stat(path).st_mtime_ns)
                yield from (text[at : at + PLAIN_CHUNK] for at in range(begin, size, PLAIN_CHUNK))
            begin = max(begin - size, 0)
    except (OSError, ValueError) as error:
        refuse_failure(error, path)
        record = os.path.join(folder, JOURNAL, f"{UNPACK}.json")
        raise ValueError(
            f"{describe(error)}: unpacked text is lost; remove {record}, and the same command unpacks it again"
        ) from None


@lru_cache(maxsize=2)
def _unpack_spool(path: str, size: int, changed: int) -> bytes:
    """The text of a spool. The first one of a file, by which its format is known, and the last one, for short look-backs, are cached;
    `changed` is part of the cache's key."""
    try:
        with open(path, "rb") as file:
            text = zstandard.ZstdDecompressor().decompress(file.read())
    except zstandard.ZstdError as error:
        raise ValueError(f"{path}: damaged ({error})") from None
    if len(text) != size:
        raise ValueError(f"{path}: truncated: {len(text)} bytes of text, {size} were written")
    return text
