"""Runs that are killed end as the one that was never killed: nine kills by default, a long run under `make soak`.

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

from benchmarks.survival import in_place, kills
from benchmarks.survival.kills import differences
from benchmarks.survival.life import Case, Life, Server
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
    fell: Counter[str] = Counter()
    for result in results:
        fell.update(result["fell"])
    print(json.dumps(results, indent=1))
    assert [result["failure"] for result in results] == [None, None]
    assert [result["differences"] for result in results] == [0, 0]
    assert all(sum(result["followed_by"].values()) == result["kills"] for result in results)
    assert fell.total() == sum(result["kills"] for result in results) == 9
    assert fell["inside a checkpoint write"] >= 2 and fell["in training"] >= 1
    assert results[1]["killed"]["one rank"] >= 1
    assert max(step for result in results for step in result["resumed_at"]) >= 5


def finished_run(folder: Path) -> Path:
    """What is left of a run of three updates."""
    step = folder / "checkpoints" / "step-00000003"
    step.mkdir(parents=True)
    lines = [{"step": n, "train/loss": 1 / n, "data/row_digest": f"{n:016x}", "perf/mfu": n} for n in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (step / "weights.safetensors").write_bytes(b"weights")
    seal(step)
    return folder


def seal(step: Path) -> None:
    data = (step / "weights.safetensors").read_bytes()
    entry = {"weights.safetensors": {"sha256": hashlib.sha256(data).hexdigest()}}
    (step / "manifest.json").write_text(json.dumps({"files": entry}))


def replace_in_metrics(run: Path, old: str, new: str) -> None:
    path = run / "metrics.jsonl"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def other_weights(run: Path) -> None:
    step = run / "checkpoints" / "step-00000003"
    (step / "weights.safetensors").write_bytes(b"Weights")
    seal(step)


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda run: replace_in_metrics(run, "0.3333333333333333", "0.33333333333333337"), "train/loss is"),
        (lambda run: replace_in_metrics(run, f"{2:016x}", f"{3:016x}"), "step 2: data/row_digest is"),
        (lambda run: replace_in_metrics(run, '{"step": 2', '{"step": 1'), "not 1..3 once each: [1, 1, 3]"),
        (lambda run: replace_in_metrics(run, '"train/loss": 0.5, ', ""), "not 1..3 once each: [1, 3]"),
        (other_weights, "the final checkpoint's weights.safetensors differs"),
        (lambda run: (run / "checkpoints/.saving-00000003").mkdir(), "left in the killed run's folder"),
    ],
    ids=["one ulp of a loss", "a row", "an update twice", "an update lost", "a weight", "a leftover"],
)
def test_any_difference_is_seen(tmp_path, spoil, expected):
    one, two = finished_run(tmp_path / "one"), finished_run(tmp_path / "two")
    replace_in_metrics(two, '"perf/mfu": 2', '"perf/mfu": 7')  # times may differ
    assert differences(one, two, 3) == []
    spoil(two)
    assert any(expected in line for line in differences(one, two, 3))


@pytest.mark.parametrize(
    ("step", "line", "found"),
    [
        (1, (1.0, 0.5, "a"), {}),
        (2, (0.9, 0.5, "b"), {"figures": 1}),
        (2, (0.5, 0.5, "x"), {"rows": 1, "figures": 1}),
        (3, (0.4, 0.5, "c"), {"on_fewer": 0.2, "last": 0.2}),
        (3, (0.5, 0.5, "x"), {"rows": 1}),
        (4, (0.5, 0.5, "d"), {"rows": 1, "figures": 1}),
    ],
)
def test_any_difference_of_a_run_in_place_is_seen(tmp_path, step, line, found):
    """Up to update 2 the run has four ranks, then three."""
    expected = {1: (1.0, 0.5, "a"), 2: (0.5, 0.5, "b"), 3: (0.5, 0.5, "c")}
    job = object.__new__(in_place.KeptRanks)
    job.run, job.curve = tmp_path, lambda: expected | {step: line}
    starts = [{"step": 0, "ranks": 4}, {"step": 2, "ranks": 3}]
    (tmp_path / "starts.jsonl").write_text("".join(json.dumps(start) + "\n" for start in starts))
    whole = {"updates": 3, "rows": 0, "figures": 0, "on_fewer": 0.0, "last": 0.0}
    assert in_place.differences(job, expected) == pytest.approx(whole | found)


def test_a_run_that_starts_over_or_goes_back_is_a_failure(tmp_path):
    life = object.__new__(Life)
    life.case = ONE
    for text, newest in (
        ("resuming from run/checkpoints/step-00000005 at step 5, 3 s trained", 10),
        ("step       1/70  loss 8.2", 10),
        ("warning: step-00000010/weights.safetensors is missing: going back to step-00000005", 5),
    ):
        life.output = lambda text=text: text
        with pytest.raises(kills.Failure):
            kills.check_resume(life, newest, kills.KillCounts())
    life.output = lambda: "resuming from run/checkpoints/step-00000005 at step 5, 3 s trained"
    outcome = kills.KillCounts()
    assert kills.check_resume(life, 5, outcome) == kills.RESUMED
    assert outcome.resumed_at == [5]
    life.output = lambda: "step       1/70  loss 8.2"
    assert kills.check_resume(life, 0, outcome) == kills.FROM_NOTHING
    life.output = lambda: ""
    assert kills.check_resume(life, 5, outcome) == kills.UNSEEN and outcome.resumed_at == [5]


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
