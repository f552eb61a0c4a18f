"""Files that are not on a local disk, by their URLs (s3://, gs://, https://, hf://): the only module that knows fsspec.

Callers ask `is_url` first, so that a local path never comes here. Credentials are those that the libraries find by themselves.
Errors are FileNotFoundError, a ValueError that says what the user has to do, or Failed, after retries.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import logging
import os
import posixpath
import re
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from megabert.common.errors import Failed, with_retries
from megabert.common.files import atomic_file
from megabert.common.logs import PASSWORD, warn_while_waiting

T = TypeVar("T")
SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
# package to install for a scheme that fsspec does not implement itself
PACKAGES = {
    "s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "http": "aiohttp", "https": "aiohttp", "hf": "huggingface_hub",
    "az": "adlfs", "abfs": "adlfs",
}  # fmt: skip
WEB = ("http://", "https://")
# links of a web server's page of a folder to its other orders (?C=N;O=D), its headings, other folders and people
NO_FILE = re.compile(r"/(\?|\.\./|(mailto|javascript|data|tel):)|#")
GLOB = re.compile(r"[*?\[]")
REFUSED = ("file", "local", "memory", "pipe")  # fsspec schemes that are refused: local paths, memory and pipes
# packages whose exceptions are store or network failures
CLIENTS = (
    *("aiobotocore", "aiohttp", "azure", "botocore", "fsspec", "gcsfs", "google", "httpx", "httpx2", "huggingface_hub"),
    "json",  # an answer that is not JSON
)
# S3's codes of credentials that have expired or are of another region, beside those that s3fs turns into PermissionError; "400" is that
# of a HEAD, whose answer has no reason
DENIED = ("400", "AuthorizationHeaderMalformed", "InvalidToken", "TokenRefreshRequired")
GATED = "the hub restricts access to it: request access on its page, then `hf auth login`"
NOT_RETRIED = (400, 402, 405, 410, 413, 422, 501)  # HTTP status codes of a wrong request, which is not retried
# fields of fsspec's description of a file that name its version, the surest first
VERSIONS = ("ETag", "etag", "blob_id", "md5Hash", "LastModified", "Last-Modified", "last_commit", "mtime")
WAITS = (0.1, 0.5, 2.0, 8.0, 30.0)  # seconds before each retry, beside those of the libraries
# seconds after which a warning says that a store has not answered, or (second) taken a file; the libraries wait for minutes
PATIENCE = 20.0, 240.0
# read buffer of an open object, and bytes per request when a whole object is read
BLOCK, CHUNK_BYTES = 4 << 20, 16 << 20
_answered: set[tuple[str, bool]] = set()  # servers that this process has read from, or (with true) written to
# options by which fsspec's classes use the environment's proxies, and web servers compress no answer, of which they send no parts
WEB_OPTIONS: dict[str, Any] = {"client_kwargs": {"trust_env": True, "headers": {"Accept-Encoding": "identity"}}}
GOOGLE_OPTIONS: dict[str, Any] = {"session_kwargs": {"trust_env": True}}
PROXIES = {"http": WEB_OPTIONS, "https": WEB_OPTIONS, "gs": GOOGLE_OPTIONS, "gcs": GOOGLE_OPTIONS}
logging.getLogger("gcsfs").addHandler(logging.NullHandler())  # else it prints the traceback of each failure


class AccessDenied(Failed):
    """A server that has answered before refuses access: its credentials may have expired, and another process reads them again."""

    retried = False


class Object(NamedTuple):
    """An object of a store: its URL, bytes, and what changes with its content (an etag, a time), "" where the store has none."""

    url: str
    size: int
    version: str

    @property
    def stamp(self) -> tuple[int, int]:
        """Bytes and a number for the version, as a file's size and time."""
        return self.size, zlib.crc32(self.version.encode())


def is_url(path: str | os.PathLike[str]) -> bool:
    return bool(SCHEME.match(os.fspath(path)))


def join(url: str, *names: str) -> str:
    """The URL, or path, of something below a folder, or beside it (`../name`)."""
    joined = posixpath.join(url, *names)
    scheme, colon, rest = joined.rpartition("://")
    return scheme + colon + posixpath.normpath(rest) + "/" * joined.endswith("/")


def glob_folder(url: str) -> str:
    """The folder above a URL's first wildcard; "" without one. On the web `?` begins a query, which has none."""
    place = url.partition("?")[0] if url.startswith(WEB) else url
    wildcard = GLOB.search(place, (place + "/").index("/", place.index("://") + 3))
    return posixpath.dirname(place[: wildcard.start()] + "*") if wildcard else ""


def public(url: str) -> str:
    """A web address without its query and its password, which may be secrets; any other URL or path unchanged."""
    return PASSWORD.sub("", url.partition("?")[0]) if url.startswith(WEB) else url


def find(url: str) -> list[Object]:
    """The objects below a folder, or matching a glob, or the one of that name, sorted by URL; empty if there is none. A web server's
    folder ends in a slash, and is a page of links."""
    try:
        if url.startswith(WEB) and not url.endswith("/") and not glob_folder(url):
            return [stat(url)]
        if glob_folder(url) and not url.startswith(WEB) and exists(url):  # a name with brackets, as of local paths
            return [stat(url)]
        found = _ask(url, partial(_list, url))
    except FileNotFoundError:  # no such bucket
        return []
    scheme = url[: url.index("://") + 3]
    files = [(name, info) for name, info in found.items() if info["type"] == "file" and not name.endswith("/")]
    urls = [name if is_url(name) else scheme + name for name, _ in files]
    return sorted(
        stat(each) if info["size"] is None else _object(each, info) for each, (_, info) in zip(urls, files, strict=True)
    )


def _list(url: str, system: Any, path: str) -> dict[str, dict[str, Any]]:
    """fsspec's descriptions of what is below a path, or matches a glob, by names. Raises if a list fails: fsspec's own glob leaves out
    a folder whose list failed."""
    from fsspec.utils import glob_translate

    folder = glob_folder(url)
    if url.startswith(WEB):
        found = (system.glob if folder else system.find)(path, detail=True, on_error="raise")
        return {name.replace("&amp;", "&"): info for name, info in found.items() if not NO_FILE.search(name)}
    if not folder:
        return system.find(path, detail=True)
    matches = re.compile(glob_translate(path)).match
    found = system.find(system._strip_protocol(folder), detail=True)
    return {name: info for name, info in found.items() if matches(name)}


def list_objects(url: str) -> dict[str, Object]:
    """The objects below a folder, by their names relative to it, without those whose names lead out of it, and of a copy of it."""
    start = join(url, "")
    named = {found.url.removeprefix(start): found for found in find(start)}
    return {name: each for name, each in named.items() if not name.startswith("/") and ".." not in name.split("/")}


def stat(url: str) -> Object:
    """An object as it is now. Raises FileNotFoundError for one that does not exist, and for a folder."""

    def ask(system: Any, path: str) -> Object:
        system.invalidate_cache(path)
        info = system.info(path)
        if info["type"] != "file":
            raise FileNotFoundError
        return _object(url, info)

    return _ask(url, ask)


def exists(url: str) -> bool:
    """Whether there is an object of this name, which a list may not show yet."""
    try:
        stat(url)
    except FileNotFoundError:
        return False
    return True


def read(url: str, most: int = 1 << 30) -> bytes:
    """An object's content. Raises as `stat`, and ValueError above `most` bytes."""
    size = stat(url).size
    if size > most:
        raise ValueError(f"{public(url)}: has {size} bytes, more than {most}")
    return _range(url, 0, size)


class _Ranges(io.RawIOBase):
    """An object as a file, read in ranges that are each tried again."""

    mode = "rb"

    def __init__(self, url: str) -> None:
        self._url, self._size, self._at = url, stat(url).size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        if at < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), self._url)
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        end = min(self._at + len(buffer), self._size)
        data = b"".join(_range(self._url, at, min(at + CHUNK_BYTES, end)) for at in range(self._at, end, CHUNK_BYTES))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def open_object(url: str) -> io.BufferedReader:
    """An object for reading, from any position. Raises as `stat`."""
    return io.BufferedReader(_Ranges(url), BLOCK)


def _range(url: str, start: int, end: int) -> bytes:
    """Bytes [start, end) of an object; shorter answers are tried again."""
    if start >= end:
        return b""

    def ask(system: Any, path: str) -> bytes:
        data: bytes = system.cat_file(path, start=start, end=end)
        if len(data) != end - start:
            if (size := stat(url).size) < end:
                raise ValueError(f"{public(url)}: changed while it was read")
            if len(data) == size:
                raise ValueError(
                    f"{public(url)}: its server sends no parts of a file; download it and pass the local file"
                )
            raise Failed(f"{public(url)}: expected {end - start} bytes, got {len(data)}")
        return data

    return _ask(url, ask)


def fetch(url: str, target: Path, progress: Callable[[], object] = lambda: None) -> str:
    """Copy an object to the file `target`, which appears when it is complete; returns its SHA-256. `progress` is called after every chunk.
    Raises as `stat`."""
    size, sha256 = stat(url).size, hashlib.sha256()
    with atomic_file(target) as file:
        for start in range(0, size, CHUNK_BYTES):
            data = _range(url, start, min(start + CHUNK_BYTES, size))
            sha256.update(data)
            file.write(data)
            progress()
    return sha256.hexdigest()


def put(source: Path, url: str, progress: Callable[[], object] = lambda: None) -> None:
    """Copy a file to an object, which appears when it is complete. `progress` is called after every part that the store takes."""
    from fsspec.callbacks import Callback

    parts = Callback(hooks={"progress": lambda *_, **__: progress()})
    _ask(url, lambda system, path: system.put_file(str(source), path, callback=parts), writes=True)


def write(url: str, data: bytes) -> None:
    """Write an object, or replace it."""
    _ask(url, lambda system, path: system.pipe_file(path, data), writes=True)


def create(url: str, data: bytes) -> bool:
    """Create an object atomically with a conditional write; returns False if it already exists."""
    try:
        _ask(url, lambda system, path: system.pipe_file(path, data, mode="create"), writes=True)
    except FileExistsError:
        return read(url) == data  # perhaps this process created it in a first try whose response was lost
    return True


def remove(url: str) -> None:
    """Remove an object, if it exists."""
    with contextlib.suppress(FileNotFoundError):
        _ask(url, lambda system, path: system.rm_file(path), writes=True)


def _system(url: str) -> tuple[Any, str]:
    """fsspec's class for a URL, and its path there. Raises ValueError for an unknown scheme, naming the package to install."""
    import fsspec

    match = SCHEME.match(url)
    assert match, url
    scheme = match[1].lower()
    if scheme in REFUSED or (scheme not in PACKAGES and scheme not in fsspec.available_protocols()):
        raise ValueError(
            f"{public(url)}: unsupported URL scheme; use a local path or one of {', '.join(sorted(PACKAGES))}"
        )
    try:
        # of this process: fsspec keeps it, but no listings
        system = fsspec.filesystem(scheme, use_listings_cache=False, **PROXIES.get(scheme, {}))
        return system, system._strip_protocol(url)
    except ImportError:
        package = PACKAGES.get(scheme, scheme)
        raise ValueError(f"{url}: {scheme}:// needs the package {package}: pip install {package}") from None


def _object(url: str, info: dict[str, Any]) -> Object:
    version = next((str(info[field]) for field in VERSIONS if info.get(field)), "")
    if info.get("size") is None:
        raise ValueError(
            f"{public(url)}: its server sends no size, or Content-Encoding; download it and pass the local file"
        )
    return Object(url, int(info["size"]), version)


def is_client_error(error: Exception) -> bool:
    """Whether an error is one of CLIENTS."""
    return type(error).__module__.partition(".")[0] in CLIENTS


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _ask(url: str, send: Callable[[Any, str], T], writes: bool = False) -> T:
    """`request` with fsspec's class for the URL and the path there, which some stores' logins make slow or fail."""
    try:
        return request(url, lambda: send(*_system(url)), writes)
    except AccessDenied:
        import fsspec

        # the next request reads the credentials again
        fsspec.get_filesystem_class(url.partition("://")[0].lower()).clear_instance_cache()
        raise


def request(url: str, send: Callable[[], T], writes: bool = False) -> T:
    """The answer of a store to a request that only reads or `writes`, with retries after transient failures, and a warning meanwhile."""
    server, shown = (url.split("/", 3)[2], writes) if is_url(url) else None, public(url)

    def ask() -> T:
        try:
            with warn_while_waiting(f"{shown}: still waiting for the store", PATIENCE[writes]):
                answer = send()
            if server:
                _answered.add(server)
            return answer
        except (FileExistsError, Failed):
            raise
        except Exception as error:
            # the hub's library calls restricted repositories missing, or refuses their files alone
            if "GatedRepoError" in (type(error).__name__, type(error.__cause__).__name__):
                raise ValueError(f"{shown}: {GATED}") from None
            # fsspec turns every HTTP failure into FileNotFoundError; look at its cause
            cause = error.__cause__ if isinstance(error, FileNotFoundError) else None
            if isinstance(cause, TimeoutError) or type(cause).__module__.startswith("aiohttp"):
                error = cause  # type: ignore[assignment]
            answer_of_s3 = getattr(error.__cause__, "response", None)
            described = answer_of_s3.get("Error", {}) if isinstance(answer_of_s3, dict) else {}
            code, why = described.get("Code"), described.get("Message")
            if code in ("PreconditionFailed", "412"):
                raise FileExistsError(errno.EEXIST, "already exists", shown) from None  # s3fs says so of AWS alone
            # of the hub's library, of aiohttp
            status = getattr(getattr(error, "response", None), "status_code", getattr(error, "status", None))
            if status == 404 or isinstance(error, FileNotFoundError):
                missing = "no such bucket" if code == "NoSuchBucket" else "no such object"
                raise FileNotFoundError(errno.ENOENT, missing, shown) from None
            if isinstance(error, PermissionError) or status in (401, 403) or code in DENIED:
                text = f"{shown}: access denied; check the credentials and their permissions" + (
                    f" ({why:.200})" if why else ""
                )
                raise (AccessDenied(text) if server in _answered else ValueError(text)) from None
            if isinstance(error, NotImplementedError):
                raise ValueError(f"{shown}: its server cannot be written to") from None
            if not (isinstance(error, OSError) or is_client_error(error)):
                raise
            # botocore's, of a name, and that of HF_HUB_OFFLINE
            invalid = type(error).__name__ in ("ParamValidationError", "OfflineModeIsEnabled")
            # of others the first line only, since later ones may contain the request; without query strings, which may
            # hold signatures
            first = " ".join(str(error).splitlines()) if invalid else first_line(error)
            reason = re.sub(r"\?\S+", "?…", getattr(error, "server_message", None) or first).replace("\n", " ")
            reason = PASSWORD.sub("", reason)
            # aiohttp gives a damaged answer the status 400
            damaged = type(error.__cause__).__module__ == "aiohttp.http_exceptions"
            if invalid or (status in NOT_RETRIED and not damaged):
                raise ValueError(f"{shown}: refused ({reason:.200})") from None
            if "Credentials" in type(error).__name__:
                raise ValueError(f"{shown}: no credentials ({reason:.200})") from None
            raise Failed(f"{shown}: {reason:.200}") from error

    return with_retries(ask, WAITS)
