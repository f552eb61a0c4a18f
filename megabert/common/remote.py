"""Files at URLs (s3://, gs://, hf://, https://, …) through fsspec: listed and read by ranges.

A protocol works where its package is installed. Failures on the network are retried after growing waits, then raise `Failed`; a
file that is missing or forbidden raises at once.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from megabert.common.errors import Failed, tried_again

T = TypeVar("T")
URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
# environment variable with the folder of fetched files
CACHE = "MEGABERT_CACHE"
# wildcards; `?` begins the query of an https:// URL
MAGIC = re.compile(r"[*\[]")
# pip's name of a protocol's package
PACKAGES = {
    **dict.fromkeys(("s3", "s3a"), "s3fs"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("http", "https"), "aiohttp"),
    **dict.fromkeys(("abfs", "abfss", "az", "adl"), "adlfs"),
    "hf": "huggingface_hub",
}
# fields of a file's entry that change with its content, by protocol; never a time of reading
MARKS = ("ETag", "etag", "generation", "md5Hash", "blob_id", "Content-MD5", "LastModified", "Last-Modified", "mtime", "created")  # fmt: skip
# bytes fetched at once at a new place, and at most where reading is sequential
FIRST = 1 << 18
BLOCK = 8 << 20


@dataclass(frozen=True)
class RemoteStatus:
    """Status of a URL. `stamp` changes when the content does, as far as the server reports it."""

    size: int
    stamp: int
    folder: bool


def is_url(path: str) -> bool:
    return URL.match(path) is not None


def parent(url: str) -> str:
    """The URL of the folder that a file or folder is in; of a bucket or host itself."""
    above = url.rstrip("/").rsplit("/", 1)[0]
    return above if is_url(f"{above}/") and not above.endswith("/") else url


def _is_web(url: str) -> bool:
    return url.lower().startswith(("http://", "https://"))


def join(url: str, *names: str) -> str:
    """The URL of a file below a folder."""
    return "/".join((url.rstrip("/"), *names))


def _protocol(url: str) -> str:
    match = URL.match(url)
    assert match, url
    return match[1].lower()


def _filesystem(url: str) -> Any:
    """fsspec's file system of a URL. Raises ValueError naming the package that is missing."""
    protocol = _protocol(url)
    package = PACKAGES.get(protocol, "")
    try:
        import fsspec
    except ImportError:
        raise ValueError(f"{url}: URLs take fsspec: pip install fsspec {package}".rstrip()) from None
    try:
        return fsspec.filesystem(protocol, use_listings_cache=False)
    except ImportError:
        missing = f": pip install {package}" if package else ", which is not installed"
        raise ValueError(f"{url}: {protocol}:// takes a package of its own{missing}") from None
    except ValueError as error:  # fsspec's, for a protocol that it does not know
        raise ValueError(f"{url}: {error}") from None


def _asked(url: str, action: Callable[[Any, str], T]) -> T:
    """`action(file system, its name of url)`, retried. Raises OSError naming the URL, Failed where a restart may help.

    The protocols' libraries raise exceptions of any type when the network fails: all of them become `Failed`.
    """
    system = _filesystem(url)
    path = system._strip_protocol(url)

    def attempt() -> T:
        try:
            return action(system, path)
        except Failed:
            raise
        except ValueError as error:
            raise ValueError(f"{url}: {' '.join(str(error).split())}") from None
        except Exception as error:
            answer = _answer(url, error)
            status = getattr(answer, "status", 0)
            if isinstance(answer, FileNotFoundError) or status in (404, 410):
                raise FileNotFoundError(errno.ENOENT, "no such file or folder", url) from None
            if isinstance(answer, PermissionError) or status in (401, 403):
                raise PermissionError(errno.EACCES, f"no permission ({answer})", url) from None
            reason = str(answer) or type(answer).__name__
            raise Failed(errno.EIO, " ".join(reason.split()), url) from error

    return tried_again(attempt)


def _answer(url: str, error: BaseException) -> BaseException:
    """The server's error: fsspec turns every error of a web server, and a missing answer, into FileNotFoundError."""
    if _is_web(url) and isinstance(error, FileNotFoundError) and error.__cause__ is not None:
        return error.__cause__
    return error


def below(place: str | os.PathLike[str], *names: str) -> str | Path:
    """A file or folder below a folder, which is a path or a URL."""
    shown = os.fspath(place)
    return join(shown, *names) if is_url(shown) else Path(shown, *names)


def cache_folder() -> Path:
    """Where files of URLs are kept: $MEGABERT_CACHE, else `megabert` in the user's folder of caches."""
    if named := os.environ.get(CACHE):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "megabert")


def status(url: str) -> RemoteStatus:
    """Status of a URL; https:// has a folder where the URL ends with `/`. Raises FileNotFoundError."""
    if _is_web(url) and url.endswith("/"):
        return RemoteStatus(0, 0, folder=True)
    entry = _asked(url, lambda system, path: system.info(path))
    if entry["type"] == "directory":
        return RemoteStatus(0, 0, folder=True)
    if entry["size"] is None:
        raise ValueError(f"{url}: the server does not say its size; download it first")
    marks = repr([(name, str(entry[name])) for name in MARKS if entry.get(name) is not None])
    stamp = int.from_bytes(hashlib.blake2b(marks.encode(), digest_size=7).digest(), "little")
    return RemoteStatus(int(entry["size"]), stamp, folder=False)


def exists(url: str) -> bool:
    try:
        status(url)
    except FileNotFoundError:
        return False
    return True


def names(url: str) -> dict[str, bool]:
    """Names in a folder, and whether each is a folder itself. Raises FileNotFoundError."""
    entries = _asked(join(url, ""), lambda system, path: system.ls(path, detail=True))
    folder = _filesystem(url)._strip_protocol(url).rstrip("/")
    folders_by_name = {}
    for entry in entries:
        path = entry["name"].rstrip("/")
        if path != folder:  # a place-holder of the folder
            folders_by_name[path.rsplit("/", 1)[-1]] = entry["type"] == "directory"
    return folders_by_name


def matching(pattern: str) -> dict[str, bool]:
    """URLs that a glob matches, sorted, and whether each is a folder.

    Names that begin with a dot are left out below its first wildcard.
    """
    system, root = _filesystem(pattern), URL.match(pattern)
    assert root, pattern
    base = MAGIC.split(pattern, maxsplit=1)[0].rpartition("/")[0]
    stem = system._strip_protocol(base) if len(base) > len(root[0]) else ""
    base = max(base, root[0], key=len)
    entries = _asked(pattern, lambda system, path: system.glob(path, detail=True))
    return {
        base + path[len(stem) :]: entry["type"] == "directory"
        for path, entry in sorted(entries.items())
        if not any(name.startswith(".") for name in path[len(stem) :].split("/"))
    }


def opened(url: str) -> BinaryIO:
    """The file at a URL, open for reading; ranges are fetched as they are read. Raises OSError."""
    return cast(BinaryIO, io.BufferedReader(_Ranges(url, status(url)), FIRST))


class _Ranges(io.RawIOBase):
    """A file that is read by ranges, which double as long as reading is sequential."""

    def __init__(self, url: str, status: RemoteStatus) -> None:
        self._url, self._size = url, status.size
        if status.folder:
            raise IsADirectoryError(errno.EISDIR, "is a folder", url)
        self._at, self._start, self._block = 0, 0, b""
        self._length = FIRST

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(base + offset, 0)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        if self._at >= self._size:
            return 0
        end = self._start + len(self._block)
        if not self._start <= self._at < end:
            if self._block:
                self._length = min(2 * self._length, BLOCK) if self._at == end else FIRST
            self._start = self._at
            self._block = self._fetched(self._at, min(self._at + self._length, self._size))
        data = self._block[self._at - self._start :][: len(buffer)]
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def _fetched(self, start: int, end: int) -> bytes:
        def fetch(system: Any, path: str) -> bytes:
            data = _part(system, path, start, end, self._size)
            if len(data) != end - start:
                raise Failed(
                    errno.EIO, f"requested bytes {start} to {end}, received {len(data)} (was it changed?)", self._url
                )
            return data

        return _asked(self._url, fetch)


def _part(system: Any, path: str, start: int, end: int, size: int) -> bytes:
    """Bytes [start, end) of a file of `size` bytes."""
    if not _is_web(path):
        data: bytes = system.cat_file(path, start=start, end=end)
        return data
    with system.open(path, "rb", cache_type="none", size=size) as file:  # fails where a server has no ranges
        file.seek(start)
        data = file.read(end - start)
        return data


def chunks(url: str) -> Iterator[bytes]:
    """The bytes of a file from its first to its last, at most BLOCK at a time."""
    with opened(url) as file:
        while data := file.read(BLOCK):
            yield data


def read_whole(url: str) -> bytes:
    """All of a small file."""
    return b"".join(chunks(url))
