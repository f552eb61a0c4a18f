"""Comparison of two finished runs: every logged figure but times, bit for bit, and every file of the final checkpoint."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.survival.life import Failure


def differences(straight: Path, broken: Path, steps: int) -> list[str]:
    """How two finished runs differ, one line each: losses, rows, learning rate, weights, moments. Times may differ."""
    found = []
    one, two = (logged(run) for run in (straight, broken))
    for name, lines in (("uninterrupted", one), ("killed", two)):
        updates = [line["step"] for line in lines if "train/loss" in line]
        if updates != list(range(1, steps + 1)):
            found.append(f"the {name} run's updates are not 1..{steps} once each: {updates}")
    for a, b in zip(one, two, strict=False):
        keys = [key for key in a.keys() | b.keys() if not key.startswith(("perf/", "time/"))]
        found += [
            f"step {a['step']}: {key} is {a.get(key)!r} and {b.get(key)!r}"
            for key in sorted(keys)
            if a.get(key) != b.get(key)
        ]
    hashes = [files_of(run, steps) for run in (straight, broken)]
    for name in sorted(hashes[0].keys() | hashes[1].keys()):
        if hashes[0].get(name) != hashes[1].get(name):
            found.append(f"the final checkpoint's {name} differs")
    left = [path.name for path in (broken / "checkpoints").glob(".*")]
    if left:
        found.append(f"left in the killed run's folder: {left}")
    return found


def counts(straight: Path, broken: Path, steps: int) -> dict[str, int]:
    """How many updates of `broken` are missing or there again, and how many were made of other rows than `straight`'s."""
    one, two = rows_of(straight), rows_of(broken)
    times = Counter(step for step, _ in two)
    return {
        "updates_lost": sum(times[step] == 0 for step in range(1, steps + 1)),
        "updates_repeated": times.total() - len(times),
        "updates_of_other_rows": sum(dict(one).get(step) != rows for step, rows in two),
    }


def rows_of(run: Path) -> list[tuple[int, int]]:
    """(update, hash of its rows) of each logged update; the logged digest is the sum of all hashes so far."""
    lines = [line for line in logged(run) if "train/loss" in line]
    sums = [int(line["data/row_digest"], 16) for line in lines]
    return [
        (line["step"], (after - before) % 2**64) for line, before, after in zip(lines, [0, *sums], sums, strict=False)
    ]


def logged(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def files_of(run: Path, step: int) -> dict[str, str]:
    """SHA-256 of each file of a checkpoint, as its manifest has them. Raises Failure for a file that has another."""
    folder = run / "checkpoints" / f"step-{step:08d}"
    files = json.loads((folder / "manifest.json").read_text())["files"]
    for name, entry in files.items():
        found = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        if found != entry["sha256"]:
            raise Failure(f"{folder / name} is damaged")
    return {name: entry["sha256"] for name, entry in files.items()}
