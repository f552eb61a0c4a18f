"""Items of a measuring run: one process works through them, and is started again behind an item that broke or stopped it.

A kernel that has never run may write where it must not, which spoils the device for the rest of its process, or never
end. So the items are worked off by a child, which journals each one's begin and end; its parent, which holds no device,
ends an item at its limit and starts the child again behind it. What an item found is in the journal before the next begins.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TIME_UP = "the run's time was used up"
RESTART, STOP = 75, 76  # exit codes of the child: the device is spoilt; a needed item failed
POLL_SECONDS = 0.1
TAIL = 3000  # characters of the log kept with an item that ended the process


class Absent(Exception):
    """What an item measures is not in this revision, or not on this machine."""


@dataclass(frozen=True)
class Item:
    """A function and its arguments, by names, so that a new process finds them; `group` is skipped where it broke one."""

    part: str
    name: str
    function: str  # "module:function"
    arguments: dict[str, Any] = field(default_factory=dict)
    cost: float = 5.0  # seconds it is expected to take: it is not begun with less left
    limit: float = 60.0  # seconds after which the process is ended
    group: str = ""
    needed: bool = False  # nothing is measured without it

    @property
    def key(self) -> str:
        return f"{self.part}/{self.name}"


class Journal:
    """Lines of JSON: `begin` and `end` of items. Parent and child never write at the same time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def entries(self) -> list[dict[str, Any]]:
        if not self.path.is_file():
            return []
        lines = self.path.read_bytes().split(b"\n")
        return [json.loads(line) for line in lines[:-1]]  # what is behind the last line end is still being written

    def write(self, **entry: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def begin(self, item: Item) -> None:
        self.write(begin=item.key, at=time.time(), limit=item.limit)

    def end(self, key: str, state: str, seconds: float, **found: Any) -> None:
        """state: done, absent (not in this revision or machine), skipped (no time), failed."""
        self.write(end=key, state=state, seconds=round(seconds, 2), **found)

    def results(self) -> dict[str, dict[str, Any]]:
        """What each ended item came to."""
        return {e["end"]: {k: v for k, v in e.items() if k != "end"} for e in self.entries() if "end" in e}

    def current(self) -> dict[str, Any] | None:
        """The item that was begun and has not ended."""
        entries = self.entries()
        return entries[-1] if entries and "begin" in entries[-1] else None


def work(items: Sequence[Item], journal: Journal, ends: Mapping[str, float], healthy: Callable[[], bool]) -> int:
    """Works off what the journal has no end of; `ends` are the parts' (seconds of the epoch). The child's exit code.

    `healthy` says after an item that failed whether the process can go on using its device.
    """
    for item in items:
        results = journal.results()
        if item.key in results:
            if item.needed and results[item.key]["state"] == "failed":
                return STOP
            continue
        spoiled = next((i.key for i in items if i.group == item.group != "" and broke(results.get(i.key))), "")
        left = ends[item.part] - time.time()
        if spoiled:
            journal.end(item.key, "skipped", 0, reason=f"{spoiled} ended the process")
            continue
        if left < item.cost and not item.needed:
            reason = f"{max(0, left):.0f} s left of its part's time, it takes about {item.cost:.0f}"
            journal.end(item.key, "skipped", 0, reason=reason)
            continue
        journal.begin(item)
        start = time.monotonic()
        try:
            module, _, name = item.function.partition(":")
            value = getattr(importlib.import_module(module), name)(**item.arguments)
        except Absent as error:
            journal.end(item.key, "absent", time.monotonic() - start, reason=str(error))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"[:2000]
            more: dict[str, Any] = {"trace": traceback.format_exc()[-TAIL:]}
            spoiled_device = not item.needed and not healthy()
            if spoiled_device:
                more["broke"] = True
            journal.end(item.key, "failed", time.monotonic() - start, reason=reason, **more)
            if item.needed:
                return STOP
            if spoiled_device:
                return RESTART
        else:
            journal.end(item.key, "done", time.monotonic() - start, value=value)
    return 0


def broke(result: dict[str, Any] | None) -> bool:
    return bool(result and result.get("broke"))


def supervise(
    command: list[str], journal: Journal, log: Path, env: Mapping[str, str], end: float, changed: Callable[[], None]
) -> int:
    """Runs the child until it is done, again behind an item that broke it; its last exit code. `end`: seconds of the epoch.

    `changed` is called after items ended. A child that dies twice without having begun anything is given up.
    """  # fmt: skip
    idle = 0
    while True:
        seen, before = len(journal.results()), len(journal.entries())
        with log.open("ab") as file, tempfile.TemporaryDirectory() as compiled:
            # its own: what a process compiled half when it was ended would break the next one
            caches = {"TORCHINDUCTOR_CACHE_DIR": compiled, "TRITON_CACHE_DIR": f"{compiled}/triton"}
            child = subprocess.Popen(command, stdout=file, stderr=file, env={**env, **caches}, start_new_session=True)
            try:
                why = _watch(child, journal, end, changed, seen)
            finally:
                _end(child)
        current = journal.current()
        if current is not None:
            reason = why or f"the process ended by {_code(child.returncode)}"
            seconds = time.time() - current["at"]
            state = "skipped" if why == TIME_UP else "failed"
            journal.end(current["begin"], state, seconds, reason=reason, broke=True, trace=tail(log))
        changed()
        idle = idle + 1 if len(journal.entries()) == before else 0
        if child.returncode in (0, STOP) or time.time() > end or idle == 2:
            return child.returncode


def _watch(child: subprocess.Popen[bytes], journal: Journal, end: float, changed: Callable[[], None], seen: int) -> str:
    """Waits for the child's end, or for the moment it has to be ended; why, or ""."""
    while child.poll() is None:
        time.sleep(POLL_SECONDS)
        count = len(journal.results())
        if count != seen:
            seen = count
            changed()
        current, now = journal.current(), time.time()
        if current is not None and now > current["at"] + current["limit"]:
            return f"no end after {current['limit']:.0f} s"
        if now > end:
            return TIME_UP
    return ""


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ends the child and what it started: its own session."""
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _code(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def tail(log: Path) -> str:
    return log.read_bytes()[-TAIL:].decode(errors="replace") if log.is_file() else ""
