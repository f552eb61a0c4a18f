"""Files in a run folder, beside `checkpoints/`: their names, and the lines of their logs."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megabert.common.files import add_path_when_full

CONFIG = "config.json"
TOKENIZER_FILES = ("tokenizer.model", "vocab.txt", "tokenizer.json")
# JSON lines: log lines; samples of evaluations; starts of the run; updates that were skipped or whose loss was a spike
METRICS, SAMPLES, STARTS, TROUBLE = "metrics.jsonl", "samples.jsonl", "starts.jsonl", "trouble.jsonl"
SLOW_RANKS = "slow-ranks.json"  # the slow ranks at the newest log line; absent while there are none
BEST = "best"  # link to the checkpoint with the lowest held-out loss, of a run with `eval.patience`
STEP = re.compile(r"step-(\d{8,})")
# a file of a checkpoint, relative to the run: the checkpoint's name and its own
IN_CHECKPOINT = re.compile(r"checkpoints/(step-\d{8,})/([^/]+)")
# a file of a run in a store besides checkpoints and locks; other runs may be below the same URL
BESIDE = re.compile(r"((checkpoints|tensorboard)/)?[^/]+")
TAIL = 1 << 16  # bytes of a log that are read first to find its last lines
SINK_IDS = "sinks.json"  # the run's id at each tracker


def checkpoints_folder(run: str | Path) -> Path:
    """The folder of a run's checkpoints. Raises ValueError where there is none."""
    folder = Path(run) / "checkpoints"
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; name a run folder")
    return folder


def checkpoint_name(step: int) -> str:
    """Name of a checkpoint's folder."""
    return f"step-{step:08d}"


def saved_steps(run: Path) -> list[int]:
    """Steps of a run's checkpoints, oldest first. Another folder there, such as a copy `step-00001000-mine`, is none."""
    matches = (STEP.fullmatch(path.name) for path in run.glob("checkpoints/step-*"))
    return sorted(int(match[1]) for match in matches if match)


def holds_checkpoint(folder: Path) -> bool:
    """Whether a folder is a run with a checkpoint, or a checkpoint."""
    alone = folder.resolve().name.startswith("step-") and (folder / "manifest.json").is_file()
    return alone or bool(saved_steps(folder))


def read_step(line: str | bytes) -> float:
    """The step of a log line; infinite for a line truncated by a kill."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects with a step in a JSON-lines file, without a partial last line. Nothing without a file."""
    if not path.is_file():
        return
    with open(path, "rb") as file:
        for raw in file:
            try:
                line = json.loads(raw)
            except ValueError:
                continue
            if isinstance(line, dict) and isinstance(line.get("step"), int):
                yield line


def read_tail(path: Path, step: int) -> tuple[int, bytes, list[bytes]]:
    """The byte offset at which the lines of `step` and later begin in a JSON-lines file, the line before it (b"" without one), and
    these lines. Searched from the end, so that the time does not grow with the file. A file that does not exist is empty."""
    if not path.exists():
        return 0, b"", []
    with open(path, "rb") as file:
        start, size = file.seek(0, os.SEEK_END), TAIL
        end = start
        while start:
            start, size = max(end - size, 0), 4 * size
            file.seek(start)
            lines = file.read(end - start).splitlines(keepends=True)
            first = 1 if start else 0  # lines[0] may be the rest of a line
            for at in range(len(lines) - 1, first - 1, -1):
                if read_step(lines[at]) < step:
                    return start + sum(map(len, lines[: at + 1])), lines[at], lines[at + 1 :]
        return 0, b"", lines if end else []


def append_line(path: Path, text: str) -> None:
    """Append a line to a file, whose last line a kill may have left partial."""
    with add_path_when_full(path), open(path, "ab+") as file:
        size = file.tell()
        file.seek(max(size - 1, 0))
        file.write(b"\n" * (file.read(1) not in (b"\n", b"")) + text.encode() + b"\n")


def as_json(values: Mapping[str, Any]) -> str:
    """One line of JSON; non-finite floats are written as strings."""
    return json.dumps(_finite(values))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
