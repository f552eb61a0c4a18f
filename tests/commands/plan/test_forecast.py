"""Forecasts of a run: hand-made sums, the command, and one line for each mistake."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from megabert import config as configuration
from megabert.commands.plan import __main__ as plan
from megabert.commands.plan import forecast as planner
from megabert.commands.plan.devices import DEVICES, Fabric
from megabert.commands.plan.failures import daly, goodput
from megabert.commands.plan.forecast import Prices, Reliability, forecast
from megabert.commands.plan.plot import svg

FABRIC = Fabric.of(8, "8x400")
LARGE = ["model.vocab_size=30000", "model.max_positions=128"]
COMMAND = ["--config", "large_phase1", "--gpus", "h100", "--network", "8x400", *LARGE]


def job(*overrides: str) -> planner.Job:
    return plan.job_of(configuration.load("large_phase1", [*LARGE, *overrides]))


def test_the_work_of_an_update_is_dealt_out() -> None:
    whole, share = job(), job().share(512)
    assert share.micro_steps == 2 and share.batch.tokens == 64 * 128
    assert share.batch.tokens * share.micro_steps * 512 == whole.counts.tokens == 65_536 * 128
    assert share.rows_seconds == pytest.approx(128 * 128 / (45_812 * 128 * 2))
    assert job().share(1_024).micro_steps == 1
    small = job("batch.global_size=1024").share(64)
    assert small.micro_steps == 1 and small.batch.tokens == 16 * 128, "micro-batches shrink to a rank's share"


def test_pairs_are_those_that_the_backend_computes() -> None:
    rows, length = 65_536, 128
    assert job().counts.pairs == job("ops.attention=sdpa").counts.pairs == rows * length**2
    causal = ("data.masking.strategy=causal", "model.nsp=false")
    assert job(*causal).counts.pairs == rows * length * (length + 1) / 2
    assert job(*causal, "ops.attention=sdpa").counts.pairs == rows * length**2


def test_a_forecast_adds_up() -> None:
    points = forecast(job(), [8, 64, 512], DEVICES["h100"], FABRIC)
    for point in points:
        assert point.step.seconds == pytest.approx(sum(vars(point.step).values()))
        assert point.seconds == pytest.approx(7_038 * point.step.seconds)
        assert point.size * point.micro_size * point.micro_steps == 65_536
    first, *_, last = planner.efficiency(points)
    assert first == 1.0 > last > 0.8
    assert last == pytest.approx(8 * points[0].step.seconds / (512 * points[2].step.seconds))
    timed = forecast(job("schedule.name=budget", "schedule.budget_minutes=60"), [8], DEVICES["h100"], FABRIC)
    assert timed[0].seconds == 3_600
    tokens = job("schedule.by=tokens", f"schedule.budget_tokens={100 * 65_536 * 128}")
    (point,) = forecast(tokens, [8], DEVICES["h100"], FABRIC)
    assert point.seconds == pytest.approx(100 * point.step.seconds)


def test_shares_that_are_not_equal_take_as_long_as_the_largest() -> None:
    small = job("batch.global_size=100", "batch.micro_size=64")
    points = forecast(small, [8, 64, 128, 256], DEVICES["h100"], FABRIC)
    for point in points:
        assert point.micro_size == configuration.fit_micro_size(small.config, point.size).batch.micro_size
        assert small.share(point.size).batch.tokens == point.micro_size * 128
    assert [(point.micro_size, point.micro_steps) for point in points] == [(13, 1), (2, 1), (1, 1), (1, 1)]
    assert points[3].step.products == points[2].step.products > 0, "there is no half of a row"


def test_settings_that_cost_time() -> None:
    def seconds(*overrides: str) -> float:
        (point,) = forecast(job(*overrides), [64], DEVICES["h100"], FABRIC)
        return point.step.seconds

    plain = seconds()
    assert seconds("model.activation_checkpointing=true") == pytest.approx(4 / 3 * plain, rel=0.05)
    assert seconds("zero.stage=0") > plain, "every rank then does the whole of LAMB"
    assert seconds("ops.attention=fused_softmax") > plain > seconds("ops.layer=native")
    assert (
        seconds("optimizer.name=adamw", "optimizer.split_qkv=false")
        < seconds("optimizer.name=muon", "optimizer.split_qkv=false")
        < 1.1 * plain
    )
    assert seconds("optimizer.name=adamw", "optimizer.split_qkv=false") < plain < seconds("zero.stage=3")


def test_cost_and_energy() -> None:
    whole = job()
    points = forecast(whole, [64], DEVICES["h100"], FABRIC)
    hours = 64 * points[0].seconds / 3_600
    text = planner.table(whole, points, DEVICES["h100"], Prices(gpu_hour=2.0, kwh=0.5, watts=1_000))
    head, line = (line.split("  ") for line in text.splitlines()[:2])
    cells = dict(zip([h.strip() for h in head if h], [c.strip() for c in line if c], strict=True))
    assert cells["kWh"] == f"{hours:,.0f}" and cells["cost"] == f"{hours * 2.5:,.0f}"
    mfu = whole.operations / (points[0].step.seconds * 64 * 989e12)
    assert cells["MFU"] == f"{mfu:.1%}" and cells["rows x steps"] == "64 x 16"
    board = planner.table(whole, points, DEVICES["h100"], Prices())
    assert f"{hours * 0.7:,.0f}" in board and "cost" not in board


def test_failures_of_more_nodes_come_more_often() -> None:
    reliability = Reliability(node=20_000 * 3_600, save=20, restart=300)
    points = forecast(job(), [8, 512], DEVICES["h100"], FABRIC)
    _, one, many = planner.failure_table(points, FABRIC, reliability).splitlines()
    assert one.split()[1] == "2e+04" and many.split()[1] == "312.5"
    failures = reliability.of(64)
    assert failures.mean_between == 20_000 * 3_600 / 64
    assert many.split()[2] == f"{daly(failures):.4g}"
    assert many.split()[4] == f"{goodput(failures, daly(failures)):.2%}"
    assert float(many.split()[6].rstrip("%")) == pytest.approx(100 * goodput(failures, daly(failures)), abs=0.2)


def test_the_plot_has_a_point_for_each_size() -> None:
    points = forecast(job(), [8, 64, 512], DEVICES["h100"], FABRIC)
    tree = ElementTree.fromstring(svg(points, "a < b & c"))
    name = "{http://www.w3.org/2000/svg}"
    assert len(tree.findall(f"{name}circle")) == 6 and len(tree.findall(f"{name}polyline")) == 3
    texts = [element.text for element in tree.findall(f"{name}text")]
    assert "a < b & c" in texts and texts.count("512") == 2 and "100%" in texts
    falling = [float(c.attrib["cy"]) for c in tree.findall(f"{name}circle")[:3]]
    assert falling == sorted(falling) and 0 < falling[0] < falling[2] <= 300, "fewer seconds are further down"
    svg(points[:1], "one point is no line")


def test_the_command(tmp_path, capsys) -> None:
    options = ["--over", "8", "64", "--plot", str(tmp_path / "plot.svg"), "--gpu-hour-price", "2.5"]
    options += ["--node-mtbf-hours", "20000", "--save-seconds", "20", "--restart-seconds", "300"]
    assert plan.main([*COMMAND, *options]) == 0
    said = capsys.readouterr().out
    assert said.startswith("projection, not measured: h100, nodes of 8, network 8x400: 65,536 rows of 128")
    assert "milliseconds of an update" in said and "MTBF h" in said and "cost" in said
    assert (tmp_path / "plot.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gpus", "k80"], "--gpus k80: not in the device table"),
        (["--network", "fast"], "--network fast: write ADAPTERSxGBITS"),
        (["--nodes-of", "0"], "--nodes-of 0: a node has at least 1 GPU"),
        (["--over", "0"], "--over 0: give numbers of GPUs from 1 on"),
        (["--over", "8", "20"], "--over 20 is not a whole number of nodes of 8"),
        (["--over", "16", "--network="], "16 GPUs in nodes of 8 need a network: give --network"),
        (["--gpu-hour-price", "-1"], "--gpu-hour-price -1: give a number from 0 on"),
        (["--save-seconds", "20"], "--node-mtbf-hours is missing: failures need"),
        (["precision=fp32"], "precision=fp32: --gpus forecasts 16-bit training alone"),
        (["zero.offload=cpu"], "zero.offload=cpu: --gpus has no term"),
    ],
)
def test_a_mistake_is_one_line(options: list[str], said: str, capsys) -> None:
    assert plan.main([*COMMAND, *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {said}") and error.count("\n") == 1


@pytest.mark.parametrize("options", [["--over", "8"], ["--plot", "x.svg"], ["--watts", "1"], ["--save-seconds", "9"]])
def test_options_of_a_forecast_without_one(options: list[str], capsys) -> None:
    assert plan.main(["--config", "tiny", *options]) == 2
    assert capsys.readouterr().err.startswith(f"error: {options[0]} belongs to a forecast")
