"""Datasets at URLs: the rows of the local copy, fetched once, whatever arrives damaged or is asked for at the same time."""

import errno
import functools
import pickle
import re
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from megabert.common import errors, remote
from megabert.data import mixture
from megabert.data.shards import ADDED, Dataset, Manifest
from tests.helpers.rows import TOKENIZER, make_dataset
from tests.helpers.web import serving

ROWS = 200  # 4 shards


@pytest.fixture
def web(tmp_path, monkeypatch):
    """A server of the folder tmp_path/www, whose cache is tmp_path/cache."""
    monkeypatch.setattr(errors, "WAITS", (0.0, 0.0, 0.0))
    monkeypatch.setenv("MEGABERT_CACHE", str(tmp_path / "cache"))
    with serving() as found:
        found.publish = functools.partial(publish, found, tmp_path / "www")
        yield found


def publish(web, top):
    web.files = {f"/{p.relative_to(top)}": p.read_bytes() for p in top.rglob("*") if p.is_file()}


@pytest.fixture
def local(tmp_path, web):
    folder = make_dataset(tmp_path / "www" / "data", ROWS)
    web.publish()
    return Dataset(folder)


def shards_asked(web):
    return sorted(re.search(r"shard-\d+", path)[0] for path, *_ in web.asked if "shard-" in path)


def same(a, b):
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ("ids", "bounds", "isnext"))


def test_shards_are_fetched_when_needed(web, local):
    dataset = Dataset(f"{web.url}/data")
    assert dataset.manifest == local.manifest and shards_asked(web) == []
    first = np.arange(64)
    assert same(dataset.read(first), local.read(first)) and shards_asked(web) == ["shard-000000"]
    every = np.random.default_rng(1).permutation(ROWS)
    assert same(dataset.read(every), local.read(every))
    assert same(pickle.loads(pickle.dumps(dataset)).read(every), local.read(every))
    assert same(Dataset(f"{web.url}/data/").read(every), local.read(every))
    assert shards_asked(web) == [f"shard-{i:06d}" for i in range(4)]


def test_a_damaged_fetch_is_retried_once(web, local, monkeypatch):
    name = "/data/shard-000001.tar"
    good = web.files[name]
    bad = good[:600] + bytes([good[600] ^ 1]) + good[601:]
    answers = [bad, good]
    answer = web.answer

    def answering(handler, body):
        if body and handler.path == name:
            web.files[name] = answers.pop(0)
        answer(handler, body)

    monkeypatch.setattr(web, "answer", answering)
    rows = np.arange(64, 128)
    assert same(Dataset(f"{web.url}/data").read(rows), local.read(rows)) and not answers
    shutil.rmtree(Dataset(f"{web.url}/data").folder)
    answers += [bad, bad]
    with pytest.raises(ValueError, match=rf"^{web.url}{name}: is damaged: it was fetched 2 times"):
        Dataset(f"{web.url}/data").read(rows)
    assert not list(Dataset(f"{web.url}/data").folder.glob("*.tar"))


def test_one_fetches_while_others_wait(web, local):
    rows = np.arange(ROWS)
    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(lambda _: Dataset(f"{web.url}/data").read(rows), range(6)))
    assert all(same(one, local.read(rows)) for one in found)
    assert shards_asked(web) == [f"shard-{i:06d}" for i in range(4)]


def test_files_of_killed_processes_are_replaced(web, local):
    dataset = Dataset(f"{web.url}/data")
    dataset.folder.mkdir(parents=True)
    (dataset.folder / ".shard-000000.tar.77.tmp").write_bytes(b"half")
    (dataset.folder / "shard-000000.tar").write_bytes(b"cut")
    assert same(dataset.read(np.arange(9)), local.read(np.arange(9)))
    assert sorted(p.name for p in dataset.folder.iterdir()) == [".shard-000000.tar.lock", "shard-000000.tar"]


def test_a_tolerant_dataset_keeps_whole_rows_of_damaged_shards(web, local):
    rows, url = np.arange(ROWS), f"{web.url}/data"
    for change, wrong in (
        (lambda data: data[:700] + b"\xff" + data[701:], [64]),
        (lambda data: None, [*range(64, 128)]),
    ):
        damaged = change(web.files["/data/shard-000001.tar"])
        web.files.pop("/data/shard-000001.tar")
        if damaged:
            web.files["/data/shard-000001.tar"] = damaged
        found, damage = Dataset(url, tolerant=True).examine(rows)
        assert sorted(damage) == wrong
        keep = np.setdiff1d(rows, wrong)
        assert np.array_equal(found.ids[keep], local.read(keep).ids)
        with pytest.raises((ValueError, FileNotFoundError), match=r"shard-000001.tar"):
            Dataset(url).read(rows)


def test_a_forbidden_addition_counts_as_missing(web, local, monkeypatch):
    status = remote.status

    def without_listing(url):  # as S3 answers where the bucket may not be listed
        try:
            return status(url)
        except FileNotFoundError:
            raise PermissionError(errno.EACCES, "no permission", url) from None

    monkeypatch.setattr(remote, "status", without_listing)
    dataset = mixture.open_versions(f"{web.url}/data")
    assert isinstance(dataset, Dataset) and same(dataset.read(np.arange(9)), local.read(np.arange(9)))


def test_another_dataset_at_the_url_is_fetched(web, local, tmp_path):
    rows = np.arange(9)
    Dataset(f"{web.url}/data").read(rows)
    shutil.rmtree(local.folder)
    other = Dataset(make_dataset(local.folder, ROWS, seed=1))
    web.publish()
    assert same(Dataset(f"{web.url}/data").read(rows), other.read(rows))


def test_versions_held_out_rows_and_tokenizer_come_from_the_url(web, local, tmp_path):
    make_dataset(local.folder / ADDED.format(1), 50, seed=3)
    held_out = make_dataset(local.folder / "held_out", 30, seed=2)
    web.publish()
    dataset = mixture.open_versions(f"{web.url}/data")
    expected = mixture.open_versions(str(local.folder))
    rows = np.arange(dataset.rows)
    assert dataset.rows == 250 and same(dataset.read(rows), expected.read(rows))
    reopened = mixture.from_json(mixture.to_json(dataset), {})
    assert reopened.place == f"{web.url}/data" and same(reopened.read(rows), expected.read(rows))
    assert dataset.tokenizer_path.read_bytes() == TOKENIZER
    assert dataset.held_out_path is None
    entry = {"path": "held_out", "rows": 30, "manifest_sha256": "0" * 64}
    shutil.rmtree(local.folder)
    make_dataset(local.folder, ROWS, held_out=entry)
    web.publish()
    web.files |= {f"/data/held_out/{p.name}": p.read_bytes() for p in held_out.glob("*")}
    assert Dataset(f"{web.url}/data").held_out_path == f"{web.url}/data/held_out"


def test_a_word_piece_tokenizer_keeps_what_lies_beside_it(web, local, tmp_path):
    entry = Manifest.load(local.folder).tokenizer
    part = make_dataset(local.folder / "held_out", 30, tokenizer=entry | {"file": "../vocab.txt", "kind": "wordpiece"})
    web.publish()
    web.files |= {"/data/vocab.txt": TOKENIZER, "/data/tokenizer_config.json": b'{"do_lower_case": true}'}
    path = Dataset(f"{web.url}/data/{part.name}").tokenizer_path
    assert path.read_bytes() == TOKENIZER and path.name == "vocab.txt"
    assert path.with_name("tokenizer_config.json").read_bytes() == b'{"do_lower_case": true}'


def test_no_dataset_at_the_url_is_one_line(web):
    with pytest.raises(ValueError) as refused:
        Dataset(f"{web.url}/none")
    assert str(refused.value) == (
        f"{web.url}/none/manifest.json: not found; a dataset is made by `python -m data_prep build`"
    )
