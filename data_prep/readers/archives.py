"""Members of zip and tar archives as streams in the archive's order, without extraction to disk.

A tar may be compressed as a whole. Hidden members and those that are not regular files are skipped. A damaged or truncated archive is
an error with the member's name. A zip's members can be read one without another; nothing of a tar is read behind its damage.
"""

from __future__ import annotations

import contextlib
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import IO, cast

from data_prep.common.errors import BadInput, Damaged
from data_prep.common.records import FileRange
from data_prep.readers import decompress, detection
from data_prep.readers.decompress import BOMB_BYTES, BOMB_RATIO
from data_prep.readers.files import open_regular

ERRORS = (OSError, EOFError, RuntimeError, NotImplementedError, zlib.error, lzma.LZMAError, zipfile.BadZipFile)
TAR_MAGIC_AT = 257

# (name, bytes, a function that opens the content; raises BadInput)
Member = tuple[str, int, Callable[[], IO[bytes]]]


class DamagedArchive(BadInput):
    """Nothing more of an archive can be read."""


def detect_archive(head: bytes) -> str:
    """zip or tar by the first unpacked bytes of a file; "" for anything else."""
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return "zip"
    return "tar" if head[TAR_MAGIC_AT : TAR_MAGIC_AT + 5] == b"ustar" else ""


def unpacked_size(path: str) -> int:
    """Bytes of the members of a zip archive that are read; 0 if it is damaged, which its reader reports."""
    with open_regular(path) as file, contextlib.suppress(*ERRORS):
        members = zipfile.ZipFile(file).infolist()
        return sum(info.file_size for info in members if _shown(info.filename) and not _is_bomb(info))
    return 0


def refuse_documents(path: str) -> None:
    """Raises BadInput for a zip archive that is an Office document or a book."""
    with open_regular(path) as file, contextlib.suppress(*ERRORS):
        names = set(zipfile.ZipFile(file).namelist())
        for name, (what, advice) in detection.ZIPPED.items():
            if name in names:
                raise detection.refused(path, what, advice)


def members(part: FileRange) -> Iterator[Member]:
    """The members of an archive; each must be read before the next. Raises DamagedArchive."""
    yield from _zip_members(part.path) if part.format == "zip" else _tar_members(part)


def chunks(path: str, member: IO[bytes], size: int) -> Iterator[bytes]:
    """Unpacked bytes of a member of `size` bytes, whose compression is recognised by its first bytes; errors begin with `path`."""
    file = _Guarded(member, path, size)
    file.head = file.read(decompress.LONGEST_MAGIC)
    yield from decompress.read_chunks(path, decompress.detect_compression(file.head), file=cast(IO[bytes], file))


class _Guarded:
    """A member, of which the bytes `head` were read before. Errors of a zip become Damaged, those of a tar DamagedArchive."""

    head = b""

    def __init__(self, member: IO[bytes], path: str, size: int) -> None:
        self._member, self._path, self._left = member, path, size

    def read(self, size: int) -> bytes:
        if self.head:
            head, self.head = self.head, b""
            return head
        try:
            data = self._member.read(size)
            self._left -= len(data)
            return data
        except ERRORS as error:
            raise Damaged(f"{self._path}: damaged in its archive ({error})", self._left) from None
        except tarfile.TarError as error:
            raise DamagedArchive(f"{self._path}: damaged in its archive ({error})") from None


def _shown(name: str) -> bool:
    return not any(part.startswith((".", "__MACOSX")) for part in name.split("/") if part not in (".", ".."))


def _zip_members(path: str) -> Iterator[Member]:
    with open_regular(path) as file:
        try:
            archive = zipfile.ZipFile(file)
        except ERRORS as error:
            raise DamagedArchive(f"{path}: damaged zip archive ({error})") from None
        for info in archive.infolist():
            if not info.is_dir() and _shown(info.filename):
                yield info.filename, info.file_size, partial(_open_zipped, archive, info, path)


def _is_bomb(info: zipfile.ZipInfo) -> bool:
    return info.file_size > max(BOMB_BYTES, BOMB_RATIO * info.compress_size)


def _open_zipped(archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: str) -> IO[bytes]:
    if _is_bomb(info):
        raise BadInput(f"{path}: {info.filename}: unpacks to more than {BOMB_RATIO} times its size; unpack it first")
    try:
        return archive.open(info)
    except ERRORS as error:
        raise BadInput(f"{path}: {info.filename}: cannot be read ({error})") from None


class _DamagedHeader(Exception):
    """A damaged header in a tar archive, which tarfile would treat as the end of the archive."""


class _Header(tarfile.TarInfo):
    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Header:
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as error:
            raise _DamagedHeader(error) from None


def _unpacked(part: FileRange) -> Iterator[bytes]:
    """Unpacked bytes of a tar. Raises DamagedArchive."""
    try:
        yield from decompress.read_chunks(part.path, part.compression)
    except BadInput as error:
        raise DamagedArchive(str(error)) from None


def _tar_members(part: FileRange) -> Iterator[Member]:
    stream = decompress.as_file(_unpacked(part))
    last = "its first member"
    try:
        with tarfile.open(fileobj=stream, mode="r|", tarinfo=_Header) as archive:
            for info in archive:
                last = info.name
                archive.members.clear()  # type: ignore[attr-defined]
                if info.isreg() and _shown(info.name):
                    yield info.name, info.size, cast(Callable[[], IO[bytes]], partial(archive.extractfile, info))
    except (tarfile.TarError, _DamagedHeader) as error:
        raise DamagedArchive(f"{part.path}: damaged or truncated tar archive behind {last} ({error})") from None
