"""Errors of bad input, and the policy of a build for it.

Bad input is reported in one line that names the file and the byte, or counted.
"""

from __future__ import annotations

from collections import Counter

from megabert.common.errors import FAILED


class BadInput(ValueError):
    """A mistake in the input or the options, which the user has to change."""


class Unfinished(BadInput):
    """The build stopped for another reason than its options; the same command resumes it."""


class WorkerDied(Unfinished):
    """A worker process died; the same command resumes the build."""

    exit_code = FAILED


class Problems:
    """Policy for bad input, and counts of skipped parts.

    Policy "stop" raises at the first bad place, "skip" drops the bad part. `counts` maps a reason to the number of bad places
    under "skip" (empty files are counted under both policies); `dropped` maps a rule to the number of valid documents that it
    dropped, e.g. redirects.
    """

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.counts: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()

    def bad(self, path: str, at: int | None, reason: str, detail: str = "", unit: str = "byte") -> None:
        """Report a bad place. `at` counts `unit`s from 0: bytes of the unpacked file or rows; None: the file."""
        if self.policy == "stop":
            where = path if at is None else f"{path}: {unit} {at}"
            raise Unfinished(f"{where}: {detail or reason} (--on-error skip drops it and continues)")
        self.counts[reason] += 1

    def unreadable(self, path: str, error: OSError, what: str = "file") -> None:
        """Report a file or folder that can't be read."""
        self.bad(path, None, f"unreadable {what}", f"can't be read: {error.strerror}")
