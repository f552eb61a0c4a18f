"""A run's copy in a bucket: what is uploaded, kept, removed and copied back; one job at a time."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from megabert.checkpoint import Checkpoints, mirror, run_lock
from megabert.checkpoint.format import file_name, seal
from megabert.checkpoint.mirror import Mirror
from megabert.common import storage
from megabert.common.errors import Failed
from megabert.common.files import hash_file
from megabert.config import CheckpointConfig
from megabert.hf.hub import download_folder
from tests.checkpoint.test_store import saved_run
from tests.helpers import prep_reading
from tests.helpers.object_store import PASS, STALE, UNAVAILABLE, Proxy, listing
from tests.helpers.simulated_ranks import ALONE

pytest.importorskip("s3fs")
FILE = file_name("weights", 0, 1)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A lock is renewed often, and given up soon; none is renewed after a test."""
    for name, value in (("BEAT", 0.2), ("LIMIT", 1.5), ("POLL", 0.05)):
        monkeypatch.setattr(mirror, name, value)
    locks, acquire = list[mirror.MirrorLock](), mirror.MirrorLock.acquire
    monkeypatch.setattr(mirror.MirrorLock, "acquire", lambda lock: (locks.append(lock), acquire(lock))[1])
    yield
    for lock in locks:
        lock._ending.set()
    run_lock._before_release.clear()


def checkpoint(run: Path, step: int, best: int = -1, text: bytes = b"") -> Path:
    """A committed checkpoint without weights, and a log line for it."""
    folder = run / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / FILE
    file.write_bytes(text or b"weights of %d" % step)
    files = {FILE: {"bytes": file.stat().st_size, "sha256": hash_file(file)}}
    parameters = {"w": {"shape": [1], "pieces": [[0, 1, 1]]}}
    fields = {"ranks": 1, "files": files, "parameters": parameters, "first_moment_only": []}
    (folder / "manifest.json").write_bytes(seal(fields, {"step": step, "best_step": best}, {"optimizer_steps": 0}))
    (run / "checkpoints" / "chain.jsonl").write_text('{"step": 0}\n')
    (run / "checkpoints" / "pointer.json").write_text(json.dumps({"step": step}))
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": step}) + "\n")
    return folder


def opened(url: str, run: Path, *steps: int, best: int = -1, **settings: Any) -> Mirror:
    """The mirror of a run that then has checkpoints of these steps too."""
    made = Mirror(CheckpointConfig(mirror=url, **settings), run)
    made.open()
    for step in steps:
        checkpoint(run, step, best)
    return made


def on_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Owners' processes cannot be seen here."""
    monkeypatch.setattr("megabert.checkpoint.run_lock.Owner.has_ended", property(lambda owner: owner.released))


def steps(url: str) -> list[int]:
    """Whole checkpoints there."""
    places = [found.url.split("/") for found in storage.find(f"{url}/checkpoints")]
    return sorted(int(place[-2].removeprefix("step-")) for place in places if place[-1] == "manifest.json")


def test_kept_and_best_checkpoints_survive_an_empty_disk(proxy: Proxy, tmp_path: Path) -> None:
    url, settings = "s3://runs/kept", {"keep": 2, "keep_every": 10}
    first = opened(url, tmp_path / "first", 10, 13, 17, 20, 25, best=13, **settings)
    (tmp_path / "first/hang-0.txt").write_text("stacks of this machine")
    shutil.copytree(tmp_path / "first/checkpoints/step-00000025", tmp_path / "first/checkpoints/step-00000025-mine")
    first.upload()
    assert steps(url) == [10, 13, 17, 20, 25]
    shutil.rmtree(tmp_path / "first/checkpoints/step-00000017")  # as the run does by its rules
    first.close()
    # by the rules of the run: two newest, the tenth ones, the best
    assert steps(url) == [10, 13, 20, 25]
    opened(f"{url}/phase2", tmp_path / "below", 40).close()
    second = opened(url, tmp_path / "second", **settings)
    here = tmp_path / "second"
    assert not (here / "phase2").exists()
    assert {path.name for path in download_folder(url).iterdir()} == {"checkpoints", "metrics.jsonl"}
    assert sorted(path.name for path in here.glob("checkpoints/step-*")) == ["step-00000013", "step-00000025"]
    assert not (here / "hang-0.txt").exists()
    assert (here / "best").resolve().name == "step-00000013"
    for name in ("metrics.jsonl", "checkpoints/chain.jsonl", "checkpoints/step-00000025/manifest.json"):
        assert (here / name).read_bytes() == (tmp_path / "first" / name).read_bytes()
    checkpoint(here, 30, best=30)
    shutil.rmtree(here / "checkpoints/step-00000013")
    second.close()
    assert steps(url) == [10, 20, 25, 30]
    assert not list(here.glob("checkpoints/.*"))


@pytest.mark.parametrize("name", [FILE, "manifest.json"])
def test_a_damaged_checkpoint_is_taken_from_the_mirror(name: str, proxy: Proxy, tmp_path: Path, caplog) -> None:
    url, newest = f"s3://runs/damaged/{name}", tmp_path / "checkpoints/step-00000020"
    saved_run(tmp_path, (10, 20))
    made = opened(url, tmp_path)
    made.upload()
    whole = prep_reading.contents(newest)

    def latest() -> str:
        (newest / name).write_bytes(b"something else")
        found = Checkpoints(tmp_path, ALONE, made.settings, made).latest()
        assert found is not None
        return found.name

    assert latest() == newest.name and f"replaced by the copy in {url}" in caplog.text
    assert prep_reading.contents(newest) == whole and not list(newest.parent.glob(".*"))
    storage.remove(f"{url}/checkpoints/{newest.name}/{FILE}")
    assert latest() == "step-00000010" and "going back to step-00000010" in caplog.text


def test_an_older_checkpoint_only_in_the_mirror_is_used(proxy: Proxy, tmp_path: Path, caplog) -> None:
    """The newest one was damaged before its upload, and by `keep` the run folder has no other."""
    url, folder = "s3://runs/older", tmp_path / "checkpoints"
    saved_run(tmp_path, (10,))
    made = opened(url, tmp_path)
    made.upload()
    whole = prep_reading.contents(folder / "step-00000010")
    saved_run(tmp_path, (20,), keep=1)
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-00000020"]
    (folder / "step-00000020" / FILE).write_bytes(b"something else")
    checkpoints = Checkpoints(tmp_path, ALONE, made.settings, made)
    assert checkpoints.latest() == folder / "step-00000010" and checkpoints.saved_step == 10
    assert prep_reading.contents(folder / "step-00000010") == whole
    assert "going back to step-00000010" in caplog.text


def test_a_run_left_by_an_error_gives_up_its_mirror(proxy: Proxy, tmp_path: Path, monkeypatch) -> None:
    """As by an exception in a loop of `megabert.training`: the same process, and any other, may open the mirror next."""
    url = "s3://runs/ended"
    opened(url, tmp_path / "first", 5)
    run_lock.release()
    assert steps(url) == [5]
    (tmp_path / "other/checkpoints").mkdir(parents=True)
    (tmp_path / "other/checkpoints/chain.jsonl").write_text('{"step": 1}\n')
    monkeypatch.setattr(mirror, "LIMIT", 60.0)
    for _ in range(2):
        with pytest.raises(ValueError, match="holds a different run than"):
            opened(url, tmp_path / "other")
    second = opened(url, tmp_path / "second", 8)
    proxy.fault = lambda method, path, number: UNAVAILABLE if "step-" in path and method == "PUT" else PASS
    run_lock.release()
    assert second.lock._ending.is_set()


def test_a_checkpoint_is_there_whole_or_not(proxy: Proxy, tmp_path: Path) -> None:
    """The upload fails at each request in turn; what is readable is the newest whole checkpoint."""
    url, run = "s3://runs/whole", tmp_path / "run"
    made = opened(url, run, 1, keep=1)
    made.upload()
    checkpoint(run, 2)
    finished = False
    for fails_at in range(1, 60):
        writes = count(1)

        def fault(method: str, path: str, number: int, at: int = fails_at, writes: Iterator[int] = writes) -> str:
            writing = method in ("PUT", "DELETE", "POST") and "/lock/" not in path
            return UNAVAILABLE if writing and next(writes) >= at else PASS

        proxy.fault = fault
        with contextlib.suppress(Failed):  # which leaves what is read below
            made.upload()
            finished = True
        proxy.fault = lambda *_: PASS
        assert steps(url), fails_at
        again = tmp_path / f"again{fails_at}"
        Mirror(made.settings, again).restore()
        step = steps(url)[-1]
        assert (again / f"checkpoints/step-{step:08d}" / FILE).read_bytes() == b"weights of %d" % step
        if finished:
            break
    assert finished and steps(url)[-1] == 2


def test_a_step_that_was_saved_again_replaces_the_other(proxy: Proxy, tmp_path: Path) -> None:
    url, run = "s3://runs/again", tmp_path / "run"
    made = opened(url, run, 5, 8)
    made.upload()
    checkpoint(run, 8, best=8)  # evaluated meanwhile: its weights are the same
    proxy.fault = lambda method, path, number: UNAVAILABLE if "/step-" in path and method == "PUT" else PASS
    with pytest.raises(Failed, match=r"step-00000008/manifest\.json"):
        made.upload()
    proxy.fault = lambda *_: PASS
    assert steps(url) == [5, 8]
    checkpoint(run, 5, text=b"other weights")
    shutil.rmtree(run / "checkpoints/step-00000008")
    made.close()
    assert steps(url) == [5]
    opened(url, tmp_path / "other")
    assert (tmp_path / "other/checkpoints/step-00000005" / FILE).read_bytes() == b"other weights"


def test_a_damaged_checkpoint_gives_way_to_the_one_before(proxy: Proxy, tmp_path: Path, capsys: Any) -> None:
    url = "s3://runs/damaged"
    opened(url, tmp_path / "run", 5, 8).close()
    place = f"{url}/checkpoints/step-00000008/{FILE}"
    storage.write(place, b"weights of 9")
    opened(url, tmp_path / "other").lock.release()
    assert [path.name for path in (tmp_path / "other").glob("checkpoints/step-*")] == ["step-00000005"]
    assert f"{place} is damaged: going back to step-00000005" in capsys.readouterr().err
    folder = checkpoint(tmp_path / "newer", 6)  # than the one before
    opened(url, tmp_path / "newer").lock.release()
    assert [path.name for path in folder.parent.glob("step-*")] == [folder.name]
    assert (tmp_path / "newer/metrics.jsonl").read_text() == '{"step": 6}\n'
    storage.remove(place)
    storage.remove(place.replace("8/", "5/"))
    with pytest.raises(ValueError, match="no usable checkpoint"):
        opened(url, tmp_path / "third")


def test_one_job_at_a_time(proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = "s3://runs/one"
    first = opened(url, tmp_path / "first", 5)
    first.upload()
    on_other_machines(monkeypatch)
    with pytest.raises(ValueError, match=r"^s3://runs/one is in use by pid \d+ on host .*; wait for it"):
        opened(url, tmp_path / "second")
    # it is cut off from the store: the next job takes over, and the first one may not write any more
    first.lock._ending.set()
    second = opened(url, tmp_path / "second")
    for _ in range(2):  # of logs alone, then of a checkpoint
        with pytest.raises(Failed, match="another job took the lock"):
            first.upload()
        checkpoint(tmp_path / "first", 8)
    assert steps(url) == [5]
    second.lock.release()
    opened(url, tmp_path / "third")


def test_of_several_jobs_that_start_together_one_has_the_mirror(proxy: Proxy, tmp_path: Path) -> None:
    def start(number: int) -> object:
        try:
            return mirror.MirrorLock("s3://runs/together").acquire()
        except (ValueError, Failed) as error:
            return error

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(start, range(4)))
    assert found.count(None) == 1, found


def test_a_slash_too_many_names_the_same_place(proxy: Proxy, tmp_path: Path) -> None:
    """As where a URL that ends in one was joined to a name."""
    opened("s3://runs/slashes//phase1/", tmp_path / "run", 5).close()
    opened("s3://runs/slashes/phase1", tmp_path / "one").lock.release()
    opened("s3://runs/slashes//phase1/", tmp_path / "other")
    for name in ("one", "other"):
        assert (tmp_path / name / "metrics.jsonl").read_bytes() == (tmp_path / "run/metrics.jsonl").read_bytes()


def test_another_run_is_refused(proxy: Proxy, tmp_path: Path) -> None:
    url = "s3://runs/other"
    opened(url, tmp_path / "run", 5).close()
    checkpoint(tmp_path / "other", 9)
    (tmp_path / "other/checkpoints/chain.jsonl").write_text('{"step": 9}\n')
    with pytest.raises(ValueError, match=r"^checkpoint.mirror=s3://runs/other: holds a different run than"):
        opened(url, tmp_path / "other")


def test_a_first_checkpoint_that_is_saved_again_is_of_the_same_run(proxy: Proxy, tmp_path: Path) -> None:
    """As after its evaluation, by a job that was killed before the upload."""
    run, entry = tmp_path / "run", '{"step": 5, "weights": "a", "checkpoint": "%d"}\n'
    made = opened("s3://runs/again", run, 5)
    (run / "checkpoints/chain.jsonl").write_text(entry % 1)
    made.upload()
    (run / "checkpoints/chain.jsonl").write_text(entry % 2)
    Mirror(made.settings, run).restore()


def test_a_start_without_a_checkpoint_is_no_run(proxy: Proxy, tmp_path: Path) -> None:
    """It was killed while it uploaded its first one; the next machine started again, and is restarted."""
    url = "s3://runs/left"
    storage.write(f"{url}/checkpoints/chain.jsonl", b'{"step": 0, "machine": "another"}\n')
    checkpoint(tmp_path / "run", 5)
    opened(url, tmp_path / "run").close()
    assert steps(url) == [5]


def test_uploads_that_a_run_waits_for_are_progress(proxy: Proxy, tmp_path: Path) -> None:
    run, progress = tmp_path / "run", list[str]()
    made = Mirror(CheckpointConfig(mirror="s3://runs/progress"), run, lambda: progress.append(""))
    made.lock.acquire()
    checkpoint(run, 5)
    made.close()
    assert progress and steps("s3://runs/progress") == [5]


def test_an_upload_that_failed_is_no_success(proxy: Proxy, tmp_path: Path) -> None:
    made = opened("s3://runs/failed", tmp_path / "run", 5)
    proxy.fault = lambda method, path, number: UNAVAILABLE if "step-" in path and method == "PUT" else PASS
    with pytest.raises(Failed, match=r"^s3://runs/failed/checkpoints/step-00000005/.*; the run folder is complete"):
        made.close()
    gone = Mirror(CheckpointConfig(mirror="s3://no-such-bucket/run"), tmp_path / "run")
    proxy.fault = lambda *_: PASS
    with pytest.raises((Failed, FileNotFoundError)):
        gone.upload()


def test_no_error_ends_the_uploads(proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, run, failed = "s3://runs/unexpected", tmp_path / "run", threading.Event()
    made = opened(url, run)

    def upload() -> None:
        failed.set()
        raise KeyError("answer")

    with monkeypatch.context() as broken:
        broken.setattr(made, "upload", upload)
        made.request_upload()
        assert failed.wait(10)
    checkpoint(run, 5)
    made.close()
    assert steps(url) == [5]


def test_an_end_at_an_uploads_start_is_noticed(proxy: Proxy, tmp_path: Path) -> None:
    made = opened("s3://runs/ends", tmp_path / "run", 5)

    class Closing(threading.Event):
        def clear(self) -> None:
            made._ending = True  # as `close` in another thread
            self.set()
            super().clear()

    made._changed = Closing()
    made.request_upload()
    assert made._thread is not None
    made._thread.join(10)
    assert not made._thread.is_alive() and steps("s3://runs/ends") == [5]


def test_stale_lists_hide_no_checkpoint_and_no_job(proxy, tmp_path, monkeypatch) -> None:
    """Every list is that of the time before the newest checkpoint, and before the job that wrote it."""
    url, run = "s3://runs/stale", tmp_path / "run"
    opened(url, run, 5, keep=1).close()
    proxy.fault = lambda method, path, number: STALE if listing(path) else PASS
    made = opened(url, run, 8, keep=1)
    shutil.rmtree(run / "checkpoints/step-00000005")
    made.upload()
    other = tmp_path / "other"
    on_other_machines(monkeypatch)
    with pytest.raises(ValueError, match=r"^s3://runs/stale is in use by pid"):
        opened(url, other)
    made.close()
    opened(url, other).lock.release()
    assert (other / "checkpoints/step-00000008" / FILE).read_bytes() == b"weights of 8"
    assert proxy.failed[STALE] > 4
    proxy.fault = lambda *_: PASS
    opened(url, other, keep=1).close()
    assert steps(url) == [8] and len(storage.find(f"{url}/lock")) == 1


def test_a_damaged_pointer_hides_no_checkpoint(proxy: Proxy, tmp_path: Path) -> None:
    url = "s3://runs/pointer"
    opened(url, tmp_path / "run", 5).close()
    for text in (b"", b"[]", b"{}", b'{"step": "5"}'):
        storage.write(f"{url}/checkpoints/pointer.json", text)
        Mirror(CheckpointConfig(mirror=url), tmp_path / f"again {text!r}").restore()
        assert (tmp_path / f"again {text!r}" / "checkpoints/step-00000005" / FILE).exists()


def test_a_download_that_was_interrupted_is_completed(proxy: Proxy, tmp_path: Path) -> None:
    """The next start copies what is missing, whichever object could not be read."""
    url, run = "s3://runs/interrupted", tmp_path / "run"
    made = opened(url, run, 5, 8, best=5)
    made.close()
    for name in ("metrics.jsonl", "chain.jsonl", "step-00000005", "step-00000008"):
        here = tmp_path / name
        proxy.fault = lambda method, path, number, name=name: UNAVAILABLE if name in path else PASS
        with pytest.raises(Failed):
            Mirror(made.settings, here).restore()
        proxy.fault = lambda *_: PASS
        for left in (".replaced-step-00000005", "step-00000005"):  # by a kill after the best one was put in place again
            checkpoint(here, 5).rename(here / "checkpoints" / left)
        progress = list[str]()
        Mirror(made.settings, here, lambda files=progress: files.append("")).restore()
        assert len(progress) >= 5  # two checkpoints of a file each, logs, chain, pointer
        for file in ("metrics.jsonl", "checkpoints/chain.jsonl", f"best/{FILE}", f"checkpoints/step-00000008/{FILE}"):
            assert (here / file).read_bytes() == (run / file.replace("best", "checkpoints/step-00000005")).read_bytes()


def test_a_damaged_manifest_replaces_no_whole_checkpoint(proxy: Proxy, tmp_path: Path, capsys: Any) -> None:
    url, run = "s3://runs/manifest", tmp_path / "run"
    made = opened(url, run, 5)
    made.upload()
    manifest = run / "checkpoints/step-00000005/manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-9])
    made.close()
    assert "step-00000005/manifest.json cannot be read; this checkpoint is not uploaded" in capsys.readouterr().err
    opened(url, tmp_path / "other")
    assert (tmp_path / "other/checkpoints/step-00000005" / FILE).read_bytes() == b"weights of 5"
