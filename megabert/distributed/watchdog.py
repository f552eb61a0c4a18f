"""Watchdog over the ranks: one that died, stopped or hangs is named, and the whole job ends with exit code 4.

Every rank sends a heartbeat once a second, through a connection of its own to the process group's store, with what its main
thread does and how many collectives it has entered. Two threads a rank: `_exchange` reads and writes the store and may block
in it, when the process that holds it is stopped; `_judge` never blocks. They run while the main thread waits in a
collective, and while it loops.

    a rank's process is gone, or a rank on another host       the job ends at once
    sends no heartbeat for LOST_SECONDS
    no rank makes progress for the limit (see below)          the failed ranks are those without a heartbeat, or else those
                                                              that block the others (`find_failed_ranks`)
    the store is gone, or does not answer at the time-out     rank 0, which holds it, has failed

The limit is `timeout` seconds, or GAPS times the longest time without progress that training had so far.

The first rank to find a failed one puts a verdict into the store, and every rank acts on it: writes its stacks to
`hang-RANK.txt`, kills failed ranks on its own host that send no heartbeat, exits. Time is counted in the judge's own ticks,
so that a job that was suspended as a whole does not resume overdue.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import signal
import socket
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
from megabert.common.errors import FAILED, leave_exit_code
from megabert.distributed.ranks import World, wait_for_ranks

# Until the first update is done the time-out is at least this: checkpoints are read, backends are measured.
START_SECONDS = 600.0
# Times the longest time between two signs of progress that was measured: more is no slow update.
GAPS = 3
# Seconds between two heartbeats.
TICK = 1.0
# Without a heartbeat for so long: as good as stopped, once the time-out has passed.
SILENT_SECONDS = 5.0
# Without a heartbeat from another host for so long: lost at once.
LOST_SECONDS = 12.0
# A process must be gone at so many ticks: it may just have left in good order.
GONE_TICKS = 2
# The store must be unreachable for so long, for the same reason.
STORE_SECONDS = 3.0
# The rank that holds the store outlives a verdict by this, for the others to read it.
READERS_SECONDS = 2.5
# Failed ranks that are named.
SHOWN = 8
# How long a failed collective waits for its reason.
EXPLAIN_SECONDS = 8.0
# This package, which may be installed among the libraries.
PACKAGE = str(Path(__file__).parents[1]) + os.sep
LIBRARIES = (*{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}, "<")
# Heartbeats over which their round trip is averaged: about a minute.
ROUND_TRIPS = 64
# Where ranks wait for each other.
COLLECTIVES = (f"torch{os.sep}distributed{os.sep}", f"deepspeed{os.sep}comm{os.sep}")


@dataclass
class Peer:
    """What this rank knows of one rank: where it is, its last heartbeat, and the seconds since then."""

    rank: int
    host: str
    # Of process ids.
    namespace: str
    pid: int
    beat: int = -1
    # Updates done.
    step: int = 0
    doing: str = "starting"
    # Its stack is in a collective.
    waiting: bool = False
    # Collectives entered, finished or not, by process group.
    entered: dict[str, int] = field(default_factory=dict)
    left: bool = False
    # Seconds without progress of its own.
    idle: float = math.inf
    silent: float = 0.0
    gone: int = 0

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"

    def update(self, heartbeat: Mapping[str, Any]) -> None:
        """Fields of its newest heartbeat."""
        vars(self).update(heartbeat)


@dataclass(frozen=True)
class Verdict:
    """Why the job ends, and the hosts of the failed ranks; `hang`: stacks are written; `kill`: ranks that are ended by force;
    `speaker` prints the text."""

    text: str
    hosts: list[str]
    hang: bool
    kill: list[int]
    speaker: int


class Watchdog:
    """Watches this rank's progress and the others' heartbeats from `start` (a collective) to `stop`."""

    def __init__(self, world: World, run_dir: str | Path, timeout: float) -> None:
        """`timeout`: seconds without progress until the job ends; 0 for any time. Stacks go to `run_dir`."""
        self.world, self.run_dir, self.timeout = world, Path(run_dir), timeout
        self._step = self._finished = self._beat = self._answers = 0
        # Seconds without progress, without an answer of the store, and of a proposal that no rank has taken yet.
        self._idle = self._mute = self._pending = 0.0
        # The longest time without progress that ended in some, since `opened`; None before.
        self._longest: float | None = None
        # Mean seconds of a message to the store and its answer, over the last ROUND_TRIPS since `opened`, and how many there were.
        self.round_trip, self._round_trips = 0.0, 0
        # Every rank is watched.
        self.started = False
        self._failed = self._unreachable = self._good = False
        self._leaving, self._left = threading.Event(), threading.Event()
        self._heartbeats: dict[int, dict[str, Any]] = {}
        self._proposal: Verdict | None = None
        self._verdict: Verdict | None = None

    def start(self) -> None:
        """Start sending heartbeats and watching those of the others. A collective."""
        world = self.world
        places = world.gather([host_name(), pid_namespace(), os.getpid()])
        self._peers = [Peer(rank, *place) for rank, place in enumerate(places)]
        # A launcher that restarts ranks may keep its store: heartbeats of an earlier attempt are not ours.
        self._prefix = world.broadcast(f"watchdog-{os.getpid()}-{time.time_ns()}")
        self._store: Any = dist.HashStore()
        if world.size > 1:
            assert world.master is not None
            patience = timedelta(seconds=30)
            self._store = dist.TCPStore(*world.master, is_master=False, wait_for_workers=False, timeout=patience)
        self._send_heartbeat()
        world.barrier()  # from here on every rank's first heartbeat can be read
        for function in (self._exchange, self._judge):
            threading.Thread(target=function, name=f"watchdog {function.__name__}", daemon=True).start()
        self.started = True

    def progress(self, step: int | None = None) -> None:
        """Something was finished: an update (then its number), a micro-step, a batch of an evaluation, a save, a step of a run's
        opening."""
        self._finished += 1
        self._step = self._step if step is None else step

    def opened(self) -> None:
        """Training starts: how long its signs of progress take is measured from here on."""
        self._longest = 0.0
        self._round_trips = 0

    def stop(self, good: bool) -> None:
        """This rank leaves; in `good` order the others will not miss it, otherwise they look for its end."""
        self._good = good
        self._leaving.set()
        if self.started:
            self._left.wait(2 * TICK)

    def explain(self) -> None:
        """After a collective failed: ends the process if another rank is found dead; otherwise returns."""
        self._failed = True
        time.sleep(EXPLAIN_SECONDS)

    # -- heartbeats: the only thread that touches the store ---------------------------------------------------------

    def _exchange(self) -> None:
        while not self._leaving.wait(TICK):
            try:
                self._send_heartbeat()
                started = time.perf_counter()
                self._read_heartbeats()
                self._average(time.perf_counter() - started)
                self._share_verdict()
                self._answers += 1
                self._unreachable = False
            except RuntimeError:  # torch's own errors of a store derive from it
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
        place = {"beat": self._beat, "step": self._step, "doing": doing, "waiting": waiting}
        return place | {"entered": entered(), "left": left, "idle": self._idle}

    def _average(self, seconds: float) -> None:
        self._round_trips = count = min(self._round_trips + 1, ROUND_TRIPS)
        self.round_trip += (seconds - self.round_trip) / count

    def _read_heartbeats(self) -> None:
        ranks = [peer.rank for peer in self._watched()]
        for rank, text in zip(ranks, self._store.multi_get([self._key(rank) for rank in ranks]), strict=True):
            self._heartbeats[rank] = json.loads(text)

    def _share_verdict(self) -> None:
        key = f"{self._prefix}-verdict"
        if self._proposal is not None:
            found = self._store.compare_set(key, "", json.dumps(vars(self._proposal)))
            self._verdict = Verdict(**json.loads(found))
        elif self._store.check([key]):
            self._verdict = Verdict(**json.loads(self._store.get(key)))

    def _key(self, rank: int) -> str:
        return f"{self._prefix}-{rank}"

    @property
    def _limit(self) -> float:
        """Seconds without progress that are too many."""
        if not self.timeout:
            return float("inf")
        least = self.timeout if self._step else max(self.timeout, START_SECONDS)
        return max(least, GAPS * (self._longest or 0.0))

    def _watched(self) -> list[Peer]:
        """The next rank; all of them when one may have failed, so that their silence is known at the time-out."""
        others = [peer for peer in self._peers if peer.rank != self.world.rank]
        if self._failed or self._idle >= self._limit - SILENT_SECONDS - 2 * TICK:
            return others
        return [peer for peer in others if peer.rank == (self.world.rank + 1) % self.world.size]

    # -- judgement: never touches the store ----------------------------------------------------------------------------

    def _judge(self) -> None:
        finished, answers, last = self._finished, self._answers, time.monotonic()
        while not self._leaving.is_set():
            time.sleep(TICK)
            now = time.monotonic()
            passed, last = min(now - last, 2 * TICK), now
            if self._finished != finished and self._longest is not None:
                self._longest = max(self._longest, self._idle + passed)
            self._idle = self._idle + passed if self._finished == finished else 0.0
            self._mute = self._mute + passed if self._answers == answers else 0.0
            finished, answers = self._finished, self._answers
            for peer in self._watched():
                self._look_at(peer, passed)
            if self._proposal is None:
                self._proposal = self._find()
            else:
                self._pending += passed
            verdict = self._verdict or (self._proposal if self._pending > STORE_SECONDS else None)
            if verdict is not None and not self._leaving.is_set():
                self._end(verdict)

    def _look_at(self, peer: Peer, passed: float) -> None:
        last = self._heartbeats.get(peer.rank)
        if last is not None and last["beat"] != peer.beat:
            peer.silent = 0.0
            peer.update(last)
        elif self._mute < 2 * TICK:  # a store that does not answer hides every heartbeat
            peer.silent += passed
        near = peer.namespace == self._peers[self.world.rank].namespace
        peer.gone = peer.gone + 1 if near and not is_alive(peer.pid) else 0

    def _find(self) -> Verdict | None:
        """The verdict of this moment; None where no rank has failed."""
        watched = [peer for peer in self._watched() if not peer.left]
        near = self._peers[self.world.rank].namespace
        patience = SILENT_SECONDS if self._failed else LOST_SECONDS
        dead = [p for p in watched if p.gone >= (1 if self._failed else GONE_TICKS)]
        lost = [p for p in watched if p.namespace != near and p.silent >= patience]
        if dead or lost:
            return self._verdict_on(_all(dead + lost, "died" if dead else "is lost: it sends no heartbeat"))
        if self._unreachable and self._mute >= (TICK if self._failed else STORE_SECONDS):
            return self._verdict_on(_all(self._peers[:1], "is lost, and the process group's store with it"))
        if self._idle < self._limit:
            return None
        if self._mute >= SILENT_SECONDS:
            what = "is stopped or lost: its store does not answer"
            return self._verdict_on(_all(self._peers[:1], what), hang=True)
        if silent := [p for p in watched if p.silent >= SILENT_SECONDS]:
            return self._verdict_on(_all(silent, "is stopped or lost: it sends no heartbeat"), hang=True)
        if any(p.idle < self._limit for p in watched):
            return None  # this rank waits for one that works
        own = self._peers[self.world.rank]
        own.update(self._heartbeat())
        found = find_failed_ranks(sorted([own, *watched], key=lambda peer: peer.rank))
        text = f"hangs: nothing finished in {self._limit:.0f} s, "
        return self._verdict_on({rank: text + reason for rank, reason in found.items()}, hang=True, force=False)

    def _verdict_on(self, failed: Mapping[int, str], hang: bool = False, force: bool = True) -> Verdict:
        """On `failed` ranks, each with its reason; `force`: those on this host are killed."""
        peers = [self._peers[rank] for rank in failed]
        shown = "; ".join(f"{p} {failed[p.rank]}; at step {p.step}, {p.doing}" for p in peers[:SHOWN])
        if len(peers) > SHOWN:
            shown += f"; and {len(peers) - SHOWN} more"
        own, alive = self.world.rank, [peer.rank for peer in self._peers if peer.rank not in failed]
        kill = sorted(failed.keys() - {own}) if force and alive else []
        return Verdict(shown, sorted({p.host for p in peers}), hang, kill, min(alive) if kill else own)

    def _end(self, verdict: Verdict) -> None:
        rank, own = self.world.rank, self._peers[self.world.rank]
        try:
            if verdict.speaker == rank:
                stacks = f"; stacks are in {self.run_dir}/hang-*.txt" if verdict.hang else ""
                # not through the logger, whose lock a hanging thread may hold
                print(f"error: {verdict.text}{stacks}; the job ends", file=sys.stderr, flush=True)
            if verdict.hang:
                self.run_dir.mkdir(parents=True, exist_ok=True)
                with open(self.run_dir / f"hang-{rank}.txt", "w") as file:
                    faulthandler.dump_traceback(file, all_threads=True)
            for peer in self._peers:
                if peer.rank in verdict.kill and peer.namespace == own.namespace and is_alive(peer.pid):
                    os.kill(peer.pid, signal.SIGKILL)
            if rank == 0 and self.world.size > 1:
                time.sleep(READERS_SECONDS)
        finally:  # this process must not be the one that hangs, whatever could not be written
            os._exit(leave_exit_code(FAILED, verdict.hosts))


def _all(peers: list[Peer], what: str) -> dict[int, str]:
    return {peer.rank: what for peer in peers}


# -- evidence of this process ----------------------------------------------------------------------------------------


def entered() -> dict[str, int]:
    """How many collectives this process has entered in each of its process groups, finished or not."""
    world: Any = dist.distributed_c10d._world
    return {world.pg_names[group]: group._get_sequence_number_for_group() for group in list(world.pg_map)}


def main_thread() -> tuple[str, bool]:
    """(file:line in function, whether it waits for other ranks there) of the main thread's innermost frame that is no
    library's."""
    identity = threading.main_thread().ident
    frame: FrameType | None = sys._current_frames().get(identity or 0)
    if frame is None:
        return "gone", False
    code = frame.f_code
    waiting = code is wait_for_ranks.__code__ or any(part in code.co_filename for part in COLLECTIVES)
    shown = frame
    while frame is not None and frame.f_code.co_filename.startswith(LIBRARIES):
        if frame.f_code.co_filename.startswith(PACKAGE):
            break
        frame = frame.f_back
    shown = frame or shown
    path = Path(shown.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{shown.f_lineno} in {shown.f_code.co_name}", waiting


def pid_namespace() -> str:
    """A text that is equal for two processes exactly when each can see the other by its process id."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"  # containers have their own ids
    except OSError:
        return f"{socket.gethostname()} {os.getpid()}"  # not known: a text that no other process has


def is_alive(pid: int) -> bool:
    """Whether a process that can be seen from here still runs or is stopped; one that only waits to be reaped is not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


# -- verdict on a hang -----------------------------------------------------------------------------------------------


def find_failed_ranks(peers: Sequence[Peer]) -> dict[int, str]:
    """The ranks that block the others, each with the reason; all ranks where no evidence distinguishes them.

    Ranks run one program, so in each process group they enter the same collectives in the same order: one that has entered
    fewer than others blocks those. Where the counts are equal, the step decides, then the stack.
    """
    newest = max(peer.step for peer in peers)
    return (
        _absent(peers)
        or {peer.rank: f"behind the others at step {newest}" for peer in peers if peer.step < newest}
        or {peer.rank: "and it does not wait for other ranks" for peer in peers if not peer.waiting}
        or _all(list(peers), "and every rank waits for the others")
    )


def _absent(peers: Sequence[Peer]) -> dict[int, str]:
    """Those that have not entered what others wait in, and wait for none themselves; where all of them wait, those that the
    most ranks wait for."""
    # Of each rank that is waited for: how many do, and group and number of the collective that they have entered.
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
