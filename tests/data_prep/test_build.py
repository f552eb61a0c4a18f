"""The command end to end on 12 MB: the same bytes from any number of processes, and rows with the words of the text."""

import json
import re

import pytest

from megabert.data.shards import Dataset
from megabert.data.tokenizer import Tokenizer
from tests.helpers.prep_builds import build, build_here, mpirun, sequences_of
from tests.helpers.prep_reading import contents, write, write_all


@pytest.fixture(scope="module")
def options(tokenizer_file):
    return {"tokenizer": tokenizer_file, "held_out": 0.02, "rows_per_shard": 8192, "seed": 3, "nsp": True}


@pytest.fixture(scope="module")
def built(corpus, options, tmp_path_factory):
    output = tmp_path_factory.mktemp("built") / "data"
    build(corpus, output, workers=1, **options)
    return output


@pytest.mark.parametrize("workers", [3, pytest.param(0, marks=pytest.mark.dist)], ids=["3 workers", "2 ranks"])
def test_processes_do_not_change_the_bytes(workers, built, corpus, options, tmp_path):
    more = {"workers": workers} if workers else {"prefix": mpirun(2)}
    result = build(corpus, tmp_path / "data", **options, **more)
    assert result.stdout.count("dataset ") == 1
    assert contents(tmp_path / "data") == contents(built)
    assert {"shard-000001.tar", "held_out/shard-000000.tar"} <= contents(built).keys()


@pytest.mark.dist
def test_user_mistake_ends_all_ranks(corpus, tokenizer_file, tmp_path):
    data = (corpus / "wiki_03").read_bytes()
    bad = write(tmp_path / "bad", data[:1_000_000] + b"\xff" + data[1_000_001:])
    result = build([corpus, bad], tmp_path / "out", code=2, prefix=mpirun(2), tokenizer=tokenizer_file)
    assert len(re.findall(r"^error: .*bad: byte 1000000: invalid UTF-8", result.stderr, re.MULTILINE)) == 1
    assert "Traceback" not in result.stderr and not list((tmp_path / "out").rglob("manifest.json"))


def test_rows_hold_text_and_true_next_sentences(built, corpus):
    tokenizer = Tokenizer.load(built / "tokenizer.model")
    text = "".join(path.read_text(encoding="utf-8") for path in corpus.iterdir())
    bodies = re.findall(r"<doc [^>]*>\n.*\n\n((?:.|\n)*?)</doc>", text)
    # Each document as the string of its tokens; a part of a sequence must be found in it as it is.
    joined = "\n".join("".join(tokenizer.processor.encode(" ".join(body.split()), out_type=str)) for body in bodies)
    checked = {0: 0, 1: 0}
    for ids, first, label in sequences_of(built):
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
    texts = (" ".join(tokenizer.decode(ids) for ids, *_ in sequences_of(part)) for part in (built, built / "held_out"))
    trained, held_out = (set(re.findall(r"Marker(\d+) opens", text)) for text in texts)
    assert len(trained) > 2000 and len(held_out) > 30 and not trained & held_out


def test_lowercase_tokenizer_and_one_held_out_passage(topics, tmp_path, capsys):
    write_all(tmp_path, {f"{i:02}.txt": text for i, text in enumerate(topics[:30])})
    output, options = tmp_path / "out", {"model_type": "bpe", "lowercase": True, "held_out": 0.0001}
    build_here(tmp_path / "*.txt", output, vocab_size=600, seed=1, workers=2, **options)
    printed = capsys.readouterr().out
    assert "held out: 1 passage of about 128 tokens" in printed and "it would be 0 documents, 0.00%" in printed
    assert " in 1 shard, " in printed and "in 30 files\n" in printed and "held out 1 passage, " in printed
    held = json.loads((output / "held_out" / "manifest.json").read_text())
    assert held["statistics"]["documents"] == 0 and held["tokenizer"]["file"] == "../tokenizer.model"
    assert Dataset(output).manifest.held_out["passages"] == 1 and 100 < held["statistics"]["corpus_tokens"] < 300
    tokenizer = Tokenizer.load(output / "tokenizer.model")
    assert tokenizer.vocab_size == 600
    assert tokenizer.encode_batch(["STATEMENT"]) == tokenizer.encode_batch(["statement"])


def test_one_document_trains_its_tokenizer(topics, tmp_path):
    """Also if a hash of its words would hold it out: passages of it are held out instead."""
    for number, text in enumerate(topics[:4]):
        path = write(tmp_path / f"{number}.txt", text)
        options = {"text_documents": "file", "held_out": 0.5, "vocab_size": 100, "seq_len": 32, "workers": 1}
        found = build_here(path, tmp_path / f"out-{number}", **options)
        assert found["read"]["documents"] == 1 and (tmp_path / f"out-{number}/held_out/manifest.json").exists()


def test_builds_in_one_process_keep_their_tokenizers(topics, tmp_path):
    """A tokenizer that is trained has the same path in every build of a folder."""
    path = write(tmp_path / "in.txt", "\n\n".join(topics[:2]))

    made = []
    for name, vocab_size in (("one", 300), ("one", 400), ("two", 400)):
        build_here(path, tmp_path / name, vocab_size=vocab_size, seq_len=32, workers=1, overwrite=True)
        made.append((tmp_path / name / "shard-000000.tar").read_bytes())
    assert made[1] == made[2] != made[0]


def test_a_document_that_may_be_many_is_said(tokenizer_file, tmp_path, capsys):
    paragraphs = [f"Paragraph {i} of a book or document {i} of many?" for i in range(400)]
    folder = write(tmp_path / "in" / "merged.txt", "\n\n".join(paragraphs)).parent
    build_here(folder, tmp_path / "guessed", tokenizer=tokenizer_file, workers=1)
    guessed = capsys.readouterr()
    assert f"{folder}: a document of plain text is a file" in guessed.out
    assert re.search(r"documents  input: 1, 1\.0 a file, the largest of 0\.02 MB in \S+merged\.txt", guessed.out)
    assert "merged.txt: 1 document of 0.0 MB has 400 blank-line blocks; add --text-documents blank-line" in guessed.err
    build_here(folder, tmp_path / "chosen", tokenizer=tokenizer_file, workers=1, text_documents="blank-line")
    chosen = capsys.readouterr()
    assert "blank-line blocks" not in chosen.err and "documents  input: 400, 400.0 a file" in chosen.out


@pytest.mark.parametrize("glob", ["", "*"])
def test_a_folder_may_have_its_build_inside(glob, topics, tokenizer_file, tmp_path, capsys):
    """Which is not read, so that the same command resumes and is done."""
    folder = write_all(tmp_path / "in", {f"{i}.txt": text for i, text in enumerate(topics[:8])})
    options = {"tokenizer": tokenizer_file, "seq_len": 32, "held_out": 0}
    build_here(folder, tmp_path / "beside", **options)
    for _ in range(2):
        build_here(folder / glob, folder / "out", **options)
    shown = f"--input {folder}: all but {folder / 'out'}, the folder of this build" in capsys.readouterr().out
    assert shown != bool(glob)
    inside, beside = (
        {n: data for n, data in contents(of).items() if n.endswith(".tar")}
        for of in (folder / "out", tmp_path / "beside")
    )
    assert inside == beside and inside
