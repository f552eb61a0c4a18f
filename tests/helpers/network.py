"""Nodes with addresses of their own on this machine: a network, process and host name space each, and bridges between them.

    ctl  10.77.0.100                     where commands are given
    n1…  10.77.0.1…  10.78.0.1…          two interfaces, `mgmt0` and `fast0`

The bridges lie in a space of their own too, so that no packet and no setting of the machine's network is touched.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

NETWORKS = {"mgmt0": "10.77.0", "fast0": "10.78.0"}
CONTROL = 100
# The first process of a node: names it, knows the others, and takes over whoever loses its parent.
FIRST = "hostname {node} && mount --bind {hosts} /etc/hosts && touch {ready} && while :; do sleep 0.5; done"


def address(node: str, interface: str = "mgmt0") -> str:
    return f"{NETWORKS[interface]}.{CONTROL if node == 'ctl' else int(node[1:])}"


def ip(*arguments: str) -> str:
    """`ip arguments…`; raises OSError with what the kernel says where it refuses."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


class Network:
    """The nodes; a context manager that leaves no space, interface or process behind. Raises OSError where the kernel
    permits none."""

    def __init__(self, folder: Path, nodes: tuple[str, ...]) -> None:
        self.folder, self.nodes = folder, nodes
        self.hosts = folder / "hosts"  # every name, for /etc/hosts
        self._first: dict[str, subprocess.Popen[bytes]] = {}
        self._spaces: list[str] = []

    def __enter__(self) -> Network:
        missing = [name for name in ("ip", "nsenter", "unshare", "hostname") if not shutil.which(name)]
        if missing or os.geteuid():
            raise OSError(f"{', '.join(missing)} not found" if missing else "only root makes network namespaces")
        names = "".join(f"{address(node)} {node}\n" for node in (*self.nodes, "ctl"))
        self.hosts.write_text(f"127.0.0.1 localhost\n{names}")
        try:
            self._space("hub")
            for interface in NETWORKS:
                for bridge in (interface, f"{interface}b"):  # the second one for who is cut off
                    ip("-n", self.space("hub"), "link", "add", bridge, "type", "bridge")
                    ip("-n", self.space("hub"), "link", "set", bridge, "up")
            for node in (*self.nodes, "ctl"):
                self._space(node)
                for interface in NETWORKS:
                    self._connect(node, interface)
            for node in self.nodes:
                self.boot(node)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *failed: object) -> None:
        for node in list(self._first):
            self.kill(node)
        for space in self._spaces:
            with contextlib.suppress(OSError):
                ip("netns", "delete", space)

    def space(self, node: str) -> str:
        """The network name space of a node, as `ip netns` knows it."""
        return f"megabert-{os.getpid()}-{node}"

    def inside(self, node: str) -> list[str]:
        """What stands before a command that runs on `node`."""
        if node == "ctl":
            return ["nsenter", f"--net=/run/netns/{self.space(node)}"]
        first = self._child(self._first[node].pid)
        return ["nsenter", f"--target={first}", "--net", "--uts", "--mount", "--pid", "--"]

    def boot(self, node: str) -> None:
        """Start a node, without anything on it."""
        ready = self.folder / f"{node}.ready"
        ready.unlink(missing_ok=True)
        script = FIRST.format(node=node, hosts=self.hosts, ready=ready)
        apart = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", script]
        self._first[node] = subprocess.Popen(["nsenter", f"--net=/run/netns/{self.space(node)}", *apart])
        deadline = time.monotonic() + 20
        while not ready.exists():
            if time.monotonic() > deadline or self._first[node].poll() is not None:
                raise OSError(f"node {node} does not start: unshare --uts --pid --mount-proc")
            time.sleep(0.02)

    def kill(self, node: str) -> None:
        """A power cut: every process of the node ends at once."""
        first = self._first.pop(node)
        with contextlib.suppress(ProcessLookupError, OSError):
            os.kill(self._child(first.pid), signal.SIGKILL)
        first.kill()
        first.wait()

    def set_link(self, node: str, state: str) -> None:
        """The node's interfaces go `down` or `up`."""
        for interface in NETWORKS:
            ip("-n", self.space(node), "link", "set", interface, state)

    def cut_off(self, nodes: tuple[str, ...], heal: bool = False) -> None:
        """These nodes reach each other and nobody else, or everybody again."""
        for node in nodes:
            for interface in NETWORKS:
                bridge = interface if heal else f"{interface}b"
                ip("-n", self.space("hub"), "link", "set", self._port(node, interface), "master", bridge)

    def slow_down(self, node: str, rate: str) -> None:
        """What the node sends passes at `rate` (tc's word, e.g. 20mbit) from now on."""
        for interface in NETWORKS:
            shape = ["tc", "-n", self.space(node), "qdisc", "replace", "dev", interface, "root"]
            subprocess.run([*shape, "tbf", "rate", rate, "burst", "64kb", "latency", "2s"], check=True)

    def received(self, node: str, interface: str) -> int:
        """Bytes that have come in."""
        lines = subprocess.check_output([*self.inside(node), "cat", "/proc/net/dev"], text=True).splitlines()
        (line,) = [line for line in lines if line.strip().startswith(f"{interface}:")]
        return int(line.partition(":")[2].split()[0])

    def _space(self, node: str) -> None:
        ip("netns", "add", self.space(node))
        self._spaces.append(self.space(node))
        ip("-n", self.space(node), "link", "set", "lo", "up")

    def _connect(self, node: str, interface: str) -> None:
        hub, space, port = self.space("hub"), self.space(node), self._port(node, interface)
        ip("-n", hub, "link", "add", port, "type", "veth", "peer", "name", interface, "netns", space)
        ip("-n", hub, "link", "set", port, "master", interface, "up")
        ip("-n", space, "address", "add", f"{address(node, interface)}/24", "dev", interface)
        ip("-n", space, "link", "set", interface, "up")

    def _port(self, node: str, interface: str) -> str:
        return f"{interface}-{node}"

    def _child(self, pid: int) -> int:
        """The first process of the node, below `unshare`, which `nsenter` became."""
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
