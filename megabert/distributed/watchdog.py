"""Watchdog over the ranks: names ranks that died, stopped or hang, and ends the whole job with exit code 4.

Every rank sends a heartbeat per second, over a separate connection to the process group's store, with the position of its main
thread and the number of collectives it has entered. Each rank has two threads: `_exchange` reads and writes the store, and may
block when the process that hosts it is stopped; `_judge` never blocks. Both run while the main thread waits in a collective.

    a rank's process has exited, or a rank on another host    that rank has failed
    sent no heartbeat for LOST_SECONDS
    no rank made progress within the limit (see below)        the ranks without a heartbeat have failed; if there are none,
                                                              those that block the others (`find_failed_ranks`)
    the store has closed, does not answer for LOST_SECONDS    rank 0, which hosts it, has failed
    (rank 0 on another host), or does not answer at the limit

The limit is `timeout` seconds, or GAPS times the longest time without progress since training started, if that is longer.

The first rank that finds a failed rank writes a verdict to the store, and every rank acts on it: it writes its stacks to
`hang-RANK.txt`, kills failed ranks on its host that send no heartbeat, and exits. Time is counted in ticks of `_judge`, so that
a job that was suspended as a whole does not exceed the limit when it resumes.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from megabert.common.environment import host_name
from megabert.common.errors import FAILED, record_exit_code
from megabert.common.logs import write_notice
from megabert.common.processes import is_alive, pid_namespace
from megabert.distributed.ranks import World, wait_for_ranks

START_SECONDS = 600.0  # minimum limit before the first update, while checkpoints are read
# Minimum limit while rank 0 closes its sinks and the others wait for it; less than `ranks.TIMEOUT`.
CLOSING_SECONDS = 1100.0
GAPS = 3  # the limit is at least this multiple of the longest observed time without progress
TICK = 1.0  # seconds between heartbeats
# Seconds without a heartbeat after which a rank counts as stopped, once the limit is exceeded.
SILENT_SECONDS = 5.0
SUSPENDED_SECONDS = 10.0  # seconds without a tick after which the process itself was suspended
LOST_SECONDS = 12.0  # seconds without a heartbeat after which a rank on another host counts as lost
# Ticks after which a missing process counts as dead; its last heartbeat may still say that it ended normally.
GONE_TICKS = 2
# Seconds after which an unreachable store counts as lost; rank 0 may just have ended normally.
STORE_SECONDS = 3.0
# Seconds for which rank 0, which hosts the store, waits after a verdict, so that the others can read it.
READERS_SECONDS = 2.5
SHOWN = 8  # maximum number of failed ranks in a message
EXPLAIN_SECONDS = 8.0  # seconds to wait for a verdict after a collective failed
PACKAGE = str(Path(__file__).parents[1]) + os.sep  # this package, which may be installed in a library folder
LIBRARIES = (*{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}, "<")
ROUND_TRIPS = 64  # heartbeats in the moving average of the round trip: about a minute
# Code in which ranks wait for each other.
COLLECTIVES = (f"torch{os.sep}distributed{os.sep}", f"deepspeed{os.sep}comm{os.sep}")


@dataclass
class Peer:
    """Host and process of a rank, its last heartbeat, and the time since then."""

    rank: int
    host: str
    namespace: str  # `pid_namespace` of the process
    pid: int
    beat: int = -1  # number of the heartbeat
    step: int = 0  # updates done
    doing: str = "starting"  # position of the main thread
    waiting: bool = False  # the main thread is in a collective
    entered: dict[str, int] = field(default_factory=dict)  # collectives entered, finished or not, by process group
    left: bool = False  # the rank ended normally, so its missing process is no failure
    idle: float = math.inf  # seconds without progress
    silent: float = 0.0  # seconds without a heartbeat
    gone: int = 0  # ticks since its process has ended

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"


@dataclass(frozen=True)
class Verdict:
    """Why the job ends (`text`), and the failed ranks' hosts. `hang`: every rank writes its stacks; `kill`: ranks to
    kill; `speaker`: the rank that prints `text`."""

    text: str
    hosts: list[str]
    hang: bool
    kill: list[int]
    speaker: int


class Watchdog:
    """Monitors this rank's progress and the others' heartbeats from `start` (a collective) to `stop`."""

    def __init__(self, world: World, run_dir: str | Path, timeout: float) -> None:
        """`timeout`: seconds without progress after which the job ends; 0 for no limit. Stacks are written to `run_dir`."""
        self.world, self.run_dir, self.timeout = world, Path(run_dir), timeout
        self._step = self._finished = self._beat = self._answers = 0
        # Seconds without progress, without an answer of the store, and since this rank proposed a verdict.
        self._idle = self._store_silent = self._pending = 0.0
        # The longest time between signs of progress since `training_started`; None before that.
        self._longest: float | None = None
        # Mean round trip to the store in seconds over the last ROUND_TRIPS since `training_started`, and their number.
        self.round_trip, self._round_trips = 0.0, 0
        self.started = False  # all ranks have started their watchdogs
        # Time of the newest tick of `_judge`, and seconds for which the process was suspended until then.
        self._ticked = 0.0, 0.0
        self._failed = self._unreachable = self._good = self._closing = False
        self._leaving, self._left = threading.Event(), threading.Event()
        self._heartbeats: dict[int, dict[str, Any]] = {}
        self._proposal: Verdict | None = None
        self._verdict: Verdict | None = None

    def start(self) -> None:
        """Start sending and reading heartbeats. A collective."""
        world = self.world
        places = world.gather([host_name(), pid_namespace(), os.getpid()])
        self._peers = [Peer(rank, *place) for rank, place in enumerate(places)]
        # A launcher that restarts ranks may keep its store, with the heartbeats of an earlier attempt.
        self._prefix = world.broadcast(f"watchdog-{os.getpid()}-{time.time_ns()}")
        self._store: Any = dist.HashStore()
        if world.size > 1:
            assert world.master is not None
            timeout = timedelta(seconds=30)
            self._store = dist.TCPStore(*world.master, is_master=False, wait_for_workers=False, timeout=timeout)
        self._send_heartbeat()
        world.barrier()  # every rank's first heartbeat is in the store
        self._ticked = time.perf_counter(), 0.0
        for function in (self._exchange, self._judge):
            threading.Thread(target=function, name=f"watchdog {function.__name__}", daemon=True).start()
        self.started = True

    def progress(self, step: int | None = None) -> None:
        """Report progress: an update (`step`: its number), a micro-step, an evaluation batch, a save, or a stage of opening a
        run."""
        self._finished += 1
        self._step = self._step if step is None else step

    def clock(self) -> float:
        """Seconds, as `time.perf_counter` has them, without those in which the process was suspended (SIGSTOP, `scontrol suspend`, a
        paused container)."""
        (ticked, suspended), now = self._ticked, time.perf_counter()
        return now - suspended - (_suspended(now - ticked) if self.started else 0.0)

    def training_started(self) -> None:
        """Training starts: measure the times between signs of progress from now on."""
        self._longest = 0.0
        self._round_trips = 0
        self._closing = False

    def training_ended(self) -> None:
        """Training has ended; allow CLOSING_SECONDS from now on, since closing a sink may upload files."""
        self._closing = True

    def stop(self, good: bool) -> None:
        """Stop the threads. `good`: a clean exit, which the other ranks do not report as a failure."""
        self._good = good
        self._leaving.set()
        if self.started:
            self._left.wait(2 * TICK)

    def exit_if_rank_died(self) -> None:
        """After a failed collective, wait for the watchdog to exit this process if another rank has died; else
        return."""
        self._failed = True
        time.sleep(EXPLAIN_SECONDS)

    # -- heartbeats: the only thread that touches the store ---------------------------------------------------------

    def _exchange(self) -> None:
        while not self._leaving.wait(TICK):
            try:
                self._send_heartbeat()
                started = time.perf_counter()
                self._read_heartbeats()
                self._round_trips = count = min(self._round_trips + 1, ROUND_TRIPS)
                self.round_trip += (time.perf_counter() - started - self.round_trip) / count
                self._share_verdict()
                self._answers += 1
                self._unreachable = False
            except RuntimeError:  # base class of torch's store errors
                self._unreachable = True
        try:
            self._send_heartbeat()
        except RuntimeError:
            self._unreachable = True  # rank 0 has left already
        self._left.set()

    def _send_heartbeat(self) -> None:
        self._beat += 1
        self._store.set(self._key(self.world.rank), json.dumps(self._heartbeat()))

    def _heartbeat(self) -> dict[str, Any]:
        doing, waiting = main_thread()
        left = self._leaving.is_set() and self._good
        own = {"beat": self._beat, "step": self._step, "left": left, "idle": self._idle}
        return own | {"doing": doing, "waiting": waiting, "entered": entered()}

    def _read_heartbeats(self) -> None:
        ranks = [peer.rank for peer in self._watched()]
        for rank, text in zip(ranks, self._store.multi_get([self._key(rank) for rank in ranks]), strict=True):
            self._heartbeats[rank] = json.loads(text)

    def _share_verdict(self) -> None:
        key = f"{self._prefix}-verdict"
        if self._proposal is not None:
            first = self._store.compare_set(key, "", json.dumps(vars(self._proposal)))
            self._verdict = Verdict(**json.loads(first))
        elif self._store.check([key]):
            self._verdict = Verdict(**json.loads(self._store.get(key)))

    def _key(self, rank: int) -> str:
        return f"{self._prefix}-{rank}"

    @property
    def _limit(self) -> float:
        """Seconds without progress after which the job ends."""
        if not self.timeout:
            return float("inf")
        least = max(self.timeout, CLOSING_SECONDS if self._closing else 0.0 if self._step else START_SECONDS)
        return max(least, GAPS * (self._longest or 0.0))

    def _watched(self) -> list[Peer]:
        """The peers whose heartbeats are read: the next rank only; near the limit or after a failure all others."""
        others = [peer for peer in self._peers if peer.rank != self.world.rank]
        if self._failed or self._idle >= self._limit - SILENT_SECONDS - 2 * TICK:
            return others
        return [peer for peer in others if peer.rank == (self.world.rank + 1) % self.world.size]

    # -- verdicts: never access the store ------------------------------------------------------------------------------

    def _judge(self) -> None:
        seen, answered, last = self._finished, self._answers, time.perf_counter()
        while not self._leaving.is_set():
            time.sleep(TICK)
            now = time.perf_counter()
            self._ticked = now, self._ticked[1] + _suspended(now - last)
            elapsed, last = min(now - last, 2 * TICK), now
            # one consistent reading for this tick, the limit first: progress in between must not lower the limit of
            # this tick
            limit, finished, answers = self._limit, self._finished, self._answers
            if finished != seen and self._longest is not None:
                self._longest = max(self._longest, self._idle + elapsed)
            self._idle = self._idle + elapsed if finished == seen else 0.0
            self._store_silent = self._store_silent + elapsed if answers == answered else 0.0
            seen, answered = finished, answers
            for peer in self._watched():
                self._update_peer(peer, elapsed)
            if self._proposal is None:
                self._proposal = self._find(limit)
            else:
                self._pending += elapsed
            verdict = self._verdict or (self._proposal if self._pending > STORE_SECONDS else None)
            if verdict is not None and not self._leaving.is_set():
                self._end(verdict)

    def _update_peer(self, peer: Peer, elapsed: float) -> None:
        last = self._heartbeats.get(peer.rank)
        if last is not None and last["beat"] != peer.beat:
            peer.silent = 0.0
            vars(peer).update(last)
        elif self._store_silent < 2 * TICK:  # otherwise heartbeats may be missing because the store does not answer
            peer.silent += elapsed
        visible = peer.namespace == self._peers[self.world.rank].namespace
        peer.gone = peer.gone + 1 if visible and not is_alive(peer.pid) else 0

    def _find(self, limit: float) -> Verdict | None:
        """The verdict; None if no rank has failed. `limit`: seconds without progress."""
        watched = [peer for peer in self._watched() if not peer.left]
        namespace = self._peers[self.world.rank].namespace
        patience = SILENT_SECONDS if self._failed else LOST_SECONDS
        dead = [p for p in watched if p.gone >= (1 if self._failed else GONE_TICKS)]
        lost = [p for p in watched if p.namespace != namespace and p.silent >= patience]
        if dead or lost:
            return self._verdict_on(_all(dead + lost, "died" if dead else "is lost: it sends no heartbeat"))
        if self._unreachable and self._store_silent >= (TICK if self._failed else STORE_SECONDS):
            return self._verdict_on(_all(self._peers[:1], "is lost, and the process group's store with it"))
        if self._peers[0].namespace != namespace and self._store_silent >= patience:
            return self._verdict_on(_all(self._peers[:1], "is lost: its store does not answer"))
        if self._idle < limit:
            return None
        if self._store_silent >= SILENT_SECONDS:
            reason = "is stopped or lost: its store does not answer"
            return self._verdict_on(_all(self._peers[:1], reason), hang=True)
        if silent := [p for p in watched if p.silent >= SILENT_SECONDS]:
            return self._verdict_on(_all(silent, "is stopped or lost: it sends no heartbeat"), hang=True)
        if any(p.idle < limit for p in watched):
            return None  # this rank waits for one that makes progress
        this_rank = self._peers[self.world.rank]
        vars(this_rank).update(self._heartbeat())
        blocking = find_failed_ranks(sorted([this_rank, *watched], key=lambda peer: peer.rank))
        text = f"hangs: nothing finished in {limit:.0f} s, "
        return self._verdict_on({rank: text + reason for rank, reason in blocking.items()}, hang=True, force=False)

    def _verdict_on(self, failed: Mapping[int, str], hang: bool = False, force: bool = True) -> Verdict:
        """The verdict on `failed` ranks, by rank with the reason; `force`: ranks on the same host kill them."""
        peers = [self._peers[rank] for rank in failed]
        text = "; ".join(f"{p} {failed[p.rank]}; at step {p.step}, {p.doing}" for p in peers[:SHOWN])
        if len(peers) > SHOWN:
            text += f"; and {len(peers) - SHOWN} more"
        rank, alive = self.world.rank, [peer.rank for peer in self._peers if peer.rank not in failed]
        kill = sorted(failed.keys() - {rank}) if force and alive else []
        return Verdict(text, sorted({p.host for p in peers}), hang, kill, min(alive) if kill else rank)

    def _end(self, verdict: Verdict) -> None:
        """Act on a verdict, and exit."""
        rank, namespace = self.world.rank, self._peers[self.world.rank].namespace
        try:
            if verdict.speaker == rank:
                stacks = f"; stacks are in {self.run_dir}/hang-*.txt" if verdict.hang else ""
                # not through the logger, whose lock a hanging thread may hold
                write_notice(f"error: {verdict.text}{stacks}; the job ends\n".encode())
            if verdict.hang:
                self.run_dir.mkdir(parents=True, exist_ok=True)
                with open(self.run_dir / f"hang-{rank}.txt", "w") as file:
                    faulthandler.dump_traceback(file, all_threads=True)
            for peer in self._peers:
                if peer.rank in verdict.kill and peer.namespace == namespace and is_alive(peer.pid):
                    os.kill(peer.pid, signal.SIGKILL)
            if rank == 0 and self.world.size > 1:
                time.sleep(READERS_SECONDS)
        finally:  # exit also if files could not be written
            os._exit(record_exit_code(FAILED, verdict.hosts))


def _suspended(gap: float) -> float:
    """Seconds of a `gap` between ticks in which the process was suspended. A library may also hold Python's lock for some."""
    return gap - 2 * TICK if gap > SUSPENDED_SECONDS else 0.0


def _all(peers: list[Peer], reason: str) -> dict[int, str]:
    return {peer.rank: reason for peer in peers}


# -- state of this process -------------------------------------------------------------------------------------------


def entered() -> dict[str, int]:
    """Number of collectives that this process has entered in each of its process groups, finished or not."""
    world: Any = dist.distributed_c10d._world
    return {world.pg_names[group]: group._get_sequence_number_for_group() for group in list(world.pg_map)}


def main_thread() -> tuple[str, bool]:
    """Position of the main thread, "file:line in function" of its innermost frame outside of libraries, and whether it is in a
    collective."""
    identity = threading.main_thread().ident
    frame: FrameType | None = sys._current_frames().get(identity or 0)
    if frame is None:
        return "gone", False
    code = frame.f_code
    waiting = code is wait_for_ranks.__code__ or any(part in code.co_filename for part in COLLECTIVES)
    innermost = frame
    while frame is not None and frame.f_code.co_filename.startswith(LIBRARIES):
        if frame.f_code.co_filename.startswith(PACKAGE):
            break
        frame = frame.f_back
    frame = frame or innermost
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno} in {frame.f_code.co_name}", waiting


# -- verdict on a hang -----------------------------------------------------------------------------------------------


def find_failed_ranks(peers: Sequence[Peer]) -> dict[int, str]:
    """The ranks that block the others, each with the reason; all ranks if they cannot be distinguished.

    All ranks run the same program, so in each process group they enter the same collectives in the same order: a rank that has
    entered fewer than others blocks those. If the counts are equal, the steps are compared, then the stacks.
    """
    newest = max(peer.step for peer in peers)
    return (
        _absent(peers)
        or {peer.rank: f"behind the others at step {newest}" for peer in peers if peer.step < newest}
        or {peer.rank: "and it does not wait for other ranks" for peer in peers if not peer.waiting}
        or _all(list(peers), "and every rank waits for the others")
    )


def _absent(peers: Sequence[Peer]) -> dict[int, str]:
    """Ranks that others wait for in a collective and that do not wait in one themselves; if all of them wait, those that most ranks
    wait for."""
    # For each rank that others wait for: the number of waiting ranks, and group and number of their collective.
    missing: dict[int, tuple[int, str, int]] = {}
    ahead: set[int] = set()
    for group in sorted({name for peer in peers for name in peer.entered}):
        counts = {peer.rank: peer.entered[group] for peer in peers if group in peer.entered}
        least = min(counts.values())
        waiters = {rank for rank, count in counts.items() if count > least}
        ahead |= waiters
        for rank in counts.keys() - waiters if waiters else ():
            missing[rank] = max(missing.get(rank, (0, "", 0)), (len(waiters), group, least + 1))
    most = max((count for count, _, _ in missing.values()), default=0)
    failed = sorted(missing.keys() - ahead) or [rank for rank in sorted(missing) if missing[rank][0] == most]
    order = " but waits for them in another group: collectives in another order"
    return {
        rank: f"has not entered collective {number} of group {group} that {count} of {len(peers)} ranks are in"
        + (order if rank in ahead else "")
        for rank in failed
        for count, group, number in [missing[rank]]
    }
