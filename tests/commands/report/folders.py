"""Run folders as training leaves them, made of figures that are given, for the tests of the report."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megabert import config as configuration


def write_lines(path: Path, lines: Iterable[Any]) -> None:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def figures(step: int, **more: Any) -> dict[str, Any]:
    """A log line; `more` has `__` for the slash."""
    values = {"train__loss": 9.0 - step / 100, "train__mlm_accuracy": step / 1000, "train__lr": 1e-4}
    values |= {"train__grad_norm": 1.5, "perf__tokens_per_sec": 2000.0, "perf__mfu": 0.4}
    values |= {"perf__peak_memory_gib": 0.5, "time__train_seconds": step * 2.0, "data__cursor": step}
    values |= {"data__damaged_rows": 0} | more
    return {"step": step} | {name.replace("__", "/"): value for name, value in values.items()}


def evaluation(step: int) -> dict[str, Any]:
    values = {"eval/mlm_loss": 9.0 - step / 200, "eval/mlm_accuracy": step / 2000}
    return {"step": step, "time/train_seconds": step * 2.0} | values


def samples(step: int, said: str, **changes: Any) -> dict[str, Any]:
    """A line of samples: two masks of one text, the first answered `said`, the second always "mat"."""
    masks = [
        {"at": 1, "shown": "[MASK]", "said": [[said, 0.75], [" dog", 0.004]]},
        {"at": 5, "shown": " sky", "said": [[" mat", 0.5], [" hat", 0.25]]},
    ]
    tokens = ["[CLS]", " cat", " sat", " on", " the", " mat", "."]
    return {"step": step, "samples": [{"row": 7, "tokens": tokens, "masks": masks} | changes]}


def make(folder: Path, *overrides: str, data: str = "", **provenance: Any) -> Path:
    """A run of 100 updates with everything a report shows but its data."""
    folder.mkdir(parents=True, exist_ok=True)
    config = configuration.load("tiny", ["schedule.total_steps=200", f"data.path={data}", *overrides])
    head = {"config": config.model_dump(), "command": "megabert train --run here", "revision": "abc"}
    head |= {"backends": {"attention": "native"}, "versions": {"torch": "2.13.0"}, "dataset": "d" * 64}
    (folder / "config.json").write_text(json.dumps(head | provenance))
    lines = [evaluation(0)]
    for step in range(10, 101, 10):
        lines.append(figures(step))
        lines += [evaluation(step)] if step % 50 == 0 else []
    write_lines(folder / "metrics.jsonl", lines)
    start = {"ranks": 2, "device": "AMD EPYC", "cores": 2, "memory_gib": 23.5}
    at = [(0, "2026-01-02T03:04:05Z"), (50, "2026-01-02T04:04:05Z")]
    write_lines(folder / "starts.jsonl", [{"step": step, "time": time} | start for step, time in at])
    write_lines(folder / "samples.jsonl", [samples(0, " fish"), samples(50, " dog"), samples(100, " cat")])
    return folder


def finetuned(folder: Path, model: str, mean: float = 0.8125) -> Path:
    """An output of fine-tuning whose command names `model`."""
    folder.mkdir(parents=True)
    point = {"point": {"lr": 5e-5}, "runs": 3, "seconds": 9.0}
    point["scores"] = {"dev": {"accuracy": {"mean": mean, "std": 0.0125}}}
    summary = {"command": f"megabert finetune --model {model} --task sst2", "points": [point]}
    (folder / "summary.json").write_text(json.dumps(summary | {"settings": {"task": "sst2"}, "runs": []}))
    return folder
