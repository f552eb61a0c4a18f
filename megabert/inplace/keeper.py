"""Keeper of a rank (`train --in-place`): the process that a launcher starts. It runs the rank as a child and restarts it.

When a rank dies, its keeper notifies the others and every keeper kills its rank. The reachable keeper of the lowest
rank leads a rendezvous and proposes the next generation: the old ranks in order, without those whose keepers are lost.
The launcher never sees an exit. A rank writes copies of its training state to its keeper's folder in shared memory
(`megabert.inplace.copies`), and the keeper sends each copy to a keeper on another host.

    RUN/in-place/GENERATION/plan.json    the next generation, created by the first keeper that proposes one

Stop signals are forwarded to the rank, or kept until it runs: only a rank can save the state in memory.

This module must not import torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import select
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megabert.common import environment, logs
from megabert.common.errors import FAILED, describe
from megabert.common.files import create_locked_folder, remove_abandoned, write_atomically
from megabert.common.logs import log
from megabert.distributed import signals
from megabert.inplace import kept_rank
from megabert.inplace.kept_rank import CopyName, Generation, Member

PLAN = "plan.json"
MEMORY = Path("/dev/shm")  # parent of the keepers' folders: memory that outlives the ranks
# Exit codes after which a restart does not help: finished, a mistake, bad training, stopped.
FINAL = (0, 2, 3, signals.REQUEUE, *(128 + number for number in signals.SIGNALS))
# Consecutive restarts without an update before the keepers give up; one more start only saves the state in memory.
RESTARTS = 3
# Seconds to wait for keepers that do not answer: on a host reported as failed, and on any other host.
NAMED_PATIENCE, PATIENCE = 3.0, 30.0
# Polling intervals in seconds: of the keeper's folder, of a rank that has not made an update, and of other keepers.
LOOK, POLL, POLL_KEEPERS = 0.02, 0.1, 1.0
RESPAWN_SECONDS = 10.0  # seconds before a standby process that died is replaced
SILENT = 12.0  # seconds without an answer after which a keeper is lost
# Timeout of a connection to a keeper, and to one on a host that is named as failed, in seconds.
CONNECT_SECONDS, CONNECT_FAILED_SECONDS = 5.0, 1.0
PROBES = 64  # keepers probed in parallel


def keep(run_dir: Path) -> int:
    """Run this process's command as a child, restarted after faults; returns its last exit code."""
    logs.setup()
    os.environ[signals.STARTED] = repr(time.time())
    memory = MEMORY if os.access(MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    remove_abandoned(memory.glob("megabert-keeper-*"))
    folder, lock = create_locked_folder(lambda: Path(tempfile.mkdtemp(prefix="megabert-keeper-", dir=memory)))
    keeper = Keeper(run_dir, folder, [sys.executable, *sys.orig_argv[1:]])
    try:
        return keeper.run()
    finally:
        if keeper.lost is None:
            os.environ.pop("MEGABERT_EXIT_DIR", None)  # the other keepers report to the launch script
        elif os.path.isdir(exits := os.environ.get("MEGABERT_EXIT_DIR", "")):  # not after the launch script's attempt
            keeper.report(Path(exits))
        shutil.rmtree(folder, ignore_errors=True)  # a copy may be arriving
        os.close(lock)
        remove_abandoned(memory.glob("megabert-keeper-*"))


class Keeper:
    """Runs one rank in every generation."""

    def __init__(self, run_dir: Path, folder: Path, command: list[str]) -> None:
        """`command` starts the rank."""
        self.run_dir, self.folder, self.command = run_dir, folder, command
        self.generation: Generation | None = None  # None until the first ranks have met
        # Monotonic time of the first stop signal; exit code forced by a second one.
        self.asked: float | None = None
        self.forced_exit_code: int | None = None
        # Hosts lost in any generation; None once this keeper's own rank was excluded from the plan.
        self.lost: list[str] | None = []
        # Restarts in a row without an update, and whether the rank is started only to save.
        self._restarts_without_update, self._last = 0, False
        self._child: subprocess.Popen[bytes] | None = None
        # The standby child, which has done its imports, and the pipe to send it its environment.
        self._standby: tuple[subprocess.Popen[bytes], int] | None = None
        self._silent_host = ""  # the host of a keeper that was silent while the ranks met; "" if none was
        self._failed_generation = ""  # the newest generation of which another keeper reported a failed rank
        # by generation: the `ready` messages of its keepers, by rank
        self.ready: dict[str, dict[int, dict[str, Any]]] = {}
        self.plans: dict[str, dict[str, Any]] = {}  # by generation: the plan of the generation that follows it
        self.meeting = ""  # the newest generation that this keeper has left; "" before the first
        self._ended = threading.Event()
        self._server: _Server | None = None
        self.exits = folder / kept_rank.EXITS
        self.env = dict(os.environ) | {kept_rank.KEEPER_DIR_ENV: str(folder), "MEGABERT_EXIT_DIR": str(self.exits)}

    def run(self) -> int:
        """The rank's last exit code. Raises OSError if the run folder cannot be read or written."""
        signals.install_handlers(self._forward)
        deliver = threading.Thread(target=self._deliver, name="keeper sends", daemon=True)
        deliver.start()
        try:
            while True:
                code = self._run_rank()
                generation = self.look_up()
                if self.forced_exit_code is not None or code in FINAL or generation is None:
                    code = code if self.forced_exit_code is None else self.forced_exit_code
                    return FAILED if code < 0 or (self._last and code == signals.REQUEUE) else code
                if self._last or not self._rendezvous(generation, code):
                    return self.forced_exit_code or FAILED
        finally:
            self._ended.set()
            deliver.join(CONNECT_SECONDS)
            if self._server is not None:
                self._server.shutdown()
                self._server.server_close()
            if self._standby is not None:
                self._standby[0].kill()
                self._standby[0].wait()

    def _run_rank(self) -> int:
        """Run the rank; returns its exit code, or minus the signal that killed it.

        The standby child starts once the rank has made an update. Until then this keeper probes that of the next rank:
        watchdogs do not run during a rendezvous, which would wait minutes for a lost host.
        """
        shutil.rmtree(self.exits, ignore_errors=True)
        self.exits.mkdir()
        self._silent_host = ""
        if self._standby is not None and self._standby[0].poll() is not None:
            os.close(self._standby[1])
            self._standby = None
        (child, pipe), self._standby = self._standby or self._spawn(), None
        self._child = child
        with contextlib.suppress(BrokenPipeError):  # it was killed just now, as its code says
            os.write(pipe, json.dumps(self.env).encode())
        os.close(pipe)
        if self.asked is not None or self._last:  # asked before there was a child
            child.send_signal(signal.SIGTERM)
        if self.generation is not None and self._failed_generation == self.generation.name:
            child.kill()
        probed = answered = time.monotonic()
        spawn_at = 0.0
        while child.poll() is None:
            now = time.monotonic()
            if self._standby is not None and (ended := self._standby[0].poll()) is not None:
                log.warning(
                    f"the standby process of rank {self.env.get('RANK', 0)} {_describe_exit(ended)}; another one starts"
                )
                os.close(self._standby[1])
                self._standby, spawn_at = None, now + RESPAWN_SECONDS
            elif self._standby is None and now >= spawn_at and self._has_progress():
                self._standby = self._spawn()
            elif self._standby is None and not spawn_at and self.generation is not None and now - probed > POLL_KEEPERS:
                probed = now
                member = self.generation.following
                if _is_reachable(member):
                    answered = now
                elif now - answered > SILENT:
                    self._silent_host = member.host
                    child.kill()
            _wait_for_end([child, *([self._standby[0]] if self._standby else [])], None if self._standby else POLL)
        return child.wait()

    def _has_progress(self) -> bool:
        """Whether the rank has made an update in this generation."""
        generation = self.look_up()
        return generation is not None and any(
            copy.generation == generation.name for copy in kept_rank.copies_in(self.folder)
        )

    def report(self, folder: Path) -> None:
        """Copy the rank's exit code to a launch script's folder, with the hosts that were lost; FAILED after a second signal, at which
        nothing was saved."""
        if self.exits.is_dir() and not self._last:
            shutil.copytree(self.exits, folder, dirs_exist_ok=True)
        lines = [f"failed={host}\n" for host in self.lost or ()] + [f"{FAILED}\n"] * (self.forced_exit_code is not None)
        if lines:  # not the name under which this process leaves its own code, which would replace the file
            (folder / f"{socket.gethostname()}-{os.getpid()}-lost").write_text("".join(lines))

    def _spawn(self) -> tuple[subprocess.Popen[bytes], int]:
        """A child that waits for its environment, and the pipe to write that to. Signals from a terminal reach it only through
        its keeper, and wait until it handles them."""
        read_end, write_end = os.pipe()
        variables = self.env | self._child_variables(read_end)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals.SIGNALS)
        try:
            child = subprocess.Popen(self.command, env=variables, pass_fds=[read_end], start_new_session=True)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(read_end)
        return child, write_end

    def _child_variables(self, pipe: int) -> dict[str, str]:
        """Environment variables of a child that waits for its environment."""
        return {signals.ENVIRONMENT_FD: str(pipe)} | ({signals.RESTARTED: "1"} if self.generation is not None else {})

    def look_up(self) -> Generation | None:
        """The current generation, cached in `generation`; None before the first rendezvous. The first one is read from
        the keeper's folder, where the rank writes it."""
        if self.generation is None:
            self.generation = Generation.read(self.folder)
        return self.generation

    def _forward(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        if self.asked is None:
            self.asked = now
        elif now - self.asked > signals.ECHO_SECONDS:
            self.forced_exit_code = 128 + number
        if self._child is not None:
            self._child.send_signal(number)

    # -- the next generation ---------------------------------------------------------------------------------------

    def _rendezvous(self, generation: Generation, code: int) -> bool:
        """Agree with the other keepers on the next generation; false if this one is not in it, or a second signal was received."""
        with environment.listening_socket("", 0) as probe:
            port = probe.getsockname()[1]
        rank, name = generation.rank, generation.name
        killed_here = self._failed_generation == name or self._silent_host
        cause = "" if killed_here else f"rank {rank} (host {generation.members[rank].host}) {_describe_exit(code)}"
        ready = {"rank": rank, "port": port, "failed": self._failed_hosts(), "progress": self._has_progress()}
        ready["cause"] = cause
        self.add_ready(name, ready)
        self.meeting, started = name, time.monotonic()
        while name not in self.plans:
            if self.forced_exit_code is not None:
                return False
            self._ask_lower_ranks(generation, ready)
            if name not in self.plans:
                self._lead(generation, time.monotonic() - started)
        return self._apply(self.plans[name], generation)

    def add_ready(self, generation: str, ready: dict[str, Any]) -> None:
        """A keeper is ready for the generation after this one."""
        self.ready.setdefault(generation, {})[ready["rank"]] = ready

    def _failed_hosts(self) -> list[str]:
        """The hosts that the rank's watchdog, or this keeper, named as failed."""
        lines = [line for path in self.exits.iterdir() for line in path.read_text().splitlines()]
        named = {self._silent_host, *(line.removeprefix("failed=") for line in lines if line.startswith("failed="))}
        return sorted(named - {""})

    def _ask_lower_ranks(self, generation: Generation, ready: Mapping[str, Any]) -> None:
        """Wait for the plan of the reachable keeper with the lowest rank. Keepers on hosts reported as failed are tried
        last: perhaps only one process died there."""
        out_of_reach, failed = set[str](), ready["failed"]
        for member in sorted(generation.members[: generation.rank], key=lambda member: member.host in failed):
            if member.host in out_of_reach:
                continue
            seconds = CONNECT_FAILED_SECONDS if member.host in failed else CONNECT_SECONDS
            try:
                with _connected(member, generation, {"ready": ready}, seconds) as connection:
                    connection.settimeout(SILENT)
                    lines = connection.makefile("rb")
                    while self.forced_exit_code is None and (line := lines.readline()):
                        if line.strip():  # an empty line says that it is alive
                            self.plans[generation.name] = json.loads(line)
                            return
            except (OSError, json.JSONDecodeError) as error:  # a plan is cut where its sender dies
                log.debug(f"keeper at {member.address}:{member.port}: {error}")
                # in these two cases the host is up, only its keeper is not
                if not isinstance(error, (ConnectionRefusedError, json.JSONDecodeError)):
                    out_of_reach.add(member.host)

    def _lead(self, generation: Generation, waited: float) -> None:
        """Tell the keepers that are not ready to kill their ranks (the watchdogs would take seconds), and propose the
        next generation once all keepers are ready or the wait, `waited` seconds so far, is over."""
        members, until = generation.members, time.monotonic() + POLL_KEEPERS
        present = self.ready[generation.name]
        missing = [rank for rank in range(len(members)) if rank not in present]
        errors: dict[int, OSError] = {}

        def tell(rank: int) -> None:
            try:
                _send(members[rank], generation, {"failed": True})
            except OSError as error:
                errors[rank] = error

        with ThreadPoolExecutor(PROBES) as pool:
            list(pool.map(tell, missing))
        while len(present) < len(members) and time.monotonic() < until:
            time.sleep(LOOK)
        found = dict(present)
        missing = [rank for rank in range(len(members)) if rank not in found]
        failed = {host for ready in found.values() for host in ready["failed"]}
        ended = {rank for rank, error in errors.items() if isinstance(error, ConnectionRefusedError)}
        explained = all(rank in ended or (rank in errors and members[rank].host in failed) for rank in missing)
        if not ended.issuperset(missing):
            if waited < (NAMED_PATIENCE if explained else PATIENCE):
                return
            # With fewer than half of the ranks, this keeper's own network may be down, and the others propose first.
            if 2 * len(found) < len(members) and waited < 2 * PATIENCE:
                return
        causes = sorted({ready["cause"] for ready in found.values()} - {""}, key=lambda cause: "SIG" not in cause)
        plan = {
            "name": secrets.token_hex(8),
            "ranks": sorted(found),
            "port": found[min(found)]["port"],
            "vain": 0 if any(ready["progress"] for ready in found.values()) else self._restarts_without_update + 1,
            "cause": causes[0] if causes else "a rank failed",
        }
        self.plans[generation.name] = _propose(self.run_dir / kept_rank.IN_PLACE / generation.name, plan)

    def _apply(self, plan: dict[str, Any], generation: Generation) -> bool:
        """Make the plan the current generation; false if this rank is not in it."""
        members, ranks, old = generation.members, plan["ranks"], generation.rank
        if old not in ranks:
            log.error(f"rank {old} missed the rendezvous (too slow or unreachable): the other ranks restart without it")
            self.lost = None
            return False
        lost = [f"{rank} (host {member.host})" for rank, member in enumerate(members) if rank not in ranks]
        hosts, rank = [members[rank].host for rank in ranks], ranks.index(old)
        logs.setup(rank)
        without = f", without {', '.join(lost)}" if lost else ""
        log.info(f"in place: {plan['cause']}; {len(ranks)} of {len(members)} ranks restart{without}")
        self._restarts_without_update, self._last = plan["vain"], plan["vain"] > RESTARTS
        if self._last and rank == 0:
            log.error(
                f"{RESTARTS} consecutive in-place restarts completed no update; saving the state, then ending the job"
            )
        assert self.lost is not None
        self.lost += sorted({member.host for member in members} - set(hosts))
        following = Generation(plan["name"], generation.secret, tuple(members[rank] for rank in ranks), rank)
        following.write(self.folder)
        self.generation = following
        # torchrun's variables describe the first generation
        env = {name: value for name, value in self.env.items() if not name.startswith("TORCHELASTIC_")}
        local = hosts[:rank].count(hosts[rank])
        env |= {"RANK": str(rank), "LOCAL_RANK": str(local), "WORLD_SIZE": str(len(ranks))}
        self.env = env | {"MASTER_ADDR": following.members[0].address, "MASTER_PORT": str(plan["port"])}
        return True

    # -- messages between keepers ----------------------------------------------------------------------------------

    def end_rank(self, generation: str) -> None:
        """Kill this rank, because another rank of `generation` failed."""
        if self._failed_generation != generation:
            self._failed_generation = generation
            if self._child is not None:
                self._child.kill()

    def _deliver(self) -> None:
        """Open the server at the address that the rank requests, then keep sending the newest copy to the peer. Ends if it cannot be
        opened."""
        delivered = ""
        while not self._ended.wait(LOOK):
            if self._server is None:
                if (self.folder / kept_rank.ADDRESS).exists():
                    self._listen((self.folder / kept_rank.ADDRESS).read_text())
                    if self._server is None:
                        return
                continue
            if (generation := self.look_up()) is None or not (self.folder / kept_rank.WRITTEN).exists():
                continue
            written = json.loads((self.folder / kept_rank.WRITTEN).read_text())
            peer, name = generation.find_peer(), written["copy"]
            copy = CopyName.parse(name)
            if peer is None or copy is None or copy.generation != generation.name or name == delivered:
                continue
            path = self.folder / name
            try:
                written["bytes"] = path.stat().st_size
                _send(peer, generation, written, path)
                write_atomically(self.folder / kept_rank.DELIVERED, name.encode())
                delivered = name
            except OSError as error:  # also of memory that is full
                log.debug(f"keeper at {peer.address}:{peer.port}: {error}")
                time.sleep(POLL)

    def _listen(self, address: str) -> None:
        """Open the server; the rank reads its port, or why it cannot be opened."""
        try:
            self._server = _Server(self, address)
            port = str(self._server.server_address[1])
            threading.Thread(target=self._server.serve_forever, name="keeper receives", daemon=True).start()
        except OSError as error:
            port = f"--in-place: the keeper cannot listen at {address or 'all interfaces'}: {describe(error)}"
        write_atomically(self.folder / kept_rank.PORT, port.encode())


class _Server(socketserver.ThreadingTCPServer):
    """Receives messages of other keepers: a copy of a rank's state, the failure of a rank, or that a keeper is ready for the next
    generation."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, keeper: Keeper, address: str) -> None:
        self.keeper = keeper
        super().__init__((address, 0), _Message, bind_and_activate=False)
        self.socket.close()
        self.socket = environment.listening_socket(address, 0)
        self.server_address = self.socket.getsockname()


class _Message(socketserver.StreamRequestHandler):
    server: _Server
    timeout = PATIENCE

    def handle(self) -> None:
        try:
            message = json.loads(self.rfile.readline(1 << 20))
            if not isinstance(message, dict):
                return
        except ValueError:
            return
        keeper, generation = self.server.keeper, str(message.get("generation"))
        current = keeper.look_up()
        if current is None or not current.knows(message):
            return  # of another job, or not from a keeper
        if "ready" in message:
            self._answer_with_plan(generation, message["ready"])
        elif generation != current.name:
            return
        elif "failed" in message:
            keeper.end_rank(generation)
            self.wfile.write(b"ok")
        elif self._receive(keeper.folder, str(message["copy"]), int(message["bytes"]), str(message["sha256"])):
            self.wfile.write(b"ok")

    def _answer_with_plan(self, generation: str, ready: dict[str, Any]) -> None:
        """Send the plan as soon as there is one, and until then an empty line a second; a keeper that is itself not ready within
        PATIENCE gives up."""
        keeper, current = self.server.keeper, self.server.keeper.look_up()
        if generation not in keeper.plans:
            if current is None or current.name != generation:
                return
            keeper.add_ready(generation, ready)
            keeper.end_rank(generation)
        started = last_ping = time.monotonic()
        try:
            while generation not in keeper.plans:
                now = time.monotonic()
                if keeper.meeting != generation and now - started > PATIENCE:
                    return
                if now - last_ping > POLL_KEEPERS:
                    last_ping = now
                    self.wfile.write(b"\n")
                time.sleep(LOOK)
            self.wfile.write(json.dumps(keeper.plans[generation]).encode() + b"\n")
        except OSError as error:  # it has ended
            log.debug(f"rank {ready['rank']}: {error}")
            if generation not in keeper.plans:
                keeper.ready[generation].pop(ready["rank"], None)

    def _receive(self, folder: Path, name: str, size: int, sha256: str) -> bool:
        """Receive a copy of `size` bytes; whether it is complete."""
        if CopyName.parse(name) is None:
            return False
        # a unique name: the sender may have retried while its first, slow connection is still open
        part, digest = folder / f".{name}.{secrets.token_hex(4)}", hashlib.sha256()
        try:
            with part.open("wb") as file:
                while size and (data := self.rfile.read(min(size, 1 << 20))):
                    digest.update(data)
                    size -= file.write(data)
            if size or digest.hexdigest() != sha256:
                return False
            os.replace(part, folder / name)
            return True
        except OSError as error:
            logs.warn_once(f"the copy of another rank's state was not received: {describe(error)}")
            return False
        finally:
            part.unlink(missing_ok=True)


def _connected(
    member: Member, generation: Generation, message: Mapping[str, Any], seconds: float = CONNECT_SECONDS
) -> socket.socket:
    """A connection to a keeper that was sent `message`, within `seconds`. Raises OSError."""
    connection = socket.create_connection((member.address, member.port), timeout=seconds)
    try:
        text = json.dumps({"secret": generation.secret, "generation": generation.name, **message})
        connection.sendall(text.encode() + b"\n")
    except OSError:
        connection.close()
        raise
    return connection


def _send(member: Member, generation: Generation, message: Mapping[str, Any], file: Path | None = None) -> None:
    """Send a keeper a message and the bytes of `file`. Raises OSError if it was not accepted."""
    with _connected(member, generation, message) as connection:
        if file is not None:
            connection.settimeout(PATIENCE)
            with file.open("rb") as content:
                connection.sendfile(content)
        if connection.recv(2) != b"ok":
            raise OSError("it did not accept a message")


def _is_reachable(member: Member) -> bool:
    try:
        socket.create_connection((member.address, member.port), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        log.debug(f"keeper at {member.address}:{member.port}: {error}")
        return False
    return True


def _propose(folder: Path, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Publish `plan` for the next generation unless another keeper was first; returns the plan that won."""
    folder.mkdir(parents=True, exist_ok=True)
    candidate = folder / f"{PLAN}.{plan['name']}"
    write_atomically(candidate, json.dumps(plan).encode())
    try:
        os.link(candidate, folder / PLAN)  # atomic: plan.json never exists half-written
    except FileExistsError:
        log.debug("another keeper has proposed the next generation")
    candidate.unlink()
    winner: dict[str, Any] = json.loads((folder / PLAN).read_text())
    return winner


def _describe_exit(code: int) -> str:
    """How a process ended, by its exit code, or minus the signal that killed it."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _wait_for_end(children: Iterable[subprocess.Popen[bytes]], seconds: float | None) -> None:
    """Wait until one of the children has ended, at most `seconds`, or for POLL where the system cannot say so."""
    poll = select.poll()
    with contextlib.ExitStack() as stack:
        for child in children:
            try:
                descriptor = os.pidfd_open(child.pid)
            except ProcessLookupError:  # `Popen.kill` in another thread has waited for it
                return
            except (AttributeError, OSError):
                # no pidfd_open: kernels before 5.3, and Python builds that target them (conda, uv)
                time.sleep(POLL)
                return
            stack.callback(os.close, descriptor)
            poll.register(descriptor, select.POLLIN)
        poll.poll(None if seconds is None else seconds * 1000)
