"""Texts and rounds of the benchmark of vectors and labels, and both of its sides in each precision."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")

from benchmarks import bench_predict as bench
from megabert.data.tokenizer import Tokenizer
from tests.helpers import wordpiece


def test_texts_have_the_lengths_asked_for(tmp_path) -> None:
    vocabulary = wordpiece.write(tmp_path / "vocab.txt")
    ids = Tokenizer.load(vocabulary).encode_texts(bench.texts_of_tokens(vocabulary, [5, 3, 16]))
    assert [2 + len(text) for text in ids] == [5, 3, 16]
    mixed = bench.lengths_of("mixed", 20_000)
    assert mixed == bench.lengths_of("mixed", 20_000) and min(mixed) >= 8 and max(mixed) == 512
    assert 20_000 <= sum(mixed) < 20_512 and sorted(mixed)[len(mixed) // 2] == pytest.approx(55, abs=15)


def test_each_side_runs_at_its_best_batch() -> None:
    def side(cost: dict[int, float]) -> bench.Side:
        return bench.Side(lambda texts, batch: time.sleep(cost[batch]) or batch, tuple(cost))

    figures, theirs, ours = bench.compare(side({1: 0.03, 8: 0.02}), side({512: 0.005, 4096: 0.04}), ["text"] * 10, 3)
    assert (theirs, ours) == (figures["peer"]["batch"], figures["ours"]["batch"]) == (8, 512)
    assert 2 < figures["ratio"] < 6 and len(figures["ours"]["seconds"]) == 3
    assert bench.ratio({"peer": [4.0, 9.0, 8.0], "ours": [2.0, 1.0, 4.0]}) == 2


@pytest.mark.parametrize("vectors", [1.001, float("nan")])
def test_other_vectors_end_the_benchmark(vectors: float, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, names in ((bench.hf_predict, ("encoder", "classifier")), (bench, ("our_vectors", "our_labels"))):
        for name in names:
            monkeypatch.setattr(module, name, lambda *_: None)
    found = iter([({}, np.ones((1, 1)), np.full((1, 1), vectors)), ({}, [{"score": 1.0, "label": "no"}], ["no"])])
    monkeypatch.setattr(bench, "compare", lambda *_: next(found))
    monkeypatch.setattr(bench, "our_probabilities", lambda *_: np.ones(1))
    with pytest.raises(ValueError, match="are not the peer's"):
        bench.measure((Path(), Path(), Path()), ["text"], Path(), rounds=1)


@pytest.mark.slow
def test_both_sides_compute_in_each_precision(tmp_path) -> None:
    pytest.importorskip("sentence_transformers")
    wordpiece.write(tmp_path / "vocab.txt")
    words = [word for word in wordpiece.WORDS if word.isalpha()]
    texts = [" ".join(words[i % len(words)] for i in range(n, n + 5 + n % 7)) for n in range(16)]
    (tmp_path / "models").mkdir()
    folders = bench.make_models("mini", tmp_path / "vocab.txt", tmp_path / "models")
    found = bench.measure(folders, texts, tmp_path, rounds=1)
    for what in ("vectors", "labels"):
        assert found["fp32"][what]["error"]["peer"] == 0 < found["bf16"][what]["error"]["peer"]
        assert found["fp32"][what]["error"]["ours"] < 1e-4 < found["bf16"][what]["error"]["ours"] < 0.1
    assert bench.table({"mini": {"short": found}}).count("| bf16 |") == 1
