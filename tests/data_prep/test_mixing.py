"""Several corpora and several row lengths in one command: weights count, names are kept, the parts are whole datasets."""

import numpy as np
import pytest

from data_prep.commands import corpora
from data_prep.common.errors import BadInput
from data_prep.common.records import Corpus, FileRange, RangeList, ReadTask
from data_prep.options import BuildOptions
from data_prep.stages.train_tokenizer import sample_shares
from megabert.data.shards import Dataset, verify
from megabert.data.tokenizer import Tokenizer
from tests.helpers.prep_builds import build, build_here, error_of
from tests.helpers.prep_reading import write_all


def test_named_inputs_and_weights(tmp_path, monkeypatch):
    assert corpora(["a", "b"], []) == [Corpus("input", ("a", "b"), 1.0)]
    wiki, books = Corpus("wiki", ("a", "b"), 1.0), Corpus("books", ("c=d",), 2.5)
    assert corpora(["wiki=a", "b", "books=c=d"], ["books=2.5"]) == [wiki, books]
    (tmp_path / "year=2026").mkdir()
    monkeypatch.chdir(tmp_path)
    paths = ("year=2026/*", "year=*/x")
    assert corpora([*paths, "a=year=2026/*"], []) == [Corpus("input", paths), Corpus("a", paths[:1])]
    for weight, words in (("books=2", "no corpus of that name"), ("wiki=0", "above 0"), ("wiki", "NAME=W")):
        with pytest.raises(BadInput, match=words):
            corpora(["wiki=a"], [weight])


def test_a_corpus_whose_files_an_earlier_one_has_is_refused(tmp_path):
    folder = write_all(tmp_path / "all", {"books/a.txt": "Text of a book.", "b.txt": "Other text."})
    result = build([f"all={folder}", f"books={folder / 'books'}"], tmp_path / "out", code=2, weight="books=2")
    assert error_of(result).startswith("error: --input books=…: no text that an earlier corpus lacks; name it first")


def test_two_corpora_by_weight_in_two_row_lengths(corpus, topics, tokenizer_file, tmp_path, capsys):
    books = write_all(tmp_path / "books", {f"{i:02}.txt": text for i, text in enumerate(topics[:60])})
    options = {"weight": ("wiki=0.25", "books=2.5"), "seq_len": (32, 96), "held_out": 0.02, "nsp": True}
    facts = build_here([f"wiki={corpus}", f"books={books}"], tmp_path / "out", tokenizer=tokenizer_file, **options)
    wiki, books = facts["corpora"]["wiki"], facts["corpora"]["books"]
    kept = 1 - wiki["dropped_while_reading"]["left out by weight"] / wiki["documents"]
    assert kept == pytest.approx(0.25, abs=0.03) and wiki["documents"] > 2000
    # Each book but the held-out ones is there twice, and half of them a third time.
    first, second = (facts["datasets"][n] for n in ("32", "96"))
    assert books["documents"] == 60 and 60 * 1.25 < first["repeated"]["documents"] < 60 * 1.75
    assert first["held_out"]["documents"] > 2
    shown = capsys.readouterr().out
    assert "rows 32" in shown and "rows 96" in shown
    assert [first[name] == second[name] for name in ("documents", "sentences", "corpus_tokens")] == [True] * 3
    for length, d in ((32, first), (96, second)):
        folder = tmp_path / "out" / f"seq{length}"
        assert list(verify(folder)) == []
        own = d["corpus_tokens"] + d["borrowed_tokens"] - d["truncated_tokens"]
        assert d["tokens"] - 3 * d["sequences"] == own
        dataset = Dataset(folder)
        assert dataset.manifest.seq_len == length and dataset.held_out_path is not None
        assert Tokenizer.load(dataset.tokenizer_path).sha256 == facts["tokenizer"]["sha256"]
        assert int((dataset.read(np.arange(dataset.rows)).ids > 0).sum()) == d["tokens"]


def test_the_sample_follows_bytes_and_weights():
    ranges = [RangeList([FileRange(f"f{i}", size=900 if i < 10 else 100)]) for i in range(20)]
    tasks = [ReadTask(i, part, int(i >= 10)) for i, part in enumerate(ranges)]
    for weights, want in (((1.0, 1.0), [0.9, 0.1]), ((1.0, 9.0), [0.5, 0.5])):
        found = sample_shares(tasks, BuildOptions(sample_megabytes=10), weights)
        assert [sum(s.size for s in found if s.task.corpus == c) / 1e7 for c in (0, 1)] == pytest.approx(want, abs=1e-5)
