"""Settings of several runs: seeds, rates, ranges; means and deviations; output folders of other commands."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from megabert.common.arguments import Parser
from megabert.finetune import run, settings
from megabert.finetune.settings import Settings


def parse(*argv: str) -> argparse.Namespace:
    parser = Parser()
    settings.add_options(parser, seeds=1, rates=[5e-5])
    return parser.parse_args(argv)


def test_runs_are_every_rate_and_seed() -> None:
    runs = settings.runs_of(parse("--lr", "2e-5", "3e-5", "--seeds", "2", "--epochs", "4"), 32, 8)
    assert list(runs) == ["lr2e-05-seed1", "lr2e-05-seed2", "lr3e-05-seed1", "lr3e-05-seed2"]
    assert runs["lr3e-05-seed2"] == Settings(epochs=4, lr=3e-5, seed=2, max_length=32, stride=8)
    ((name, chosen),) = settings.runs_of(parse("--max-length", "16"), 32, 8).items()
    assert (name, chosen.max_length, chosen.stride, chosen.lr) == ("seed1", 16, 8, 5e-5)
    assert list(settings.runs_of(parse("--seeds", "7", "9"), 32, 8)) == ["seed7", "seed9"]


@pytest.mark.parametrize(
    "option",
    ["--seeds 0", "--seeds 1 1", "--seeds -1", "--lr 0", "--lr 1e-05 1e-05", "--batch 0", "--dropout 1", "--max-length 7",
     "--stride 0", "--limit -1", "--log-interval 0"],
)  # fmt: skip
def test_option_out_of_range_is_named(option: str) -> None:
    with pytest.raises(ValueError, match=f"^{option}"):
        settings.runs_of(parse(*option.split()), 32, 8)


def result(seed: int, lr: float, accuracy: float, f1: float, seconds: float = 10.0) -> dict[str, Any]:
    return {
        "settings": {"seed": seed, "lr": lr},
        "scores": {"dev": {"accuracy": accuracy, "f1": f1}, "test": {"accuracy": 0.5, "f1": 0.25}},
        "seconds": seconds,
    }


def test_point_is_mean_and_deviation_of_seeds() -> None:
    runs = [result(1, 2e-5, 0.70, 0.9), result(2, 2e-5, 0.74, 0.7), result(1, 5e-5, 0.80, 0.1, 30.0)]
    best, other = run.summarise(runs, "accuracy")
    assert best["point"] == {"lr": 5e-5} and best["runs"] == 1 and best["seconds"] == 30
    assert best["scores"]["dev"]["accuracy"] == {"mean": 0.80, "std": 0.0}
    assert other["scores"]["dev"]["accuracy"]["mean"] == pytest.approx(0.72)
    assert other["scores"]["dev"]["accuracy"]["std"] == pytest.approx(0.0282842712)  # 0.04 / sqrt(2)
    assert [row["point"]["lr"] for row in run.summarise(runs, "f1")] == [2e-5, 5e-5]
    lines = run.table([best, other]).splitlines()
    assert lines[0].split() == [
        "lr",
        "runs",
        "dev",
        "accuracy",
        "dev",
        "f1",
        "test",
        "accuracy",
        "test",
        "f1",
        "seconds",
    ]
    assert lines[2].split()[:5] == ["2e-05", "2", "0.7200", "±", "0.0283"]


def test_output_folder_of_another_command_is_refused(tmp_path: Path, world) -> None:
    run.claim(tmp_path / "out", {"task": "sst2", "epochs": 3}, world)
    run.claim(tmp_path / "out", {"task": "sst2", "epochs": 3}, world)
    for changed, word in (({"epochs": 9}, "epochs=3, this command says 9"), ({"extra": 1}, "extra=None")):
        with pytest.raises(ValueError, match=word):
            run.claim(tmp_path / "out", {"task": "sst2", "epochs": 3} | changed, world)
    assert json.loads((tmp_path / "out" / run.COMMON).read_text()) == {"task": "sst2", "epochs": 3}


def test_folder_with_other_content_is_left_alone(tmp_path: Path, world) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ValueError, match=r"thesis\.tex"):
        run.claim(tmp_path, {}, world)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]
    (tmp_path / "thesis.tex").rename(tmp_path / run.COMMON)
    with pytest.raises(ValueError, match="damaged"):
        run.claim(tmp_path, {}, world)
