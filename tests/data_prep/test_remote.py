"""Builds from a bucket, whose requests fail now and then, beside the same builds from a folder."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import zipfile
import zlib
from pathlib import Path

import pytest

from megabert.common import storage
from megabert.data.shards import verify
from tests.helpers import hub, prep_reading
from tests.helpers.object_store import DROP, KEYS, PASS, TRUNCATE, UNAVAILABLE

pytest.importorskip("s3fs")
ROOT = Path(__file__).resolve().parents[2]
OPTIONS = ("--seq-len", 64, "--rows-per-shard", 1024, "--seed", 5, "--held-out", 0.02, "--quiet", "--workers", 2)


@pytest.fixture(scope="module")
def mixed(topics: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the topics in files of many formats."""
    import pyarrow
    from pyarrow import ipc, parquet

    folder = tmp_path_factory.mktemp("mixed")
    parts = [topics[i::8] for i in range(8)]
    lines = ["".join(json.dumps({"text": text}) + "\n" for text in part).encode() for part in parts]
    (folder / "a.jsonl").write_bytes(lines[0])
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines[1], mtime=0))
    (folder / "c.jsonl.bz2").write_bytes(bz2.compress(lines[2]))
    table = pyarrow.table({"text": parts[3]})
    parquet.write_table(table, folder / "d.parquet", row_group_size=4)
    with ipc.new_file(folder / "e.arrow", table.schema) as writer:
        writer.write_table(pyarrow.table({"text": parts[4]}), 3)
    with zipfile.ZipFile(folder / "f.zip", "w") as archive:
        archive.writestr("inner.jsonl", lines[5])
    with tarfile.open(folder / "g.tar", "w") as tar:
        info = tarfile.TarInfo("inner.jsonl")
        info.size = len(lines[6])
        tar.addfile(info, io.BytesIO(lines[6]))
    (folder / "deep").mkdir()
    (folder / "deep" / "h.json").write_text(json.dumps([{"text": text} for text in parts[7]]))
    (folder / "README.md").write_text("about this data")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Bytes of a dataset's files but for its reports, which name the input."""
    files = prep_reading.contents(folder)
    assert {files.pop(name) for name in ("build.json", "report.json")} and "manifest.json" in files and len(files) >= 5
    return files


def upload(folder: Path, url: str) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            storage.put(path, storage.join(url, path.relative_to(folder).as_posix()))


@pytest.mark.parametrize("what", ["", DROP, UNAVAILABLE, TRUNCATE])
def test_a_bucket_gives_the_bytes_of_a_folder(what, mixed, proxy, command, tokenizer_file, tmp_path) -> None:
    upload(mixed, "s3://texts/mixed")
    options = (*OPTIONS, "--tokenizer", tokenizer_file)
    local = command("build", "--input", mixed, "--output", tmp_path / "local", *options)
    assert local.returncode == 0, local.stderr
    proxy.fault = lambda method, path, number: what if what and zlib.crc32(b"%d" % number) % 6 == 0 else PASS
    remote = command("build", "--input", "s3://texts/mixed", "--output", tmp_path / "remote", *options)
    assert remote.returncode == 0, remote.stderr
    assert contents(tmp_path / "remote") == contents(tmp_path / "local")
    assert (proxy.failed[what] > 2) == bool(what)
    for text in (remote.stdout, remote.stderr, (tmp_path / "remote" / "report.json").read_text()):
        assert KEYS["AWS_SECRET_ACCESS_KEY"] not in text
    again = command("build", "--input", "s3://texts/mixed", "--output", tmp_path / "remote", *options)
    assert again.returncode == 0 and "complete already" in again.stdout


def test_a_glob_of_a_bucket_gives_its_objects(mixed, proxy, command, tokenizer_file, tmp_path) -> None:
    upload(mixed, "s3://texts/glob")
    options = (*OPTIONS, "--tokenizer", tokenizer_file)
    assert command("build", "--input", mixed / "*.jsonl*", "--output", tmp_path / "local", *options).returncode == 0
    done = command("build", "--input", "s3://texts/glob/*.jsonl*", "--output", tmp_path / "remote", *options)
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "remote") == contents(tmp_path / "local")


@pytest.mark.parametrize("lines", [30, 30_000])
def test_an_object_that_changes_during_a_build_stops_it(lines, mixed, proxy, command, tokenizer_file, tmp_path) -> None:
    upload(mixed, "s3://texts/changing")

    def change(method: str, path: str, number: int) -> str:
        if method == "GET" and path.startswith("/texts/changing/a.jsonl"):
            proxy.fault = lambda *_: PASS
            storage.write("s3://texts/changing/a.jsonl", b'{"text": "Other words."}\n' * lines)
        return PASS

    proxy.fault = change
    options = (*OPTIONS, "--tokenizer", tokenizer_file)
    done = command("build", "--input", "s3://texts/changing", "--output", tmp_path / "data", *options)
    assert done.returncode == 2
    assert "s3://texts/changing/a.jsonl: changed while it was read" in done.stderr
    assert len(done.stderr.splitlines()) <= 3


def test_a_store_that_fails_is_class_4_under_both_policies(
    mixed, proxy, tokenizer_file, tmp_path, monkeypatch, capsys
) -> None:
    upload(mixed, "s3://texts/failing")
    monkeypatch.setattr(storage, "WAITS", (0.01,))

    def fail(method: str, path: str, number: int) -> str:
        return UNAVAILABLE if "b.jsonl.gz" in path and method == "GET" else PASS

    proxy.fault = fail
    from data_prep.__main__ import main

    for policy in ("stop", "skip"):
        arguments = ["build", "--input", "s3://texts/failing", "--output", str(tmp_path / policy), "--on-error", policy]
        assert main([*arguments, *map(str, OPTIONS[:-2]), "--workers", "1", "--tokenizer", str(tokenizer_file)]) == 4
        assert "error: s3://texts/failing/b.jsonl.gz: " in capsys.readouterr().err
        assert not (tmp_path / policy / "manifest.json").exists()
    proxy.fault = lambda *_: PASS
    assert main([*arguments, *map(str, OPTIONS[:-2]), "--workers", "1", "--tokenizer", str(tokenizer_file)]) == 0


def test_nothing_there_is_one_line(proxy, command, tmp_path) -> None:
    for url in ("s3://texts/nothing", "s3://no-such-bucket/x"):
        done = command("build", "--input", url, "--output", tmp_path / "data", "--seq-len", 64)
        assert done.returncode == 2
        assert done.stderr.strip() == f"error: --input {url}: no such object or folder, and no object matches it"


def test_an_output_in_a_bucket_is_the_folder_of_a_local_build(
    mixed, proxy, command, tokenizer_file, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    options, url = (*OPTIONS, "--tokenizer", tokenizer_file), "s3://texts/out/data"
    assert command("build", "--input", mixed, "--output", tmp_path / "local", *options).returncode == 0
    order = []

    def fault(method: str, path: str, number: int) -> str:
        if method == "PUT":
            order.append(path.partition("?")[0].rpartition("/data/")[2])
        return UNAVAILABLE if zlib.crc32(b"%d" % number) % 6 == 0 else PASS

    proxy.fault = fault
    done = command("build", "--input", mixed, "--output", url, *options)
    assert done.returncode == 0, done.stderr
    proxy.fault = lambda *_: PASS
    uploaded = {each.url.removeprefix(f"{url}/"): storage.read(each.url) for each in storage.find(url)}
    assert {uploaded.pop(name) for name in ("build.json", "report.json")} and uploaded == contents(tmp_path / "local")
    assert order[-1] == "manifest.json" and order.index("held_out/manifest.json") < order.index("manifest.json")
    assert max(n for n, name in enumerate(order) if name.endswith(".tar")) < order.index("manifest.json")
    assert list((tmp_path / "cache/megabert/builds").iterdir()) == []
    for arguments in (("verify", url), ("inspect", url)):
        assert command(*arguments).returncode == 0
    again = command("build", "--input", mixed, "--output", url, *options)
    assert again.returncode == 0 and "complete already" in again.stdout
    other = command("build", "--input", mixed, "--output", url, *options, "--seed", 6)
    assert other.returncode == 2 and "holds a dataset of another build" in other.stderr
    storage.write(f"{url}/shard-000099.tar", b"of an older build")
    replaced = command("build", "--input", mixed, "--output", url, *options, "--seed", 6, "--overwrite")
    assert replaced.returncode == 0, replaced.stderr
    assert command("verify", url).returncode == 0


@pytest.mark.parametrize("puts", [0, 2, 4, 6])
def test_a_build_killed_during_an_upload_goes_on(puts, mixed, proxy, tokenizer_file, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = f"s3://texts/killed/{puts}"
    arguments = ["build", "--input", mixed, "--output", url, *OPTIONS, "--tokenizer", tokenizer_file]
    command = [sys.executable, "-m", "data_prep", *map(str, arguments)]
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, stderr=subprocess.PIPE)
    seen = 0

    def kill(method: str, path: str, number: int) -> str:
        nonlocal seen
        if method == "PUT":
            if seen == puts:
                os.killpg(process.pid, signal.SIGKILL)
            seen += 1
        return PASS

    proxy.fault = kill
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    assert not storage.find(f"{url}/manifest.json")
    proxy.fault = lambda *_: PASS
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    assert list(verify(url)) == []


def test_a_dataset_of_the_hub_by_its_name(topics, command, tokenizer_file, tmp_path, monkeypatch) -> None:
    import pyarrow
    from pyarrow import parquet

    branch = tmp_path / "hub" / "refs%2Fconvert%2Fparquet"
    for place, texts in (
        ("default/train/0000", topics[:20]),
        ("default/train/0001", topics[20:]),
        ("default/test/0000", ["no"]),
    ):
        (branch / place).parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pyarrow.table({"text": texts}), branch / f"{place}.parquet")
    (tmp_path / "hub" / "main").mkdir()
    (tmp_path / "hub" / "main" / "README.md").write_text("about it")
    options = (*OPTIONS, "--tokenizer", tokenizer_file)
    local = command("build", "--input", branch / "default/train", "--output", tmp_path / "local", *options)
    assert local.returncode == 0, local.stderr
    with hub.serving("some/texts", tmp_path / "hub", dataset=True) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        url = "hf://datasets/some/texts"
        done = command("build", "--input", url, "--output", tmp_path / "remote", *options)
        assert done.returncode == 0, done.stderr
        assert f"{url}: its training split, {url}@refs/convert/parquet/default/train/*.parquet" in done.stdout
        assert contents(tmp_path / "remote") == contents(tmp_path / "local")
        (branch / "other").mkdir()
        shutil.copytree(branch / "default/train", branch / "other/train")
        several = command("build", "--input", url, "--output", tmp_path / "several", *options)
        assert several.returncode == 2
        assert f"{url}: has the configurations default, other; name one, as" in several.stderr
        missing = command("build", "--input", "hf://datasets/no/such", "--output", tmp_path / "none", *options)
        assert missing.returncode == 2 and "no such object or folder" in missing.stderr
