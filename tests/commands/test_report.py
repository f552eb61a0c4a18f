"""The report of a run, or of several, is one file that fetches nothing, says what their files say and lack, and is whole or absent."""

import json
import os
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from megabert import config as configuration
from megabert.commands import report
from megabert.commands.report import CurveChart, ReportedRun, plot, points
from tests.helpers.refusal import refusal


def write_lines(path: Path, lines: Iterable[Any]) -> None:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def logged(step: int, **more: Any) -> dict[str, Any]:
    """A log line; `more` has `__` for the slash."""
    values = {"train__loss": 9.0 - step / 100, "train__mlm_accuracy": step / 1000, "train__lr": 1e-4}
    values |= {"train__grad_norm": 1.5, "perf__tokens_per_sec": 2000.0, "perf__mfu": 0.4}
    values |= {"perf__peak_memory_gib": 0.5, "time__train_seconds": step * 2.0, "data__tokens": step * 1e6} | more
    return {"step": step} | {name.replace("__", "/"): value for name, value in values.items()}


def evaluation(step: int) -> dict[str, Any]:
    return {"step": step, "eval/mlm_loss": 9.0 - step / 200, "eval/mlm_accuracy": step / 2000}


def samples(step: int, predicted: str, **changes: Any) -> dict[str, Any]:
    """A line of samples: two masks of one text, the first answered `predicted`, the second always "mat"."""
    masks = [
        {"at": 1, "shown": "[MASK]", "predicted": [[predicted, 0.75], [" dog", 0.004]]},
        {"at": 5, "shown": " sky", "predicted": [[" mat", 0.5], [" hat", 0.25]]},
    ]
    tokens = ["[CLS]", " cat", " sat", " on", " the", " mat", "."]
    return {"step": step, "samples": [{"row": 7, "tokens": tokens, "masks": masks} | changes]}


def make(folder: Path, *overrides: str, **provenance: Any) -> Path:
    """A run of 100 updates with everything a report shows."""
    folder.mkdir(parents=True, exist_ok=True)
    config = configuration.load("tiny", ["schedule.total_steps=200", *overrides])
    head = {"config": config.model_dump(), "command": "megabert train --run here", "revision": "abc"}
    head |= {"backends": {"attention": "native"}, "versions": {"torch": "2.13.0"}}
    (folder / "config.json").write_text(json.dumps(head | provenance))
    lines = [evaluation(0)]
    for step in range(10, 101, 10):
        lines.append(logged(step))
        lines += [evaluation(step)] if step % 50 == 0 else []
    write_lines(folder / "metrics.jsonl", lines)
    start = {"ranks": 2, "device": "AMD EPYC", "cores": 2, "memory_gib": 23.5}
    at = [(0, "2026-01-02T03:04:05Z"), (50, "2026-01-02T04:04:05Z")]
    write_lines(folder / "starts.jsonl", [{"step": step, "time": time} | start for step, time in at])
    lines = [samples(-1, " x", tokens=[]), samples(0, " fish"), samples(50, " dog"), samples(100, " cat")]
    write_lines(folder / "samples.jsonl", lines)
    return folder


def render_page(run: Path, output: Path) -> tuple[str, list[list[str]]]:
    """The page, and its tables' rows."""
    assert report.main([str(run), "--output", str(output)]) == 0
    source = output.read_text()
    return source, [["".join(cell.itertext()) for cell in row] for row in parsed(source).iter("tr")]


def parsed(source: str) -> ElementTree.Element:
    """The page's elements; fails where they do not nest."""
    return ElementTree.fromstring(re.sub(r"<((?:meta|br)\b[^>]*)>", r"<\1/>", source.removeprefix("<!doctype html>")))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[list[str]]]:
    folder = tmp_path_factory.mktemp("runs")
    run = make(folder / "mini")
    spike = {"step": 20, "cursor": 19, "kind": "spike", "action": "skip", "train/loss": 99.0}
    write_lines(run / "trouble.jsonl", [spike, spike, spike | {"step": 30, "kind": "non-finite"}])
    slow = [{"rank": 3, "host": "n2", "ratio": 1.314, "cause": "host"}]
    more = [logged(105, perf__slow_ranks=slow), logged(106, perf__slow_ranks=slow)]
    more.append(logged(110, train__phase=1, train__objective="causal"))
    more.append(logged(120, train__phase=2, train__objective="masked", train__grad_norm="nan"))
    with open(run / "metrics.jsonl", "a") as file:
        file.writelines(f"{json.dumps(line)}\n" for line in more)
    return render_page(run, folder / "report.html")


def test_the_page_is_whole_and_fetches_nothing(made: tuple[str, list[list[str]]]) -> None:
    source, _ = made
    for element in parsed(source).iter():
        assert element.tag not in ("script", "link", "img", "iframe", "object", "base", "form")
        assert not {"src", "href", "action", "background", "poster", "xlink:href"} & set(element.attrib)
        assert not any(name.startswith("on") for name in element.attrib)
    assert not re.search(r"url\(|@import|https?:|//[a-z]", source)
    assert "default-src 'none'" in source and 'name="viewport"' in source
    assert len(re.findall(r"<svg.*?</svg>", source, re.S)) == 7
    assert len(re.findall(r'role="img" aria-label="[^"]{20,}"', source)) == 7


def test_it_shows_what_the_runs_files_hold(made: tuple[str, list[list[str]]]) -> None:
    source, rows = made
    for title in ("Loss", "MLM accuracy", "Learning rate", "Gradient norm", "Throughput", "MFU", "Memory"):
        assert f"<figcaption>{title}<small>" in source
    for row in (
        ["updates", "120 of 200"],
        ["Loss, held out", "8.5"],
        ["Throughput", "2,000 tokens/s"],
        ["trained for", "4m00s"],
        ["restarts", "1"],
        # first, lowest, highest and last loss
        ["training", "8.9", "7.8", "8.9", "7.8"],
        ["held out", "9", "8.5", "9", "8.5"],
        ["backend of attention", "native"],
        ["torch", "2.13.0"],
        ["ranks", "2"],
        ["schedule.total_steps", "200"],
        ["0", "start", "2026-01-02T03:04:05Z, ranks: 2, on AMD EPYC"],
        ["20", "spike", "loss 99.0, gradient norm None; skip"],
        ["30", "non-finite", "loss 99.0, gradient norm None; skip"],
        ["50", "restart", "2026-01-02T04:04:05Z, ranks: 2, on AMD EPYC"],
        ["105", "slow rank", "rank 3 (host n2), 1.31 times the median of the ranks; cause: host"],
        ["120", "phase", "2 by this log line, masked; causal before"],
    ):
        assert rows.count(row) == 1, row
    # a default
    assert ["zero.stage", "1"] not in rows
    # in the chart of the loss: two updates that went wrong, the restart, the phase
    assert source.count('class="event"') == 4
    # samples at the start and the end
    assert ["hidden", "update 0", "update 100"] in rows
    assert ["cat", "✗ fish 75%, dog 0%", "✓ cat 75%, dog 0%"] in rows
    assert "[CLS] <mark>[MASK]</mark> sat on the <mark>sky</mark>." in source


def test_continuations_are_marked_and_texts_no_markup(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    write_lines(run / "samples.jsonl", [samples(0, "cat"), samples(100, " cat")])
    _, rows = render_page(run, tmp_path / "report.html")
    assert ["cat", "✗ ##cat 75%, dog 0%", "✓ cat 75%, dog 0%"] in rows
    evil = '<script>alert("1")</script>&amp;'
    run = make(tmp_path / evil.replace("/", "∕"), command=evil, backends={evil: evil})
    write_lines(run / "samples.jsonl", [samples(0, evil, tokens=[evil, " cat", "<b>", "&lt;", '"', "'>", "."])])
    source, rows = render_page(run, tmp_path / "r.html")
    assert "<script" not in source and "<b>&" not in source
    assert ["command", evil] in rows and [f"backend of {evil}", evil] in rows
    assert ["cat", f"✗ {evil} 75%, dog 0%"] in rows


def test_numbers_that_are_not_finite_are_shown(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    broken = samples(100, " cat")
    broken["samples"][0]["masks"][0]["predicted"] = [[" cat", "nan"]]
    write_lines(run / "samples.jsonl", [samples(0, " fish"), broken])
    with open(run / "metrics.jsonl", "a") as file:
        losses = {"eval/mlm_loss": "nan", "eval/loss_by_source/wiki": "inf", "eval/mlm_accuracy": "nan"}
        file.write(json.dumps({"step": 100} | losses) + "\n")
    _, rows = render_page(run, tmp_path / "r.html")
    assert ["Loss, held out", "nan"] in rows and ["Loss, held out, wiki", "inf"] in rows
    assert ["cat", "✗ fish 75%, dog 0%", "✓ cat nan%"] in rows


@pytest.mark.parametrize(
    ("unit", "shown"), [("minutes=30", "100, 0.0% of 30 minutes"), ("tokens=4000", "100, 50.0% of 4,000 tokens")]
)
def test_the_budget_is_shown_in_its_unit(unit: str, shown: str, tmp_path: Path) -> None:
    run = make(tmp_path / "run", f"schedule.by={unit.split('=')[0]}", f"schedule.budget_{unit}")
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 100, "data/tokens": 2000, "time/train_seconds": 0.0}) + "\n")
    assert ["updates", shown] in render_page(run, tmp_path / "r.html")[1]


def test_a_beginning_run_has_a_report(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    with open(run / "metrics.jsonl", "a") as file:
        file.write('garbage\n[1]\n{"step": 11')
    assert ["updates", "100 of 200"] in render_page(run, tmp_path / "r.html")[1]
    for name in ("metrics.jsonl", "samples.jsonl", "starts.jsonl"):
        (run / name).unlink()
    # in place of the one before
    source, rows = render_page(run, tmp_path / "r.html")
    assert "No metrics were logged." in source and "no curves: metrics.jsonl is missing" in source
    assert source.count("None were recorded.") == 2 and ["restarts", "not recorded"] in rows


def test_a_mistake_writes_nothing(tmp_path: Path, monkeypatch, capsys) -> None:
    for name, text in (("damaged", '{"config": '), ("list", "[]")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    make(tmp_path / "run")
    os.mkfifo(tmp_path / "pipe")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    monkeypatch.chdir(tmp_path)
    for words, message in (
        ("damaged", "damaged/config.json: holds no configuration"),
        ("list", "list/config.json: holds no configuration"),
        ("run --output list", "list: exists and is not a report"),
        ("run --output pipe", "pipe: exists and is not a report"),
        ("run run", "--output is missing: name the file for the report of run and run"),
        ("run --output no/x.html", "--output no/x.html: there is no folder no"),
        ("run --output run/config.json", "run/config.json: exists and is not a report"),
    ):
        assert message in refusal(capsys, report.main, *words.split())
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_runs_are_compared_on_one_page(tmp_path: Path) -> None:
    runs, output = [make(tmp_path / f"run{n}", f"optimizer.lr=0.00{n}") for n in (1, 2)], tmp_path / "both.html"
    for _ in range(2):  # a report is replaced
        assert report.main([*map(str, runs), "--output", str(output)]) == 0
    page = output.read_text()
    assert not re.search(r"(?:src|href)=|url\(|https?:", page), "it fetches nothing"
    assert page.count("<figure>") == 4 * 3 and page.count('class="run0" d="M') == page.count('class="run1" d="M') == 12
    rows = dict(re.findall(r'<th scope="row">([^<]+)</th>((?:<td>[^<]*</td>)+)', page))
    assert rows["optimizer.lr"] == "<td>0.001</td><td>0.002</td>" and rows["Loss, held out"] == "<td>8.5</td>" * 2
    assert "schedule.total_steps" not in rows, "equal settings are left out"
    # an evaluation has the tokens of the log line of its step
    run = report.read_run(runs[0])
    assert points(run, "eval/mlm_loss", "data/tokens", 1e6) == [(50.0, 8.75), (100.0, 8.5)]
    assert points(run, "train/loss", "time/train_seconds", 4)[:2] == [(5.0, 8.9), (10.0, 8.8)]


def test_a_long_run_makes_a_small_page(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    losses = [1 + (step * 7919 % 5000) / 5000 for step in range(1, 5001)]
    losses[1666], losses[3333] = 5e6, 1e-3
    write_lines(run / "metrics.jsonl", [logged(step, train__loss=loss) for step, loss in enumerate(losses, 1)])
    source, _ = render_page(run, tmp_path / "r.html")
    assert len(source) < 300_000 and "5e+06" in source and "0.001" in source and "logarithmic" in source
    assert report.thinned([(5.0, float(y)) for y in range(2000)]) == [(5.0, 0.0), (5.0, 1999.0)]


@pytest.mark.parametrize("from_zero", [False, True])
def test_any_curve_can_be_drawn(from_zero: bool, tmp_path: Path) -> None:
    for values in ([1.0], [0.0], [2.0, 2.0], [-1.0, 1.0], [1e-9, 1.0], [5e6, 1.0]):
        run = ReportedRun(
            tmp_path, str(tmp_path), {"config": {}}, [{"step": step, "x": value} for step, value in enumerate(values)]
        )
        drawn = plot(CurveChart("t", "", ("x",), from_zero=from_zero), run)
        assert drawn is not None and drawn["y_ticks"]
        for coordinate in re.findall(r"[-\w.]+", drawn["lines"][0]["path"].replace("M", " ").replace("L", " ")):
            assert -1 <= float(coordinate) <= 400
