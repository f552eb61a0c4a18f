"""Page of several runs beside each other, with the charts of `megabert report`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from megabert.commands.report import ReportedRun, draw, fill_template, points, results
from megabert.config import changed, flat
from megabert.data.mixture import distinct_names

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


def differences(trees: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """The value of each run at each place where the trees differ; "default" where a run does not set it."""
    flattened = [flat(tree) for tree in trees]
    rows = {key: [str(tree.get(key, "default")) for tree in flattened] for key in chain(*flattened)}
    return {key: values for key, values in rows.items() if len(set(values)) > 1}


def render(runs: Sequence[ReportedRun]) -> bytes:
    """The HTML page of the runs."""
    charts = []
    for title, name, from_zero in CURVES:
        for unit, key, divisor in AXES:
            curves = [points(run, name, key, divisor) for run in runs]
            if any(curves):
                charts.append(draw(curves, from_zero) | {"title": title, "unit": f"over {unit}"})
    ends = [results(run) for run in runs]
    return fill_template(
        "comparison_template.html",
        names=distinct_names([run.place for run in runs]),
        charts=charts,
        results={name: [end.get(name, "–") for end in ends] for name in dict.fromkeys(chain(*ends))},
        settings=differences([changed(run.config_json["config"]) for run in runs]),
    )
