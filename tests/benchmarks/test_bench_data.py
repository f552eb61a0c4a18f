"""The loader and the collator are compared at equal numbers of rows only, and the headline is the less favourable."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import bench_data

pytest.importorskip("transformers")


def test_equal_sizes_and_the_least_ratio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_data, "ROUNDS", 1)
    monkeypatch.setattr(bench_data, "SECONDS", 0.01)
    dataset, vocabulary = bench_data.synthetic(tmp_path, rows=1024, seq_len=32)
    found = bench_data.measure(dataset, vocabulary, 512, [32, 256], tmp_path)
    against = [c for c in found["comparisons"] if c["peer"].startswith(bench_data.COLLATOR)]
    assert len(against) == 2
    for comparison in against:
        ours, peer = (re.search(r"of (\d+) rows", comparison[side])[1] for side in ("ours", "peer"))
        assert ours == peer
        rates = [found["rows_per_sec"][comparison[side]]["p50"] for side in ("ours", "peer")]
        assert comparison["ratio"] == rates[0] / rates[1] > 0
    assert found["ratio"] == min(c["ratio"] for c in against)
    with pytest.raises(ValueError, match="fewer than a batch of 2048"):
        bench_data.hugging_face(dataset, 512, 2048)
