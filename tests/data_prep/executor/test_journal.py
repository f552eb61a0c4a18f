"""An item of work is done once: its record stands for it exactly as long as doing it again would give the same bytes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data_prep.executor import journal as journal_module
from data_prep.executor import work_files
from data_prep.executor.journal import Stages
from data_prep.executor.pool import Pool
from data_prep.executor.work_files import ItemResult

calls = []


def square(job, item):
    """Writes square-ITEM, which holds the item's square."""
    calls.append(("square", item))
    done = ItemResult()
    work_files.write(job, f"square-{item}", np.array([item * item]), done)
    done.counts["squares"] += 1
    return done


def add_one(job, item):
    calls.append(("add", item))
    done = ItemResult(facts={"value": int(work_files.read(job, f"square-{item}", np.int64)[0]) + 1})
    work_files.write(job, f"sum-{item}", np.array([done.facts["value"]]), done)
    return done


def run(job, items=(1, 2, 3), consume=False):
    """Both stages. Returns the values and what was called."""
    calls.clear()
    with Stages(Path(job.work), Pool(1), progress=False) as stages:
        squares = stages.map("squares", square, job, list(items))
        sums = stages.map("sums", add_one, job, list(items))
        stages.consume(*["squares"] * consume)
        stages.flush()
    assert sum(done.counts["squares"] for done in squares) == len(items)
    return [done.facts["value"] for done in sums], list(calls)


@pytest.mark.parametrize("damage", ["cut", "flip", "remove"])
def test_only_damaged_files_are_made_again(damage, job, tmp_path):
    assert run(job) == ([2, 5, 10], [("square", i) for i in (1, 2, 3)] + [("add", i) for i in (1, 2, 3)])
    assert run(job) == ([2, 5, 10], [])
    path = tmp_path / "square-2"
    data = path.read_bytes()
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(data[:-1] if damage == "cut" else bytes([data[0] ^ 1]) + data[1:])
    assert run(job) == ([2, 5, 10], [("square", 2)])
    assert path.read_bytes() == data
    record = tmp_path / "journal" / "sums" / "0000001.json"
    record.write_text(record.read_text()[:-20])
    assert run(job) == ([2, 5, 10], [("add", 2)])


def test_changed_items_are_computed_again(job):
    run(job)
    assert run(job, (1, 2, 4)) == ([2, 5, 17], [("square", 4), ("add", 1), ("add", 2), ("add", 4)])
    assert len(run(replace(job, held_limit=7), (1, 2, 4))[1]) == 6
    # What does not change the bytes is no reason.
    again = replace(job, held_limit=7, on_error="skip", tokenizer="elsewhere")
    assert run(again, (1, 2, 4)) == ([2, 5, 17], [])


def test_consumed_files_are_deleted(job, tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "SWEEP_BYTES", 0)
    on_disk, squares = [], lambda: list(tmp_path.glob("square-*"))
    monkeypatch.setattr(journal_module, "sync", lambda path: on_disk.append((path.name, len(squares()))))
    assert run(job, consume=True)[0] == [2, 5, 10]
    assert not squares() and len(list(tmp_path.glob("sum-*"))) == 3
    assert run(job, consume=True) == ([2, 5, 10], [])
    # What was made of them was on the disk before, and so were its records.
    names = [*(f"sum-{i}" for i in (1, 2, 3)), *(f"{i:07d}.json" for i in range(3)), "sums"]
    assert sorted(on_disk[: len(names)]) == sorted((name, 3) for name in names)
