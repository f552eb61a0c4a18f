"""Against the definitions, by hand."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import torch

from megabert.finetune.embed import metrics


def test_the_figures_of_a_search() -> None:
    places = np.array([[3, 1, 2], [0, 2, 5], [7, 8, 9]])
    scores = np.array([[0.9, 0.8, 0.7]] * 3, np.float32)
    found = metrics.retrieval(places, scores, [{1}, {0, 5, 6}, {4}])
    gain = [1 / math.log2(3), (1 + 1 / math.log2(4)) / (1 + 1 / math.log2(3) + 1 / math.log2(4)), 0]
    assert found == pytest.approx(
        {
            "ndcg@10": sum(gain) / 3,
            "mrr@10": (1 / 2 + 1 + 0) / 3,
            "recall@1": (0 + 1 / 3 + 0) / 3,
            "recall@5": (1 + 2 / 3 + 0) / 3,
            "recall@10": (1 + 2 / 3 + 0) / 3,
        }
    )


def test_what_comes_behind_the_tenth_result_is_not_found() -> None:
    found = metrics.retrieval(np.arange(12)[None], np.linspace(1, 0, 12)[None], [{10}])
    assert set(found.values()) == {0.0}


def test_the_nearest_are_those_of_all_cosines(monkeypatch) -> None:
    queries, corpus = (torch.nn.functional.normalize(torch.randn(n, 5), dim=1) for n in (7, 30))
    monkeypatch.setattr(metrics, "AT_ONCE", 60)  # two queries at once
    places, cosines = metrics.nearest(queries, corpus, 4)
    whole = (queries @ corpus.T).numpy()
    assert (places == np.argsort(-whole, axis=1)[:, :4]).all()
    assert np.allclose(cosines, np.take_along_axis(whole, places, 1))
    assert metrics.nearest(queries, corpus[:3])[0].shape == (7, 3)


def test_the_figures_of_similarities() -> None:
    found = metrics.similarity(np.array([0.1, 0.2, 0.9]), np.array([0.0, 4.0, 5.0]))
    assert found["spearman"] == pytest.approx(1.0) and 0.7 < found["pearson"] < 0.75
    assert metrics.similarity(np.array([0.5, 0.5]), np.array([1.0, 2.0])) == {"spearman": 0.0, "pearson": 0.0}


def test_a_missing_package_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pytrec_eval", None)
    with pytest.raises(ValueError, match=r"pip install 'megabert\[embeddings\]'"):
        metrics.require()
