"""Bad input is one line that names the file and the byte, or a count: never silence.

`BadInput` is the user's mistake (a ValueError). `Problems` carries the policy of a build: `stop` raises
at the first bad place, `skip` drops the bad part and counts it under a short reason.
"""

from __future__ import annotations

from collections import Counter


class BadInput(ValueError):
    """Something in the input or the options that the user must change."""


class Problems:
    """Policy and counts for bad input.

    `policy` is "stop" or "skip". `counts` maps a reason to how often it was met, only under "skip".
    """

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.counts: Counter[str] = Counter()

    def bad(self, path: str, offset: int | None, reason: str, detail: str = "") -> None:
        """Report one bad place. `offset` is in bytes of the unpacked file, None where there is none."""
        if self.policy == "stop":
            where = path if offset is None else f"{path}: byte {offset}"
            raise BadInput(f"{where}: {detail or reason} (--on-bad skip drops it and goes on)")
        self.counts[reason] += 1
