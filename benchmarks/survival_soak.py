"""A run of thousands of updates and dozens of restarts must not grow: memory, descriptors, shared memory, disk.

Two runs of one case are watched from outside, process by process. The one that is never interrupted shows growth
from its first part (after a warm-up) to its last; the one that is restarted, by SIGKILL and by SIGTERM in turn, shows
growth from its first lives to its last, each at the same age. Both must end the same.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from survival_compare import differences
from survival_life import Case, Failure, Life, Server, in_sessions, steps_of, wait

EVERY = 0.05  # seconds between two looks
REQUEUE = 85  # exit code of a run that was asked to stop
Sample = dict[str, float]


def look_at(pids: list[int]) -> Sample:
    """Sums over these processes: resident bytes, shared bytes among them, open descriptors, threads."""
    found: dict[str, float] = defaultdict(float)
    for pid in pids:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
            descriptors = len(os.listdir(f"/proc/{pid}/fd"))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it ended a moment ago
        fields = dict(line.split(":", 1) for line in status.splitlines())
        if "VmRSS" not in fields:
            continue
        found["processes"] += 1
        found["resident_bytes"] += int(fields["VmRSS"].split()[0]) * 1024
        found["shared_bytes"] += int(fields["RssShmem"].split()[0]) * 1024
        found["descriptors"] += descriptors
        found["threads"] += int(fields["Threads"])
    return dict(found)


def watch(life: Life, until: int | None) -> list[tuple[int, Sample]]:
    """(step, what its processes hold) again and again until update `until` is logged, or the life has ended."""
    sessions = {rank.pid for rank in life.ranks}
    samples: list[tuple[int, Sample]] = []
    while life.running() and (until is None or life.step() < until):
        samples.append((life.step(), look_at(in_sessions(sessions))))
        time.sleep(EVERY)
    return samples


def typical(samples: list[Sample]) -> Sample:
    """The median of each figure over the moments at which most processes were there."""
    most = max(sample.get("processes", 0) for sample in samples)
    whole = [sample for sample in samples if sample.get("processes", 0) == most]
    return {name: statistics.median(sample[name] for sample in whole) for name in whole[0]}


def growth(before: Sample, after: Sample) -> dict[str, float]:
    """Relative growth of each figure; what stays 0 grows by 0."""
    return {
        name: round(after[name] / before[name] - 1, 5) if before[name] else after[name] for name in before
    }


def soak(data: Path, folder: Path, updates: int, restarts: int, seed: int) -> dict[str, Any]:
    """Both runs; gives their growth and what they held. Raises Failure where they differ or do not survive."""
    folder.mkdir(parents=True)
    overrides = ("zero.stage=1", "data.workers=1", "log.tensorboard=true", "checkpoint.keep=3")
    case = Case("soak", 2, updates, 50, overrides)
    server, started, rng = Server(), time.monotonic(), random.Random(seed)
    try:
        straight = folder / "uninterrupted"
        life = Life(case, data, straight, server)
        samples = watch(life, None)
        life.end()
        parts = [
            typical([sample for step, sample in samples if low * updates < step <= high * updates])
            for low, high in ((0.1, 0.3), (0.8, 1.0))
        ]
        middle, run = time.monotonic(), folder / "restarted"
        ages, ends, sessions = [], defaultdict(int), set()
        for number in range(restarts):
            first = max(steps_of(run), default=0)
            life = Life(case, data, run, server)
            sessions |= {rank.pid for rank in life.ranks}
            # a share of what is left, and never so few updates that nothing can be seen
            until = first + max(60, int((updates - first) / (restarts + 1 - number) * rng.uniform(0.8, 1.2)))
            samples = watch(life, min(until, updates - 1))
            if not life.running():
                raise Failure(f"soak: it ended before its restart\n{life.output()[-3000:]}")
            ages.append(typical([sample for step, sample in samples if step >= first + 30]))
            if number % 2:
                for rank in life.ranks:
                    os.kill(rank.pid, signal.SIGTERM)
                wait(lambda life=life: all(r.poll() is not None for r in life.ranks), 60, "soak: SIGTERM")
                codes = [rank.poll() for rank in life.ranks]
                if codes != [REQUEUE] * case.world:
                    raise Failure(f"soak: exit codes {codes} after SIGTERM\n{life.output()[-3000:]}")
                ends["SIGTERM"] += 1
            else:
                life.kill(range(case.world))
                ends["SIGKILL"] += 1
        life = Life(case, data, run, server)
        life.end()
        wait(lambda: not in_sessions(sessions), 15.0, "soak: processes are left behind")
    finally:
        server.close()
    if found := differences(straight, run, updates):
        raise Failure(f"soak: {len(found)} differences: " + "; ".join(found[:5]))
    third = max(1, restarts // 3)
    early, late = typical(ages[1 : 1 + third]), typical(ages[-third:])
    pids = {str(pid) for pid in sessions}
    return {
        "updates": updates,
        "restarts": dict(ends),
        "overrides": list(overrides),
        "uninterrupted": {"early": parts[0], "late": parts[1], "growth": growth(*parts)},
        "restarted": {"early": early, "late": late, "growth": growth(early, late)},
        "shared_memory_files_left": sum(
            any(pid in name.split("_") for pid in pids) for name in os.listdir("/dev/shm")
        ),
        "checkpoints_left": len(steps_of(run)),
        "uninterrupted_seconds": round(middle - started, 1),
        "restarted_seconds": round(time.monotonic() - middle, 1),
        "differences": 0,
    }
