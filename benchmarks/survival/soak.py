"""Growth of a run over thousands of updates and dozens of restarts: memory, descriptors, shared memory, disk.

A run is watched from outside, process by process. Its first life is long, and growth is measured from its first part (after a
warm-up) to its last. Then it is restarted repeatedly, alternately after SIGKILL and SIGTERM, and growth is measured from early
lives to late ones, each after its warm-up.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.common import hardware
from benchmarks.survival.life import Case, Failure, Life, Server, await_end, in_sessions, last_step, saved_steps, wait

EVERY = 0.2  # seconds between two samples
WARM_UP = 0.2  # of the first life
BATCH = 8  # rows of an update, as in life.TINY
MIB = 1 << 20
REQUEUE = 85  # exit code of a stopped run
Sample = dict[str, float]


def look_at(pids: list[int]) -> Sample:
    """Sums over these processes: resident bytes, of these private and shared, open descriptors, threads."""
    sums = Counter[str]()
    for pid in pids:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
            descriptors = len(os.listdir(f"/proc/{pid}/fd"))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it has just ended
        fields = dict(line.split(":", 1) for line in status.splitlines())
        if "VmRSS" not in fields:
            continue
        sums.update({"processes": 1, "descriptors": descriptors, "threads": int(fields["Threads"])})
        for name, field in (("resident", "VmRSS"), ("private", "RssAnon"), ("shared", "RssShmem")):
            sums[f"{name}_bytes"] += int(fields[field].split()[0]) * 1024
    return dict(sums)


def watch(life: Life, until: int) -> list[tuple[int, Sample]]:
    """(step, figures of its processes) repeatedly until update `until` is reached or the life has ended."""
    sessions = {rank.pid for rank in life.processes}
    samples: list[tuple[int, Sample]] = []
    while life.running() and (step := last_step(life.run)) < until:
        samples.append((step, look_at(in_sessions(sessions))))
        time.sleep(EVERY)
    return samples


def typical(samples: list[Sample]) -> Sample:
    """The median of each figure over the samples with the largest number of processes. Raises Failure without samples."""
    if not samples:
        raise Failure(f"soak: a life ended within {EVERY} s of its window; more updates are needed")
    most = max(sample.get("processes", 0) for sample in samples)
    whole = [sample for sample in samples if sample.get("processes", 0) == most]
    return {name: statistics.median(sample[name] for sample in whole) for name in whole[0]}


def growth(before: Sample, after: Sample) -> dict[str, float]:
    """Relative growth of each figure, of bytes relative to a MiB at least, since pages come and go; of a figure that was 0 its value."""
    base = {name: max(value, MIB) if name.endswith("_bytes") else value for name, value in before.items()}
    return {name: round((after[name] - before[name]) / base[name], 5) if base[name] else after[name] for name in before}


def soak(data: Path, folder: Path, updates: int, restarts: int, seed: int) -> dict[str, Any]:
    """Run the soak test; returns growth and figures. Raises Failure if the run fails, or is too short.

    Two fifths of the updates are in the first life, the others are divided among the later ones. `data` is so small that all of it is
    read in the warm-up, since a shard, or its short last block, is mapped on first use.
    """
    folder.mkdir(parents=True)
    overrides = ("zero.stage=1", "data.workers=1", "log.tensorboard=true", "log.interval=5", "checkpoint.keep=3")
    case = Case("soak", 2, updates, 50, overrides)
    run, alone = folder / "run", updates * 2 // 5
    rows = json.loads((data / "manifest.json").read_text())["rows"]
    if rows > BATCH * alone * WARM_UP:
        raise Failure(f"soak: the warm-up of {updates} updates is too short to read all {rows} rows of {data}")
    server, started, rng = Server(), time.monotonic(), random.Random(seed)
    lives, ends, sessions = list[Sample](), Counter[str](), set[int]()
    try:
        for number in range(restarts):
            first = max(saved_steps(run), default=0)
            life = Life(case, data, run, server)
            sessions |= {rank.pid for rank in life.processes}
            share = (updates - first) / (restarts + 1 - number)
            until = first + int(max(share, 70) * rng.uniform(0.8, 1.2)) if number else alone
            samples = watch(life, min(until, updates - 10))
            if not life.running():
                raise life.failure("soak: it ended before its restart")
            if not number:
                parts = [
                    typical([sample for step, sample in samples if low * alone < step <= high * alone])
                    for low, high in ((WARM_UP, 2 * WARM_UP), (1 - WARM_UP, 1.0))
                ]
            else:
                lives.append(typical([sample for step, sample in samples if step >= first + 30]))
            ends[end(life, bool(number % 2))] += 1
        life = Life(case, data, run, server)
        sessions |= {rank.pid for rank in life.processes}
        life.end()
        await_end(sessions, "soak: ")
    finally:
        server.close()
    logged_updates = [line["step"] for line in hardware.logged(run) if "train/loss" in line]
    if logged_updates != list(range(5, updates + 1, 5)):
        raise Failure(f"soak: logged updates are not 5, 10, .. {updates} once each: {logged_updates}")
    third = max(1, len(lives) // 3)
    early, late = typical(lives[:third]), typical(lives[-third:])
    left = [name for name in os.listdir("/dev/shm") if {str(pid) for pid in sessions} & set(name.split("_"))]
    return {
        "updates": updates, "restarts": dict(ends), "overrides": list(overrides),
        "first_life": {"early": parts[0], "late": parts[1], "growth": growth(*parts)},
        "restarted": {"early": early, "late": late, "growth": growth(early, late)},
        "shared_memory_files_left": len(left), "checkpoints_left": len(saved_steps(run)),
        "seconds": round(time.monotonic() - started, 1),
    }  # fmt: skip


def end(life: Life, gently: bool) -> str:
    """End a life by SIGTERM, after which every rank has to save and exit with 85, or by SIGKILL; returns the name of the signal."""
    if not gently:
        life.kill(range(life.case.world))
        return "SIGKILL"
    for rank in life.processes:
        rank.send_signal(signal.SIGTERM)
    wait(life.ended, 60, "soak: SIGTERM")
    codes = [rank.poll() for rank in life.processes]
    if codes != [REQUEUE] * life.case.world:
        raise life.failure(f"soak: exit codes {codes} after SIGTERM")
    return "SIGTERM"
