"""Long jobs over files: results in order from threads that work ahead, and output that resumes after a kill.

A spool is a hidden folder `.NAME.partial` beside the output, with append-only files and `progress.json`, which holds how many
bytes of each file belong to a state that the caller described. After a kill the files are cut to these bytes and the caller
resumes from that state. A spool of another command (other `facts`) is discarded.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeVar

from megabert.common.errors import tried_again
from megabert.common.files import canonical, lock, write_whole

PROGRESS, LOCK = "progress.json", "lock"
T = TypeVar("T")
R = TypeVar("R")


def in_order(
    function: Callable[[T], R],
    items: Iterable[T],
    threads: int,
    waiting: int,
    begin: Callable[[], object] = lambda: None,
) -> Generator[R, None, None]:
    """`function(item)` of each item in their order, computed by `threads` threads that are at most `waiting` items ahead.

    `items` are taken in the caller's thread. Each thread calls `begin` first. What `function` raises is raised here, and
    later items are not started.
    """
    queue: deque[Future[R]] = deque()
    with ThreadPoolExecutor(threads, initializer=begin) as pool:
        try:
            for item in items:
                queue.append(pool.submit(function, item))
                if len(queue) > waiting:
                    yield queue.popleft().result()
            while queue:
                yield queue.popleft().result()
        finally:
            for future in queue:
                future.cancel()


def folder_of(output: Path) -> Path:
    """The folder of the spool of `output`, if there is one."""
    return output.with_name(f".{output.name}.partial")


class Spool:
    """Files by name, and the state they belong to; `facts` are everything that decides what is written.

    It is kept unless it is finished, has no state yet, or ends by a user error (ValueError), which would end the same command
    again. Raises ValueError when another process is writing the same output.
    """

    def __init__(self, output: Path, facts: Mapping[str, Any], names: Sequence[str], seconds: float = 5.0) -> None:
        """State is synced to the disk every `seconds`, and when the block ends."""
        self.folder = folder_of(output)
        self.seconds, self.facts, self.names = seconds, json.loads(canonical(dict(facts))), names
        self.files: dict[str, IO[bytes]] = {}
        self.state: dict[str, Any] = {}
        self.resumed = self.whole = False

    def __enter__(self) -> Spool:
        self.folder.mkdir(exist_ok=True)
        self.lock = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            lock(self.lock, self.folder / LOCK, "let no second command write this output")
        except BlockingIOError:
            os.close(self.lock)
            raise ValueError(f"{self.folder}: another process is writing it; wait for it, or stop it") from None
        try:
            sizes = self._read()
            for name in self.names:
                self.files[name] = open(self.folder / name, "r+b" if self.resumed else "w+b")
                self.files[name].truncate(sizes.get(name, 0))
                self.files[name].seek(0, os.SEEK_END)
        except BaseException:
            os.close(self.lock)
            raise
        self.sizes, self.on_disk = sizes, time.monotonic()
        return self

    def _read(self) -> dict[str, int]:
        """Bytes of each file; sets the state and `resumed` where the folder is of the same command. Raises OSError."""
        path = self.folder / PROGRESS
        try:
            tree = json.loads(tried_again(path.read_bytes))
            same = tree["facts"] == self.facts and all(
                (self.folder / name).stat().st_size >= tree["sizes"][name] for name in self.names
            )
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            same = False
        if not same:
            path.unlink(missing_ok=True)
            return {}
        self.state, self.resumed = tree["state"], True
        return tree["sizes"]

    def advance(self, state: Mapping[str, Any]) -> None:
        """All that was written to the files so far belongs to `state`."""
        self.state = dict(state)
        self.sizes = {name: file.tell() for name, file in self.files.items()}
        if time.monotonic() - self.on_disk >= self.seconds:
            self.commit()

    def commit(self) -> None:
        """Sync the files and the state to the disk."""
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())
        tree = {"facts": self.facts, "state": self.state, "sizes": self.sizes}
        write_whole(self.folder / PROGRESS, canonical(tree))
        self.on_disk = time.monotonic()

    def finish(self) -> None:
        """The output is complete: the spool is removed when the block ends."""
        self.whole = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        keep = bool(self.state) and not self.whole and not isinstance(error, ValueError)
        try:
            if keep:
                self.commit()
        finally:
            for file in self.files.values():
                file.close()
            if not keep:
                shutil.rmtree(self.folder)
            os.close(self.lock)
