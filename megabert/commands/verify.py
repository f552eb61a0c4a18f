"""Check a run folder, from data to weights, by its chain of digests.

megabert verify RUN                       every row, the configuration, every log line, every file of its checkpoints
megabert verify RUN --head DIGEST         also that the head of the chain is the published one

A change is named in one line, with exit code 2. A rewritten chain is detected only by comparing its head, which is printed last, with
a published one. `megabert replay` shows that the data leads to these weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megabert.common import chain, environment, storage
from megabert.common.arguments import Parser
from megabert.common.errors import command
from megabert.common.files import canonical
from megabert.common.run_files import CONFIG, METRICS, SAMPLES, STARTS, checkpoints_folder, read_step

# fields of `config.json` besides those of a chain entry
MORE = ("config", "datasets", "command")
# fields of a line of `starts.jsonl` that `config.json` has too
STARTED_WITH = ("revision", "versions", "command", "config_sha256")


def check_logs(run: Path, entries: Sequence[Mapping[str, Any]]) -> int:
    """The number of log lines after the newest entry, which no entry covers. Raises ValueError naming the file and the steps whose
    lines were changed."""
    uncovered = 0
    for name in chain.LOGS:
        data, begin, step = (run / name).read_bytes() if (run / name).exists() else b"", 0, 0
        for entry in entries:
            end, sha256 = entry["logs"][name]
            if hashlib.sha256(data[begin:end]).hexdigest() != sha256 or end > len(data):
                raise ValueError(f"{run / name}: the lines of steps {step} to {entry['step']} were changed")
            begin, step = end, entry["step"]
        rest = data[begin:].splitlines()
        if name in (METRICS, SAMPLES) and any(read_step(line) <= step for line in rest):
            raise ValueError(f"{run / name}: lines of step {step} or earlier were added")
        uncovered += len(rest)
    return uncovered


def check_config(run: Path, state: Mapping[str, Any]) -> None:
    """Raises ValueError unless `config.json` is that of the newest checkpoint, whose state is `state`, or of a later start."""
    from megabert.config import flat, from_dict

    path, names = run / CONFIG, {*chain.CIRCUMSTANCES, *MORE} - {"world_size"}
    trained = {name: state[name] for name in names & state.keys()}
    data = path.read_bytes()
    if data == canonical(trained):
        return
    try:
        recorded, start = json.loads(data), json.loads((run / STARTS).read_text().splitlines()[-1])
        later = all(recorded[name] == start[name] for name in STARTED_WITH) and start["step"] == state["step"]
        if later and from_dict(recorded["config"]).digest() == recorded["config_sha256"]:
            return
        before, after = flat(trained), flat(recorded)
        changed = min(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise ValueError(f"{path}: is not as it was written") from None
    raise ValueError(f"{path}: {changed} is {after.get(changed)!r}; the run was trained with {before.get(changed)!r}")


def check_checkpoints(run: Path, entries: Sequence[Mapping[str, Any]]) -> tuple[list[int], dict[str, Any]]:
    """The steps of kept checkpoints, newest first, and the state of the newest. Raises ValueError naming a changed file, or a
    checkpoint that is missing or has no entry."""
    from megabert.checkpoint import kept_manifests

    by_step, newest, steps = {entry["step"]: entry for entry in entries}, entries[-1]["step"], list[int]()
    state: dict[str, Any] = {}
    for manifest in kept_manifests(run):
        state, step = state or manifest["state"], manifest["state"]["step"]
        if by_step.get(step, {}).get("checkpoint") != manifest["sha256"]:
            raise ValueError(f"{run}/checkpoints/step-{step:08d}: is not the checkpoint of that step in {chain.FILE}")
        steps.append(step)
    if newest not in steps:
        raise ValueError(f"{run}: the checkpoint of step {newest}, the newest in {chain.FILE}, is missing")
    return steps, state


def check_data(state: Mapping[str, Any], moved: Sequence[str]) -> str:
    """Verify every byte of the datasets of all phases; returns a line about them. `moved` replaces the first folders. Raises
    ValueError naming what is damaged, or another dataset."""
    from megabert.config import Config, list_phases
    from megabert.data import mixture
    from megabert.data.shards import verify

    phases = [phase.config.data for phase in list_phases(Config.model_validate(state["config"]))]
    named = list(dict.fromkeys(folder for data in phases for folder in (data.path, *data.mix)))
    if len(moved) > len(named):
        raise ValueError(f"--data names {len(moved)} folders; the run has {len(named)}: {', '.join(named)}")
    places, rows = dict(zip(named, [*moved, *named[len(moved) :]], strict=True)), dict[str, int]()
    for number, (data, fingerprint) in enumerate(zip(phases, state["phase_datasets"], strict=True), 1):
        mix = {places[folder]: share for folder, share in data.mix.items()}
        opened = mixture.open_mixture(places[data.path], mix, shards=False)
        if opened.manifest.fingerprint != fingerprint:
            folders, of = ", ".join((places[data.path], *mix)), f"phase {number} of " * (len(phases) > 1)
            moved_where = f"give --data the folders where {', '.join(named)} are now"
            raise ValueError(f"{folders}: is not the dataset of {of}this run (another fingerprint); {moved_where}")
        rows |= {part.place: part.rows for part in mixture.members(opened)}
    for folder in rows:
        for problem in verify(folder):
            raise ValueError(problem)
    return f"{sum(rows.values()):,} rows of {', '.join(map(storage.public, rows))}"


@command
def main(argv: list[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("run", metavar="RUN", help="run folder")
    moved = "its datasets, if they were moved, in the order in which the run names them"
    add("--data", nargs="+", default=[], metavar="DIR", help=moved)
    add("--head", default="", metavar="DIGEST", help="published head, also of an earlier step")
    args = parser.parse_args(argv)
    run, folder = Path(args.run), checkpoints_folder(args.run)
    while True:
        *_, last = entries = chain.read(folder)
        published = [entry["step"] for entry in entries if entry["sha256"] == args.head]
        if args.head and not published:
            raise ValueError(f"{run}: the chain has no entry {args.head}: it is not the run whose head was published")
        try:
            uncovered = check_logs(run, entries)
            steps, state = check_checkpoints(run, entries)
            break
        except ValueError:
            if chain.read(folder)[-1] == last:
                raise  # else the run is in training, and has saved and removed checkpoints since
    if "phase_datasets" not in state or state["dataset"].startswith("none, "):
        raise ValueError(f"{run}: was converted or averaged, not trained, so there is no data to verify it by")
    check_config(run, state)
    steps_of = f"steps {entries[0]['step']:,} to {last['step']:,}"
    print(f"chain        {len(entries)} entries of {steps_of}, as they were written")
    print(f"logs         as they were written; {uncovered} lines after the newest checkpoint are in no entry")
    print(f"checkpoints  of steps {', '.join(map(str, sorted(steps)))}: every file as it was saved")
    print(f"data         {check_data(state, args.data)}: every byte as it was written")
    print(f"code         revision {last['revision']}, source {last['source'][:12]}; here {environment.source()[:12]}")
    for step in published:
        print(f"head         as published, at step {step:,}")
    print(f"head         {last['sha256']}")
