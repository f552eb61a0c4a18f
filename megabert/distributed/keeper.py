"""Keeper of a rank (`train --in-place`): the process that a launcher starts, which runs the rank as its child and starts it again.

When a rank dies, its keeper tells the others, every keeper ends its own rank, and those that are left agree in the run folder on the
next generation: the old ranks in their order without those whose keepers are gone. Launchers see no exit. The rank leaves copies
of its training state in its keeper's folder in memory (`megabert.checkpoint.copies`); the keeper sends each to a keeper on another host.

    RUN/in-place/GENERATION/rank-00003.json   a keeper whose rank failed: where the next generation may meet
    RUN/in-place/GENERATION/plan.json         the next generation; whichever keeper is first creates it

No torch here.
"""

from __future__ import annotations

import ctypes
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
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megabert.common import logs
from megabert.common.errors import FAILED, describe
from megabert.common.files import write_whole
from megabert.common.logs import log
from megabert.distributed import signals

# What a rank knows of its keeper: the keeper's folder, and the port at which it takes copies.
FOLDER, PORT = "MEGABERT_KEEPER", "MEGABERT_KEEPER_PORT"
# In the keeper's folder: the ranks of this generation, which of them is the keeper's, the newest copy that the peer has, exit codes,
# and the token of the run's owner.
MEMBERS, RANK, DELIVERED, EXITS, OWNER = "members.json", "rank", "delivered", "exits", "owner"
IN_PLACE, PLAN = "in-place", "plan.json"
# Where keepers have their folders: memory that outlives the rank.
MEMORY = Path("/dev/shm")
# A copy: its place in the data, the rank that wrote it, how many ranks there were, and their generation.
COPY = re.compile(r"(\d{12})-(\d{5})-of-(\d{5})-([0-9a-f]{16})\.safetensors")
# A message between keepers: the generation, and a copy's name and bytes, which follow; without them a rank failed.
MESSAGE = re.compile(rb"([0-9a-f]{16}) (?:(" + COPY.pattern.encode() + rb") (\d{1,15}))?\n")
# Exit codes that another start would not change: finished, a mistake, bad training, stopped.
FINAL = (0, 2, 3, signals.REQUEUE, *(128 + number for number in signals.SIGNALS))
# Restarts in a row without a newer copy before a keeper gives up.
RESTARTS = 3
# Seconds to wait for keepers: of a host that the watchdog named as failed, and of any other.
NAMED_PATIENCE, PATIENCE = 3.0, 30.0
# Seconds between two looks at the run folder, and at the keeper's own.
POLL, LOOK = 0.1, 0.02
# Seconds until a keeper that does not answer counts as gone.
CONNECT_SECONDS = 5.0
# Keepers that are asked at a time whether they answer.
PROBES = 64
PR_SET_PDEATHSIG = 1  # prctl(2)


class CopyName(NamedTuple):
    """Fields of the name of a copy's file."""

    cursor: int
    rank: int
    size: int
    generation: str

    def __str__(self) -> str:
        return f"{self.cursor:012d}-{self.rank:05d}-of-{self.size:05d}-{self.generation}.safetensors"


@dataclass(frozen=True)
class Member:
    """A keeper: its host's name and address, and the port at which it takes copies."""

    host: str
    address: str
    port: int


@dataclass(frozen=True)
class Generation:
    """The ranks of one start; a keeper's rank is its place in `members`."""

    name: str
    members: tuple[Member, ...]

    @classmethod
    def read(cls, folder: Path) -> Generation | None:
        """That of a keeper's folder; None before the first ranks have met."""
        try:
            tree = json.loads((folder / MEMBERS).read_text())
        except FileNotFoundError:
            return None
        return cls(tree["name"], tuple(Member(**member) for member in tree["members"]))

    def write(self, folder: Path) -> None:
        write_whole(folder / MEMBERS, json.dumps(asdict(self)).encode())

    def peer_of(self, rank: int) -> Member | None:
        """The keeper on another host that has the copies of `rank`; None where all are on one host. The ranks of a host are
        spread over the others'."""
        host, size = self.members[rank].host, len(self.members)
        near = [n for n, member in enumerate(self.members) if member.host == host]
        others = [n % size for n in range(near[-1] + 1, near[-1] + 1 + size) if self.members[n % size].host != host]
        return self.members[others[near.index(rank) % len(others)]] if others else None


def copies_in(folder: Path) -> Iterator[CopyName]:
    """The whole copies in a keeper's folder."""
    for name in os.listdir(folder):
        if match := COPY.fullmatch(name):
            yield CopyName(int(match[1]), int(match[2]), int(match[3]), match[4])


# -- of a rank -------------------------------------------------------------------------------------------------------


def follow() -> bool:
    """Whether this process is a rank that has a keeper; it ends with that from here on."""
    if FOLDER not in os.environ:
        return False
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    return True


def wait_for_place() -> None:
    """Take over the environment that the keeper gives this rank. Ends the process where the keeper has ended."""
    with open(int(os.environ[signals.PLACE]), "rb") as pipe:
        text = pipe.read()
    if not text:
        os._exit(FAILED)
    os.environ.clear()
    os.environ.update(json.loads(text))


def known_owner() -> str:
    """The token of the run's owner (`run_lock`) in the generation before; "" where there is none."""
    path = Path(os.environ.get(FOLDER, ""), OWNER)
    return path.read_text() if FOLDER in os.environ and path.exists() else ""


def remember_owner(token: str) -> None:
    """Leave the owner's token to the next generation, where there is a keeper."""
    if FOLDER in os.environ:
        write_whole(Path(os.environ[FOLDER], OWNER), token.encode())


def address_here(master: tuple[str, int]) -> str:
    """The address by which the other ranks reach this host: that of its connection to rank 0's; of rank 0's host, the
    address at which the ranks meet."""
    family, kind, _, _, address = socket.getaddrinfo(*master, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        own = probe.getsockname()[0]
    return master[0] if own in (address[0], "::1") or own.startswith("127.") else own


# -- the keeper ------------------------------------------------------------------------------------------------------


def keep(run_dir: Path) -> int:
    """Run this process's own command as a child until it ends for good; its exit code."""
    logs.setup()
    folder = _make_folder()
    lock = os.open(folder, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        return Keeper(run_dir, folder, [sys.executable, *sys.orig_argv[1:]]).run()
    finally:
        if (exits := os.environ.get("MEGABERT_EXIT_DIR")) and (folder / EXITS).is_dir():
            shutil.copytree(folder / EXITS, exits, dirs_exist_ok=True)  # the failed hosts, for a launch script
        shutil.rmtree(folder)
        os.close(lock)


def _make_folder() -> Path:
    """A new folder in memory. Those that killed keepers left are removed: nobody holds their locks."""
    parent = MEMORY if os.access(MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    for left in parent.glob("megabert-keeper-*"):
        try:
            descriptor = os.open(left, os.O_RDONLY)
        except (FileNotFoundError, PermissionError):  # being removed, or another user's
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - os.fstat(descriptor).st_mtime > PATIENCE:  # not one that is being made
                shutil.rmtree(left, ignore_errors=True)
        except BlockingIOError:  # its keeper lives
            log.debug(f"{left} is in use")
        finally:
            os.close(descriptor)
    return Path(tempfile.mkdtemp(prefix="megabert-keeper-", dir=parent))


class Keeper:
    """Runs one rank, generation after generation."""

    def __init__(self, run_dir: Path, folder: Path, command: list[str]) -> None:
        """`command`: what starts the rank."""
        self.run_dir, self.folder, self.command = run_dir, folder, command
        # This generation and the rank in it; None until the first ranks have met.
        self.place: tuple[Generation, int] | None = None
        # A signal that asked for the end.
        self.stopping = False
        self._child: subprocess.Popen[bytes] | None = None
        # The next child, which has imported all that a rank needs, and the pipe by which it gets its place.
        self._next: tuple[subprocess.Popen[bytes], int] | None = None
        # The newest generation that another keeper called down.
        self._down = ""
        self._ended = threading.Event()
        self._server = _Server(self)
        self.env = dict(os.environ) | {FOLDER: str(folder), PORT: str(self._server.server_address[1])}
        self.env["MEGABERT_EXIT_DIR"] = str(folder / EXITS)

    def run(self) -> int:
        """The rank's last exit code. Raises OSError where the run folder cannot be read or written."""
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
        vain = 0
        while True:
            before = self._newest()
            code = self._run_rank(before)
            place = self.look_up()
            if code in FINAL or self.stopping or place is None:
                return code
            vain = vain + 1 if self._newest() == before else 0
            if vain > RESTARTS:
                log.error(f"{RESTARTS} restarts in place in a row made no progress; the job ends")
                return FAILED
            if not self._meet(*place):
                return signals.REQUEUE if self.stopping else code

    def _newest(self) -> int:
        """Place in the data of the newest copy here; -1 where there is none."""
        return max((copy.cursor for copy in copies_in(self.folder)), default=-1)

    def _run_rank(self, before: int) -> int:
        """The rank's exit code. The next child is started once the rank has a copy newer than `before`."""
        exits = self.folder / EXITS
        shutil.rmtree(exits, ignore_errors=True)
        exits.mkdir()
        if self._next is None or self._next[0].poll() is not None:
            self._next = self._spawn()
        child, pipe = self._next
        self._child, self._next = child, None
        os.write(pipe, json.dumps(self.env).encode())
        os.close(pipe)
        if self.place is not None and self._down == self.place[0].name:
            child.kill()
        while self._next is None and child.poll() is None:
            if self._newest() > before:
                self._next = self._spawn()
            time.sleep(POLL)
        code = child.wait()
        return code if code >= 0 else FAILED

    def _spawn(self) -> tuple[subprocess.Popen[bytes], int]:
        """A child that waits for its place, and the pipe to write its environment to. Signals of a terminal reach it through
        its keeper alone."""
        ends, gives = os.pipe()
        env = self.env | {signals.PLACE: str(ends)}
        child = subprocess.Popen(self.command, env=env, pass_fds=[ends], start_new_session=True)
        os.close(ends)
        return child, gives

    def look_up(self) -> tuple[Generation, int] | None:
        """`place`, of the first generation as its ranks left it when they met."""
        if self.place is None and (found := Generation.read(self.folder)) is not None:
            self.place = found, int((self.folder / RANK).read_text())
        return self.place

    def _forward(self, number: int, frame: Any) -> None:
        self.stopping = True
        if self._child is not None:
            self._child.send_signal(number)

    # -- the next generation ---------------------------------------------------------------------------------------

    def _meet(self, generation: Generation, rank: int) -> bool:
        """Agree with the other keepers on the next generation; false where this one is not in it, or is to stop."""
        folder = self.run_dir / IN_PLACE / generation.name
        folder.mkdir(parents=True, exist_ok=True)
        with socket.create_server(("", 0)) as probe:
            port = probe.getsockname()[1]
        write_whole(folder / f"rank-{rank:05d}.json", json.dumps(port).encode())
        if self._down != generation.name and len(list(folder.glob("rank-*.json"))) == 1:
            self._call_down(generation, rank)
        started = time.monotonic()
        while (plan := _read(folder / PLAN)) is None:
            if self.stopping:
                return False
            found = {int(path.stem[-5:]): _read(path) for path in sorted(folder.glob("rank-*.json"))}
            waited = time.monotonic() - started
            if self._complete(generation, found.keys(), waited):
                reached = _reached(generation, found) | {rank}
                here = [other for other in found if other in reached]
                # a keeper that is cut off, and reaches the run folder all the same, leaves it to the others
                if 2 * len(here) >= len(generation.members) or waited >= 2 * PATIENCE:
                    _propose(folder / PLAN, here, found[here[0]])
            time.sleep(POLL)
        return self._take(plan, generation, rank)

    def _complete(self, generation: Generation, present: Collection[int], waited: float) -> bool:
        """Whether nobody is waited for any longer."""
        lines = [line for path in (self.folder / EXITS).iterdir() for line in path.read_text().splitlines()]
        failed = {line.removeprefix("failed=") for line in lines if line.startswith("failed=")}
        missing = {member.host for rank, member in enumerate(generation.members) if rank not in present}
        return not missing or waited >= (NAMED_PATIENCE if missing <= failed else PATIENCE)

    def _take(self, plan: dict[str, Any], generation: Generation, old: int) -> bool:
        members, ranks = generation.members, plan["ranks"]
        if old not in ranks:
            log.error(f"rank {old} was late or not to be reached: the others start again without it")
            return False
        lost = [f"{rank} (host {member.host})" for rank, member in enumerate(members) if rank not in ranks]
        hosts, rank = [members[rank].host for rank in ranks], ranks.index(old)
        logs.setup(rank, len(ranks))
        log.info(
            f"in place: a rank failed; {len(ranks)} of {len(members)} ranks start again"
            + (f", without {', '.join(lost)}" if lost else "")
        )
        following = Generation(plan["name"], tuple(members[rank] for rank in ranks))
        following.write(self.folder)
        self.place = following, rank
        # torchrun's store and attempt are those of the first generation
        env = {name: value for name, value in self.env.items() if not name.startswith("TORCHELASTIC_")}
        local = hosts[:rank].count(hosts[rank])
        env |= {"RANK": str(rank), "LOCAL_RANK": str(local), "WORLD_SIZE": str(len(ranks))}
        self.env = env | {"MASTER_ADDR": following.members[0].address, "MASTER_PORT": str(plan["port"])}
        return True

    # -- messages of keepers ---------------------------------------------------------------------------------------

    def _call_down(self, generation: Generation, rank: int) -> None:
        """Let the other keepers end their ranks, which would find out by themselves within seconds."""
        for other, member in enumerate(generation.members):
            if other != rank:
                threading.Thread(target=_send, args=(member, generation.name), daemon=True).start()

    def end_rank(self, generation: str) -> None:
        """Another rank of this generation failed: this one can train no further."""
        if self._down != generation:
            self._down = generation
            if self._child is not None:
                self._child.kill()

    def _deliver(self) -> None:
        """Send the newest copy of this rank to its peer, one after the other."""
        delivered = ""
        while not self._ended.wait(LOOK):
            if (place := self.look_up()) is None:
                continue
            generation, rank = place
            peer = generation.peer_of(rank)
            if peer is None:
                continue
            own = [
                copy for copy in copies_in(self.folder) if copy[1:] == (rank, len(generation.members), generation.name)
            ]
            newest = max(own, default=None)
            if newest is None or str(newest) == delivered:
                continue
            path = self.folder / str(newest)
            if _send(peer, generation.name, path):
                delivered = path.name
                write_whole(self.folder / DELIVERED, delivered.encode())
            else:
                time.sleep(POLL)


class _Server(socketserver.ThreadingTCPServer):
    """Takes other keepers' messages: a copy of their rank's state, or that their rank failed."""

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
            return  # of another job, late, or no keeper's
        if not match[2]:
            keeper.end_rank(place[0].name)
        elif not self._take(keeper.folder, match[2].decode(), int(match[7])):
            return
        self.wfile.write(b"ok")

    def _take(self, folder: Path, name: str, size: int) -> bool:
        """Whether a copy of so many bytes is here, whole."""
        part = folder / f".{name}"
        try:
            with part.open("wb") as file:
                while size and (data := self.rfile.read(min(size, 1 << 20))):
                    size -= file.write(data)
            if not size:
                os.replace(part, folder / name)
        except OSError as error:
            logs.warn_once(f"no copy of another rank's state: {describe(error)}")
        part.unlink(missing_ok=True)
        return (folder / name).exists()


def _send(member: Member, generation: str, path: Path | None = None) -> bool:
    """Whether another keeper took the copy at `path`, or (None) that a rank of the generation failed."""
    try:
        with socket.create_connection((member.address, member.port), timeout=CONNECT_SECONDS) as connection:
            about = f"{path.name} {path.stat().st_size}" if path else ""
            connection.sendall(f"{generation} {about}\n".encode())
            if path is not None:
                connection.settimeout(PATIENCE)
                with path.open("rb") as file:
                    connection.sendfile(file)
            return connection.recv(2) == b"ok"
    except OSError as error:
        log.debug(f"keeper at {member.address}:{member.port}: {error}")
        return False


def _reached(generation: Generation, ranks: Collection[int]) -> set[int]:
    """Those of the ranks whose keepers take a connection."""

    def answers(rank: int) -> bool:
        member = generation.members[rank]
        try:
            socket.create_connection((member.address, member.port), timeout=CONNECT_SECONDS).close()
        except OSError as error:
            log.debug(f"keeper of rank {rank} at {member.address}:{member.port}: {error}")
            return False
        return True

    with ThreadPoolExecutor(PROBES) as pool:
        return {rank for rank, good in zip(ranks, pool.map(answers, ranks), strict=True) if good}


def _propose(path: Path, ranks: list[int], port: int) -> None:
    """Make these keepers the next generation, which meets at `port` of the first one's host, unless another keeper was first."""
    plan = {"name": secrets.token_hex(8), "ranks": ranks, "port": port}
    try:
        with path.open("x") as file:
            file.write(json.dumps(plan))
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        log.debug("another keeper was first")


def _read(path: Path) -> Any:
    """JSON of a file; None where it is not there, or not whole yet."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
