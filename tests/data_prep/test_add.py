"""Text added later: only what is new is built, the same bytes by any route, and readers see all versions."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from data_prep.__main__ import main
from data_prep.report.inspect_dataset import datasets
from megabert.data.mixture import Versions, open_versions
from megabert.data.shards import Dataset, verify
from megabert.data.tokenizer import Tokenizer

OLD = Path(__file__).resolve().parents[1] / "data" / "golden"
TOKENIZER = OLD / "dataset" / "tokenizer.model"


def digests(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def prep(*arguments):
    return main(["build", *map(str, arguments), "--quiet"])


def write(folder, first, last):
    folder.mkdir(exist_ok=True)
    for i in range(first, last):
        lines = [f"Document {i} says in its line {k} what no other one does: {i * 31 + k}." for k in range(12)]
        (folder / f"{i:03}.txt").write_text("\n\n".join(lines))


@pytest.fixture
def base(tmp_path):
    write(tmp_path / "in", 0, 30)
    options = ("--tokenizer", TOKENIZER, "--no-nsp", "--seq-len", 32, 48, "--held-out", 0.1, "--rows-per-shard", 256)
    assert prep("--input", tmp_path / "in", "--output", tmp_path / "out", *options, "--workers", 1) == 0
    return tmp_path


def text_of(dataset):
    tokenizer = Tokenizer.load(TOKENIZER)
    return " ".join(tokenizer.decode(ids) for ids in dataset.read(np.arange(dataset.rows)).ids)


def test_only_new_files_are_built_by_any_route(base, capsys):
    before = digests(base / "out")
    write(base / "in", 30, 40)
    assert prep("--add", "--output", base / "out", "--workers", 2) == 0  # the same input: what is new in it
    one = digests(base / "out" / "added-001")
    assert {name: digest for name, digest in digests(base / "out").items() if not name.startswith("added")} == before
    whole = open_versions(str(base / "out" / "seq32"))
    assert isinstance(whole, Versions) and [str(p.folder.relative_to(base)) for p in whole.parts] == [
        "out/seq32",
        "out/added-001/seq32",
    ]
    old, new = (text_of(part) for part in whole.parts)
    assert (
        "Document 3 says" in old
        and "Document 3 says" not in new
        and "Document 33 says" in new
        and "Document 30 says" not in old
    )
    assert whole.manifest.tokenizer == whole.parts[0].manifest.tokenizer
    assert datasets(base / "out") == [
        base / "out" / name for name in ("seq32", "seq48", "added-001/seq32", "added-001/seq48")
    ]
    assert list(verify(base / "out" / "added-001" / "seq48")) == [] and main(["verify", str(base / "out")]) == 0
    capsys.readouterr()
    assert prep("--add", "--output", base / "out", "--workers", 1) == 0
    assert "holds all of this input already" in capsys.readouterr().out
    assert not (base / "out" / "added-002").exists()
    # The new files named alone, and on one worker: shards, manifests and held-out parts are the same.
    second = base / "second"
    stored = base / "out" / "recipe.toml"
    text = stored.read_text()
    (base / "old.toml").write_text(
        text.replace(f'"{base}/in"', ", ".join(f'"{base}/in/{i:03}.txt"' for i in range(30)))
    )
    assert prep(base / "old.toml", "--output", second, "--workers", 1) == 0
    files = [base / "in" / f"{i:03}.txt" for i in range(40)]
    assert prep("--add", "--output", second, "--workers", 1, "--input", *files[25:]) == 0
    two = digests(second / "added-001")
    assert {n: d for n, d in one.items() if "seq" in n} == {n: d for n, d in two.items() if "seq" in n}
    write(base / "in", 40, 48)
    assert prep("--add", "--output", base / "out", "--workers", 1) == 0
    assert len(open_versions(str(base / "out" / "seq48")).parts) == 3


def test_added_version_must_share_options(base, capsys):
    write(base / "in", 30, 40)
    assert prep("--add", "--output", base / "out", "--seq-len", 64) == 2
    assert "was built with other options (seq lens was [32, 48], is [64])" in capsys.readouterr().err
    assert prep("--add", "--output", base / "nowhere", "--input", base / "in") == 2
    assert "holds no complete dataset to add to" in capsys.readouterr().err
    (base / "out" / "recipe.toml").unlink()
    options = ("--no-nsp", "--seq-len", 32, 48, "--held-out", 0.1, "--rows-per-shard", 256)
    assert prep("--add", "--output", base / "out", *options) == 2
    assert "has no recipe.toml; give --input" in capsys.readouterr().err
    # A dataset of before: no recipe, no list of files.
    (base / "out" / "inputs.bin").unlink()
    assert prep("--add", "--output", base / "out", *options, "--input", base / "in" / "03*.txt", "--workers", 1) == 0
    assert Dataset(base / "out" / "added-001" / "seq32").rows > 0


def test_add_refuses_other_options(base, capsys):
    write(base / "in", 30, 32)
    before = digests(base / "out")
    for option in (("--part", "1/2"), ("--merge",), ("--tokenizer", TOKENIZER)):
        assert prep("--add", "--output", base / "out", *option) == 2
        assert "uses the tokenizer of the dataset, and excludes --part" in capsys.readouterr().err
    assert prep("--add", "--output", base / "out", "--print-recipe") == 0
    assert f'input = ["{base}/in"]' in capsys.readouterr().out
    assert digests(base / "out") == before
