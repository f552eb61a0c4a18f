from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench_embeddings as bench


def squad(folder: Path, articles: int) -> Path:
    def paragraph(a: int, p: int) -> dict[str, Any]:
        context = f"Article{a} tells of place{a}x{p} and of nothing else."
        answer = {"text": f"place{a}x{p}", "answer_start": context.index("place")}
        qas = [{"id": f"{a}.{p}.{q}", "question": f"What{q} is place{a}x{p}?", "answers": [answer]} for q in range(2)]
        return {"context": context, "qas": qas}

    tree = {"data": [{"title": f"{a}", "paragraphs": [paragraph(a, p) for p in range(12)]} for a in range(articles)]}
    (folder / "squad.json.gz").write_bytes(gzip.compress(json.dumps(tree).encode()))
    return folder / "squad.json.gz"


def test_articles_are_cut_in_three_that_share_nothing(tmp_path) -> None:
    files = bench.cut(squad(tmp_path, 30), tmp_path, 250, 2)
    parts = {name: json.loads(path.read_text())["data"] for name, path in files.items()}
    titles = {name: {article["title"] for article in part} for name, part in parts.items()}
    assert titles["test"] == {"0", "10"} and titles["dev"] == {"5", "25"} and len(titles["train"]) == 25
    assert not titles["train"] & (titles["dev"] | titles["test"])
    questions = {name: sum(len(p["qas"]) for a in part for p in a["paragraphs"]) for name, part in parts.items()}
    assert questions == {"train": 250, "dev": 12, "test": 48}


def test_bm25_finds_the_paragraph_that_has_the_word(tmp_path) -> None:
    files = bench.cut(squad(tmp_path, 11), tmp_path, 0, 0)
    row = bench.with_means(bench.bm25(files["test"]))
    assert (row["questions"], row["paragraphs"]) == (48, 24)
    assert row["scores"]["recall@1"] == {"mean": 1.0, "std": 0.0}


def test_the_ratio_is_to_the_better_of_the_others() -> None:
    rows = {
        name: bench.with_means({"runs": [{"recall@10": value} for value in values]})
        for name, values in ((bench.BM25, [0.8]), (bench.PLAIN, [0.2]), (bench.CONTRASTIVE, [0.8, 0.6, 0.4]))
    }
    found = bench.compare(rows)
    assert found["ratio"] == pytest.approx(0.75) and found["gain"] == pytest.approx(-0.2)
    assert bench.compare({bench.BM25: rows[bench.BM25]}) == {}
    assert "| fine-tuned by contrast | 3 | 60.0 ± 20.0 |" in bench.table(rows)
