"""Hash chain of a run: an entry per checkpoint, with the digest of the previous entry.

An entry covers the updates since the previous one: their data, configuration, code and machine, their log lines, and the weights
after them. An entry cannot be changed, removed or moved without changing all later ones. It is appended to
`checkpoints/chain.jsonl` before its checkpoint is committed. When a run resumes, later entries are removed like later log lines.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from megabert.common.files import compact, digest, sync, write_atomically
from megabert.common.run_files import METRICS, SAMPLES, STARTS, TROUBLE, append_line, read_step, read_tail

FILE = "chain.jsonl"
SEAL = "sha256"  # the field of an entry, as of a checkpoint's manifest, with the digest of its other fields
WEIGHT_PREFIX = "weights-"  # file-name prefix of a checkpoint's weights
LOGS = (METRICS, SAMPLES, STARTS, TROUBLE)
# state fields on which the numerical results depend, besides data and configuration; all state fields copied into an
# entry
MACHINE = ("machine", "threads", "world_size", "backends", "versions", "source")
CIRCUMSTANCES = ("dataset", "phase_datasets", "tokenizer", "teacher", "config_sha256", "revision", *MACHINE)


def append(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Append the entry of the checkpoint with this manifest, after removing entries of the same and later steps. `folder`: the run's
    `checkpoints`."""
    state = manifest["state"]
    path = folder / FILE
    begin, before, later = read_tail(path, state["step"])
    # a damaged entry, which `read` names, stops no save
    last: dict[str, Any] = {SEAL: "", "logs": {}} | (json.loads(before) if before else {})
    files = {name: file["sha256"] for name, file in manifest["files"].items() if name.startswith(WEIGHT_PREFIX)}
    entry = {name: state[name] for name in CIRCUMSTANCES if name in state} | {
        "step": state["step"],
        "checkpoint": manifest[SEAL],
        "weights": hashlib.sha256(compact(files)).hexdigest(),
        "logs": {name: _logged(folder.parent / name, last["logs"].get(name, [0])[0], state["step"]) for name in LOGS},
        "previous": last[SEAL],
    }
    line = compact(entry | {SEAL: digest(entry, SEAL, compact)})
    if later:
        write_atomically(path, path.read_bytes()[:begin] + line + b"\n")
    else:
        append_line(path, line.decode())
        sync(path)


def cut(folder: Path, step: int) -> None:
    """Remove the entries after `step`."""
    begin, _, later = read_tail(folder / FILE, step + 1)
    if later:
        os.truncate(folder / FILE, begin)


def read(folder: Path) -> list[dict[str, Any]]:
    """The entries in the `checkpoints` folder of a run. Raises ValueError naming the first that was changed or does not follow the
    previous one."""
    entries: list[dict[str, Any]] = []
    lines = (folder / FILE).read_bytes().splitlines(keepends=True) if (folder / FILE).exists() else []
    if lines and not lines[-1].endswith(b"\n"):  # a save that was interrupted
        lines.pop()
    for number, line in enumerate(lines, 1):
        place, before = f"{folder / FILE}, line {number}", entries[-1] if entries else {SEAL: "", "step": -1}
        try:
            entry = json.loads(line)
            as_written = line == compact(entry) + b"\n" and entry[SEAL] == digest(entry, SEAL, compact)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            as_written = False
        if not as_written:
            raise ValueError(f"{place}: was changed (its SHA-256 does not match)")
        if entry["previous"] != before[SEAL]:
            raise ValueError(f"{place}: does not follow the line before it; an entry was removed, added or moved")
        entries.append(entry)
    if not entries:
        raise ValueError(f"{folder / FILE}: is missing or empty, so the run's data, config and code cannot be checked")
    return entries


def _logged(path: Path, begin: int, step: int) -> tuple[int, str]:
    """Byte offset of the end of a log's lines up to `step`, and the SHA-256 of the lines from byte `begin` to there."""
    data = b""
    if path.exists():
        with open(path, "rb") as file:
            os.fsync(file.fileno())  # before an entry says that its lines are there
            file.seek(begin)
            data = file.read()
    lines = data[: data.rfind(b"\n") + 1].splitlines(keepends=True)
    logged: list[bytes] = list(takewhile(lambda line: read_step(line) <= step, lines))
    return begin + sum(map(len, logged)), hashlib.sha256(b"".join(logged)).hexdigest()
