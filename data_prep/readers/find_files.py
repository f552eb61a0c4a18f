"""Files that an input names, in an order that follows from names alone; nothing is opened but small JSON files.

An input is a file, a folder or a glob, here or at a URL. A folder is walked through links, each folder once, hidden names left out. A
dataset that Hugging Face `datasets` saved is the shards its state names. Of a dictionary of them, and of tables that are
named after their splits, one split is read.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from pathlib import Path

from data_prep.common.errors import BadInput, Problems
from data_prep.readers.files import open_regular
from megabert.common import arrow_tables, remote
from megabert.common.arrow_tables import SPLITS, STATE
from megabert.common.remote import is_url

MAGIC = re.compile(r"[*?\[]")
BESIDE_TABLES = (STATE, SPLITS, "dataset_info.json")  # of the library, and no text
MAX_JSON = 64 << 20
TABLE_OF_SPLIT = re.compile(r"(\w+)-\d{5}-of-\d{5}(?:-[0-9a-f]+)?\.(?:parquet|arrow)")  # as the hub names them
SPLIT_NAMES = frozenset(("train", "validation", "valid", "val", "dev", "test"))
EVERY_SPLIT = "all"
LEFT_OUT = "split not read"  # counted once a split


def expand(item: str, problems: Problems, split: str = EVERY_SPLIT) -> Iterator[str]:
    """Files of one input in order, of a saved dataset those of `split`.

    Raises BadInput when nothing is there, or no such split; what can't be read follows the policy.
    """
    if is_url(item):
        yield from _expand_url(item, problems, split)
    elif os.path.isdir(item):
        yield from _walk(item, problems, split)
    elif os.path.lexists(item):
        yield item
    else:
        found = _match(item)
        if not found:
            raise BadInput(f"--input {item}: no such file or folder, and no file matches it")
        for path in found:
            if os.path.isdir(path):
                yield from _walk(path, problems, split)
            else:
                yield path


def _expand_url(item: str, problems: Problems, split: str) -> Iterator[str]:
    if remote.MAGIC.search(item):
        found = remote.matching(item)
        if "**" in item:
            found = {url: folder for url, folder in found.items() if not folder}
        if not found:
            raise BadInput(f"--input {item}: no file matches it")
    else:
        try:
            found = {item: remote.status(item).folder}
        except FileNotFoundError:
            raise BadInput(f"--input {item}: no such file or folder") from None
    for url, folder in found.items():
        if folder:
            yield from _walk(url, problems, split)
        else:
            yield url


def _match(pattern: str) -> list[str]:
    """Sorted names that a glob matches. `**` does not follow links: two loops of them would never end."""
    head, sep, tail = pattern.partition("**")
    if not sep:
        return sorted(glob.glob(pattern))
    base = os.path.dirname(head)
    rest = head[len(base) :].lstrip("/") + sep + tail
    found = []
    for root in sorted(glob.glob(base)) if MAGIC.search(base) else [base or "."]:
        for path in Path(root).glob(rest):
            hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
            if not hidden and not path.is_dir():
                found.append(os.path.join(base and root, path.relative_to(root)))
    return sorted(found)


def _walk(top: str, problems: Problems, split: str) -> list[str]:
    """Files below a folder, sorted by path."""
    found: list[str] = []
    seen: set[tuple[int, int] | str] = set()  # folders
    waiting = [top]
    while waiting:
        folder = waiting.pop()
        try:
            identity = _identity(folder)
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
            found += [
                path
                for part in _chosen(folder, _listed(folder, SPLITS, problems), split, problems)
                for path in _listed(part, STATE, problems)
            ]
            continue
        if STATE in names and "dataset_info.json" in names:
            found += _listed(folder, STATE, problems)
            continue
        if any(path.endswith(".arrow") for path in files):
            files = [path for path in files if os.path.basename(path) not in BESIDE_TABLES]
        found += _of_split(folder, files, split, problems)
        waiting += reversed(folders)
    return sorted(found)


def _identity(folder: str) -> tuple[int, int] | str:
    """What is the same for a folder by whatever links it is reached."""
    if is_url(folder):
        return folder
    status = os.stat(folder)
    return status.st_dev, status.st_ino


def _kinds(folder: str) -> dict[str, bool]:
    """Names in a folder, and whether each is a folder itself."""
    if is_url(folder):
        return remote.names(folder)
    with os.scandir(folder) as entries:  # which knows a folder from a file without another look at the disk
        return {entry.name: _is_folder(entry) for entry in entries}


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself: whoever opens it says so
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
    found = sorted(set(splits.values()))
    if len(found) < 2 or not SPLIT_NAMES.issuperset(found):
        return files
    kept = {os.path.basename(part) for part in _chosen(folder, found, split, problems)}
    return [path for path in files if path not in splits or splits[path] in kept]


def _names(folder: str, file: str) -> list[str]:
    """What a saved dataset's state or a dictionary's list of splits names. Raises BadInput."""
    path = os.path.join(folder, file)
    with open_regular(path) as opened:
        data = opened.read(MAX_JSON)
    try:
        names = arrow_tables.names_in(path, data)
    except arrow_tables.BadTable as error:
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
