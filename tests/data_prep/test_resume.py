"""A build that was killed resumes where it was, with the same bytes."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data_prep import build
from data_prep.__main__ import main
from data_prep.executor import journal
from data_prep.readers import tasks
from tests.helpers.prep_reading import contents

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def arguments(corpus, topics, tmp_path_factory):
    books = tmp_path_factory.mktemp("books")
    for i, text in enumerate(topics[:20]):
        (books / f"{i:02}.txt").write_text(text, encoding="utf-8")
    return [
        sys.executable, "-m", "data_prep", "build", "--input", f"wiki={corpus}", f"books={books}", "--weight", "books=2.5",
        "--vocab-size", "2000", "--sample-megabytes", "1", "--seq-len", "128", "64", "--held-out", "0.02",
        "--dedup", "documents", "near", "paragraphs", "--rows-per-shard", "4096", "--quiet",
    ]  # fmt: skip


def run(arguments, output, *extra):
    return subprocess.run([*arguments, "--output", output, *extra], cwd=ROOT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def whole(arguments, tmp_path_factory):
    """(seconds, bytes) of an uninterrupted build."""
    output = tmp_path_factory.mktemp("whole") / "out"
    began = time.monotonic()
    result = run(arguments, output, "--workers", "2")
    assert result.returncode == 0, result.stderr
    found = contents(output)
    assert len(found) > 12 and not any(".work" in name for name in found)
    return time.monotonic() - began, found


def start(arguments, output, *extra):
    command = [*arguments, "--output", output, *extra]
    options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "start_new_session": True}
    return subprocess.Popen(command, cwd=ROOT, text=True, **options)


def test_killed_builds_give_the_same_bytes(arguments, whole, tmp_path):
    """Builds killed at five random instants."""
    seconds, want = whole
    output, rng, killed = tmp_path / "out", random.Random(5), 0
    for _ in range(5):
        process = start(arguments, output, "--workers", str(rng.randint(1, 3)))
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
    result = run(arguments, output, "--workers", "2")
    assert result.returncode == 0, result.stderr
    assert contents(output) == want


def interrupted(arguments, output):
    """A build that is stopped (SIGSTOP) once it has read something."""
    process = start(arguments, output)
    journal = output / ".work" / "journal" / "read"
    while not (journal.is_dir() and any(journal.iterdir())):
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGSTOP)
    return process


def test_parent_is_killed_and_other_options_refused(arguments, whole, tmp_path):
    """What kills the parent alone (the kernel, out of memory) leaves nobody to write beside the build that resumes."""
    output = tmp_path / "out"
    process = interrupted([*arguments, "--workers", "3"], output)
    result = run(arguments, output)
    assert result.returncode == 2 and "another build is writing there" in result.stderr
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) >= 3
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    os.killpg(process.pid, signal.SIGCONT)  # Python's own resource tracker ends by itself
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{child}/exe").exists() for child in children) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not [child for child in children if Path(f"/proc/{child}/exe").exists()]
    assert not list(output.rglob("manifest.json"))
    result = run(arguments, output, "--vocab-size", "2001")
    assert result.returncode == 2
    assert "unfinished build" in result.stderr and "vocab size was 2000, is 2001" in result.stderr
    result = run(arguments, output)
    assert result.returncode == 0 and "resumed" in result.stdout
    assert contents(output) == whole[1]
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    result = run(arguments, output)
    assert result.returncode == 0 and "nothing to do" in result.stdout
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*")} == before


def test_an_interrupt_is_one_line(arguments, tmp_path):
    process = interrupted([*arguments, "--workers", "2"], tmp_path / "out")
    os.killpg(process.pid, signal.SIGCONT)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted" in error and "Traceback" not in error
    assert os.listdir(tmp_path / "out") == [".work"]


@pytest.fixture
def stopped(topics, tokenizer_file, tmp_path, monkeypatch):
    """A build of twenty tasks that runs out of disk before its manifests; returns how to run it into a folder."""
    monkeypatch.setattr(tasks, "TASK_BYTES", (1, 1))
    (tmp_path / "in").mkdir()
    for i, text in enumerate(topics[:20]):
        (tmp_path / "in" / f"{i}.txt").write_text(text)

    def run(output, *lengths):
        return main([
            "build", "--input", f"{tmp_path}/in", "--output", f"{tmp_path}/{output}", "--tokenizer", str(tokenizer_file), "--save-text",
            "--seq-len", *lengths, "--rows-per-shard", "256", "--held-out", "0.1", "--workers", "1", "--quiet",
        ])  # fmt: skip

    def full(*_):
        raise OSError(28, "No space left on device")

    def stop(*lengths):
        with monkeypatch.context() as patched:
            patched.setattr(build, "_commit", full)
            assert run("out", *lengths) == 4
        return run

    return stop


@pytest.mark.parametrize("left", [3, 1])
def test_a_resume_removes_what_lost_files_made(left, stopped, tmp_path):
    run = stopped("32")
    before = set(contents(tmp_path / "out"))
    for i in range(left, 20):
        (tmp_path / "in" / f"{i}.txt").unlink()
    if left == 1:  # too little text to hold out some of it
        (tmp_path / "in" / "0.txt").write_text("A short line stands here, and no other follows. " * 5)
    assert run("out", "32") == 0 and run("fresh", "32") == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")
    lost = {name for name in before if not name.startswith(".work")} - set(contents(tmp_path / "out"))
    assert {"text/part-0000019.parquet", "shard-000001.tar"} <= lost
    assert (tmp_path / "out" / "held_out").exists() == (left > 1) and main(
        ["verify", f"{tmp_path}/out", "--quiet"]
    ) == 0


def test_a_build_resumes_from_synced_files_alone(stopped, tmp_path, monkeypatch):
    """What a loss of power leaves at worst, when the files of the first stages were deleted before."""
    synced, sync = set(), journal.sync
    monkeypatch.setattr(journal, "SWEPT", 1)
    monkeypatch.setattr(journal, "sync", lambda path: synced.add(path.resolve()) or sync(path))
    run = stopped("32", "64")
    work = tmp_path / "out" / ".work"
    whole = {work / "build.json", *(work / "journal").glob("*.json")}  # synced as they are written
    assert work / "journal" / "read.json" in whole
    for path in (tmp_path / "out").rglob("*"):
        if path.is_file() and path not in whole | synced:
            path.unlink()
    assert run("out", "32", "64") == 0 and run("fresh", "32", "64") == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")
