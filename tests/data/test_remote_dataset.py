"""A dataset in a bucket gives the rows of the same one in a folder; its shards are copied once, checked, and removed when used up."""

import errno
import fcntl
import os
import pickle
import re
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from data_prep.report import inspect_dataset
from megabert.common import storage
from megabert.common.errors import FAILED, Failed, describe, exit_code
from megabert.data.mixture import open_mixture
from megabert.data.order import RowOrder
from megabert.data.shards import Cache, Dataset, Manifest, verify
from megabert.data.shards.remote import _alone, unique
from tests.helpers import rows as sample
from tests.helpers import web_folder
from tests.helpers.golden_runs import held_out_of
from tests.helpers.object_store import DENY, PASS, STALE, UNAVAILABLE, Proxy, listing
from tests.helpers.waiting import wait_until

pytest.importorskip("s3fs")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100 shards of 64 rows, of which 64 are in use at a time."""
    return sample.make_dataset(tmp_path_factory.mktemp("local") / "data", 6_400 - 3)


def upload(folder: Path, url: str) -> str:
    for path in sorted(folder.iterdir()):
        storage.put(path, storage.join(url, path.name))
    return url


@pytest.fixture
def url(folder: Path, proxy: Proxy) -> str:
    """The folder's URL, for tests that leave it as it is."""
    url = "s3://data/rows"
    return url if storage.exists(f"{url}/shard-000099.tar") else upload(folder, url)


def copies(cache: str | Path) -> list[Path]:
    return sorted(Path(cache).glob("*/data/shard-*.tar"))


def size_of(paths: list[Path]) -> int:
    """Bytes of the files, of which threads remove some meanwhile."""
    total = 0
    for path in paths:
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def room_for(shards: float, folder: Path, path: Path) -> Cache:
    return Cache(str(path), shards * Manifest.load(folder).shards[0].bytes / 2**30)


def test_rows_are_the_folders_and_shards_fetched_once(folder, proxy, url, tmp_path):
    local, remote = Dataset(folder), Dataset(url)
    cache = tmp_path / "cache/megabert/datasets"
    assert remote.manifest == local.manifest and remote.place == url and copies(cache) == []
    row_ids, _ = local.order(3, np.arange(500))
    again = pickle.loads(pickle.dumps(remote))
    before = proxy.requests["GET"]
    for dataset in (remote, again, Dataset(url)):
        for mine, theirs in zip(vars(dataset.read(row_ids)).values(), vars(local.read(row_ids)).values(), strict=True):
            np.testing.assert_array_equal(mine, theirs)
    used = len(np.unique(row_ids // 64))
    assert len(copies(cache)) == used
    assert proxy.requests["GET"] - before <= used + 3  # and lists and manifests


def test_processes_of_a_node_share_a_copy(proxy, url):
    datasets = [Dataset(url) for _ in range(6)]
    before = proxy.requests["GET"]
    with ThreadPoolExecutor(6) as threads:
        list(threads.map(lambda dataset: dataset.read(np.arange(64 * 5)), datasets))
    assert proxy.requests["GET"] - before == 5


def test_a_process_forked_meanwhile_holds_no_lock(tmp_path):
    """As those of a loader, which may wait for that copy."""
    worker = get_context("fork").Process(target=time.sleep, args=(60,))
    with _alone(tmp_path / "shard"):
        worker.start()
    try:
        with open(tmp_path / ".shard.lock", "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        worker.kill()
        worker.join()


def test_a_cache_without_locks_is_refused(url, tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(
        ValueError, match=r"copies.*: this file system has no locks; set data.cache_dir to one that has"
    ):
        Dataset(url, cache=Cache(str(tmp_path / "copies")))


def test_beyond_the_limit_the_oldest_shards_go(folder, proxy, url, tmp_path):
    """And rows stay right: the shards in use at a position are there when it is reached, also those removed since their first copy."""
    with pytest.raises(
        ValueError, match=r"data.cache_gib=.*64 shards of .* are in use at a time; give at least"
    ) as small:
        Dataset(url, cache=room_for(60, folder, tmp_path / "small"))
    Dataset(url, cache=Cache(str(tmp_path / "enough"), float(str(small.value).rpartition(" ")[2])))
    cache, before = room_for(70.5, folder, tmp_path / "copies"), proxy.requests["GET"]
    local, remote = Dataset(folder), Dataset(url, cache=cache)
    shards = local.manifest.shards
    order = RowOrder(np.array([shard.rows for shard in shards]), local.manifest.block_rows)
    most = 0
    for first in range(0, 2 * local.rows, 320):
        remote.fetch_ahead(11, first, lambda *_: None)
        in_use = set(islice(unique(order.shards_from(11, first)), order.shards_in_use))
        assert {shards[number].name for number in in_use} <= {path.name for path in copies(cache.path)}
        row_ids, _ = local.order(11, np.arange(first, min(first + 320, 2 * local.rows)))
        np.testing.assert_array_equal(remote.read(row_ids).ids, local.read(row_ids).ids)
        most = max(most, size_of(copies(cache.path)))
    assert 60 / 70.5 < most / 2**30 / cache.gib <= 1
    # in order, so that hardly a shard is copied twice an epoch
    assert 140 < proxy.requests["GET"] - before < 2 * 100 * 1.4


def test_shards_are_fetched_before_they_are_needed(url, tmp_path):
    remote, cache = Dataset(url), tmp_path / "cache/megabert/datasets"
    shown: list[tuple[int, int]] = []
    remote.fetch_ahead(5, 0, lambda done, of: shown.append((done, of)))
    assert shown[-1] == (64, 64)
    row_ids, _ = remote.order(5, np.arange(64))
    assert {f"shard-{shard:06d}.tar" for shard in row_ids // 64} <= {path.name for path in copies(cache)}
    wait_until(lambda: len(copies(cache)) == 100, timeout=60)


def test_a_cache_has_just_room_for_few_shards(proxy, tmp_path):
    """Of three, fewer than are copied at a time."""
    folder = sample.make_dataset(tmp_path / "few", 3 * 64, seed=2)
    cache = room_for(3.5, folder, tmp_path / "copies")
    local, remote = Dataset(folder), Dataset(upload(folder, "s3://data/few"), cache=cache)
    remote.fetch_ahead(5, 0, lambda *_: None)
    row_ids, _ = local.order(5, np.arange(192))
    np.testing.assert_array_equal(remote.read(row_ids).ids, local.read(row_ids).ids)


@pytest.mark.slow
def test_datasets_of_a_mixture_share_the_cache(folder, url, tmp_path):
    mix = {upload(sample.make_dataset(tmp_path / "other", 6_400 - 3, seed=2), "s3://data/other"): 0.5}
    with pytest.raises(ValueError, match=r"data.cache_gib=.*64 shards of .* are in use at a time; give at least"):
        open_mixture(url, mix, cache=room_for(100, folder, tmp_path / "small"))
    cache = room_for(150, folder, tmp_path / "copies")
    mixed = open_mixture(url, mix, cache=cache)
    for first in range(0, mixed.rows, 4096):
        mixed.fetch_ahead(3, first, lambda *_: None)
        mixed.read(mixed.order(3, np.arange(first, first + 256))[0])
        assert size_of(copies(cache.path)) <= cache.gib * 2**30


def test_a_list_older_than_shards_is_no_damage(folder, proxy):
    url = "s3://data/listed"
    storage.put(folder / "manifest.json", f"{url}/manifest.json")
    assert len(storage.find(url)) == 1
    proxy.fault = lambda method, path, number: STALE if listing(path) else PASS
    upload(folder, url)
    assert len(storage.find(url)) == 1
    assert len(Dataset(url).read(np.arange(3)).ids) == 3


def test_a_full_disk_of_the_cache_is_named(url, tmp_path, monkeypatch):
    """The kernel refuses to write more of a file than RLIMIT_FSIZE."""
    monkeypatch.setattr("megabert.common.errors.WAITS", (0.01,))
    remote = Dataset(url, cache=Cache(str(tmp_path / "copies")))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as failed:
            remote.read(np.arange(64))
        assert exit_code(failed.value) == FAILED
        assert re.search(r"copies/.*/\.shard-000000.tar.part: the disk is full", describe(failed.value))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert copies(tmp_path / "copies") == [] and not list((tmp_path / "copies").rglob("*.part"))
    assert len(remote.read(np.arange(64)).ids) == 64


def test_a_copy_removed_before_it_is_complete_is_class_4(url, tmp_path, monkeypatch):
    remote, fetch = Dataset(url, cache=Cache(str(tmp_path / "copies"))), storage.fetch
    monkeypatch.setattr(storage, "fetch", lambda url, target: (fetch(url, target), target.unlink())[0])
    with pytest.raises(Failed, match=r"shard-000000\.tar\.part: was removed while it was written"):
        remote.read(np.arange(64))


def test_what_the_store_lost_or_changed_is_named(proxy, tmp_path):
    folder = sample.make_dataset(tmp_path / "data", 10 * 64)
    url = upload(folder, "s3://data/changed")
    assert Manifest.load(url) == Manifest.load(folder) and list(verify(url)) == []
    data = bytearray(storage.read(f"{url}/shard-000007.tar"))
    data[5000] ^= 1
    storage.write(f"{url}/shard-000007.tar", bytes(data))
    remote = Dataset(url)
    remote.read(np.arange(64))
    other = "SHA-256 is not the one in the manifest"
    with pytest.raises(ValueError, match=f"^{url}/shard-000007.tar: {other}"):
        remote.read(np.array([7 * 64]))
    assert [line for line in verify(url) if "shard-000007" in line][-1].endswith(other)
    storage.write(f"{url}/shard-000008.tar", b"short")
    with pytest.raises(ValueError, match=f"^{url}/shard-000008.tar: has 5 bytes, the manifest says"):
        Dataset(url)
    storage.remove(f"{url}/shard-000008.tar")
    with pytest.raises(ValueError, match=f"^{url}/shard-000008.tar: is missing"):
        Dataset(url)
    assert f"{url}/shard-000008.tar: is missing" in list(verify(url))
    storage.write(f"{url}/manifest.json", b"{")
    with pytest.raises(ValueError, match=f"^{url}/manifest.json: not valid JSON"):
        Manifest.load(url)
    with pytest.raises(ValueError, match=r"^s3://data/nothing/manifest.json: not found"):
        Dataset("s3://data/nothing")


def test_a_failing_store_is_no_damage(proxy, url, monkeypatch):
    monkeypatch.setattr(storage, "WAITS", (0.01,))
    remote = Dataset(url)
    proxy.fault = lambda method, path, number: UNAVAILABLE
    with pytest.raises(Failed, match=r"^s3://data/rows/shard-000002.tar: "):
        remote.read(np.array([2 * 64]))
    proxy.fault = lambda *_: PASS
    assert len(remote.read(np.array([2 * 64])).ids) == 1


@pytest.mark.parametrize("lists", [True, False])
def test_a_web_server_gives_the_folders_rows(lists, tmp_path):
    """Also one that shows no folder, as many do."""
    folder = sample.make_dataset(tmp_path / "data", 10 * 64)
    with web_folder.serve(tmp_path, lists=lists) as server:
        url = f"{server}/data"
        remote = Dataset(url, cache=Cache(str(tmp_path / "cache")))
        assert (remote.read(np.arange(640)).ids == Dataset(folder).read(np.arange(640)).ids).all()
        assert inspect_dataset.datasets(f"{url}/") == [url] and list(verify(url)) == []
        (folder / "shard-000003.tar").unlink()
        with pytest.raises(ValueError, match=f"^{url}/shard-000003.tar: is missing"):  # at once, or where it is read
            Dataset(url, cache=Cache(str(tmp_path / "other"))).read(np.array([3 * 64]))
        assert list(verify(url)) == [f"{url}/shard-000003.tar: is missing"]


def test_damaged_copies_are_fetched_again(tmp_path, caplog):
    """Rows whose bytes changed, also of a shard that is open, a cut shard, the held-out split; not if the source is damaged too."""
    held_out = held_out_of(sample.make_dataset(tmp_path / "data/held_out", 64, seed=2), 64)
    folder, every = sample.make_dataset(tmp_path / "data", 10 * 64, held_out=held_out), np.arange(640)
    local, cache = Dataset(folder), Cache(str(tmp_path / "cache"))
    with web_folder.serve(tmp_path) as server:
        url = f"{server}/data"
        remote = Dataset(url, cache=cache)
        remote.read(every)
        shards, at = [remote.folder / shard.name for shard in local.manifest.shards], local._full.members["ids"][1]
        sample.flip(shards[3], at)
        assert (remote.read(every).ids == local.read(every).ids).all()
        sample.flip(shards[9], at)
        os.truncate(shards[5], 1000)
        sample.flip(remote.folder / "held_out/shard-000000.tar", at)
        again = Dataset(url, cache=cache)
        assert (again.read(every).ids == local.read(every).ids).all()
        assert len(Dataset(again.held_out_path).read(every[:64]).ids) == 64
        lines = [record.getMessage() for record in caplog.records]
        text = "the copy is damaged; it is fetched again from"
        assert [line.partition(": ")[2] for line in lines] == [
            f"{text} {url}{name}" for name in ("/shard-000003.tar", "", "/shard-000005.tar", "/shard-000009.tar")
        ]
        for gone in ("held_out/manifest.json", "held_out/shard-000000.tar", local.manifest.tokenizer["file"]):
            (remote.folder / gone).unlink()  # by what removes old files
            assert len(Dataset(Dataset(url, cache=cache).held_out_path).read(every[:64]).ids) == 64
            assert (remote.folder / gone).is_file()
        for file in (shards[3], folder / shards[3].name):
            sample.flip(file, at)
        with pytest.raises(ValueError, match=f"^{url}/shard-000003.tar: SHA-256 is not the one in the manifest"):
            again.read(every)


def test_a_denied_list_is_no_damage(proxy, url, monkeypatch):
    monkeypatch.setattr(proxy, "fault", lambda method, path, number: DENY if "list-type" in path else PASS)
    started = time.monotonic()
    assert len(Dataset(url).read(np.array([3 * 64])).ids) == 1 and time.monotonic() - started < 5


@pytest.mark.parametrize(("shards", "blocks"), [(100, 8), (5, 100), (70, 64), (3, 2), (1, 1)])
def test_the_order_tells_which_shards_come_next(shards: int, blocks: int) -> None:
    rows_of = np.full(shards, blocks * 4)
    rows_of[-1] -= 3
    order, seed = RowOrder(rows_of, 4), 9
    in_use, of_shard = order.shards_in_use, np.repeat(np.arange(shards), rows_of)
    for place in (0, order.rows // 3, order.rows - 5, order.rows, 2 * order.rows - 1):
        told = list(islice(unique(order.shards_from(seed, place)), shards))
        # with every slot a group of shards more, in the rest of the epoch
        left = (place // order.rows + 1) * order.rows - place
        for slots in range(4):
            rows = min(left, slots * order.rows // order.groups)
            used = of_shard[order.by_epoch(seed, np.arange(place, place + rows))[0]]
            assert set(used.tolist()) <= set(told[: in_use + (slots + 1) * order.group])
