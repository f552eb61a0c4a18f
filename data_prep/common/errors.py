"""Errors of bad input, and the policy of a build towards it.

Bad input is one line that names the file and the byte, or a count: never silence. `BadInput` is the user's mistake (a
ValueError). `Problems` carries the policy of a build: `stop` raises at the first bad place, `skip` drops the bad part and
counts it under a short reason. What a rule leaves out of good input (a redirect, an empty field) is counted under both.
"""

from __future__ import annotations

from collections import Counter

from megabert.common.errors import FAILED, Failed


class BadInput(ValueError):
    """Something in the input or the options that the user must change."""


class Unfinished(BadInput):
    """Something outside of the options stopped a build, which goes on where it was when it is started again."""


class WorkerDied(Unfinished):
    """A worker process is gone: nobody's mistake, and the same command goes on."""

    exit_code = FAILED


class Problems:
    """Policy and counts for bad input, and counts of what was left out by rule.

    `policy` is "stop" or "skip". `counts` maps a reason to how often it was met, only under "skip" (an empty file
    counts always); `dropped` maps a rule to the documents it left out; `noted` counts what
    is no problem and yet to be told.
    """

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.counts: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self.noted: Counter[str] = Counter()

    def bad(self, path: str, at: int | None, reason: str, detail: str = "", unit: str = "byte") -> None:
        """Report one bad place. `at` counts `unit`s from 0: bytes of the unpacked file or rows; None: no place."""
        if self.policy == "stop":
            where = path if at is None else f"{path}: {unit} {at}"
            raise Unfinished(f"{where}: {detail or reason} (--on-error skip drops it and goes on)")
        self.counts[reason] += 1

    def unreadable(self, path: str, error: OSError, what: str = "file") -> None:
        """Report a file or folder that can't be read. A network that fails is no bad input: its error is raised again."""
        if isinstance(error, Failed):
            raise error
        self.bad(path, None, f"unreadable {what}", f"can't be read: {error.strerror}")
