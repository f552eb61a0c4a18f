"""One HTML file about a run: curves, events, held-out samples, configuration, environment; or about several beside each other.

megabert report RUN                            writes RUN/report.html
megabert report RUN RUN … --output FILE        curves over updates, tokens and minutes; what differs in their configurations

The file has no external references. The runs may still be training.
"""

from __future__ import annotations

import json
import math
import posixpath
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from pathlib import Path
from typing import Any, NamedTuple

from megabert import __version__
from megabert.common import storage
from megabert.common.arguments import Parser
from megabert.common.errors import command
from megabert.common.files import write_atomically
from megabert.common.logs import duration, log
from megabert.common.run_files import CONFIG, METRICS, SAMPLES, STARTS, TROUBLE, json_lines
from megabert.hf.hub import download_folder

OUTPUT = "report.html"
# beginning of a report; no other file is overwritten
MARKER = b"<!doctype html><!-- megabert report -->"
MOST_EVENTS = 200
# marks of events in the chart of the loss
SIGNS = {"restart": "↻", "phase": "◆", "spike": "▲", "non-finite": "▲"}
# size of a chart, in units of its SVG
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 380, 232, 52, 20, 14, 34
# numbers on an axis
TICKS = 4
# intervals of a curve, of each of which the first, lowest, highest and last point are drawn
BUCKETS = 250
# a chart of losses or norms is logarithmic if its values differ by this factor
LOGARITHMIC = 100.0


@dataclass(frozen=True)
class CurveChart:
    """A chart of the report: metrics of metrics.jsonl (the held-out one last), and the format of their values."""

    title: str
    unit: str
    names: tuple[str, ...]
    written: str = "{:.4g}"
    from_zero: bool = False


CHARTS = (
    CurveChart("Loss", "nats; training: all terms, held out: masked LM", ("train/loss", "eval/mlm_loss")),
    CurveChart("MLM accuracy", "share of predictions", ("train/mlm_accuracy", "eval/mlm_accuracy"), "{:.1%}", True),
    CurveChart(
        "Minimal pairs", "share in which the right sentence is likelier", ("eval/pairs_accuracy",), "{:.1%}", True
    ),
    CurveChart("NSP accuracy", "share of pairs", ("train/nsp_accuracy", "eval/nsp_accuracy"), "{:.1%}", True),
    CurveChart("Learning rate", "at the update", ("train/lr",), from_zero=True),
    CurveChart("Gradient norm", "before clipping", ("train/grad_norm",)),
    CurveChart("Throughput", "of all ranks", ("perf/tokens_per_sec",), "{:,.0f} tokens/s", True),
    CurveChart("MFU", "share of the matrix-product ceiling", ("perf/mfu",), "{:.1%}", True),
    CurveChart("Memory", "peak of a rank", ("perf/peak_memory_gib",), "{:.4g} GiB", True),
)
# metrics over which curves are drawn, and those that are drawn
KEPT = {"step", "data/tokens", "time/train_seconds"} | {name for chart in CHARTS for name in chart.names}
Points = list[tuple[float, float]]


class ReportEvent(NamedTuple):
    step: int
    kind: str
    text: str


@dataclass
class ReportedRun:
    """Contents of the files of a run folder. `missing`: parts that the report cannot show, and why."""

    folder: Path
    # as the user named it
    place: str
    config_json: dict[str, Any]
    # the metrics in KEPT of each line of metrics.jsonl
    lines: list[dict[str, Any]] = field(default_factory=list)
    # the newest value of each key of metrics.jsonl
    last: dict[str, Any] = field(default_factory=dict)
    starts: list[dict[str, Any]] = field(default_factory=list)
    events: list[ReportEvent] = field(default_factory=list)
    # lines of samples.jsonl: the first one with the texts of the last, and the last
    samples: list[dict[str, Any]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def read_run(folder: Path, place: str = "") -> ReportedRun:
    """Read the files of the run in `folder`, or in the copy there of that at the URL `place`. Raises ValueError naming an unusable file."""
    path = folder / CONFIG
    if not path.is_file():
        raise ValueError(f"{folder}: is not a run folder (no {CONFIG}); name one written by megabert train")
    try:
        config_json = json.loads(path.read_bytes())
        assert isinstance(config_json["config"], dict)
    except (ValueError, LookupError, TypeError, AssertionError):
        raise ValueError(f"{path}: holds no configuration of a run; name a folder of megabert train") from None
    run = ReportedRun(folder, place or str(folder.resolve()), config_json)
    read_metrics(run)
    read_events(run)
    lines = list(json_lines(folder / SAMPLES))
    same = [line for line in lines if texts(line) == texts(lines[-1])]
    run.samples = same[:1] + same[1:][-1:]
    for file, content, what in (
        (METRICS, run.last, "curves"),
        (STARTS, run.starts, "restarts, ranks and devices"),
        (SAMPLES, run.samples, "held-out samples"),
    ):
        if not content:
            run.missing.append(f"no {what}: {file} is missing or empty")
    return run


def texts(line: dict[str, Any]) -> list[Any]:
    """The tokens of a line's samples, and which of them are masked, which other settings of a resumed run change."""
    return [(sample["tokens"], [(mask["at"], mask["shown"]) for mask in sample["masks"]]) for sample in line["samples"]]


def read_metrics(run: ReportedRun) -> None:
    for line in json_lines(run.folder / METRICS):
        step = line["step"]
        before, now = run.last.get("train/phase"), line.get("train/phase")
        if before and now and before != now:
            after, objective = line.get("train/objective"), run.last.get("train/objective")
            run.events.append(ReportEvent(step, "phase", f"{now} by this log line, {after}; {objective} before"))
        slow = {(one["rank"], one["cause"]) for one in run.last.get("perf/slow_ranks", [])}
        for one in line.get("perf/slow_ranks", []):
            if (one["rank"], one["cause"]) not in slow:
                text = f"rank {one['rank']} (host {one['host']}), {one['ratio']:.2f} times the median of the ranks"
                run.events.append(ReportEvent(step, "slow rank", f"{text}; cause: {one['cause']}"))
        run.last |= line
        run.lines.append({name: line[name] for name in KEPT & line.keys()})


def read_events(run: ReportedRun) -> None:
    """Starts, spikes and failed updates, each once: repeated updates are recorded repeatedly."""
    run.starts = list(json_lines(run.folder / STARTS))
    for number, start in enumerate(run.starts):
        kind = "restart" if number else "start"
        text = f"{start.get('time')}, ranks: {start.get('ranks')}, on {start.get('device')}"
        run.events.append(ReportEvent(start["step"], kind, text))
    trouble: dict[Any, dict[str, Any]] = {}
    for line in json_lines(run.folder / TROUBLE):
        trouble.setdefault((line["step"], line.get("cursor"), line.get("kind")), line)
    for line in trouble.values():
        text = f"loss {line.get('train/loss')}, gradient norm {line.get('train/grad_norm')}; {line.get('action')}"
        run.events.append(ReportEvent(line["step"], str(line.get("kind")), text))
    run.events.sort(key=lambda event: event.step)


def of_budget(run: ReportedRun) -> str:
    """The number of updates of the schedule, or the used part of its minutes or tokens."""
    schedule = run.config_json["config"].get("schedule", {})
    unit = "minutes" if schedule.get("name") == "budget" else schedule.get("by", "steps")
    if unit == "steps":
        return f" of {schedule.get('total_steps', 0):,}"
    used = run.last.get("time/train_seconds", 0.0) / 60 if unit == "minutes" else run.last.get("data/tokens", 0)
    budget = schedule.get(f"budget_{unit}", 0)
    return f", {used / budget:.1%} of {budget:,.12g} {unit}" if budget else ""


def results(run: ReportedRun) -> dict[str, str]:
    """The results of a run."""
    table = {"updates": f"{run.last.get('step', 0):,}{of_budget(run)}"}
    for chart in CHARTS:
        for name in chart.names:
            kind = ", held out" if name.startswith("eval/") else ", training" if len(chart.names) > 1 else ""
            if name in run.last:  # as text, if it is not finite
                table[chart.title + kind] = chart.written.format(float(run.last[name]))
    for name, value in run.last.items():
        if name.startswith(("eval/loss_by_source/", "eval/loss_by_dataset/")):
            table[f"Loss, held out, {name.split('/', 2)[2]}"] = f"{float(value):.4g}"
    if "time/train_seconds" in run.last:
        table["trained for"] = duration(run.last["time/train_seconds"])
    restarts = sum(event.kind == "restart" for event in run.events)
    return table | {"restarts": f"{restarts:,}" if run.starts else "not recorded"}


def environment(run: ReportedRun) -> dict[str, Any]:
    """Hardware and software of the run's last start."""
    start = run.starts[-1] if run.starts else {}
    table: dict[str, Any] = {
        name: start[name] for name in ("time", "ranks", "device", "cores", "memory_gib") if name in start
    }
    table |= {f"backend of {op}": name for op, name in run.config_json.get("backends", {}).items()}
    table |= run.config_json.get("versions", {})
    return table | {name: run.config_json.get(name) for name in ("revision", "command")}


def points(run: ReportedRun, name: str, over: str = "step", divisor: float = 1) -> Points:
    """(x, y) of a metric, of lines that have both or a line of the same step that has x."""
    known: dict[int, float] = {}
    found = []
    for line in run.lines:
        if isinstance(x := line.get(over), int | float):
            known[line["step"]] = x / divisor
        # non-finite values are strings ("nan")
        if isinstance(line.get(name), int | float) and line["step"] in known:
            found.append((known[line["step"]], float(line[name])))
    return found


def thinned(points: Points) -> Points:
    """At most 4 x BUCKETS points of a curve, which keep its extremes."""
    points = sorted(points)
    if len(points) <= 4 * BUCKETS:
        return points
    first, width = points[0][0], (points[-1][0] - points[0][0]) / BUCKETS
    kept = []
    for _, group in groupby(points, lambda point: min(int((point[0] - first) / (width or 1)), BUCKETS - 1)):
        bucket = list(group)
        kept += sorted({bucket[0], min(bucket, key=lambda p: p[1]), max(bucket, key=lambda p: p[1]), bucket[-1]})
    return kept


class ChartScale:
    """Maps values to coordinates of a chart; has round ticks within its range."""

    def __init__(self, low: float, high: float, first: float, last: float, logarithmic: bool = False) -> None:
        self.logarithmic = logarithmic
        low, high = (math.log10(low), math.log10(high)) if logarithmic else (low, high)
        if high - low <= 1e-9 * max(abs(low), abs(high)):
            margin = abs(low) * 0.05 or 1.0
            low, high = low - margin, high + margin
        self.low, self.high, self.first, self.last = low, high, first, last

    def __call__(self, value: float) -> float:
        share = ((math.log10(value) if self.logarithmic else value) - self.low) / (self.high - self.low)
        return round(self.first + share * (self.last - self.first), 1)

    def ticks(self) -> list[float]:
        """About TICKS numbers: 1, 2, 2.5 or 5 times a power of ten, or powers of ten."""
        if self.logarithmic:
            every = max(1, math.ceil((self.high - self.low) / TICKS))
            return [10.0**power for power in range(math.ceil(self.low), math.floor(self.high) + 1, every)]
        rough = (self.high - self.low) / TICKS
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [k * step for k in range(first, last + 1)]


def draw(curves: Sequence[Points], from_zero: bool, logarithmic: bool = False, percent: bool = False) -> dict[str, Any]:
    """Paths and ticks of curves, of which one has points at least. `logarithmic`: if the values differ enough."""
    steps, values = zip(*chain(*curves), strict=True)
    low, high = min(values), max(values)
    logarithmic = logarithmic and low > 0 and high / low >= LOGARITHMIC
    x = ChartScale(min(steps), max(steps), LEFT, WIDTH - RIGHT)
    y = ChartScale(min(low, 0.0) if from_zero else low, high, HEIGHT - BOTTOM, TOP + 4, logarithmic)
    paths = ["L".join(f"{x(a):g} {y(b):g}" for a, b in thinned(curve)) for curve in curves]
    return {
        "logarithmic": logarithmic,
        "paths": [f"M{path}" if path else "" for path in paths],
        "x_ticks": [(x(value), f"{value:.6g}") for value in x.ticks()],
        "y_ticks": [(y(value), f"{100 * value:.3g}%" if percent else f"{value:.6g}") for value in y.ticks()],
        "x": x,
    }


def plot(chart: CurveChart, run: ReportedRun) -> dict[str, Any] | None:
    """Input of the template for a chart; None if the run has none of its metrics."""
    curves = {name: curve for name in chart.names if (curve := points(run, name))}
    if not curves:
        return None
    drawn = draw([*curves.values()], chart.from_zero, not chart.from_zero, chart.written.endswith("%}"))
    lines: list[dict[str, Any]] = []
    for (name, curve), path in zip(curves.items(), drawn["paths"], strict=True):
        values = [value for _, value in sorted(curve)]
        metrics = [chart.written.format(value) for value in (values[0], min(values), max(values), values[-1])]
        lines.append({"held_out": name.startswith("eval/"), "path": path, "metrics": metrics})
    steps = [step for curve in curves.values() for step, _ in curve]
    marks = [
        (drawn["x"](event.step), SIGNS[event.kind], f"{event.kind} at {event.step:,}: {event.text}")
        for event in run.events[:MOST_EVENTS]
        if chart.title == "Loss" and event.kind in SIGNS and min(steps) <= event.step <= max(steps)
    ]
    unit = chart.unit + "; logarithmic" * drawn["logarithmic"]
    return drawn | {"title": chart.title, "unit": unit, "lines": lines, "marks": marks}


def displayed(token: str) -> str:
    """A token as `megabert fill` shows it: letters that continue the word before them begin with ##."""
    shown = f"##{token}" if token[:1].isalnum() else token.strip()
    return shown if shown.isprintable() and shown else ascii(token)


def sample_tables(run: ReportedRun) -> list[dict[str, Any]]:
    """The held-out samples: each text with its masks, and the model's predictions for each at the start and at the end, with
    probability and whether they are the hidden token."""
    tables = []
    for number, sample in enumerate(run.samples[-1]["samples"] if run.samples else []):
        rows, tokens = [], sample["tokens"]
        for i, mask in enumerate(sample["masks"]):
            hidden, of_runs = tokens[mask["at"]], [line["samples"][number]["masks"][i] for line in run.samples]
            predictions = [
                [(displayed(word), float(p), word == hidden) for word, p in one["predicted"]] for one in of_runs
            ]
            rows.append((displayed(hidden), predictions))
        heads = [f"update {line['step']:,}" for line in run.samples]
        masks = {mask["at"]: mask["shown"].strip() for mask in sample["masks"]}
        tables.append({"row": sample["row"], "tokens": tokens, "masks": masks, "heads": heads, "rows": rows})
    return tables


def fill_template(file: str, **values: Any) -> bytes:
    """The HTML page of a template in this folder."""
    import jinja2

    blocks: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True}
    templates = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, **blocks)
    size = (WIDTH, HEIGHT, LEFT, WIDTH - RIGHT, TOP, HEIGHT - BOTTOM)
    page = templates.from_string(Path(__file__).with_name(file).read_text("utf-8")).render(values, size=size)
    return MARKER + page.encode(errors="backslashreplace") + b"\n"


def render(run: ReportedRun) -> bytes:
    """The HTML page of a run."""
    from megabert.config import changed

    return fill_template(
        "report_template.html",
        run=run,
        name=posixpath.basename(run.place.rstrip("/")),
        results=results(run),
        charts=[drawn for chart in CHARTS if (drawn := plot(chart, run))],
        samples=sample_tables(run),
        most_events=MOST_EVENTS,
        settings=changed(run.config_json["config"]),
        environment=environment(run),
        made=time.strftime(f"MegaBERT {__version__}, made %Y-%m-%d %H:%M UTC", time.gmtime()),
    )


@command
def main(argv: list[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    folder = "run folder written by megabert train, or the URL of its mirror"
    parser.add_argument("runs", nargs="+", metavar="RUN", help=folder)
    file = f"the file to write (default, of one run: RUN/{OUTPUT})"
    parser.add_argument("--output", type=Path, metavar="FILE", help=file)
    args = parser.parse_args(argv)
    if args.output is None and (len(args.runs) > 1 or storage.is_url(args.runs[0])):
        raise ValueError(f"--output is missing: name the file for the report of {' and '.join(args.runs)}")
    if args.output and not args.output.parent.is_dir():
        raise ValueError(f"--output {args.output}: there is no folder {args.output.parent}")
    folders = [download_folder(run, weights=False) if storage.is_url(run) else Path(run) for run in args.runs]
    places = [storage.public(run) if storage.is_url(run) else "" for run in args.runs]
    runs, output = list(map(read_run, folders, places)), args.output or folders[0] / OUTPUT
    if output.exists() and not (output.is_file() and output.read_bytes().startswith(MARKER)):
        raise ValueError(f"{output}: exists and is not a report; name another file with --output")
    from megabert.commands import comparison

    write_atomically(output, comparison.render(runs) if len(runs) > 1 else render(runs[0]))
    for run in runs:
        for text in run.missing:
            log.info(f"{run.folder}: {text}" if len(runs) > 1 else text)
    log.info(f"{output}: {output.stat().st_size / 1e3:,.0f} kB")
