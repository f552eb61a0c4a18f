"""Ranks: their rendezvous under every launcher, and collectives for flags, counts, JSON and errors.

`discover` only reads the environment; `init` starts the process group. The methods of `World` that exchange values are collectives:
all ranks must call them in the same order. Control messages use gloo on the CPU, so that they never wait for a GPU; gradients
use NCCL on CUDA.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megabert.common import environment, errors
from megabert.common.logs import log, warn_while_waiting

# A host name, an IPv4 or an IPv6 address.
HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*|[0-9a-fA-F:]*:[0-9a-fA-F:.]*")
# Timeout of collectives; must exceed the longest work of a single rank between two of them (hashing, consolidating).
TIMEOUT = timedelta(minutes=20)
NOTICE = 60.0  # seconds after which the ranks that are there say who is missing
LONG_SECONDS = 5.0  # seconds between the collectives in which the ranks wait for a long action of rank 0
PORTS = range(20_000, 32_000)  # rendezvous ports under srun, below 32,768, where Linux's ephemeral ports begin
# Launcher and its variables for rank, world size and local rank. A batch script's shell has SLURM_PROCID too, but only
# srun sets SLURM_STEP_NUM_TASKS.
LAUNCHERS = (
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
)
SHOWN = 4  # most facts, and ranks of each value, in the message of `check_same`
# Sleep before the process group is destroyed, see `shutdown`, or a process forks. gloo's threads release tensors within
# microseconds, under load milliseconds.
SETTLE_SECONDS = 0.2

Result = TypeVar("Result")


def wait_for_ranks(work: dist.Work) -> None:
    """Wait for an asynchronous collective. The watchdog recognises this function in a stack (`watchdog.main_thread`)."""
    work.wait()


@dataclass(frozen=True)
class World:
    """This process's rank and device, the number of ranks, and the launcher that started them."""

    rank: int
    local_rank: int
    size: int
    device: torch.device
    backend: str
    launcher: str
    master: tuple[str, int] | None = None
    # Key prefix in the rendezvous store, unique to this start: under srun job, step and restart count (from which the
    # port is derived, too); under torchrun the restart count; otherwise "".
    job: str = ""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def agree_any(self, flag: bool) -> bool:
        """Logical or of the ranks' flags."""
        return bool(self.max_ints([int(flag)])[0])

    def sum_ints(self, values: Sequence[int]) -> list[int]:
        """Element-wise sums over the ranks, which pass equal numbers of values."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max_ints(self, values: Sequence[int]) -> list[int]:
        """Element-wise maxima over the ranks, which pass equal numbers of values."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def start_gather(self, values: Sequence[int]) -> Callable[[], list[list[int]]]:
        """Start an asynchronous all-gather of the ranks' values, equal numbers on each. Returns a function that waits for it and
        returns the values of each rank."""
        if self.size == 1:
            return lambda: [list(values)]
        local = torch.tensor([list(values)], dtype=torch.int64)
        rows = local.new_empty(self.size, len(values))
        work = dist.all_gather_into_tensor(rows, local, group=_control, async_op=True)

        def result() -> list[list[int]]:
            wait_for_ranks(work)
            return rows.tolist()

        return result

    def gather(self, value: Any) -> list[Any]:
        """The JSON values of all ranks, in rank order. Unlike `all_gather_object`, this does not unpickle what it receives."""
        if self.size == 1:
            return [value]
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([data.numel()]), group=_control)
        longest = int(torch.cat(lengths).max())
        buffers = [torch.zeros(longest, dtype=torch.uint8) for _ in lengths]
        dist.all_gather(buffers, torch.nn.functional.pad(data, (0, longest - data.numel())), group=_control)
        return [json.loads(b[: int(n)].numpy().tobytes()) for b, n in zip(buffers, lengths, strict=True)]

    def broadcast(self, value: Any) -> Any:
        """Rank 0's JSON value. Unlike `broadcast_object_list`, this does not unpickle what it receives."""
        if self.size == 1:
            return value
        data = bytearray(json.dumps(value).encode()) if self.is_main else bytearray()
        length = torch.tensor([len(data)])
        dist.broadcast(length, src=0, group=_control)
        data = data or bytearray(int(length))
        dist.broadcast(torch.frombuffer(data, dtype=torch.uint8), src=0, group=_control)
        return json.loads(data)

    def barrier(self) -> None:
        """Wait for every rank."""
        self.sum_ints([0])

    def _reduce(self, values: Sequence[int], operation: Any) -> list[int]:
        if self.size == 1:
            return list(map(int, values))
        tensor = torch.tensor(list(values), dtype=torch.int64)
        dist.all_reduce(tensor, op=operation, group=_control)
        return tensor.tolist()


class RankError(ValueError):
    """A rank cannot continue with the files it read, or with its output. Raised on every rank, with the exit code of the cause."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.exit_code = code


def _attempt(action: Callable[[], Any]) -> tuple[Any, str, int]:
    """Run `action`; returns (result, "", OK), or (None, message, exit code) after a ValueError or OSError."""
    try:
        return action(), "", errors.OK
    except (ValueError, OSError) as error:
        return None, errors.describe(error), errors.exit_code(error)


def on_main(world: World, action: Callable[[], Result]) -> Result:
    """Run `action` on rank 0, and return its JSON result on every rank. A collective.

    A ValueError or OSError of `action` is raised on every rank, as ValueError or Failed.
    """
    result, problem, code = world.broadcast(_attempt(action) if world.is_main else None)
    if code:
        raise errors.Failed(problem) if code == errors.FAILED else ValueError(problem)
    return result


def on_main_long(world: World, action: Callable[[], Result]) -> Result:
    """As `on_main`, for an action that may take longer than a collective waits, and so runs in a thread."""
    task = ThreadPoolExecutor(1).submit(action) if world.is_main else None
    while world.agree_any(task is not None and not task.done()):
        if task is not None:
            wait([task], LONG_SECONDS)
    return on_main(world, lambda: task.result() if task is not None else None)  # type: ignore[return-value]


def on_every_rank(world: World, action: Callable[[], Result]) -> Result:
    """Run `action` on every rank; returns this rank's result. A collective. Raises RankError on every rank if it raises
    ValueError or OSError on any."""
    result, problem, code = _attempt(action)
    raise_on_all_ranks(world, problem, code)
    return result


def raise_on_all_ranks(world: World, problem: str, code: int) -> None:
    """Raises RankError on every rank if any has a `problem`, whose exit code is `code` (0: none). A collective.

    Names the first rank with a fault (code 4), since other problems may be its consequence; without faults the first rank.
    """
    if not world.max_ints([code])[0]:
        return
    reports = [(rank, *report) for rank, report in enumerate(world.gather([problem, code])) if report[1]]
    for rank, text, exit_code in sorted(reports, key=lambda report: report[2] != errors.FAILED):
        raise RankError(text if world.size == 1 else f"rank {rank}: {text}", exit_code)


def check_same(world: World, facts: Mapping[str, Any]) -> None:
    """Raises RankError on every rank unless the `facts`, by name, are the same on all: names the first ones that differ, with the
    ranks and hosts. A collective."""
    texts = {name: str(value) for name, value in facts.items()}
    digest = int.from_bytes(hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).digest()[:7], "big")
    high, negative = world.max_ints([digest, -digest])
    if high != -negative:
        hosts, of_ranks = world.gather(environment.host_name()), world.gather(texts)
        names = sorted({name for of_rank in of_ranks for name in of_rank})
        found = [_difference(name, [of_rank.get(name, "none") for of_rank in of_ranks], hosts) for name in names]
        raise RankError("; ".join([text for text in found if text][:SHOWN]), errors.USER_ERROR)


def _difference(name: str, values: Sequence[str], hosts: Sequence[str]) -> str:
    """The values of a fact, each with its first ranks and their hosts; "" if they are equal."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    if len(ranks) == 1:
        return ""
    found = []
    for value, of_value in ranks.items():
        more = f" and {len(of_value) - SHOWN} more" if len(of_value) > SHOWN else ""
        found.append(f"{value} on rank {', '.join(f'{rank} ({hosts[rank]})' for rank in of_value[:SHOWN])}{more}")
    return f"{name} must be the same on all ranks: {', '.join(found)}"


_set_variables: list[str] = []  # environment variables that `init` set
_control: dist.ProcessGroup | None = None  # gloo group of all ranks; None if the default group uses gloo


def discover(environment: dict[str, str] | None = None) -> World:
    """The world that the environment describes: of deepspeed, torchrun, srun, mpirun or a single process.

    Raises ValueError naming the variable if the environment is inconsistent.
    """
    env = dict(os.environ) if environment is None else environment
    if "RANK" in env and "WORLD_SIZE" in env:
        launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in env else "deepspeed"
        rank, size = _number(env, "RANK"), _number(env, "WORLD_SIZE")
        return _world(env, rank, _number(env, "LOCAL_RANK", rank), size, launcher)
    for launcher, rank_name, size_name, local_name in LAUNCHERS:
        if rank_name in env and size_name in env and _number(env, size_name) > 1:
            rank = _number(env, rank_name)
            return _world(env, rank, _number(env, local_name, rank), _number(env, size_name), launcher)
    return _world(env, 0, 0, 1, "single")


def init(world: World) -> World:
    """Start torch.distributed for `world` and select its device; returns the world with the store's address. Safe to call twice.
    Raises ConnectionError for any failure of the rendezvous, since a restart may help."""
    global _control
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    if dist.is_initialized():
        return world
    if world.size == 1:
        # NCCL needs an interface, also without peers and without a network
        _set_variable("NCCL_SOCKET_IFNAME", "lo")
        address, store = ("127.0.0.1", 0), dist.HashStore()
        dist.init_process_group(world.backend, store=store, rank=0, world_size=1, timeout=TIMEOUT)
    else:
        place = "" if world.master is None else f" at {world.master[0]}:{world.master[1]}"
        waiting = warn_while_waiting(f"waiting for rank 0{place}, which names the missing ranks", NOTICE)
        with nullcontext() if world.is_main or world.local_rank else waiting:
            address = _start(world, place)
    # Libraries expect torchrun's variables under every launcher.
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name, value in zip(names, (world.rank, world.local_rank, world.size, *address), strict=True):
        _set_variable(name, str(value))
    if world.size > 1 and world.backend != "gloo":
        _control = dist.new_group(backend="gloo", timeout=TIMEOUT)
    if world.device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        _share_cores(world)
    return replace(world, master=address) if world.size > 1 else world


def _set_variable(name: str, value: str) -> None:
    """Set an environment variable, which `shutdown` removes again; an existing one is kept."""
    if name not in os.environ:
        os.environ[name] = value
        _set_variables.append(name)


def explain_unused_gpu(variables: Mapping[str, str] | None = None) -> str:
    """Why torch does not see the GPU of this machine, and how to fix it; "" without a GPU, or if torch sees it or it is hidden
    by CUDA_VISIBLE_DEVICES."""
    env = os.environ if variables is None else variables
    driver, needed = environment.nvidia_driver(), torch.version.cuda
    if not driver or torch.cuda.is_available() or env.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return ""
    why = f"torch, built for CUDA {needed}, finds no GPU: update the driver, or install torch for the driver's CUDA"
    if needed is None:
        why = "torch is the build for CPUs: install torch with CUDA"
    return f"NVIDIA's driver {driver} is loaded, and {why}; to train on the CPU set CUDA_VISIBLE_DEVICES="


def shutdown() -> None:
    """Destroy the process group, if there is one, and unset the variables that `init` set."""
    global _control
    if dist.is_initialized():
        # A gloo thread may still hold tensors of the last collective, and needs the GIL to release them. If the interpreter
        # is finalizing by then, the process aborts: 6 of 80 ranks did, none after this sleep, which releases the GIL.
        time.sleep(SETTLE_SECONDS)
        # DeepSpeed forgets the groups it made in this world if it destroys the world itself.
        deepspeed: Any = sys.modules.get("deepspeed.comm")
        (deepspeed if deepspeed is not None and deepspeed.is_initialized() else dist).destroy_process_group()
    while _set_variables:
        os.environ.pop(_set_variables.pop(), None)
    _control = None


def first_host(nodelist: str) -> str:
    """First host name of a SLURM node list, e.g. `gpu07` of `gpu[07-09,12],login1`."""
    name = r"[A-Za-z0-9._-]"
    match = re.match(rf"({name}*)(?:\[(\d+)(?:[-,]\d+)*\]({name}*))?(?=,|$)", nodelist)
    host = "".join(part or "" for part in match.groups()) if match else ""
    if not HOST.fullmatch(host):
        raise ValueError(f"SLURM_STEP_NODELIST={nodelist!r}: no host name in it; set MASTER_ADDR")
    return host


def _world(env: dict[str, str], rank: int, local_rank: int, size: int, launcher: str) -> World:
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} must be in [0, {size}); check the rank and world-size variables of {launcher}")
    # it may exceed the rank: Open MPI counts the ranks of a machine core by core, its sockets in turn
    if not 0 <= local_rank < (size if rank else 1):
        where = f"in [0, {size})" if rank else "0"
        raise ValueError(
            f"local rank {local_rank} of rank {rank} must be {where}; check the local-rank variable of {launcher}"
        )
    master, job = None, ""
    if size > 1:
        if "MASTER_ADDR" in env and not HOST.fullmatch(env["MASTER_ADDR"]):
            raise ValueError(f"MASTER_ADDR={env['MASTER_ADDR']!r} is neither a host name nor an address")
        if "MASTER_PORT" in env and not 0 < _number(env, "MASTER_PORT") < 65536:
            raise ValueError(f"MASTER_PORT={env['MASTER_PORT']} is outside 1 to 65535")
        if "MASTER_ADDR" in env and "MASTER_PORT" in env:
            master = (env["MASTER_ADDR"], _number(env, "MASTER_PORT"))
            if launcher == "torchrun" and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                job = f"restart {_number(env, 'TORCHELASTIC_RESTART_COUNT', 0)}"
        elif launcher == "srun":
            host = env.get("MASTER_ADDR") or first_host(env.get("SLURM_STEP_NODELIST", ""))
            names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
            number, step, restart = (_number(env, name, 0) for name in names)
            # Equal on all ranks, different after a restart of the job, and rarely equal for two jobs.
            master = (host, _number(env, "MASTER_PORT", PORTS[(number * 31 + step + restart * 997) % len(PORTS)]))
            job = f"{number}.{step}.{restart}"
        elif launcher != "mpirun":
            raise ValueError(f"WORLD_SIZE={size} but MASTER_ADDR or MASTER_PORT is not set; start with torchrun")
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        return World(rank, local_rank, size, device, "nccl", launcher, master, job)
    return World(rank, local_rank, size, torch.device("cpu"), "gloo", launcher, master, job)


def _share_cores(world: World) -> None:
    """Divide cores between the ranks that share them; more threads than cores are several times slower."""
    cores = sorted(os.sched_getaffinity(0))
    place = [socket.gethostname(), cores]
    torch.set_num_threads(max(1, len(cores) // world.gather(place).count(place)))


def _start(world: World, place: str) -> tuple[str, int]:
    """Start the process group of several ranks, which meet at `place`; the address of its store. Raises ConnectionError."""
    agent_store = world.launcher == "torchrun" and bool(world.job)
    try:
        host, port = world.master or (_find_host_over_mpi(), 0)
        store: Any = None
        if world.is_main and not agent_store:
            try:
                bound = environment.address_to_bind(host)
            except ValueError:  # of another machine: perhaps of a load balancer or a Kubernetes service
                if world.launcher == "srun":
                    raise
                bound = ""
            listener = environment.listening_socket(bound, port)
            port = listener.getsockname()[1]
            options: dict[str, Any] = {"is_master": True, "master_listen_fd": listener.detach()}
            store = dist.TCPStore(bound or "localhost", port, wait_for_workers=False, timeout=TIMEOUT, **options)
        if world.master is None:
            from mpi4py import MPI

            port = int(MPI.COMM_WORLD.bcast(port, root=0))
        store = store or dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=TIMEOUT)
        # The prefix separates this start from another job on the same port, and from an earlier attempt: torchrun's
        # static rendezvous reuses its store, which holds the addresses of the killed ranks.
        store = dist.PrefixStore(f"ranks {world.job}", store)
        _check_devices(world, store)
        ranks: dict[str, Any] = {"rank": world.rank, "world_size": world.size}
        dist.init_process_group(world.backend, store=store, timeout=TIMEOUT, **ranks)
    except (RuntimeError, OSError) as error:  # torch's errors are all subclasses of RuntimeError
        first = str(error).splitlines()[0]
        raise ConnectionError(
            f"rank {world.rank} cannot connect to the other ranks{place}; if this persists, set MASTER_ADDR and MASTER_PORT ({first})"
        ) from error
    return host, port


def _check_devices(world: World, store: dist.Store) -> None:
    """Raises RankError on every rank if only some have GPUs: NCCL and gloo groups would wait for each other forever."""
    store.set(f"device {world.rank}", f"{world.device.type} {environment.host_name()}")
    if world.is_main:
        keys = [f"device {rank}" for rank in range(world.size)]
        until = time.monotonic() + NOTICE
        while not store.check(keys) and time.monotonic() < until:
            time.sleep(0.05)
        if missing := [str(rank) for rank, key in enumerate(keys) if not store.check([key])]:
            shown = ", ".join(missing[:SHOWN]) + ", …" * (len(missing) > SHOWN)
            log.warning(f"waiting for {len(missing)} of {world.size} ranks: {shown}")
        places = [store.get(key).decode().split(" ", 1) for key in keys]
        devices, hosts = zip(*places, strict=True)
        store.set("devices", _difference("the device that torch sees", devices, hosts))
    if problem := store.get("devices").decode():
        raise RankError(problem, errors.USER_ERROR)


def _find_host_over_mpi() -> str:
    """Host of rank 0's store, agreed on over MPI: 127.0.0.1 if all ranks are on one host."""
    environment.require_packages("mpirun without MASTER_ADDR and MASTER_PORT", "mpi", "mpi4py")
    from mpi4py import MPI

    names = MPI.COMM_WORLD.allgather(socket.gethostname())
    return "127.0.0.1" if len(set(names)) == 1 else str(names[0])


def _number(env: dict[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None and default is not None:
        return default
    if not re.fullmatch(r"-?[0-9]{1,10}", text or ""):  # int() accepts blanks, underscores and digits of other scripts
        raise ValueError(f"environment variable {name}={text!r} is not a number")
    return int(text or "")
