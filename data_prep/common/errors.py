"""Errors of bad input, and the policy of a build for it.

Bad input is reported in one line that names the file and the byte, or counted.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

from megabert.common import storage
from megabert.common.errors import FAILED, exit_code

EMPTY, UNREADABLE = "empty file", "unreadable file"
# files named for a reason
NAMED_FILES = 5
# reason -> {"bytes": lost bytes as far as they are known, "files": the first NAMED_FILES with such places, in order}
Losses = dict[str, dict[str, Any]]


def printable(path: str) -> str:
    """A file's name in which bytes that are not UTF-8, surrogates in Python, are U+FFFD; of a web address without its secrets."""
    return os.fsencode(storage.public(path)).decode(errors="replace")


def counted(count: int, plural: str) -> str:
    """`1 file`, `1,000 files`."""
    return f"{count:,} {plural.removesuffix('s') if count == 1 else plural}"


class BadInput(ValueError):
    """A mistake in the input or the options, which the user has to change."""


class UnknownFormat(BadInput):
    """A file of no format that is read."""


class NoTextField(BadInput):
    """A table without the column that --text-field names, or one that is not text."""


class Damaged(BadInput):
    """A packed file whose rest cannot be read: `lost` bytes, if known. `whole`: these are not part of its text."""

    def __init__(self, message: str, lost: int = 0, whole: bool = False) -> None:
        super().__init__(message)
        self.lost, self.whole = lost, whole


class Unfinished(BadInput):
    """The build stopped for another reason than its options; the same command resumes it."""


class WorkerDied(Unfinished):
    """A worker process died; the same command resumes the build."""

    exit_code = FAILED


def refuse_failure(error: BaseException, path: str) -> None:
    """Raises `error`, which names `path`, if a disk or store failed, which is not the input's damage."""
    if isinstance(error, OSError) and exit_code(error) == FAILED:
        if error.errno is not None:  # a failed read has no file name
            error.filename = error.filename or path
        raise error


class Problems:
    """Policy for bad input, and counts of skipped parts.

    Policy "stop" raises at the first bad place, "skip" drops the bad part. `counts` maps a reason to the number of bad places
    under "skip" (empty files are counted under both policies), `lost` to the bytes and files; `dropped` maps a rule to the number
    of valid documents that it dropped, e.g. redirects, `changed` to the places where it changed the text of a document; `formats`
    maps a format to the number of files and members read as such, `guesses` a kind of documents of plain text to the archives, and
    files outside a folder's sample, for which it was chosen; and members of a split for evaluation beside others.
    """

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.counts: Counter[str] = Counter()
        self.lost: Losses = {}
        self.dropped: Counter[str] = Counter()
        self.changed: Counter[str] = Counter()
        self.formats: Counter[str] = Counter()
        self.guesses: dict[str, dict[str, None]] = {}

    def total(self) -> int:
        """The number of places and documents that were dropped."""
        return self.counts.total() + self.dropped.total()

    def bad(
        self, path: str, at: int | None, reason: str, detail: str = "", unit: str = "byte", size: int = 0, places: int = 1
    ) -> None:  # fmt: skip
        """Report `places` bad places with `size` bytes together, 0 if unknown.

        `at`, the place of the first, counts `unit`s from 0: bytes of the unpacked file or rows; None: the file.
        """
        if self.policy == "stop":
            where = path if at is None else f"{path}: {unit} {at}"
            raise Unfinished(f"{where}: {detail or reason} (--on-error skip drops it and continues)")
        self.add(path, reason, size, places)

    def add(self, path: str, reason: str, size: int = 0, places: int = 1) -> None:
        """Count places and bytes of a file under both policies."""
        self.counts[reason] += places
        add_losses(self.lost, {reason: {"bytes": size, "files": [printable(path)]}})

    def unreadable(self, path: str, error: OSError, reason: str = UNREADABLE) -> None:
        """Report a file or folder that can't be read. Raises `error` if its disk or store failed, under both policies."""
        refuse_failure(error, path)
        self.bad(path, None, reason, f"can't be read: {error.strerror}")


def add_losses(losses: Losses, more: Losses) -> None:
    """Add `more`, which follows in the order of the input, to `losses`."""
    for reason, loss in more.items():
        before = losses.get(reason, {"bytes": 0, "files": []})
        named = list(dict.fromkeys([*before["files"], *loss["files"]]))[:NAMED_FILES]
        losses[reason] = {"bytes": before["bytes"] + loss["bytes"], "files": named}


def describe_losses(counts: dict[str, int], lost: Losses) -> str:
    """`invalid UTF-8 3 (212 bytes; novels/a.txt), empty file 1 (b.txt)`, or "none"."""
    parts = []
    for reason, count in sorted(counts.items()):
        loss = lost.get(reason, {"bytes": 0, "files": []})
        files = ", ".join(loss["files"][:2]) + ", …" * (len(loss["files"]) > 2)
        more = "; ".join(filter(None, (f"{loss['bytes']:,} bytes" if loss["bytes"] else "", files)))
        parts.append(f"{reason} {count:,}" + f" ({more})" * bool(more))
    return ", ".join(parts) or "none"
