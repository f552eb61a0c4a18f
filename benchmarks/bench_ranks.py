"""Rehearsal of many ranks on one machine: what a rank holds, opens, sends and waits for, and how that grows with their number.

    python benchmarks/bench_ranks.py [--ranks 8 32 128] [--json FILE]

Each rank is a process of `megabert train` over gloo with the real loader, agreement of ranks, watchdog, run lock and checkpoints;
only the engine does no arithmetic (`RehearsedEngine`). A number of ranks N starts, restarts, and restarts as N / 2; in another run
the last rank stops, as after SIGSTOP, and must be named. Of `--per-node` ranks, which are taken for a node's, the first reads the
dataset's manifest. The rows that all ranks were given must be those of the dataset's order, each once, and the weights must remain
what update 0 made of them.

Counts are of the program and the same on any machine. Seconds are of N processes that share its cores: for ranks with cores of
their own, CPU seconds (of all threads of a rank) say more than those of the clock. A quantity is called constant where no value
is more than 2% from the mean; otherwise a + b f(N) with f = N, N^2, N^3, log2 N or 1 / N is fitted by least squares, and the f that
leaves the smallest sum of squares is shown with its value at 1,024. Three points show the shape of a curve, no more.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone need not be installed
if __name__ == "__main__":
    # before numpy and torch are loaded: only a process without threads may be forked, and ranks share the cores
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import numpy as np
import torch._dynamo  # noqa: F401  by the first optimizer of a process: here once for all ranks

from benchmarks.common import hardware
from benchmarks.rehearsal.rank import Counts, RehearsedEngine, descriptors, held
from megabert import open_run, train
from megabert.checkpoint import Checkpoints
from megabert.common.errors import FAILED
from megabert.data.shards import Dataset
from megabert.distributed.session import Session
from megabert.trainer import Trainer

TARGET = 1024  # ranks for which the fits are evaluated
ROWS = 4  # rows of an update on each of N ranks
SYNCS = 10  # reports of an update that are timed one by one after the last update
LIMIT_SECONDS = 900.0  # a command that takes longer hangs
SEED = 42
SETTINGS = (
    *("ops.attention=sdpa", "ops.mlm_loss=torch", "ops.layer=torch", "precision=fp32", "zero.stage=1"),
    *("batch.micro_size=2", "data.workers=0", "data.seq_len=0", "peak_tflops=1.0", "log.tensorboard=false"),
    *("schedule.warmup_steps=1", f"seed={SEED}"),
)

# -- ranks -----------------------------------------------------------------------------------------------------------

Rank = dict[str, Any]
Rehearsed = tuple[list[list[Rank]], dict[str, float]]  # ranks by command; figures of the run


@dataclass(frozen=True)
class Command:
    """`megabert train` on so many ranks; `folder` gets their output and figures."""

    ranks: int
    per_node: int
    argv: list[str]
    folder: Path
    places: Mapping[str, str]
    stopped: int = -1  # the rank that stops in its fourth update; -1: none


def run_rank(command: Command, rank: int, place: Mapping[str, str], gate: tuple[int, int]) -> None:
    """The process of one rank. It leaves its figures in the command's folder."""
    inherited = descriptors()
    for target, name in ((1, "output"), (2, "errors")):
        os.dup2(os.open(command.folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), target)
    os.environ.update({**place, "LOCAL_RANK": str(rank % command.per_node)})
    counts, holding, engines = Counts(command.places), dict[str, float](), list[RehearsedEngine]()
    counts.around(Session, "join", "meet")
    counts.around(Session, "watch", "watch")
    for name, stage in (("open_data", "open"), ("open_run_folder", "verify"), ("resume", "restore")):
        counts.around(open_run, name, stage)
    counts.around(Checkpoints, "save_and_wait", "save")
    take, training = Trainer.train_update, Trainer.train

    def engine(*args: Any) -> RehearsedEngine:
        engines.append(RehearsedEngine(*args))
        return engines[0]

    def train_update(trainer: Trainer) -> Any:
        counts.enter("update" if engines[0].rows else "first update")
        if rank == command.stopped and len(counts.seconds["update"]) == 2:
            (command.folder / "stopped").touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        return take(trainer)

    def train_and_measure(trainer: Trainer) -> bool:
        over, update = training(trainer), next(trainer.updates)
        for _ in range(SYNCS):
            counts.enter("sync")
            trainer.send_report(update, seconds=0.0)
            trainer.receive_reports()
        counts.enter("end")
        trainer.world.barrier()
        holding.update(held(inherited))
        trainer.world.barrier()  # all ranks are there while one looks
        return over

    open_run.Engine = engine  # type: ignore[assignment, misc]
    Trainer.train_update, Trainer.train = train_update, train_and_measure  # type: ignore[method-assign, assignment]
    os.close(gate[1])
    os.read(gate[0], 1)  # returns once all ranks are forked
    counts.enter("between")
    code = train.main(command.argv)
    counts.enter("end")
    if code == 0:
        found = {"stages": counts.stages, "seconds": counts.seconds, "held": holding, "rows": engines[0].rows}
        (command.folder / f"{rank:05d}.json").write_text(json.dumps(found))
    sys.exit(code)


def run(command: Command) -> tuple[list[int | None], str]:
    """Exit codes of the ranks, and what they printed."""
    command.folder.mkdir(parents=True)
    context, gate = multiprocessing.get_context("fork"), os.pipe()
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads must not be forked"
    gc.collect()
    gc.freeze()  # no collection writes to the pages that ranks share
    places = enumerate(hardware.rank_places(command.ranks))
    ranks = [context.Process(target=run_rank, args=(command, rank, place, gate)) for rank, place in places]
    try:
        for rank in ranks:
            rank.start()
        for end in gate:
            os.close(end)
        deadline = time.monotonic() + LIMIT_SECONDS
        for rank in ranks:
            rank.join(max(0.0, deadline - time.monotonic()))
    finally:
        for rank in ranks:
            if rank.pid:
                rank.kill()
                rank.join()
    output = "".join((command.folder / name).read_text() for name in ("output", "errors"))
    return [rank.exitcode for rank in ranks], output


def finish(command: Command) -> list[Rank]:
    """The figures of each rank. Raises ValueError with the end of the ranks' output where one failed."""
    codes, output = run(command)
    if any(codes):
        raise ValueError(f"exit codes of {command.ranks} ranks: {dict(Counter(codes))}\n{output[-3000:]}")
    return [json.loads((command.folder / f"{rank:05d}.json").read_text()) for rank in range(command.ranks)]


def stop_one(command: Command) -> tuple[float, str]:
    """Seconds from the moment at which a rank stops until all have ended (0: it did not), and what should not have been: another rank
    or none is named, or ranks end with other codes."""
    codes, output = run(command)
    moment = command.folder / "stopped"
    seconds = time.time() - moment.stat().st_mtime if moment.exists() else 0.0
    if re.search(rf"error: rank {command.stopped} .* is stopped or lost", output) and set(codes) == {FAILED, -9}:
        return seconds, ""
    return seconds, f"rank {command.stopped} stopped; exit codes {dict(Counter(codes))}\n{output[-3000:]}"


def rehearse(data: Path, ranks: int, args: argparse.Namespace, scratch: Path) -> tuple[Rehearsed, str]:
    """The figures of each rank in three commands of a run, those of the run, and `stop_one`'s complaint. Raises ValueError where a
    command failed, and where ranks were given other rows than the dataset's order has."""
    folder, commands, rows = scratch / "run", [], Counter[tuple[int, int]]()
    places = {"run": str(folder), "dataset": str(data), "program": str(hardware.ROOT)}
    argv = ["--config", "tiny", "--data", str(data), *SETTINGS, f"batch.global_size={ROWS * ranks}"]
    argv += [f"schedule.total_steps={3 * args.updates}", f"log.interval={args.updates}"]
    argv += [f"checkpoint.keep_every={args.updates}"]
    for number, size in enumerate((ranks, ranks, max(1, ranks // 2)), 1):
        # the first command saves at its end, where it is measured; the others while they train, too
        own = [f"checkpoint.interval={0 if number == 1 else 3}", f"--run={folder}"]
        own += [f"--stop-after={number * args.updates}"]
        commands.append(finish(Command(size, args.per_node, argv + own, scratch / str(number), places)))
        rows.update((epoch, row) for rank in commands[-1] for epoch, row in rank["rows"])
        print(f"{ranks} ranks: start {number}, on {size}, has trained and saved", flush=True)
    ids, epochs = Dataset(data).order(SEED, np.arange(3 * args.updates * ROWS * ranks))
    if rows != Counter(zip(epochs.tolist(), ids.tolist(), strict=True)):
        raise ValueError(f"{ranks} ranks were given {rows.total()} rows that are not those of the order, each once")
    newest = folder / "checkpoints" / f"step-{2 * args.updates:08d}"
    found: dict[str, float] = {"run: rows, each given once": rows.total()}
    found["run: files of a checkpoint"] = len(os.listdir(newest))
    found["run: bytes of a manifest"] = (newest / "manifest.json").stat().st_size
    found["run: bytes of a log line"] = len((folder / "metrics.jsonl").read_bytes().splitlines()[0])
    failure = ""
    if ranks > 1 and args.timeout:
        own = [f"--run={scratch / 'stopped'}", f"watchdog.timeout_seconds={args.timeout}"]
        ended, failure = stop_one(Command(ranks, args.per_node, argv + own, scratch / "4", places, ranks - 1))
        found[f"run: seconds until all have ended behind a rank that stops (time-out: {args.timeout:g})"] = ended
    return (commands, found), failure


# -- figures ---------------------------------------------------------------------------------------------------------

REPEATED = ("update", "sync")
SENT = ("collectives", "collective bytes", "system calls", "bytes written")
FILES = ("opened: run", "names: run", "collectives")
OPENED = ("opened: dataset", "opened: run", "opened: program", "opened: other", "processes started")
# what is looked at: its name, the command (from 0), its stages, and counts
LOOKS: tuple[tuple[str, int, Sequence[str], Sequence[str]], ...] = (
    ("meet", 0, ("meet",), ("bytes written",)), ("open the data", 0, ("open",), ("opened: dataset", "collectives")),
    ("start", 0, ("meet", "watch", "open", "verify", "restore", "between"), (*OPENED, *SENT[:2])),
    ("first update", 0, ("first update",), ("opened: dataset",)),
    ("update", 0, ("update",), SENT), ("sync", 0, ("sync",), SENT), ("save", 0, ("save",), (*FILES, "bytes written")),
    ("restart", 1, ("verify", "restore"), (*FILES, "opened: safetensors", "collective bytes", "bytes read")),
    ("restart on N / 2", 2, ("verify", "restore"), ("opened: run", "collective bytes", "bytes read")),
)  # fmt: skip
HELD = ("descriptors", "sockets", "maps", "threads", "PSS MiB", "private MiB")


def total(rank: Rank, stages: Sequence[str], name: str) -> float:
    """The sum over stages; of updates and syncs the mean of one."""
    times = len(rank["seconds"][stages[0]]) if stages[0] in REPEATED else 1
    return sum(rank["stages"].get(stage, {}).get(name, 0) for stage in stages) / times


def seconds(rank: Rank, stages: Sequence[str]) -> float:
    """By the clock; of updates and syncs the median of one."""
    return statistics.median(rank["seconds"][stages[0]]) if stages[0] in REPEATED else total(rank, stages, "seconds")


def requests(rank: Rank) -> float:
    """To the store in a heartbeat; the first and the last heartbeat only write."""
    every, beats = (total(rank, list(rank["stages"]), f"store {name}") for name in ("requests", "multi_get"))
    return (every - 2) / max(1.0, beats)


def fitted(ranks: Sequence[int], values: Sequence[float]) -> tuple[str, float]:
    """The fit of `values` that leaves least, and its value for TARGET ranks; the mean where there are fewer than three."""
    mean = statistics.fmean(values)
    if len(ranks) < 3 or max(abs(value - mean) for value in values) <= 0.02 * abs(mean):
        return "constant", mean
    shapes: dict[str, Callable[[Any], Any]] = {"N": np.asarray, "N^2": np.square, "N^3": lambda n: n**3}
    shapes |= {"log2 N": np.log2, "/ N": np.reciprocal}
    fits, counts = [], np.array(ranks, float)
    for name, shape in shapes.items():
        (b, a), (left,), *_ = np.polyfit(shape(counts), values, 1, full=True)
        fits.append((float(left), f"{a:.4g} {b:+.4g} {name}", float(a + b * shape(float(TARGET)))))
    return min(fits)[1:]


def table(rehearsed: Mapping[int, Rehearsed]) -> list[dict[str, Any]]:
    """A row for each quantity: its value for each number of ranks, and the fit. Where rank 0 differs from the others it has a row of
    its own, and of those the greatest value counts."""
    figures: dict[str, list[Sequence[float]]] = defaultdict(list)
    for commands, found in rehearsed.values():
        for name in HELD:
            figures[f"held: {name}"].append([rank["held"][name] for rank in commands[0]])
        figures["heartbeat: store requests"].append([requests(rank) for rank in commands[0]])
        for look, number, stages, names in LOOKS:
            figures[f"{look}: seconds, slowest rank"].append([max(seconds(rank, stages) for rank in commands[number])])
            for name in ("cpu seconds", *names):
                figures[f"{look}: {name}"].append([total(rank, stages, name) for rank in commands[number]])
        for name, value in found.items():
            figures[name].append([value])
    rows: dict[str, list[float]] = {}
    for name, values in figures.items():
        first, others = [of[0] for of in values], [max(of[1:], default=of[0]) for of in values]
        rows |= {name: first} if first == others else {f"{name}, rank 0": first, f"{name}, another rank": others}
    return [
        {"quantity": name, "values": dict(zip(rehearsed, values, strict=True)), "fit": fit, f"at {TARGET}": at}
        for name, values in rows.items() for fit, at in [fitted(list(rehearsed), values)]
    ]  # fmt: skip


def build_data(folder: Path) -> Path:
    """A dataset of the topics of Python's language reference."""
    from pydoc_data.topics import topics

    text = folder / "topics.jsonl"
    text.write_text("".join(json.dumps({"text": topics[name]}) + "\n" for name in sorted(topics)))
    options = ("--input", text, "--seq-len", 64, "--vocab-size", 2000, "--held-out", 0, "--nsp")
    return hardware.build_data(folder / "data", *options)


def main() -> int:
    parser = hardware.Parser(__doc__)
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[8, 32, 128], metavar="N")
    add("--per-node", type=int, default=8, metavar="N", help="ranks that are taken for those of a node")
    add("--updates", type=int, default=6, help="of each command, four at least")
    add("--timeout", type=float, default=10, help="the watchdog's, where a rank stops; 0: none stops")
    add("--data", type=Path, help="dataset with pairs and without held-out rows; default: built now")
    args = parser.parse()
    if args.updates < 4:
        parser.error(f"--updates {args.updates}: four at least, in which a rank stops")
    rehearsed, failures = dict[int, Rehearsed](), dict[int, str]()
    with tempfile.TemporaryDirectory(prefix="bench_ranks_") as scratch:
        data = (args.data or build_data(Path(scratch))).resolve()
        for ranks in args.ranks:
            try:
                rehearsed[ranks], failure = rehearse(data, ranks, args, Path(scratch, f"{ranks}-ranks"))
            except ValueError as error:
                failure = str(error)
            if failure:
                failures[ranks] = failure
                print(f"error: {ranks} ranks: {failure}", file=sys.stderr)
    rows = table(rehearsed)
    for row in rows:
        values = "".join(f"{value:>12.6g}" for value in row["values"].values())
        print(f"{row['quantity']:60}{values}   {row['fit']:26}{row[f'at {TARGET}']:>12.6g}")
    setting = {name: getattr(args, name) for name in ("ranks", "per_node", "updates", "timeout")}
    hardware.write_json(args.json, {"benchmark": "ranks", "setting": setting, "failures": failures, "rows": rows})
    return 1 if failures else 0


if __name__ == "__main__":
    hardware.run(main)
