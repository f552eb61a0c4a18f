"""Lists of hosts and URLs, and whether a document's URL is in one: its host, a domain above it, or the page itself.

A list has a host or a URL a line, as blocklists and lists of allowed pages are published (UT1's `domains` and `urls`, lists of
Raffel et al. 2020's kind). What holds a `/` is a URL and stands for that page alone, whatever its scheme, fragment and last
slash; anything else is a host and stands for all that is below it. Both become 64-bit hashes: 8 bytes an entry, and a URL that is
in no list of 10 million entries is taken for one of them once in 10^11.
"""

from __future__ import annotations

import gzip
import re
import zlib
from array import array
from dataclasses import dataclass

import numpy as np

from data_prep.common import hashing
from data_prep.common.errors import BadInput

WITH_URL, WITHOUT_URL = "documents with URL", "documents without URL"  # what they are counted under
MAX_HOST = 253  # characters that a name of the network's has at most
GZIP = b"\x1f\x8b"
SCHEME = re.compile(r"(?:[A-Za-z][A-Za-z0-9+.-]*:)?//")
COMMENT = re.compile(r"(?:^|\s)#.*")
PORT = re.compile(r":\d*$")
USUAL_PORTS = re.compile(r":(?:80|443)?$")


@dataclass(frozen=True)
class UrlList:
    """A list file as it is."""

    path: str
    sha256: str

    @staticmethod
    def of(path: str) -> UrlList:
        """Raises BadInput for a file that can't be read."""
        return UrlList(path, hashing.of_file(path, "--drop-urls"))

    def keys(self) -> np.ndarray:
        """uint64 [n] of its entries. Raises BadInput naming the line that is none, and for a file without any."""
        found = array("Q")
        try:
            with open(self.path, "rb") as file:
                opened = gzip.open if file.read(2) == GZIP else open
            with opened(self.path, "rt", encoding="utf-8-sig", errors="surrogateescape") as lines:
                for number, line in enumerate(lines, 1):
                    if entry := COMMENT.sub("", line).strip():
                        found.append(_key(_entry(entry, f"--drop-urls {self.path}: line {number}")))
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise BadInput(f"--drop-urls {self.path}: damaged gzip data ({error})") from None
        if not found:
            raise BadInput(f"--drop-urls {self.path}: holds no host and no URL; give one a line")
        return np.array(found, np.uint64)


class ListedUrls:
    """Entries of all lists; `keys` is uint64 [n], ascending."""

    def __init__(self, keys: np.ndarray) -> None:
        self._keys = keys

    def __contains__(self, url: str) -> bool:
        host, page = parts(url)
        labels = host.split(".")
        names = [page, *(".".join(labels[i:]) for i in range(len(labels)))]
        keys = np.array([_key(name) for name in names], np.uint64)
        place = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        return bool((self._keys[place] == keys).any())


def parts(url: str) -> tuple[str, str]:
    """(host, page) of a URL, the page with its host and a `/` after it: two URLs of one page give one."""
    text = url.strip().partition("#")[0]
    begin = SCHEME.match(text)
    text = text[begin.end() :] if begin else text
    cut = re.search(r"[/?]", text)
    authority, rest = (text[: cut.start()], text[cut.start() :]) if cut else (text, "")
    place = authority.rpartition("@")[2].lower()
    host = _ascii(PORT.sub("", place).rstrip("."))
    port = PORT.search(USUAL_PORTS.sub("", place))
    return host, f"{host}{port[0] if port else ''}/{rest.strip('/') if '?' not in rest else rest.lstrip('/')}"


def _ascii(host: str) -> str:
    if host.isascii() or len(host) > MAX_HOST:
        return host
    try:
        return host.encode("idna").decode()
    except UnicodeError:  # no name of the network's: it is itself
        return host


def _entry(text: str, where: str) -> str:
    """The host or the page that an entry of a list names."""
    host, page = parts(text)
    if "/" in text and host:
        return page
    host = text.lower().removeprefix("*").strip(".")
    if not host or re.search(r"[\s?@*]", host):
        raise BadInput(f"{where}: {text!r:.60} is neither a host nor a URL")
    return _ascii(PORT.sub("", host))


def _key(name: str) -> int:
    return hashing.of_bytes(name.encode("utf-8", "backslashreplace"))
