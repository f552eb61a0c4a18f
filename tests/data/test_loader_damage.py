"""Rows that cannot be read: fillers in their places, with the reason and its exit code."""

from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path

import pytest

from megabert.common import errors
from megabert.data.loader import Loader
from megabert.data.shards import Dataset
from tests.helpers.rows import make_dataset, vocabulary


def flip(folder, *offsets, shard=0):
    path = folder / f"shard-{shard:06d}.tar"
    data = bytearray(path.read_bytes())
    for at in offsets:
        data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("number", [errno.ESTALE])
def test_a_failed_read_is_retried_and_then_class_4(tmp_path, monkeypatch, number):
    """Not a mistake of the user's, which would never be started again."""
    failures = []

    def stat(path, **options):
        if path.suffix == ".tar" and failures:
            raise failures.pop()
        return os.stat(path, **options)

    monkeypatch.setattr(errors, "WAITS", (0.0, 0.0))
    dataset = Dataset(make_dataset(tmp_path, 64))
    monkeypatch.setattr(Path, "stat", stat)
    for times, code in ((2, errors.OK), (3, errors.FAILED)):
        failures[:] = [OSError(number, os.strerror(number), "shard") for _ in range(times)]
        fresh = pickle.loads(pickle.dumps(dataset))
        update = next(Loader(fresh, vocabulary(), global_batch=8, micro_batch=8, seed=1))
        assert (update.problem_code, bool(update.problem)) == (code, bool(code))
        assert (update.tokens > 0) == (not code)
