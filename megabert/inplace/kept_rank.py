"""A rank with a keeper (`train --in-place`): messages between the two, in the environment and in files in memory.

This module must not import torch.
"""

from __future__ import annotations

import hmac
import json
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megabert.common.environment import address_to_bind, end_with_parent
from megabert.common.errors import FAILED, Failed
from megabert.common.files import write_atomically
from megabert.distributed import signals

KEEPER_DIR_ENV = "MEGABERT_KEEPER"  # environment variable of a rank: its keeper's folder
# Files in the keeper's folder. Address that the rank requests, port at which the keeper listens or why it does not, the generation:
ADDRESS, PORT, MEMBERS = "address", "port", "members.json"
# Newest copy that the rank wrote, newest copy that the peer received, folder of exit codes, token of the run lock:
WRITTEN, DELIVERED, EXITS, OWNER = "written.json", "delivered", "exits", "owner"
LOOK = 0.005  # seconds between checks whether the keeper listens
IN_PLACE = "in-place"  # folder of a run in which the keepers agree
# File name of a copy: data cursor, rank, number of ranks, generation.
COPY = re.compile(r"(\d{12})-(\d{5})-of-(\d{5})-([0-9a-f]{16})\.safetensors")


class CopyName(NamedTuple):
    """Fields of a copy's file name."""

    cursor: int
    rank: int
    size: int
    generation: str

    @classmethod
    def parse(cls, text: str) -> CopyName | None:
        match = COPY.fullmatch(text)
        return cls(int(match[1]), int(match[2]), int(match[3]), match[4]) if match else None

    def __str__(self) -> str:
        return f"{self.cursor:012d}-{self.rank:05d}-of-{self.size:05d}-{self.generation}.safetensors"


@dataclass(frozen=True)
class Member:
    """A keeper: its host's name and address, and the port at which it receives messages."""

    host: str
    address: str
    port: int


@dataclass(frozen=True)
class Generation:
    """The ranks of one start, and a keeper's own `rank`, its index in `members`. Only messages with the job's `secret` are accepted."""

    name: str
    secret: str
    members: tuple[Member, ...]
    rank: int

    @classmethod
    def read(cls, folder: Path) -> Generation | None:
        """The generation in a keeper's folder; None before the first ranks have met."""
        try:
            tree = json.loads((folder / MEMBERS).read_text())
        except FileNotFoundError:
            return None
        return cls(**tree | {"members": tuple(Member(**member) for member in tree["members"])})

    def write(self, folder: Path) -> None:
        write_atomically(folder / MEMBERS, json.dumps(asdict(self)).encode())

    def knows(self, message: Mapping[str, Any]) -> bool:
        """Whether a message is from a keeper of this job."""
        return hmac.compare_digest(str(message.get("secret")).encode(), self.secret.encode())

    @property
    def following(self) -> Member:
        """The keeper of the next rank, which this keeper probes."""
        return self.members[(self.rank + 1) % len(self.members)]

    def find_peer(self) -> Member | None:
        """The keeper on another host that receives this rank's copies; None where all are on one host. The peers of a host's
        ranks are spread over the ranks of other hosts."""
        host, size = self.members[self.rank].host, len(self.members)
        on_host = [n for n, member in enumerate(self.members) if member.host == host]
        following = [n % size for n in range(on_host[-1] + 1, on_host[-1] + 1 + size)]
        others = [n for n in following if self.members[n].host != host]
        return self.members[others[on_host.index(self.rank) % len(others)]] if others else None


def copies_in(folder: Path) -> Iterator[CopyName]:
    """The complete copies in a keeper's folder."""
    for name in os.listdir(folder):
        if copy := CopyName.parse(name):
            yield copy


def follow() -> bool:
    """If this process has a keeper, arrange to be killed when the keeper ends; returns whether it has one."""
    if KEEPER_DIR_ENV not in os.environ:
        return False
    end_with_parent()
    return True


def wait_for_environment() -> None:
    """Wait for the environment that the keeper sends, and set it. Exits if the keeper has ended."""
    with open(int(os.environ[signals.ENVIRONMENT_FD]), "rb") as pipe:
        text = pipe.read()
    if not text:
        os._exit(FAILED)
    os.environ.clear()
    os.environ.update(json.loads(text))


def delivered(folder: Path) -> str:
    """Name of the newest copy of this rank that its peer has received; "" if there is none."""
    path = folder / DELIVERED
    return path.read_text() if path.exists() else ""


def load_owner_token() -> str:
    """Token of the run's owner (`run_lock`) in the previous generation; "" if there is none."""
    path = Path(os.environ.get(KEEPER_DIR_ENV, ""), OWNER)
    return path.read_text() if KEEPER_DIR_ENV in os.environ and path.exists() else ""


def save_owner_token(token: str) -> None:
    """Save the owner's token for the next generation, if there is a keeper."""
    if KEEPER_DIR_ENV in os.environ:
        write_atomically(Path(os.environ[KEEPER_DIR_ENV], OWNER), token.encode())


def publish_copy(folder: Path, part: Path, name: CopyName, sha256: str) -> None:
    """Rename the finished copy `part` to `name`, and announce it to the keeper, which sends it to the peer."""
    os.replace(part, folder / str(name))
    write_atomically(folder / WRITTEN, json.dumps({"copy": str(name), "sha256": sha256}).encode())


def listen(folder: Path, master: tuple[str, int] | None) -> tuple[str, int]:
    """Ask the keeper to listen; returns the address and port at which other keepers reach it.

    The address is that of the interface which routes to `master` (None: one rank); on rank 0's host `master` itself. Raises Failed if
    the keeper cannot listen there.
    """
    bound = address = "localhost"
    if master is not None:
        family, kind, _, _, target = socket.getaddrinfo(*master, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            bound = address = probe.getsockname()[0]
        if address in (target[0], "::1") or address.startswith("127."):
            bound, address = address_to_bind(master[0]), master[0]
    write_atomically(folder / ADDRESS, bound.encode())
    while not (folder / PORT).exists():  # the rank ends with its keeper
        time.sleep(LOOK)
    port = (folder / PORT).read_text()
    if not port.isdigit():
        raise Failed(port)
    return address, int(port)
