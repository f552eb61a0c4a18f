from __future__ import annotations

from typing import Any

import pytest

from megabert.finetune.benchmark import published, suites, summary
from megabert.finetune.tasks import PRESETS


def test_the_interval_is_students_over_the_seeds() -> None:
    found = summary.figures([0.70, 0.72, 0.74])
    assert found["mean"] == pytest.approx(0.72) and found["std"] == pytest.approx(0.02)
    low, high = found["interval"]
    # t of 2 degrees of freedom at 97.5% is 4.302653 (any table); 4.302653 * 0.02 / sqrt(3) = 0.0496828
    assert low == pytest.approx(0.72 - 0.0496828, abs=1e-7) and high == pytest.approx(0.72 + 0.0496828, abs=1e-7)
    alone = summary.figures([0.5])
    assert (alone["mean"], alone["std"], alone["interval"]) == (0.5, None, None)


def task(**changes: Any) -> dict[str, Any]:
    scores = {"RTE": {"accuracy": summary.figures([0.60, 0.62])}}
    return {
        **{"title": "RTE", "point": {"lr": 2e-5}, "points": 4, "scores": scores, "limit": 0},
        **{"reported_on": {"RTE": "dev, 277"}, "decided_on": "held out of train, 249", "published_way": False},
        **changes,
    }


def test_the_page_has_figures_and_published_rows_with_their_sources() -> None:
    page = summary.page("glue", "runs/mini", [task()])
    assert page.startswith("# GLUE: runs/mini\n")
    (row,) = [line for line in page.splitlines() if line.startswith("| RTE | accuracy | 61.0 | 1.4 |")]
    assert row.endswith("| 48.3 to 73.7 | 2 | lr 2e-05 (4 tried) | dev, 277 | held out of train, 249 |")
    assert "| RTE | accuracy | 61.0 | 70.1 | 66.4 | 62.2 | 61.8 | 57.9 | 57.2 |" in page
    assert "BERT-LARGE [1] | BERT-BASE [1] | BERT-Medium [2]" in page and "[1] Devlin et al. 2019" in page
    assert "GLUE's test server, this model's of labelled dev" in page
    assert "too high" not in page and "--limit" not in page
    assert "Student's t" in page


def test_a_choice_on_what_is_reported_and_a_cut_are_said() -> None:
    page = summary.page("glue", "m", [task(published_way=True, decided_on="what is reported", limit=100)])
    assert "| dev, 277 | what is reported |" in page
    assert "**The reported examples also chose" in page and "`--limit`" in page
    assert "published" not in summary.page("own", "m", [task()]).replace("published dev scores", "")


def test_published_rows_are_of_rows_and_metrics_that_we_print() -> None:
    titles = {title: name for name, title in [*suites.GLUE.items(), *suites.SQUAD.items()]}
    for suite, models in published.MODELS.items():
        for model in models:
            assert model.source and model.measured_on
            for row, metric in model.scores:
                name = titles.get(row) or titles[row.rpartition("-")[0]]
                assert metric in PRESETS[name].metrics, (suite, row, metric)
                assert 0 <= model.scores[row, metric] <= 100


def test_published_rows_have_their_published_averages() -> None:
    """Devlin et al. average the nine columns, Turc et al. the nine tasks; all figures are rounded to one decimal."""
    averages = {"BERT-LARGE": 82.1, "BERT-BASE": 79.6, "BERT-Medium": 73.5, "BERT-Small": 71.2}
    averages |= {"BERT-Mini": 65.8, "BERT-Tiny": 64.2}
    for model in published.MODELS["glue"]:
        by_task: dict[str, list[float]] = {}
        for (row, _), score in model.scores.items():
            whole = row if "table 1" in model.source else row.removesuffix("m").removesuffix("-m").removesuffix("-")
            by_task.setdefault(whole, []).append(score)
        assert len(by_task) == 9
        mean = sum(sum(of) / len(of) for of in by_task.values()) / 9
        assert mean == pytest.approx(averages[model.name], abs=0.1), model.name
