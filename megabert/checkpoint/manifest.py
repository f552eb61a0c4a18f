"""Manifest of a checkpoint: nothing of it is opened before this, its size and its SHA-256 were compared.

A manifest names plain files of its own folder and nothing else: a name with a slash, `..` or a link is damage.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from megabert.common.canonical_json import sealed
from megabert.common.retry import tried_again

SCHEMA = 2
FIRST_SCHEMA = 1  # DeepSpeed's pickles beside the weights; only the weights are still read
MANIFEST = "manifest.json"
SEAL = "sha256"  # the field that holds the digest of the others
WEIGHTS = "weights.safetensors"
AVERAGE = "average.safetensors"  # of the weights of the run's last updates, where it takes one
FILE_NAME = re.compile(r"weights\.safetensors|average\.safetensors|moments-\d{5,}-of-\d{5,}\.safetensors")
LARGEST_MANIFEST = 256 << 20  # bytes; BERT-LARGE over 1,000 ranks needs 0.3 MB


class _File(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    bytes: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    pieces: dict[str, list[Annotated[list[int], Field(min_length=2, max_length=2)]]] = {}
    first_moment_only: list[str] = []  # parameters of `pieces` without a second moment: Muon's matrices


class _Counters(BaseModel):
    """What `Engine.snapshot` counts."""

    model_config = ConfigDict(strict=True, extra="forbid")
    optimizer_steps: int = Field(ge=0)
    deepspeed: dict[str, int] = {}
    loss_scale: dict[str, float | None] = {}  # a static scale has no last overflow
    primed: bool = False  # moments of another run, before the first update
    amax_history: list[list[float]] = []  # of FP8 linears, an update a row
    averaged: int = Field(0, ge=0)  # updates in the average of the weights


_FILES = TypeAdapter(dict[str, _File])


class Damaged(ValueError):
    """A checkpoint is not what was committed."""


class Outdated(ValueError):
    """A checkpoint was written in an earlier layout, of which only the weights can be used."""


def seal(
    files: Mapping[str, Mapping[str, Any]], state: Mapping[str, Any], engine: Mapping[str, Any]
) -> bytes:
    """The bytes of a manifest."""
    return sealed({"schema": SCHEMA, "files": files, "state": state, "engine": engine}, SEAL)


def read_manifest(path: Path, only: str = "") -> dict[str, Any]:
    """The manifest of a checkpoint folder; with `only` (WEIGHTS or AVERAGE), of either layout, the other files left out.

    Raises Damaged unless it is byte for byte what was written, Outdated when it has an earlier layout.
    """
    file = path / MANIFEST
    try:
        data = tried_again(lambda: _bytes_of(file))
        manifest = json.loads(data)
        if sealed(manifest, SEAL) != data:
            raise Damaged(f"{path.name}/{MANIFEST} is damaged")
        schema = manifest["schema"]
        if schema == FIRST_SCHEMA and not only:
            raise Outdated(
                f"{path}: written by an earlier version of MegaBERT (checkpoint layout {schema}, this one continues "
                f"layout {SCHEMA}); its weights can still be used: name a new run folder and init_from={path}"
            )
        if schema not in (FIRST_SCHEMA, SCHEMA):
            raise Damaged(f"{path.name}/{MANIFEST} has layout {schema}, this program reads {SCHEMA}")
        if WEIGHTS not in manifest["files"]:
            raise Damaged(f"{path.name}/{MANIFEST} names no {WEIGHTS}")
        if only:
            manifest["files"] = {n: entry for n, entry in manifest["files"].items() if n == only}
        files = manifest["files"]
        for name in files:
            if not FILE_NAME.fullmatch(name):
                raise Damaged(f"{path.name}/{MANIFEST} names {name!r}, which is no file of a checkpoint")
        _FILES.validate_python(files)
        if schema == SCHEMA:
            _Counters.model_validate(manifest["engine"])
        if not isinstance(manifest["state"], dict):
            raise Damaged(f"{path.name}/{MANIFEST} holds no state")
    except (Damaged, Outdated):
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{path.name}/{MANIFEST} cannot be read") from error
    return manifest


def _bytes_of(file: Path) -> bytes:
    _check_plain(file, MANIFEST)
    if file.stat().st_size > LARGEST_MANIFEST:
        raise Damaged(f"{file.parent.name}/{MANIFEST} is larger than any manifest")
    return file.read_bytes()


def verify_files(path: Path, entries: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    """Raises Damaged naming the first file that is missing, a link, of another size or with another SHA-256."""
    for name, entry in entries:
        file = path / name
        _check_plain(file, name)
        if file.stat().st_size != entry["bytes"]:
            raise Damaged(f"{path.name}/{name} has {file.stat().st_size} bytes, not {entry['bytes']}")
        if file_sha256(file) != entry["sha256"]:
            raise Damaged(f"{path.name}/{name} has another SHA-256 than when it was saved")


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def entry_of(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file, after its bytes are on the disk."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, "sha256": file_sha256(path)}


def _check_plain(file: Path, name: str) -> None:
    try:
        mode = file.lstat().st_mode
    except FileNotFoundError:
        raise Damaged(f"{file.parent.name}/{name} is missing") from None
    if not stat.S_ISREG(mode):
        raise Damaged(f"{file.parent.name}/{name} is not a plain file")
