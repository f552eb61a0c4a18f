"""A page of several runs: their curves over updates, tokens and minutes, their results, and the settings that differ."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megabert.commands import comparison, report
from megabert.config import load


def make(folder: Path, lr: float, steps: int) -> Path:
    """A run whose loss falls with its rate, with an evaluation after every other log line."""
    folder.mkdir()
    config = load("tiny", [f"optimizer.lr={lr}"]).model_dump()
    (folder / "config.json").write_text(json.dumps({"config": config}))
    lines = []
    for step in range(10, steps + 1, 10):
        spent = {"time/train_seconds": 6.0 * step, "data/tokens": 1_000_000 * step, "perf/tokens_per_sec": 500.0}
        lines.append({"step": step, "train/loss": 9.0 - lr * step} | spent)
        if step % 20 == 0:
            lines.append({"step": step, "eval/mlm_loss": 9.5 - lr * step, "eval/mlm_accuracy": 0.1})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 99')
    return folder


def test_runs_are_compared_on_one_page(tmp_path: Path, capsys) -> None:
    runs = [make(tmp_path / "slow", 1e-3, 100), make(tmp_path / "fast", 2e-3, 60)]
    assert report.main([*map(str, runs), "--output", str(tmp_path / "both.html")]) == 0
    page = (tmp_path / "both.html").read_text()
    assert not re.search(r"(?:src|href)=|url\(|https?:", page), "it fetches nothing"
    assert page.count("<figure>") == 4 * 3 and page.count('class="run0" d="M') == page.count('class="run1" d="M') == 12
    rows = dict(re.findall(r'<th scope="row">([^<]+)</th>((?:<td>[^<]*</td>)+)', page))
    assert rows["optimizer.lr"] == "<td>0.001</td><td>0.002</td>"
    assert "schedule.total_steps" not in rows, "equal settings are left out"
    assert rows["Loss, held out"] == "<td>9.4</td><td>9.38</td>"
    assert report.main([*map(str, runs), "--output", str(tmp_path / "both.html")]) == 0, "a report is replaced"


def test_points_of_an_evaluation_are_those_of_its_log_line(tmp_path: Path) -> None:
    run = make(tmp_path / "run", 1e-3, 40)
    assert comparison.points(run, "eval/mlm_loss", "data/tokens", 1e6) == [(20.0, 9.48), (40.0, 9.46)]
    assert comparison.points(run, "train/loss", "time/train_seconds", 60) == [
        (1.0, 8.99),
        (2.0, 8.98),
        (3.0, 8.97),
        (4.0, 8.96),
    ]


def test_several_runs_need_a_file_to_write(tmp_path: Path, capsys) -> None:
    runs = [str(make(tmp_path / name, 1e-3, 20)) for name in ("a", "b")]
    assert report.main(runs) == 2
    assert "--output is missing: name the file for the report of " in capsys.readouterr().err
    with pytest.raises(ValueError, match="is not a run folder"):
        report.read_run(tmp_path)
