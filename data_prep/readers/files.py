"""Input files: which files an input names, in an order that follows from the names alone, and how a file is opened.

An input is a file, a folder or a glob. Folders are walked through links, each folder once, hidden
names left out. A dataset that Hugging Face `datasets` saved is the shards that its state names. Of a dictionary of them, and of
tables that are named after their splits, one split is read.
"""

from __future__ import annotations

import glob
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from data_prep.common.errors import BadInput, Problems
from megabert.common.files import refuse_url
from megabert.common.tables import SPLITS, STATE, BadTable, names_in

MAGIC = re.compile(r"[*?\[]")
# files of the `datasets` library beside its tables, which hold no text
BESIDE_TABLES = (STATE, SPLITS, "dataset_info.json")
MAX_JSON = 64 << 20
# as the Hugging Face hub names tables
TABLE_OF_SPLIT = re.compile(r"(\w+)-\d{5}-of-\d{5}(?:-[0-9a-f]+)?\.(?:parquet|arrow)")
SPLIT_NAMES = frozenset(("train", "validation", "valid", "val", "dev", "test"))
EVERY_SPLIT = "all"
# counted once for each split that is not read
LEFT_OUT = "split not read"


@dataclass(frozen=True)
class FileStatus:
    """Whether a path is a regular file, its bytes, and the time of its last change in ns."""

    regular: bool
    size: int
    stamp: int


def status(path: str) -> FileStatus:
    """Raises OSError."""
    found = os.stat(path)
    return FileStatus(stat.S_ISREG(found.st_mode), found.st_size, found.st_mtime_ns)


def open_regular(path: str) -> BinaryIO:
    """The file, open for reading. Raises BadInput for a pipe, device or socket, without waiting on it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    file = os.fdopen(descriptor, "rb")
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise BadInput(f"{path}: not a regular file")
    return file


def expand(item: str, problems: Problems, split: str = EVERY_SPLIT) -> Iterator[str]:
    """Files of one input in order, of a saved dataset those of `split`.

    Raises BadInput when there is no such file or split; what can't be read follows the policy of `problems`.
    """
    refuse_url(item)
    if os.path.isdir(item):
        yield from _walk(item, problems, split)
    elif os.path.lexists(item):
        yield item
    else:
        matches = _match(item)
        if not matches:
            raise BadInput(f"--input {item}: no such file or folder, and no file matches it")
        for path in matches:
            if os.path.isdir(path):
                yield from _walk(path, problems, split)
            else:
                yield path


def _match(pattern: str) -> list[str]:
    """Sorted names that a glob matches. `**` does not follow links: two loops of them would never end."""
    head, sep, tail = pattern.partition("**")
    if not sep:
        return sorted(glob.glob(pattern))
    base = os.path.dirname(head)
    rest = head[len(base) :].lstrip("/") + sep + tail
    matches = []
    for root in sorted(glob.glob(base)) if MAGIC.search(base) else [base or "."]:
        for path in Path(root).glob(rest):
            hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
            if not hidden and not path.is_dir():
                matches.append(os.path.join(base and root, path.relative_to(root)))
    return sorted(matches)


def _walk(top: str, problems: Problems, split: str) -> list[str]:
    """Files below a folder, sorted by path."""
    paths: list[str] = []
    seen: set[tuple[int, int]] = set()
    waiting = [top]
    while waiting:
        folder = waiting.pop()
        try:
            status = os.stat(folder)
            # the same by whatever links it is reached
            identity = (status.st_dev, status.st_ino)
            if identity in seen:
                continue
            seen.add(identity)
            kinds = {name: kind for name, kind in _kinds(folder).items() if not name.startswith(".")}
            names = sorted(kinds)
            folders = [os.path.join(folder, name) for name in names if kinds[name]]
        except OSError as error:
            problems.unreadable(folder, error, "folder")
            continue
        files = [os.path.join(folder, name) for name in names if not kinds[name]]
        if SPLITS in names:
            paths += [
                path
                for part in _chosen(folder, _listed(folder, SPLITS, problems), split, problems)
                for path in _listed(part, STATE, problems)
            ]
            continue
        if STATE in names and "dataset_info.json" in names:
            paths += _listed(folder, STATE, problems)
            continue
        if any(path.endswith(".arrow") for path in files):
            files = [path for path in files if os.path.basename(path) not in BESIDE_TABLES]
        paths += _of_split(folder, files, split, problems)
        waiting += reversed(folders)
    return sorted(paths)


def _kinds(folder: str) -> dict[str, bool]:
    """Names in a folder, and whether each is a folder itself."""
    with os.scandir(folder) as entries:  # which separates folders from files without a second system call
        return {entry.name: _is_folder(entry) for entry in entries}


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself, reported when it is opened
        return False


def _chosen(folder: str, parts: list[str], split: str, problems: Problems) -> list[str]:
    """Those of the paths `parts`, named after their splits, that are to be read; the others are counted."""
    names = [os.path.basename(part) for part in parts]
    if split == EVERY_SPLIT or not parts:
        return parts
    if split not in names:
        raise BadInput(f"{folder}: has no split {split!r} (it has {', '.join(names)}); name one, or all, with --split")
    problems.counts[LEFT_OUT] += len(parts) - 1
    return [part for part in parts if os.path.basename(part) == split]


def _of_split(folder: str, files: list[str], split: str, problems: Problems) -> list[str]:
    """The files of a folder without the tables of other splits, where tables of several lie side by side."""
    matches = {path: TABLE_OF_SPLIT.fullmatch(os.path.basename(path)) for path in files}
    splits = {path: match[1] for path, match in matches.items() if match}
    names = sorted(set(splits.values()))
    if len(names) < 2 or not SPLIT_NAMES.issuperset(names):
        return files
    kept = {os.path.basename(part) for part in _chosen(folder, names, split, problems)}
    return [path for path in files if path not in splits or splits[path] in kept]


def _names(folder: str, file: str) -> list[str]:
    """The paths that a saved dataset's state, or a dictionary's list of splits, names. Raises BadInput."""
    path = os.path.join(folder, file)
    with open_regular(path) as opened:
        data = opened.read(MAX_JSON)
    try:
        names = names_in(Path(path), data)
    except BadTable as error:
        raise BadInput(str(error)) from None
    return [os.path.join(folder, name) for name in names]


def _listed(folder: str, file: str, problems: Problems) -> list[str]:
    try:
        return _names(folder, file)
    except OSError as error:
        path = os.path.join(folder, file)
        problems.unreadable(path, error)
    except BadInput:
        if problems.policy == "stop":
            raise
        problems.counts["damaged dataset folder"] += 1
    return []
