"""The comparison of starts cuts its development data cleanly, calls no difference a gain within the seeds' spread, and reads
the fine-tuning's own summary."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench_finetune as bench


def row(mean: float, std: float) -> dict[str, Any]:
    return {"metric": "f1", "scores": {"f1": {"mean": mean, "std": std}}}


def test_every_tenth_sentence_of_either_class_is_for_development(tmp_path: Path) -> None:
    folder = tmp_path / "sentence_polarity" / "sentence_polarity"
    folder.mkdir(parents=True)
    for ending in ("neg", "pos"):
        lines = [f"{ending} caf\xe9 {n}\tend" for n in range(25)]
        (folder / f"rt-polarity.{ending}").write_text("\n".join([*lines, " "]) + "\n", encoding="utf-8")
    train, dev = (path.read_text().splitlines() for path in bench.polarity(tmp_path, tmp_path))
    assert train[0] == dev[0] == "label\tsentence"
    assert dev[1:] == [
        f"{label}\t{name} caf\xe9 {n} end" for label, name in enumerate(("neg", "pos")) for n in (0, 10, 20)
    ]
    assert len(train) == 1 + 2 * 22 and not set(train[1:]) & set(dev[1:])


def test_no_article_is_on_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    articles = [
        {
            "title": f"t{a}",
            "paragraphs": [{"context": f"{a} {p}", "qas": [{"id": f"{a}-{p}"}]} for p in range(8)],
        }
        for a in range(30)
    ]
    (tmp_path / "squad1.1").mkdir()
    with gzip.open(tmp_path / "squad1.1" / "train-v1.1.json.gz", "wt") as file:
        json.dump({"data": articles}, file)
    monkeypatch.setattr(bench, "SQUAD_TRAIN", 108)
    monkeypatch.setattr(bench, "SQUAD_DEV", 6)
    train, dev = (json.loads(path.read_text())["data"] for path in bench.squad(tmp_path, tmp_path))
    assert [a["title"] for a in dev] == ["t0", "t10", "t20"]
    assert len(train) == 27 and not {a["title"] for a in train} & {a["title"] for a in dev}
    assert [len(a["paragraphs"]) for a in train] == [4] * 27
    assert [len(a["paragraphs"]) for a in dev] == [2] * 3


@pytest.mark.parametrize(
    ("random", "pretrained", "helps"),
    [((0.5, 0.01), (0.6, 0.01), True), ((0.5, 0.05), (0.6, 0.06), False), ((0.6, 0.0), (0.5, 0.0), False)],
)
def test_a_gain_is_more_than_both_spreads(random, pretrained, helps: bool) -> None:
    found = bench.compare({"random": row(*random), "pre-trained": row(*pretrained)}, "f1")
    assert found["helps"] is helps and found["gain"] == pytest.approx(pretrained[0] - random[0])
    assert found["ratio"] == pytest.approx(pretrained[0] / random[0])
    assert bench.compare({"random": row(*random)}, "f1") == {}


@pytest.mark.parametrize(
    ("change", "named"), [({"model": {"updates": "9"}}, "model"), ({"seeds": 5}, "seeds")]
)
def test_rows_of_another_model_are_not_added_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], change: dict[str, Any], named: str
) -> None:  # fmt: skip
    def train(*_: Any) -> dict[str, Any]:
        raise AssertionError("it trains")

    file, model = tmp_path / "finetune.json", {"updates": "5"}
    monkeypatch.setattr(bench, "described", lambda path: model)
    monkeypatch.setattr(bench, "finetune", train)
    given = ["--model", "m", "--tasks", "t", "--work", str(tmp_path), "--seeds", "3", "--json", str(file)]
    monkeypatch.setattr("sys.argv", ["bench_finetune.py", *given, "--only", "SST-2"])
    file.write_text(json.dumps({"model": model, "seeds": 3, "tasks": {}} | change))
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert ended.value.code == 2
    assert f"{file}: holds rows of another {named}; name another file" in capsys.readouterr().err
    file.write_text(json.dumps({"model": model, "seeds": 3, "tasks": {}}))
    with pytest.raises(AssertionError, match="it trains"):
        bench.main()


def test_the_table_has_a_line_a_task() -> None:
    rows = {"random": row(0.5, 0.01), "pre-trained": row(0.7512, 0.0234)}
    results = {
        "A": {"metric": "f1", "rows": rows} | bench.compare(rows, "f1"),
        "B": {"metric": "f1", "rows": {"random": row(0.5, 0.01)}},
    }
    lines = bench.table(results).splitlines()
    assert lines[2:] == ["| A | f1 | 50.0 ± 1.0 | 75.1 ± 2.3 |  | yes |", "| B | f1 | 50.0 ± 1.0 |  |  |  |"]
    assert len({line.count("|") for line in lines}) == 1
