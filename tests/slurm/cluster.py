"""A real SLURM on this machine, in one folder: slurmctld and a slurmd a node, started and stopped here.

No service of the machine, no munge and no system file is used: authentication is `auth/none`, and every port was free when
the cluster started. Partition `urgent` preempts `main` by requeue. The nodes claim the sizes that the scripts ask for.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from benchmarks.survival.life import processes
from tests.helpers.network import Network, address
from tests.helpers.waiting import wait_until

NODES = ("n1", "n2")
CONF = """
ClusterName=tests
SlurmctldHost={host}({address})
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
# a requeued job waits until credentials expire: 2 minutes by default and for any value below 5 s
AuthInfo=cred_expire=5
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
SlurmdTimeout={patience}
MinJobAge=3600
OverTimeLimit=0
GresTypes=gpu
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=25
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def send(number: int, pids: Iterable[int]) -> None:
    """A signal to processes, of which some may be gone."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


class Cluster:
    """Two nodes, `n1` and `n2`, or those of a `network`; a context manager that leaves no process behind."""

    def __init__(self, folder: Path, network: Network | None = None) -> None:
        self.folder, self.network = folder, network
        self.names = network.nodes if network else NODES
        for name in ("state", *(f"spool-{node}" for node in self.names)):
            (folder / name).mkdir(parents=True)
        with contextlib.ExitStack() as stack:
            probes = [stack.enter_context(socket.socket()) for _ in (*self.names, "ctl")]
            for probe in probes:
                probe.bind(("127.0.0.1", 0))
            ports = [probe.getsockname()[1] for probe in probes]
        host = socket.gethostname().split(".")[0]
        values = {"folder": folder, "port": ports[0], "host": host, "user": getpass.getuser()}
        values |= {"address": address("ctl") if network else "127.0.0.1", "patience": 60 if network else 300}
        values["nodes"] = "\n".join(
            f"NodeName={node} NodeHostname={node if network else host} "
            f"NodeAddr={address(node) if network else '127.0.0.1'} Port={port} CPUs=64 Gres=gpu:8"
            for node, port in zip(self.names, ports[1:], strict=True)
        )
        (folder / "slurm.conf").write_text(CONF.format(**values))
        for number in range(8):  # stand for devices
            (folder / f"gpu{number}").touch()
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-7]\n")
        self._mark = f"SLURM_CONF={folder / 'slurm.conf'}"
        outside = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH", "PMI"))}
        self.env = outside | {"SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Cluster:
        try:
            self._start("slurmctld", "-D", "-i")
            for node in self.names:
                self.start_node(node)
            self.all_idle(30)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *failed: object) -> None:
        """Ends every process of the cluster: daemons, steps and tasks carry its SLURM_CONF in their environment."""
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait()

        def kill() -> bool:
            send(signal.SIGKILL, left := list(self._processes()))
            return not left

        wait_until(kill, 10, lambda: f"processes {list(self._processes())} do not end")

    def all_idle(self, timeout: float) -> None:
        """Waits until every node is there and has nothing to do."""
        idle = ["idle"] * len(self.names)
        wait_until(lambda: self._nodes() == idle, timeout, self._nodes)

    def start_node(self, node: str) -> None:
        self._start("slurmd", "-D", "-N", node)

    def kill_node(self, node: str) -> None:
        """kill -9 of a node's slurmd, of its steps and of their tasks, as by a power cut."""
        tasks = list(self._processes(f"SLURMD_NODENAME={node}"))
        parents = {int(fields[1]) for pid, fields in processes() if pid in tasks} - set(tasks)
        steps = {pid for pid in parents if "slurmstepd" in _command(pid)}
        daemon = self._daemons[f"slurmd-{node}"]
        send(signal.SIGKILL, (daemon.pid, *steps, *tasks))
        daemon.wait()

    def kill_rank(self, rank: int) -> None:
        """kill -9 of one rank of the job that runs."""
        send(signal.SIGKILL, self._trainers(rank))

    def kill_kept_rank(self, rank: int) -> None:
        """kill -9 of the process that trains under a keeper (`--in-place`), which is older than its workers and its standby."""
        processes = self._processes(f"SLURM_PROCID={rank}")
        kept = [pid for pid in processes if b"\0MEGABERT_KEEPER=" in Path(f"/proc/{pid}/environ").read_bytes()]
        os.kill(min(kept), signal.SIGKILL)

    @contextlib.contextmanager
    def slowed(self, rank: int) -> Iterator[None]:
        """Inside, one rank of the job that runs is stopped two thirds of the time."""
        pids, over = self._trainers(rank), threading.Event()

        def stop_and_continue() -> None:
            while not over.is_set():
                for number, seconds in ((signal.SIGSTOP, 0.1), (signal.SIGCONT, 0.05)):
                    send(number, pids)
                    over.wait(seconds)

        thread = threading.Thread(target=stop_and_continue)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def run(self, *command: str, cwd: Path | None = None, **env: str) -> str:
        """Standard output of a client command."""
        words, environment = [*self._on("ctl"), *command], self.env | env
        done = subprocess.run(words, env=environment, cwd=cwd, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, *arguments: str, cwd: Path, **env: str) -> int:
        """`sbatch arguments…` in folder `cwd`; gives the job's number."""
        return int(self.run("sbatch", "--parsable", *arguments, cwd=cwd, **env))

    def job(self, number: int | str) -> dict[str, str]:
        """What `scontrol show job` says, by field."""
        shown = self.run("scontrol", "--oneliner", "show", "job", str(number))
        return dict(re.findall(r"(\w+)=(\S+)", shown))

    def wait(self, number: int | str, what: Callable[[dict[str, str]], bool], timeout: float) -> dict[str, str]:
        """The job once `what(job)` holds; fails with its last state after `timeout` seconds."""
        wait_until(lambda: what(self.job(number)), timeout, lambda: self.job(number))
        return self.job(number)

    def ended(self, number: int | str, timeout: float = 120) -> str:
        """The job's state once it is over."""
        over = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "PREEMPTED")
        return self.wait(number, lambda job: job["JobState"] in over, timeout)["JobState"]

    def down(self, node: str, timeout: float) -> None:
        """Waits until SLURM marks a node as down."""
        shown = ("sinfo", "-h", "-N", "-n", node, "-p", "main", "-o", "%T")
        wait_until(lambda: self.run(*shown).startswith("down"), timeout, lambda: self.run(*shown))

    def restarted(self, number: int | str, count: int, timeout: float = 120) -> dict[str, str]:
        """The job once it runs for the `count`-th time after its first start."""
        return self.wait(number, lambda job: job["JobState"] == "RUNNING" and int(job["Restarts"]) == count, timeout)

    def cancel_all(self) -> None:
        """Ends every job that is left."""
        for partition in ("main", "urgent"):
            self.run("scancel", f"--partition={partition}")
        wait_until(lambda: not self.run("squeue", "-h").strip(), 60)

    def _start(self, *command: str) -> None:
        node = "ctl" if command[0] == "slurmctld" else command[-1]
        name = command[0] if node == "ctl" else f"slurmd-{node}"
        with open(self.folder / f"{name}.out", "ab") as output:
            words = [*self._on(node), f"/usr/sbin/{command[0]}", *command[1:]]
            self._daemons[name] = subprocess.Popen(words, env=self.env, stdout=output, stderr=output)

    def _on(self, node: str) -> list[str]:
        """What stands before a command that runs on a node, or on the machine where commands are given (`ctl`)."""
        return self.network.inside(node) if self.network else []

    def _nodes(self) -> list[str]:
        """Their states; empty until slurmctld answers."""
        words = [*self._on("ctl"), "sinfo", "-h", "-N", "-p", "main", "-o", "%T"]
        return subprocess.run(words, env=self.env, capture_output=True, text=True).stdout.split()

    def _trainers(self, rank: int) -> list[int]:
        return [pid for pid in self._processes(f"SLURM_PROCID={rank}") if "train.py" in _command(pid)]

    def _processes(self, also: str = "") -> Iterator[int]:
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    environment = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
                    if self._mark in environment and (not also or also in environment):
                        yield int(entry.name)


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    return ""
