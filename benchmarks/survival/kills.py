"""Training runs that are killed at random instants and started again unaided, compared with the same run left alone.

Each case is trained once without a fault, then in lives: each life is started by the same command, resumes by itself
from what it finds, and is killed (SIGKILL, one rank or all) at an instant drawn at random: in its start, between updates,
inside a checkpoint write, or while one rank's write takes seconds longer. The last life ends by itself. Everything a result
says is counted from what happened; a case that fails keeps its counts and says why.
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

from benchmarks.survival.compare import counts, differences
from benchmarks.survival.life import LIFE_ENDS_WITHIN, POLL, Case, Failure, Life, Server, in_sessions, steps_of, wait

# what is aimed at, in turn
PLAN = ("any", "save", "any", "slow", "save", "any", "save", "any")
# a start takes about so long
START_SECONDS = 0.5
# seconds that one rank's write is delayed
SLOW = (0.5, 6.0)
RESUMED, FROM_NOTHING, UNSEEN = (
    "a start from the newest checkpoint",
    "a start from nothing, where no checkpoint was committed",
    "a start that was killed before it said from where",
)


@dataclass
class KillCounts:
    """What a case came to: counts of kills by aim, place, victims and the start after each, and what they cost."""

    kills: int = 0
    aimed: Counter[str] = field(default_factory=Counter)
    fell: Counter[str] = field(default_factory=Counter)
    victims: Counter[str] = field(default_factory=Counter)
    followed_by: Counter[str] = field(default_factory=Counter)
    resumed_at: list[int] = field(default_factory=list)
    # the longest that ranks took to end after another was killed
    others_seconds: float = 0.0
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
    ahead = rng.randint(2, 2 + int(2 * share)) if aim == "any" else 3 * case.interval  # saves may pass unseen
    reach = min(newest + ahead, case.steps - 1)
    pause = rng.uniform(0.0, {"any": 0.02, "save": save_seconds, "slow": life.slow[1]}[aim])

    def due() -> bool:
        return life.step() >= reach or (aim != "any" and bool(life.saving())) or not life.running()

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
    by_command: Sequence[int],
    outcome: KillCounts,
) -> None:
    """Kill the case's run `kills` times, start it again each time, then let it end; `outcome` counts as it goes.

    `by_command`: the lives that the real command starts, without the server. Raises Failure for a run that does not go
    on from its newest checkpoint, finds one damaged, or leaves a process behind; TimeoutError for one that hangs.
    """
    for number in range(kills):
        aim = PLAN[(number + len(case.name)) % len(PLAN)]
        if aim == "any" and rng.random() < 0.2:
            aim = "start"
        slow = (rng.randrange(case.world), rng.uniform(*SLOW)) if aim == "slow" else (0, 0.0)
        newest = max(steps_of(run), default=0)
        life = Life(case, data, run, None if number in by_command else server, slow)
        outcome.sessions |= {rank.pid for rank in life.ranks}
        try:
            await_instant(life, aim, case.steps / (kills + 1), rng, save_seconds)
            if not life.running():
                life.end()  # every rank by itself, one after the other
                break  # it came to its end first: fewer kills are counted
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
        followed = check_resume(life, newest, outcome)
        if number:
            outcome.followed_by[followed] += 1
    newest = max(steps_of(run), default=0)
    life = Life(case, data, run, server)
    outcome.sessions |= {rank.pid for rank in life.ranks}
    life.end()
    followed = check_resume(life, newest, outcome)
    if outcome.kills:
        outcome.followed_by[followed] += 1
    wait(lambda: not in_sessions(outcome.sessions), 15.0, f"{case.name}: processes are left behind")


def check_resume(life: Life, newest: int, outcome: KillCounts) -> str:
    """How a life started. Raises Failure unless from the newest checkpoint committed before it, finding none damaged."""
    said, name = life.output(), life.case.name
    followed = UNSEEN
    if resumed := re.search(r"resuming from \S+ at step (\d+)", said):
        outcome.resumed_at.append(int(resumed[1]))
        if int(resumed[1]) != newest:
            raise Failure(f"{name}: resumed at {resumed[1]}, {newest} was committed\n{said[-3000:]}")
        followed = RESUMED
    elif re.search(r"^step ", said, re.M):
        if newest:
            raise Failure(f"{name}: started over although {newest} was committed\n{said[-3000:]}")
        followed = FROM_NOTHING
    if "going back" in said or "is whole" in said:
        raise Failure(f"{name}: a kill damaged a committed checkpoint\n{said[-3000:]}")
    return followed


def survive(
    case: Case, data: Path, folder: Path, server: Server, kills: int, seed: int, by_command: Sequence[int] = ()
) -> dict[str, Any]:
    """Both runs of a case and their comparison: what happened, with `failure` (text) where something went wrong."""
    folder.mkdir(parents=True)
    straight, broken = folder / "uninterrupted", folder / "killed"
    outcome, found = KillCounts(), {}
    save_seconds, started = 0.0, time.monotonic()
    middle, failure = started, None
    try:
        save_seconds = uninterrupted(case, data, straight, server)
        middle = time.monotonic()
        rng = random.Random(seed)
        kill_again_and_again(case, data, broken, server, kills, rng, save_seconds, by_command, outcome)
        found = counts(straight, broken, case.steps)
        lines = differences(straight, broken, case.steps)
        found["differences"] = len(lines)
        if lines:
            failure = f"{case.name}: {len(lines)} differences: " + "; ".join(lines[:5])
    except (Failure, TimeoutError) as error:
        failure = str(error)
    return {
        "world": case.world,
        "updates": case.steps,
        "checkpoint_interval": case.interval,
        "overrides": list(case.overrides),
        "kills": outcome.kills,
        "followed_by": dict(outcome.followed_by),
        "aimed_at": dict(outcome.aimed),
        "fell": dict(outcome.fell),
        "killed": dict(outcome.victims),
        "lives_started_by_the_real_command": outcome.by_command,
        "resumed_at": outcome.resumed_at,
        "checkpoint_write_seconds": round(save_seconds, 4),
        "others_ended_within_seconds": round(outcome.others_seconds, 2),
        "uninterrupted_seconds": round(middle - started, 1),
        "killed_seconds": round(time.monotonic() - middle, 1),
        **found,
        "failure": failure,
    }
