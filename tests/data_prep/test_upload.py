"""Builds whose output is a URL: manifests last, what is there with the same digest is left, other datasets are refused."""

import json

import fsspec
import pytest

from data_prep.__main__ import main
from data_prep.executor import upload
from megabert.common import remote, retry
from megabert.data.shards import Dataset, Manifest


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A URL for the output, and the file system it is in."""
    monkeypatch.setenv("MEGABERT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(retry, "WAITS", ())
    system = fsspec.filesystem("memory")
    yield f"memory://{tmp_path.name}/data", system
    if system.exists(f"/{tmp_path.name}"):
        system.rm(f"/{tmp_path.name}", recursive=True)


@pytest.fixture
def build(place, tmp_path, tokenizer_file):
    (tmp_path / "in.txt").write_text(
        "".join(f"Line {i} tells of a river that runs to the sea. " * 9 + "\n" for i in range(450))
    )

    def call(*extra, output=place[0]):
        return main([
            "build", "--input", str(tmp_path / "in.txt"), "--output", str(output), "--tokenizer",
            str(tokenizer_file), "--text-documents", "line", "--workers", "1", "--quiet", "--dedup", "none",
            "--rows-per-shard", "256", *extra,
        ])  # fmt: skip

    return call


def names(url, system):
    return sorted(path.removeprefix(system._strip_protocol(url) + "/") for path in system.find(url))


def test_a_dataset_at_a_url_is_the_one_that_a_folder_would_hold(build, place, tmp_path):
    url, system = place
    assert build() == 0 and build(output=tmp_path / "local") == 0
    expected = {
        path.relative_to(tmp_path / "local").as_posix(): path.read_bytes()
        for path in (tmp_path / "local").rglob("*")
        if path.is_file()
    }
    assert names(url, system) == sorted(expected)
    for name in expected:
        if name.endswith((".tar", ".json", ".model")) and name != "report.json":
            assert system.cat(f"{url}/{name}") == expected[name], name
    assert Dataset(url).manifest == Manifest.load(tmp_path / "local")


def test_manifests_come_last_and_an_upload_goes_on(build, place, monkeypatch):
    url, system = place
    whole, sent = remote.upload, []

    def fails_at(number):
        def send(path, to):
            if to.endswith(upload.PROBE):
                return whole(path, to)
            if len(sent) == number:
                raise OSError(5, "gone", to)
            sent.append(to.removeprefix(f"{url}/"))
            whole(path, to)

        return send

    monkeypatch.setattr(remote, "upload", fails_at(4))
    assert build() == 4
    assert "manifest.json" not in {name.rsplit("/", 1)[-1] for name in sent}
    monkeypatch.setattr(remote, "upload", fails_at(99))
    before = list(sent)
    assert build() == 0
    assert len(sent) == len(set(sent)) and sent[:4] == before
    assert sent[-2:] == ["held_out/manifest.json", "manifest.json"]
    count = len(sent)
    assert build() == 0 and len(sent) == count
    name = next(name for name in sent if name.endswith(".tar"))
    system.pipe(f"{url}/{name}", b"somebody else's")
    assert build() == 0 and sent[count:] == [name]


def test_a_record_that_was_cut_by_a_kill_is_read(build, place):
    url, _ = place
    assert build() == 0
    path = upload.staging(url).with_name(upload.staging(url).name + ".uploaded")
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:20])
    assert build("--overwrite") == 0
    assert len([json.loads(line) for line in path.read_text().splitlines()]) >= len(lines)


def test_another_dataset_at_the_url_is_refused_and_replaced(build, place, tmp_path, monkeypatch, caplog):
    url, system = place
    assert build("--seq-len", "32") == 0
    many = len([name for name in names(url, system) if name.startswith("shard-")])
    monkeypatch.setenv("MEGABERT_CACHE", str(tmp_path / "another"))
    assert build("--seq-len", "128") == 2
    assert f"--output {url}: already holds a dataset; --overwrite replaces it" in caplog.text
    assert Manifest.load(url).seq_len == 32
    assert build("--seq-len", "128", "--overwrite") == 0
    assert Manifest.load(url).seq_len == 128
    few = [name for name in names(url, system) if name.startswith("shard-")]
    assert len(few) == len(Manifest.load(url).shards) < many


def test_a_place_that_takes_nothing_is_said_before_the_work(build, place, tmp_path, monkeypatch, caplog):
    def refuses(path, to):
        raise PermissionError(13, "no permission", to)

    monkeypatch.setattr(remote, "upload", refuses)
    assert build() == 2
    assert f"{place[0]}/.writable: no permission" in caplog.text and not (tmp_path / "cache").exists()


def test_a_file_url_makes_its_folders(build, tmp_path):
    assert build(output=f"file://{tmp_path}/far/away") == 0
    assert Dataset(tmp_path / "far" / "away").rows


def test_other_commands_take_folders(caplog):
    assert main(["verify", "memory://x"]) == 2 and main(["inspect", "memory://x"]) == 2
    assert caplog.text.count("memory://x: takes a folder") == 2


@pytest.mark.parametrize("option", [("--part", "1/2"), ("--merge",), ("--add",)])
def test_what_takes_a_folder_says_so(build, option, caplog):
    assert build(*option) == 2
    assert "--output memory://" in caplog.text and "a folder" in caplog.text
