"""Ablations train every variant once, go on where they were, and say what they did not measure."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench_ablations as bench
from benchmarks import bench_distill
from benchmarks.common.commands import score_of
from tests.integration.conftest import command

TINY = (
    *("model.layers=1", "model.hidden=32", "model.heads=2", "batch.global_size=8", "batch.micro_size=8"),
    *("eval.rows=32", "eval.interval=2", "log.interval=1", "data.workers=0", "peak_tflops=1.0"),
    *("log.tensorboard=false", "checkpoint.asynchronous=false"),
)


def report() -> dict[str, Any]:
    """As after two of three variants, the second without its fine-tuning."""
    curve = [{"seconds": 60.0 * i, "step": i, bench.LOSS: 7.0 - i, bench.ACCURACY: 0.1 * i} for i in range(3)]
    one = {"command": "c", "curve": curve, "final": curve[-1], "tokens_per_second": 1234.5, "tasks": {}}
    first = one | {"token15": {bench.LOSS: 5.25, bench.ACCURACY: 0.125}}
    first = first | {"tasks": {"sst2": {"metric": "accuracy", "runs": 3, "mean": 0.75, "std": 0.0123}}}
    settings = {"set": "objective", "config": "mini", "budget": "2 minutes", "threads": 2, "tasks": ["sst2 a b"]}
    return {"settings": settings, "variants": {"MLM + NSP": first, "left to right": one | {"token15": None}}}


def test_the_table_says_what_is_measured_and_what_is_not() -> None:
    lines = bench.table(report()).splitlines()
    assert lines[0].endswith("| loss at token 15% | accuracy at token 15% | sst2 |")
    assert lines[2] == (
        "| MLM + NSP | 2 | 2.0 | 1,234 | 5.0000 | 0.2000 | 5.2500 | 0.1250 | accuracy 0.7500 ± 0.0123 |"
    )
    assert lines[3].startswith("| MLM | not measured |") and lines[3].count("not measured") == 8
    assert "| none: never sees a [MASK] | none | not measured |" in lines[4]
    assert lines[5].startswith("| not measured: tasks other than those here; other sizes and seeds |")
    assert len({line.count("|") for line in lines[:6]}) == 1 and "cannot be compared" in lines[-1]


def test_the_plot_has_a_line_a_variant_and_the_scores(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    bench.plot(report(), tmp_path / "plot.svg")
    text = (tmp_path / "plot.svg").read_text()
    for shown in ("MLM + NSP", "left to right", "dev score after fine-tuning", "objective: mini, 2 minutes"):
        assert shown in text


def test_every_variant_is_a_configuration() -> None:
    from megabert import config

    for variants in bench.SETS.values():
        assert len(variants) > 1
        found = [config.load("mini", list(overrides)) for overrides in variants.values()]
        assert len({cfg.digest() for cfg in found}) == len(variants)
    assert config.load("mini", list(bench.CAUSAL)).data.masking.causal


def test_mistakes_are_one_line(tmp_path: Path, capsys, dataset: Path) -> None:
    base = ["--data", str(dataset), "--set", "rate", "--steps", "2", "--json", str(tmp_path / "a.json")]
    made = copy.deepcopy(report())
    made["settings"] |= {"dataset": "d", "overrides": []}
    (tmp_path / "b.json").write_text(json.dumps(made))
    for args, said in (
        ([*base, "--tasks", "sst2 train.tsv"], "write 'TASK TRAIN_FILE DEV_FILE"),
        ([*base, "--tasks", "rte a b", "rte a c"], "'rte a b' has its name"),
        ([*base[:-1], str(tmp_path / "b.json")], "was made with set='objective', this command says 'rate'"),
        (["--data", str(tmp_path), *base[2:]], "manifest.json"),
    ):
        assert bench.main(args) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1
    assert not (tmp_path / "a.json").exists()


def test_a_students_table(tmp_path: Path) -> None:
    summary = {
        "settings": {"task": "sst2", "metrics": ["accuracy"]},
        "points": [{"runs": 3, "scores": {"dev": {"accuracy": {"mean": 0.8, "std": 0.01}}}}],
    }
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    score = score_of(tmp_path / "summary.json")
    assert score == {"task": "sst2", "metric": "accuracy", "runs": 3, "mean": 0.8, "std": 0.01}
    (tmp_path / "wrong.json").write_text("[]")
    with pytest.raises(ValueError, match="is no summary"):
        score_of(tmp_path / "wrong.json")
    teacher: dict[str, Any] = {"layers": 4, "parameters": 1000, "sequences_per_second": {"p50": 50.0}}
    teacher |= {"eval/mlm_loss": 4.0, "eval/mlm_accuracy": 0.25}
    student = teacher | {"layers": 2, "parameters": 700, "sequences_per_second": {"p50": 90.0}}
    means = {"teacher": 0.8, "student": 0.78, bench_distill.RANDOM: 0.75, bench_distill.RANDOM_TEACHER: 0.7}
    rows: dict[str, Any] = dict.fromkeys(bench_distill.ROWS)
    assert bench_distill.worth(rows | {"teacher": score}) == {}
    rows |= {name: score | {"mean": mean} for name, mean in means.items()}
    worth = bench_distill.worth(rows)
    assert worth == {"kept": 0.975, "random_keeps": 0.9375, "gain_kept": 0.3}
    text = bench_distill.table({"sides": {"teacher": teacher, "student": student}, "scores": rows, **worth})
    assert "| sequences/s, forward | 50.0 | 90.0 | 1.800 |" in text
    assert "| sst2 accuracy, dev |  |  | over the teacher's |" in text
    assert "| random, student's size | 0.7500 ± 0.0100 |  | 0.9375 |" in text
    assert "| trained without the teacher | not measured |  |  |" in text
    assert "| kept of the gain over random weights | 0.3000 |  |  |" in text
    assert len({line.count("|") for line in text.splitlines()}) == 1


@pytest.mark.slow
def test_a_set_is_run_once_and_a_student_is_compared(dataset: Path, tmp_path: Path) -> None:
    head = ("benchmarks/bench_ablations.py", "--data", dataset, "--set", "objective", "--threads", 1)
    files = ("--run", tmp_path / "runs", "--json", tmp_path / "r.json", "--plot", tmp_path / "r.svg")
    done = command(*head, "--steps", 4, *files, *TINY)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "r.json").read_text())
    assert list(found["variants"]) == list(bench.SETS["objective"])
    for variant, result in found["variants"].items():
        assert [point["step"] for point in result["curve"]] == [0, 2, 4]
        assert (result["token15"] is None) == (variant == "left to right")
        assert "megabert/train.py --config mini" in result["command"]
    plain = found["variants"]["MLM + NSP"]  # whose own objective is that one mask, in bf16
    assert plain["token15"][bench.LOSS] == pytest.approx(plain["final"][bench.LOSS], rel=2e-3)
    assert done.stdout.count("\n| ") >= 4 and (tmp_path / "r.svg").stat().st_size > 5000
    again = command(*head, "--steps", 4, *files, *TINY)
    assert again.returncode == 0 and again.stdout == done.stdout and "training" not in again.stderr
    other = command(*head, "--steps", 5, *files, *TINY)
    assert other.returncode == 2 and "budget='4 updates'" in other.stderr

    run = tmp_path / "runs/objective/MLM"
    compared = ("benchmarks/bench_distill.py", "--teacher", run, "--student", run, "--data", dataset)
    for name, count in (("train", 24), ("dev", 8)):
        lines = [f"{i % 2}\t{('good', 'bad')[i % 2]} text {i}" for i in range(count)]
        (tmp_path / f"{name}.tsv").write_text("\n".join(["label\tsentence", *lines]) + "\n")
    task = f"sst2 {tmp_path / 'train.tsv'} {tmp_path / 'dev.tsv'} --epochs 1 --batch 8"
    compared = (*compared, "--task", task, "--work", tmp_path / "rows")
    done = command(*compared, "--rounds", 3, "--json", tmp_path / "d.json", "--threads", 1)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "d.json").read_text())
    assert 0.5 < result["ratio"] < 2 and "| layers | 1 | 1 | 1.000 |" in done.stdout
    assert all(0 <= result["scores"][name]["mean"] <= 1 for name in bench_distill.ROWS)
    assert result["kept"] == 1.0  # a model against itself
    alone = json.loads((tmp_path / "rows/alone/config.json").read_text())["config"]["distill"]
    assert (alone["soft"], alone["cosine"]) == (0.0, 0.0) and alone["teacher"] == str(run)
    assert result["sides"]["teacher"]["eval/mlm_loss"] == result["sides"]["student"]["eval/mlm_loss"]
