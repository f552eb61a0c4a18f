"""Mirror of a run in an object store (`checkpoint.mirror`), from which the same command resumes on an empty disk.

    URL/lock/00000001                       the job that writes there, as in `checkpoint.run_lock`
    URL/checkpoints/step-00001000/…         its manifest is written last, and removed first: without it there is no checkpoint
    URL/checkpoints/chain.jsonl, URL/config.json, …   the run's other files as of the newest checkpoint, or later

Rank 0 uploads in a thread after every commit. Checkpoints that the run deletes (`checkpoint.keep`) are deleted there
too.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from megabert.checkpoint.format import MANIFEST, DamagedCheckpoint, parse_manifest, read_manifest
from megabert.checkpoint.run_lock import call_before_release, serialize, this_process, wait_for_end
from megabert.checkpoint.store import POINTER, REPLACED, SAVING, obsolete_steps
from megabert.common import chain, storage
from megabert.common.errors import Failed, describe
from megabert.common.files import replace_folder, sync, write_atomically
from megabert.common.logs import log
from megabert.common.run_files import BESIDE, BEST, checkpoint_name, saved_steps
from megabert.common.run_files import IN_CHECKPOINT as STEP
from megabert.config import CheckpointConfig
from megabert.distributed.ranks import World, on_main_long

# files of the run folder that are not part of the run
NOT_MIRRORED = re.compile(r"\..*|.*\.tmp|hang-.*|slow-ranks\.json")
BEAT, LIMIT, POLL = 10.0, 90.0, 1.0  # as in `run_lock`, for a store that answers slowly


def open_mirror(
    settings: CheckpointConfig,
    run_dir: Path,
    world: World,
    progress: Callable[[], None],
    uploaded: Callable[[float], None],
) -> Mirror | None:
    """Open the mirror of a run whose lock this job holds, and download what the run folder lacks; the Mirror on rank
    0, None elsewhere and without a mirror. `progress` and `uploaded`: see `Mirror`.

    A collective. Raises ValueError if another job or another run uses the URL, Failed if the store fails.
    """
    if not settings.mirror:
        return None
    mirror = Mirror(settings, run_dir, progress, uploaded)
    on_main_long(world, mirror.open)
    return mirror if world.is_main else None


class Mirror:
    """A run's copy, of rank 0, which holds the run's lock."""

    def __init__(
        self, settings: CheckpointConfig, run_dir: Path, progress: Callable[[], None] = lambda: None,
        uploaded: Callable[[float], None] = lambda seconds: None,
    ) -> None:  # fmt: skip
        """`progress()` is called while files are downloaded, and while `close` waits for uploads; `uploaded(seconds)`
        after each upload of a checkpoint."""
        # normalised like the URLs that `storage.list_objects` returns, without a trailing slash
        self.url = storage.join(settings.mirror, "").rstrip("/")
        self.settings, self.run_dir = settings, run_dir
        self._progress, self._uploaded_in = progress, uploaded
        self.lock = MirrorLock(self.url)
        self._there: dict[str, bytes] = {}  # manifests of the checkpoints that are complete in the store, by name
        self._changed, self._ending = threading.Event(), False
        self._problem: Exception | None = None
        self._parts = 0  # parts of files that this process has sent
        self._thread: threading.Thread | None = None

    # -- downloading -------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Take the lock, and copy what the run folder lacks. `run_lock.release` also releases this lock."""
        self.lock.acquire()
        try:
            self.restore()
        except ValueError:  # nothing is written there: the process may open another run
            self.lock.release()
            raise
        except OSError:
            self.lock.stop_renewing()
            raise
        call_before_release(self.leave)

    def restore(self) -> None:
        """Download the newest complete checkpoint, the best one and the run's other files, unless the run folder has a
        checkpoint as new. Raises Failed if the store fails, ValueError if the store has checkpoints but none is
        usable, nor is one in the run folder."""
        files = list(storage.list_objects(self.url))
        if not (steps := self._whole_steps(files)):
            return
        self._refuse_other_run(files)
        here = max(map(checkpoint_name, saved_steps(self.run_dir)), default="")
        reasons = []
        for step in reversed(steps):
            if here >= step:
                break
            if reason := self._fetch_step(step):
                reasons.append(reason)
                continue
            for name in files:
                if BESIDE.fullmatch(name):
                    (self.run_dir / name).parent.mkdir(parents=True, exist_ok=True)
                    storage.fetch(storage.join(self.url, name), self.run_dir / name, self._progress)
            best = checkpoint_name(read_manifest(self._temporary(step))["state"].get("best_step", -1))
            if best in steps and (best == step or not self._fetch_step(best)):
                if best != step:
                    self._put_step(best)
                (self.run_dir / BEST).unlink(missing_ok=True)
                (self.run_dir / BEST).symlink_to(Path("checkpoints", best))
            self._put_step(step)  # last: once it exists, the next start downloads nothing
            if reasons:
                log.warning(f"{'; '.join(reasons)}: going back to {step}")
            log.info(f"{self.url}: {step} is copied to {self.run_dir}")
            return
        why = "; ".join(reasons)
        if not here:
            raise ValueError(f"checkpoint.mirror={self.url}: no usable checkpoint ({why}); set another URL")
        if why:
            log.warning(f"{why}: going back to {here}")

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints in the store, oldest first. Raises Failed if the store fails."""
        names = self._whole_steps(list(storage.list_objects(self.url)))
        return [int(name.removeprefix("step-")) for name in names]

    def replace_step(self, step: str) -> bool:
        """Replace a local checkpoint by the mirror's copy; returns False if the mirror has none or a damaged one.
        Raises Failed if the store fails."""
        if self._fetch_step(step):
            return False
        self._put_step(step)
        return True

    def _whole_steps(self, files: list[str]) -> list[str]:
        """Names of the store's checkpoints with a manifest, oldest first. The newest comes from pointer.json, since a
        listing may be stale."""
        steps = {match[1] for match in map(STEP.fullmatch, files) if match and match[2] == MANIFEST}
        with suppress(FileNotFoundError):
            pointer, newest = storage.read(storage.join(self.url, "checkpoints", POINTER)), ""
            with suppress(ValueError, KeyError, TypeError):  # damaged on the disk that it was copied from
                newest = checkpoint_name(json.loads(pointer)["step"])
            if newest and storage.exists(storage.join(self.url, "checkpoints", newest, MANIFEST)):
                steps.add(newest)
        return sorted(steps)

    def _refuse_other_run(self, files: list[str]) -> None:
        """Raises ValueError if the first checkpoint of the run there is not that of the run here."""
        here, there = self.run_dir / "checkpoints" / chain.FILE, f"checkpoints/{chain.FILE}"
        if here.is_file() and there in files:
            ours, theirs = map(_beginning, (here.read_bytes(), storage.read(storage.join(self.url, there))))
            if ours and theirs and ours != theirs:
                raise ValueError(
                    f"checkpoint.mirror={self.url}: holds a different run than {self.run_dir}; set another URL"
                )

    def _fetch_step(self, step: str) -> str:
        """Copy a checkpoint to its temporary folder; returns its damage, or ""."""
        temporary = self._temporary(step)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        place = storage.join(self.url, "checkpoints", step)
        try:
            data = storage.read(storage.join(place, MANIFEST))
            for name, file in parse_manifest(data, place)["files"].items():
                if storage.fetch(storage.join(place, name), temporary / name, self._progress) != file["sha256"]:
                    return f"{place}/{name} is damaged"
        except FileNotFoundError as error:
            return f"{error.filename} is missing"
        except DamagedCheckpoint as error:
            return str(error)
        write_atomically(temporary / MANIFEST, data)
        return ""

    def _temporary(self, step: str) -> Path:
        return self.run_dir / "checkpoints" / f"{SAVING}mirrored-{step}"

    def _put_step(self, step: str) -> None:
        """Rename a downloaded checkpoint to its final name, and delete the one that it replaces."""
        final = self.run_dir / "checkpoints" / step
        replaced = final.with_name(f"{REPLACED}{step}")
        shutil.rmtree(replaced, ignore_errors=True)  # left by a kill below
        replace_folder(self._temporary(step), final, replaced)
        sync(final.parent)
        if replaced.exists():
            shutil.rmtree(replaced)

    # -- uploading ---------------------------------------------------------------------------------------------------

    def request_upload(self) -> None:
        """Upload what is new in the run folder, in the background."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)
            self._thread.start()
        self._changed.set()

    def close(self) -> None:
        """Wait until the newest checkpoint and the run's other files are there, and release the lock. Raises Failed if they are not."""
        before, self._ending = self._parts, True
        self.request_upload()
        assert self._thread is not None
        while self._thread.is_alive():
            self._thread.join(1.0)
            if self._parts != before:
                before = self._parts
                self._progress()
        if self._problem is not None:
            self.lock.stop_renewing()
            raise Failed(f"{describe(self._problem)}; the run folder is complete: the same command finishes the upload")
        self.lock.release()

    def leave(self) -> None:
        """`close` for a run that ended without it, as by an error in the caller's loop; a failure is logged."""
        try:
            if self.lock.renewed:
                self.close()
        except OSError as error:
            log.warning(describe(error))

    def _run(self) -> None:
        os.nice(10)  # on Linux only this thread
        while True:
            self._changed.wait()
            self._changed.clear()
            ending = self._ending
            self._problem = None
            try:
                self.upload()
            except Exception as error:
                self._problem = error
                log.warning(f"{describe(error)}: the upload failed; it is retried after the next checkpoint")
            if ending:
                return

    def upload(self) -> None:
        """Bring the store up to date with the run folder: upload checkpoints, newest first, then delete obsolete
        ones."""
        began = time.monotonic()
        files = list(storage.list_objects(self.url))
        folder, uploaded = self.run_dir / "checkpoints", False
        here = [checkpoint_name(step) for step in reversed(saved_steps(self.run_dir))]
        for step in here:
            try:
                manifest = (folder / step / MANIFEST).read_bytes()
                if self._known(step, files) != manifest:
                    parse_manifest(manifest, step)
                    self._upload_step(folder / step, manifest, files)
                    uploaded = True
            except FileNotFoundError:
                if (folder / step).exists():
                    raise
                continue  # removed meanwhile
            except DamagedCheckpoint as error:  # the one there may be whole
                log.warning(f"{error}; this checkpoint is not uploaded")
                continue
            self._there[step] = manifest
        if not uploaded:  # else they were with the checkpoint
            self._upload_others()
        manifests = [self._there[step] for step in here if step in self._there]
        if not manifests:
            return
        newest = json.loads(manifests[0])["state"]
        names = {match[1] for match in map(STEP.fullmatch, files) if match} | (self._there.keys() & set(here))
        steps = sorted((int(name.removeprefix("step-")) for name in names), reverse=True)
        for number in obsolete_steps(steps, newest["step"], self.settings, {newest.get("best_step")}):
            if checkpoint_name(number) not in here:
                self._remove_step(checkpoint_name(number), files)
        if uploaded:
            self._uploaded_in(time.monotonic() - began)

    def _known(self, step: str, files: list[str]) -> bytes:
        """The manifest of a checkpoint that is there; b"" if it is not."""
        name = f"checkpoints/{step}/{MANIFEST}"
        if step not in self._there and name in files:
            with suppress(FileNotFoundError):  # removed since it was listed
                self._there[step] = storage.read(storage.join(self.url, name))
        return self._there.get(step, b"")

    def _upload_step(self, folder: Path, manifest: bytes, files: list[str]) -> None:
        # the same where it was saved again with another state, as after its evaluation: it is there all the time
        if _files(self._there.get(folder.name, b"")) != _files(manifest):
            self._remove_step(folder.name, [name for name in files if name.endswith(MANIFEST)])  # another of this step
            for path in sorted(folder.iterdir()):
                if path.name != MANIFEST:
                    self._put(path)
        self._upload_others()
        self.lock.check()
        storage.write(storage.join(self.url, "checkpoints", folder.name, MANIFEST), manifest)

    def _upload_others(self) -> None:
        self.lock.check()
        run = self.run_dir
        for path in [*run.iterdir(), *run.glob("checkpoints/*.json*"), *run.glob("tensorboard/*")]:
            if path.is_file() and not path.is_symlink() and not NOT_MIRRORED.fullmatch(path.name):
                self._put(path)

    def _put(self, path: Path) -> None:
        storage.put(path, storage.join(self.url, path.relative_to(self.run_dir).as_posix()), self._sent)
        self._sent()

    def _sent(self) -> None:
        self._parts += 1

    def _remove_step(self, step: str, files: list[str]) -> None:
        self._there.pop(step, None)
        self.lock.check()
        inside = [name for name in files if name.startswith(f"checkpoints/{step}/")]
        for name in sorted(inside, key=lambda name: not name.endswith(f"/{MANIFEST}")):
            storage.remove(storage.join(self.url, name))


def _files(manifest: bytes) -> Any:
    """The files of a checkpoint; None for a damaged manifest."""
    with suppress(DamagedCheckpoint):
        return parse_manifest(manifest, "")["files"]
    return None


def _beginning(text: bytes) -> Any:
    """Step and weights of the first checkpoint in a chain, whose entry changes where it is saved again after its evaluation."""
    line = text.partition(b"\n")[0]
    try:
        entry = json.loads(line)
        return entry["step"], entry["weights"]
    except (ValueError, KeyError, TypeError):  # damaged, or empty
        return line


class MirrorLock:
    """One job at a time writes to a URL: the one that created the lock object of the greatest number, which it renews.

    A list of objects may be older than the objects, so it only helps to find the greatest number.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._number = 0  # 0: not taken
        self._owner = this_process()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="mirror's lock", daemon=True)

    def acquire(self) -> None:
        """Raises ValueError naming the owner if another job is running, Failed if the store fails."""
        newest = 0
        while not self._number:
            newest = max(newest, *self._numbers())
            if newest:
                read = partial(storage.read, self._path(newest))
                wait_for_end(self.url, "mirror", read, LIMIT, POLL)
            if storage.create(self._path(newest + 1), serialize(self._owner)):
                self._number = newest + 1
            newest += 1
        for number in self._numbers():
            if 0 < number < self._number:
                storage.remove(self._path(number))
        self.check()
        self._thread.start()

    def check(self) -> None:
        """Raises Failed if another job took the place over."""
        if not storage.exists(self._path(self._number)) or storage.exists(self._path(self._number + 1)):
            raise Failed(f"{self.url}: another job took the lock while this job did not renew it; stop one of the jobs")

    @property
    def renewed(self) -> bool:
        """Whether this job has the lock, and keeps it."""
        return bool(self._number) and not self._ending.is_set()

    def stop_renewing(self) -> None:
        """Leave the lock to the next job, which waits LIMIT seconds for it, without a request to the store."""
        self._ending.set()

    def release(self) -> None:
        self._ending.set()
        self._thread.join()  # a renewal would hide the release
        storage.write(self._path(self._number), serialize(replace(self._owner, released=True)))

    def _renew(self) -> None:
        while not self._ending.wait(BEAT):
            self._owner = replace(self._owner, beat=self._owner.beat + 1)
            try:
                self.check()
                storage.write(self._path(self._number), serialize(self._owner))
            except Exception as error:
                log.debug(f"{describe(error)}: next renewal in {BEAT:g} s")

    def _numbers(self) -> list[int]:
        names = (found.url.rpartition("/")[2] for found in storage.find(storage.join(self.url, "lock")))
        return [0, *(int(name) for name in names if name.isdecimal())]

    def _path(self, number: int) -> str:
        return storage.join(self.url, "lock", f"{number:08d}")
