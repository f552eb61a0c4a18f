"""Keepers of ranks: real processes, whose ranks are small scripts without torch."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.survival.life import children_of
from megabert.common.errors import Failed
from megabert.common.files import write_atomically
from megabert.common.processes import is_alive
from megabert.distributed.signals import ECHO_SECONDS, REQUEUE
from megabert.inplace import keeper, kept_rank
from megabert.inplace.keeper import RESTARTS
from megabert.inplace.kept_rank import CopyName, Generation, Member
from tests.helpers.forked import ROOT
from tests.helpers.waiting import wait_until

KEEPER = """
import os, sys
from pathlib import Path
from megabert.common.errors import run_main
from megabert.inplace import keeper
keeper.SILENT = float(os.environ.get("SILENT", keeper.SILENT))
keeper.RESPAWN_SECONDS = 0.1
if "OLD_KERNEL" in os.environ:
    vars(os).pop("pidfd_open", None)
sys.orig_argv = [sys.executable, *sys.argv[2:]]
sys.exit(run_main(lambda: keeper.keep(Path(sys.argv[1]) / "run")))
"""
# A rank of the first generation meets the others by files, copies its number, waits until its peer has the copy, and does what
# `act` says. One of a later generation ends with 0.
RANK = """
import hashlib, json, os, signal, sys, time
from pathlib import Path
from megabert.common.errors import record_exit_code
from megabert.inplace import kept_rank
from megabert.distributed import signals
from megabert.inplace.kept_rank import CopyName, Generation, Member

signals.exit_on_signals()

def wait_for(condition):
    while not condition():
        time.sleep(0.01)

def copy(cursor):
    name = CopyName(cursor, rank, size, Generation.read(folder).name)
    (folder / ".part").write_text(f"copy of {rank}")
    kept_rank.publish_copy(folder, folder / ".part", name, hashlib.sha256(f"copy of {rank}".encode()).hexdigest())
    return name

def die_once_all_have_started(end=lambda: os._exit(4)):
    wait_for(lambda: len((shared / "starts.jsonl").read_text().splitlines()) >= size)
    end()

assert kept_rank.follow()
kept_rank.wait_for_environment()
shared, folder = Path(sys.argv[1]), Path(os.environ[kept_rank.KEEPER_DIR_ENV])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
first = Generation.read(folder) is None
if first:
    place = [os.environ["SLURMD_NODENAME"], *kept_rank.listen(folder, ("127.0.0.1", 9))]
    (shared / f"new-{rank}").write_text(json.dumps(place))
    (shared / f"new-{rank}").rename(shared / f"place-{rank}")
    wait_for(lambda: len(list(shared.glob("place-*"))) == size)
    places = [json.loads((shared / f"place-{other}").read_text()) for other in range(size)]
    Generation("0" * 16, "secret", tuple(Member(*one) for one in places), rank).write(folder)
    if len({host for host, *_ in places}) > 1:
        name = copy(7)
        wait_for(lambda: kept_rank.delivered(folder) == str(name))
    (shared / f"ready-{rank}").touch()
    wait_for(lambda: len(list(shared.glob("ready-*"))) == size)
copies = {str(copy): (folder / str(copy)).read_text() for copy in kept_rank.copies_in(folder)}
line = {"rank": rank, "size": size, "local": int(os.environ["LOCAL_RANK"]), "copies": copies, "pid": os.getpid()}
line["folder"] = str(folder)
with open(shared / "starts.jsonl", "a") as file:
    file.write(json.dumps(line) + "\\n")
if first or os.environ.get("ALWAYS"):
    exec(os.environ["ACT"])
"""


END = "wait_for(lambda: (shared / 'end').exists())"  # until a test makes that file


def keepers(folder: Path, act: str, *hosts: int, **more: str) -> list[subprocess.Popen[bytes]]:
    """A keeper a rank; `hosts`: the host of each."""
    folder.mkdir(exist_ok=True)
    (folder / "rank.py").write_text(RANK)
    started = []
    for rank, host in enumerate(hosts):
        env = {"RANK": rank, "LOCAL_RANK": hosts[:rank].count(host), "WORLD_SIZE": len(hosts), "ACT": act}
        env |= {"SLURMD_NODENAME": f"n{host}", "PYTHONPATH": ROOT} | more
        command = map(str, (sys.executable, "-c", KEEPER, folder, folder / "rank.py", folder))
        texts = {name: str(value) for name, value in env.items()}
        started.append(subprocess.Popen([*command], env=os.environ | texts))
    return started


def codes(started: list[subprocess.Popen[bytes]]) -> list[int]:
    try:
        return [one.wait(30) for one in started]
    finally:
        for one in started:
            one.kill()


def starts(folder: Path, count: int) -> list[dict[str, Any]]:
    """The lines of `count` starts, when there are so many; of one generation in no order."""
    file = folder / "starts.jsonl"
    wait_until(lambda: file.exists() and len(file.read_text().splitlines()) >= count)
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("system", [{}, {"OLD_KERNEL": "1"}], ids=["now", "without pidfd"])
def test_all_ranks_start_again_after_one_died(tmp_path: Path, system: dict[str, str]) -> None:
    act = "rank == 1 and die_once_all_have_started(lambda: os.kill(os.getpid(), signal.SIGKILL)); time.sleep(60)"
    assert codes(keepers(tmp_path, act, 0, 0, 1, **system)) == [0, 0, 0]
    again = sorted(starts(tmp_path, 6)[3:], key=lambda line: line["rank"])
    assert [(line["rank"], line["size"], line["local"]) for line in again] == [(0, 3, 0), (1, 3, 1), (2, 3, 0)]
    held = [sorted(line["copies"].values()) for line in again]
    # ranks 0 and 1 copy to rank 2's host, and rank 2 to rank 0's
    assert held == [["copy of 0", "copy of 2"], ["copy of 1"], ["copy of 0", "copy of 1", "copy of 2"]]


def test_a_lost_host_leaves_the_others(tmp_path: Path) -> None:
    act = f"{END}; sys.exit(record_exit_code(4, ['n0']))"
    (tmp_path / "exits").mkdir()
    started = keepers(tmp_path, act, 0, 0, 1, 1, MEGABERT_EXIT_DIR=str(tmp_path / "exits"))
    first = sorted(starts(tmp_path, 4), key=lambda line: line["rank"])
    for one in started[:2]:
        one.kill()
    wait_until(lambda: not any(is_alive(line["pid"]) for line in first[:2]))  # a rank ends with its keeper
    (tmp_path / "end").touch()
    assert codes(started) == [-signal.SIGKILL, -signal.SIGKILL, 0, 0]
    again = sorted(starts(tmp_path, 6)[4:], key=lambda line: line["rank"])
    assert [(line["rank"], line["size"], line["local"]) for line in again] == [(0, 2, 0), (1, 2, 1)]
    assert {text for line in again for text in line["copies"].values()} == {f"copy of {rank}" for rank in range(4)}
    # a launch script reads the codes, and the lost host from both keepers
    exits = Counter("".join(path.read_text() for path in (tmp_path / "exits").iterdir()).split())
    assert exits["failed=n0"] == 2 and set(exits) == {"0", "failed=n0"}


def test_host_lost_while_ranks_meet_is_noticed(tmp_path: Path) -> None:
    """The ranks of the second generation wait for each other, without a watchdog."""
    act = "first and rank == 1 and die_once_all_have_started(); size == 1 and os._exit(0); time.sleep(60)"
    started = keepers(tmp_path, act, 0, 1, ALWAYS="1", SILENT="0.5")
    starts(tmp_path, 4)
    started[1].kill()
    assert codes(started) == [0, -signal.SIGKILL]
    assert [line["size"] for line in starts(tmp_path, 5)] == [2, 2, 2, 2, 1]


SAVE = "stop = signals.Stop(); time.sleep(0.2); os._exit(85 if stop.requested else 4)"
# an update in each generation, whose place is before that of a copy which a lost host has left
UPDATE = """(folder / str(CopyName(99, 0, 9, 'f' * 16))).write_text('')
number = len((shared / 'starts.jsonl').read_text().splitlines())
copy(number)
os._exit(4 * (number < 7))"""


@pytest.mark.parametrize(
    ("act", "code", "count"),
    [
        *((f"os._exit({code})", code, 1) for code in (0, 2, 3, REQUEUE)),
        pytest.param(SAVE, 4, 1 + RESTARTS + 1, id="no progress, then one that saves"),
        pytest.param(UPDATE, 0, 7, id="progress"),
    ],
)
def test_ranks_are_restarted_only_while_that_helps(tmp_path: Path, act: str, code: int, count: int) -> None:
    assert codes(keepers(tmp_path, act, 0, ALWAYS="1")) == [code]
    assert len(starts(tmp_path, 1)) == count


@pytest.mark.parametrize("delay", [0.0, 0.3])
def test_stop_while_ranks_meet_reaches_the_next(tmp_path: Path, delay: float) -> None:
    act = """stop = signals.Stop()
(shared / f"set-{rank}").touch()
if first and rank == 1:
    wait_for((shared / "set-0").exists)
    die_once_all_have_started()
wait_for(lambda: stop.requested and not first)
os._exit(85)"""
    started = keepers(tmp_path, act, 0, 0, ALWAYS="1")
    wait_until(lambda: len(list(tmp_path.glob("set-*"))) == 2)
    time.sleep(delay)
    for one in started:
        one.terminate()
    assert codes(started) == [REQUEUE, REQUEUE]
    assert len(starts(tmp_path, 4)) == 4


def test_second_signal_ends_a_waiting_keeper_at_once(tmp_path: Path) -> None:
    """To a launch script it is a failure; to the next attempt, which has removed the folder, it is nothing."""
    (tmp_path / "exits").mkdir()
    started = keepers(tmp_path, f"{END}; os._exit(4)", 0, 1, MEGABERT_EXIT_DIR=str(tmp_path / "exits"))
    (orphan,) = keepers(tmp_path / "orphan", "os._exit(85)", 0, MEGABERT_EXIT_DIR=str(tmp_path / "gone"))
    assert orphan.wait(30) == REQUEUE and not (tmp_path / "gone").exists()
    starts(tmp_path, 2)
    started[1].send_signal(signal.SIGSTOP)
    (tmp_path / "end").touch()
    for _ in range(2):
        time.sleep(ECHO_SECONDS + 0.2)
        started[0].terminate()
    assert started[0].wait(15) == 128 + signal.SIGTERM
    started[1].kill()
    assert sorted(path.read_text() for path in (tmp_path / "exits").iterdir()) == ["143\n", "4\n"]


def test_folders_of_killed_keepers_are_removed(tmp_path: Path) -> None:
    """By the keepers that are left, also that on the host which their watchdogs name, and at the next start, however soon."""
    act = f"{END}; sys.exit(record_exit_code(4, ['n0']))"
    started = keepers(tmp_path, act, 0, 0, 1)
    folders = [Path(line["folder"]) for line in starts(tmp_path, 3)]
    started[0].kill()
    started[0].wait()
    (tmp_path / "end").touch()
    assert codes(started) == [-signal.SIGKILL, 0, 0] and not any(folder.exists() for folder in folders)
    assert [line["size"] for line in starts(tmp_path, 5)] == [3, 3, 3, 2, 2]
    (killed,) = keepers(tmp_path / "second", "time.sleep(60)", 0)
    (first,) = starts(tmp_path / "second", 1)
    killed.kill()
    killed.wait()
    assert Path(first["folder"]).exists()
    assert codes(keepers(tmp_path / "third", "os._exit(0)", 0)) == [0]
    assert not Path(first["folder"]).exists()


def test_a_killed_standby_is_replaced(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    act = f"copy(1); {END}; os._exit(4 * first)"
    started = keepers(tmp_path, act, 0, ALWAYS="1")
    (first,) = starts(tmp_path, 1)
    wait_until(lambda: len(children_of(started[0].pid)) == 2)
    (standby,) = set(children_of(started[0].pid)) - {first["pid"]}
    os.kill(standby, signal.SIGKILL)
    wait_until(lambda: len(set(children_of(started[0].pid)) - {first["pid"], standby}) == 1)
    (tmp_path / "end").touch()
    assert codes(started) == [0]
    found = capfd.readouterr()
    assert "warning: the standby process of rank 0 was killed by SIGKILL; another one starts" in found.err
    assert "in place: rank 0 (host n0) ended with exit code 4; 1 of 1 ranks restart" in found.out


def sent(port: int, message: dict[str, Any], data: bytes = b"") -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(json.dumps(message).encode() + b"\n" + data)
        connection.shutdown(socket.SHUT_WR)
        return connection.recv(100)


def test_keeper_takes_whole_copies_of_its_job(tmp_path: Path) -> None:
    started = keepers(tmp_path, END, 0, 1)
    folder = Path(starts(tmp_path, 2)[0]["folder"])
    port = int((folder / kept_rank.PORT).read_text())
    sockets = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    own = f"0100007F:{port:04X}"  # the loopback interface alone
    assert [one[1] for one in sockets if one[1].endswith(own[-5:]) and one[2].endswith(":0000")] == [own]
    name, data = str(CopyName(8, 1, 2, "0" * 16)), b"another copy"
    message = {"generation": "0" * 16, "copy": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert sent(port, message, data) == sent(port, message | {"secret": "Secret"}, data) == b""
    message["secret"] = "secret"
    assert sent(port, message, data[:-1]) == sent(port, message, b"another c0py") == b""
    assert sent(port, message | {"copy": "../x"}, data) == sent(port, {"secret": "secret"}) == b""
    assert not (folder / name).exists() and not (folder.parent / "x").exists()
    assert sent(port, message, data) == b"ok" and (folder / name).read_bytes() == data
    assert sent(port, {"generation": "0" * 16, "failed": True}) == b"" and len(starts(tmp_path, 2)) == 2
    (tmp_path / "end").touch()
    assert codes(started) == [0, 0]


@pytest.mark.parametrize("sizes", [(1, 1), (4, 4), (2, 4), (4, 2), (1, 3, 2), (8, 8, 8)])
def test_copies_lie_on_other_hosts_evenly(sizes: tuple[int, ...]) -> None:
    hosts = [host for host, count in enumerate(sizes) for _ in range(count)]
    members = tuple(Member(f"n{host}", "localhost", port) for port, host in enumerate(hosts))
    load = Counter[int]()
    for rank, member in enumerate(members):
        peer = Generation("0" * 16, "secret", members, rank).find_peer()
        assert peer is not None and peer.host != member.host
        load[peer.port] += 1
    most_ranks_a_host, fewest_elsewhere = max(sizes), len(hosts) - max(sizes)
    assert max(load.values()) <= -(-most_ranks_a_host // fewest_elsewhere) + 1
    assert len(sizes) > 2 or max(load.values()) == -(-max(sizes) // min(sizes))


def test_ranks_of_one_host_have_no_peer() -> None:
    assert Generation("0" * 16, "secret", (Member("n0", "localhost", 1),) * 2, 1).find_peer() is None


def test_copies_are_delivered_once_memory_is_free_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = made = [keeper.Keeper(tmp_path, tmp_path / name, []) for name in ("sender", "receiver")]
    for one in made:
        one.folder.mkdir()
    receiver._listen("localhost")
    port = int((receiver.folder / kept_rank.PORT).read_text())
    members = Member("n0", "localhost", 1), Member("n1", "localhost", port)
    for rank, one in enumerate(made):
        one.generation = Generation("0" * 16, "secret", members, rank)
    full: list[Path] = []

    def write(path: Path, data: bytes) -> None:
        if path.name == kept_rank.DELIVERED and not full:
            full.append(path)
            raise OSError(errno.ENOSPC, "No space left on device")
        write_atomically(path, data)

    monkeypatch.setattr(keeper, "write_atomically", write)
    name, part = CopyName(7, 0, 2, "0" * 16), sender.folder / ".part"
    part.write_bytes(b"copy")
    kept_rank.publish_copy(sender.folder, part, name, hashlib.sha256(b"copy").hexdigest())
    (sender.folder / kept_rank.ADDRESS).write_text("localhost")
    sends = threading.Thread(target=sender._deliver, daemon=True)
    sends.start()
    wait_until(lambda: kept_rank.delivered(sender.folder) == str(name))
    assert full and (receiver.folder / str(name)).read_bytes() == b"copy"
    sender._ended.set()
    sends.join()
    for one in made:
        assert one._server is not None
        one._server.shutdown()
        one._server.server_close()


def test_address_that_cannot_be_bound_fails_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_rank, "address_to_bind", lambda host: "192.0.2.1")  # of no machine
    sends = threading.Thread(target=keeper.Keeper(tmp_path, tmp_path, [])._deliver, daemon=True)
    sends.start()
    with pytest.raises(Failed, match=r"^--in-place: the keeper cannot listen at 192\.0\.2\.1: Cannot assign requested"):
        kept_rank.listen(tmp_path, ("127.0.0.1", 9))
    sends.join(5)
    assert not sends.is_alive()


def test_a_plan_that_is_cut_off_is_none(tmp_path: Path) -> None:
    """As of a keeper that is killed while it sends; its host can be asked again."""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]

        def send_half() -> None:
            for half in (b'\n{"members": [', b"{}\n"):
                connection, _ = server.accept()
                with connection:
                    connection.recv(1000)
                    connection.sendall(half)

        sends = threading.Thread(target=send_half, daemon=True)
        sends.start()
        one = keeper.Keeper(tmp_path, tmp_path, [])
        members = Member("n0", "localhost", port), Member("n0", "localhost", port), Member("n1", "localhost", 9)
        one._ask_lower_ranks(Generation("0" * 16, "secret", members, 2), {"failed": []})
        sends.join(5)
    assert one.plans == {"0" * 16: {}}
