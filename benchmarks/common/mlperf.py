"""MLPerf's published BERT-LARGE runs for the planner's blind test: which rows calibrate and which judge."""

from __future__ import annotations

import hashlib
from collections import defaultdict

from megabert.commands.plan.published import PublishedRun, published_runs
from megabert.commands.plan.step_time import DEVICES


def calibration() -> tuple[PublishedRun, ...]:
    """At most a third of each generation's rows, chosen without a look at their figures.

    Rows of one submitter and one kind of GPU are a group and stay together. A generation's groups are taken in the order of
    SHA-256 of "submitter/gpu", each one that still fits into the third.
    """
    generations: dict[str, dict[str, list[PublishedRun]]] = defaultdict(lambda: defaultdict(list))
    for run in published_runs():
        if not run.left_out:
            generations[DEVICES[run.gpu].generation][f"{run.submitter}/{run.gpu}"].append(run)
    chosen: list[PublishedRun] = []
    for groups in generations.values():
        room = sum(map(len, groups.values())) // 3
        for name in sorted(groups, key=lambda name: hashlib.sha256(name.encode()).digest()):
            if len(groups[name]) <= room:
                room -= len(groups[name])
                chosen += groups[name]
    return tuple(chosen)


def blind() -> tuple[PublishedRun, ...]:
    """The rows that no constant was fitted on."""
    calibrating = set(calibration())
    return tuple(run for run in published_runs() if not run.left_out and run not in calibrating)
