"""Rehearsal of many ranks on one machine: what a rank holds, opens, sends and waits for, and how that grows with the ranks.

    python benchmarks/bench_ranks.py [--ranks 8 32 128] [--json FILE]

Every rank is a process of `megabert train` over gloo with the real loader, agreement of ranks, watchdog, run lock and
checkpoints; only the engine does no arithmetic (`RehearsedEngine`). Each number of ranks has three lives: a start, a restart, and
a restart on half as many ranks. Every `--per-node` ranks are taken for a node, of which only the first one reads the manifest.

Counts are of this program and do not depend on the machine. Seconds are of ranks that share its cores: of a thousand ranks with
cores of their own the CPU seconds say more than the wall clock. Of each quantity the three fits over the number of ranks N are
least squares; a constant is taken where no value is more than 2% from the mean, otherwise a + b N or a + b log2 N, whichever
leaves less. From three points this extrapolates an order of magnitude: take it for the shape of the growth.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import multiprocessing
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone need not be installed
# before numpy and torch are loaded: ranks share the cores, and a process without threads may be forked
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch._dynamo  # which the first optimizer of a process imports
import torch.distributed as dist

from benchmarks.common import hardware
from megabert import pretraining, train
from megabert.checkpoint import tensors
from megabert.config import Config, accumulation
from megabert.data.shards import Dataset
from megabert.distributed.ranks import World
from megabert.distributed.session import Session
from megabert.engine import Engine, UpdateResult
from megabert.engine.rank_times import OwnTime
from megabert.engine.update_result import HostCopy
from megabert.engine.zero_layout import ZeroLayout, slice_of_group
from megabert.optim.build import build_optimizer
from megabert.trainer import Saves, Trainer

COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "reduce")
REQUESTS = ("set", "get", "multi_get", "check", "compare_set")
# audited besides "open": what a file system's metadata server is asked
NAMES = {f"os.{name}" for name in ("listdir", "scandir", "mkdir", "rename", "remove", "rmdir")}
# reports of an update that are timed one by one after the last update
SYNCS = 20
TARGET = 1024
# a life that takes longer hangs
LIFE_SECONDS = 900.0
SETTINGS = (
    *(
        "ops.attention=sdpa",
        "ops.mlm_loss=torch",
        "ops.layer=torch",
        "precision=fp32",
        "zero.stage=1",
        "optimizer.name=adamw",
    ),
    *("peak_tflops=1.0", "data.workers=0", "data.seq_len=64", "batch.micro_size=2", "eval.interval=0"),
    *("log.interval=10", "log.tensorboard=false", "schedule.warmup_steps=1"),
)


# -- the engine ------------------------------------------------------------------------------------------------------


class RehearsedEngine(Engine):
    """An engine without DeepSpeed, forward and backward passes: this rank's partition of weights and moments at ZeRO stage 1,
    the collectives of an update but for the gradients', and the real snapshots and restores.

    The first update sets each weight to a number that follows from its place in the model; every later one, also on other
    ranks, asserts that it still is.
    """

    def __init__(
        self, config: Config, model: Any, world: World, deepspeed_extra: Mapping[str, Any] | None = None
    ) -> None:
        self.config, self.world, self.dtype = config, world, torch.float32
        self.accumulation = accumulation(config, world.size)
        self.module = model()
        self.terms, self._counts, self.optimizer_kernels = self.module.terms, self.module.counts, "torch"
        self.optimizer = build_optimizer(config.optimizer, self.module)
        names, parameters = zip(*self.module.named_parameters(), strict=True)
        index_of, masters = {id(parameter): index for index, parameter in enumerate(parameters)}, []
        for group in self.optimizer.param_groups:
            flat = torch.zeros(-(-sum(parameter.numel() for parameter in group["params"]) // world.size))
            masters.append(slice_of_group(flat, group["params"], world.rank, index_of))
            group["params"] = [flat]
        self.layout = ZeroLayout(names, tuple(p.shape for p in parameters), tuple(masters), partitioned=True)
        self.optimizer.attach({master.tensor: master.segments for master in masters}, world.device, world)
        self.own_time, self._skipped = OwnTime(world.device), torch.zeros((), dtype=torch.float64)
        self.progress: Callable[[], None] = lambda: None
        methods = dict.fromkeys(("set_train_micro_batch_size", "set_train_batch_size"), lambda size: None)
        self._deepspeed = SimpleNamespace(global_steps=0, global_samples=0, micro_steps=0, **methods)
        # (epoch, row id) of each row of this rank
        self.rows: list[tuple[int, int]] = []

    def train_update(self, update: Any, lr: float, veto: Callable[[float], bool] | None = None) -> UpdateResult:
        """An update that changes no weight, with losses of 1."""
        for segment, view in self.layout.segments():
            expected = (torch.arange(segment.offset, segment.stop) % 4093 + segment.index).float()
            if update.step == 0:
                view.copy_(expected)
            assert torch.equal(view, expected), f"{self.layout.names[segment.index]} is not what was saved"
        self.rows += [(int(e), int(r)) for e, r in zip(update.epochs, update.row_ids, strict=True) if r >= 0]
        counts = [sum(parts) for parts in zip(*map(self._counts, update.batches), strict=True)]
        totals = self._sum_over_ranks(torch.tensor(counts, dtype=torch.float64))
        correct = self._sum_over_ranks(torch.zeros(2 * len(counts), dtype=torch.float64))[len(counts) :]
        norm, one = self.optimizer.guard([], 0.0), torch.ones(())
        self.optimizer.resume([master.tensor for master in self.layout.masters], update.step + 1)
        self._deepspeed.global_steps += 1
        self.progress()
        losses = torch.ones(len(counts), dtype=torch.float64)
        common = {"correct": correct, "counts": totals, "grad_norm": norm, "applied": one, "vetoed": False}
        return UpdateResult(
            loss=losses.sum(), losses=losses, host_loss=HostCopy(losses.sum()), host_applied=HostCopy(one), **common
        )


# -- counts of a rank ------------------------------------------------------------------------------------------------


def size_of(value: Any) -> int:
    """Bytes of the tensors in an argument."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(map(size_of, value)) if isinstance(value, list) else 0


class Counts:
    """What this process has done so far, by the stage it was in: seconds, collectives, requests to the store, files."""

    def __init__(self, places: Mapping[str, str]) -> None:
        """`places`: prefix of a path, by the name under which its files are counted."""
        self._places, self._so_far, self._io = places, Counter[str](), os.open("/proc/self/io", os.O_RDONLY)
        self.stage, self.stages = "start", defaultdict[str, Counter[str]](Counter)
        # seconds of each time that a stage was entered
        self.seconds = defaultdict[str, list[float]](list)
        sys.addaudithook(self._audit)
        for name in COLLECTIVES:
            setattr(dist, name, self._counting(getattr(dist, name), "collectives", "collective bytes"))
        for name in REQUESTS:
            setattr(dist.Store, name, self._counting(getattr(dist.Store, name), "store requests", f"store {name}"))
        tensors.safe_open = self._counting(tensors.safe_open, "opened: run", "")  # no file that Python opens
        self._before = self._now()

    def enter(self, stage: str) -> None:
        """What was done since the last call belongs to the stage that ends here."""
        now = self._now()
        self.stages[self.stage].update({name: now[name] - self._before[name] for name in now})
        self.seconds[self.stage].append(now["seconds"] - self._before["seconds"])
        self.stage, self._before = stage, now

    def around(self, owner: Any, name: str, stage: str) -> None:
        """Let each call of a function of the project be a stage."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def entered(*args: Any, **kwargs: Any) -> Any:
            self.enter(stage)
            found = function(*args, **kwargs)
            self.enter("between")
            return found

        setattr(owner, name, entered)

    def _counting(self, function: Any, calls: str, more: str) -> Any:
        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._so_far[calls] += 1
            self._so_far[more] += sum(map(size_of, args)) if more.endswith("bytes") else 1
            return function(*args, **kwargs)

        return counted

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen":
            self._so_far["processes started"] += 1
        elif event == "open" or event in NAMES:
            path = os.fsdecode(args[0]) if isinstance(args[0], str | bytes | os.PathLike) else ""
            place = next((name for name, prefix in self._places.items() if path.startswith(prefix)), "other")
            self._so_far[f"{'opened' if event == 'open' else 'names'}: {place}"] += 1

    def _now(self) -> Counter[str]:
        lines = os.pread(self._io, 4096, 0).decode().splitlines()
        io = {name: int(number) for name, number in (line.split(": ") for line in lines)}
        calls = {"system calls": io["syscr"] + io["syscw"], "bytes read": io["rchar"], "bytes written": io["wchar"]}
        clocks: Any = {"seconds": time.perf_counter(), "cpu seconds": time.process_time()}
        return Counter(self._so_far | calls | clocks)


def descriptors() -> list[str]:
    """What the descriptors of this process are open on."""
    targets = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own, or another thread's
            targets.append(os.readlink(f"/proc/self/fd/{number}"))
    return targets


def held(inherited: list[str]) -> dict[str, float]:
    """What this process holds at the moment besides what it `inherited`. Memory: private, and PSS, in which what several processes
    share counts by shares."""
    rollup = Path("/proc/self/smaps_rollup").read_text().split()
    kib = {name: int(rollup[rollup.index(f"{name}:") + 1]) for name in ("Pss", "Private_Clean", "Private_Dirty")}
    opened = [target for target in descriptors() if target not in inherited]
    return {
        "descriptors": len(opened),
        "sockets": sum(target.startswith("socket:") for target in opened),
        "maps": len(Path("/proc/self/maps").read_text().splitlines()),
        "threads": len(os.listdir("/proc/self/task")),
        "PSS MiB": kib["Pss"] / 1024,
        "private MiB": (kib["Private_Clean"] + kib["Private_Dirty"]) / 1024,
    }


# -- lives -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Life:
    """One command of so many ranks; `folder` gets their output and figures."""

    ranks: int
    per_node: int
    argv: list[str]
    folder: Path
    places: Mapping[str, str]
    # the rank that stops in its fourth update, as with SIGSTOP; -1: none
    stopped: int = -1


def rank_of(life: Life, rank: int, port: int, gate: tuple[int, int]) -> None:
    """The process of one rank, which leaves its figures in the life's folder."""
    inherited = descriptors()
    for target, name in ((1, "output"), (2, "errors")):
        os.dup2(os.open(life.folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), target)
    place = {"RANK": rank, "LOCAL_RANK": rank % life.per_node, "WORLD_SIZE": life.ranks, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"})
    counts, engines, holding = Counts(life.places), list[Any](), dict[str, float]()
    counts.around(Session, "join", "meet")
    counts.around(Session, "watch", "watch")
    for name, stage in (("open_data", "open"), ("complete_config", "verify"), ("resume", "restore")):
        counts.around(pretraining, name, stage)
    counts.around(Saves, "complete", "save")
    pretraining.Engine = lambda *args: engines.append(RehearsedEngine(*args)) or engines[0]  # type: ignore[assignment]
    take, training = Trainer.train_update, Trainer.train

    def train_update(trainer: Trainer) -> Any:
        counts.enter("update" if engines[0].rows else "first update")
        if rank == life.stopped and len(counts.seconds["update"]) == 2:
            (life.folder / "stopped").touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        return take(trainer)

    def train_and_sync(trainer: Trainer) -> bool:
        over, update = training(trainer), next(trainer.updates)
        for _ in range(SYNCS):
            counts.enter("sync")
            trainer.report(update, seconds=0.0)
            trainer.agree()
        counts.enter("end")
        trainer.world.barrier()
        holding.update(held(inherited))
        trainer.world.barrier()
        return over

    Trainer.train_update, Trainer.train = train_update, train_and_sync  # type: ignore[method-assign]
    os.close(gate[1])
    os.read(gate[0], 1)  # until all ranks are forked
    counts.enter("between")
    code = train.main(life.argv)
    counts.enter("")
    found = {
        "stages": counts.stages,
        "seconds": counts.seconds,
        "held": holding,
        "rows": engines[0].rows if engines else [],
    }
    (life.folder / f"{rank:05d}.json").write_text(json.dumps(found))
    sys.exit(code)


def run(life: Life) -> tuple[list[Any], str]:
    """Exit codes of the ranks, and the end of what they printed."""
    life.folder.mkdir(parents=True)
    context, port, gate = multiprocessing.get_context("fork"), hardware.free_port(), os.pipe()
    gc.collect()
    gc.freeze()  # no collection writes into the pages that the ranks share
    processes = [context.Process(target=rank_of, args=(life, rank, port, gate)) for rank in range(life.ranks)]
    try:
        for process in processes:
            process.start()
        for end in gate:
            os.close(end)
        deadline = time.monotonic() + LIFE_SECONDS
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
    finally:
        for process in processes:
            process.kill()
            process.join()
    codes = [process.exitcode for process in processes]
    return codes, "".join((life.folder / name).read_text()[-2000:] for name in ("output", "errors"))


def live(life: Life) -> list[dict[str, Any]]:
    """The figures of each rank. Raises ValueError with the end of the ranks' output where one failed."""
    codes, output = run(life)
    if any(codes):
        raise ValueError(f"exit codes of {life.ranks} ranks: {dict(Counter(codes))}:\n{output}")
    return [json.loads((life.folder / f"{rank:05d}.json").read_text()) for rank in range(life.ranks)]


def stop_last(life: Life) -> float:
    """Seconds from the moment at which the last rank stops until all ranks have ended. Raises ValueError where that rank is not the
    one that is named."""
    codes, output = run(life)
    seconds = time.time() - (life.folder / "stopped").stat().st_mtime
    if not re.search(rf"error: rank {life.stopped} .* is stopped or lost", output) or set(codes) != {4, -9}:
        raise ValueError(f"rank {life.stopped} of {life.ranks} stopped; exit codes {dict(Counter(codes))}:\n{output}")
    return seconds


def rehearse(
    data: Path, ranks: int, per_node: int, updates: int, scratch: Path
) -> tuple[list[list[dict[str, Any]]], dict[str, float]]:
    """The figures of each rank of a start, a restart, and a restart on half as many ranks; and those of the run. Raises ValueError
    where a life failed, or where the rows that the ranks took are not those of the dataset's order, each once."""
    run_dir, lives, rows = scratch / "run", [], Counter[tuple[int, int]]()
    places = {"run": str(run_dir), "dataset": str(data), "program": str(hardware.ROOT)}
    schedule = [
        f"batch.global_size={4 * ranks}",
        f"schedule.total_steps={3 * updates}",
        f"checkpoint.keep_every={updates}",
    ]
    for number, size in enumerate((ranks, ranks, max(1, ranks // 2)), 1):
        argv = ["--config", "tiny", "--data", str(data), "--run", str(run_dir), "--stop-after", str(number * updates)]
        # a first life's saves are counted apart; later ones are committed while training
        argv += [*SETTINGS, *schedule, f"checkpoint.interval={0 if number == 1 else 4}"]
        lives.append(live(Life(size, per_node, argv, scratch / f"life-{number}", places)))
        rows.update(tuple(row) for rank in lives[-1] for row in rank["rows"])
        print(
            f"{ranks} ranks, life {number} on {size}: {lives[-1][0]['stages']['meet']['seconds']:.1f} s to meet",
            flush=True,
        )
    ids, epochs = Dataset(data).order(42, np.arange(3 * updates * 4 * ranks))
    if rows != Counter(zip(epochs.tolist(), ids.tolist(), strict=True)):
        raise ValueError(
            f"{ranks} ranks trained on other rows ({rows.total()}) than the dataset's order has, each once"
        )
    found: dict[str, float] = {"rows, each trained on once": rows.total()}
    newest = run_dir / "checkpoints" / f"step-{2 * updates:08d}"
    found |= {
        "checkpoint: files": len(list(newest.iterdir())),
        "checkpoint: manifest bytes": (newest / "manifest.json").stat().st_size,
    }
    found["log line: bytes"] = len((run_dir / "metrics.jsonl").read_bytes().splitlines()[0])
    if ranks > 1:
        argv = [*argv, f"--run={scratch / 'stopped'}", "watchdog.timeout_seconds=10"]
        found["seconds: a stopped rank, until all have ended"] = stop_last(
            Life(ranks, per_node, argv, scratch / "life-4", places, ranks - 1)
        )
    return lives, found


# -- figures ---------------------------------------------------------------------------------------------------------

Rank = dict[str, Any]
OPENING = ("meet", "watch", "open", "verify", "restore", "between")
SYNC = ("collectives", "collective bytes", "system calls", "bytes written")


def summed(stages: Sequence[str], name: str) -> Callable[[Rank], float]:
    return lambda rank: sum(rank["stages"].get(stage, {}).get(name, 0) for stage in stages)


def each(stage: str, name: str) -> Callable[[Rank], float]:
    """Of one update or sync."""
    return lambda rank: rank["stages"][stage].get(name, 0) / len(rank["seconds"][stage])


def holds(name: str) -> Callable[[Rank], float]:
    return lambda rank: rank["held"][name]


def beat(rank: Rank) -> float:
    """Requests of a heartbeat; the first and the last one only write."""
    requests, beats = (summed(list(rank["stages"]), f"store {name}")(rank) for name in ("requests", "multi_get"))
    return (requests - 2) / max(1.0, beats)


def median(stage: str) -> Callable[[Rank], float]:
    """Seconds."""
    return lambda rank: statistics.median(rank["seconds"][stage])


# name, life (from 0), and the figure of a rank
COUNTED: tuple[tuple[str, int, Callable[[Rank], float]], ...] = (
    *((name, 0, holds(name)) for name in ("descriptors", "sockets", "maps", "threads", "PSS MiB", "private MiB")),
    *(
        (f"start: {name}", 0, summed(OPENING, name))
        for name in (
            *("opened: dataset", "opened: run", "opened: program", "opened: other", "processes started"),
            *("collectives", "collective bytes", "bytes written"),
        )
    ),
    ("heartbeat: store requests", 0, beat),
    *((f"update: {name}", 0, each("update", name)) for name in SYNC),
    *((f"sync: {name}", 0, each("sync", name)) for name in SYNC),
    *(
        (f"save: {name}", 0, summed(["save"], name))
        for name in ("opened: run", "names: run", "collectives", "bytes written")
    ),
    *(
        (f"restart: {name}", 1, summed(["verify", "restore"], name))
        for name in ("opened: run", "names: run", "collectives", "collective bytes", "bytes read")
    ),
)
# of the slowest rank on the clock, of the mean rank on a core
TIMED: tuple[tuple[str, int, Sequence[str]], ...] = (
    *((name, 0, [name]) for name in ("meet", "open", "first update", "update", "sync", "save")),
    ("restart", 1, ["verify", "restore"]),
)


def fitted(ranks: Sequence[int], values: Sequence[float]) -> tuple[str, float]:
    """The fit of the values that leaves least, as text, and what it gives for TARGET ranks."""
    mean = statistics.fmean(values)
    if len(ranks) < 3 or max(abs(value - mean) for value in values) <= 0.02 * abs(mean):
        return "constant", mean
    fits, ranks = [], np.array(ranks, float)
    for name, shape in (("N", np.asarray), ("log2 N", np.log2), ("/ N", np.reciprocal)):
        basis = np.stack([np.ones(len(ranks)), shape(ranks)], 1)
        (a, b), *_ = np.linalg.lstsq(basis, np.array(values))
        left = float(np.square(basis @ [a, b] - values).sum())
        fits.append((left, f"{a:.4g} + {b:.4g} {name}", float(a + b * shape(TARGET))))
    return min(fits)[1:]


def table(rehearsed: Mapping[int, tuple[list[list[Rank]], dict[str, float]]]) -> list[dict[str, Any]]:
    """A row for each quantity: its value for each number of ranks, and the fit."""
    rows: dict[str, list[float]] = defaultdict(list)
    for lives, found in rehearsed.values():
        for name, life, of in COUNTED:
            first, *others = map(of, lives[life])
            rows[f"{name} (rank 0)"].append(first)
            rows[f"{name} (most of the others)"].append(max(others, default=first))
        for name, life, stages in TIMED:
            times = 1 if len(stages) > 1 else len(lives[life][0]["seconds"][name])
            wall = summed(stages, "seconds") if times == 1 else median(name)
            cpu = [summed(stages, "cpu seconds")(rank) / times for rank in lives[life]]
            rows[f"seconds: {name}, slowest rank"].append(max(map(wall, lives[life])))
            rows[f"CPU seconds: {name}, mean rank"].append(statistics.fmean(cpu))
        for name, value in found.items():
            rows[name].append(value)
    return [
        {"quantity": name, "values": dict(zip(rehearsed, values, strict=True)), "fit": fit, f"at {TARGET}": at}
        for name, values in rows.items()
        for fit, at in [fitted(list(rehearsed), values)]
    ]


def build_data(folder: Path) -> Path:
    """A dataset of Python's documentation."""
    build = ("--input", "pydoc", "--output", folder, "--seq-len", 64, "--vocab-size", 2000, "--held-out", 0)
    command = [sys.executable, "-m", "data_prep", "build", *map(str, build), "--nsp", "--quiet"]
    subprocess.run(command, cwd=hardware.ROOT, check=True, stdout=subprocess.DEVNULL)
    return folder


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--per-node", type=int, default=8, help="ranks that are taken for those of a node")
    parser.add_argument("--updates", type=int, default=12, help="of each life, ten at least")
    parser.add_argument(
        "--data", type=Path, help="dataset of rows of 64 tokens, without held-out rows; default: built now"
    )
    hardware.add_json(parser)
    args = parser.parse_args(argv)
    hardware.refuse_dirty(parser, args)
    rehearsed = {}
    try:
        with tempfile.TemporaryDirectory(prefix="bench_ranks_") as scratch:
            data = args.data or build_data(Path(scratch, "data"))
            for ranks in args.ranks:
                rehearsed[ranks] = rehearse(
                    data.resolve(), ranks, args.per_node, args.updates, Path(scratch, str(ranks))
                )
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rows = table(rehearsed)
    for row in rows:
        print(f"{row['quantity']:58} " + " ".join(f"{v:>12.6g}" for v in row["values"].values()), end="")
        print(f"  {row['fit']:28} {row[f'at {TARGET}']:>12.6g}")
    if args.json:
        setting = {"per_node": args.per_node, "updates": args.updates}
        hardware.write_json(args.json, {"benchmark": "ranks", "setting": setting, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
