"""The report is one file that fetches nothing, says what the run's files say and what they lack, and is there whole or not at all."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from megabert.commands.report import page
from megabert.commands.report.__main__ import main
from tests.commands.report import folders

OLD = Path(__file__).parents[2] / "data" / "old_formats"
VOID = {"meta", "br"}


class Strict(HTMLParser):
    """Tags that nest, and the texts of table rows."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.anchors: set[str] = set()
        self.feed(source)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.anchors.add(dict(attrs).get("id") or "")
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th") and self.rows:
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1] and self.open and {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data


def report(*args: Any, output: Path) -> tuple[str, list[list[str]]]:
    """The page, and its tables' rows."""
    assert main([*map(str, args), "--output", str(output)]) == 0
    source = output.read_text()
    return source, Strict(source).rows


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[list[str]]]:
    """The report of a run that has everything."""
    folder = tmp_path_factory.mktemp("runs")
    run = folders.make(folder / "mini", data=str(OLD / "dataset"))
    lines = [{"step": 20, "cursor": 19, "kind": "spike", "action": "skip", "train/loss": 99.0}] * 2
    folders.write_lines(run / "trouble.jsonl", [*lines, lines[0] | {"step": 30, "kind": "non-finite"}])
    more = [folders.figures(110, **{"data__damaged_rows": 3, "train__objective": "causal"})]
    more.append(
        folders.figures(120, **{"data__damaged_rows": 3, "train__objective": "masked", "train__grad_norm": "nan"})
    )
    with open(run / "metrics.jsonl", "a") as file:
        file.writelines(f"{json.dumps(line)}\n" for line in more)
    folders.finetuned(folder / "sst2", str(run))
    folders.finetuned(folder / "other", str(folder / "another"), 0.5)
    return report(run, output=folder / "report.html")


def test_the_page_is_whole_and_fetches_nothing(made: tuple[str, list[list[str]]]) -> None:
    source, _ = made
    parsed = Strict(source)
    assert not {tag for tag, _ in parsed.tags} & {"script", "link", "img", "iframe", "object", "base", "form"}
    for tag, attributes in parsed.tags:
        for name in ("src", "href", "action", "background", "poster", "xlink:href"):
            value = attributes.get(name) or ""
            assert not value or (value[0] == "#" and value[1:] in parsed.anchors), (tag, value)
        assert not any(name.startswith("on") for name in attributes)
    assert not re.search(r"url\(|@import|https?:|//[a-z]", source)
    assert "default-src 'none'" in source and 'name="viewport"' in source
    drawn = re.findall(r"<svg.*?</svg>", source)
    assert len(drawn) >= 8
    for svg in drawn:
        ElementTree.fromstring(svg)
    assert len(re.findall(r'role="img" aria-label="[^"]{20,}"', source)) >= 7


def test_it_says_what_the_files_of_the_run_say(made: tuple[str, list[list[str]]]) -> None:
    source, rows = made
    for title in ("Loss", "Accuracy of masked LM", "Learning rate", "Gradient norm", "Throughput", "MFU", "Memory"):
        assert f"<figcaption>{title}<small>" in source
    assert "120 of 200" in source and ["updates", "120 of 200"] not in rows
    assert ["training", "8.9", "7.8", "8.9", "7.8"] in rows  # loss: first, lowest, highest, last
    assert ["held out", "9", "8.5", "9", "8.5"] in rows
    assert "1 values are no finite numbers and are not drawn" in source
    events = [
        row
        for row in rows
        if row[1:2] and row[1] in ("begun", "restart", "spike", "non-finite", "damaged rows", "objective")
    ]
    assert [(row[0], row[1]) for row in events] == [
        *(("0", "begun"), ("20", "spike"), ("30", "non-finite"), ("50", "restart")),
        *(("110", "damaged rows"), ("120", "objective")),
    ]
    assert events[1][2] == "loss 99, gradient norm None; not applied"
    assert events[3][2].startswith("2026-01-02T04:04:05Z, 2 ranks on AMD EPYC")
    assert events[4][2].startswith("3 left out") and events[5][2].startswith("left to right before, masked LM")
    assert source.count('class="event"') == 2  # the restart and the objective, in the chart of the loss
    assert source.count('class="spike"') == 3  # a spike, an update that was no number, the legend
    assert ["rows", "536"] in rows
    assert ["sst2", "dev", "accuracy", "0.8125 ± 0.0125", "3", "lr 5e-05", "sst2"] in rows
    assert "0.5000" not in source  # another run's
    assert ["backend of attention", "native"] in rows and ["torch", "2.13.0"] in rows and ["ranks", "2"] in rows
    assert ["schedule.total_steps", "200"] in rows
    assert rows.index(["schedule.total_steps", "200"]) < rows.index(["zero.stage", "1"])  # a default


def test_samples_are_shown_at_three_times_with_what_was_said(made: tuple[str, list[list[str]]]) -> None:
    source, rows = made
    assert ["mask", "hidden", "start, update 0", "middle, update 50", "end, update 100"] in rows
    first = next(row for row in rows if row[:2] == ["1", "cat"])
    assert first[2:] == ["✗ fish 75%dog <1%", "✗ dog 75%dog <1%", "✓ cat 75%dog <1%"]
    assert ["", "right", "1 of 2", "1 of 2", "2 of 2"] in rows
    assert "[CLS] <mark>[MASK]<sub>1</sub></mark> sat on the <mark>sky<sub>2</sub></mark>." in source


def test_texts_of_a_run_are_never_markup(tmp_path: Path) -> None:
    evil = '<script>alert("1")</script>&amp;'
    run = folders.make(tmp_path / evil.replace("/", "∕"), command=evil, backends={evil: evil})
    lines = [folders.samples(0, evil, tokens=[evil, " cat", "<b>", "&lt;", '"', "'>", "."])]
    folders.write_lines(run / "samples.jsonl", lines)
    source, rows = report(run, output=tmp_path / "r.html")
    assert "<script" not in source and "<b>&" not in source
    assert ["command", evil] in rows and [f"backend of {evil}", evil] in rows
    assert any(row[2:3] == [f"✗ {evil} 75%dog <1%"] for row in rows)


def test_several_runs_share_the_charts_and_their_differences_come_first(tmp_path: Path, capsys) -> None:
    one = folders.make(tmp_path / "a" / "run", data=str(OLD / "dataset"))
    two = folders.make(tmp_path / "b" / "run", "optimizer.lr=3e-3", "seed=7", data=str(OLD / "dataset"))
    (two / "samples.jsonl").unlink()
    source, rows = report(one, two, output=tmp_path / "both.html")
    assert ["", "1 a/run", "2 b/run"] in rows and ["held-out loss", "8.5000 nats", "8.5000 nats"] in rows
    chart = source[source.index("<figcaption>Loss<") :]
    chart = chart[: chart.index("</svg>")]
    assert [len(re.findall(f'class="{kind} c{run}"', chart)) for kind in ("line", "held") for run in (0, 1)] == [1] * 4
    assert re.findall(r'class="run c(\d)">(\d)<', chart) == [("0", "1"), ("1", "2")]
    first, then = (source.index(text) for text in ("Settings that differ", "The settings that are the same"))
    names = re.findall(r"<code>([\w.]+)</code></th>", source[first:then])
    assert set(names) == {"optimizer.lr", "seed"}
    assert "b/run: no held-out samples" in capsys.readouterr().out
    assert "made 20" in source


def test_a_run_of_an_earlier_version_has_a_report_that_says_what_it_lacks(tmp_path: Path, capsys) -> None:
    source, rows = report(OLD / "run", "--data", OLD / "dataset", output=tmp_path / "r.html")
    said = capsys.readouterr().out
    for file in ("starts.jsonl", "samples.jsonl"):
        assert f"{file} is not there" in source and f"{file} is not there" in said
    assert "None were recorded." in source and "not recorded" in source and ["seed", "42"] in rows
    assert not list((OLD / "run").glob("*.html"))


def test_a_run_that_is_just_beginning_or_being_written_to_has_one_too(tmp_path: Path) -> None:
    run = folders.make(tmp_path / "run")
    with open(run / "metrics.jsonl", "a") as file:
        file.write('garbage\n\n[1]\n{"step": 11')
    assert "3 lines of metrics.jsonl cannot be read" in report(run, output=tmp_path / "r.html")[0]
    for name in ("metrics.jsonl", "samples.jsonl", "starts.jsonl"):
        (run / name).unlink()
    source, _ = report(run, output=tmp_path / "r.html")  # in place of the one before
    assert "No figures were logged." in source and "no curves: metrics.jsonl is not there" in source


def test_the_data_is_found_from_any_folder_above_the_run(tmp_path: Path, monkeypatch) -> None:
    folder = tmp_path / "data" / "x"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_bytes((OLD / "dataset" / "manifest.json").read_bytes())
    lengths = {str(n): 2 for n in range(1, 33)}
    built = {"corpora": {"wiki": {"weight": 1.0, "documents": 12345}}, "dropped": {"reasons": {"empty": 9}}}
    seq_len = json.loads((folder / "manifest.json").read_text())["seq_len"]
    built["datasets"] = {str(seq_len): {"lengths": lengths}}
    (folder / "report.json").write_text(json.dumps(built))
    run = folders.make(tmp_path / "runs" / "mini", data="data/x")
    monkeypatch.chdir("/")
    source, rows = report(run, output=tmp_path / "r.html")
    assert ["wiki", "1", "12,345", "", "", ""] in rows and ["empty", "9"] in rows
    assert ["0 – 2", "4", ""] in rows and ["30 – 32", "6", ""] in rows
    assert "no data report" not in source
    folder.rename(tmp_path / "elsewhere")
    assert "no data report: data/x is not there" in report(run, output=tmp_path / "r.html")[0]
    assert ["empty", "9"] in report(run, "--data", tmp_path / "elsewhere", output=tmp_path / "r.html")[1]


def test_results_of_fine_tuning_are_found_by_the_model_that_they_name(tmp_path: Path, monkeypatch) -> None:
    run = folders.make(tmp_path / "runs" / "mini")
    folders.finetuned(tmp_path / "runs" / "glue" / "rte", "runs/mini/checkpoints/step-00000100", 0.61)
    folders.finetuned(tmp_path / "runs" / "sst2", "runs/mini2", 0.62)
    far = folders.finetuned(tmp_path / "far", "somewhere/else", 0.63)
    (tmp_path / "runs" / "theirs" / "summary.json").mkdir(parents=True)
    monkeypatch.chdir("/")
    _, rows = report(run, output=tmp_path / "r.html")
    assert [row[3] for row in rows if row[:1] == ["sst2"]] == ["0.6100 ± 0.0125"]
    _, rows = report(run, "--finetuned", far, output=tmp_path / "r.html")
    assert [row[3] for row in rows if row[:1] == ["sst2"]] == ["0.6300 ± 0.0125", "0.6100 ± 0.0125"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["nowhere"], "nowhere: no such folder; name a run folder"),
        (["data"], "data: is no run folder (no config.json)"),
        (["damaged"], "damaged/config.json: is damaged ("),
        (["list"], "list/config.json: is damaged (holds no object)"),
        (["empty"], "empty/config.json: holds no configuration"),
        (["run", "run/../run"], "a run is named twice"),
        ([*"1234567"], "7 runs: at most 6"),
        (["samples"], "samples/samples.jsonl: the line of step 50 is damaged"),
        (["run", "--output", "data"], "--output data: is a folder"),
        (["run", "--output", "no/x.html"], "--output no/x.html: there is no folder no"),
        (["run", "--output", "run/config.json"], "run/config.json: is there and is no report"),
        (["run", "--data", "run"], "--data run: is no dataset (no manifest.json)"),
        (["run", "--finetuned", "data"], "--finetuned data: has no summary.json"),
        (["run", "run2", "--data", "data"], "--data and --finetuned are of one run"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(
    args: list[str], said: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    for name, text in (("damaged", '{"config": '), ("list", "[]"), ("empty", "{}")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    (tmp_path / "data").mkdir()
    folders.make(tmp_path / "run")
    folders.make(tmp_path / "run2")
    lines = [folders.samples(0, " a"), folders.samples(50, " b", tokens=["too few"]), folders.samples(100, " c")]
    folders.write_lines(folders.make(tmp_path / "samples") / "samples.jsonl", lines)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    monkeypatch.chdir(tmp_path)
    assert main(args) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error and error.count("\n") == 1
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_report_is_replaced_by_the_next_one(tmp_path: Path) -> None:
    run = folders.make(tmp_path / "run")
    assert main([str(run)]) == 0 and main([str(run)]) == 0
    assert (run / "report.html").read_text().startswith(page.OURS)
    assert not list(run.glob("*.tmp"))
