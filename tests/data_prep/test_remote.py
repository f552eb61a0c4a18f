"""Builds from a bucket, whose requests fail now and then, beside the same builds from a folder."""

import bz2
import json
import os
import shutil
import signal
import threading
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pyarrow
import pytest

from data_prep.executor import output_folder
from megabert.common import storage
from megabert.data.shards import verify
from tests.helpers import prep_reading, web_folder
from tests.helpers.hub import PUBLIC
from tests.helpers.object_store import DROP, KEYS, PASS, TRUNCATE, UNAVAILABLE
from tests.helpers.prep_builds import build, build_here, build_words, command, error_of, start
from tests.helpers.prep_reading import PACK, archive, records, write_all, write_table

pytest.importorskip("s3fs")


@pytest.fixture(scope="module")
def options(tokenizer_file) -> dict[str, object]:
    fixed = {"seq_len": 64, "rows_per_shard": 1024, "seed": 5, "held_out": 0.02, "workers": 2}
    return fixed | {"tokenizer": tokenizer_file}


@pytest.fixture(scope="module")
def mixed(topics: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the topics in files of many formats."""
    folder = tmp_path_factory.mktemp("mixed")
    parts = [topics[i::8] for i in range(8)]
    lines = [records(part).encode() for part in parts]
    files = {"a.jsonl": lines[0], "b.jsonl.gz": PACK["gz"](lines[1]), "c.jsonl.bz2": bz2.compress(lines[2])}
    files |= {f"f.{kind}": archive(kind, {"inner.jsonl": lines[i]}) for i, kind in ((5, "zip"), (6, "tar"))}
    files |= {"deep/h.json": json.dumps([{"text": text} for text in parts[7]]), "README.md": "about this data"}
    write_table(folder / "d.parquet", pyarrow.table({"text": parts[3]}), rows=4)
    write_table(folder / "footer.arrow", pyarrow.table({"text": parts[4]}), rows=3)
    return write_all(folder, files)


def contents(folder: Path) -> dict[str, bytes]:
    """Bytes of a dataset's files but for its reports, which name the input."""
    files = prep_reading.contents(folder)
    assert {files.pop(name) for name in ("build.json", "report.json")} and "manifest.json" in files and len(files) >= 5
    return files


@pytest.fixture(scope="module")
def local(mixed, options, tmp_path_factory) -> Callable[..., dict[str, bytes]]:
    """The contents of the dataset of those files that match a glob, built from the folder once."""

    @cache
    def made(glob: str = "") -> dict[str, bytes]:
        output = tmp_path_factory.mktemp("local") / "out"
        build(mixed / glob, output, **options)
        return contents(output)

    return made


def upload(folder: Path, url: str) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            storage.put(path, storage.join(url, path.relative_to(folder).as_posix()))


@pytest.mark.parametrize(
    ("what", "glob"),
    [
        pytest.param("", "", marks=pytest.mark.slow),
        (UNAVAILABLE, "*.jsonl*"),
        *(pytest.param(what, "", marks=pytest.mark.slow) for what in (DROP, UNAVAILABLE, TRUNCATE)),
    ],
)
def test_a_bucket_gives_the_bytes_of_a_folder(what, glob, mixed, local, proxy, options, tmp_path) -> None:
    upload(mixed, "s3://texts/mixed")
    expected = local(glob)
    proxy.fault = lambda method, path, number: what if what and zlib.crc32(b"%d" % number) % 6 == 0 else PASS
    url = f"s3://texts/mixed/{glob}".rstrip("/")
    remote = build(url, tmp_path / "remote", **options)
    assert contents(tmp_path / "remote") == expected
    assert (proxy.failed[what] > 2) == bool(what)
    for text in (remote.stdout, remote.stderr, (tmp_path / "remote" / "report.json").read_text()):
        assert KEYS["AWS_SECRET_ACCESS_KEY"] not in text
    assert "complete already" in build(url, tmp_path / "remote", **options).stdout


@pytest.mark.parametrize("lines", [30, 30_000])
def test_object_that_changes_during_a_build_stops_it(lines, mixed, proxy, options, tmp_path) -> None:
    upload(mixed, "s3://texts/changing")

    def change(method: str, path: str, number: int) -> str:
        if method == "GET" and path.startswith("/texts/changing/a.jsonl"):
            proxy.fault = lambda *_: PASS
            storage.write("s3://texts/changing/a.jsonl", b'{"text": "Other words."}\n' * lines)
        return PASS

    proxy.fault = change
    done = build("s3://texts/changing", tmp_path / "data", code=2, **options)
    assert "s3://texts/changing/a.jsonl: changed while it was read" in done.stderr
    assert len(done.stderr.splitlines()) <= 3


def test_failing_store_ends_either_policy_with_4(mixed, proxy, options, tmp_path, monkeypatch, capsys) -> None:
    upload(mixed, "s3://texts/failing")
    monkeypatch.setattr(storage, "WAITS", (0.01,))

    def fail(method: str, path: str, number: int) -> str:
        return UNAVAILABLE if "b.jsonl.gz" in path and method == "GET" else PASS

    proxy.fault, options = fail, options | {"workers": 1}
    for policy in ("stop", "skip"):
        output = tmp_path / policy
        build_here("s3://texts/failing", output, code=4, on_error=policy, **options)
        assert "error: s3://texts/failing/b.jsonl.gz: " in capsys.readouterr().err
        assert not (output / "manifest.json").exists()
    proxy.fault = lambda *_: PASS
    build_here("s3://texts/failing", output, on_error=policy, **options)


def test_nothing_there_is_one_line(proxy, tmp_path) -> None:
    for url in ("s3://texts/nothing", "s3://no-such-bucket/x"):
        error = error_of(build(url, tmp_path / "data", code=2, seq_len=64))
        assert error == f"error: --input {url}: no such object or folder, and no object matches it"


@pytest.mark.slow
def test_output_in_a_bucket_equals_a_folder(mixed, local, proxy, options, tmp_path) -> None:
    url, order = "s3://texts/out/data", []
    expected = local()

    def fault(method: str, path: str, number: int) -> str:
        if method == "PUT":
            order.append(path.partition("?")[0].rpartition("/data/")[2])
        return UNAVAILABLE if zlib.crc32(b"%d" % number) % 6 == 0 else PASS

    proxy.fault = fault
    build(mixed, url, **options)
    proxy.fault = lambda *_: PASS
    uploaded = {each.url.removeprefix(f"{url}/"): storage.read(each.url) for each in storage.find(url)}
    assert {uploaded.pop(name) for name in ("build.json", "report.json")} and uploaded == expected
    assert order[-1] == "manifest.json" and order.index("held_out/manifest.json") < order.index("manifest.json")
    assert max(n for n, name in enumerate(order) if name.endswith(".tar")) < order.index("manifest.json")
    assert list((tmp_path / "cache/megabert/builds").iterdir()) == []
    command("verify", url)
    command("inspect", url)
    assert "complete already" in build(mixed, url, **options).stdout
    lacking = json.loads(storage.read(f"{url}/report.json")) | {"lacks_bad_input": True}
    storage.write(f"{url}/report.json", json.dumps(lacking).encode())
    assert "the dataset lacks bad input, which" in build(mixed, url, code=2, **options).stderr
    options = options | {"seed": 6}
    assert "holds a build with other options or code" in build(mixed, url, code=2, **options).stderr
    storage.write(f"{url}/shard-000099.tar", b"of an older build")
    build(mixed, url, overwrite=True, **options)
    command("verify", url)
    storage.write(f"{url}/notes.txt", b"mine")
    refused = build(mixed, url, code=2, overwrite=True, **options | {"seed": 7})
    assert "holds notes.txt, which no build wrote" in refused.stderr
    assert storage.read(f"{url}/notes.txt") == b"mine" and storage.exists(f"{url}/manifest.json")


@pytest.mark.parametrize("puts", [4, *(pytest.param(puts, marks=pytest.mark.slow) for puts in (0, 2, 6))])
def test_a_build_killed_during_an_upload_goes_on(puts, mixed, proxy, options) -> None:
    url = f"s3://texts/killed/{puts}"
    words = build_words(mixed, url, **options)
    process = start(words)
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
    command(*words)
    assert list(verify(url)) == []


def test_corrected_file_of_a_build_to_a_bucket(topics, proxy, options, tmp_path) -> None:
    """Read again, as with a folder; the shards in the bucket may be of the file as it was."""
    url, path = "s3://texts/corrected", tmp_path / "in/a.jsonl"
    write_all(tmp_path / "in", {"a.jsonl": records(topics) + '{"text": 5}\n'})
    assert "field 'text' is not a string" in build(path, url, code=2, **options).stderr
    storage.write(f"{url}/shard-000000.tar", b"of the file as it was")
    path.write_text(records(topics) + '{"text": "5"}\n', encoding="utf-8")
    build(path, url, **options)
    assert list(verify(url)) == []
    storage.write(f"{url}/shard-000000.tar", bytes(storage.stat(f"{url}/shard-000000.tar").size))
    build(path, url, overwrite=True, **options)
    assert list(verify(url)) == []
    path.write_text(records(topics), encoding="utf-8")
    assert "--overwrite replaces it" in error_of(build(path, url, code=2, **options))


def test_a_mistake_leaves_nothing_in_a_bucket(topics, proxy, options, tmp_path) -> None:
    url, path, given = "s3://texts/mistake", tmp_path / "a.jsonl", {"tokenizer": options["tokenizer"]}
    options = {name: value for name, value in options.items() if name != "tokenizer"}
    path.write_text(records(topics), encoding="utf-8")
    assert "--vocab-size: 900000 is too large" in error_of(build(path, url, code=2, vocab_size=900_000, **options))
    assert storage.find(f"{url}/") == []
    assert "no field 'body'" in error_of(build(path, url, code=2, text_field="body", **given | options))
    build(path, url, **given | options)
    assert list(verify(url)) == []


def test_a_bucket_may_have_its_build_inside_and_loses_no_input(topics, proxy, options) -> None:
    url, options = "s3://texts/inside", options | {"save_text": True}
    storage.write(f"{url}/a.jsonl", records(topics).encode())
    build(url, f"{url}/out", **options)
    assert "complete already" in build(url, f"{url}/out", **options).stdout
    refused = build(f"{url}/out/text", f"{url}/out", code=2, overwrite=True, **options)
    assert f"would replace {url}/out/text/part-0000000.parquet, which it reads" in error_of(refused)
    storage.write(f"{url}/other/text/a.jsonl", b"")  # a name that builds use, and no build
    refused = build(f"{url}/a.jsonl", f"{url}/other", code=2, overwrite=True, **options)
    assert f"--output {url}/other: holds text/a.jsonl, which no build wrote" in error_of(refused)
    assert list(verify(f"{url}/out")) == []


def test_an_upload_keeps_objects_that_came_while_it_ran(proxy, tmp_path) -> None:
    url, folder = "s3://texts/came", write_all(tmp_path / "built", dict.fromkeys(("build.json", "manifest.json"), "{}"))
    for name in ("notes.txt", "shard-000009.tar"):
        storage.write(f"{url}/{name}", b"")
    output_folder.upload(url, folder, progress=False)
    assert storage.list_objects(url).keys() == {"build.json", "manifest.json", "notes.txt"} and not folder.exists()


@pytest.mark.parametrize("more", [{}, {"seed": 6, "overwrite": True}], ids=["same", "other"])
def test_second_build_during_an_upload_is_refused(more, topics, proxy, options, tmp_path) -> None:
    url, path = f"s3://texts/twice/{len(more)}", tmp_path / "a.jsonl"
    path.write_text(records(topics), encoding="utf-8")
    uploading, go = threading.Event(), threading.Event()

    def hold(method: str, path: str, number: int) -> str:
        if method == "PUT" and "report.json" in path:
            uploading.set()
            assert go.wait(120)
        return PASS

    proxy.fault = hold
    first = start(build_words(path, url, **options))
    try:
        assert uploading.wait(120)
        refused = build(path, url, code=2, **options | more)
    finally:
        go.set()
        shown = first.communicate(timeout=120)
    assert "another build is writing there" in error_of(refused)
    assert first.returncode == 0 and list(verify(url)) == [], shown


@pytest.mark.parametrize("account", [False, True])
def test_shards_of_another_build_are_not_kept_for_their_size(account, mixed, proxy, options, tmp_path) -> None:
    """What a killed upload of another build left: shards as large as this one's, no manifest, and its account or none."""
    url = f"s3://texts/as-large/{account}"
    build(mixed, tmp_path / "data", **options)
    shard = (tmp_path / "data/shard-000000.tar").read_bytes()
    storage.write(f"{url}/shard-000000.tar", shard[::-1])
    if account:
        changed = json.loads((tmp_path / "data/build.json").read_text())
        changed["options"]["seed"] = 6
        storage.write(f"{url}/build.json", json.dumps(changed).encode())
    reason = "options: seed was 6, is 5" if account else "without its account"
    assert f"holds a build with other options or code ({reason})" in error_of(build(mixed, url, code=2, **options))
    build(mixed, url, overwrite=True, **options)
    assert storage.read(f"{url}/shard-000000.tar") == shard and list(verify(url)) == []


@pytest.mark.parametrize("name", ["a.jsonl", "damaged.jsonl", "none.jsonl"])
def test_passwords_and_queries_are_nowhere(name, mixed, options, tmp_path) -> None:
    (tmp_path / "web").mkdir()
    for copy in ("a.jsonl", "also.jsonl"):
        shutil.copy(mixed / "a.jsonl", tmp_path / "web" / copy)
    (tmp_path / "web" / "damaged.jsonl").write_text('{"text": "no end"\n' * 20)
    with web_folder.serve(tmp_path / "web") as server:
        urls = [f"{server.replace('//', '//me:secret@')}/{each}?signature=secret" for each in (name, "also.jsonl")]
        done = build(urls, tmp_path / "data", code=0 if name == "a.jsonl" else 2, save_text=True, **options)
        assert "secret" not in done.stdout + done.stderr
        if name == "a.jsonl":  # a renewed signature is that of the same files
            renewed = build([f"{url}2" for url in urls], tmp_path / "data", save_text=True, **options)
            assert "complete" in renewed.stdout
    written = [path for path in (tmp_path / "data").rglob("*") if path.is_file()]
    assert not [path for path in written if b"secret" in path.read_bytes()]


def test_a_dataset_of_the_hub_by_its_name(topics, options, model_hub, tmp_path) -> None:
    name, url, parquet = "datasets/some/texts", "hf://datasets/some/texts", {}
    for place, texts in (("train/0000", topics[:20]), ("train/0001", topics[20:]), ("test/0000", ["no"])):
        path = tmp_path / f"{place}.parquet"
        path.parent.mkdir(exist_ok=True)
        parquet[f"default/{place}.parquet"] = write_table(path, pyarrow.table({"text": texts})).read_bytes()
    model_hub.add(name, PUBLIC, {"README.md": b"about it"})
    model_hub.add(name, PUBLIC, parquet, "refs/convert/parquet")
    build(tmp_path / "train", tmp_path / "local", **options)
    done = build(url, tmp_path / "remote", **options)
    assert f"{url}: reading its training split, {url}@refs/convert/parquet/default/train/*.parquet" in done.stdout
    assert contents(tmp_path / "remote") == contents(tmp_path / "local")
    other = {place.replace("default", "other"): data for place, data in parquet.items()}
    model_hub.add(name, PUBLIC, parquet | other, "refs/convert/parquet")
    several = build(url, tmp_path / "several", code=2, **options)
    assert f"{url}: has the configurations default, other; name one, as" in several.stderr
    missing = build("hf://datasets/no/such", tmp_path / "none", code=2, **options)
    assert "no such object or folder" in missing.stderr
