"""A run that is killed at random instants and started again unaided must end as the run that never was.

Each case is trained once without a fault, then in lives: each life is started by the same command, goes on by itself
from what it finds, and is killed (SIGKILL, one rank or all) at an instant drawn at random: in its start, between updates,
inside a checkpoint write, or while one rank's write takes seconds longer. The last life ends by itself.
"""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.survival.compare import differences
from benchmarks.survival.life import (
    LIFE_ENDS_WITHIN,
    POLL,
    Case,
    Failure,
    Life,
    Server,
    in_sessions,
    steps_of,
    wait,
)

PLAN = ("any", "save", "any", "slow", "save", "any", "save", "any")  # what is aimed at, in turn
START_SECONDS = 0.5  # a start takes about so long
SLOW = (0.5, 6.0)  # seconds that one rank's write is delayed


@dataclass
class Outcome:
    """What a case came to: counts of kills by aim, place and victims, and what they cost."""

    kills: int = 0
    aimed: Counter[str] = field(default_factory=Counter)
    fell: Counter[str] = field(default_factory=Counter)
    victims: Counter[str] = field(default_factory=Counter)
    resumed_at: list[int] = field(default_factory=list)
    others_seconds: float = 0.0  # the longest that ranks took to end after another was killed
    by_command: int = 0
    sessions: set[int] = field(default_factory=set)


def uninterrupted(case: Case, data: Path, run: Path, server: Server) -> float:
    """Train the case without a fault; gives the median seconds of its checkpoint writes."""
    life, seen, durations = Life(case, data, run, server), 0.0, []
    while life.running():
        saving = bool(life.saving())
        if saving and not seen:
            seen = time.monotonic()
        elif seen and not saving:
            durations.append(time.monotonic() - seen)
            seen = 0.0
        time.sleep(POLL)
    life.end()
    return sorted(durations)[len(durations) // 2] if durations else 0.01


def await_instant(life: Life, aim: str, share: float, rng: random.Random, save_seconds: float) -> None:
    """Return at the instant to kill at; `share`: updates a life may make. Or at once when the life ends before."""
    case = life.case
    if aim == "start":
        time.sleep(rng.uniform(0.0, START_SECONDS))
        return
    newest = max(steps_of(life.run), default=0)
    reach = min(newest + rng.randint(2, 2 + int(2 * share)), case.steps - 1)
    pause = rng.uniform(0.0, {"any": 0.02, "save": save_seconds, "slow": life.slow[1]}[aim])

    def due() -> bool:
        arrived = life.step() >= reach if aim == "any" else bool(life.saving())
        return arrived or not life.running()

    wait(due, LIFE_ENDS_WITHIN, f"{case.name}: no update and no save")
    time.sleep(pause)


def kill_again_and_again(
    case: Case,
    data: Path,
    run: Path,
    server: Server,
    kills: int,
    rng: random.Random,
    save_seconds: float,
    by_command: Sequence[int] = (),
) -> Outcome:
    """Kill the case's run `kills` times, start it again each time, then let it end.

    `by_command`: the lives that the real command starts, without the server. Raises Failure for a run that does not go
    on from its newest checkpoint, finds one damaged, or leaves a process behind.
    """
    outcome = Outcome()
    for number in range(kills):
        aim = PLAN[(number + len(case.name)) % len(PLAN)]
        if aim == "any" and rng.random() < 0.2:
            aim = "start"
        slow = (rng.randrange(case.slow_ranks), rng.uniform(*SLOW)) if aim == "slow" else (0, 0.0)
        newest = max(steps_of(run), default=0)
        life = Life(case, data, run, None if number in by_command else server, slow)
        outcome.sessions |= {rank.pid for rank in life.ranks}
        try:
            await_instant(life, aim, 1.5 * case.steps / (kills + 1), rng, save_seconds)
            if not life.running():
                if all(rank.poll() == 0 for rank in life.ranks):
                    break  # it came to its end first: fewer kills are counted
                raise Failure(f"{case.name}: it ended before it was killed\n{life.output()[-3000:]}")
            victims = rng.sample(range(case.world), case.world)
            if rng.random() < 0.6:
                victims = victims[:1]
            place, took = life.kill(victims)
        finally:
            life.stop()
        outcome.kills += 1
        outcome.aimed[aim] += 1
        outcome.fell[place] += 1
        outcome.victims["all ranks" if len(victims) == case.world else "one rank"] += 1
        outcome.others_seconds = max(outcome.others_seconds, took)
        outcome.by_command += number in by_command
        check_resume(life, newest, outcome)
    newest = max(steps_of(run), default=0)
    life = Life(case, data, run, server)
    outcome.sessions |= {rank.pid for rank in life.ranks}
    life.end()
    check_resume(life, newest, outcome)
    wait(lambda: not in_sessions(outcome.sessions), 15.0, f"{case.name}: processes are left behind")
    return outcome


def check_resume(life: Life, newest: int, outcome: Outcome) -> None:
    """A life goes on from the newest checkpoint that was committed before it, and finds none damaged."""
    said, name = life.output(), life.case.name
    if resumed := re.search(r"resuming from \S+ at step (\d+)", said):
        outcome.resumed_at.append(int(resumed[1]))
        if int(resumed[1]) != newest:
            raise Failure(f"{name}: resumed at {resumed[1]}, {newest} was committed\n{said[-3000:]}")
    elif newest and re.search(r"^step ", said, re.M):
        raise Failure(f"{name}: started over although {newest} was committed\n{said[-3000:]}")
    if "going back" in said or "is whole" in said:
        raise Failure(f"{name}: a kill damaged a committed checkpoint\n{said[-3000:]}")


def survive(
    case: Case,
    data: Path,
    folder: Path,
    server: Server,
    kills: int,
    seed: int,
    by_command: Sequence[int] = (),
) -> dict[str, Any]:
    """Both runs of a case and their comparison; gives what happened. Raises Failure where anything differs."""
    folder.mkdir(parents=True)
    straight, broken = folder / "uninterrupted", folder / "killed"
    started = time.monotonic()
    save_seconds = uninterrupted(case, data, straight, server)
    middle = time.monotonic()
    rng = random.Random(seed)
    outcome = kill_again_and_again(case, data, broken, server, kills, rng, save_seconds, by_command)
    if found := differences(straight, broken, case.steps):
        raise Failure(f"{case.name}: {len(found)} differences: " + "; ".join(found[:5]))
    return {
        "world": case.world,
        "updates": case.steps,
        "checkpoint_interval": case.interval,
        "overrides": list(case.overrides),
        "kills": outcome.kills,
        "aimed_at": dict(outcome.aimed),
        "fell": dict(outcome.fell),
        "killed": dict(outcome.victims),
        "lives_started_by_the_real_command": outcome.by_command,
        "resumed_at": outcome.resumed_at,
        "checkpoint_write_seconds": round(save_seconds, 4),
        "others_ended_within_seconds": round(outcome.others_seconds, 2),
        "uninterrupted_seconds": round(middle - started, 1),
        "killed_seconds": round(time.monotonic() - middle, 1),
        "differences": 0,
    }
