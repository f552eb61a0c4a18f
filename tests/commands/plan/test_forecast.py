"""Forecasts add up, and the command prints them; a mistake is one line."""

import re

import pytest

from megabert import config as configuration
from megabert.commands import plan
from megabert.commands.plan import forecast as planner
from megabert.commands.plan import workload
from megabert.commands.plan.forecast import forecast
from megabert.commands.plan.published import nearest
from megabert.commands.plan.quality import target_samples
from megabert.commands.plan.step_time import DEVICES, Fabric
from tests.commands.plan.cases import FABRIC, H100, TINY
from tests.helpers.refusal import refusal

LARGE = ["model.vocab_size=30000", "model.max_positions=128"]
COMMAND = ["--config", "large_phase1", "--gpus", "h100", "--network", "8x400", *LARGE]
TARGET = ["--config", "large_phase2", "--gpus", "h100", "model.vocab_size=30000", "model.max_positions=512"]


def job(*overrides: str) -> planner.ForecastJob:
    return planner.build_job(configuration.load("large_phase1", [*LARGE, *overrides]))


def test_the_work_of_an_update_is_dealt_out() -> None:
    whole, share = job(), job().share(512)
    assert share.micro_steps == 1 and share.batch.tokens == 128 * 128
    assert share.batch.tokens * share.micro_steps * 512 == whole.counts.tokens == 65_536 * 128
    assert share.rows_seconds == pytest.approx(128 * 128 / (45_812 * 128 * 2))
    # the largest share, where they are not equal
    small = job("batch.global_size=100", "batch.micro_size=64")
    points = forecast(small, [8, 64, 128, 256], H100, FABRIC)
    assert [(point.micro_size, point.micro_steps) for point in points] == [(13, 1), (2, 1), (1, 1), (1, 1)]
    assert points[3].step.products == points[2].step.products > 0
    # pairs are those that the backend computes
    rows, length, causal = 65_536, 128, ("data.masking.strategy=causal", "model.nsp=false")
    assert whole.counts.pairs == job("ops.attention=sdpa").counts.pairs == 24 * rows * length**2
    assert job(*causal).counts.pairs == 24 * rows * length * (length + 1) / 2
    assert job(*causal, "ops.attention=sdpa").counts.pairs == 24 * rows * length**2


def test_a_forecast_adds_up() -> None:
    points = forecast(job(), [8, 64, 512], H100, FABRIC)
    for point in points:
        assert point.step.seconds == pytest.approx(sum(vars(point.step).values()))
        assert point.seconds == pytest.approx(7_038 * point.step.seconds)
        assert point.size * point.micro_size * point.micro_steps == 65_536
    assert 0.8 < 8 * points[0].step.seconds / (512 * points[2].step.seconds) < 1.0
    timed = forecast(job("schedule.name=budget", "schedule.budget_minutes=60"), [8], H100, FABRIC)
    assert timed[0].seconds == 3_600
    tokens = job("schedule.by=tokens", f"schedule.budget_tokens={100 * 65_536 * 128}")
    (point,) = forecast(tokens, [8], H100, FABRIC)
    assert point.seconds == pytest.approx(100 * point.step.seconds)


def test_phases_share_tokens_and_the_limit_of_updates(capsys) -> None:
    """Batches of 64 and 256 rows of 128 tokens, half of 1,146,880,000 tokens each, by hand."""
    phases = [f"{{share=0.5, batch={{global_size={size}}}, data={{seq_len=128}}}}" for size in (64, 256)]
    command = [*TINY, "model.nsp=false", "precision=bf16", f"phases=[{', '.join(phases)}]", "schedule.by=tokens"]
    for limit, steps in ((100_000, ["70,000", "17,500"]), (80_000, ["70,000", "10,000"])):
        given = [*command, "schedule.budget_tokens=1146880000", f"schedule.total_steps={limit}"]
        assert plan.main(given) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[1] for line in lines if line.startswith("run ")] == steps
        assert plan.main(["--gpus", "h100", *given]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[-3] for line in lines if re.match(" +8 +[0-9]+ x ", line)] == steps


def test_the_table_of_a_forecast_names_what_binds() -> None:
    whole = job()
    points = forecast(whole, [8, 64], H100, FABRIC)
    head, _, line = (re.split("  +", line.strip()) for line in planner.table(whole, points, H100).splitlines()[:3])
    cells = dict(zip(head, line, strict=True))
    mfu = whole.operations / (points[1].step.seconds * 64 * 989e12)
    assert cells["MFU"] == f"{mfu:.1%}" and cells["rows x steps"] == "128 x 8"
    assert cells["updates"] == "7,038"
    assert cells["GPU-hours"] == f"{64 * points[1].seconds / 3_600:,.0f}"
    assert cells["efficiency"] == f"{points[0].step.seconds / (8 * points[1].step.seconds):.1%}"
    # micro-steps that the host binds
    small = job("batch.micro_size=64")
    text = planner.table(small, forecast(small, [8, 64], H100, FABRIC), H100).splitlines()
    # 24 layers of 60 kernels and 12 sums of gradients, 19 us each
    assert "at 8 GPUs the host may be the limit: a micro-step of 64 rows runs 5" in text[-1]
    assert "launching its kernels takes 33 ms of Python; take a larger batch.micro_size" in text[-1]
    assert planner.host_bound(small, forecast(small, [8], DEVICES["a100"], FABRIC)) == ""


@pytest.mark.parametrize(("preset", "length", "gib"), [
    ("base", 128, 16), ("base_modern", 128, 80), ("large_24h", 128, 40), ("large_modern", 128, 80),
    ("large_phase1", 128, 24), ("large_phase2", 512, 24),
])  # fmt: skip
def test_presets_fill_gpus_and_fit(preset: str, length: int, gib: float) -> None:
    config = configuration.load(preset, ["model.vocab_size=30000", f"model.max_positions={length}"])
    assert workload.needed(config, length, 8) <= (1 - workload.SPARE) * gib * workload.GIB
    whole = planner.build_job(config)
    for name in ("a100", "h100", "h200"):
        assert planner.host_bound(whole, forecast(whole, [1], DEVICES[name], FABRIC)) == ""


def test_the_command(capsys) -> None:
    assert plan.main([*COMMAND, "--over", "8", "64"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("projection, not measured: h100, nodes of 8, network 8x400: 65,536 rows of 128")
    assert "milliseconds of an update" in text
    assert plan.main(["--config", "large_phase1", "--gpus", "a100", *LARGE, "--over", "8", "64"]) == 0
    assert "a100, nodes of 8, network 8x200 (assumed, " in capsys.readouterr().out.splitlines()[0]
    assert plan.main([*TINY, "--world-size", "4"]) == 0
    assert "64 rows = 16 x 4 ranks x 1 micro-steps" in capsys.readouterr().out


@pytest.mark.parametrize(("preset", "rows", "length"), [
    ("large_phase1", 65_536, 128), ("large_phase1_80gb", 65_536, 128), ("large_phase1_141gb", 65_536, 128),
    ("large_phase2", 32_768, 512), ("large_phase2_80gb", 32_768, 512), ("large_phase2_141gb", 32_768, 512),
    ("large_24h", 4_096, 128), ("large_modern", 4_096, 128), ("base_modern", 1_024, 128), ("base", 256, 128),
    ("babylm_100m", 256, 128), ("babylm_10m", 64, 128),
])  # fmt: skip
def test_presets_plan_rows_of_their_recipe(preset: str, rows: int, length: int, capsys) -> None:
    """README's command, without a dataset: batch and row length of the published recipes."""
    assert plan.main(["--config", preset, "--gpus", "h100", "--over", "8", "64"]) == 0
    text = capsys.readouterr().out
    assert f"{rows:,} rows of {length} tokens an update" in text.splitlines()[0]
    assert f"full rows of {length} tokens assumed (data.seq_len)" in text
    seconds, _, tokens = re.findall(r"^ +8 .*? x \d+ +(\S+) +(\S+) +(\S+)", text, re.M)[0]
    assert float(seconds) * float(tokens.replace(",", "")) == pytest.approx(rows * length, rel=1e-3)


def test_the_target_of_mlperfs_task(capsys) -> None:
    assert target_samples(1_536) == pytest.approx(0.903 * 2_778_000)
    assert target_samples(256, 2022) == pytest.approx(1.064 * 2_553_000) == target_samples(64, 2022)
    assert 2_625_000 < target_samples(900) / 0.903 < 2_778_000
    assert plan.main([*TARGET, "batch.global_size=2304", "--price", "2.5", "--over", "8", "--compare"]) == 0
    text = capsys.readouterr().out
    # 2,304 rows of 512 tokens are 4,635 samples of 254.5
    target = text[text.index("to MLPerf's target") :].splitlines()
    assert "batch of 4,635 of its samples" in target[0]
    cells = dict(zip(target[2].split(), target[3].split(), strict=True))
    whole = planner.build_job(configuration.load("large_phase2", [*TARGET[4:], "batch.global_size=2304"]))
    (point,) = forecast(whole, [8], H100, Fabric(8))
    hours = target_samples(whole.update.tokens / 254.5) * 254.5 / whole.update.tokens * point.step.seconds / 3_600
    assert float(cells["minutes"]) == pytest.approx(60 * hours, abs=0.05)
    assert float(cells["kWh"]) == pytest.approx(8 * hours * 0.7, abs=0.05)
    assert float(cells["cost"]) == pytest.approx(8 * hours * 2.5, abs=0.005)
    assert text.count("MLPerf 4.1") == 3 and "this forecast" in text
    assert plan.main(TARGET) == 0
    assert "published are 256 to 14,336, set batch.global_size" in capsys.readouterr().out


def test_the_nearest_published_runs() -> None:
    assert {(run.gpu, run.gpus) for run in nearest("h100", 512, 2)} == {("h100", 512), ("h100", 768)}
    # of a GPU with few rows its generation's follow
    assert [run.gpu for run in nearest("a5000", 4)] == ["a5000", "a5000", "a100-pcie"]


def test_a_mistake_is_one_line(capsys) -> None:
    """Others are in tests/test_cli.py."""
    for command, options, message in (
        (COMMAND, "--over 16 --network=", "16 GPUs in nodes of 8 need a network: give --network"),
        (COMMAND, "precision=fp32", "precision=fp32: --gpus forecasts 16-bit training alone"),
        (COMMAND, "--price 2", "--price is for MLPerf's target, which this run does not have"),
        *((COMMAND, f"--{name} 0", f"--{name} 0: give a number above 0") for name in ("price", "link")),
        (TINY, "--compare", "--compare belongs to a forecast"),
        (TINY, "--nodes-of 8", "--nodes-of belongs to a forecast"),
        (TINY, "--link 16", "--link belongs to a forecast"),
        (COMMAND, "--memory-gib 79", "--memory-gib belongs to a plan without --gpus"),
        (COMMAND, "--this-cpu", "--this-cpu belongs to a plan without --gpus"),
        (COMMAND, "--world-size 1", "--world-size belongs to a plan without --gpus"),
        (COMMAND, "--deepspeed_config x.json", "--deepspeed_config belongs to a plan without --gpus"),
    ):
        assert refusal(capsys, plan.main, *command, *options.split()).startswith(f"error: {message}")
