"""Chain of digests of a run: an entry a checkpoint, with the digest of the entry before it.

An entry is of the updates since the one before it: what they were done with (data, configuration, code, machine), what they logged,
and the weights after them. None can be changed, removed or moved without a change of all behind it. `checkpoints/chain.jsonl` gets a
checkpoint's entry before it is committed. With the log lines after a checkpoint that a run resumes from, entries are removed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from megabert.checkpoint.manifest import SEAL, WEIGHTS, group_of
from megabert.common.files import compact, digest, write_whole
from megabert.common.run_files import METRICS, SAMPLES, STARTS, TROUBLE, step_of

FILE = "chain.jsonl"
LOGS = (METRICS, SAMPLES, STARTS, TROUBLE)
# what updates follow from besides data and configuration, and all of a checkpoint's state that is in its entry
MACHINE = ("machine", "threads", "world_size", "backends", "versions", "source")
CIRCUMSTANCES = ("dataset", "phase_datasets", "tokenizer", "teacher", "config_sha256", "revision", *MACHINE)


def append(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Add the entry of a checkpoint in the `checkpoints` folder of a run, whose manifest this is, and remove those after it."""
    state = manifest["state"]
    before = _until(folder, state["step"])
    last: dict[str, Any] = json.loads(before[-1]) if before else {SEAL: "", "logs": {}}
    files = {name: file["sha256"] for name, file in manifest["files"].items() if group_of(name) == WEIGHTS}
    entry = {name: state[name] for name in CIRCUMSTANCES if name in state} | {
        "step": state["step"],
        "checkpoint": manifest[SEAL],
        "weights": hashlib.sha256(compact(files)).hexdigest(),
        "logs": {name: _logged(folder.parent / name, last["logs"].get(name, [0])[0], state["step"]) for name in LOGS},
        "previous": last[SEAL],
    }
    line = compact(entry | {SEAL: digest(entry, SEAL, compact)}) + b"\n"
    write_whole(folder / FILE, b"".join([*before, line]))


def cut(folder: Path, step: int) -> None:
    """Remove the entries after a step."""
    kept = _until(folder, step + 1)
    if kept != _lines(folder):
        write_whole(folder / FILE, b"".join(kept))


def read(folder: Path) -> list[dict[str, Any]]:
    """The entries of the `checkpoints` folder of a run, in their order. Raises ValueError naming the first that is not as written, or
    does not follow the one before it."""
    entries: list[dict[str, Any]] = []
    for number, line in enumerate(_lines(folder), 1):
        place, before = f"{folder / FILE}, line {number}", entries[-1] if entries else {SEAL: "", "step": -1}
        try:
            entry = json.loads(line)
            as_written = line == compact(entry) + b"\n" and entry[SEAL] == digest(entry, SEAL, compact)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            as_written = False
        if not as_written:
            raise ValueError(f"{place}: is not as it was written (its SHA-256 is another)")
        if entry["previous"] != before[SEAL]:
            raise ValueError(f"{place}: does not follow the line before it; an entry was removed, added or moved")
        entries.append(entry)
    if not entries:
        raise ValueError(f"{folder / FILE}: is missing or empty, so nothing says what this run is of")
    return entries


def check_logs(run: Path, entries: list[dict[str, Any]]) -> int:
    """How many lines of a run's logs follow its newest entry, which are in no entry. Raises ValueError naming the file and the steps
    whose lines are not those that were logged."""
    uncovered = 0
    for name in LOGS:
        data, begin, step = (run / name).read_bytes() if (run / name).exists() else b"", 0, 0
        for entry in entries:
            end, sha256 = entry["logs"][name]
            if hashlib.sha256(data[begin:end]).hexdigest() != sha256 or end > len(data):
                raise ValueError(
                    f"{run / name}: the lines of steps {step} to {entry['step']} are not those that were logged"
                )
            begin, step = end, entry["step"]
        rest = data[begin:].splitlines()
        if name in (METRICS, SAMPLES) and any(step_of(line) <= step for line in rest):
            raise ValueError(f"{run / name}: has lines of step {step} or before that were not logged")
        uncovered += len(rest)
    return uncovered


def _lines(folder: Path) -> list[bytes]:
    path = folder / FILE
    return path.read_bytes().splitlines(keepends=True) if path.exists() else []


def _until(folder: Path, step: int) -> list[bytes]:
    """The lines of the entries before a step."""
    return [line for line in _lines(folder) if step_of(line) < step]


def _logged(path: Path, begin: int, step: int) -> tuple[int, str]:
    """Where the lines of a log up to a step end, and the SHA-256 of those from the byte `begin` on."""
    data = b""
    if path.exists():
        with open(path, "rb") as file:
            file.seek(begin)
            data = file.read()
    lines = data[: data.rfind(b"\n") + 1].splitlines(keepends=True)
    logged: list[bytes] = list(takewhile(lambda line: step_of(line) <= step, lines))
    return begin + sum(map(len, logged)), hashlib.sha256(b"".join(logged)).hexdigest()
