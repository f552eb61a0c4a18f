"""Section of curves: which figures are drawn together, in which units, and their legend."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megabert.commands.report import charts
from megabert.commands.report.charts import Chart, Line, Mark
from megabert.commands.report.run_folder import Run
from megabert.commands.report.series import Series
from megabert.commands.report.tables import Markup, folded, table

MARKS = 40  # events that a chart points to, at most
SECONDS = "time/train_seconds"


def plain(value: float) -> str:
    return f"{value:.4g}"


def share(value: float) -> str:
    return f"{value:.1%}"


def whole(value: float) -> str:
    return f"{value:,.0f}"


def gibibytes(value: float) -> str:
    return f"{value:.4g} GiB"


@dataclass(frozen=True)
class Figure:
    """A chart of the report: its title, its unit, the series it shows (name, what it is called, held out or not)."""

    title: str
    unit: str
    series: tuple[tuple[str, str, bool], ...]
    written: Callable[[float], str] = plain
    may_be_logarithmic: bool = False
    from_zero: bool = False
    pointed: bool = False  # events are marked in it


FIGURES = (
    Figure(
        "Loss",
        "nats; training: all terms, held out: masked LM",
        (("train/loss", "training", False), ("eval/mlm_loss", "held out", True)),
        may_be_logarithmic=True,
        pointed=True,
    ),
    Figure(
        "Accuracy of masked LM",
        "share of the predicted tokens",
        (("train/mlm_accuracy", "training", False), ("eval/mlm_accuracy", "held out", True)),
        share,
        from_zero=True,
    ),
    Figure(
        "Loss of next sentence", "nats", (("train/nsp_loss", "training", False), ("eval/nsp_loss", "held out", True))
    ),
    Figure(
        "Accuracy of next sentence",
        "share of the pairs",
        (("train/nsp_accuracy", "training", False), ("eval/nsp_accuracy", "held out", True)),
        share,
        from_zero=True,
    ),
    Figure("Learning rate", "at the update", (("train/lr", "learning rate", False),), from_zero=True),
    Figure("Gradient norm", "before clipping", (("train/grad_norm", "gradient norm", False),), may_be_logarithmic=True),
    Figure(
        "Throughput",
        "real tokens a second, all ranks",
        (("perf/tokens_per_sec", "tokens/s", False),),
        whole,
        from_zero=True,
    ),
    Figure(
        "MFU",
        "model FLOPs utilisation: share of the matrix-product ceiling of a device",
        (("perf/mfu", "MFU", False),),
        share,
        from_zero=True,
    ),
    Figure(
        "Memory",
        "GiB, most that a rank has held so far",
        (("perf/peak_memory_gib", "memory", False),),
        gibibytes,
        from_zero=True,
    ),
)
SHOWN = {name for figure in FIGURES for name, _, _ in figure.series} | {"train/mlm_loss"}
UNITS = ((1, "seconds"), (60, "minutes"), (3600, "hours"), (86400, "days"))


def section(runs: Sequence[Run]) -> str:
    """All charts with their legends; a line where no run has figures."""
    drawn = [shown for figure in [*FIGURES, *_further(runs)] if (shown := _chart(figure, runs)) is not None]
    found = [_figure(chart, figure.unit, runs) for chart, figure in drawn]
    if (timed := _against_time(runs)) is not None:
        found.insert(min(2, len(found)), _figure(timed, "nats; evaluating and saving not counted", runs))
    if not found:
        return "<p>No figures were logged.</p>"
    return f'{_legend(runs, drawn)}<div class="charts">{"".join(found)}</div>'


def _further(runs: Sequence[Run]) -> list[Figure]:
    """Charts of the losses and accuracies that only some kinds of runs have, as those of a teacher."""
    names = {name for run in runs for name in run.metrics.series} - SHOWN
    chosen = sorted(n for n in names if n.endswith(("_loss", "_accuracy")))
    return [
        Figure(
            f"{name.partition('/')[2].replace('_', ' ').capitalize()}",
            "training" if name.startswith("train/") else "held out",
            ((name, name.partition("/")[0], name.startswith("eval/")),),
            share if name.endswith("_accuracy") else plain,
        )
        for name in chosen
    ]


def _points(series: Series) -> tuple[np.ndarray, np.ndarray]:
    return np.frombuffer(series.steps, np.uint64).astype(np.float64), np.frombuffer(series.values, np.float32).astype(
        np.float64
    )


def _chart(figure: Figure, runs: Sequence[Run]) -> tuple[Chart, Figure] | None:
    """A chart of what the runs have of a figure; None where they have nothing."""
    lines, not_finite = [], 0
    for number, run in enumerate(runs):
        for name, called, held_out in figure.series:
            series = run.metrics.series.get(name)
            if series is not None:
                not_finite += series.not_finite
                if series.steps:
                    label = f"{run.name}, {called}" if len(runs) > 1 else called
                    lines.append(Line(number, label, *_points(series), held_out))
    if not lines:
        return None
    chart = Chart(
        figure.title,
        lines,
        figure.written,
        may_be_logarithmic=figure.may_be_logarithmic,
        from_zero=figure.from_zero,
        not_finite=not_finite,
        marks=_marks(runs[0], lines) if figure.pointed and len(runs) == 1 else (),
    )
    return chart, figure


def _marks(run: Run, lines: Sequence[Line]) -> tuple[Mark, ...]:
    """The run's events within the chart, the first MARKS of each kind."""
    low, high = min(line.x[0] for line in lines), max(line.x[-1] for line in lines)
    kinds = {"restart": "restart", "spike": "spike", "non-finite": "spike", "objective": "objective"}
    found: dict[str, list[Mark]] = {}
    for event in run.events:
        if event.kind in kinds and low <= event.step <= high:
            mark = Mark(event.step, f"{event.kind} at {event.step:,}: {event.text}", kinds[event.kind])
            found.setdefault(event.kind, []).append(mark)
    return tuple(mark for marks in found.values() for mark in marks[:MARKS])


def _against_time(runs: Sequence[Run]) -> Chart | None:
    """Held-out loss over the time trained, where every line has its time."""
    seconds = [
        run.metrics.series[SECONDS].values[-1]
        for run in runs
        if SECONDS in run.metrics.series and run.metrics.series[SECONDS].values
    ]
    unit, below = next((u for u in reversed(UNITS) if max(seconds, default=0) >= 2 * u[0]), UNITS[0])
    lines = []
    for number, run in enumerate(runs):
        loss, time = (run.metrics.series.get(name) for name in ("eval/mlm_loss", SECONDS))
        if loss is None or time is None or not loss.steps or not time.steps:
            continue
        steps, values = _points(loss)
        at, trained = _points(time)
        x = np.interp(steps, at, trained) / unit
        lines.append(Line(number, f"{run.name}, held out" if len(runs) > 1 else "held out", x, values, True))
    return Chart("Held-out loss over time", lines, plain, f"{below} trained") if lines else None


def _figure(chart: Chart, unit: str, runs: Sequence[Run]) -> str:
    """A chart with its title, its unit and its numbers."""
    notes = [unit]
    if chart.logarithmic:
        notes.append("logarithmic")
    if chart.not_finite:
        notes.append(f"{chart.not_finite:,} values are no finite numbers and are not drawn")
    rows = [
        (
            Markup(f'<span class="c{line.run}">{html.escape(line.name)}</span>'),
            *(chart.written(v) for v in (line.y[0], line.y.min(), line.y.max(), line.y[-1])),
        )
        for line in chart.lines
    ]
    numbers = table(("", "first", "lowest", "highest", "last"), rows, chart.title, range(1, 5))
    return (
        f"<figure><figcaption>{html.escape(chart.title)}<small>{html.escape('; '.join(notes))}</small></figcaption>"
        f"{charts.draw(chart, len(runs) > 1)}{folded('Numbers', numbers)}</figure>"
    )


def _legend(runs: Sequence[Run], drawn: Sequence[tuple[Chart, Figure]]) -> str:
    """What lines and signs mean."""

    def sample(kind: str, content: str, colour: str = "c0" if len(runs) == 1 else "") -> str:
        return f'<svg viewBox="0 0 34 12" aria-hidden="true"><g class="{colour}">{content}</g></svg>{kind}'

    items = []
    if len(runs) > 1:
        for number, run in enumerate(runs):
            content = (
                f'<path class="line c{number}" d="M0 6H34"/><path class="mark c{number}" d="'
                f'{charts.shape(number, 17, 6)}"/>'
            )
            label = f'<b class="c{number}">{number + 1}</b> <b>{html.escape(run.name)}</b>'
            items.append(sample(label, content, f"c{number}"))
    items.append(sample("training", '<path class="line" d="M0 6H34"/>'))
    items.append(
        sample("held out", f'<path class="held" d="M0 6H34"/><path class="mark" d="{charts.shape(0, 17, 6)}"/>')
    )
    kinds = {mark.kind for chart, _ in drawn for mark in chart.marks}
    for kind, sign in (("restart", "↻ restart"), ("objective", "◆ change of objective")):
        if kind in kinds:
            items.append(html.escape(sign))
    if "spike" in kinds:
        items.append(sample("spike", '<path class="spike" d="M17 2l4 7h-8z"/>'))
    return f'<ul class="legend">{"".join(f"<li>{item}</li>" for item in items)}</ul>'
