"""Checkpoints of a run: taken at one instant, written beside the training, committed by all ranks or not at all."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megabert.checkpoint.manifest import (
    AVERAGE,
    MANIFEST,
    WEIGHTS,
    Damaged,
    Outdated,
    read_manifest,
    seal,
    verify_files,
)
from megabert.checkpoint.tensors import (
    Moments,
    check_moments,
    check_pieces,
    has_moments,
    moments_file,
    read_weights,
    write_moments,
    write_weights,
)
from megabert.common.atomic_io import sync, write_whole
from megabert.common.canonical_json import canonical
from megabert.common.errors import Failed
from megabert.common.logs import log
from megabert.common.retry import tried_again
from megabert.config import CheckpointConfig
from megabert.distributed.process_group import World, discover

if TYPE_CHECKING:
    from megabert.engine.deepspeed_engine import Engine
    from megabert.engine.snapshot import Snapshot

STEP = re.compile(r"step-(\d{8,})")
SAVING = ".saving-"  # prefix of folders that were never committed, or are being removed
POINTER = "pointer.json"
REPLACED = ".replaced-"  # prefix of a checkpoint whose step is being saved again


class _Save(threading.Thread):
    """One rank's part of a save in flight. `files` or `failure` is there when the thread has ended."""

    def __init__(
        self, folder: Path, state: dict[str, Any], snapshot: Snapshot, write: Callable[..., Any]
    ) -> None:
        # No daemon: the interpreter's end would unwind one through safetensors' Rust, which aborts the process.
        super().__init__(name=f"save-{folder.name}")
        self.folder, self.state, self.snapshot = folder, state, snapshot
        self.files: dict[str, dict[str, Any]] = {}
        self.failure: Exception | None = None
        self._write = write

    def run(self) -> None:
        try:
            self.files = self._write(self.folder, self.snapshot)
        except Exception as error:  # raised by `finish`, where all ranks hear of it
            self.failure = error


class Checkpoints:
    """The checkpoints of one run folder. All methods but `pending` and `ready` are collectives."""

    def __init__(self, run_dir: str | Path, world: World, settings: CheckpointConfig | None = None) -> None:
        """`settings` None opens the folder for reading only. Otherwise what dead saves left is removed, so the run's lock
        must be held (`run_lock.take`)."""
        self.run_dir = Path(run_dir)
        self.folder = self.run_dir / "checkpoints"
        self.world, self.settings = world, settings
        self._in_flight: _Save | None = None
        if settings is not None:
            if world.is_main:
                self._clean()
            world.barrier()

    # -- saving ------------------------------------------------------------------------------------------------------

    def save(self, engine: Engine, state: Mapping[str, Any]) -> None:
        """Take a checkpoint of `engine` and `state` (JSON; needs "step", "config"). A collective.

        When `settings.asynchronous`, this returns once the state is copied to host memory (`Engine.snapshot` says what
        that takes) and a thread writes it; `finish` commits. Otherwise it commits at once. A save in flight is
        finished first. Raises as `finish` does.
        """
        assert self.settings is not None, "opened for reading only"
        self.finish()
        snapshot = engine.snapshot()
        folder = self.folder / f"{SAVING}{int(state['step']):08d}"
        self._in_flight = _Save(folder, dict(state), snapshot, self._write)
        self._in_flight.start()
        if not self.settings.asynchronous:
            self.finish()

    @property
    def pending(self) -> bool:
        """A save is in flight; the same on every rank."""
        return self._in_flight is not None

    @property
    def ready(self) -> bool:
        """This rank's part of the save in flight is on the disk, or has failed."""
        return self._in_flight is not None and not self._in_flight.is_alive()

    def finish(self) -> Path | None:
        """Wait for the save in flight and commit it; its folder. None when there is none. A collective.

        When any rank could not write, the earlier checkpoints are untouched, and with `settings.on_error` "stop" every
        rank raises ValueError naming that rank and its reason; with "continue" rank 0 warns and None is returned.
        """
        if self._in_flight is None:
            return None
        save, self._in_flight = self._in_flight, None
        save.join()
        problem = "" if save.failure is None else str(save.failure) or type(save.failure).__name__
        reports = self.world.gather([problem, save.files])
        problems = [report[0] for report in reports]
        step = int(save.state["step"])
        if self.world.is_main and not any(problems):
            files = {name: entry for report in reports for name, entry in report[1].items()}
            state = save.state | {"world_size": self.world.size}
            try:
                self.commit(save.folder, step, seal(files, state, save.snapshot.counters))
            except OSError as error:
                problems = [str(error)]
        if self.world.is_main and any(problems):
            shutil.rmtree(save.folder, ignore_errors=True)
        problems = self.world.broadcast(problems)
        if save.failure is not None and not isinstance(save.failure, OSError):
            raise save.failure
        for rank, found in enumerate(problems):
            if found:
                self._report_failure(step, f"rank {rank}: {found}" if self.world.size > 1 else found)
                return None
        return self.folder / f"step-{step:08d}"

    def commit(self, temporary: Path, step: int, manifest: bytes) -> None:
        """Make the finished folder `temporary` the checkpoint of `step`, then remove what is too old. Rank 0 only."""
        assert self.settings is not None
        write_whole(temporary / MANIFEST, manifest)  # and the entries of the files beside it are on the disk
        final = self.folder / f"step-{step:08d}"
        if final.exists():  # damaged, or saved again after going back: the name is free only for a moment
            os.rename(final, self.folder / f"{REPLACED}{final.name}")
        os.rename(temporary, final)
        sync(self.folder)
        sync(self.run_dir)  # whose entry for `checkpoints` is new at the first one
        write_whole(self.folder / POINTER, canonical({"step": step}))
        steps, every = self._steps(), self.settings.keep_every
        abandoned = [other for other in steps if other > step]  # newer ones that could not be used
        older = [other for other in steps if other <= step][self.settings.keep :]
        for dead in abandoned + [other for other in older if not every or other % every]:
            doomed = self.folder / f"{SAVING}old-{dead:08d}"
            os.rename(self.folder / f"step-{dead:08d}", doomed)
            shutil.rmtree(doomed)
        shutil.rmtree(self.folder / f"{REPLACED}{final.name}", ignore_errors=True)

    def _write(self, folder: Path, snapshot: Snapshot) -> dict[str, dict[str, Any]]:
        """Write this rank's files; their entries in the manifest. In the save's own thread: no collective."""
        folder.mkdir(parents=True, exist_ok=True)  # whichever rank comes first
        files = {}
        if self.world.is_main:
            files[WEIGHTS] = write_weights(folder, snapshot.weights)
            if snapshot.average:
                files[AVERAGE] = write_weights(folder, snapshot.average, AVERAGE)
        if snapshot.pieces:
            name = moments_file(self.world.rank, self.world.size)
            files[name] = write_moments(folder / name, snapshot.pieces)
        return files

    def _report_failure(self, step: int, reason: str) -> None:
        assert self.settings is not None
        text = (
            f"{self.folder}: the checkpoint of step {step} could not be written ({reason}); "
            "the earlier ones are untouched"
        )
        if self.settings.on_error == "stop":
            raise Failed(text)
        self._warn(f"{text}, and training goes on as checkpoint.on_error says")

    def _clean(self) -> None:
        """Remove what saves that died left, or finish the replacement that one of them was in."""
        for replaced in self.folder.glob(f"{REPLACED}*"):
            final = self.folder / replaced.name.removeprefix(REPLACED)
            shutil.rmtree(replaced) if final.exists() else os.rename(replaced, final)
        for leftover in (*self.folder.glob(f"{SAVING}*"), *self.folder.glob(f".{POINTER}.*")):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()

    # -- reading -----------------------------------------------------------------------------------------------------

    def latest(self) -> Path | None:
        """The newest checkpoint that verifies; None when the run has none yet. A collective.

        Falls back to an older one, saying so on stderr. Raises ValueError when there are checkpoints but none is whole,
        or when the newest was written in an earlier layout.
        """
        return self._newest(None)

    def before(self, step: int) -> Path | None:
        """The newest checkpoint of `step` or an earlier step that verifies; None when there is none. A collective.

        Falls back and raises as `latest` does.
        """
        return self._newest(step)

    def read_state(self, path: Path) -> dict[str, Any]:
        """The state saved with a checkpoint that `latest` gave."""
        return read_manifest(path)["state"]

    def load(self, engine: Engine, path: Path) -> dict[str, Any]:
        """Continue `engine` from a checkpoint that `latest` gave; gives its state. A collective.

        Any number of ranks and any ZeRO stage may have written it; with the same ones training goes on bit for bit.
        The weights are mapped, not copied, and of the moments a rank reads its own slices only.
        """
        assert not self.pending, "finish the save in flight first"
        manifest = read_manifest(path)
        average = read_weights(path, AVERAGE) if AVERAGE in manifest["files"] else {}
        engine.restore(read_weights(path), Moments(path, manifest).read, manifest["engine"], average)
        self.world.barrier()
        return manifest["state"]

    def _newest(self, limit: int | None, only: str = "") -> Path | None:
        steps, pointer = self.world.broadcast(
            [self._steps(), _pointer(self.folder)] if self.world.is_main else None
        )
        if limit is not None:
            steps = [step for step in steps if step <= limit]
        reasons = []
        if pointer is not None and pointer not in steps and (limit is None or pointer <= limit):
            reasons.append(f"step {pointer}, the last one committed, is missing")
        for step in steps:
            path = self.folder / f"step-{step:08d}"
            problem = self._problem(path, only)
            if not problem:
                if reasons:
                    self._warn(f"{'; '.join(reasons)}: going back to {path.name}")
                return path
            reasons.append(problem)
        if reasons:
            raise ValueError(
                f"{self.folder}: no checkpoint is whole ({'; '.join(reasons)}); restore one, or name another run folder"
            )
        return None

    def _problem(self, path: Path, only: str) -> str:
        """Why a checkpoint (or its file `only`) is not whole, "" when it is; each rank hashes its share of the files.

        Raises Outdated, on every rank, for one that was written in an earlier layout.
        """
        problem, outdated = "", ""
        try:
            manifest = read_manifest(path, only)
            by_size = sorted(manifest["files"].items(), key=lambda item: -item[1]["bytes"])
            share = by_size[self.world.rank :: self.world.size]
            tried_again(lambda: verify_files(path, share))
            for name, entry in share:
                if name not in (WEIGHTS, AVERAGE):
                    check_moments(path, name, entry)
            if self.world.is_main and not only:
                check_pieces(path, manifest)
        except Outdated as error:
            outdated = str(error)
        except (Damaged, OSError) as error:
            problem = str(error)
        found = self.world.gather([problem, outdated])
        if old := next((text for _, text in found if text), ""):
            raise Outdated(old)
        return next((text for text, _ in found if text), "")

    def _steps(self) -> list[int]:
        """Committed steps, newest first."""
        found = (STEP.fullmatch(entry.name) for entry in self.folder.glob("step-*"))
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def _warn(self, text: str) -> None:
        if self.world.is_main:
            log.warning(text)


def _is_checkpoint(path: Path) -> bool:
    """Whether a path is one checkpoint's folder and not a run's."""
    return (path / MANIFEST).is_file() and STEP.fullmatch(path.resolve().name) is not None


def load_weights(source: str | Path, average: bool = False) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Verified fp32 weights by parameter name, and the saved state, of a run folder or one checkpoint folder.

    With `average` their average over the run's last updates, and in the state "averaged", how many these were. Every rank
    reads for itself, this one file alone; an earlier layout's too. Raises ValueError naming `source` when it holds no whole
    checkpoint, or no average.
    """
    path, name = Path(source), AVERAGE if average else WEIGHTS
    if _is_checkpoint(path):
        manifest = read_manifest(path, name)
        verify_files(path, manifest["files"].items())
    else:
        alone = World(0, 0, 1, discover({}).device, "gloo", "single")
        newest = Checkpoints(path, alone)._newest(None, name)
        if newest is None:
            raise ValueError(f"{source}: no checkpoint in it; name a run folder or one of its checkpoints")
        path = newest
        manifest = read_manifest(path, name)
    if name not in manifest["files"]:
        raise ValueError(
            f"{source}: {path.name} holds no average of weights; train with average.share above 0, up to the share of the "
            "budget in which it is taken"
        )
    averaged = {"averaged": manifest["engine"]["averaged"]} if average else {}
    return read_weights(path, name), manifest["state"] | averaged


def start_engine(engine: Engine, source: str | Path, world: World) -> dict[str, Any]:
    """Begin `engine` with the weights and moments of a run folder's newest whole checkpoint, or of one checkpoint folder;
    the state saved with them. A collective.

    Raises ValueError naming `source` when it holds no whole checkpoint, or one without moments or with another optimizer's.
    """
    path = Path(source)
    checkpoints = Checkpoints(path, world)
    if _is_checkpoint(path):
        if problem := checkpoints._problem(path, ""):
            raise ValueError(f"init_from={source}: {problem}")
    else:
        newest = checkpoints.latest()
        if newest is None:
            raise ValueError(
                f"init_from={source}: no checkpoint in it; name a run folder or one of its checkpoints"
            )
        path = newest
    manifest = read_manifest(path)
    if not has_moments(manifest):
        raise ValueError(
            f"init_from={source} holds no moments; set init_moments=false to start from its weights alone"
        )
    name, ours = manifest["state"]["config"]["optimizer"]["name"], engine.config.optimizer.name
    if name != ours:
        raise ValueError(
            f"init_from={source} holds the moments of optimizer.name={name} and this run's is {ours}; set init_moments=false "
            "to start from its weights alone"
        )
    engine.load_weights(read_weights(path))
    engine.take_moments(Moments(path, manifest).read)
    world.barrier()
    return manifest["state"]


def newest_step(run_dir: str | Path) -> int | None:
    """The step of the newest committed checkpoint of a run folder, which may be one that is being written to; or None."""
    return _pointer(Path(run_dir) / "checkpoints")


def write_start(run_dir: str | Path, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> Path:
    """Make whole fp32 `weights` the checkpoint of step 0 of a run folder that nobody else writes; its folder.

    It has no moments, as after no update. `state` as in `Checkpoints.save`, without "step".
    """
    alone = World(0, 0, 1, discover({}).device, "gloo", "single")
    checkpoints = Checkpoints(run_dir, alone, CheckpointConfig())
    folder = checkpoints.folder / f"{SAVING}{0:08d}"
    folder.mkdir(parents=True)
    files = {WEIGHTS: write_weights(folder, weights)}
    manifest = seal(files, dict(state) | {"step": 0, "world_size": 1}, {"optimizer_steps": 0})
    checkpoints.commit(folder, 0, manifest)
    return checkpoints.folder / f"step-{0:08d}"


def _pointer(folder: Path) -> int | None:
    """The step in pointer.json; None when there is none or it is damaged: the folders themselves then decide."""
    try:
        return int(json.loads((folder / POINTER).read_bytes())["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
