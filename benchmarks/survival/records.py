"""Jobs with restarts in place as seen from outside: what was done to each, and whether that lost or repeated an update.

The log of a job says which updates were reported, and at which update each of its starts resumed.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import hardware
from benchmarks.survival.life import saved_steps

# kills of ranks, and ends of jobs, each with its weight
IN_EVALUATION, IN_SAVE, AGAIN = "a rank in an evaluation", "a rank in a save", "a rank, and again"
KILLS = {"a rank": 5, "several ranks": 3, AGAIN: 3, IN_EVALUATION: 3, IN_SAVE: 3}
TERM, KEEPER, ALL_KEEPERS, LIMIT, FINISHED = "TERM", "a keeper", "all keepers", "time limit", "the end of the run"
DELAYS = {f"a rank, TERM after {seconds} s": seconds for seconds in (0.05, 0.6, 2.0)}
THE_JOB_BEFORE = "the job before"  # whose end is the reason for what the first start of a job repeats
ENDS = {TERM: 4, **dict.fromkeys(DELAYS, 2), KEEPER: 2, ALL_KEEPERS: 1, LIMIT: 4}
INTERVAL = 10  # updates between checkpoints
# updates that may be repeated after a restart from copies: the newest copy is written while the next update is made
IN_FLIGHT = 2
FAILED, REQUEUE = 4, 85
# a reported update, or a start from a saved state
LINE = re.compile(rb"^(?:step +(\d+)/|.*resuming from .* at step (\d+))", re.M)
BEST_SAID = re.compile(rb"lowest held-out loss \S+ at step (\d+)")


@dataclass
class Event:
    """What was done to a job: when, in seconds since its start, after which reported update, and where its log ended."""

    kind: str
    second: float
    step: int
    offset: int


@dataclass
class Record:
    """A job as seen from outside. `hosts`: their number; `first`: the update at which it started; `last`: the newest one reported; `saved`: the newest
    checkpoint; `repeated`: updates by the event that the start followed; `killed`: ranks whose keepers were killed; `slow`: seconds of
    delay of a rank's first saves."""

    case: str
    hosts: int
    seed: str
    max_time: float | None = None
    slow: dict[int, float] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    killed: list[int] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)
    seconds: float = 0.0
    first: int = 0
    last: int = 0
    saved: int = 0
    lost: int = 0
    repeated: dict[str, int] = field(default_factory=dict)
    best: str | None = None
    failures: list[str] = field(default_factory=list)

    @property
    def end(self) -> str:
        """The last event."""
        return self.events[-1].kind if self.events else FINISHED

    @property
    def others(self) -> set[int]:
        """Exit codes of the keepers that were not killed."""
        return {code for rank, code in enumerate(self.codes) if rank not in self.killed}


def account(record: Record, output: bytes, reported: int, saved: int) -> None:
    """Judge a job by its log and exit codes. Before it, `reported` was the newest update reported and `saved` the newest checkpoint."""
    newest, position = reported, -1
    for match in LINE.finditer(output):
        resumed, number = match[2] is not None, int(match[1] or match[2])
        if not resumed and position >= 0 and number > newest:
            record.lost += number - newest - 1
            newest = number
            continue
        at = number if resumed else number - 1  # a start from nothing does not say so
        kind = [THE_JOB_BEFORE, *(event.kind for event in record.events if event.offset <= match.start())][-1]
        if position < 0:
            record.first, kind = at, THE_JOB_BEFORE
            if at != saved:
                record.failures.append(f"it started at {at}, {saved} was saved")
        # on the only host a killed keeper's copies are lost
        elif newest - at > IN_FLIGHT + INTERVAL * (kind == KEEPER and record.hosts == 1):
            record.failures.append(f"{newest - at} updates were repeated after {kind}")
        record.lost += max(0, at - newest)
        record.repeated[kind] = record.repeated.get(kind, 0) + max(0, newest - at)
        newest, position = number, match.start()
    record.last = newest
    if record.lost:
        record.failures.append(f"{record.lost} updates were not reported")
    allowed = [{0}, {REQUEUE}] if record.max_time or record.end in (TERM, KEEPER, *DELAYS) else [{0}]
    if record.others and record.others not in allowed + [{FAILED}] * (record.end == KEEPER):
        record.failures.append(f"exit codes {record.codes}")
    killed = any(event.kind in {**KILLS, **DELAYS} and event.offset > position for event in record.events)
    behind = newest - record.saved
    # a job whose keepers were killed leaves what was not saved to the next one, to be repeated
    saves = record.others and not (record.end == KEEPER and record.others == {FAILED})
    if position >= 0 and saves and behind > IN_FLIGHT * killed:
        record.lost += behind
        record.failures.append(f"exit codes {record.codes} at update {newest}, {record.saved} is saved")
    if record.max_time and record.seconds > record.max_time:
        record.failures.append(f"--max-time={record.max_time}s, it took {record.seconds} s")


def missing_best(run: Path, newest: int) -> list[str]:
    """What is wrong where the checkpoint of the best update is not saved, by the state in the `newest` one."""
    try:
        manifest = (run / "checkpoints" / f"step-{newest:08d}" / "manifest.json").read_text()
    except FileNotFoundError:  # none yet, or just removed
        return []
    best, saved = json.loads(manifest)["state"]["best_step"], saved_steps(run)
    return [f"the best update is {best}, saved are {saved}"] if best >= 0 and best not in saved else []


def check_best(record: Record, run: Path, output: bytes) -> None:
    """Compare the link `best` with the last message of a run that is finished, and with the held-out losses."""
    if said := BEST_SAID.search(output):
        losses = [(line["eval/mlm_loss"], line["step"]) for line in hardware.logged(run) if "eval/mlm_loss" in line]
        if not f"step-{min(losses)[1]:08d}" == f"step-{int(said[1]):08d}" == record.best:
            record.failures.append(f"{said[0].decode()}, the lowest is {min(losses)}, best leads to {record.best}")


def count_kills(record: Record) -> int:
    return sum(event.kind not in (TERM, LIMIT) for event in record.events)


def totals(jobs: Sequence[Record]) -> dict[str, Any]:
    """Counts over jobs, also by kind of event, and every failure."""
    kinds: dict[str, Counter[str]] = defaultdict(Counter)
    for job in jobs:
        for event in job.events:
            kinds[event.kind]["events"] += 1
        for kind, repeated in job.repeated.items():
            kinds[kind]["updates_repeated"] += repeated
        kinds[job.end] += Counter({"jobs_ended": 1, "updates_lost": job.lost, "failures": len(job.failures)})
    return {
        "kills": sum(map(count_kills, jobs)), "jobs": len(jobs), "updates_lost": sum(job.lost for job in jobs),
        "exit_codes": dict(Counter(str(code) for job in jobs for code in job.codes)),
        "by_kind": {kind: dict(counts) for kind, counts in kinds.items()},
        "failures": [f"{job.case}, job {job.seed}: {reason}" for job in jobs for reason in job.failures],
        "cases": [asdict(job) for job in jobs],
    }  # fmt: skip
