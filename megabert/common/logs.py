"""Messages of commands and runs: one logger, plain lines on stdout from rank 0, warnings and errors on stderr with their rank.

`log.info` is for what all ranks would say alike: rank 0 says it. `log.warning` and `log.error` come from whoever calls them.
MEGABERT_LOG names the lowest level that is shown: debug, info (default), warning or error.
"""

from __future__ import annotations

import logging
import os
import sys

log = logging.getLogger("megabert")
LEVELS = ("debug", "info", "warning", "error")


class _Lines(logging.Handler):
    """Writes to the streams of the moment, so that whoever replaces sys.stdout sees the lines."""

    prefix, is_main = "", True

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.levelno >= logging.WARNING:
            print(f"{self.prefix}{record.levelname.lower()}: {text}", file=sys.stderr, flush=True)
        elif self.is_main or record.levelno < logging.INFO:
            print(f"{self.prefix}{text}", flush=True)


_lines = _Lines()


def setup(rank: int = 0, size: int = 1, level: str = "") -> None:
    """Send the project's messages to this process' streams as rank `rank` of `size`. Called by commands, again once the
    rank is known. Raises ValueError for a level that does not exist."""
    if _lines not in log.handlers:  # first, so that a mistake below is said by it
        log.addHandler(_lines)
    log.propagate = False
    _lines.prefix, _lines.is_main = f"rank {rank}: " if rank else "", rank == 0
    name = (level or os.environ.get("MEGABERT_LOG") or "info").lower()
    if name not in LEVELS:
        raise ValueError(f"MEGABERT_LOG={name}: choose {', '.join(LEVELS)}")
    log.setLevel(name.upper())
