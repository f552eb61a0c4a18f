"""Page of several runs beside each other, with the charts of `megabert report`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megabert.commands.report import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, ChartScale, ReportedRun, results, thinned
from megabert.common.run_files import METRICS, json_lines
from megabert.config import changed, flat
from megabert.data.mixture import distinct_names

TEMPLATE = Path(__file__).with_name("comparison_template.html")
# what is drawn, its name in metrics.jsonl, and whether the axis begins at 0
CURVES = (
    ("Held-out loss", "eval/mlm_loss", False),
    ("Held-out accuracy", "eval/mlm_accuracy", True),
    ("Training loss", "train/loss", False),
    ("Tokens a second", "perf/tokens_per_sec", True),
)
# what it is drawn over: the key of a line, and the divisor
AXES = (
    ("updates", "step", 1),
    ("million tokens", "data/tokens", 1e6),
    ("minutes of training", "time/train_seconds", 60),
)
Points = list[tuple[float, float]]


def points(folder: Path, name: str, key: str, divisor: float) -> Points:
    """(x, y) of a metric, of lines that have both or a line of the same step that has x."""
    known: dict[int, float] = {}
    found = []
    for line in json_lines(folder / METRICS):
        if isinstance(x := line.get(key), int | float):
            known[line["step"]] = x / divisor
        if isinstance(line.get(name), int | float) and line["step"] in known:
            found.append((known[line["step"]], float(line[name])))
    return found


def chart(title: str, unit: str, curves: Sequence[Points], from_zero: bool) -> dict[str, Any] | None:
    """Input of the template for a chart with a line a run; None without points."""
    every = [point for curve in curves for point in curve]
    if not every:
        return None
    across, up = zip(*every, strict=True)
    x = ChartScale(min(across), max(across), LEFT, WIDTH - RIGHT)
    y = ChartScale(0.0 if from_zero else min(up), max(up), HEIGHT - BOTTOM, TOP + 4)
    drawn = [thinned(curve) for curve in curves]
    return {
        "title": title,
        "unit": unit,
        "paths": ["M" + "L".join(f"{x(a):g} {y(b):g}" for a, b in curve) if curve else "" for curve in drawn],
        "x_ticks": [(x(value), f"{value:.6g}") for value in x.ticks()],
        "y_ticks": [(y(value), f"{value:.6g}") for value in y.ticks()],
    }


def differences(trees: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """The value of each run at each place where the trees differ; "default" where a run does not set it."""
    flattened = [flat(tree) for tree in trees]
    keys = dict.fromkeys(itertools.chain.from_iterable(flattened))
    rows = {key: [str(tree.get(key, "default")) for tree in flattened] for key in keys}
    return {key: values for key, values in rows.items() if len(set(values)) > 1}


def page(runs: Sequence[ReportedRun]) -> str:
    """The HTML of the page, without the mark of a report."""
    import jinja2

    names = distinct_names([run.folder for run in runs])
    read: Callable[..., list[Points]] = lambda *of: [points(run.folder, *of) for run in runs]  # noqa: E731
    charts = [
        found
        for title, name, from_zero in CURVES
        for unit, key, divisor in AXES
        if (found := chart(title, f"over {unit}", read(name, key, divisor), from_zero)) is not None
    ]
    ends = [results(run) for run in runs]
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return environment.from_string(TEMPLATE.read_text()).render(
        names=names,
        charts=charts,
        results={name: [end.get(name, "–") for end in ends] for name in dict.fromkeys(itertools.chain(*ends))},
        settings=differences([changed(run.config_json["config"]) for run in runs]),
        size=(WIDTH, HEIGHT, LEFT, WIDTH - RIGHT, HEIGHT - BOTTOM),
    )
