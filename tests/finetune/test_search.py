"""Search: grids, seeds, means and deviations, output folders of other commands."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megabert.finetune import search, settings
from megabert.finetune.settings import Settings


def test_grid_is_every_combination_and_seed() -> None:
    grid = settings.parse_grid(["lr=2e-5,3e-5", "batch=16,32"])
    assert grid == {"lr": [2e-5, 3e-5], "batch": [16, 32]}
    runs = settings.combinations(Settings(epochs=4), grid, [1, 2])
    assert list(runs)[:3] == ["lr2e-05-batch16-seed1", "lr2e-05-batch16-seed2", "lr2e-05-batch32-seed1"]
    assert len(runs) == 8
    assert runs["lr3e-05-batch16-seed2"] == Settings(epochs=4, lr=3e-5, batch=16, seed=2)
    assert list(settings.combinations(Settings(), {}, [7])) == ["seed7"]


@pytest.mark.parametrize(
    "text", ["lr", "lr=", "lr=a", "batch=1.5", "head=linear", "lr=1e-5,1e-5", "seed=1", "lr=1e-5,"]
)
def test_bad_grid_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=f"--grid {text}"):
        settings.parse_grid([text])
    with pytest.raises(ValueError, match="once"):
        settings.parse_grid(["lr=1e-5", "lr=2e-5"])


def test_seeds_are_counted_or_named() -> None:
    assert settings.parse_seeds([3]) == [1, 2, 3]
    assert settings.parse_seeds([5, 9]) == [5, 9]
    for wrong in ([0], [1, 1], [-1]):
        with pytest.raises(ValueError, match="--seeds"):
            settings.parse_seeds(wrong)


def result(seed: int, lr: float, accuracy: float, f1: float, seconds: float = 10.0) -> dict[str, Any]:
    return {
        "settings": {"seed": seed, "lr": lr},
        "scores": {"dev": {"accuracy": accuracy, "f1": f1}, "test": {"accuracy": 0.5, "f1": 0.25}},
        "seconds": seconds,
    }


def test_point_is_mean_and_deviation_of_seeds() -> None:
    runs = [result(1, 2e-5, 0.70, 0.9), result(2, 2e-5, 0.74, 0.7), result(1, 5e-5, 0.80, 0.1, 30.0)]
    best, other = search.summarise(runs, ["lr"], "accuracy")
    assert best["point"] == {"lr": 5e-5} and best["runs"] == 1 and best["seconds"] == 30
    assert best["scores"]["dev"]["accuracy"] == {"mean": 0.80, "std": 0.0}
    assert other["scores"]["dev"]["accuracy"]["mean"] == pytest.approx(0.72)
    assert other["scores"]["dev"]["accuracy"]["std"] == pytest.approx(0.0282842712)  # 0.04 / sqrt(2)
    assert [row["point"]["lr"] for row in search.summarise(runs, ["lr"], "f1")] == [2e-5, 5e-5]
    lines = search.table([best, other]).splitlines()
    assert lines[0].split() == [
        *("lr", "runs", "dev", "accuracy", "dev", "f1", "test", "accuracy", "test", "f1", "seconds")
    ]
    assert lines[2].split()[:5] == ["2e-05", "2", "0.7200", "±", "0.0283"]
    assert len({len(line) for line in lines}) == 1


def common(**changes: Any) -> dict[str, Any]:
    chosen = replace(Settings(), **{k: v for k, v in changes.items() if k != "facts"})
    facts = {"task": "sst2", "text": ["sentence"]} | changes.get("facts", {})
    return search.common_settings(chosen, {"lr": [1e-5, 2e-5]}, facts)


def test_output_folder_takes_more_seeds_and_values(tmp_path: Path) -> None:
    search.claim(tmp_path, common())
    before = (tmp_path / search.COMMON).read_text()
    search.claim(tmp_path, common(seed=9, lr=1e-3))
    assert (tmp_path / search.COMMON).read_text() == before
    assert "seed" not in json.loads(before) and "lr" not in json.loads(before)


@pytest.mark.parametrize(
    "changed, word",
    [
        ({"epochs": 9}, "epochs=3, this command says 9"),
        ({"facts": {"task": "rte"}}, "task='sst2', this command says 'rte'"),
        ({"facts": {"extra": 1}}, "extra=None"),
    ],
)
def test_output_folder_of_another_command_is_refused(changed: Any, word: str, tmp_path: Path) -> None:
    search.claim(tmp_path, common())
    with pytest.raises(ValueError, match=word):
        search.claim(tmp_path, common(**changed))


def test_folder_with_other_content_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ValueError, match=r"thesis\.tex"):
        search.claim(tmp_path, common())
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]
    search.refuse(tmp_path / "new", common())
    assert not (tmp_path / "new").exists()
    (tmp_path / "thesis.tex").rename(tmp_path / search.COMMON)
    with pytest.raises(ValueError, match="damaged"):
        search.claim(tmp_path, common())
