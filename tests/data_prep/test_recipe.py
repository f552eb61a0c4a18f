"""Builds from a TOML recipe: corpora with options of their own, the same bytes as a command line gives, mistakes by name."""

import gzip
import hashlib
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from data_prep.__main__ import main
from data_prep.stages import sequences
from megabert.data.shards import Dataset
from megabert.data.tokenizer import Tokenizer

OLD = Path(__file__).resolve().parents[1] / "data" / "golden"
TOKENIZER = OLD / "dataset" / "tokenizer.model"
TEXT = "One of many lines that were written so that a row has something in it. "


def digests(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Papers of three fields as JSON lines, Latin-1 notes, and lines that are documents."""
    folder = tmp_path_factory.mktemp("inputs")
    with gzip.open(folder / "papers.jsonl.gz", "wt") as file:
        for i in range(60):
            inside = {"abstract": f"Abstract {i}. {TEXT * 3}"} if i != 7 else None
            file.write(json.dumps({"title": f"Title {i}", "inner": inside, "body": "wrong field"}) + "\n")
    (folder / "notes.txt").write_bytes("\n\n".join(f"Élan {i}. {TEXT * 2}" for i in range(60)).encode("latin-1"))
    (folder / "lines.txt").write_text("\n".join(f"Line {i}. {TEXT}" for i in range(60)) + "\nshort one\n")
    return folder


def recipe(inputs, **top):
    lines = [f"{name} = {json.dumps(value)}" for name, value in top.items()]
    return "\n".join(
        [
            *lines,
            f'[corpus.papers]\ninput = "{inputs}/papers.jsonl.gz"\ntext_field = ["title", "inner.abstract"]',
            f'[corpus.notes]\ninput = ["{inputs}/notes.txt"]\nencoding = "latin-1"\ntext-documents = "blank-line"',
            f'[corpus.lines]\ninput = "{inputs}/lines.txt"\ntext_documents = "line"\nfilters = ["min-words=5"]\nweight = 2',
        ]
    )


def build(*arguments):
    return main(["build", *map(str, arguments), "--quiet", "--workers", "1"])


COMMON = {"seq_len": 64, "tokenizer": str(TOKENIZER), "held_out": 0, "no_nsp": True, "rows-per-shard": 256}


def test_each_corpus_is_read_in_its_own_way(inputs, tmp_path, capsys):
    (tmp_path / "recipe.toml").write_text(recipe(inputs, **COMMON))
    assert build(tmp_path / "recipe.toml", "--output", tmp_path / "out") == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert {name: c["documents"] for name, c in report["corpora"].items()} == {"papers": 60, "notes": 60, "lines": 61}
    assert report["dropped"]["reasons"] == {"min-words": 1}  # "short one"; "Title 7" alone is a paper and stays
    dataset, tokenizer = Dataset(tmp_path / "out"), Tokenizer.load(TOKENIZER)
    text = " ".join(tokenizer.decode(ids) for ids in dataset.read(np.arange(dataset.rows)).ids)
    assert "wrong field" not in text and text.count("lan 31.") == 1 and text.count("Line 31.") == 2
    assert "Title 31 Abstract 31." in text and "Title 7" in text
    # What is stored with the dataset builds it again, and so does what the command prints.
    stored = tmp_path / "out" / "recipe.toml"
    assert build(stored, "--output", tmp_path / "again") == 0
    assert digests(tmp_path / "again") == digests(tmp_path / "out")
    capsys.readouterr()
    assert build(stored, "--print-recipe") == 0
    assert capsys.readouterr().out == stored.read_text()


def test_recipe_and_arguments_give_the_same_bytes(inputs, tmp_path):
    corpora = f'seq_len = 32\n[corpus.a]\ninput = "{inputs}/lines.txt"\nweight = 2.5\n[corpus.b]\ninput = "{OLD}/text/notes.txt"\n'
    (tmp_path / "r.toml").write_text(f'filters = ["min-words=5"]\n{corpora}')
    last = ("--tokenizer", TOKENIZER, "--seq-len", 64)
    assert build(tmp_path / "r.toml", "--output", tmp_path / "one", *last) == 0
    a, b = f"a={inputs / 'lines.txt'}", f"b={OLD / 'text/notes.txt'}"
    options = ("--filters", "min-words=5", "--weight", "a=2.5", *last)
    assert build("--input", a, b, "--output", tmp_path / "two", *options) == 0
    assert digests(tmp_path / "one") == digests(tmp_path / "two") and (tmp_path / "one/recipe.toml").exists()


def test_dropped_lines_and_masks_add_up(tmp_path):
    body = (
        "Write to a.b@c.org today, or do not write at all.\nThis line has no end mark\nSo be it now.[3] And it is so.\n"
    )
    notice = "Please enable JavaScript to see it all.\n"
    page = body + notice + f"{TEXT * 2}\n" * 4
    pages = [page.replace("today", f"on day {i}") for i in range(40)] + [
        notice * 3,
        page + "A {curly} bracket is in this line.\n",
    ]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in pages))
    options = ("--filters", "c4", "--mask", "citations", "emails", "--no-nsp", "--seq-len", 32, "--held-out", 0)
    files = ("--input", tmp_path / "t.jsonl", "--tokenizer", TOKENIZER, "--output", tmp_path / "out")
    assert build(*files, *options) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["dropped"]["reasons"] == {"empty": 1, "max-curly-brackets": 1}
    # The page of notices and that with the bracket lose lines too, before they are dropped.
    assert report["dropped"]["lines"] == {"max-line-notices": 44, "min-line-ends": 41}
    assert report["cleaned"]["masked e-mail addresses"] == 41 == report["cleaned"]["removed citation marks"]
    dataset, tokenizer = Dataset(tmp_path / "out"), Tokenizer.load(TOKENIZER)
    text = " ".join(tokenizer.decode(ids) for ids in dataset.read(np.arange(dataset.rows)).ids)
    assert "Script" not in text and "end mark" not in text and "[3]" not in text and "c.org" not in text
    assert text.count("example.com") > 30


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("seq_len = [64]", "r.toml: names no corpus"),
        ("seqlen = 64\n[corpus.a]\ninput = 'x'", "r.toml: no option 'seqlen'; the nearest is 'seq_len'"),
        ("[corpus.a]\ninputs = 'x'", "r.toml: corpus.a: no option 'inputs'; the nearest is 'input'"),
        ("[corpus.a]\nweight = 0\ninput = 'x'", "r.toml: corpus.a: weight is 0"),
        ("[corpus.a]", "r.toml: corpus.a: input is None; give a text"),
        ("[corpus.a]\ninput = 'x'\nformat = 'pdf'", "r.toml: corpus.a: format is 'pdf'; give auto, text"),
        ("[corpus.a]\ninput = 'x'\nkeep_titles = 1", "r.toml: corpus.a: keep_titles is 1; give true or false"),
        ("no_nsp = 1\n[corpus.a]\ninput = 'x'", "r.toml: no_nsp is 1; give true or false"),
        ("a = [", "r.toml: not valid TOML"),
    ],
)  # fmt: skip
def test_mistakes_in_a_recipe_are_named(text, said, tmp_path, capsys):
    (tmp_path / "r.toml").write_text(text)
    assert build(tmp_path / "r.toml", "--output", tmp_path / "out") == 2
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_recipe_in_the_output_folder_is_kept(inputs, tmp_path, capsys):
    """What was the user's before the first build stays, and what a build has left is not what the next one reads."""
    output = tmp_path / "data"
    (output / "held_out").mkdir(parents=True)
    (output / "held_out" / "mine.txt").write_text("mine")
    own = recipe(inputs, seq_len=64, vocab_size=900_000)
    (output / "recipe.toml").write_text(own)
    assert build(output / "recipe.toml", "--output", output) == 2
    assert f"--output {output}: holds held_out and neither a dataset" in capsys.readouterr().err
    assert (output / "recipe.toml").read_text() == own
    assert (output / "held_out" / "mine.txt").read_text() == "mine"
    (tmp_path / "recipe.toml").write_text(recipe(inputs, **COMMON))
    assert build(tmp_path / "recipe.toml", "--output", tmp_path / "out") == 0
    stored = tmp_path / "out" / "recipe.toml"
    before = digests(tmp_path / "out")
    assert build(stored, "--output", tmp_path / "out") == 0  # nothing to do
    assert build(stored, "--output", tmp_path / "out", "--overwrite") == 2
    assert f"would replace {stored}, which it reads" in capsys.readouterr().err
    assert digests(tmp_path / "out") == before


def test_killed_overwriting_build_resumes(inputs, tmp_path, monkeypatch, capsys):
    command = ("--input", inputs / "lines.txt", "--tokenizer", TOKENIZER, "--output", tmp_path, "--overwrite")
    options = ("--text-documents", "line", "--no-nsp", "--seq-len", 32)
    with monkeypatch.context() as patched:

        def full(*_):
            raise OSError(28, "No space left on device")

        patched.setattr(sequences, "draw", full)
        assert build(*command, *options) == 4
    assert build(*command, *options) == 0
    assert "resumed" in capsys.readouterr().out


def test_names_outside_utf8_are_refused_first(inputs, tmp_path, capsys):
    """A recipe is TOML, which is UTF-8; in a folder that is named such a file is read."""
    folder = tmp_path / "in"
    folder.mkdir()
    path = os.fsdecode(os.path.join(os.fsencode(folder), b"caf\xe9.txt"))
    shutil.copy(inputs / "lines.txt", path)
    options = ("--tokenizer", TOKENIZER, "--no-nsp", "--seq-len", 32, "--held-out", 0)
    assert build("--input", path, "--output", tmp_path / "out", *options) == 2
    said = capsys.readouterr().err
    assert "caf\\udce9.txt': is not UTF-8" in said and "name a folder above it" in said
    assert not (tmp_path / "out").exists()
    assert build("--input", folder, "--output", tmp_path / "out", *options) == 0


def test_json_summary_of_a_complete_dataset(inputs, tmp_path, capsys):
    summary = tmp_path / "summary.json"
    command = (
        "--input",
        inputs / "lines.txt",
        "--tokenizer",
        TOKENIZER,
        "--no-nsp",
        "--seq-len",
        32,
        "--output",
        tmp_path / "out",
    )
    nowhere = tmp_path / "nowhere" / "x.json"
    assert build(*command, "--json", nowhere) == 2 and not (tmp_path / "out").exists()
    assert f"--json {nowhere}: its folder does not exist" in capsys.readouterr().err
    found = []
    for _ in range(2):
        assert build(*command, "--json", summary) == 0
        found.append(json.loads(summary.read_text()))
        summary.unlink()
    assert found[1] == json.loads((tmp_path / "out" / "report.json").read_text())
    assert found[0]["read"] == found[1]["read"] and "seconds" in found[0] and "seconds" not in found[1]
