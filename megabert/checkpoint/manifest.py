"""Manifest of a checkpoint: nothing of it is opened before this, its size and its SHA-256 were compared.

A manifest names plain files of its own folder and nothing else: a name with a slash, `..` or a link is damage.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from megabert.checkpoint.index import Index, Uncovered
from megabert.common.canonical_json import sealed
from megabert.common.retry import tried_again

SCHEMA = 3
FIRST_SCHEMA = 1  # DeepSpeed's pickles beside the weights; only the weights are still read
SECOND_SCHEMA = 2  # rank 0 gathered the weights into one file; each file's pieces are listed beside it
MANIFEST = "manifest.json"
SEAL = "sha256"  # the field that holds the digest of the others
WEIGHTS, MOMENTS = "weights", "moments"  # what a rank saves, each in a file of its own
AVERAGE = "average"  # files of earlier versions, which are passed over
OLD_FILE_NAME = re.compile(r"weights\.safetensors|moments-\d{5,}-of-\d{5,}\.safetensors")
LARGEST_MANIFEST = 256 << 20  # bytes; one of 512 ranks has 0.3 MB, in the second layout 10

Natural = Annotated[int, Field(ge=0)]


class _File(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    bytes: Natural
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class _OldFile(_File):
    pieces: dict[str, list[Annotated[list[int], Field(min_length=2, max_length=2)]]] = {}
    first_moment_only: list[str] = []  # parameters of `pieces` without a second moment: Muon's matrices


class _Parameter(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    shape: list[Natural]
    pieces: list[Annotated[list[Natural], Field(min_length=3, max_length=3)]]  # runs of the index


class _Layout(BaseModel):
    """What the ranks wrote."""

    model_config = ConfigDict(strict=True)
    ranks: int = Field(gt=0, le=1_000_000)
    files: dict[str, _File]
    parameters: dict[str, _Parameter]
    first_moment_only: list[str]  # parameters without a second moment: Muon's matrices


class _Counters(BaseModel):
    """What `Engine.snapshot` counts."""

    model_config = ConfigDict(strict=True, extra="forbid")
    optimizer_steps: Natural
    deepspeed: dict[str, int] = {}
    loss_scale: dict[str, float | None] = {}  # a static scale has no last overflow
    primed: bool = False  # moments of another run, before the first update


_OLD_FILES = TypeAdapter(dict[str, _OldFile])


class Damaged(ValueError):
    """A checkpoint is not what was committed."""


class _Fault(ValueError):
    """What is wrong with a manifest, said without its name."""


class Outdated(ValueError):
    """A checkpoint was written in an earlier layout, of which only the weights can be used."""


def file_name(group: str, rank: int, ranks: int) -> str:
    """Of the file in which a rank saves its WEIGHTS or MOMENTS."""
    return f"{group}-{rank:05d}-of-{ranks:05d}.safetensors"


def group_of(name: str) -> str:
    """WEIGHTS or MOMENTS: what a file holds, in every layout."""
    return name.partition(".")[0].partition("-")[0]


def has_moments(engine: Mapping[str, Any]) -> bool:
    """Whether there were moments: after an update, or taken over from another run."""
    return bool(engine["optimizer_steps"] or engine.get("primed"))


def seal(layout: Mapping[str, Any], state: Mapping[str, Any], engine: Mapping[str, Any]) -> bytes:
    """The bytes of a manifest. `layout`: its "ranks", "files", "parameters" and "first_moment_only"."""
    manifest = {"schema": SCHEMA, **layout, "state": state, "engine": engine}
    _check(manifest)
    return sealed(manifest, SEAL)


def read_manifest(path: Path, weights_only: bool = False) -> dict[str, Any]:
    """The manifest of a checkpoint folder; `weights_only`: of any layout, the other files left out.

    Raises Damaged unless it is byte for byte what was written, Outdated when it has an earlier layout.
    """
    file = path / MANIFEST
    try:
        data = tried_again(lambda: _bytes_of(file))
        manifest = json.loads(data)
        if sealed(manifest, SEAL) != data:
            raise _Fault("is damaged")
        schema = manifest["schema"]
        if schema == FIRST_SCHEMA and not weights_only:
            raise Outdated(
                f"{path}: written by an earlier version of MegaBERT (checkpoint layout {schema}, this one continues "
                f"layout {SCHEMA}); its weights can still be used: name a new run folder and init_from={path}"
            )
        if schema not in (FIRST_SCHEMA, SECOND_SCHEMA, SCHEMA):
            raise _Fault(f"has layout {schema}, this program reads {SCHEMA}")
        manifest["files"] = {n: entry for n, entry in manifest["files"].items() if group_of(n) != AVERAGE}
        manifest.get("engine", {}).pop("averaged", None)
        if schema == SCHEMA:
            _check(manifest)
        else:
            _check_old(manifest, weights_only)
        if weights_only:
            manifest["files"] = {n: entry for n, entry in manifest["files"].items() if group_of(n) == WEIGHTS}
    except (Damaged, Outdated):
        raise
    except _Fault as error:
        raise Damaged(f"{path.name}/{MANIFEST} {error}") from error
    except Uncovered as error:
        raise Damaged(f"{path.name}/{MANIFEST}: {error}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{path.name}/{MANIFEST} cannot be read") from error
    return manifest


def _check(manifest: Mapping[str, Any]) -> None:
    """Raises ValueError (a _Fault or Uncovered where the text says more) unless fields, files and pieces belong together."""
    layout = _Layout.model_validate(manifest)
    _Counters.model_validate(manifest["engine"])
    if not isinstance(manifest["state"], dict):
        raise _Fault("holds no state")
    index = Index(manifest["parameters"])
    index.check(layout.ranks)
    groups = [WEIGHTS]
    groups += [MOMENTS] if has_moments(manifest["engine"]) else []
    expected = {file_name(group, rank, layout.ranks) for group in groups for rank in index.held}
    for name in sorted(layout.files.keys() - expected):
        raise _Fault(f"names {name!r}, which is no file of a checkpoint")
    for name in sorted(expected - layout.files.keys()):
        raise _Fault(f"names no {name}")


def _check_old(manifest: Mapping[str, Any], weights_only: bool) -> None:
    """The same for the first two layouts."""
    files = manifest["files"]
    if f"{WEIGHTS}.safetensors" not in files:
        raise _Fault(f"names no {WEIGHTS}.safetensors")
    names = [name for name in files if not weights_only or group_of(name) == WEIGHTS]
    for name in names:
        if not OLD_FILE_NAME.fullmatch(name):
            raise _Fault(f"names {name!r}, which is no file of a checkpoint")
    _OLD_FILES.validate_python({name: files[name] for name in names})
    if manifest["schema"] == SECOND_SCHEMA:
        _Counters.model_validate(manifest["engine"])
    if not isinstance(manifest["state"], dict):
        raise _Fault("holds no state")


def _bytes_of(file: Path) -> bytes:
    _check_plain(file, MANIFEST)
    if file.stat().st_size > LARGEST_MANIFEST:
        raise _Fault("is larger than any manifest")
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


def _check_plain(file: Path, name: str) -> None:
    try:
        mode = file.lstat().st_mode
    except FileNotFoundError:
        raise Damaged(f"{file.parent.name}/{name} is missing") from None
    if not stat.S_ISREG(mode):
        raise Damaged(f"{file.parent.name}/{name} is not a plain file")
