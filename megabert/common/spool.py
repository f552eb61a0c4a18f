"""Spools: what a command has written so far, kept beside its output until that is whole, so that it goes on after a kill.

A spool is a hidden folder `.NAME.partial` with append-only files and `progress.json`, which says how many bytes of each
belong to a state that the caller described. After a kill the files are cut to these bytes and the caller goes on behind
that state. A spool of another command (other `facts`) begins anew.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from megabert.common.atomic_io import write_whole
from megabert.common.canonical_json import canonical
from megabert.common.file_lock import lock
from megabert.common.retry import tried_again

PROGRESS, LOCK = "progress.json", "lock"


def folder_of(output: Path) -> Path:
    """Where the spool of `output` is, if there is one."""
    return output.with_name(f".{output.name}.partial")


class Spool:
    """Files by name, and the state they belong to; `facts` are everything that decides what is written.

    It is kept unless it is finished, has no state yet, or ends by a mistake of the user's (ValueError), by which the same
    command would end again. Raises ValueError when another process is writing the same output.
    """

    def __init__(self, output: Path, facts: Mapping[str, Any], names: Sequence[str], seconds: float = 5.0) -> None:
        """State is brought to the disk every `seconds`, and when the block ends."""
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
        """Bytes of each file; the state and `resumed` are set where the folder is one of the same command. Raises OSError."""
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
        """Brings the state to the disk."""
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())
        tree = {"facts": self.facts, "state": self.state, "sizes": self.sizes}
        write_whole(self.folder / PROGRESS, canonical(tree))
        self.on_disk = time.monotonic()

    def finish(self) -> None:
        """The output is there: nothing of the spool is needed behind the block."""
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
