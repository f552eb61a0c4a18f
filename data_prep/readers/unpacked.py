"""Unpacked text of a file by offset, however it is stored: as the file itself, in its seekable frames, or in spools.

An index lists where the text lies: members one after the other, each a stretch of a file that unpacks by itself. A zstd file
with a seek table (the "seekable format" of zstd's contrib folder) and a bgzip file (SAM/BAM specification, section 4.1)
have their members in themselves; of any other packed file the build makes spools, zstd files of some MB of text.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from bisect import bisect_right
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate
from typing import IO, BinaryIO, cast

import zstandard

from data_prep.common.errors import BadInput
from data_prep.common.records import Piece
from data_prep.readers.decompress import PLAIN_CHUNK, read_chunks
from data_prep.readers.files import open_regular

MEMBER_BYTES = 4 << 20  # unpacked; smaller ones that lie together are one
MOST_MEMBER = 64 << 20  # unpacked; a file with a larger frame is not read by frames
SEEK_FOOTER, SEEK_TABLE = 0x8F92EAB1, 0x184D2A5E
BGZIP_HEAD = b"\x1f\x8b\x08\x04"

Member = tuple[str, int, int, int]  # file ("" for the piece's own), first byte, bytes, bytes unpacked


def text_of(piece: Piece, folder: str) -> PlainText | MemberText:
    """The text of an unpacked file or of an index in `folder`, the work folder."""
    if not piece.index:
        return PlainText(piece.path)
    return MemberText(piece, folder)


class PlainText:
    """Text that lies in a file as it is."""

    def __init__(self, path: str) -> None:
        self._path = path

    def chunks(self, begin: int) -> Iterator[bytes]:
        """The bytes from `begin` on, about 1 MB at a time."""
        return read_chunks(self._path, "", begin)

    def read(self, begin: int, size: int) -> bytes:
        with open_regular(self._path) as file:
            file.seek(begin)
            return file.read(size)


class MemberText:
    """Text that lies in the members of an index."""

    def __init__(self, piece: Piece, folder: str) -> None:
        self._own, self._kind, self._folder = piece.path, piece.compression, folder
        path = os.path.join(folder, piece.index)
        status = os.stat(path)
        self._members, self._edges = _loaded(path, status.st_ino, status.st_mtime_ns)
        self._last: tuple[int, bytes] = (-1, b"")

    def chunks(self, begin: int) -> Iterator[bytes]:
        for i in range(bisect_right(self._edges, begin) - 1, len(self._members)):
            skip = max(begin - self._edges[i], 0)
            for chunk in self._unpack(i):
                if skip < len(chunk):
                    yield chunk[skip:] if skip else chunk
                skip = max(skip - len(chunk), 0)

    def read(self, begin: int, size: int) -> bytes:
        """For looking back a little: the member that was read last is kept."""
        parts = []
        i = bisect_right(self._edges, begin) - 1
        while size > 0 and i < len(self._members):
            if self._last[0] != i:
                self._last = (i, b"".join(self._unpack(i)))
            part = self._last[1][begin - self._edges[i] :][:size]
            parts.append(part)
            begin, size, i = begin + len(part), size - len(part), i + 1
        return b"".join(parts)

    def _unpack(self, i: int) -> Iterator[bytes]:
        name, first, size, unpacked = self._members[i]
        path = os.path.join(self._folder, name) if name else self._own
        found = 0
        with open_regular(path) as file:
            file.seek(first)
            unpack = _bgzip if self._kind == "gz" and not name else _zstd
            try:
                for chunk in unpack(file, size):
                    found += len(chunk)
                    if found > unpacked:
                        break
                    yield chunk
            except (zstandard.ZstdError, zlib.error) as error:
                raise BadInput(f"{path}: damaged data at byte {first} ({error})") from None
        if found != unpacked:
            raise BadInput(f"{path}: truncated or damaged: what is packed at byte {first} is not {unpacked} bytes")


def _zstd(file: BinaryIO, size: int) -> Iterator[bytes]:
    """Frames in the next `size` bytes, skippable ones left out."""
    packed = cast(IO[bytes], _Limited(file, size))  # whose `read` alone is called
    reader = zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(packed, read_across_frames=True)
    while chunk := reader.read(PLAIN_CHUNK):
        yield chunk


def _bgzip(file: BinaryIO, size: int) -> Iterator[bytes]:
    data = file.read(size)
    parts, length = [], 0
    while data:
        inner = zlib.decompressobj(wbits=31)
        parts.append(inner.decompress(data))
        length += len(parts[-1])
        if not inner.eof:
            raise zlib.error("a block without an end")
        data = inner.unused_data
        if length >= PLAIN_CHUNK or not data:
            yield b"".join(parts)
            parts, length = [], 0


class _Limited:
    """The next `size` bytes of a file, as a file."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._left = file, size

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(min(size, self._left) if size >= 0 else self._left)
        self._left -= len(data)
        return data


def index_bytes(members: list[Member]) -> bytes:
    return json.dumps(members).encode()


@lru_cache(maxsize=4)
def _loaded(path: str, inode: int, changed: int) -> tuple[list[Member], list[int]]:
    """Members and where each begins in the text. The cache goes by `inode` and `changed`, the time of its last change, too."""
    with open(path, "rb") as file:
        members: list[Member] = [tuple(member) for member in json.load(file)]
    return members, list(accumulate((member[3] for member in members), initial=0))[:-1]


def members_of(path: str, compression: str) -> list[Member] | None:
    """Members of a file that can be read from anywhere, None where it can't. Only heads and tables are read."""
    with open_regular(path) as file:
        size = file.seek(0, os.SEEK_END)
        found = _seek_table(file, size) if compression == "zst" else None
        if compression == "gz":
            found = _bgzip_blocks(file, size)
    if not found or max(unpacked for _, unpacked in found) > MOST_MEMBER:
        return None
    members: list[Member] = []
    first = packed = unpacked = 0
    for one_packed, one_unpacked in found:
        packed, unpacked = packed + one_packed, unpacked + one_unpacked
        if unpacked >= MEMBER_BYTES:
            members.append(("", first, packed, unpacked))
            first, packed, unpacked = first + packed, 0, 0
    if unpacked:
        members.append(("", first, packed, unpacked))
    return members


def _seek_table(file: BinaryIO, size: int) -> list[tuple[int, int]] | None:
    """(bytes, bytes unpacked) of each frame of a zstd file by its seek table; None without one."""
    if size < 17:
        return None
    file.seek(size - 9)
    count, flags, magic = struct.unpack("<IBI", file.read(9))
    width = 12 if flags & 0x80 else 8  # with a checksum of each frame
    if magic != SEEK_FOOTER or size < 17 + count * width:
        return None
    file.seek(size - 17 - count * width)
    head, _ = struct.unpack("<II", file.read(8))
    table = file.read(count * width)
    frames = [struct.unpack_from("<II", table, i * width) for i in range(count)]
    if head != SEEK_TABLE or sum(packed for packed, _ in frames) != size - 17 - count * width:
        return None
    return [(int(packed), int(unpacked)) for packed, unpacked in frames]


def _bgzip_blocks(file: BinaryIO, size: int) -> list[tuple[int, int]] | None:
    """(bytes, bytes unpacked) of each block of a bgzip file; None where it is another kind of gzip."""
    found = []
    at = 0
    while at < size:
        file.seek(at)
        head = file.read(18)
        if len(head) < 18 or head[:4] != BGZIP_HEAD or head[10:16] != b"\x06\0BC\x02\0":
            return None
        packed = struct.unpack_from("<H", head, 16)[0] + 1
        file.seek(at + packed - 4)
        tail = file.read(4)
        if len(tail) < 4:
            return None  # cut short: read in order, which says where
        found.append((packed, struct.unpack("<I", tail)[0]))
        at += packed
    return found
