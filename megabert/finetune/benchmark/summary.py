"""Figures over seeds, and the tables of a benchmark as Markdown.

An interval is Student's t over the seeds of the grid point that was chosen: how far another set of seeds may lie. How far
another set of examples may lie is not in it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from megabert.finetune.benchmark import published

CONFIDENCE = 0.95
TITLES = {"glue": "GLUE", "squad": "SQuAD", "own": "Tasks"}


def figures(values: Sequence[float]) -> dict[str, Any]:
    """Mean, sample deviation and the bounds of the t interval, both None for one value alone."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return {"values": list(values), "mean": mean, "std": None, "interval": None}
    from scipy import stats

    std = statistics.stdev(values)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * std / math.sqrt(len(values))
    return {"values": list(values), "mean": mean, "std": std, "interval": [mean - half, mean + half]}


def point(values: Mapping[str, Any]) -> str:
    """A grid point in a cell, e.g. `lr 2e-05, batch 32`."""
    return ", ".join(f"{axis} {value:g}" for axis, value in values.items())


def _chosen(task: Mapping[str, Any]) -> str:
    tried = f" ({task['points']} tried)" if task["points"] > 1 else ""
    return f"{point(task['point'])}{tried}" if task["point"] else "no grid"


def scores_table(found: Sequence[Mapping[str, Any]]) -> str:
    """A line a task's part and metric: of the tasks that are finished, in percent."""
    lines = ["| task | metric | mean | deviation | 95% interval | seeds | grid point | reported on | decided on |"]
    lines.append("|---|---|--:|--:|--:|--:|---|---|---|")
    for task in found:
        for row, by_metric in task["scores"].items():
            for metric, figure in by_metric.items():
                std, interval = figure["std"], figure["interval"]
                cells = [
                    *(row, metric, f"{100 * figure['mean']:.1f}"),
                    "" if std is None else f"{100 * std:.1f}",
                    "" if interval is None else "{:.1f} to {:.1f}".format(*(100 * bound for bound in interval)),
                    *(str(len(figure["values"])), _chosen(task)),
                    *(task["reported_on"][row], task["decided_on"]),
                ]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def comparison(suite: str, found: Sequence[Mapping[str, Any]]) -> str:
    """Means beside published scores, a line a task's part and metric; "" where nothing is published."""
    models = published.MODELS[suite]
    rows = {(row, metric): figure for task in found for row, by in task["scores"].items()
            for metric, figure in by.items()}  # fmt: skip
    lines = []
    for key, figure in rows.items():
        theirs = [model.scores.get(key) for model in models]
        if any(score is not None for score in theirs):
            cells = [*key, f"{100 * figure['mean']:.1f}", *("" if s is None else f"{s:.1f}" for s in theirs)]
            lines.append(f"| {' | '.join(cells)} |")
    if not lines:
        return ""
    sources = list(dict.fromkeys(f"{model.source}; on {model.measured_on}" for model in models))
    of = [sources.index(f"{model.source}; on {model.measured_on}") + 1 for model in models]
    head = ["task", "metric", "this model", *(f"{m.name} [{n}]" for m, n in zip(models, of, strict=True))]
    notes = [f"[{n}] {source}." for n, source in enumerate(sources, 1)]
    rule = "|---|---|" + "--:|" * (len(models) + 1)
    return "\n".join([f"| {' | '.join(head)} |", rule, *lines, "", *(f"{note}  " for note in notes)]).rstrip()


def page(suite: str, model: str, found: Sequence[Mapping[str, Any]]) -> str:
    """The whole results page."""
    notes = [
        "Percent; correlations times 100. The deviation is the sample's over seeds; the interval is Student's t over the "
        "same seeds, which says nothing about another draw of examples."
    ]
    if any(task["published_way"] for task in found):
        notes.append(
            "**The reported examples also chose the epoch and the grid point (and the threshold of SQuAD 2.0), as it is "
            "common in published dev scores: the figures are too high by what that choice gains.**"
        )
    if any(task["limit"] for task in found):
        notes.append("**Each split was cut (`--limit`): for trying out, not for comparing.**")
    parts = [f"# {TITLES[suite]}: {model}", scores_table(found), *notes]
    if table := comparison(suite, found):
        other = (
            "Published figures are of GLUE's test server, this model's of labelled dev examples."
            if suite == "glue"
            else "Published figures were chosen on the dev file they are of."
        )
        parts += ["## Beside published models", table, other]
    return "\n\n".join(parts) + "\n"
