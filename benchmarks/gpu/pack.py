"""Pack of what a bare machine lacks: wheels, the native library, datasets, and of which revision they are.

`benchmarks/gpu_pack.py` writes it, the suite reads it. Only the standard library: the reader runs where nothing is installed.
"""

from __future__ import annotations

import hashlib
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

from benchmarks.common import hardware

ROOT = hardware.ROOT
FOLDER = ROOT / "build" / "gpu_pack"
RECORD = "pack.json"  # written first, and whole at the end
LIBRARY = "native/_native.abi3.so"
NATIVE_SOURCES = ("csrc/**/*.cpp", "csrc/**/*.cu", "csrc/**/*.cuh", "csrc/**/*.h", "csrc/**/*.inl", "setup.py")
SOURCES = (*NATIVE_SOURCES, "megabert/**/*.py", "megabert/**/*.toml", "benchmarks/**/*.py")
MAKE = "python benchmarks/gpu_pack.py makes one"


def digest(patterns: tuple[str, ...]) -> str:
    """SHA-256 over names and bytes of this tree's files: the same in every copy of a revision."""
    found = hashlib.sha256()
    for path in sorted({path for pattern in patterns for path in ROOT.glob(pattern)}):
        name = path.relative_to(ROOT).as_posix()
        found.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return found.hexdigest()


class Pack:
    """A finished pack. Raises ValueError where the folder holds none."""

    def __init__(self, folder: Path) -> None:
        path = folder / RECORD
        self.folder, self.record = folder, json.loads(path.read_text()) if path.is_file() else {}
        if "data" not in self.record:
            raise ValueError(f"{folder}: is no finished pack; {MAKE}")

    def data(self, seq_len: int) -> Path:
        """The dataset of rows of `seq_len` tokens."""
        lengths = self.record["data"]
        if str(seq_len) not in lengths:
            raise ValueError(f"{self.folder}: holds rows of {', '.join(lengths)} tokens, not of {seq_len}")
        return self.folder / lengths[str(seq_len)]

    def library(self) -> Path | None:
        """The native library, if it was built from this tree's native sources."""
        same = self.record["native_sources"] == digest(NATIVE_SOURCES)
        return self.folder / LIBRARY if same and (self.folder / LIBRARY).is_file() else None

    def origin(self) -> tuple[str, list[str]]:
        """Revision and changes of this tree, which has no git here: those of the pack, if the sources are the pack's."""
        about = self.record["about"]
        changes = list(about.get("changes", []))
        if self.record["sources"] != digest(SOURCES):
            changes.append("sources differ from the pack's")
        return about["revision"], changes

    def unpack_wheels(self, site: Path) -> str:
        """Unpacks every wheel into `site`, to be put on PYTHONPATH; says what was done.

        Installing one is no more than that but for its commands, which nothing here calls (PEP 427).
        """
        here, meant = f"{sys.version_info[0]}.{sys.version_info[1]}", self.record["python"]
        if here != meant:
            return f"not used: they are of Python {meant}, this is {here}"
        wheels = sorted((self.folder / "wheels").glob("*.whl"))
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)
        return f"{len(wheels)} unpacked"


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def write_record(folder: Path, record: dict[str, Any]) -> None:
    about = hardware.about()
    more = {"sources": digest(SOURCES), "native_sources": digest(NATIVE_SOURCES)}
    (folder / RECORD).write_text(json.dumps({"about": about, **more, **record}, indent=1) + "\n")
