"""Training runs that are killed at random times and restarted by the same command, compared with an uninterrupted run.

Each case is trained once without a fault, then in lives: each life is started by the same command, resumes from the run folder,
and is killed (SIGKILL, one rank or all) at a random time: during its start, between updates, inside a checkpoint write, or while
one rank's write is delayed by seconds. The last life is not killed. Then all logged figures except times, and all files of the
final checkpoint, must be equal bit for bit.
"""

from __future__ import annotations

import json
import math
import random
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import hardware
from benchmarks.survival.life import POLL, Case, Failure, Life, Server, await_end, last_step, saved_steps
from megabert.common.files import hash_file

PLAN = ("any", "save", "any", "slow", "save", "any", "save", "any")  # aims of the kills, alternately
# largest relative difference of a loss that rounding makes: ranks in another number sum in another order, and updates amplify it
ROUNDING = 1e-2
START_SECONDS = 0.5  # approximate seconds of a start
SLOW = (0.5, 6.0)  # seconds of delay of one rank's write
RESUMED, UNSEEN = "a start from the newest checkpoint", "a start that was killed before it logged from where"
FROM_NOTHING = "a start from nothing, where no checkpoint was committed"


@dataclass
class KillCounts:
    """Counts of a case's kills by aim, by place, and by the next start."""

    aimed: Counter[str] = field(default_factory=Counter)
    fell: Counter[str] = field(default_factory=Counter)
    killed: Counter[str] = field(default_factory=Counter)
    followed_by: Counter[str] = field(default_factory=Counter)
    resumed_at: list[int] = field(default_factory=list)


def uninterrupted(case: Case, data: Path, run: Path, server: Server) -> float:
    """Train the case without a fault; returns the median seconds of its checkpoint writes."""
    life, seen, durations = Life(case, data, run, server), 0.0, []
    while life.running():
        if life.saving():
            seen = seen or time.monotonic()
        elif seen:
            durations.append(time.monotonic() - seen)
            seen = 0.0
        time.sleep(POLL)
    life.end()
    return sorted(durations)[len(durations) // 2] if durations else 0.01


def await_instant(life: Life, aim: str, share: float, rng: random.Random, save_seconds: float) -> None:
    """Return at the time to kill, or when the life ends before; `share`: updates of a life."""
    case = life.case
    if aim == "start":
        time.sleep(rng.uniform(0.0, START_SECONDS))
        return
    newest = max(saved_steps(life.run), default=0)
    ahead = rng.randint(2, 2 + int(2 * share)) if aim == "any" else 3 * case.interval  # saves may be missed
    reach = min(newest + ahead, case.steps - 1)
    pause = rng.uniform(0.0, {"any": 0.02, "save": save_seconds, "slow": life.slow[1]}[aim])

    def due() -> bool:
        return last_step(life.run) >= reach or (aim != "any" and bool(life.saving())) or not life.running()

    life.wait_until(due, f"{case.name}: no update and no save")
    time.sleep(pause)


def kill_again_and_again(
    case: Case, data: Path, run: Path, server: Server, kills: int, rng: random.Random, save_seconds: float
) -> KillCounts:
    """Kill the case's run `kills` times, restart it each time, then let it end.

    Raises Failure for a run that does not resume from its newest checkpoint, finds one damaged, or leaves a process behind;
    TimeoutError for one that hangs.
    """
    outcome, sessions = KillCounts(), set[int]()
    for number in range(kills + 1):
        aim = PLAN[(number + len(case.name)) % len(PLAN)]
        if aim == "any" and rng.random() < 0.2:
            aim = "start"
        slow = (rng.randrange(case.world), rng.uniform(*SLOW)) if aim == "slow" and number < kills else (0, 0.0)
        newest = max(saved_steps(run), default=0)
        life = Life(case, data, run, server, slow)
        sessions |= {rank.pid for rank in life.processes}
        try:
            if number < kills:
                await_instant(life, aim, case.steps / (kills + 1), rng, save_seconds)
            last = number == kills or not life.running()  # it ended before: fewer kills are counted
            if last:
                life.end()
            else:
                victims = rng.sample(range(case.world), 1 if rng.random() < 0.6 else case.world)
                outcome.fell[life.kill(victims)] += 1
                outcome.aimed[aim] += 1
                outcome.killed["all ranks" if len(victims) == case.world else "one rank"] += 1
        finally:
            life.stop()
        followed = check_resume(life, newest, outcome)
        if number:
            outcome.followed_by[followed] += 1
        if last:
            break
    await_end(sessions, f"{case.name}: ")
    return outcome


def check_resume(life: Life, newest: int, outcome: KillCounts) -> str:
    """How a life started. Raises Failure unless it resumed from the newest committed checkpoint, without damaged ones."""
    output, name = life.output(), life.case.name
    followed = UNSEEN
    if resumed := re.search(r"resuming from \S+ at step (\d+)", output):
        outcome.resumed_at.append(int(resumed[1]))
        if int(resumed[1]) != newest:
            raise life.failure(f"{name}: resumed at {resumed[1]}, {newest} was committed")
        followed = RESUMED
    elif re.search(r"^step ", output, re.M):
        if newest:
            raise life.failure(f"{name}: started over although {newest} was committed")
        followed = FROM_NOTHING
    if "going back" in output or "no usable checkpoint" in output:
        raise life.failure(f"{name}: a kill damaged a committed checkpoint")
    return followed


def survive(case: Case, data: Path, folder: Path, server: Server, kills: int, seed: int) -> dict[str, Any]:
    """Both runs of a case and their comparison; the result has `failure` (text) if something went wrong."""
    folder.mkdir(parents=True)
    straight, broken = folder / "uninterrupted", folder / "killed"
    started = time.monotonic()
    result: dict[str, Any] = {"world": case.world, "updates": case.steps, "checkpoint_interval": case.interval}
    result |= {"overrides": list(case.overrides), "kills": 0, "failure": None}
    try:
        save_seconds = uninterrupted(case, data, straight, server)
        outcome = kill_again_and_again(case, data, broken, server, kills, random.Random(seed), save_seconds)
        result |= {"kills": outcome.fell.total(), "checkpoint_write_seconds": round(save_seconds, 4)} | vars(outcome)
        lines = differences(straight, broken, case.steps)
        result["differences"] = len(lines)
        if lines:
            result["failure"] = f"{case.name}: {len(lines)} differences: " + "; ".join(lines[:5])
    except (Failure, TimeoutError) as error:
        result["failure"] = str(error)
    return result | {"seconds": round(time.monotonic() - started, 1)}


def differences(straight: Path, broken: Path, steps: int, exact: int | None = None) -> list[str]:
    """Differences between two finished runs, a line each: losses, rows, learning rate, weights, moments, but not times. `exact`: the
    last update before a start on another number of ranks; after it rows must be equal, and losses to rounding."""
    problems = []
    one, two = (hardware.logged(run) for run in (straight, broken))
    for name, lines in (("uninterrupted", one), ("killed", two)):
        updates = [line["step"] for line in lines if "train/loss" in line]
        if updates != list(range(1, steps + 1)):
            problems.append(f"the {name} run's updates are not 1..{steps} once each: {updates}")
    if len(one) != len(two):
        problems.append(f"the logs have {len(one)} and {len(two)} lines")
    for a, b in zip(one, two, strict=False):
        keys = {key for key in a.keys() | b.keys() if not key.startswith(("perf/", "time/"))}
        if rounded := exact is not None and a["step"] > exact:
            keys &= {"step", "data/cursor", "data/row_digest", "train/loss"}
        for key in sorted(keys):
            one_value, other = a.get(key, math.nan), b.get(key, math.nan)
            near = rounded and key == "train/loss" and math.isclose(one_value, other, rel_tol=ROUNDING)
            if one_value != other and not near:
                problems.append(f"step {a['step']}: {key} is {one_value!r} and {other!r}")
    hashes = [files_of(run, steps) for run in (straight, broken)]
    for name in sorted(hashes[0].keys() | hashes[1].keys()):
        if exact is None and hashes[0].get(name) != hashes[1].get(name):
            problems.append(f"the final checkpoint's {name} differs")
    left = [path.name for path in (broken / "checkpoints").glob(".*")]
    if left:
        problems.append(f"left in the killed run's folder: {left}")
    return problems


def files_of(run: Path, step: int) -> dict[str, str]:
    """SHA-256 of each file of a checkpoint by its manifest. Raises Failure for a file with another digest."""
    folder = run / "checkpoints" / f"step-{step:08d}"
    files = json.loads((folder / "manifest.json").read_text())["files"]
    digests = {name: entry["sha256"] for name, entry in files.items()}
    if damaged := [name for name, digest in digests.items() if hash_file(folder / name) != digest]:
        raise Failure(f"{folder / damaged[0]} is damaged")
    return digests
