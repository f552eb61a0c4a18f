"""Expansion of inputs to files, in an order that depends only on their names, and opening of files.

An input is a file, a folder or a glob, or their URL in a store (`megabert.common.storage`). Walks follow links, visit
each folder once and skip hidden names.
"""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import BinaryIO

from data_prep.common.errors import BadInput, Problems, UnknownFormat, counted, printable
from megabert.common import storage
from megabert.common.logs import log

MAGIC = re.compile(r"[*?\[]")
# files of a folder that describe its data, read only where an input names them, and members of an archive, never read
ABOUT_DATA = re.compile(
    r"(readme|licen[cs]e|copying|notice|citation)(\.(md|txt|rst|html|cff|bib))?"
    r"|dataset_infos?\.json|dataset_dict\.json|croissant\.json|(sha\d*|md5)sums?(\.txt)?|_success|_metadata|_common_metadata",
    re.IGNORECASE,
)
# the name of a file or folder of a split for evaluation: test.jsonl, wiki.valid.tokens, validation-00000-of-00002.parquet
EVALUATION_SPLIT = re.compile(
    r"(?:.*[._-])?(test|validation|valid|val|dev)(?:[._-]?\d)*(?:-of-\d+)?(?:\.\w+)*", re.IGNORECASE
)
# a dataset of the hub by its name alone, and the branch in which the hub converts datasets to Parquet
HUB_DATASET, CONVERTED = re.compile(r"hf://datasets/[^/@*?[]+/[^/@*?[]+/?"), "refs/convert/parquet"
# other names of a store's scheme
SCHEMES = {"gcs": "gs", "s3a": "s3", "abfs": "az"}
# files beside the tables of a saved dataset of Hugging Face `datasets`
BESIDE_TABLES = re.compile(r"state\.json|dataset_info\.json|dataset_dict\.json|cache-.*\.arrow")


def describes_data(path: str) -> bool:
    return bool(ABOUT_DATA.fullmatch(os.path.basename(path)))


def status(path: str) -> tuple[int, int]:
    """(bytes, modification time in ns) of a file, (bytes, a number for its version) of an object. Raises UnknownFormat if it is not a
    regular file, and OSError."""
    if storage.is_url(path):
        return storage.stat(path).stamp
    info = os.stat(path)
    if not stat.S_ISREG(info.st_mode):
        raise UnknownFormat(f"{path}: not a regular file")
    return info.st_size, info.st_mtime_ns


def open_regular(path: str) -> BinaryIO:
    """The file, open for reading. Raises UnknownFormat for a pipe, device or socket, without blocking on it."""
    if storage.is_url(path):
        return storage.open_object(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    file = os.fdopen(descriptor, "rb")
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise UnknownFormat(f"{path}: not a regular file")
    return file


def real_path(path: str) -> str:
    """`path` with links resolved, or a URL by one name of its scheme. Folders are cached, since millions of files are in few of them."""
    if storage.is_url(path):
        scheme, rest = path.split(":", 1)
        return f"{SCHEMES.get(scheme.lower(), scheme.lower())}:{rest}"
    if os.path.islink(path):
        return os.path.realpath(path)
    folder, name = os.path.split(path)
    return os.path.join(real_folder(folder), name)


@lru_cache(maxsize=1024)
def real_folder(folder: str) -> str:
    return os.path.realpath(folder)


def start_of(folder: str | os.PathLike[str]) -> str:
    """The beginning of the real paths, or the URLs, of all that is in a folder."""
    folder = os.fspath(folder)
    is_url = storage.is_url(folder)
    return storage.join(real_path(folder), "") if is_url else os.path.join(os.path.realpath(folder), "")


def matches(item: str, problems: Problems) -> list[str]:
    """The file or folder of that name, or the matches of a glob; of a URL itself. Raises BadInput if there is none."""
    if storage.is_url(item):
        return [item]
    paths = [item] if os.path.lexists(item) else _match(item, problems)
    if not paths:
        raise BadInput(f"--input {item}: no such file or folder, and no file matches it")
    return paths


def folder_of_input(item: str) -> str:
    """The folder of an input: itself, or that of a file, or of a glob's first part."""
    if storage.is_url(item):
        return storage.glob_folder(item) or item
    if os.path.isdir(item):
        return item
    return os.path.dirname(item if os.path.lexists(item) else MAGIC.split(item, maxsplit=1)[0] + "*") or "."


class InputNotices:
    """Counts of files to tell the user about: those left out, by the reason, and those of evaluation splits."""

    SHOWN = 3

    def __init__(self) -> None:
        # number and first names of each kind
        self._counts = Counter[str]()
        self._shown: dict[str, list[str]] = {}
        self._beside_split = ""

    def count_and_select(self, path: str, item: str, named: bool) -> bool:
        """Count a file of the input `item` by its kind; returns whether to read it. `named`: not by a glob's last part."""
        inside = path[len(item) :].strip("/")
        names = [os.path.basename(item.rstrip("/")), *filter(None, inside.split("/"))]
        split = next((name for name in names if EVALUATION_SPLIT.fullmatch(name)), "")
        kind = "about" if (inside or not named) and describes_data(path) else "evaluation" if split else "other"
        if kind == "evaluation" and not self._counts[kind]:
            self._beside_split = os.path.join(path[: path.rindex(split)], "train*")
        self.count(kind, path)
        return kind != "about"

    def count(self, kind: str, path: str) -> None:
        self._counts[kind] += 1
        shown = self._shown.setdefault(kind, [])
        if len(shown) < self.SHOWN:
            shown.append(printable(path))

    def log(self) -> None:
        """A line for each kind."""
        n = self._counts
        shown = {kind: ", ".join(names) + ", …" * (n[kind] > self.SHOWN) for kind, names in self._shown.items()}
        for kind, what, which in (
            ("about", "files", " that describe data"),
            ("hidden", "hidden names", ""),
            ("repeated", "files", " that an earlier input or link has"),
        ):
            if n[kind]:
                remedy = "; to read them name them with --input" * (kind != "repeated")
                log.info(f"left out: {counted(n[kind], what)}{which} ({shown[kind]}){remedy}")
        if n["evaluation"] and n["other"]:
            those = f"{counted(n['evaluation'], 'files')} of a test or validation split"
            log.warning(
                f"--input: {those} will be training text ({shown['evaluation']}); to leave them out name the others, "
                f"as --input '{self._beside_split}'"
            )


def expand(item: str, problems: Problems, notices: InputNotices) -> Iterator[str]:
    """Files of one input in order, without those that `notices` leaves out.

    Raises BadInput if there is no such file; unreadable ones follow the policy of `problems`.
    """
    if storage.is_url(item):
        item = _training_split(item) if HUB_DATASET.fullmatch(item) else item
        top = folder_of_input(item)
        found = []
        for each in storage.find(item):
            if _is_hidden(each.url.removeprefix(top)):
                notices.count("hidden", each.url)
            else:
                found.append(each.url)
        if not found:
            raise BadInput(f"--input {item}: no such object or folder, and no object matches it")
        is_glob = bool(storage.glob_folder(item))
        named = not (is_glob and MAGIC.search(os.path.basename(item)))
        yield from (url for url in found if notices.count_and_select(url, url if is_glob else item, named))
        return
    for path in matches(item, problems):
        below = _walk(path, problems, notices) if os.path.isdir(path) else (path,)
        named = path == item or not MAGIC.search(os.path.basename(item))
        yield from (file for file in below if notices.count_and_select(file, path, named))


def _match(pattern: str, problems: Problems) -> list[str]:
    """Sorted matches of a glob. Hidden names match only patterns that begin with a dot. `**` matches folders at any
    depth except hidden ones and links (which may loop); a pattern with `**` matches only files. Unreadable folders
    follow `problems`."""
    parts = [part for part in pattern.split("/") if part]
    paths, recursive = ["/" if pattern.startswith("/") else ""], False
    for number, part in enumerate(parts, 1):
        if part == "**":
            paths, recursive = [below for path in paths for below in _folders(path, problems)], True
        elif MAGIC.search(part):
            paths = [
                os.path.join(path, entry.name)
                for path in paths
                for entry in _entries(path, problems)
                if fnmatchcase(entry.name, part)
                and (not _is_hidden(entry.name) or (part.startswith(".") and not recursive))
                and (number == len(parts) or _is_folder(entry))
            ]
        else:
            named = (os.path.join(path, part) for path in paths if not (recursive and _is_hidden(part)))
            paths = [path for path in named if os.path.lexists(path)]
    if recursive or pattern.endswith("/"):
        paths = [path for path in paths if os.path.isdir(path) != recursive]
    return sorted(set(paths) - {""})


def _folders(top: str, problems: Problems) -> Iterator[str]:
    """`top`, and the folders below it that are neither hidden nor links."""
    waiting = [top]
    while waiting:
        folder = waiting.pop()
        yield folder
        shown = (entry for entry in _entries(folder, problems) if not _is_hidden(entry.name))
        waiting += [os.path.join(folder, entry.name) for entry in shown if not entry.is_symlink() and _is_folder(entry)]


def _entries(folder: str, problems: Problems) -> list[os.DirEntry[str]]:
    """Entries of a folder ("" for the current one); [] for a file."""
    folder = folder or os.curdir
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except NotADirectoryError:
        return []
    except OSError as error:
        problems.unreadable(folder, error, "unreadable folder")
        return []


def _training_split(item: str) -> str:
    """The training split of a dataset of the hub in the hub's own conversion to Parquet; `item` where there is no whole one. Raises
    BadInput naming the configurations if there are several."""
    base = f"{item.rstrip('/')}@{CONVERTED}"
    # CONFIGURATION/SPLIT/NUMBER.parquet
    places = {tuple(found.url.split("/")[-3:-1]) for found in storage.find(base)}
    configurations = sorted(configuration for configuration, split in places if split == "train")
    if len(configurations) > 1:
        named = ", ".join(configurations)
        raise BadInput(
            f"--input {item}: has the configurations {named}; name one, as {base}/{configurations[0]}/train/*.parquet"
        )
    if not configurations:
        return item
    glob = f"{base}/{configurations[0]}/train/*.parquet"
    log.info(f"{item}: reading its training split, {glob}; for other files name a glob")
    return glob


def _is_hidden(path: str) -> bool:
    """Whether a name in a path below a folder is hidden."""
    return any(name.startswith(".") for name in path.split("/"))


def _walk(top: str, problems: Problems, notices: InputNotices) -> Iterator[str]:
    """Files below a folder, sorted by path; all folders are read first. Hidden names are counted in `notices`."""
    # names in each folder, joined, since an input has millions of them
    listed: dict[str, str] = {}
    seen: set[tuple[int, int]] = set()
    waiting = [top]
    while waiting:
        folder = waiting.pop()
        try:
            info = os.stat(folder)
            if (info.st_dev, info.st_ino) in seen:
                continue
            seen.add((info.st_dev, info.st_ino))
            with os.scandir(folder) as entries:  # distinguishes folders and files without another system call
                every = {entry.name: _is_folder(entry) for entry in entries}
        except OSError as error:
            problems.unreadable(folder, error, "unreadable folder")
            continue
        shown = {name: is_folder for name, is_folder in every.items() if not name.startswith(".")}
        for name in sorted(every.keys() - shown.keys()):
            notices.count("hidden", os.path.join(folder, name))
        names = sorted(shown)
        tables = any(name.endswith(".arrow") for name in names)
        waiting += [os.path.join(folder, name) for name in reversed(names) if shown[name]]
        listed[folder] = "\0".join(
            f"{name}/" if shown[name] else name
            for name in names
            if shown[name] or not (BESIDE_TABLES.fullmatch(name) and (tables or name == "dataset_dict.json"))
        )
    left = [f"{top}/"]
    while left:
        path = left.pop()
        if not path.endswith("/"):
            yield path
        # otherwise empty, unreadable, or listed under another name
        elif joined := listed.pop(path[:-1], ""):
            left += sorted((os.path.join(path[:-1], name) for name in joined.split("\0")), reverse=True)


class SeenFiles:
    """Seen paths: names by folder, as a set in the most recent folders, joined in the others."""

    # recent folders, since a walk alternates between a folder and its subfolders
    RECENT = 64

    def __init__(self) -> None:
        self._joined: dict[str, str] = {}
        self._recent: dict[str, set[str]] = {}

    def add(self, path: str) -> bool:
        """Whether the path is new."""
        folder, name = os.path.split(path)
        names = self._recent.pop(folder, None) or set(self._joined.pop(folder, "").split("/"))
        if len(self._recent) == self.RECENT:
            oldest = next(iter(self._recent))
            self._joined[oldest] = "/".join(self._recent.pop(oldest))
        self._recent[folder] = names  # the last one
        new = name not in names
        names.add(name)
        return new


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself, reported when it is opened
        return False
