"""A checkpoint is whole or it is not used, and a run never starts over in silence.

All ranks write into a temporary folder; every file is fsynced and hashed by the rank that wrote it; rank 0 writes the
manifest, renames the folder to `step-NNNNNNNN` and replaces `pointer.json`. Whatever dies before the rename leaves the
previous checkpoint in place. Before anything is loaded every file is hashed again.

    run/checkpoints/pointer.json                  the newest step
    run/checkpoints/step-00001000/manifest.json   {"files": {name: {"bytes", "sha256"}}, "state": {...}, "sha256"}
                                  weights.safetensors   fp32 weights by parameter name: readable without DeepSpeed
                                  engine/…, random-…    DeepSpeed's state and random-number states, a file a rank
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from megabert.distributed import World, discover

if TYPE_CHECKING:
    from megabert.engine import Engine

SCHEMA = 1
WEIGHTS = "weights.safetensors"
STEP = re.compile(r"step-(\d{8,})")
SAVING = ".saving-"  # prefix of folders that were never committed, or are being removed
REPLACED = ".replaced-"  # prefix of a checkpoint whose step is being saved again

# Fields of the config that decide what the weights and moments mean, and which rows an update holds.
FIXED = ("model", "batch.global_size", "optimizer.name", "precision", "seed")
FREE = ("dropout", "attention_dropout", "activation_checkpointing")  # fields of the model that may change


class Damaged(ValueError):
    """A checkpoint is not what was committed."""


class Checkpoints:
    """The checkpoints of one run folder."""

    def __init__(self, run_dir: str | Path, world: World, keep: int | None = None) -> None:
        """`keep` newest checkpoints stay; None opens the folder for reading only. Removes what dead saves left."""
        self.run_dir = Path(run_dir)
        self.folder = self.run_dir / "checkpoints"
        self.world, self.keep = world, keep
        if keep is not None:
            if world.is_main:
                for replaced in self.folder.glob(
                    f"{REPLACED}*"
                ):  # died between the two renames of a replacement
                    final = self.folder / replaced.name.removeprefix(REPLACED)
                    shutil.rmtree(replaced) if final.exists() else replaced.rename(final)
                for leftover in self.folder.glob(f"{SAVING}*"):
                    shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
            world.barrier()

    def save(self, engine: Engine, state: Mapping[str, Any]) -> Path:
        """Commit a checkpoint of `engine` and `state` (JSON; needs "step", "config"). A collective.

        Raises ValueError on every rank when any rank could not write; the previous checkpoint is then untouched.
        """
        assert self.keep is not None, "opened for reading only"
        step, problem, files = int(state["step"]), "", {}
        temporary = self.folder / f"{SAVING}{step:08d}"
        if self.world.is_main:
            try:
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
            except OSError as error:
                problem = str(error)
        self._agree(problem, temporary)
        written: list[Path] = []
        try:
            written = engine.save(temporary)
        except OSError as error:
            problem = str(error)
        self._agree(problem, temporary)
        weights = engine.consolidated_weights()
        try:
            if self.world.is_main:
                written.append(write_weights(temporary, weights))
            files = {str(path.relative_to(temporary)): _seal(path) for path in written}
        except OSError as error:
            problem = str(error)
        self._agree(problem, temporary)
        files = {name: entry for part in self.world.gather(files) for name, entry in part.items()}
        if self.world.is_main:
            try:
                self.commit(temporary, step, files, {**state, "world_size": self.world.size})
            except OSError as error:
                problem = str(error)
        self._agree(problem, temporary)
        return self.folder / f"step-{step:08d}"

    def latest(self) -> Path | None:
        """The newest checkpoint that verifies; None when the run has none yet. A collective.

        Falls back to an older one, saying so on stderr. Raises ValueError when there are checkpoints but none is whole.
        """
        steps = self.world.broadcast(self._steps() if self.world.is_main else None)
        pointer = self.world.broadcast(_pointer(self.folder) if self.world.is_main else None)
        reasons = []
        if pointer is not None and pointer not in steps:
            reasons.append(f"step {pointer}, the last one committed, is missing")
        for step in steps:
            path = self.folder / f"step-{step:08d}"
            problem = self._problem(path)
            if not problem:
                if reasons:
                    self._warn(f"warning: {'; '.join(reasons)}: going back to {path.name}")
                return path
            reasons.append(problem)
        if reasons:
            raise ValueError(
                f"{self.folder}: no checkpoint is whole ({'; '.join(reasons)}); restore one, or name another run folder"
            )
        return None

    def read_state(self, path: Path) -> dict[str, Any]:
        """The state saved with a checkpoint that `latest` gave."""
        return read_manifest(path)["state"]

    def load(self, engine: Engine, path: Path) -> dict[str, Any]:
        """Continue `engine` from a checkpoint that `latest` gave, bit for bit; gives its state. A collective.

        Raises ValueError when the number of ranks, the ZeRO stage or the precision is another.
        """
        state = self.read_state(path)
        zero = engine.config.zero
        for field, saved, now in (
            ("ranks", state["world_size"], self.world.size),
            ("zero.stage", state["config"]["zero"]["stage"], zero.stage),
            ("zero.offload", state["config"]["zero"]["offload"], zero.offload),
        ):
            if saved != now:
                raise ValueError(
                    f"{path}: saved with {field} {saved}, this run has {now}: resuming at another world size or ZeRO "
                    f"stage is not supported yet; start with {field} {saved}"
                )
        engine.load(path)
        return state

    def _steps(self) -> list[int]:
        """Committed steps, newest first."""
        found = (STEP.fullmatch(entry.name) for entry in self.folder.glob("step-*"))
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def commit(
        self, temporary: Path, step: int, files: dict[str, dict[str, Any]], state: dict[str, Any]
    ) -> None:
        """Make the finished folder `temporary` the checkpoint of `step`, then remove what is too old. Rank 0 only."""
        assert self.keep is not None
        body = {"schema": SCHEMA, "files": files, "state": state}
        manifest = canonical(body | {"sha256": hashlib.sha256(canonical(body)).hexdigest()})
        write_durably(temporary / "manifest.json", manifest)
        for folder in {temporary, *((temporary / name).parent for name in files)}:
            _sync_folder(folder)
        final = self.folder / f"step-{step:08d}"
        if final.exists():  # damaged, or saved again after going back: the name is free only for a moment
            os.rename(final, self.folder / f"{REPLACED}{final.name}")
        os.rename(temporary, final)
        _sync_folder(self.folder)
        write_durably(self.folder / f"{SAVING}pointer", canonical({"step": step}))
        os.replace(self.folder / f"{SAVING}pointer", self.folder / "pointer.json")
        _sync_folder(self.folder)
        steps = self._steps()
        abandoned = [other for other in steps if other > step]  # newer ones that could not be used
        older = [other for other in steps if other <= step]
        for dead in abandoned + older[self.keep :]:
            path = self.folder / f"step-{dead:08d}"
            doomed = path.rename(self.folder / f"{SAVING}old-{dead:08d}")
            shutil.rmtree(doomed)
        shutil.rmtree(self.folder / f"{REPLACED}{final.name}", ignore_errors=True)

    def _problem(self, path: Path) -> str:
        """Why a checkpoint is not whole, "" when it is; each rank hashes its share of the files."""
        problem = ""
        try:
            manifest = read_manifest(path)
            by_size = sorted(manifest["files"].items(), key=lambda item: -item[1]["bytes"])
            verify_files(path, by_size[self.world.rank :: self.world.size])
        except (Damaged, OSError) as error:
            problem = str(error)
        return next((p for p in self.world.gather(problem) if p), "")

    def _agree(self, problem: str, temporary: Path) -> None:
        found = [
            f"rank {rank}: {text}" if self.world.size > 1 else text
            for rank, text in enumerate(self.world.gather(problem))
            if text
        ]
        if found:
            if self.world.is_main:
                shutil.rmtree(temporary, ignore_errors=True)
            raise ValueError(
                f"{self.folder}: the checkpoint could not be written ({found[0]}); the previous one is untouched"
            )

    def _warn(self, text: str) -> None:
        if self.world.is_main:
            print(f"{self.folder}: {text}", file=sys.stderr, flush=True)


def load_weights(source: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Verified fp32 weights by parameter name, and the saved state, of a run folder or one checkpoint folder.

    Every rank reads for itself. Raises ValueError naming `source` when it holds no whole checkpoint.
    """
    path = Path(source)
    alone = World(0, 0, 1, discover({}).device, "gloo", "single")
    if not (path / "manifest.json").is_file() or not STEP.fullmatch(path.resolve().name):
        newest = Checkpoints(path, alone).latest()
        if newest is None:
            raise ValueError(f"{source}: no checkpoint in it; name a run folder or one of its checkpoints")
        path = newest
    manifest = read_manifest(path)
    if WEIGHTS not in manifest["files"]:
        raise ValueError(f"{path}: it has no {WEIGHTS}")
    verify_files(path, [(WEIGHTS, manifest["files"][WEIGHTS])])
    return load_file(path / WEIGHTS), manifest["state"]


def write_weights(folder: Path, weights: Mapping[str, Tensor]) -> Path:
    """Write `weights.safetensors`. Raises OSError when the disk does not take it."""
    path = folder / WEIGHTS
    try:
        save_file(dict(weights), path, metadata={"format": "pt"})
        path.chmod(0o644)  # the library makes it readable by its owner alone
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from error
    return path


def check_compatible(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Refuse to continue a run on other data or as another model.

    Both hold "dataset", "tokenizer" (SHA-256) and "config". Raises ValueError naming the field and both values.
    """
    for key, what in (("dataset", "dataset fingerprint"), ("tokenizer", "tokenizer SHA-256")):
        _refuse(what, saved[key], current[key])
    for name in FIXED:
        old, new = _at(saved["config"], name), _at(current["config"], name)
        if isinstance(old, dict):
            for field in sorted(old.keys() | new.keys()):
                if field not in FREE:
                    _refuse(f"{name}.{field}", old.get(field), new.get(field))
        else:
            _refuse(name, old, new)


def read_manifest(path: Path) -> dict[str, Any]:
    """A checkpoint's manifest. Raises Damaged unless it is byte for byte what `canonical` writes."""
    try:
        data = (path / "manifest.json").read_bytes()
        manifest = json.loads(data)
        if manifest["schema"] != SCHEMA:
            raise Damaged(
                f"{path.name}/manifest.json has schema {manifest['schema']}, this program reads {SCHEMA}"
            )
        body = {key: manifest[key] for key in ("schema", "files", "state")}
        if canonical(body | {"sha256": hashlib.sha256(canonical(body)).hexdigest()}) != data:
            raise Damaged(f"{path.name}/manifest.json is damaged")
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, Damaged):
            raise
        raise Damaged(f"{path.name}/manifest.json cannot be read") from error
    return manifest


def verify_files(path: Path, entries: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    """Raises Damaged naming the first file that is missing, of another size or with another SHA-256."""
    for name, entry in entries:
        file = path / name
        if not file.is_file():
            raise Damaged(f"{path.name}/{name} is missing")
        if file.stat().st_size != entry["bytes"]:
            raise Damaged(f"{path.name}/{name} has {file.stat().st_size} bytes, not {entry['bytes']}")
        if file_sha256(file) != entry["sha256"]:
            raise Damaged(f"{path.name}/{name} has another SHA-256 than when it was saved")


def canonical(value: Any) -> bytes:
    """The one JSON text of `value`."""
    return (json.dumps(value, sort_keys=True, indent=1) + "\n").encode()


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_durably(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _seal(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file, after its bytes are on the disk."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, "sha256": file_sha256(path)}


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _pointer(folder: Path) -> int | None:
    """The step in pointer.json; None when there is none or it is damaged: the folders themselves then decide."""
    try:
        return int(json.loads((folder / "pointer.json").read_bytes())["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _at(tree: Mapping[str, Any], name: str) -> Any:
    node: Any = tree
    for part in name.split("."):
        node = node[part]
    return node


def _refuse(field: str, saved: Any, current: Any) -> None:
    if saved != current:
        raise ValueError(
            f"cannot resume: {field} is {current!r} but the checkpoint was made with {saved!r}; "
            "set it back or name a new run folder"
        )
