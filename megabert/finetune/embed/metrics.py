"""Figures of embeddings: of searches by `pytrec_eval`, of similarities by `scipy`. All are -1 or 0 to 1, larger is better."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

DEPTH = 10  # results of a search that are judged
RETRIEVAL = {  # ours, and trec_eval's name; of the first DEPTH results, so that its recip_rank is MRR@10
    f"ndcg@{DEPTH}": f"ndcg_cut_{DEPTH}",
    f"mrr@{DEPTH}": "recip_rank",
    "recall@1": "recall_1",
    "recall@5": "recall_5",
    "recall@10": "recall_10",
}
SIMILARITY = ("spearman", "pearson")
AT_ONCE = 1 << 24  # cosines held at once


def nearest(queries: Tensor, corpus: Tensor, depth: int = DEPTH) -> tuple[np.ndarray, np.ndarray]:
    """The `depth` nearest of fp32 [c, D] for each of [q, D], all of length 1: places int64 and cosines fp32, [q, k]."""
    k = min(depth, len(corpus))
    found = [torch.topk(part @ corpus.T, k, dim=1) for part in queries.split(max(1, AT_ONCE // max(1, len(corpus))))]
    places, cosines = (torch.cat([getattr(part, name) for part in found]) for name in ("indices", "values"))
    return places.cpu().numpy(), cosines.cpu().numpy()


def require() -> None:
    """Raises ValueError where the package that counts is not installed."""
    try:
        import pytrec_eval  # noqa: F401
    except ImportError:
        raise ValueError(
            "judging a search takes the package pytrec-eval-terrier; pip install 'megabert[embeddings]'"
        ) from None


def retrieval(places: np.ndarray, scores: np.ndarray, wanted: Sequence[set[int]]) -> dict[str, float]:
    """Means over the queries of what their results [q, k], best first, are worth; `wanted`: right places of each query."""
    import pytrec_eval

    judged = {str(q): {str(place): 1 for place in right} for q, right in enumerate(wanted)}
    run = {
        str(q): {str(place): float(score) for place, score in zip(row, values, strict=True)}
        for q, (row, values) in enumerate(zip(places[:, :DEPTH], scores[:, :DEPTH], strict=True))
    }
    measures = {f"ndcg_cut.{DEPTH}", "recip_rank", f"recall.1,5,{DEPTH}"}
    found = pytrec_eval.RelevanceEvaluator(judged, measures).evaluate(run)
    return {
        ours: math.fsum(values[theirs] for values in found.values()) / len(wanted) for ours, theirs in RETRIEVAL.items()
    }


def similarity(cosines: np.ndarray, scores: np.ndarray) -> dict[str, float]:
    """Rank and linear correlation of cosines [n] with what people said [n]; 0 where one of them is constant."""
    from scipy import stats

    if len(scores) < 2 or np.ptp(cosines) == 0 or np.ptp(scores) == 0:
        return dict.fromkeys(SIMILARITY, 0.0)
    found = {"spearman": stats.spearmanr, "pearson": stats.pearsonr}
    return {name: float(found[name](cosines, scores).statistic) for name in SIMILARITY}
