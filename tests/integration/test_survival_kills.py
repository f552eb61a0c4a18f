"""Runs that are killed end as the one that was never killed: nine kills and twenty in place, and a long run under `make soak`.

The harness is `benchmarks/survival`. It compares every logged figure but times, bit for bit, the digest of the rows among them,
and the hash of every file of the final checkpoint. That it would see a difference, or growth, is tested here too.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from benchmarks.survival import kills
from benchmarks.survival.in_place import survive_in_place
from benchmarks.survival.kills import differences
from benchmarks.survival.life import Case, Life, Server
from benchmarks.survival.records import Event, Record, account, check_best, missing_best, totals
from benchmarks.survival.soak import growth, look_at, soak, typical

ONE = Case("one", 1, 60, 5, ("checkpoint.asynchronous=false",))
TWO = Case("two", 2, 40, 5, ("zero.stage=2",))


@pytest.mark.slow
@pytest.mark.dist
def test_nine_kills_leave_no_trace(dataset, tmp_path):
    server = Server()
    try:
        results = [
            kills.survive(ONE, dataset, tmp_path / "one", server, kills=6, seed=1),
            kills.survive(TWO, dataset, tmp_path / "two", server, kills=3, seed=2),
        ]
    finally:
        server.close()
    fell = sum((Counter(result["fell"]) for result in results), Counter[str]())
    print(json.dumps(results, indent=1))
    assert [result["failure"] for result in results] == [None, None]
    assert [result["differences"] for result in results] == [0, 0]
    assert all(sum(result["followed_by"].values()) == result["kills"] for result in results)
    assert fell.total() == sum(result["kills"] for result in results) == 9
    assert fell["inside a checkpoint write"] >= 2 and fell["in training"] >= 1
    assert results[1]["killed"]["one rank"] >= 1
    assert max(step for result in results for step in result["resumed_at"]) >= 5


def finished_run(folder: Path, *changes: tuple[str, str], weights: bytes = b"weights") -> Path:
    """What is left of a run of three updates, with texts of its metrics replaced."""
    step = folder / "checkpoints/step-00000003"
    step.mkdir(parents=True)
    lines = [{"step": n, "train/loss": 1 / n, "data/row_digest": f"{n:016x}", "perf/mfu": n} for n in (1, 2, 3)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / "metrics.jsonl").write_text(text)
    (step / "weights.safetensors").write_bytes(weights)
    entry = {"weights.safetensors": {"sha256": hashlib.sha256(weights).hexdigest()}}
    (step / "manifest.json").write_text(json.dumps({"files": entry}))
    return folder


TIMES = ('"perf/mfu": 2', '"perf/mfu": 7')  # may differ


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("0.3333333333333333", "0.33333333333333337"), "train/loss is"),
        ((f"{2:016x}", f"{3:016x}"), "step 2: data/row_digest is"),
        (('{"step": 2', '{"step": 1'), "not 1..3 once each: [1, 1, 3]"),
        (('"train/loss": 0.5, ', ""), "not 1..3 once each: [1, 3]"),
        ("a weight", "the final checkpoint's weights.safetensors differs"),
        ("a leftover", "left in the killed run's folder"),
    ],
)
def test_any_difference_is_seen(change, expected, tmp_path):
    one = finished_run(tmp_path / "one")
    assert differences(one, finished_run(tmp_path / "same", TIMES), 3) == []
    changes = [] if isinstance(change, str) else [change]
    two = finished_run(tmp_path / "two", *changes, weights=b"Weights" if change == "a weight" else b"weights")
    if change == "a leftover":
        (two / "checkpoints/.saving-00000003").mkdir()
    assert any(expected in line for line in differences(one, two, 3))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (('"train/loss": 1.0', '"train/loss": 1.0000001'), "step 1: train/loss is"),
        (('"train/loss": 0.5', '"train/loss": 0.506'), "step 2: train/loss is"),
        ((f"{3:016x}", f"{4:016x}"), "step 3: data/row_digest is"),
    ],
)
def test_rows_are_compared_on_fewer_ranks_too(change, expected, tmp_path):
    """Up to update 1 both runs have as many ranks; then a loss may differ by 1%."""
    one, rounding = finished_run(tmp_path / "one"), ("0.3333333333333333", "0.3345")
    same = finished_run(tmp_path / "same", TIMES, rounding, weights=b"Weights")
    assert differences(one, same, 3, exact=1) == []
    two = finished_run(tmp_path / "two", rounding, change, weights=b"Weights")
    (line,) = differences(one, two, 3, exact=1)
    assert expected in line


STARTED = "resuming from copies in memory at step {}, 3 s trained\n"


def log_of(*lines: int | str) -> str:
    """Updates, and the texts between them."""
    return "".join(line if isinstance(line, str) else f"step {line:7}/600  loss 8.2\n" for line in lines)


def judged(before: str, kind: str, after: str, codes: list[int], saved: int, **more: object) -> Record:
    """A job that starts from nothing, is disturbed once, and leaves a checkpoint at `saved`."""
    record = Record("two", 2, "1", codes=codes, saved=saved, events=[Event(kind, 1.0, 3, len(before))], **more)
    account(record, (before + after).encode(), 0, 0)
    return record


@pytest.mark.parametrize(
    ("kind", "after", "codes", "saved", "lost", "expected"),
    [
        ("a rank", log_of(STARTED.format(2), 3, 4, 5), [0, 0], 5, 0, ""),
        ("a rank", log_of(STARTED.format(0), 1, 2, 3, 4, 5), [0, 0], 5, 0, "3 updates were repeated after a rank"),
        ("a rank", log_of(STARTED.format(3), 5), [0, 0], 5, 1, "1 updates were not reported"),
        ("a rank", log_of(STARTED.format(4), 5), [0, 0], 5, 1, "1 updates were not reported"),
        ("a rank", log_of(STARTED.format(3), 4), [4, 4], 4, 0, "exit codes [4, 4]"),
        ("TERM", log_of(4), [85, 85], 4, 0, ""),
        ("TERM", log_of(4), [85, 85], 3, 1, "exit codes [85, 85] at update 4, 3 is saved"),
        ("TERM", log_of(4), [85, 0], 4, 0, "exit codes [85, 0]"),
        ("TERM", log_of(4), [143, 143], 4, 0, "exit codes [143, 143]"),
        ("a rank, TERM after 0.6 s", "", [85, 85], 1, 0, ""),
        ("a rank, TERM after 0.6 s", "", [85, 85], 0, 3, "exit codes [85, 85] at update 3, 0 is saved"),
        ("a rank, TERM after 0.05 s", "", [4, 4], 0, 3, "exit codes [4, 4] at update 3, 0 is saved"),
        ("a rank, TERM after 2.0 s", log_of(STARTED.format(3)), [85, 85], 2, 1, "at update 3, 2 is saved"),
    ],
)
def test_a_lost_update_is_seen(kind, after, codes, saved, lost, expected):
    record = judged(log_of(1, 2, 3), kind, after, codes, saved)
    assert record.lost == lost and record.first == 0
    assert any(expected in text for text in record.failures) if expected else record.failures == []


def test_killed_keepers_leave_updates_to_the_next_job():
    record = judged(log_of(1, 2, 3), "all keepers", "", [-9, -9], 1, killed=[0, 1])
    assert record.failures == [] and record.last == 3
    for first, expected in ((1, []), (0, ["it started at 0, 1 was saved"])):
        following = Record("two", 2, "1", codes=[0, 0], saved=5)
        account(following, log_of(STARTED.format(first), *range(first + 1, 6)).encode(), record.last, record.saved)
        assert following.failures == expected and following.repeated == {"the job before": 3 - first}
    assert judged(log_of(1, 2, 3), "a keeper", "", [-9, 4], 1, killed=[0]).failures == []
    counts = totals([record, following])
    assert counts["kills"] == 1 and counts["exit_codes"] == {"-9": 2, "0": 2}
    assert counts["by_kind"]["all keepers"] == {"events": 1, "jobs_ended": 1}
    assert counts["failures"] == ["two, job 1: it started at 0, 1 was saved"]


def test_a_job_that_exceeds_its_time_is_seen():
    for seconds, expected in ((7.9, []), (8.1, ["--max-time=8.0s, it took 8.1 s"])):
        record = judged(log_of(1), "time limit", log_of(2), [85, 85], 2, max_time=8.0, seconds=seconds)
        assert record.failures == expected


def test_missing_best_checkpoint_is_seen(tmp_path):
    for step, loss in ((4, 7.5), (8, 7.25)):
        folder = tmp_path / f"checkpoints/step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(json.dumps({"state": {"best_step": step}}))
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "eval/mlm_loss": loss}) + "\n")
    said = b"finished: lowest held-out loss 7.2500 at step 8 (run/best); ended by"
    for best, failures in (("step-00000008", 0), ("step-00000004", 1), (None, 1)):
        record = Record("two", 2, "1", best=best)
        check_best(record, tmp_path, said)
        assert len(record.failures) == failures
    assert missing_best(tmp_path, 8) == missing_best(tmp_path, -1) == []
    (tmp_path / "checkpoints/step-00000008/manifest.json").write_text(json.dumps({"state": {"best_step": 6}}))
    assert missing_best(tmp_path, 8) == ["the best update is 6, saved are [4, 8]"]


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.dist
def test_twenty_disturbances_in_place_leave_no_trace(dataset, tmp_path):
    result = survive_in_place(dataset, tmp_path / "runs", kills=20, seed=1)
    print(json.dumps(result["by_kind"], indent=1))
    assert result["failures"] == [] and result["differences"] == []
    assert result["kills"] >= 20 and result["updates_lost"] == 0


RESUMED_AT_5 = "resuming from run/checkpoints/step-00000005 at step 5, 3 s trained"
FIRST_STEP = "step       1/70  loss 8.2"
GOING_BACK = "warning: step-00000010/weights.safetensors is missing: going back to step-00000005"


@pytest.mark.parametrize(
    ("text", "newest", "followed", "resumed"),
    [
        (RESUMED_AT_5, 10, None, []),
        (FIRST_STEP, 10, None, []),
        (GOING_BACK, 5, None, []),
        (RESUMED_AT_5, 5, kills.RESUMED, [5]),
        (FIRST_STEP, 0, kills.FROM_NOTHING, []),
        ("", 5, kills.UNSEEN, []),
    ],
)
def test_start_over_or_back_is_a_failure(text, newest, followed, resumed):
    life, outcome = object.__new__(Life), kills.KillCounts()
    life.case, life.output = ONE, lambda: text
    if followed is None:
        with pytest.raises(kills.Failure):
            kills.check_resume(life, newest, outcome)
    else:
        assert kills.check_resume(life, newest, outcome) == followed and outcome.resumed_at == resumed


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.dist
def test_thousands_of_updates_and_restarts_grow_nothing(dataset, tmp_path):
    result = soak(dataset / "held_out", tmp_path / "soak", updates=5000, restarts=30, seed=1)
    print(json.dumps(result, indent=1))
    for run in ("first_life", "restarted"):
        assert all(value < 0.01 for value in result[run]["growth"].values()), result[run]
    assert sum(result["restarts"].values()) == 30
    assert result["shared_memory_files_left"] == 0 and result["checkpoints_left"] == 3


def test_a_soak_too_short_for_its_rows_fails(tmp_path):
    (tmp_path / "manifest.json").write_text('{"rows": 1000}')
    with pytest.raises(kills.Failure, match="100 updates is too short to read all 1000 rows"):
        soak(tmp_path, tmp_path / "soak", updates=100, restarts=2, seed=1)


def test_growth_of_files_and_memory_is_seen(tmp_path):
    """10 open files and 64 MiB of memory in use, of which 32 MiB are shared."""
    before = look_at([os.getpid()])
    files = [(tmp_path / str(n)).open("w") for n in range(10)]
    # mapped, because malloc may hand out what this process has freed before
    private = np.frombuffer(mmap.mmap(-1, 32 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    private[:] = 1
    with open("/dev/shm/megabert-test", "w+b") as file:
        os.unlink(file.name)
        file.truncate(32 << 20)
        shared = np.memmap(file, np.uint8, "r+")
        shared[:] = 1
        after = look_at([os.getpid(), 2**22])  # a process that ended meanwhile does not disturb
    assert after["descriptors"] >= before["descriptors"] + 10 and after["processes"] == 1
    assert after["resident_bytes"] > before["resident_bytes"] + (60 << 20) and private.sum() == 32 << 20
    assert after["shared_bytes"] >= before["shared_bytes"] + (32 << 20)
    assert growth(before, after)["descriptors"] > 0.01
    for file in files:
        file.close()
    samples = [{"processes": 4.0, "resident_bytes": float(n)} for n in (7, 1, 9)]
    assert typical([*samples, {"processes": 3.0, "resident_bytes": 2.0}, {}])["resident_bytes"] == 7.0
