"""Members of zip and tar archives as streams in the archive's order, without extraction to disk.

A tar may be compressed as a whole. Hidden members, those that describe the data and those that are not regular files are skipped. A
damaged or truncated archive raises an error with the member's name. Undamaged members of a zip remain readable; a tar ends at its first
damage.
"""

from __future__ import annotations

import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import IO, Any, cast

from data_prep.common.errors import BadInput, Damaged, refuse_failure
from data_prep.common.records import FileRange
from data_prep.readers import decompress
from data_prep.readers.decompress import BOMB_BYTES, BOMB_RATIO, detect_compression
from data_prep.readers.files import describes_data, open_regular

ERRORS = (OSError, EOFError, RuntimeError, NotImplementedError, zlib.error, lzma.LZMAError, zipfile.BadZipFile)

# (name, bytes, a function that opens the content; raises BadInput)
Member = tuple[str, int, Callable[[], IO[bytes]]]


class DamagedArchive(BadInput):
    """Nothing more of an archive can be read."""


def names_and_size(path: str) -> tuple[set[str], int]:
    """The names in a zip archive, and the unpacked bytes of the members that are read; nothing if it is damaged."""
    try:
        with open_regular(path) as file:
            infos = zipfile.ZipFile(file).infolist()
    except ERRORS as error:
        refuse_failure(error, path)
        return set(), 0
    read = (info for info in infos if _is_read(info.filename) and not _is_bomb(info))
    return {info.filename for info in infos}, sum(info.file_size for info in read)


def members(part: FileRange, left_out: Callable[[str], object] = str) -> Iterator[Member]:
    """The members of an archive; each must be read before the next. Raises DamagedArchive. `left_out` is called with the names of
    skipped ones other than folders."""
    yield from _zip_members(part.path, left_out) if part.format == "zip" else _tar_members(part, left_out)


def chunks(path: str, member: Any, size: int) -> Iterator[bytes]:
    """Unpacked bytes of a member of `size` bytes, whose compression is recognised by its first bytes; errors begin with `path`."""
    left = size  # of a packed member all are lost
    try:
        compression = detect_compression(member.peek(decompress.LONGEST_MAGIC))
        for chunk in decompress.read_chunks(path, compression, file=member):
            left -= 0 if compression else len(chunk)
            yield chunk
    except ERRORS as error:
        refuse_failure(error, path)
        raise Damaged(f"{path}: damaged in its archive ({error})", left) from None
    except tarfile.TarError as error:
        raise DamagedArchive(f"{path}: damaged in its archive ({error})") from None


def _is_read(name: str) -> bool:
    hidden = any(part.startswith((".", "__MACOSX")) for part in name.split("/") if part not in (".", ".."))
    return not hidden and not describes_data(name)


def _is_bomb(info: zipfile.ZipInfo) -> bool:
    return info.file_size > max(BOMB_BYTES, BOMB_RATIO * info.compress_size)


def _zip_members(path: str, left_out: Callable[[str], object]) -> Iterator[Member]:
    with open_regular(path) as file:
        try:
            archive = zipfile.ZipFile(file)
        except ERRORS as error:
            refuse_failure(error, path)
            raise DamagedArchive(f"{path}: damaged zip archive ({error})") from None
        for info in archive.infolist():
            if info.is_dir():
                continue
            if _is_read(info.filename):
                yield info.filename, info.file_size, partial(_open_zipped, archive, info, path)
            else:
                left_out(info.filename)


def _open_zipped(archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: str) -> IO[bytes]:
    if _is_bomb(info):
        raise BadInput(f"{path}: {info.filename}: unpacks to more than {BOMB_RATIO} times its size; unpack it first")
    try:
        return archive.open(info)
    except ERRORS as error:
        refuse_failure(error, path)
        raise BadInput(f"{path}: {info.filename}: cannot be read ({error})") from None


class _Header(tarfile.TarInfo):
    """A tar header that raises ReadError if it is damaged; tarfile itself would treat it as the end of the archive."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Header:
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(str(error)) from None


def _unpacked(part: FileRange) -> Iterator[bytes]:
    """Unpacked bytes of a tar. Raises DamagedArchive."""
    try:
        yield from decompress.read_chunks(part.path, part.compression)
    except BadInput as error:
        raise DamagedArchive(str(error)) from None


def _tar_members(part: FileRange, left_out: Callable[[str], object]) -> Iterator[Member]:
    stream = decompress.as_file(_unpacked(part))
    last = "its first member"
    try:
        with tarfile.open(fileobj=stream, mode="r|", tarinfo=_Header) as archive:
            for info in archive:
                last = info.name
                archive.members.clear()  # type: ignore[attr-defined]
                if info.isreg() and _is_read(info.name):
                    yield info.name, info.size, cast(Callable[[], IO[bytes]], partial(archive.extractfile, info))
                elif not info.isdir():
                    left_out(info.name)
            rest = iter(partial(cast(IO[bytes], archive.fileobj).read, 1 << 20), b"")
            if any(chunk.strip(b"\0") for chunk in rest):
                raise DamagedArchive(
                    f"{part.path}: more data after the end of the tar archive; split concatenated archives into files"
                )
    except tarfile.TarError as error:
        raise DamagedArchive(f"{part.path}: damaged or truncated tar archive after {last} ({error})") from None
