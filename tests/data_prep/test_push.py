"""Datasets pushed to a hub, a stand-in on this machine, and read from there by their URL."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from data_prep import push as pushing
from data_prep.__main__ import main
from megabert.common import storage
from megabert.data.shards import verify
from megabert.distributed.ranks import World
from tests.helpers.hub import PRIVATE, Hub
from tests.helpers.prep_builds import ROOT
from tests.helpers.prep_reading import contents
from tests.helpers.refusal import refusal
from tests.test_held_out_by_dataset import DATA, random_rows, trained

NAME, URL = "datasets/some/rows", "hf://datasets/some/rows"


def push(folder: object, *options: str) -> int:
    return main(["push", str(folder), "some/rows", *options])


def pushed(model_hub: Hub) -> dict[str, bytes]:
    """Files of the dataset, beside its card."""
    files = model_hub.files(NAME)
    assert files.pop("README.md")
    return files


def test_a_pushed_dataset_has_its_bytes_and_trains(model_hub: Hub, world: World, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(pushing, "COMMIT", 2)
    monkeypatch.chdir(DATA.parent)
    assert push(f"./{DATA.name}/", "--private") == 0  # a folder may be named in any way
    assert model_hub.repositories == {NAME: PRIVATE}
    read = {name: storage.read(each.url) for name, each in storage.list_objects(URL).items()}
    card = read.pop("README.md").decode()
    assert read.pop(".gitattributes") and read == contents(DATA)
    assert [message for _, message in model_hub.commits] == ["Shards 1 to 2 of 4", "Shards 3 to 4 of 4", "Manifest"]
    assert f"megabert train --data {URL}\n" in card and "| `.` | 536 | 64 | sentencepiece, 800 tokens |" in card
    assert json.loads((DATA / "manifest.json").read_text())["fingerprint"] in card
    assert main(["verify", URL, "--quiet"]) == 0
    here = trained(world, tmp_path / "here", "eval.interval=1")
    assert trained(world, tmp_path / "there", "eval.interval=1", f"data.path={URL}") == here


def test_second_push_reads_no_shards_and_commits_nothing(model_hub: Hub, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(storage, "PATIENCE", (0.0, 100.0))  # a commit that sends files is not one that waits
    shutil.copytree(DATA, tmp_path / "data")
    assert push(tmp_path / "data") == 0
    commits, uploads = list(model_hub.commits), list(model_hub.uploads)
    for shard in (tmp_path / "data").glob("*.tar"):  # of the right size, which is all that is looked at
        shard.write_bytes(bytes(shard.stat().st_size))
    assert push(tmp_path / "data") == 0
    assert (model_hub.commits, model_hub.uploads) == (commits, uploads)
    said = capsys.readouterr()
    assert "all there already" in said.out and "still waiting" not in said.err


@pytest.mark.parametrize("requests", [2, 3, 5])
def test_killed_push_leaves_no_manifest_and_is_completed(requests: int, model_hub: Hub, tmp_path: Path) -> None:
    folder = random_rows(tmp_path / "data", 400, seed=3)
    code = "from data_prep import push; push.COMMIT = 2\nfrom data_prep.__main__ import main; main()"
    process = subprocess.Popen([sys.executable, "-c", code, "push", folder, "some/rows"], cwd=ROOT)
    model_hub.kill(process, requests, lambda method, path: "/commit/" in path)
    assert len(model_hub.commits) == requests - 1 and "manifest.json" not in model_hub.files(NAME)
    before = len(model_hub.uploads)
    assert push(folder) == 0
    # shards of the commit that was killed were uploaded
    assert len(model_hub.uploads) == len(set(model_hub.uploads)) and before >= 2 * requests - 2
    assert pushed(model_hub) == contents(folder)
    assert list(verify(URL)) == []


def test_another_dataset_replaces_the_one_there(model_hub: Hub, tmp_path: Path) -> None:
    first, second = random_rows(tmp_path / "first", 400, seed=1), random_rows(tmp_path / "second", 150, seed=2)
    assert push(first) == 0
    seen: list[set[str]] = []

    def look(method: str, path: str) -> None:
        if "/commit/" in path:
            seen.append(set(model_hub.files(NAME)))

    model_hub.fault = look
    assert push(second) == 0
    assert "manifest.json" in seen[0] and "manifest.json" not in seen[1] and len(seen) == 2
    assert pushed(model_hub) == contents(second)


def test_datasets_of_several_row_lengths_are_folders(model_hub: Hub, tmp_path: Path, capsys) -> None:
    for name, seed in (("seq64", 1), ("other", 2)):
        random_rows(tmp_path / "data" / name, 100, seed=seed)
    (tmp_path / "data/report.json").write_text("{}")
    assert push(tmp_path / "data") == 0
    files = model_hub.files(NAME)
    assert f"megabert train --data {URL}/other\nmegabert train --data {URL}/seq64\n" in files.pop("README.md").decode()
    assert files == {name: data for name, data in contents(tmp_path / "data").items() if name != "report.json"}
    assert list(verify(f"{URL}/seq64")) == [] and "keeps" not in capsys.readouterr().err
    assert push(tmp_path / "data/other") == 0
    assert "keeps datasets of another push in other, seq64\n" in capsys.readouterr().err


def test_a_dataset_of_a_bucket_is_pushed(model_hub: Hub, proxy: object, monkeypatch) -> None:
    for path in sorted(DATA.rglob("*.*")):
        storage.put(path, f"s3://shelf/golden/{path.relative_to(DATA).as_posix()}")
    monkeypatch.setattr(pushing, "BYTES", 1)  # a cache without room for two shards
    assert push("s3://shelf/golden") == 0
    assert pushed(model_hub) == contents(DATA)
    assert [message for _, message in model_hub.commits][::4] == ["Shards 1 to 1 of 4", "Manifest"]


def test_what_cannot_be_pushed_is_one_line(model_hub: Hub, tmp_path: Path, monkeypatch, capsys) -> None:
    def refused(folder: object) -> str:
        return refusal(capsys, main, "push", folder, "some/rows")

    assert "its tokenizer is in the folder above" in refused(DATA / "held_out")
    damaged = random_rows(tmp_path / "data", 150, seed=1)
    shard = damaged / "shard-000001.tar"
    data = bytearray(shard.read_bytes())
    data[3000] ^= 1
    shard.write_bytes(data)
    assert f"{shard}: SHA-256 is not the one in the manifest" in refused(damaged)
    assert "manifest.json" not in model_hub.files(NAME)
    assert hashlib.sha256(data).hexdigest() in model_hub.uploads
    shard.unlink()
    assert f"{shard}: is missing" in refused(damaged)
    monkeypatch.delenv("HF_TOKEN")
    assert "some/rows: the hub asks for a token" in refused(DATA)
