"""Watchdog over the ranks: one that died, stopped or hangs is named, and the whole job ends.

Every rank sends a heartbeat once a second, through a connection of its own to the process group's store, with what its main
thread does. Two threads a rank: `_exchange` reads and writes the store and may block in it, when the process that holds it
is stopped; `_judge` never blocks. They run while the main thread waits in a collective, and while it loops.

    a rank's process is gone, or a rank on another host       the job ends at once
    sends no heartbeat for LOST_SECONDS
    this rank makes no progress for `timeout` seconds         the failed ranks are those without a heartbeat, or else those
                                                              that block the others (`hangs.find_failed_ranks`)
    the store is gone, or does not answer at the time-out     rank 0, which holds it, has failed

The first rank to find a failed one puts a verdict into the store, and every rank acts on it: writes its stacks to
`hang-RANK.txt` and torch's flight record to `hang-trace-RANK`, kills failed ranks on its own host that send no heartbeat,
exits with code 4. Time is counted in the judge's own ticks, so that a job that was suspended as a whole does not resume
overdue.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megabert.common.errors import FAILED, leave_exit_code
from megabert.distributed import hangs
from megabert.distributed.hangs import Standing, find_failed_ranks
from megabert.distributed.ranks import World

# Until something was finished the time-out is at least this: libraries load, checkpoints are read.
START_SECONDS = 600.0
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
# For torch's flight recorder, which asks a device that may not answer.
RECORD_SECONDS = 2.0
# Failed ranks that are named.
SHOWN = 8
# How long a failed collective waits for its reason.
EXPLAIN_SECONDS = 8.0


@dataclass
class Peer:
    """What this rank knows of one rank: where it is, its last heartbeat, and the seconds since then."""

    rank: int
    host: str
    # Of process ids.
    namespace: str
    pid: int
    beat: int = -1
    step: int = 0
    doing: str = "starting"
    waiting: bool = False
    entered: dict[str, int] = field(default_factory=dict)
    unfinished: dict[str, str] = field(default_factory=dict)
    left: bool = False
    silent: float = 0.0
    gone: int = 0

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"

    def take(self, sign: dict[str, Any]) -> None:
        """Fields of its newest heartbeat."""
        self.beat, self.step, self.doing = sign["beat"], sign["step"], sign["doing"]
        self.waiting, self.left = sign["waiting"], sign["left"]
        self.entered, self.unfinished = sign["entered"], sign["unfinished"]

    @property
    def standing(self) -> Standing:
        return Standing(self.rank, self.step, self.waiting, self.entered, self.unfinished)


@dataclass(frozen=True)
class Verdict:
    """Why the job ends; `hang`: stacks are written; `kill`: ranks that are ended by force; `speaker` prints the text."""

    text: str
    hang: bool
    kill: list[int]
    speaker: int


class Watchdog:
    """Watches this rank's progress and the others' heartbeats from `start` (a collective) to `stop`."""

    def __init__(self, world: World, run_dir: str | Path, timeout: float) -> None:
        """`timeout`: seconds without progress until the job ends; 0 for any time. Stacks go to `run_dir`."""
        self.world, self.run_dir, self.timeout = world, Path(run_dir), timeout
        self._step = self._finished = self._beat = self._answers = 0
        self._idle = self._mute = self._pending = 0.0  # seconds: no progress, no store, a proposal not yet taken
        self.started = False  # every rank is watched
        self._failed = self._unreachable = self._good = False
        self._leaving, self._left = threading.Event(), threading.Event()
        self._heartbeats: dict[int, dict[str, Any]] = {}
        self._unfinished: dict[str, str] = {}
        self._recorder: threading.Thread | None = None
        self._proposal: Verdict | None = None
        self._verdict: Verdict | None = None

    def start(self) -> None:
        """Start sending heartbeats and watching those of the others. A collective."""
        world = self.world
        places = world.gather([socket.gethostname(), hangs.pid_namespace(), os.getpid()])
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
            _thread(function)
        self.started = True

    def progress(self, step: int | None = None) -> None:
        """Something was finished: an update (then its number), a batch of an evaluation, a save."""
        self._finished += 1
        self._step = self._step if step is None else step

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
                self._read_heartbeats()
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
        self._store.set(self._key(self.world.rank), json.dumps(self._sign()))

    def _sign(self) -> dict[str, Any]:
        """This rank's heartbeat."""
        doing, waiting = hangs.main_thread()
        return {
            "beat": self._beat,
            "step": self._step,
            "doing": doing,
            "waiting": waiting,
            "entered": hangs.entered(),
            "unfinished": self._unfinished,
            "left": self._leaving.is_set() and self._good,
        }

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
        return self.timeout if self._finished else max(self.timeout, START_SECONDS)

    @property
    def _suspicious(self) -> bool:
        """Whether a rank may have failed."""
        return self._failed or self._idle >= self._limit - SILENT_SECONDS - 2 * TICK

    def _watched(self) -> list[Peer]:
        """The next rank; all of them when one may have failed, so that their silence is known at the time-out."""
        others = [peer for peer in self._peers if peer.rank != self.world.rank]
        if self._suspicious:
            return others
        return [peer for peer in others if peer.rank == (self.world.rank + 1) % self.world.size]

    # -- judgement: never touches the store ----------------------------------------------------------------------------

    def _judge(self) -> None:
        finished, answers, last = self._finished, self._answers, time.monotonic()
        while not self._leaving.is_set():
            time.sleep(TICK)
            now = time.monotonic()
            passed, last = min(now - last, 2 * TICK), now
            self._idle = self._idle + passed if self._finished == finished else 0.0
            self._mute = self._mute + passed if self._answers == answers else 0.0
            finished, answers = self._finished, self._answers
            for peer in self._watched():
                self._look_at(peer, passed)
            if self._suspicious and (self._recorder is None or not self._recorder.is_alive()):
                self._recorder = _thread(self._record)
            if self._proposal is None:
                self._proposal = self._find()
            else:
                self._pending += passed
            verdict = self._verdict or (self._proposal if self._pending > STORE_SECONDS else None)
            if verdict is not None and not self._leaving.is_set():
                self._end(verdict)

    def _record(self) -> None:
        self._unfinished = hangs.unfinished()

    def _look_at(self, peer: Peer, passed: float) -> None:
        last = self._heartbeats.get(peer.rank)
        if last is not None and last["beat"] != peer.beat:
            peer.silent = 0.0
            peer.take(last)
        elif self._mute < 2 * TICK:  # a store that does not answer hides every heartbeat
            peer.silent += passed
        near = peer.namespace == self._peers[self.world.rank].namespace
        peer.gone = peer.gone + 1 if near and not hangs.is_alive(peer.pid) else 0

    def _find(self) -> Verdict | None:
        """The verdict of this moment; None where no rank has failed."""
        watched = [peer for peer in self._watched() if not peer.left]
        overdue = self._idle >= self._limit
        near = self._peers[self.world.rank].namespace
        patience = SILENT_SECONDS if self._failed else LOST_SECONDS
        dead = [p for p in watched if p.gone >= (1 if self._failed else GONE_TICKS)]
        lost = [p for p in watched if p.namespace != near and p.silent >= patience]
        if dead or lost:
            return self._verdict_on(_all(dead + lost, "died" if dead else "is lost: it sends no heartbeat"))
        if self._unreachable and self._mute >= (TICK if self._failed else STORE_SECONDS):
            return self._verdict_on(_all(self._peers[:1], "is lost, and the process group's store with it"))
        if not overdue:
            return None
        if self._mute >= SILENT_SECONDS:
            what = "is stopped or lost: its store does not answer"
            return self._verdict_on(_all(self._peers[:1], what), hang=True)
        if silent := [p for p in watched if p.silent >= SILENT_SECONDS]:
            return self._verdict_on(_all(silent, "is stopped or lost: it sends no heartbeat"), hang=True)
        own = self._peers[self.world.rank]
        own.take(self._sign())
        all_peers = sorted([own, *watched], key=lambda peer: peer.rank)
        found = find_failed_ranks([peer.standing for peer in all_peers])
        text = f"hangs: nothing finished in {self._limit:.0f} s, "
        return self._verdict_on({rank: text + reason for rank, reason in found.items()}, hang=True, force=False)

    def _verdict_on(self, failed: Mapping[int, str], hang: bool = False, force: bool = True) -> Verdict:
        """On `failed` ranks, each with its reason; `force`: those on this host are killed."""
        peers = [self._peers[rank] for rank in failed]
        shown = "; ".join(f"{p} {failed[p.rank]}; at step {p.step}, {p.doing}" for p in peers[:SHOWN])
        if len(peers) > SHOWN:
            shown += f"; and {len(peers) - SHOWN} more"
        ranks = set(failed)
        alive = [peer.rank for peer in self._peers if peer.rank not in ranks]
        own = self.world.rank
        kill = sorted(ranks - {own}) if force and alive else []
        return Verdict(shown, hang, kill, min(alive, default=own) if kill else own)

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
                trace = self.run_dir / f"hang-trace-{rank}"
                _at_most(RECORD_SECONDS, hangs.write_trace, trace)
            for peer in self._peers:
                if peer.rank in verdict.kill and peer.namespace == own.namespace and hangs.is_alive(peer.pid):
                    os.kill(peer.pid, signal.SIGKILL)
            if rank == 0 and self.world.size > 1:
                time.sleep(READERS_SECONDS)
        finally:  # this process must not be the one that hangs, whatever could not be written
            os._exit(leave_exit_code(FAILED))


def _all(peers: list[Peer], what: str) -> dict[int, str]:
    return {peer.rank: what for peer in peers}


def _thread(function: Callable[..., None], *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=arguments, name=f"watchdog {function.__name__}", daemon=True)
    thread.start()
    return thread


def _at_most(seconds: float, function: Callable[..., None], *arguments: Any) -> None:
    """Calls a function that may never return, and waits for it so long."""
    _thread(function, *arguments).join(seconds)
