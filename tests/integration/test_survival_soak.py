"""Thousands of updates and dozens of restarts: what a run holds grows by less than 1%. `make soak` runs it."""

from __future__ import annotations

import json
import mmap
import os

import numpy as np
import pytest

from benchmarks.survival.soak import growth, look_at, soak, typical

LIMIT = 0.01


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.dist
def test_five_thousand_updates_and_thirty_restarts_grow_nothing(dataset, tmp_path):
    result = soak(dataset / "held_out", tmp_path / "soak", updates=5000, restarts=30, seed=1)
    print(json.dumps(result, indent=1))
    for run in ("first_life", "restarted"):
        assert all(value < LIMIT for value in result[run]["growth"].values()), result[run]
    assert sum(result["restarts"].values()) == 30
    assert result["shared_memory_files_left"] == 0 and result["checkpoints_left"] == 3


def test_growth_is_seen(tmp_path):
    """10 open files and 64 MiB of memory in use, of which 32 MiB are shared."""
    before = look_at([os.getpid()])
    files = [(tmp_path / str(n)).open("w") for n in range(10)]
    # Mapped, because malloc may hand out what this process has freed before.
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
    assert growth(before, after)["descriptors"] > LIMIT
    for file in files:
        file.close()


def test_the_typical_sample_has_all_processes():
    samples = [{"processes": 4.0, "resident_bytes": float(n)} for n in (7, 1, 9)]
    assert typical([*samples, {"processes": 3.0, "resident_bytes": 2.0}, {}])["resident_bytes"] == 7.0
    assert growth({"a": 100.0, "b": 0.0}, {"a": 101.0, "b": 0.0}) == {"a": 0.01, "b": 0.0}
