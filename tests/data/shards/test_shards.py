"""The shard contract: stock tools read it, reads equal an independent reader's, and no damage passes."""

import hashlib
import io
import json
import pickle
import tarfile
import time
import timeit
import zlib
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import webdataset

from megabert.common.files import compact, sealed
from megabert.data import shards
from megabert.data.shards import DamagedRow, Dataset, Manifest, verify, write_manifest
from megabert.data.shards.layout import shard_bytes
from tests.helpers.golden_runs import held_out_of
from tests.helpers.rows import make_dataset, make_rows, manifest

ROWS, LENGTH, SLOTS = 148, 32, 3  # 3 shards, the last block has 4 rows


@pytest.fixture(scope="module")
def arrays():
    return make_rows(ROWS, LENGTH, SLOTS, seed=5)


@pytest.fixture
def folder(tmp_path, arrays):
    return make_dataset(tmp_path / "data", ROWS, arrays=arrays)


def independent(folder: Path) -> dict[str, np.ndarray]:
    """Every member of every shard through tarfile and np.load, in archive order."""
    parts = {}
    for path in sorted(folder.glob("shard-*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                array = np.load(io.BytesIO(tar.extractfile(member).read()), allow_pickle=False)
                parts.setdefault(member.name.split(".")[1], []).append(array)
    return {name: np.concatenate(blocks) for name, blocks in parts.items()}


def test_stock_webdataset_reads_a_shard_as_it_is(folder, arrays):
    paths = [str(p) for p in sorted(folder.glob("shard-*.tar"))]
    samples = list(webdataset.WebDataset(paths, shardshuffle=False).decode())
    assert [s["__key__"] for s in samples] == [f"{i:09d}" for i in range(19)]
    for name, array in zip(("ids", "bounds", "isnext"), arrays, strict=True):
        got = np.concatenate([s[f"{name}.npy"] for s in samples])
        assert got.dtype == array.dtype and (got == array).all()


def test_members_follow_the_data_contract(folder, arrays):
    with tarfile.open(folder / "shard-000001.tar") as tar:
        members = tar.getmembers()
    assert [m.name for m in members[:4]] == [f"000000008.{n}.npy" for n in ("ids", "bounds", "isnext", "crc")]
    assert {(m.mtime, m.uid, m.gid, m.mode, m.uname, m.isreg()) for m in members} == {(0, 0, 0, 0o644, "", True)}
    crc, rows = independent(folder)["crc"], zip(*arrays, strict=True)
    assert crc.dtype == np.uint32 and crc.tolist() == [zlib.crc32(b"".join(map(bytes, row))) for row in rows]
    entry = Manifest.load(folder).shards[0]
    data = (folder / entry.name).read_bytes()
    assert (entry.bytes, entry.sha256) == (len(data), hashlib.sha256(data).hexdigest())


@pytest.mark.parametrize(("dtype", "rows"), [("uint16", ROWS), ("uint32", ROWS), ("uint16", 1), ("uint16", 8)])
def test_read_equals_an_independent_reader(tmp_path, arrays, dtype, rows):
    ids, bounds, isnext = (array[:rows] for array in arrays)
    tokenizer = manifest(rows, LENGTH, SLOTS, 8, [])["tokenizer"] | {"vocab_size": 70_000}
    changes = {"dtype": dtype, "tokenizer": tokenizer} if dtype == "uint32" else {}
    folder = make_dataset(tmp_path, rows, arrays=(ids.astype(dtype), bounds, isnext), **changes)
    want = independent(folder)
    dataset = Dataset(folder)
    rng = np.random.default_rng(0)
    picks = [np.arange(rows), rng.permutation(rows), rng.integers(0, rows, 400), np.array([rows - 1]), np.arange(0)]
    for pick in picks:
        got = pickle.loads(pickle.dumps(dataset)).read(pick) if len(pick) == 400 else dataset.read(pick)
        for name, part in vars(got).items():
            assert part.dtype == want[name].dtype and (part == want[name][pick]).all()
    for outside in ([-1], [rows]):
        with pytest.raises(ValueError, match=rf"row ids must lie in 0\.\.{rows - 1}"):
            dataset.read(np.array(outside))


@pytest.mark.parametrize(
    ("array", "place", "value"),
    [(1, (3, 0, 0), LENGTH + 1), (1, (3, 0, 1), LENGTH + 1), (0, (3, 1), 2000), (2, (3, 0), 2)],
    ids=["lengths beyond the row", "A longer than its sequence", "an id outside the vocabulary", "a label of 2"],
)
def test_contradicting_rows_with_good_checksums_are_refused(tmp_path, array, place, value):
    arrays = make_rows(16, LENGTH, SLOTS)
    arrays[array][place] = value
    make_dataset(tmp_path, 16, arrays=arrays)
    with pytest.raises(DamagedRow, match=r"block 0, row 3 .* out of range"):
        Dataset(tmp_path).read(np.arange(16))
    assert len(list(verify(tmp_path))) == 1


def test_a_missing_shard_tokenizer_or_manifest_is_named(folder):
    (folder / "tokenizer.model").write_bytes(b"another")
    assert [p for p in verify(folder) if "tokenizer.model" in p]
    (folder / "shard-000001.tar").unlink()
    assert any("shard-000001.tar: is missing" in p for p in verify(folder))
    with pytest.raises(ValueError, match=r"shard-000001\.tar: is missing"):
        Dataset(folder)
    (folder / "manifest.json").write_bytes(b"[" * 100_000)
    with pytest.raises(ValueError, match=r"manifest\.json: not valid JSON"):
        Dataset(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"manifest\.json: not found"):
        Dataset(folder)
    assert len(list(verify(folder))) == 1


def test_the_held_out_dataset_is_verified_too(tmp_path):
    inner = make_dataset(tmp_path / "held_out", 8)
    folder = make_dataset(tmp_path, 16, held_out=held_out_of(inner, 8))
    assert list(verify(folder)) == [] and Dataset(folder).held_out_path == inner
    make_dataset(inner, 8, seed=9)
    assert len([p for p in verify(folder) if "held-out manifest" in p]) == 1


BAD_FIELDS = [
    (("schema",), 0, "schema"),
    (("seq_len",), "128", "seq_len"),
    (("rows",), ROWS + 1, "rows"),
    (("dtype",), "uint32", "dtype"),
    (("tokenizer", "kind"), "bpe", "tokenizer.kind"),
    (("tokenizer", "file"), "/etc/passwd", "tokenizer.file"),
    (("tokenizer", "sha256"), "xyz", "tokenizer.sha256"),
    (("tokenizer", "special_ids"), {"pad": 0}, "tokenizer.special_ids"),
    (("tokenizer", "special_ids", "mask"), 2, "tokenizer.special_ids"),
    (("shards", 1), None, "shards[1]"),
    (("shards", 1, "name"), "pipe:rm", "shards[1].name"),
    (("shards", 1, "rows"), 56, "shards[1].rows"),
    (("shards", 1, "bytes"), 1024, "shards[1].bytes"),
    (("held_out",), {"path": ".."}, "held_out.path"),
    (("extra",), 1, "extra"),
    (("order",), 1, "order"),
]


@pytest.mark.parametrize(("where", "value", "field"), BAD_FIELDS, ids=[f"{f}={v}"[:40] for _, v, f in BAD_FIELDS])
def test_wrong_manifest_fields_are_named_with_their_file(folder, where, value, field):
    path = folder / "manifest.json"
    tree = json.loads(path.read_text())
    node = tree
    for key in where[:-1]:
        node = node[key]
    node[where[-1]] = value
    path.write_text(json.dumps(tree))
    with pytest.raises(ValueError) as caught:
        Manifest.load(folder)
    assert str(caught.value).startswith(f"{path}: {field}") and "\n" not in str(caught.value)
    assert len(list(verify(folder))) == 1
    with pytest.raises(ValueError):
        write_manifest(folder, tree)


def test_a_changed_manifest_field_breaks_the_fingerprint(folder):
    path = folder / "manifest.json"
    tree, fingerprint = json.loads(path.read_text()), Manifest.load(folder).fingerprint
    assert tree["fingerprint"] == fingerprint
    for change in ({"options": {"seed": 2}}, {"statistics": {"rows": 1.5}}, {"fingerprint": "0" * 64}):
        path.write_text(json.dumps(tree | change))
        with pytest.raises(ValueError, match=r"manifest\.json: fingerprint is not that of the other fields"):
            Manifest.load(folder)
    for field in ("fingerprint", "order"):
        path.write_text(json.dumps({name: value for name, value in tree.items() if name != field}))
        with pytest.raises(ValueError, match=rf"manifest\.json: {field} is missing"):
            Manifest.load(folder)
    write_manifest(folder, tree | {"options": {"seed": 2}})
    assert Manifest.load(folder).fingerprint != fingerprint and list(verify(folder)) == []


def test_a_shard_that_cannot_be_read_is_named(folder, monkeypatch):
    checks = [part for part in shards.plan(folder) if isinstance(part, shards.ShardCheck)]

    monkeypatch.setattr("builtins.open", Mock(side_effect=OSError(5, "Input/output error")))
    found = [check.problems() for check in checks]
    monkeypatch.undo()
    assert found == [[f"{check.path}: cannot be read (Input/output error)"] for check in checks]


def test_a_manifest_of_15000_shards_loads_fast(tmp_path):
    """A thousand million rows. What a build says of all its shards is checked once each, not worked out for each."""
    count, rows = 15_259, 65_536
    size = shard_bytes(rows, 256, 512, 8, "uint16")
    entries = [{"name": f"shard-{i:06d}.tar", "rows": rows, "bytes": size, "sha256": f"{i:064x}"} for i in range(count)]
    tree = manifest(count * rows, 512, 8, 256, entries)
    (tmp_path / "manifest.json").write_bytes(sealed(tree, "fingerprint", compact))
    seconds = timeit.repeat(lambda: Manifest.load(tmp_path), timer=time.process_time, repeat=3, number=1)
    assert Manifest.load(tmp_path).rows == count * rows and min(seconds) < 0.2
