"""A build that was killed resumes where it was, with the same bytes."""

import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from data_prep import build
from data_prep.__main__ import main
from data_prep.executor import journal
from data_prep.readers import tasks
from tests.helpers.prep_builds import build_here, build_words, command, start
from tests.helpers.prep_reading import contents, write, write_all
from tests.helpers.waiting import wait_until


@pytest.fixture(scope="module")
def words(corpus, topics, tmp_path_factory):
    """Output, options -> the words of a build."""
    books = write_all(tmp_path_factory.mktemp("books"), {f"{i:02}.txt": text for i, text in enumerate(topics[:20])})
    options = {"weight": "books=2.5", "vocab_size": 2000, "sample_megabytes": 1, "seq_len": (128, 64)}
    options |= {"held_out": 0.02, "dedup": ("documents", "near", "paragraphs"), "rows_per_shard": 4096}
    return lambda output, **more: build_words([f"wiki={corpus}", f"books={books}"], output, **options | more)


@pytest.fixture(scope="module")
def whole(words, tmp_path_factory):
    """(seconds, bytes) of an uninterrupted build."""
    output = tmp_path_factory.mktemp("whole") / "out"
    began = time.monotonic()
    command(*words(output, workers=2))
    found = contents(output)
    assert len(found) > 12 and not any(".work" in name for name in found)
    return time.monotonic() - began, found


@pytest.mark.slow
def test_killed_builds_give_the_same_bytes(words, whole, tmp_path):
    """Builds killed at five random instants."""
    seconds, want = whole
    output, rng, killed = tmp_path / "out", random.Random(5), 0
    for _ in range(5):
        process = start(words(output, workers=rng.randint(1, 3)))
        try:
            process.communicate(timeout=rng.uniform(0.3, 0.6 * seconds))
            # It was done: the next one starts from nothing.
            assert process.returncode == 0 and contents(output) == want
            shutil.rmtree(output)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            killed += 1
    assert killed >= 3
    command(*words(output, workers=2))
    assert contents(output) == want


def test_parent_is_killed_and_other_options_refused(words, whole, tmp_path):
    """What kills the parent alone (the kernel, out of memory) leaves nobody to write beside the build that resumes."""
    output = tmp_path / "out"
    process = start(words(output, workers=3))
    wait_until(lambda: process.poll() is None and any(output.glob(".work/journal/read/*")), 60)
    os.killpg(process.pid, signal.SIGSTOP)
    try:
        refused = command(*words(output), code=2).stderr
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        os.killpg(process.pid, signal.SIGCONT)  # Python's own resource tracker ends by itself
    assert "another build is writing there" in refused and len(children) >= 3
    wait_until(lambda: not any(Path(f"/proc/{child}/exe").exists() for child in children))
    assert not list(output.rglob("manifest.json"))
    error = command(*words(output, vocab_size=2001), code=2).stderr
    assert "unfinished build" in error and "vocab size was 2000, is 2001" in error
    assert "resumed" in command(*words(output)).stdout
    assert contents(output) == whole[1]
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    assert "nothing to do" in command(*words(output)).stdout
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*")} == before


@pytest.fixture
def stop(topics, tokenizer_file, tmp_path, monkeypatch):
    """Starts a build of twenty tasks that runs out of disk before its manifests; returns how to run it into a folder."""
    monkeypatch.setattr(tasks, "TASK_BYTES", (1, 1))
    write_all(tmp_path / "in", {f"{i}.txt": text for i, text in enumerate(topics[:20])})
    options = {"tokenizer": tokenizer_file, "save_text": True, "rows_per_shard": 256, "held_out": 0.1, "workers": 1}

    def stop(*lengths, **given):
        def run(name, code=0, **more):
            return build_here(tmp_path / "in", tmp_path / name, code, seq_len=lengths, **options | given | more)

        with monkeypatch.context() as patched:
            patched.setattr(build, "_commit", Mock(side_effect=OSError(28, "No space left on device")))
            run("out", 4)
        return run

    return stop


@pytest.mark.parametrize("swept", [1, 1 << 40])
def test_what_was_dropped_stops_a_build_that_stops(swept, stop, tmp_path, monkeypatch, capsys):
    """Bad input that a killed build dropped with `--on-error skip`, by the records of its tasks or of the whole stage."""
    monkeypatch.setattr(journal, "SWEEP_BYTES", swept)
    write(tmp_path / "in/bad.jsonl", '{"text": "Good."}\n{"text": 5}\n')
    run = stop(32, on_error="skip")
    assert (tmp_path / "out/.work/journal/read.json").exists() == (swept == 1)
    run("out", 2, on_error="stop")
    assert "field 'text' is not a string" in capsys.readouterr().err
    run("out")


@pytest.mark.parametrize(
    "given", [{}, {"tokenizer": None, "vocab_size": 500, "held_out": 0.0}], ids=["given", "trained"]
)
def test_a_resume_reads_files_that_were_unreadable(given, stop, tmp_path, monkeypatch):
    """Root may read everything, so the refusal is made."""

    def forbid(path, *rest, real=os.open, **more):
        if os.path.basename(path) == "3.txt":
            raise PermissionError(13, "Permission denied", path)
        return real(path, *rest, **more)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", forbid)
        run = stop(32, on_error="skip", **given)
    found = run("out")
    assert found["problems"] == {} and found["read"]["documents"] == 20
    run("fresh")
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")


@pytest.mark.parametrize("left", [3, 1])
def test_a_resume_removes_what_lost_files_made(left, stop, tmp_path):
    run, output = stop(32), tmp_path / "out"
    before = set(contents(output))
    for i in range(left, 20):
        (tmp_path / "in" / f"{i}.txt").unlink()
    if left == 1:  # too little text to hold out some of it
        write(tmp_path / "in" / "0.txt", "A short line stands here, and no other follows. " * 5)
    run("out")
    run("fresh")
    assert contents(output) == contents(tmp_path / "fresh")
    lost = {name for name in before if not name.startswith(".work")} - set(contents(output))
    assert {"text/part-0000019.parquet", "shard-000001.tar"} <= lost
    assert (output / "held_out").exists() == (left > 1) and main(["verify", str(output), "--quiet"]) == 0


def test_a_build_resumes_from_synced_files_alone(stop, tmp_path, monkeypatch):
    """What a loss of power leaves at worst, when the files of the first stages were deleted before."""
    synced, sync = set(), journal.sync
    monkeypatch.setattr(journal, "SWEEP_BYTES", 1)
    monkeypatch.setattr(journal, "sync", lambda path: synced.add(path.resolve()) or sync(path))
    run = stop(32, 64)
    work = tmp_path / "out" / ".work"
    whole = {work / "build.json", *(work / "journal").glob("*.json")}  # synced as they are written
    assert work / "journal" / "read.json" in whole
    for path in (tmp_path / "out").rglob("*"):
        if path.is_file() and path not in whole | synced:
            path.unlink()
    run("out")
    run("fresh")
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")
