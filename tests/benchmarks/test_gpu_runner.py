"""The measuring process is ended by what breaks it or never ends, and started again behind it; nothing found is lost."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu import runner
from benchmarks.gpu.runner import Absent, Item, Journal

HERE = "tests.benchmarks.test_gpu_runner"
ROOT = Path(__file__).resolve().parents[2]


# what items run, in a process of their own; the calls show in `calls`
def fine(folder: str, name: str) -> dict[str, object]:
    with open(f"{folder}/calls", "a") as file:
        file.write(f"{name} {os.getpid()}\n")
    return {"caches": [os.environ.get(name, "") for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")]}


def spoils(folder: str, name: str) -> None:
    fine(folder, name)
    SPOILT.append(name)
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


SPOILT: list[str] = []


def healthy() -> bool:
    return not SPOILT


def dies(folder: str, name: str) -> None:
    fine(folder, name)
    print("last words", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs(folder: str, name: str) -> None:
    fine(folder, name)
    time.sleep(600)


def wrong(folder: str, name: str) -> None:
    raise ValueError("3 is not 4")


def lacking(folder: str, name: str) -> None:
    raise Absent("not in this revision: precision=fp8")


def item(function: str, name: str, folder: Path, **more: object) -> Item:
    given = {"folder": str(folder), "name": name}
    return Item("part", name, f"{HERE}:{function}", given, **{"cost": 0.1, **more})  # type: ignore[arg-type]


PLAN = [
    ("fine", "first", {}), ("spoils", "spoils", {}), ("fine", "second", {}), ("dies", "dies", {"group": "g"}),
    ("fine", "of the group", {"group": "g"}), ("hangs", "hangs", {"limit": 0.7}), ("wrong", "wrong", {}),
    ("lacking", "lacking", {}), ("fine", "last", {}),
]  # fmt: skip
CHILD = f"""
import sys, time
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from benchmarks.gpu import runner
from {HERE} import PLAN, healthy, item
folder = Path(sys.argv[1])
items = [item(f, n, folder, **more) for f, n, more in PLAN]
sys.exit(runner.work(items, runner.Journal(folder / "journal"), {{"part": time.time() + 60}}, healthy))
"""


def test_what_breaks_the_process_is_recorded_and_the_rest_goes_on(tmp_path: Path) -> None:
    journal, seen = Journal(tmp_path / "journal"), list[int]()
    command = [sys.executable, "-c", CHILD, str(tmp_path)]
    end = time.time() + 60
    code = runner.supervise(
        command, journal, tmp_path / "log", os.environ, end, lambda: seen.append(len(journal.results()))
    )
    results = {key.removeprefix("part/"): r for key, r in journal.results().items()}
    assert code == 0
    assert {name: r["state"] for name, r in results.items()} == {
        "first": "done", "spoils": "failed", "second": "done", "dies": "failed", "of the group": "skipped",
        "hangs": "failed", "wrong": "failed", "lacking": "absent", "last": "done",
    }  # fmt: skip
    assert "illegal memory access" in results["spoils"]["reason"]
    assert results["dies"]["reason"] == "the process ended by SIGSEGV" and "last words" in results["dies"]["trace"]
    assert results["of the group"]["reason"] == "part/dies ended the process"
    assert results["hangs"]["reason"] == "no end after 1 s" and results["hangs"]["seconds"] < 10
    assert results["wrong"]["reason"] == "ValueError: 3 is not 4" and "broke" not in results["wrong"]
    caches = [set(results[name]["value"]["caches"]) for name in ("first", "second", "last")]
    assert not caches[0] & caches[1] and not caches[1] & caches[2], "none goes on with another's compiled code"
    assert not any(Path(folder).exists() for each in caches for folder in each)
    calls = [line.rsplit(" ", 1) for line in (tmp_path / "calls").read_text().splitlines()]
    assert [name for name, _ in calls] == ["first", "spoils", "second", "dies", "hangs", "last"], "each once"
    pids = dict(calls)
    assert pids["first"] == pids["spoils"] != pids["second"] == pids["dies"] != pids["hangs"] != pids["last"]
    assert len(seen) >= 4, "the file is written as results come in"


def test_an_item_without_time_is_skipped_and_says_so_but_a_needed_one_is_begun(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    items = [item("fine", "needed", tmp_path, cost=50, needed=True), item("fine", "long", tmp_path, cost=50)]
    assert runner.work(items, journal, {"part": time.time() + 30}, healthy) == 0
    results = journal.results()
    assert results["part/needed"]["state"] == "done"
    assert results["part/long"]["state"] == "skipped" and "takes about 50" in results["part/long"]["reason"]


def test_nothing_follows_a_needed_item_that_fails(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    items = [item("wrong", "needed", tmp_path, needed=True), item("fine", "next", tmp_path)]
    assert runner.work(items, journal, {"part": time.time() + 30}, healthy) == runner.STOP
    assert list(journal.results()) == ["part/needed"]
    assert runner.work(items, journal, {"part": time.time() + 30}, healthy) == runner.STOP, "nor in a new process"
    assert list(journal.results()) == ["part/needed"]


def test_the_end_of_the_time_ends_the_item_at_work(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    code = "import sys, time; sys.path.insert(0, sys.argv[2]); from benchmarks.gpu import runner; from pathlib import Path; "
    code += "j = runner.Journal(Path(sys.argv[1])); j.begin(runner.Item('part', 'slow', 'm:f')); time.sleep(600)"
    command, start = [sys.executable, "-c", code, str(journal.path), str(ROOT)], time.time()
    runner.supervise(command, journal, tmp_path / "log", os.environ, start + 3, lambda: None)
    assert time.time() - start < 30
    found = journal.results()["part/slow"]
    assert found["state"] == "skipped" and found["reason"] == runner.TIME_UP, "it did not fail: it had no time"


def test_a_child_that_cannot_start_is_given_up(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    command = [sys.executable, "-c", "import sys; sys.exit('no such thing')"]
    end = time.time() + 60
    assert runner.supervise(command, journal, tmp_path / "log", os.environ, end, lambda: None) == 1
    assert "no such thing" in runner.tail(tmp_path / "log") and not journal.results()


@pytest.mark.parametrize("cut", [1, 7])
def test_a_line_that_is_being_written_is_not_read_yet(tmp_path: Path, cut: int) -> None:
    journal = Journal(tmp_path / "journal")
    journal.end("a/b", "done", 1.0, value={})
    journal.end("a/c", "done", 1.0, value={})
    data = journal.path.read_bytes()
    journal.path.write_bytes(data[:-cut])
    assert list(journal.results()) == ["a/b"]
