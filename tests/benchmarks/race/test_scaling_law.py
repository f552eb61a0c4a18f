"""The fit of loss against compute: what was put in comes out, and its band is as wide as the seeds lie apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import scaling_law
from benchmarks.race import training
from benchmarks.scaling_law import Law, Size

TRUE = Law(40.0, 0.06)


def sizes(noise: float) -> list[Size]:
    computes = (1e14, 1e15, 1e16)
    return [
        Size(f"w{n}", c, tuple(TRUE.loss(c) * (1 + noise * offset) for offset in (-1, 0, 1)))
        for n, c in enumerate(computes)
    ]


def test_a_law_without_noise_is_found_exactly() -> None:
    whole, again = scaling_law.fits(sizes(0.0), draws=20)
    assert whole.scale == pytest.approx(40.0) and whole.power == pytest.approx(0.06)
    assert {round(law.power, 9) for law in again} == {0.06}
    assert whole.compute(whole.loss(3e18)) == pytest.approx(3e18)


def test_the_band_holds_the_law_and_grows_with_the_noise_and_with_the_distance() -> None:
    near, far = [], []
    for noise in (0.005, 0.02):
        _, again = scaling_law.fits(sizes(noise), draws=400)
        for compute, widths in ((1e15, near), (1e20, far)):
            low, high = scaling_law.band([law.loss(compute) for law in again])
            assert low < TRUE.loss(compute) < high
            widths.append((high - low) / TRUE.loss(compute))
    assert near[0] < near[1] and far[0] < far[1]
    assert far[0] > 2 * near[0] and far[1] > 2 * near[1]


def test_one_size_is_no_law() -> None:
    with pytest.raises(ValueError, match="two sizes"):
        scaling_law.fit([(1e14, 5.0), (1e14, 5.1)])


def records(path: Path) -> Path:
    def entry(name: str, compute: float, factor: float, **more: Any) -> dict[str, Any]:
        seeds = {
            str(seed): {"tokens": 1e6, "flops_per_token": compute / 1e6, "loss": factor * TRUE.loss(compute)} | more
            for seed in (42, 43)
        }
        return {
            "track": "5m-tokens", "recipe": name, "digest": name, "system": "megabert", "seeds": seeds,
            "data": {"documents": "d"},
        }  # fmt: skip

    entries = [entry(f"old-{n}", c, 1.0) for n, c in enumerate((1e14, 1e15))]
    entries += [entry(f"new-{n}", c, 0.9) for n, c in enumerate((1e14, 1e15))]
    entries += [entry("silent", 1e14, 1.0, flops_per_token=None)]
    path.write_text(json.dumps({"entries": entries}))
    return path


def test_the_command_says_what_the_laws_predict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, picture, out = records(tmp_path / "records.json"), tmp_path / "law.svg", tmp_path / "out.json"
    sides = ["--old", "old-1", "old-0", "--new", "new-0", "new-1"]
    argv = [*sides, "--at", "large=1e20", "--records", str(file), "--plot", str(picture), "--json", str(out)]
    assert scaling_law.main(argv) == 0
    row = json.loads(out.read_text())["predicted"]["large"]
    assert row["old"]["loss"] == pytest.approx(TRUE.loss(1e20)) and row["new"]["loss"] == pytest.approx(
        0.9 * TRUE.loss(1e20)
    )
    assert row["less_compute"] == pytest.approx(0.9 ** (-1 / 0.06))
    assert "predicted, large, 1e+20 FLOPs" in capsys.readouterr().out
    assert picture.read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("old", "said"),
    [
        ("absent", "absent: name one track, RECIPE@TRACK"),
        ("old-0@9m-tokens", "has runs of it on 5m-tokens"),
        ("silent", "do not say their FLOPs"),
    ],
)
def test_a_recipe_without_usable_runs_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, said: str
) -> None:
    file = records(tmp_path / "records.json")
    assert scaling_law.main(["--old", old, "--new", "new-0", "--records", str(file)]) == 2
    assert said in capsys.readouterr().err


def test_a_recipe_with_runs_on_two_tracks_is_told_apart_by_its_track(tmp_path: Path) -> None:
    file = records(tmp_path / "records.json")
    entries = json.loads(file.read_text())["entries"]
    first, *_ = entries
    seeds = {seed: run | {"loss": 2.0} for seed, run in first["seeds"].items()}
    entries.append(first | {"track": "1m-tokens", "seeds": seeds})
    file.write_text(json.dumps({"entries": entries}))
    kept = scaling_law.Records(file)
    with pytest.raises(ValueError, match="has runs of it on 5m-tokens, 1m-tokens"):
        scaling_law.sizes_of(kept, ["old-0"])
    (small,) = scaling_law.sizes_of(kept, ["old-0@1m-tokens"])
    (large,) = scaling_law.sizes_of(kept, ["old-0@5m-tokens"])
    assert small.losses == (2.0, 2.0) and large.losses == pytest.approx([TRUE.loss(1e14)] * 2)


def test_flops_a_token_are_the_mean_over_updates(tmp_path: Path) -> None:
    """50 updates of 2 TFLOP a second at 1,000 tokens a second, then 100 of half as many FLOPs a token."""
    lines = [
        {"step": 50, "perf/tflops_per_device": 2.0, "perf/tokens_per_sec": 1000.0},
        {"step": 50, "eval/mlm_loss": 5.0},
        {"step": 150, "perf/tflops_per_device": 2.0, "perf/tokens_per_sec": 2000.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert training.flops(tmp_path) == pytest.approx((50 * 2e9 + 100 * 1e9) / 150)
