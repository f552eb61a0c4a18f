"""Checkpoints of a run: snapshots that are written while training continues, and committed by all ranks or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from megabert.checkpoint import run_lock
from megabert.checkpoint.format import (
    MANIFEST,
    MOMENTS,
    WEIGHTS,
    DamagedCheckpoint,
    StoredTensors,
    check_files,
    describe_slices,
    file_name,
    index_slices,
    read_manifest,
    seal,
    share,
    verify_files,
    write_slices,
)
from megabert.common import chain
from megabert.common.background import BackgroundTask
from megabert.common.errors import OK, Failed, describe, exit_code, with_retries
from megabert.common.files import canonical, compact, replace_folder, sync, write_atomically
from megabert.common.logs import log
from megabert.common.run_files import BEST, CONFIG, SINK_IDS, SLOW_RANKS, STEP, TOKENIZER_FILES, checkpoint_name
from megabert.config import CheckpointConfig
from megabert.distributed.ranks import World, on_main, on_main_long, raise_on_all_ranks

if TYPE_CHECKING:
    from megabert.checkpoint.mirror import Mirror
    from megabert.engine import Engine, Snapshot

T = TypeVar("T")
POINTER = "pointer.json"
SAVING = ".saving-"  # prefix of folders that are not committed yet, or are being removed
REPLACED = ".replaced-"  # prefix of a checkpoint that is being replaced by another of the same step
DAMAGED = "damaged-"  # prefix of damaged checkpoints that were renamed to free their names
# A rank's status of the save in flight; the maximum over the ranks decides.
COMMITTED, NOT_COMMITTED, COMMITTING, WRITTEN, NOT_WRITTEN, WRITING = range(6)


@dataclass
class SaveInFlight:
    """A save that is not committed yet. Every rank writes; when all have written, rank 0 commits."""

    folder: Path
    state: dict[str, Any]
    counters: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    writing: BackgroundTask
    started: float  # performance counter at its start
    written: bool = False  # all ranks have written; the same on every rank
    committing: BackgroundTask | None = None  # on rank 0 only


class Checkpoints:
    """The checkpoints of one run folder. All ranks must call the same methods, except `status`."""

    def __init__(
        self, run_dir: str | Path, world: World, settings: CheckpointConfig | None = None, mirror: Mirror | None = None
    ) -> None:
        """`settings`: None opens the folder read-only. Otherwise the run lock must be held (`run_lock.acquire`), since
        leftovers of interrupted saves are deleted here. `mirror`: the run's mirror on rank 0, None elsewhere."""
        self.run_dir = Path(run_dir)
        self.folder = self.run_dir / "checkpoints"
        self.world, self.settings, self.mirror = world, settings, mirror
        self._in_flight: SaveInFlight | None = None
        self.saved_step = -1  # step of the checkpoint that was saved last, or that `latest` returned; -1 without one
        self._damaged: set[int] = set()  # steps of damaged checkpoints, as far as known on rank 0
        # callbacks: `progress()` while a save makes progress, `saved(seconds)` after each commit
        self.progress: Callable[[], None] = lambda: None
        self.saved: Callable[[float], None] = lambda seconds: None
        self.manifest: dict[str, Any] = {}  # manifest of the checkpoint that `verify` read last
        if settings is not None:
            if world.is_main:
                self._remove_leftovers()
            # part of folder names, so that a job that lost the lock does not write to folders of the next job
            self._token = world.broadcast(secrets.token_hex(4))

    # -- saving ------------------------------------------------------------------------------------------------------

    def save(self, engine: Engine, state: Mapping[str, Any]) -> None:
        """Save a checkpoint of `engine` and `state` (JSON; needs "step", "config"). A collective if a save is in flight, which is
        finished first. Raises as `advance`.

        If `settings.asynchronous`, this returns once this rank's part is copied to host memory (`Engine.snapshot`). Threads
        write and commit it: the ranks reduce their `status` from time to time and pass the maximum to `advance`, or wait in
        `finish`. Otherwise it commits the checkpoint.
        """
        self.finish()
        started = time.perf_counter()
        self.save_snapshot(engine.snapshot(), state, started)

    def save_snapshot(self, snapshot: Snapshot, state: Mapping[str, Any], started: float) -> None:
        """`save` of an existing snapshot. `started`: `time.perf_counter()` when the save began. No save may be in
        flight."""
        assert self.settings is not None, "opened for reading only"
        folder = self.folder / f"{SAVING}{int(state['step']):08d}-{self._token}"
        writing = BackgroundTask(f"save-{folder.name}", partial(self._write, folder, snapshot))
        self._in_flight = SaveInFlight(folder, dict(state), snapshot.counters, snapshot.shapes, writing, started)
        if not self.settings.asynchronous:
            self.finish()
        self.progress()

    def save_and_wait(self, engine: Engine, step: int, state: Callable[[], Mapping[str, Any]]) -> None:
        """Save the current `state`, that of `step`, unless its checkpoint exists, and wait until it is committed."""
        self.finish()
        if self.saved_step != step:
            self.save(engine, state())
            self.finish()

    @property
    def in_flight(self) -> tuple[int, int] | None:
        """Step and data cursor of the save in flight."""
        return (self._in_flight.state["step"], self._in_flight.state["cursor"]) if self._in_flight else None

    @property
    def status(self) -> int:
        """This rank's status of the save in flight, for `advance`; 0 if there is none."""
        save = self._in_flight
        if save is None:
            return COMMITTED
        if not save.written:
            return save.writing.status(running=WRITING, failed=NOT_WRITTEN, done=WRITTEN)
        if save.committing is None:  # rank 0 commits
            return COMMITTED
        return save.committing.status(running=COMMITTING, failed=NOT_COMMITTED, done=COMMITTED)

    def advance(self, status: int) -> None:
        """Move the save in flight to its next stage if `status` allows it.

        `status`: the maximum of all ranks' status; it may be some updates old, but was reduced after `save`. The result is the same
        on every rank; a collective only after a failure. If any rank could not write, earlier checkpoints are unchanged, and every
        rank raises Failed naming that rank and its reason.
        """
        save = self._in_flight
        if save is None:
            return
        if not save.written:
            if status == WRITTEN:
                save.written = True
                if self.world.is_main:
                    save.committing = BackgroundTask(f"commit-{save.folder.name}", partial(self._commit, save))
            elif status == NOT_WRITTEN:
                self._abort_save(save)
        elif status == NOT_COMMITTED:
            self._abort_save(save)
        elif status == COMMITTED:
            self._in_flight, self.saved_step = None, int(save.state["step"])
            self.saved(time.perf_counter() - save.started)
            self.progress()

    def finish(self) -> None:
        """Wait until the save in flight, if there is one, is committed. A collective. Raises as `advance`."""
        while (save := self._in_flight) is not None:
            if not save.written:
                self._wait(save.writing, save.folder)
            elif save.committing is not None:
                save.committing.join()
            self.advance(self.world.max_ints([self.status])[0])

    def _wait(self, writing: BackgroundTask, folder: Path) -> None:
        """Wait until this rank's files are written; growing files are reported as progress."""
        files, size = [folder / file_name(g, self.world.rank, self.world.size) for g in (WEIGHTS, MOMENTS)], -1
        while writing.is_alive():
            writing.join(1.0)
            before, size = size, sum(file.stat().st_size for file in files if file.exists())
            if size != before:
                self.progress()

    def commit(self, temporary: Path, step: int, manifest: bytes) -> None:
        """Commit the complete folder `temporary` as the checkpoint of `step`, then remove old checkpoints, in the background if
        `settings.asynchronous`. Rank 0 only."""
        assert self.settings is not None
        try:
            obsolete = self._replace(temporary, step, manifest)
        except OSError:
            run_lock.check(self.run_dir)  # a job that took the lock deletes unfinished checkpoints: name it instead
            raise
        if self.settings.asynchronous:
            BackgroundTask(f"remove-before-{step}", partial(_remove, obsolete))
        else:
            _remove(obsolete)
        if self.mirror is not None:
            self.mirror.request_upload()

    def finish_mirror(self) -> None:
        """Wait until the mirror, if there is one, is up to date, and close it. A collective. Raises Failed if the
        upload fails."""
        self._ask_mirror(lambda mirror: mirror.close(), None)

    def _replace(self, temporary: Path, step: int, manifest: bytes) -> list[Path]:
        """Commit a checkpoint, and rename those that it makes obsolete; returns the renamed folders, to be removed."""
        assert self.settings is not None
        write_atomically(temporary / MANIFEST, manifest)  # also syncs the folder with the other files' entries
        final, tree = self.folder / checkpoint_name(step), json.loads(manifest)
        run_lock.check(self.run_dir)
        chain.append(self.folder, tree)
        replaced = self._path_aside(step, f"{REPLACED}{final.name}")
        renamed = [replaced] if final.exists() else []  # damaged, or saved before a rollback or a restart
        replace_folder(temporary, final, replaced)
        sync(self.folder)
        sync(self.run_dir)  # `checkpoints` is a new entry at the first save
        write_atomically(self.folder / POINTER, canonical({"step": step}))
        for damaged in sorted(self._damaged):  # renamed, so that they do not count towards `keep`
            os.rename(self.folder / checkpoint_name(damaged), self._path_aside(damaged, ""))
        steps, best = self.steps(), tree["state"].get("best_step")
        linked = self._update_best_link(best, steps, step)
        for old in obsolete_steps(steps, step, self.settings, {best, linked}):
            run_lock.check(self.run_dir)
            renamed.append(self._path_aside(old, f"{SAVING}old-{old:08d}-{time.time_ns()}"))
            os.rename(self.folder / checkpoint_name(old), renamed[-1])
        return [path for path in renamed if not path.name.startswith(DAMAGED)]

    def _update_best_link(self, best: int | None, steps: Collection[int], newest: int) -> int | None:
        """Atomically make the link `best` in the run folder point to the checkpoint of step `best` if it is one of `steps`; the step that
        the link points to. A link to a step after the `newest` is removed."""
        link, new = self.run_dir / BEST, self.run_dir / f".{BEST}"
        if best is not None and best in steps:
            new.unlink(missing_ok=True)
            new.symlink_to(Path(self.folder.name, checkpoint_name(best)))
            os.replace(new, link)
        match = STEP.fullmatch(os.path.basename(os.readlink(link))) if link.is_symlink() else None
        linked = int(match[1]) if match else None
        if linked is not None and linked > newest:
            link.unlink()
        return linked

    def _path_aside(self, step: int, name: str) -> Path:
        """The path to rename the checkpoint of `step` to: `name`, or `damaged-…` for a damaged one, which is kept
        because parts of it may be usable. Removes `step` from the damaged ones."""
        if step in self._damaged:
            self._damaged.remove(step)
            name = f"{DAMAGED}{step:08d}-{time.time_ns()}"
        return self.folder / name

    def _write(self, folder: Path, snapshot: Snapshot) -> None:
        """Write this rank's files, and a JSON index of them for the commit. In a background thread, so no
        collectives."""
        rank, ranks = self.world.rank, self.world.size
        folder.mkdir(parents=True, exist_ok=True)  # by the first rank
        files = {}
        for group, slices in ((WEIGHTS, snapshot.weights), (MOMENTS, snapshot.moments)):
            if slices:
                name = file_name(group, rank, ranks)
                files[name] = write_slices(folder / name, slices)
        (folder / _index_name(rank)).write_bytes(compact([files, *describe_slices(snapshot)]))

    def _commit(self, save: SaveInFlight) -> None:
        """Write the manifest from all ranks' indexes, and commit the checkpoint. In a background thread of rank 0."""
        notes = [save.folder / _index_name(rank) for rank in range(self.world.size)]
        files, held, single = zip(*(json.loads(with_retries(note.read_bytes)) for note in notes), strict=True)
        fields = {
            "ranks": self.world.size,
            "files": {name: entry for of_rank in files for name, entry in of_rank.items()},
            "parameters": index_slices(save.shapes, held),
            "first_moment_only": sorted({name for of_rank in single for name in of_rank}),
        }
        manifest = seal(fields, save.state | {"world_size": self.world.size}, save.counters)
        for note in notes:
            os.unlink(note)
        self.commit(save.folder, int(save.state["step"]), manifest)

    def _abort_save(self, save: SaveInFlight) -> NoReturn:
        """Remove the folder of a failed save, and raise its error. A collective."""
        self._in_flight = None
        failed = save.committing or save.writing
        problems = self.world.gather(failed.problem)
        if self.world.is_main:
            shutil.rmtree(save.folder, ignore_errors=True)
        self.world.barrier()
        if failed.failure is not None and not isinstance(failed.failure, OSError):
            raise failed.failure
        rank, problem = next((rank, problem) for rank, problem in enumerate(problems) if problem)
        reason = f"rank {rank}: {problem}" if self.world.size > 1 else problem
        raise Failed(
            f"{self.folder}: the checkpoint of step {save.state['step']} could not be written ({reason}); "
            "the earlier ones are untouched"
        )

    def _remove_leftovers(self) -> None:
        """Remove the leftovers of interrupted saves, or complete an interrupted replacement."""
        for replaced in self.folder.glob(f"{REPLACED}*"):
            final = self.folder / replaced.name.removeprefix(REPLACED)
            if not final.exists():
                os.rename(replaced, final)
        names = [f"{self.folder.name}/{name}*" for name in (REPLACED, SAVING, f".{POINTER}.", f".{chain.FILE}.")]
        names += [f".{name}.*.tmp" for name in (CONFIG, *TOKENIZER_FILES, SINK_IDS, SLOW_RANKS)]
        for leftover in (path for name in names for path in self.run_dir.glob(name)):
            # a thread of an earlier `Checkpoints` in this process may be removing it
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        chain.cut(self.folder, max(self.steps(), default=-1))

    # -- reading -----------------------------------------------------------------------------------------------------

    def latest(self, limit: int | None = None, weights_only: bool = False) -> Path | None:
        """The newest checkpoint that is not damaged, of step `limit` at most; None if there are none. A collective.
        `weights_only`: its moments are not verified.

        A damaged checkpoint is replaced by the mirror's copy, if there is one, or else passed over for an older one, of
        the run folder or only in the mirror, with a warning. Sets `saved_step` and `manifest` to those of the result.
        Raises ValueError if all checkpoints are damaged.
        """
        steps, pointer = on_main(self.world, lambda: (self.steps(), committed_step(self.folder)))
        if limit is not None:
            steps = [step for step in steps if step <= limit]
        candidates, reasons, asked = list(steps), [], False
        if pointer is not None and pointer not in steps and (limit is None or pointer <= limit):
            reasons.append(f"step {pointer}, the last one committed, is missing")
        while candidates:
            step = candidates.pop(0)
            path = self.folder / checkpoint_name(step)
            problem = self.verify(path, weights_only)
            if problem and self._take_from_mirror(path, problem):
                problem = self.verify(path, weights_only)
            if problem and self.settings is None and step not in on_main(self.world, self.steps):
                # removed meanwhile by the process that trains the run, which has saved newer ones
                return self.latest(limit, weights_only)
            if not problem:
                if reasons and self.world.is_main:
                    log.warning(f"{'; '.join(reasons)}: going back to {path.name}")
                    self._damaged.update(other for other in steps if other > step)
                self.saved_step = step
                return path
            reasons.append(problem)
            if not asked:  # of several damaged ones once, since the store does not change meanwhile
                there: list[int] = self._ask_mirror(lambda mirror: mirror.steps(), [])
                asked, older = True, [other for other in there if other < step]
                candidates = sorted({*candidates, *older}, reverse=True)
        if reasons:
            raise ValueError(
                f"{self.folder}: no usable checkpoint ({'; '.join(reasons)}); restore one, or use another run folder"
            )
        return None

    def _take_from_mirror(self, path: Path, problem: str) -> bool:
        """Replace a damaged checkpoint by the copy in the run's mirror; whether it has a whole one. A collective."""
        replaced = self._ask_mirror(lambda mirror: mirror.replace_step(path.name), False)
        if replaced and self.mirror is not None:
            log.warning(f"{problem}: replaced by the copy in {self.mirror.url}")
        return replaced

    def _ask_mirror(self, ask: Callable[[Mirror], T], otherwise: T) -> T:
        """The JSON answer of the run's mirror to rank 0; `otherwise` without one. A collective."""
        if self.settings is None or not self.settings.mirror:
            return otherwise
        return on_main_long(self.world, lambda: otherwise if self.mirror is None else ask(self.mirror))

    @property
    def state(self) -> dict[str, Any]:
        """State saved with the checkpoint that `latest` returned."""
        return self.manifest["state"]

    def load(self, engine: Engine, path: Path) -> dict[str, Any]:
        """Restore `engine` from a checkpoint that `latest` returned, of any number of ranks and any ZeRO stage; returns its state. A
        collective."""
        assert self._in_flight is None, "finish the save in flight first"
        assert path.name == checkpoint_name(self.state["step"]), "not the checkpoint that was verified last"
        engine.restore(StoredTensors.of_checkpoint(path, self.manifest, self.world), self.manifest["engine"])
        if self.settings is not None and self.world.is_main:
            chain.cut(self.folder, self.state["step"])
        self.world.barrier()
        return self.state

    def verify(self, path: Path, weights_only: bool = False) -> str:
        """Verify a checkpoint, or its weights only; returns its damage, or "". Sets `manifest`.

        Rank 0 reads the manifest, and each rank hashes its share of the files. A collective. Raises RankError if a
        rank cannot read a file: an I/O error is not damage.
        """
        world = self.world
        self.manifest = {}

        def read() -> None:
            self.manifest = read_manifest(path, weights_only) if world.is_main else {}

        def verify() -> None:
            files = share(self.manifest["files"], world.rank, world.size)
            with_retries(lambda: verify_files(path, files))
            check_files(path, self.manifest, [name for name, _ in files])

        if problem := self._agree_on_damage(read):
            return problem
        self.manifest = world.broadcast(self.manifest)
        return self._agree_on_damage(verify)

    def _agree_on_damage(self, check: Callable[[], None]) -> str:
        """Run `check` on every rank; returns the first rank's DamagedCheckpoint, or missing file, as text, or "". A collective. Raises
        RankError for other errors."""
        damage, unread = "", ("", OK)
        try:
            check()
        except (DamagedCheckpoint, FileNotFoundError) as error:
            damage = describe(error)
        except (OSError, ValueError) as error:
            then = "; nothing was removed, and the same command resumes once it can be read"
            unread = describe(error) + then * isinstance(error, OSError), exit_code(error)
        raise_on_all_ranks(self.world, *unread)
        return next((text for text in self.world.gather(damage) if text), "")

    def steps(self) -> list[int]:
        """Committed steps, newest first. Raises OSError if the folder exists but cannot be listed."""
        try:
            names = with_retries(lambda: os.listdir(self.folder))
        except FileNotFoundError:
            return []
        return sorted((int(match[1]) for match in map(STEP.fullmatch, names) if match), reverse=True)


def obsolete_steps(
    steps: Sequence[int], step: int, settings: CheckpointConfig, needed: Collection[int | None]
) -> list[int]:
    """Those of `steps`, newest first, that the checkpoint of `step` makes obsolete: later ones, which are damaged or were saved before
    a rollback, and earlier ones that are neither `needed` nor kept by the settings."""
    later = [other for other in steps if other > step]
    older = [other for other in steps if other <= step][settings.keep :]
    every = settings.keep_every
    return later + [other for other in older if other not in needed and (not every or other % every)]


def _index_name(rank: int) -> str:
    """Name of a rank's index: the files and slices that it wrote, for the commit. Deleted before the commit."""
    return f"note-{rank:05d}.json"


def _remove(folders: list[Path]) -> None:
    """Delete renamed folders. A folder that cannot be deleted is logged, and tried again at the next start of the
    run."""
    for path in folders:
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            continue  # the run folder itself may have been removed
        except OSError as error:
            log.warning(f"{path}: could not be removed ({error})")


def committed_step(folder: Path) -> int | None:
    """The step in pointer.json; None if the file is missing or damaged. Raises OSError."""
    try:
        return int(json.loads(with_retries((folder / POINTER).read_bytes))["step"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
