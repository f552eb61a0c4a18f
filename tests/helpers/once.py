"""What is made once for all processes of a test run."""

from __future__ import annotations

import fcntl
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def folder(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """The folder of this name, which `make` fills."""
    base = factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    path = shared / name
    with open(shared / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            try:
                make(path)
            except BaseException:
                shutil.rmtree(path, ignore_errors=True)
                raise
    return path


def value(factory: pytest.TempPathFactory, name: str, make: Callable[[], Any]) -> Any:
    """The value of this name, which `make` returns."""

    def write(path: Path) -> None:
        found = make()
        path.mkdir()
        (path / "value").write_bytes(pickle.dumps(found))

    return pickle.loads((folder(factory, name, write) / "value").read_bytes())
