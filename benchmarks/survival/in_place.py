"""Restarts in place (`train --in-place`) under kills, TERMs and time limits at random instants: no update is lost, none differs.

A run is trained by jobs of the same command. In each ranks are killed, some of them during a save, an evaluation or a restart; then
it is ended: by TERM, by its time limit, by kills of keepers, or because the run is finished. The log of a job says which updates were
reported and at which one each start resumed. The finished run is compared with one without a fault: all metrics but times and the
final checkpoint bit for bit; after a start on fewer ranks the rows bit for bit, and the losses to rounding. Keepers and ranks are
forked by a process that has done their imports, as no standby process is in the product: hundreds of kills take minutes.

`recover` times restarts of two ranks as a user starts them, on cores that nothing else uses. In place they start again from copies in
memory; torchrun's agent starts them again from a checkpoint, and the updates after it are repeated. Each kill waits until APART updates
were made, time enough for the imports of the next standby process.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import hardware
from benchmarks.survival import life, records
from benchmarks.survival.kills import differences
from benchmarks.survival.life import Case, Failure, Ranks, Server, await_end, last_step, saved_steps
from benchmarks.survival.records import FINISHED, IN_EVALUATION, IN_SAVE, INTERVAL, LIMIT, TERM, Event, Record

TRAIN = str(hardware.ROOT / "megabert/train.py")
# updates of a run for each of its kills, and between evaluations; the most updates from one event to the next
STEPS_A_KILL, EVALUATION, BETWEEN = 20, 3, 16
BEST = (f"eval.interval={EVALUATION}", "eval.patience=1000", "checkpoint.keep_every=50")
LAMB = ("zero.stage=2", "optimizer.name=lamb", "data.workers=1", "checkpoint.asynchronous=false")
# cases, with the host of each rank
CASES = (
    (Case("2 ranks, ZeRO-1", 2, 0, INTERVAL, ("zero.stage=1", *BEST)), (0, 0)),
    (Case("3 ranks on 2 hosts, ZeRO-3", 3, 0, INTERVAL, ("zero.stage=3", *BEST)), (0, 0, 1)),
    (Case("2 hosts, ZeRO-0, fp32", 2, 0, INTERVAL, ("zero.stage=0", "precision=fp32", *BEST)), (0, 1)),
    (Case("3 ranks on 2 hosts, ZeRO-2, LAMB, a loader process", 3, 0, INTERVAL, (*LAMB, *BEST)), (0, 1, 1)),
    (Case("2 hosts, ZeRO-1, Muon, modern, no checkpoints", 2, 0, 0, ("zero.stage=1", *life.MODERN_MUON)), (0, 1)),
)
MOST_KILLS = 5  # of a job before its end
LIMITS = (7.5, 12.0)  # seconds of `--max-time`, of which a start and 5 s for saving are not training
SLOW = (0.05, 1.0)  # seconds by which one rank's first save after each start is delayed, in half of the jobs
A_RUN, MOST_JOBS = 12, 60  # kills and the most jobs of a run
TIMED = 2  # ranks of timed kills
APART = (600, 900)  # of timed kills: updates from a restart to the next kill, at least and at most
Hosts = tuple[int, ...]  # the host of each rank
SAVED_EVERY = 300  # updates between the checkpoints that torchrun's restarts load


class KeptRanks(Ranks):
    """The ranks of one start, each the child of its keeper; `hosts`: the host of each."""

    def __init__(self, argv: list[str], run: Path, hosts: Hosts) -> None:
        super().__init__(run)
        self.processes = self._start([*argv, "--run", str(run)], hosts)

    def _start(self, argv: list[str], hosts: Hosts) -> list[Any]:
        command, processes = [sys.executable, TRAIN, *argv, "--in-place"], []
        for rank, place in enumerate(hardware.rank_places(len(hosts))):
            of_host = {"LOCAL_RANK": str(hosts[:rank].count(hosts[rank])), "SLURMD_NODENAME": f"n{hosts[rank]}"}
            processes.append(self._process(command, place | of_host))
        return processes

    def _process(self, command: list[str], env: dict[str, str]) -> Any:
        env = os.environ | env | {"OMP_NUM_THREADS": "1"}
        with self.log.open("ab") as file:
            return subprocess.Popen(command, env=env, cwd=hardware.ROOT, stdout=file, stderr=file)

    def wait_for_step(self, step: int) -> None:
        """Raises Failure where the run ends or hangs before that update is logged."""
        self.wait_until(lambda: last_step(self.run) >= step or self.ended(), f"no update {step}")
        if last_step(self.run) < step:
            raise self.failure(f"ended before step {step}")

    def kill_rank(self, rank: int) -> None:
        """SIGKILL the child that trains, which is older than the one that waits to follow it, as soon as there is one."""
        keeper = self.processes[rank]
        self.wait_until(lambda: keeper.poll() is not None or life.children_of(keeper.pid), f"rank {rank} is missing")
        for child in life.children_of(keeper.pid)[:1]:
            with contextlib.suppress(ProcessLookupError):  # killed by its keeper meanwhile
                os.kill(child, signal.SIGKILL)

    def curve(self) -> dict[int, tuple[float, float, str]]:
        """By step: loss, gradient norm, digest of the rows."""
        lines = [line for line in hardware.logged(self.run) if "train/loss" in line]
        return {line["step"]: (line["train/loss"], line["train/grad_norm"], line["data/row_digest"]) for line in lines}


class Job(KeptRanks):
    """A start of a run's command by forked keepers, watched while it is disturbed."""

    def __init__(self, case: Case, hosts: Hosts, data: Path, run: Path, server: Server, record: Record) -> None:
        self.server, self.record, self.case = server, record, case
        # the folder in memory of each rank's keeper, and sessions of the ranks and keepers seen
        self.folders: dict[int, Path] = {}
        self.sessions: set[int] = set()
        self._newest = -1
        self.started = time.monotonic()
        limit = [f"--max-time={record.max_time}s"] if record.max_time else []
        super().__init__([*case.words(data), *limit], run, hosts)

    def _process(self, command: list[str], env: dict[str, str]) -> life.Forked:
        return self.server.start(command[2:], env, self.log, self.record.slow.get(int(env["RANK"]), 0.0))

    def wait_until(self, condition: Callable[[], Any], what: str) -> None:
        def watched() -> Any:
            self._look()
            return condition()

        super().wait_until(watched, what)

    def _look(self) -> None:
        """Find the keepers' folders, a link `best` that leads nowhere, and a new checkpoint without that of its best update."""
        for rank, keeper in enumerate(self.processes):
            if rank not in self.folders and (folder := find_folder(keeper.pid)):
                self.folders[rank] = folder
        link = self.run / "best"
        self.record.best, before = target_of(link), self.record.best
        reasons = []
        if (self.record.best or before) and not link.exists() and target_of(link) == self.record.best:
            reasons = [f"best leads nowhere: {self.record.best}"]
        if (newest := max(saved_steps(self.run), default=-1)) != self._newest:
            self._newest = newest
            reasons += records.missing_best(self.run, newest)
        self.record.failures += [reason for reason in reasons if reason not in self.record.failures]

    def note(self, kind: str) -> None:
        """Record an event, which follows."""
        place = round(time.monotonic() - self.started, 3), last_step(self.run), self.log.stat().st_size - self._begin
        self.record.events.append(Event(kind, *place))
        self.sessions |= {pid for keeper in self.processes for pid in (keeper.pid, *life.children_of(keeper.pid))}

    def codes(self) -> list[int]:
        while self.reach(BETWEEN, FINISHED, 0.0):
            pass  # a job that trains does not hang
        return super().codes()

    def pause(self, seconds: float) -> bool:
        """Whether the job has not ended by then."""
        until = time.monotonic() + seconds
        self.wait_until(lambda: time.monotonic() >= until or self.ended(), "")
        return not self.ended()

    def reach(self, updates: int, kind: str, within: float) -> bool:
        """Wait for that many updates and the situation for the event `kind`, then up to `within` seconds; whether the job still runs."""
        goal, stale = last_step(self.run) + updates, set(life.saves_of(self.run))

        def due() -> bool:
            step = last_step(self.run)
            met = {IN_EVALUATION: step % EVALUATION == 0, IN_SAVE: bool(set(life.saves_of(self.run)) - stale)}
            return (step >= goal and met.get(kind, True)) or self.ended()

        self.wait_until(due, f"no update {goal}")
        return self.pause(within)

    def kill_ranks(self, kind: str, chance: random.Random) -> None:
        size = len(self.processes)
        self.note(kind)
        for rank in chance.sample(range(size), chance.randint(2, size) if kind == "several ranks" else 1):
            self.kill_rank(rank)
        if kind == records.AGAIN and self.pause(chance.uniform(0.0, 1.5)):
            self.note(kind)
            self.kill_rank(chance.randrange(size))

    def terminate(self, chance: random.Random, all_keepers: bool) -> None:
        """TERM to all keepers or one of them; in a third of the cases twice, as if a launcher and the batch system forward it."""
        living = [keeper for keeper in self.processes if keeper.poll() is None]
        asked = living if all_keepers or chance.random() < 0.7 else living[:1]
        for pause in (0.0, chance.uniform(0.0, 0.3))[: 1 if chance.random() < 0.7 else 2]:
            self.pause(pause)
            for keeper in asked:
                keeper.send_signal(signal.SIGTERM)


def find_folder(keeper: int) -> Path | None:
    """The folder in memory that a keeper has open."""
    with contextlib.suppress(OSError):  # it has just ended, or closed one
        links = " ".join(os.readlink(entry) for entry in os.scandir(f"/proc/{keeper}/fd"))
        if found := re.search(r"/dev/shm/megabert-keeper-\w+", links):
            return Path(found[0])
    return None


def target_of(link: Path) -> str | None:
    with contextlib.suppress(FileNotFoundError):
        return os.path.basename(os.readlink(link))
    return None


def disturb(job: Job, chance: random.Random, end: str, most: int) -> None:
    """Kill ranks, at most `most` times, then end the job by `end`, unless it has ended before."""
    rare = () if job.case.interval else (IN_EVALUATION, IN_SAVE)
    kinds = {kind: weight for kind, weight in records.KILLS.items() if kind not in rare}
    if end == TERM and chance.random() < 0.3:  # during the start
        if job.pause(chance.uniform(0.0, 2.0)):
            job.note(TERM)
            job.terminate(chance, all_keepers=True)
        return
    if end == LIMIT:
        for _ in range(min(chance.randint(1, 10), most)):
            if not job.reach(1, end, chance.uniform(0.0, 1.5)):
                return
            job.kill_ranks("a rank", chance)
        return
    for _ in range(min(chance.randint(0, MOST_KILLS), most)):
        (kind,) = chance.choices(list(kinds), list(kinds.values()))
        within = chance.uniform(0.0, 0.5 if kind == IN_SAVE and job.record.slow else 0.05)
        if not job.reach(chance.randint(1, BETWEEN), kind, within):
            return
        job.kill_ranks(kind, chance)
    if not job.reach(chance.randint(1, BETWEEN), end, chance.uniform(0.0, 0.05)):
        return
    if end == TERM:
        job.note(TERM)
    elif end in records.DELAYS:
        job.kill_ranks(end, chance)
        job.pause(records.DELAYS[end])
    else:
        size = len(job.processes)
        job.note(end)
        job.record.killed += range(size) if end == records.ALL_KEEPERS else [chance.randrange(size)]
        for rank in job.record.killed:
            job.processes[rank].kill()
        if end == records.ALL_KEEPERS or not job.reach(chance.randint(1, BETWEEN), end, 0.0):
            return
    job.terminate(chance, all_keepers=False)


def disturb_run(case: Case, hosts: Hosts, data: Path, run: Path, server: Server, seed: str, kills: int) -> list[Record]:
    """Train a run in disturbed jobs, until it is finished, with about `kills` kills."""
    jobs, left = list[Record](), set[Path]()  # jobs; folders of killed keepers, which the next start removes
    before = record = Record(case.name, len(set(hosts)), seed)
    while left or before.others != {0}:
        if len(jobs) == MOST_JOBS:
            before.failures.append(f"the run is not finished after {MOST_JOBS} jobs")
            break
        chance = random.Random(f"{seed}-{len(jobs)}")
        most = 0 if before.others == {0} else kills - sum(map(records.count_kills, jobs))
        end = chance.choices(list(records.ENDS), list(records.ENDS.values()))[0] if most > 0 else FINISHED
        record = Record(case.name, len(set(hosts)), f"{seed}-{len(jobs)}")
        record.max_time = round(chance.uniform(*LIMITS), 2) if end == LIMIT else None
        record.slow = {chance.randrange(case.world): chance.uniform(*SLOW)} if chance.random() < 0.5 else {}
        job = Job(case, hosts, data, run, server, record)
        try:
            if end != FINISHED:
                disturb(job, chance, end, most)
            record.codes, record.seconds = job.codes(), round(time.monotonic() - job.started, 2)
            if record.max_time and record.others == {records.REQUEUE}:
                job.note(LIMIT)
            await_end(job.sessions, "")
        except (Failure, TimeoutError) as error:
            job.stop()
            record.failures.append(str(error))
            record.killed, record.codes = list(range(len(hosts))), job.codes()
        record.saved = max(saved_steps(run), default=0)
        records.account(record, job.printed(), before.last, before.saved)
        records.check_best(record, run, job.printed())
        lost = {folder for rank, folder in job.folders.items() if rank in record.killed}
        if len(job.folders) < len(hosts):  # some keepers were not started
            lost |= left
        there = {folder for folder in {*job.folders.values(), *left} if folder.exists()}
        if there - lost:
            record.failures.append(f"left in memory: {sorted(map(str, there - lost))}")
        left, before = there & lost, record
        jobs.append(record)
        print(json.dumps(asdict(record)), flush=True)
    return jobs


def survive_in_place(data: Path, folder: Path, kills: int, seed: int) -> dict[str, Any]:
    """Runs of CASES, one after the other, until `kills` kills were done, or Ctrl-C. Their jobs, totals and failures."""
    folder.mkdir()
    server, started = Server(), time.monotonic()
    jobs, differ = list[Record](), list[str]()
    runs, steps = 0, STEPS_A_KILL * min(kills, A_RUN)
    try:
        while (done := sum(map(records.count_kills, jobs))) < kills:
            case, hosts = CASES[runs % len(CASES)]
            case, whole, run = replace(case, steps=steps), folder / case.name, folder / f"run-{runs}"
            if not whole.exists():
                plain = Job(case, hosts, data, whole, server, Record(case.name, 0, ""))
                if any(plain.codes()):
                    raise plain.failure(f"{case.name}: {plain.codes()}")
            jobs += disturb_run(case, hosts, data, run, server, f"{seed}-{runs}", min(A_RUN, kills - done))
            starts = map(json.loads, (run / "starts.jsonl").read_text().splitlines())
            exact = min((start["step"] for start in starts if start["ranks"] < case.world), default=None)
            unread = [f"the log's last update is {jobs[-1].last}, not {steps}"] * (jobs[-1].last != steps)
            differ += [f"{case.name}, run {runs}: {line}" for line in unread + differences(whole, run, steps, exact)]
            runs += 1
    except KeyboardInterrupt:
        print(f"interrupted after {runs} runs", flush=True)
    finally:
        server.close()
    return records.totals(jobs) | {"runs": runs, "differences": differ, "seconds": round(time.monotonic() - started, 1)}


class RestartedRanks(KeptRanks):
    """Ranks under torchrun's agent, which ends all of a host when one dies, and starts all again."""

    def _start(self, argv: list[str], hosts: Hosts) -> list[Any]:
        options = [f"--nproc-per-node={len(hosts)}", "--max-restarts=1000", "--monitor-interval=0.1"]
        options += ["--master-addr=127.0.0.1", f"--master-port={hardware.free_port()}"]
        return [self._process([sys.executable, "-m", "torch.distributed.run", *options, "--", TRAIN, *argv], {})]

    def kill_rank(self, rank: int) -> None:
        os.kill(life.children_of(self.processes[0].pid)[rank], signal.SIGKILL)


def recover(data: Path, folder: Path, kills: int, seed: int) -> dict[str, Any]:
    """Seconds of `kills` recoveries each way. Raises Failure."""
    in_place = restarted(KeptRanks, data, folder / "in-place", kills, seed, 0)
    torchrun = restarted(RestartedRanks, data, folder / "torchrun", kills, seed, SAVED_EVERY)
    return {"ranks": TIMED, "kills": kills, "in_place": in_place, "torchrun": torchrun}


def restarted(kind: type[KeptRanks], data: Path, run: Path, kills: int, seed: int, interval: int) -> dict[str, Any]:
    """Restarts of all ranks: seconds from the kill to an update that was not made before it."""
    case = Case(run.name, TIMED, (kills + 1) * APART[1], interval, ("checkpoint.keep=1",))
    words = [word for word in case.words(data) if not word.startswith("peak_tflops=")]  # by the defaults
    job, chance, seconds = kind(words, run, (0,) * TIMED), random.Random(seed), []
    try:
        for _ in range(kills):
            job.wait_for_step(last_step(run) + chance.randint(*APART))
            started, starts = time.monotonic(), count_starts(run)
            job.kill_rank(chance.randrange(TIMED))
            before = last_step(run)
            job.wait_until(partial(lambda before: count_starts(run) > before or job.ended(), starts), "no restart")
            # the old ranks may have logged one more meanwhile
            job.wait_for_step(max(before, last_step(run)) + 1)
            seconds.append(time.monotonic() - started)
    finally:
        job.stop()
    named = {"median": statistics.median(seconds), "p90": sorted(seconds)[int(0.9 * kills)], "most": max(seconds)}
    return {"seconds_to_next_update": {name: round(value, 2) for name, value in named.items()}}


def count_starts(run: Path) -> int:
    return (run / "starts.jsonl").read_bytes().count(b"\n")
