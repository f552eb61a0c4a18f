"""Rows that are damaged or cannot be read: fillers in their places, with the reason and what kind of trouble it is."""

from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

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


@pytest.mark.parametrize(("world", "workers"), [(1, 2), (2, 0)])
def test_a_tolerant_dataset_leaves_out_only_damaged_rows(tmp_path, world, workers):
    """A flipped row, a cut shard and a missing one: fillers in their places, everything else as without the damage."""
    whole = Dataset(make_dataset(tmp_path / "whole", 256))
    folder = make_dataset(tmp_path / "bad", 256)
    flip(folder, 700)  # row 0
    cut = folder / "shard-000001.tar"
    block = (cut.stat().st_size - 1024) // 8
    cut.write_bytes(cut.read_bytes()[: 6 * block + 100])  # of rows 64..127 the last 16 are gone
    (folder / "shard-000003.tar").unlink()  # rows 192..255
    lost = {0, *range(112, 128), *range(192, 256)}
    with pytest.raises(ValueError, match=r"shard-000001\.tar: has \d+ bytes"):
        Dataset(folder)
    bad = Dataset(folder, tolerant=True)
    assert len(bad.problems) == 2 and "shard-000003.tar: is missing" in bad.problems[1]
    seen: dict[int, str] = {}
    for rank in range(world):
        options = {"global_batch": 64, "micro_batch": 8, "seed": 1, "rank": rank, "world": world}
        good = Loader(whole, vocabulary(), **options)
        left = Loader(bad, vocabulary(), workers=workers, **options)
        for _ in range(4):
            ours, theirs = next(left), next(good)
            gone = np.isin(theirs.row_ids, list(lost))
            assert not ours.problem and (ours.row_ids == np.where(gone, -1, theirs.row_ids)).all()
            assert set(ours.damage) == set(theirs.row_ids[gone].tolist())
            seen |= ours.damage
            for a, b in zip(ours.batches, theirs.batches, strict=True):
                keep = torch.from_numpy(a.row_ids >= 0)
                for name, tensor in a.inputs().items():
                    assert torch.equal(tensor[keep], b.inputs()[name][keep]), name
                assert (a.mlm_labels[~keep] == -100).all() and (a.nsp_labels[~keep] == -100).all()
                assert a.predictions == int((a.mlm_labels >= 0).sum())
        left.close()
    assert set(seen) == lost
    assert "block 0, row 0 (ids at byte 640) does not match its checksum" in seen[0]
    assert "shard-000001.tar: block 6, row 0" in seen[112] and "cut or missing" in seen[112]
    assert "shard-000003.tar: block 7, row 7" in seen[255]
