"""Keeper of a rank (`train --in-place`): the process that a launcher starts. It runs the rank as a child and restarts it.

When a rank dies, its keeper notifies the others, every keeper kills its rank, and the reachable keepers agree in the run folder
on the next generation: the old ranks in order, without those whose keepers are lost. The launcher sees no exit. A rank writes
copies of its training state to its keeper's folder in memory (`megabert.checkpoint.copies`), and the keeper sends each to a
keeper on another host.

    RUN/in-place/GENERATION/rank-00003.json   a keeper that is ready for the next generation: a free port of its host
    RUN/in-place/GENERATION/plan.json         the next generation, created by the first keeper that proposes one

This module must not import torch.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megabert.common import logs
from megabert.common.errors import FAILED, describe
from megabert.common.files import write_whole
from megabert.common.logs import log
from megabert.distributed import signals
from megabert.distributed.kept_rank import (
    COPY,
    DELIVERED,
    EXITS,
    FOLDER,
    IN_PLACE,
    PORT,
    RANK,
    Generation,
    Member,
    copies_in,
)

PLAN = "plan.json"
# Parent of the keepers' folders: memory that outlives the ranks.
MEMORY = Path("/dev/shm")
# Header of a message between keepers: the generation, then name and size in bytes of the copy that follows. Without a copy the
# message says that a rank failed.
MESSAGE = re.compile(rb"([0-9a-f]{16}) (?:(" + COPY.pattern.encode() + rb") (\d{1,15}))?\n")
# Exit codes after which a restart does not help: finished, a mistake, bad training, stopped.
FINAL = (0, 2, 3, signals.REQUEUE, *(128 + number for number in signals.SIGNALS))
# Restarts in a row without a newer copy before a keeper gives up.
RESTARTS = 3
# Seconds to wait for the keepers of a host that the watchdog named as failed, and of any other host.
NAMED_PATIENCE, PATIENCE = 3.0, 30.0
# Polling intervals in seconds: of the run folder, of the keeper's folder, and of the next rank's keeper while the ranks meet.
POLL, LOOK, POLL_NEXT = 0.1, 0.02, 1.0
# Seconds without an answer after which that keeper is lost.
SILENT = 12.0
# Timeout of a connection to a keeper, in seconds.
CONNECT_SECONDS = 5.0
# Keepers probed in parallel.
PROBES = 64


def keep(run_dir: Path) -> int:
    """Run this process's command as a child, restarted after faults; returns its last exit code."""
    logs.setup()
    folder = _make_folder()
    lock = os.open(folder, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    keeper = Keeper(run_dir, folder, [sys.executable, *sys.orig_argv[1:]])
    try:
        return keeper.run()
    finally:
        if keeper.lost is None:
            os.environ.pop("MEGABERT_EXIT_DIR", None)  # the other keepers report to the launch script
        elif exits := os.environ.get("MEGABERT_EXIT_DIR"):
            keeper.report(Path(exits))
        shutil.rmtree(folder)
        os.close(lock)


def _make_folder() -> Path:
    """A new folder in memory. Folders of killed keepers, which are not locked, are removed."""
    parent = MEMORY if os.access(MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    for folder in parent.glob("megabert-keeper-*"):
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except (FileNotFoundError, PermissionError):  # being removed, or another user's
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - os.fstat(descriptor).st_mtime > PATIENCE:  # a newer one may not be locked yet
                shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:  # its keeper is running
            log.debug(f"{folder} is in use")
        finally:
            os.close(descriptor)
    return Path(tempfile.mkdtemp(prefix="megabert-keeper-", dir=parent))


class Keeper:
    """Runs one rank in every generation."""

    def __init__(self, run_dir: Path, folder: Path, command: list[str]) -> None:
        """`command` starts the rank."""
        self.run_dir, self.folder, self.command = run_dir, folder, command
        # The current generation and this rank in it; None until the first ranks have met.
        self.place: tuple[Generation, int] | None = None
        # A signal has asked to stop.
        self.stopping = False
        # Hosts that were lost in any generation; None if this keeper's rank was left out itself.
        self.lost: list[str] | None = []
        self._child: subprocess.Popen[bytes] | None = None
        # The standby child, which has done its imports, and the pipe to send it its environment.
        self._next: tuple[subprocess.Popen[bytes], int] | None = None
        # The host of a keeper that was silent while the ranks met; "" if none was.
        self._silent_host = ""
        # The newest generation of which another keeper reported a failed rank.
        self._failed_generation = ""
        self._ended = threading.Event()
        self._server = _Server(self)
        self.env = dict(os.environ) | {FOLDER: str(folder), PORT: str(self._server.server_address[1])}
        self.env["MEGABERT_EXIT_DIR"] = str(folder / EXITS)

    def run(self) -> int:
        """The rank's last exit code. Raises OSError if the run folder cannot be read or written."""
        signals.take_over(self._forward)
        threading.Thread(target=self._server.serve_forever, name="keeper receives", daemon=True).start()
        deliver = threading.Thread(target=self._deliver, name="keeper sends", daemon=True)
        deliver.start()
        try:
            return self._run()
        finally:
            self._ended.set()
            deliver.join(CONNECT_SECONDS)
            self._server.shutdown()
            if self._next is not None:
                self._next[0].kill()
                self._next[0].wait()

    def _run(self) -> int:
        without_progress = 0
        while True:
            before = self._newest()
            code = self._run_rank(before)
            place = self.look_up()
            if code in FINAL or self.stopping or place is None:
                return code
            without_progress = without_progress + 1 if self._newest() == before else 0
            if without_progress > RESTARTS:
                log.error(f"{RESTARTS} restarts in place in a row made no progress; the job ends")
                return FAILED
            if not self._meet(*place):
                return signals.REQUEUE if self.stopping else code

    def _newest(self) -> int:
        """Data cursor of the newest copy in the folder; -1 if there is none."""
        return max((copy.cursor for copy in copies_in(self.folder)), default=-1)

    def _run_rank(self, before: int) -> int:
        """Run the rank; its exit code. The standby child starts once the rank has written a copy newer than `before`. Until then the
        keeper of the next rank is asked: while ranks meet, their watchdogs do not run, and a rendezvous waits minutes for a lost
        host."""
        exits = self.folder / EXITS
        shutil.rmtree(exits, ignore_errors=True)
        exits.mkdir()
        self._silent_host = ""
        if self._next is None or self._next[0].poll() is not None:
            self._next = self._spawn()
        child, pipe = self._next
        self._child, self._next = child, None
        os.write(pipe, json.dumps(self.env).encode())
        os.close(pipe)
        if self.stopping:  # asked before there was a child
            child.send_signal(signal.SIGTERM)
        if self.place is not None and self._failed_generation == self.place[0].name:
            child.kill()
        asked = answered = time.monotonic()
        while self._next is None and child.poll() is None:
            if self._newest() > before:
                self._next = self._spawn()
            elif self.place is not None and time.monotonic() - asked > POLL_NEXT:
                asked = time.monotonic()
                if _accepts(member := self.place[0].following(self.place[1])):
                    answered = asked
                elif asked - answered > SILENT:
                    self._silent_host = member.host
                    child.kill()
            time.sleep(POLL)
        code = child.wait()
        return code if code >= 0 else FAILED

    def report(self, folder: Path) -> None:
        """Copy the rank's exit code to a launch script's folder, with the hosts that were lost."""
        if (self.folder / EXITS).is_dir():
            shutil.copytree(self.folder / EXITS, folder, dirs_exist_ok=True)
        if self.lost:  # not the name under which this process leaves its own code, which would replace the file
            lines = "".join(f"failed={host}\n" for host in self.lost)
            (folder / f"{socket.gethostname()}-{os.getpid()}-lost").write_text(lines)

    def _spawn(self) -> tuple[subprocess.Popen[bytes], int]:
        """A child that waits for its environment, and the pipe to write that to. Signals from a terminal reach it only through
        its keeper."""
        read_end, write_end = os.pipe()
        env = self.env | {signals.PLACE: str(read_end)}
        child = subprocess.Popen(self.command, env=env, pass_fds=[read_end], start_new_session=True)
        os.close(read_end)
        return child, write_end

    def look_up(self) -> tuple[Generation, int] | None:
        """`place`; for the first generation from the keeper's folder, where the rank wrote it when the ranks met."""
        if self.place is None and (generation := Generation.read(self.folder)) is not None:
            self.place = generation, int((self.folder / RANK).read_text())
        return self.place

    def _forward(self, number: int, frame: Any) -> None:
        self.stopping = True
        if self._child is not None:
            self._child.send_signal(number)

    # -- the next generation ---------------------------------------------------------------------------------------

    def _meet(self, generation: Generation, rank: int) -> bool:
        """Agree with the other keepers on the next generation; false if this one is not in it or was asked to stop."""
        folder = self.run_dir / IN_PLACE / generation.name
        folder.mkdir(parents=True, exist_ok=True)
        with socket.create_server(("", 0)) as probe:
            port = probe.getsockname()[1]
        write_whole(folder / f"rank-{rank:05d}.json", json.dumps(port).encode())
        if self._failed_generation != generation.name and len(list(folder.glob("rank-*.json"))) == 1:
            self._announce_failure(generation, rank)
        started = time.monotonic()
        while (plan := _read(folder / PLAN)) is None:
            if self.stopping:
                return False
            ports = {int(path.stem[-5:]): _read(path) for path in sorted(folder.glob("rank-*.json"))}
            waited = time.monotonic() - started
            if self._complete(generation, ports.keys(), waited):
                reachable = _reached(generation, ports) | {rank}
                ranks = [other for other in ports if other in reachable]
                # With fewer than half of the ranks, this keeper's own network may be down: the others propose first.
                if 2 * len(ranks) >= len(generation.members) or waited >= 2 * PATIENCE:
                    _propose(folder / PLAN, ranks, ports[ranks[0]])
            time.sleep(POLL)
        return self._apply(plan, generation, rank)

    def _complete(self, generation: Generation, present: Collection[int], waited: float) -> bool:
        """Whether all keepers are `present`, or the time to wait for the missing ones is over."""
        lines = [line for path in (self.folder / EXITS).iterdir() for line in path.read_text().splitlines()]
        failed = {self._silent_host, *(line.removeprefix("failed=") for line in lines if line.startswith("failed="))}
        missing = {member.host for rank, member in enumerate(generation.members) if rank not in present}
        return not missing or waited >= (NAMED_PATIENCE if missing <= failed else PATIENCE)

    def _apply(self, plan: dict[str, Any], generation: Generation, old: int) -> bool:
        """Make the plan the current generation; false if rank `old` is not in it."""
        members, ranks = generation.members, plan["ranks"]
        if old not in ranks:
            log.error(f"rank {old} was late or unreachable: the others restart without it")
            self.lost = None
            return False
        lost = [f"{rank} (host {member.host})" for rank, member in enumerate(members) if rank not in ranks]
        hosts, rank = [members[rank].host for rank in ranks], ranks.index(old)
        logs.setup(rank, len(ranks))
        log.info(
            f"in place: a rank failed; {len(ranks)} of {len(members)} ranks restart"
            + (f", without {', '.join(lost)}" if lost else "")
        )
        assert self.lost is not None
        self.lost += sorted({member.host for member in members} - set(hosts))
        following = Generation(plan["name"], tuple(members[rank] for rank in ranks))
        following.write(self.folder)
        self.place = following, rank
        # torchrun's variables describe the first generation
        env = {name: value for name, value in self.env.items() if not name.startswith("TORCHELASTIC_")}
        local = hosts[:rank].count(hosts[rank])
        env |= {"RANK": str(rank), "LOCAL_RANK": str(local), "WORLD_SIZE": str(len(ranks))}
        self.env = env | {"MASTER_ADDR": following.members[0].address, "MASTER_PORT": str(plan["port"])}
        return True

    # -- messages between keepers ----------------------------------------------------------------------------------

    def _announce_failure(self, generation: Generation, rank: int) -> None:
        """Notify the other keepers, which kill their ranks at once; the ranks' watchdogs would take seconds."""
        for other, member in enumerate(generation.members):
            if other != rank:
                threading.Thread(target=_send, args=(member, generation.name), daemon=True).start()

    def end_rank(self, generation: str) -> None:
        """Kill this rank, because another rank of `generation` failed."""
        if self._failed_generation != generation:
            self._failed_generation = generation
            if self._child is not None:
                self._child.kill()

    def _deliver(self) -> None:
        """Send this rank's copies to its peer, always the newest one."""
        delivered = ""
        while not self._ended.wait(LOOK):
            if (place := self.look_up()) is None:
                continue
            generation, rank = place
            peer = generation.peer_of(rank)
            if peer is None:
                continue
            fields = rank, len(generation.members), generation.name
            newest = max((copy for copy in copies_in(self.folder) if copy[1:] == fields), default=None)
            if newest is None or str(newest) == delivered:
                continue
            path = self.folder / str(newest)
            if _send(peer, generation.name, path):
                delivered = path.name
                write_whole(self.folder / DELIVERED, delivered.encode())
            else:
                time.sleep(POLL)


class _Server(socketserver.ThreadingTCPServer):
    """Receives messages of other keepers: a copy of a rank's state, or the failure of a rank."""

    daemon_threads = True
    address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def __init__(self, keeper: Keeper) -> None:
        self.keeper = keeper
        super().__init__(("", 0), _Message)


class _Message(socketserver.StreamRequestHandler):
    server: _Server
    timeout = PATIENCE

    def handle(self) -> None:
        keeper, line = self.server.keeper, self.rfile.readline(1 << 12)
        place, match = keeper.look_up(), MESSAGE.fullmatch(line)
        if place is None or match is None or match[1].decode() != place[0].name:
            return  # of another job or an earlier generation, or not from a keeper
        if not match[2]:
            keeper.end_rank(place[0].name)
        elif not self._receive(keeper.folder, match[2].decode(), int(match[7])):
            return
        self.wfile.write(b"ok")

    def _receive(self, folder: Path, name: str, size: int) -> bool:
        """Receive a copy of `size` bytes; whether it is complete."""
        part = folder / f".{name}"
        try:
            with part.open("wb") as file:
                while size and (data := self.rfile.read(min(size, 1 << 20))):
                    size -= file.write(data)
            if not size:
                os.replace(part, folder / name)
        except OSError as error:
            logs.warn_once(f"the copy of another rank's state was not received: {describe(error)}")
        part.unlink(missing_ok=True)
        return (folder / name).exists()


def _send(member: Member, generation: str, path: Path | None = None) -> bool:
    """Send a keeper the copy at `path`, or without it that a rank of the generation failed; whether it was accepted."""
    try:
        with socket.create_connection((member.address, member.port), timeout=CONNECT_SECONDS) as connection:
            copy = f"{path.name} {path.stat().st_size}" if path else ""
            connection.sendall(f"{generation} {copy}\n".encode())
            if path is not None:
                connection.settimeout(PATIENCE)
                with path.open("rb") as file:
                    connection.sendfile(file)
            return connection.recv(2) == b"ok"
    except OSError as error:
        log.debug(f"keeper at {member.address}:{member.port}: {error}")
        return False


def _accepts(member: Member) -> bool:
    """Whether a keeper accepts a connection."""
    try:
        socket.create_connection((member.address, member.port), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        log.debug(f"keeper at {member.address}:{member.port}: {error}")
        return False
    return True


def _reached(generation: Generation, ranks: Collection[int]) -> set[int]:
    """The ranks whose keepers accept a connection."""
    with ThreadPoolExecutor(PROBES) as pool:
        accepted = pool.map(_accepts, [generation.members[rank] for rank in ranks])
        return {rank for rank, reached in zip(ranks, accepted, strict=True) if reached}


def _propose(path: Path, ranks: list[int], port: int) -> None:
    """Make these ranks the next generation, which meets at `port` of the first one's host, unless there is a plan already."""
    name = secrets.token_hex(8)
    own = path.with_name(f"{path.name}.{name}")
    write_whole(own, json.dumps({"name": name, "ranks": ranks, "port": port}).encode())
    try:
        os.link(own, path)  # complete from the first moment
    except FileExistsError:
        log.debug("another keeper has proposed the next generation")
    own.unlink()


def _read(path: Path) -> Any:
    """JSON of a file; None if it does not exist or is not written completely."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
