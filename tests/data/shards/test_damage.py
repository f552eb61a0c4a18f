"""No damaged byte of a dataset is trained on: 400 flipped bits and 400 truncations, each named with its place by `tarfile`."""

import os
import re
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from megabert.common import errors
from megabert.data.batch import Update
from megabert.data.loader import Loader
from megabert.data.shards import DamagedRow, Dataset, Manifest, ShardCheck, plan
from tests.helpers.rows import flip, make_dataset, vocabulary

ROWS, LENGTH, SLOTS, BLOCK, PER_SHARD = 84, 32, 3, 8, 32  # 3 shards; the last block has 4 rows
ROW_BYTES = {"ids": 2 * LENGTH, "bounds": 4 * SLOTS, "isnext": SLOTS, "crc": 4}
IN_ROWS = tuple(ROW_BYTES)
BESIDE_ROWS = ("tar header", "npy header", "padding", "end of archive")
END = 1024  # bytes of zeros that close a tar
GLOBAL_BATCH = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Text and fractions in the manifest, so that some of its values have more than one spelling."""
    folder = tmp_path_factory.mktemp("damage") / "data"
    more = {"options": {"input": "café ünï", "seed": 7}, "statistics": {"fill": 1.5e-07, "rows": ROWS}}
    return make_dataset(folder, ROWS, shard_rows=PER_SHARD, **more)


@pytest.fixture(scope="module")
def sites(folder) -> dict[str, list[tuple[str, int, str]]]:
    """What kind of byte -> [(shard, offset, `block B, row R (ids at byte O)` for a byte of a row)]."""
    found: dict[str, list[tuple[str, int, str]]] = {kind: [] for kind in (*IN_ROWS, *BESIDE_ROWS)}
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            members = tar.getmembers()
        first = int(members[0].name.split(".")[0])
        ids = {m.name.split(".")[0]: m.offset_data + 128 for m in members if ".ids." in m.name}
        for m in members:
            key, name, _ = m.name.split(".")
            for at in range(m.offset_data + 128, m.offset_data + m.size):
                row = (at - m.offset_data - 128) // ROW_BYTES[name]
                byte = ids[key] + row * ROW_BYTES["ids"]
                found[name].append((path.name, at, f"block {int(key) - first}, row {row} (ids at byte {byte})"))
            end = m.offset_data + -(-m.size // 512) * 512
            for kind, start, stop in (
                ("tar header", m.offset, m.offset_data),
                ("npy header", m.offset_data, m.offset_data + 128),
                ("padding", m.offset_data + m.size, end),
            ):
                found[kind] += [(path.name, at, "") for at in range(start, stop)]
        found["end of archive"] += [(path.name, at, "") for at in range(end, path.stat().st_size)]
    assert sum(map(len, found.values())) == sum(path.stat().st_size for path in folder.glob("*.tar"))
    return found


@pytest.fixture(scope="module")
def rows(folder):
    """Every row as it was written."""
    return Dataset(folder).read(np.arange(ROWS))


def same(a, b) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ("ids", "bounds", "isnext"))


def shard_problems(folder: Path, name: str) -> list[str]:
    """What `verify` says about one shard; the other shards are not read, to save time."""
    (check,) = (part for part in plan(folder) if isinstance(part, ShardCheck) and Path(part.path).name == name)
    return check.problems()


def test_flipped_bits_are_refused_or_touch_no_row(folder, sites, rows):
    """50 in each of eight kinds of byte, read by a reader that had the shard open and by one that opens it now."""
    rng = np.random.default_rng(11)
    running = Dataset(folder)
    running.read(np.arange(ROWS))
    for kind, bytes_of_kind in sites.items():
        for pick in rng.choice(len(bytes_of_kind), 50, replace=len(bytes_of_kind) < 50).tolist():
            name, at, place = bytes_of_kind[pick]
            bit = int(rng.integers(8))
            flip(folder / name, at, bit)
            problems = shard_problems(folder, name)
            assert "SHA-256" in problems[-1] and all(p.startswith(f"{folder / name}: ") for p in problems)
            for reader in (running, Dataset(folder)):
                if kind in IN_ROWS:
                    with pytest.raises(DamagedRow) as caught:
                        reader.read(rng.permutation(ROWS))
                    message = f"{folder / name}: {place} does not match its checksum"
                    assert str(caught.value) == message == problems[0], (kind, at, bit)
                else:
                    assert same(reader.read(np.arange(ROWS)), rows), (kind, at, bit)
                    end = kind == "end of archive"
                    byte = (folder / name).stat().st_size - END if end else at
                    assert re.search(rf"byte {byte}\b", problems[0]), (kind, at, problems)
            flip(folder / name, at, bit)
    assert same(running.read(np.arange(ROWS)), rows)


def test_truncations_are_refused_before_a_row_is_read(folder, rows):
    """Cut before the dataset is opened (200), after it was opened (100), and while the shard is mapped (100)."""
    rng = np.random.default_rng(13)
    shards = sorted(folder.glob("*.tar"))
    for trial in range(400):
        path = shards[trial % len(shards)]
        whole = path.read_bytes()
        size = int(rng.integers(len(whole)))
        size -= size % 512 if trial % 4 == 0 else 0  # at a unit of the archive
        reader = Dataset(folder)
        if trial % 4 == 3:
            reader.read(np.arange(ROWS))
        os.truncate(path, size)
        end = len(whole) - END
        with pytest.raises(ValueError) as refused:
            Dataset(folder) if trial % 4 < 2 else reader.read(rng.permutation(ROWS))
        expected = f"{path}: has {size} bytes, the manifest says {len(whole)}; "
        assert str(refused.value).startswith(expected) and "\n" not in str(refused.value)
        problems = shard_problems(folder, path.name)
        assert problems and all(p.startswith(f"{path}: ") for p in problems)
        place = f"is cut at byte {size} of {len(whole)}" if size < end else f"end of the archive at byte {end} "
        assert any(place in p for p in problems), (size, problems)
        path.write_bytes(whole)


def test_a_damaged_manifest_is_refused_or_only_respelled(folder, rows):
    """Refused with the file's name, or the same values in another spelling: rows as they were, and `verify` says so."""
    path = folder / "manifest.json"
    text, good = path.read_bytes(), Manifest.load(folder)
    rng = np.random.default_rng(15)
    flips = [(at, int(rng.integers(8))) for at in rng.integers(len(text), size=990).tolist()]
    flips.append((text.index(b"e-07"), 5))  # the other case of a letter
    damaged = [text[:at] + bytes([text[at] ^ 1 << bit]) + text[at + 1 :] for at, bit in flips]
    damaged += [*(text[:size] for size in range(len(text))), b"[]", b"null", b"\xff"]
    respelled = 0
    for data in damaged:
        path.write_bytes(data)
        try:
            dataset = Dataset(folder)
        except ValueError as error:
            assert str(error).startswith(f"{path}: ") and "\n" not in str(error), error
            assert plan(folder) == [str(error)]
        else:
            assert dataset.manifest == good and same(dataset.read(np.arange(ROWS)), rows)
            assert plan(folder)[0] == f"{path}: is not as it was written: the same fields in other bytes"
            respelled += 1
    path.write_bytes(text)
    assert 1 <= respelled < 30


def updates(folder: Path, workers: int = 0) -> list[Update]:
    """An epoch, or what comes of it until an update has a problem."""
    sizes = {"global_batch": GLOBAL_BATCH, "micro_batch": GLOBAL_BATCH}
    loader = Loader(Dataset(folder), vocabulary(), seed=5, workers=workers, **sizes)
    found = []
    while len(found) < ROWS // GLOBAL_BATCH and not (found and found[-1].problem):
        found.append(next(loader))
    loader.close()
    return found


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_gives_no_damaged_row(folder, sites, workers):
    """Every update before it is what it would have been; in its place comes the reason, and not a row."""
    whole = updates(folder, workers)
    order = Dataset(folder).order(5, np.arange(ROWS))[0]
    assert np.array_equal(np.concatenate([update.row_ids for update in whole]), order)
    for kind in IN_ROWS:
        name, at, place = sites[kind][len(sites[kind]) * 2 // 3]
        block, row = (int(found) for found in re.findall(r"(?:block|row) (\d+)", place))
        flip(folder / name, at, 3)
        got = updates(folder, workers)
        flip(folder / name, at, 3)
        bad = int(name[6:12]) * PER_SHARD + block * BLOCK + row
        assert len(got) == int(np.flatnonzero(order == bad)[0]) // GLOBAL_BATCH + 1
        assert got[-1].problem == f"{folder / name}: {place} does not match its checksum"
        assert (got[-1].row_ids == -1).all() and got[-1].predictions == 0
        for update, want in zip(got[:-1], whole, strict=False):
            assert update.problem == "" and np.array_equal(update.row_ids, want.row_ids)
            assert torch.equal(update.batches[0].input_ids, want.batches[0].input_ids)


@pytest.mark.parametrize("loss", ["cut", "removed"])
def test_a_shard_lost_meanwhile_is_one_clear_line(folder, tmp_path, loss, monkeypatch):
    """A worker that read its map beyond the end of the file would be killed without a word. A shard that is gone was on a
    file system that is lost, which a restart may find again."""
    monkeypatch.setattr(errors, "WAITS", (0.0, 0.0))
    copy = shutil.copytree(folder, tmp_path / "data")
    dataset = Dataset(copy)
    if loss == "cut":
        dataset.read(np.arange(ROWS))  # the worker inherits the maps
    for path in copy.glob("*.tar"):
        path.unlink() if loss == "removed" else os.truncate(path, 512)
    loader = Loader(dataset, vocabulary(), global_batch=12, micro_batch=12, seed=5, workers=1)
    update = next(loader)
    loader.close()
    assert update.problem.startswith(f"{copy}/shard-00000") and "\n" not in update.problem
    assert f": {'has 512 bytes' if loss == 'cut' else 'is gone'}" in update.problem
    assert update.problem_code == (errors.USER_ERROR if loss == "cut" else errors.FAILED)
