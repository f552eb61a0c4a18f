"""Whatever bit of a dataset is flipped or cut off, verification names the file, and the number of processes is no matter."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import numpy as np
import pytest

from data_prep.report import inspect_dataset
from tests.helpers import wordpiece
from tests.helpers.rows import make_dataset

HELD = {"path": "held_out", "rows": 8}


@pytest.fixture
def folder(tmp_path) -> Path:
    """Three shards of 64, 64 and 20 rows and a held-out dataset of one."""
    inner = make_dataset(tmp_path / "data" / "held_out", 8, seed=3)
    sha256 = hashlib.sha256((inner / "manifest.json").read_bytes()).hexdigest()
    folder = make_dataset(tmp_path / "data", 148, held_out=HELD | {"manifest_sha256": sha256})
    assert list(inspect_dataset.verify(folder)) == []
    return folder


def test_every_flipped_bit_and_every_cut_is_named_with_its_file(folder):
    """300 flips of one bit and 100 cuts, spread over all files as they lie, shards' headers and padding among them."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    assert len(files) == 8
    rng = np.random.default_rng(0)
    for trial in range(400):
        path = files[trial % len(files)]
        whole = path.read_bytes()
        at = int(rng.integers(len(whole)))
        data = bytearray(whole)
        if trial < 300:
            data[at] ^= 1 << int(rng.integers(8))
        else:
            del data[at:]
        path.write_bytes(data)
        found = list(inspect_dataset.verify(folder))
        assert any(line.startswith(f"{path}: ") for line in found), (path, at, found)
        others = [p for p in files if p != path and any(line.startswith(f"{p}: ") for line in found)]
        assert not others, (path, at, found)
        path.write_bytes(whole)
    assert list(inspect_dataset.verify(folder)) == []


def test_flips_in_rows_name_block_row_and_byte(folder):
    path = folder / "shard-000001.tar"
    whole = path.read_bytes()
    rng = np.random.default_rng(1)
    for _ in range(50):
        block, row = int(rng.integers(8)), int(rng.integers(8))
        block_bytes = (len(whole) - 1024) // 8
        start = block * block_bytes + 640 + row * 64  # rows of 32 uint16 ids
        data = bytearray(whole)
        data[start + int(rng.integers(64))] ^= 1 << int(rng.integers(8))
        path.write_bytes(data)
        first, last = inspect_dataset.verify(folder)
        assert first == f"{path}: block {block}, row {row} (ids at byte {start}) does not match its checksum"
        assert last == f"{path}: SHA-256 is not the one in the manifest"


def test_processes_change_nothing_but_the_time(folder):
    for name, at in (("shard-000000.tar", 5000), ("shard-000002.tar", 9000), ("held_out/shard-000000.tar", 700)):
        with open(folder / name, "r+b") as file:
            file.seek(at)
            file.write(b"\xff\xfe\xfd")
    (folder / "shard-000001.tar").unlink()
    (folder / "shard-000009.tar").write_bytes(b"")
    one = list(inspect_dataset.verify(folder))
    assert list(inspect_dataset.verify(folder, workers=3)) == one
    said = [f"{folder / 'shard-000009.tar'}: is not in the manifest", f"{folder / 'shard-000001.tar'}: is missing"]
    assert all(line in one for line in said) and len(one) >= 8


def test_a_folder_of_datasets_is_verified_whole(folder, tmp_path):
    top = tmp_path / "top"
    shutil.copytree(folder, top / "seq512")
    make_dataset(top / "seq128", 20)
    (top / "notes").mkdir()
    assert inspect_dataset.datasets(top) == [top / "seq128", top / "seq512"]
    assert list(inspect_dataset.verify(top, workers=2)) == []
    with open(top / "seq512" / "shard-000001.tar", "r+b") as file:
        file.truncate(9000)
    (line,) = inspect_dataset.verify(top)
    assert line.startswith(f"{top / 'seq512' / 'shard-000001.tar'}: block 1 is cut at byte 9000 of ")
    (top / "seq128" / "manifest.json").write_text("{")
    first, _ = inspect_dataset.verify(top)
    assert first.startswith(f"{top / 'seq128' / 'manifest.json'}: not valid JSON")


def test_a_dataset_that_lost_its_manifest_does_not_pass(folder, tmp_path):
    (folder / "manifest.json").unlink()
    for top in (folder, tmp_path):
        assert any(line.startswith(f"{folder / 'manifest.json'}: not found") for line in inspect_dataset.verify(top))


@pytest.mark.parametrize("name", ["", "nothing"])
def test_no_dataset_is_one_line(tmp_path, name):
    (line,) = inspect_dataset.verify(tmp_path / name)
    assert line.startswith(f"{tmp_path / name / 'manifest.json'}: not found")


def test_a_vocab_txt_is_compared_with_its_hash(tmp_path):
    vocab = wordpiece.write(tmp_path / "vocab.txt")
    entry = {"kind": "wordpiece", "file": "vocab.txt", "vocab_size": 2000}
    entry |= {"special_ids": {"pad": 0, "unk": 6, "cls": 7, "sep": 8, "mask": 9}}
    entry |= {"sha256": hashlib.sha256(vocab.read_bytes()).hexdigest()}
    make_dataset(tmp_path, 8, tokenizer=entry)
    assert list(inspect_dataset.verify(tmp_path)) == []
    vocab.write_bytes(vocab.read_bytes().replace(b"fox", b"fix"))
    assert list(inspect_dataset.verify(tmp_path)) == [
        f"{vocab}: is not the tokenizer the manifest names (SHA-256 differs)"
    ]
