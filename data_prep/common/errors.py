"""Errors of bad input, and the policy of a build for it.

Bad input is reported in one line that names the file and the byte, or counted: it is never silent.
"""

from __future__ import annotations

from collections import Counter

from megabert.common.errors import FAILED


class BadInput(ValueError):
    """Something in the input or the options that the user must change."""


class Unfinished(BadInput):
    """The build stopped for a reason outside of its options; the same command resumes it."""


class WorkerDied(Unfinished):
    """A worker process died, which is nobody's mistake; the same command resumes the build."""

    exit_code = FAILED


class Problems:
    """Policy for bad input, and counts of what was left out.

    Policy "stop" raises at the first bad place, "skip" drops the bad part. `counts` maps a reason to its number of bad places
    under "skip" (an empty file is counted under both); `dropped` maps a rule to the documents of good input that it left out, a
    redirect for example.
    """

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.counts: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()

    def bad(self, path: str, at: int | None, reason: str, detail: str = "", unit: str = "byte") -> None:
        """Report one bad place. `at` counts `unit`s from 0: bytes of the unpacked file or rows; None: no place."""
        if self.policy == "stop":
            where = path if at is None else f"{path}: {unit} {at}"
            raise Unfinished(f"{where}: {detail or reason} (--on-error skip drops it and continues)")
        self.counts[reason] += 1

    def unreadable(self, path: str, error: OSError, what: str = "file") -> None:
        """Report a file or folder that can't be read."""
        self.bad(path, None, f"unreadable {what}", f"can't be read: {error.strerror}")
