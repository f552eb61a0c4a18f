"""Recompute an interval of a run, and compare it with the logs and digests of the run.

    megabert replay RUN --from A --to B       from the checkpoint of step A (0: from the run's start) through update B
    mpirun -n 2 megabert replay RUN …         the same for a run of two ranks

Training is repeated with the run's configuration in a temporary folder (in TMPDIR, which several nodes must share). Metrics of the
log lines and digests of the weights must be equal bit for bit. If machine, threads, ranks, versions, backends or code differ from
those of the run, values need only be equal to rounding, with limits that are printed. Exit code 0: they are equal.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megabert.common import chain
from megabert.common.arguments import Parser
from megabert.common.errors import FAILED, INTERRUPTED, OK, command
from megabert.common.run_files import (
    CONFIG,
    METRICS,
    as_json,
    checkpoint_name,
    checkpoints_folder,
    json_lines,
    saved_steps,
)

if TYPE_CHECKING:
    from megabert.config import Config
    from megabert.distributed.session import Session

# prefixes of metrics that depend on the clock
TIMES = ("perf/", "time/")
# metrics of a section that are not means over the updates since the last log line
OF_THE_UPDATE = ("train/lr", "train/skipped", "train/spikes", "train/phase")
# name of the weights of a chain entry
WEIGHTS = "weights"
# relative limits of metrics, by the end of their names, and of weights, relative to their change in the interval
ROUNDING = {"loss": 0.01, "grad_norm": 0.25, "lr": 1e-9, WEIGHTS: 0.1}


class Interval(NamedTuple):
    """Updates `begin` + 1 to `end` of a run, their entries in its chain, and their configuration."""

    run: Path
    begin: int
    end: int
    entries: list[dict[str, Any]]
    config: Config


def interval(run: Path, begin: int | None, end: int | None, data: str) -> Interval:
    """The updates to repeat: by default up to the newest checkpoint, from the one before it. Raises ValueError if there is no
    checkpoint of `begin`, or the configuration changed in between."""
    folder = checkpoints_folder(run)
    entries = chain.read(folder)
    newest = entries[-1]["step"]
    if not newest:
        raise ValueError(
            f"{run}: has no updates to repeat; it was converted, averaged or saved from Python, not trained"
        )
    end = newest if end is None else end
    kept = saved_steps(run)
    begin = max((step for step in kept if step < end), default=0) if begin is None else begin
    if begin not in (0, *kept):
        raise ValueError(f"--from {begin}: {run} has checkpoints of steps {', '.join(map(str, kept))}; 0 is its start")
    if not begin < end <= newest:
        raise ValueError(f"--to {end}: must be above {begin} and at most {newest}, the step of the newest checkpoint")
    before = [0, *(entry["step"] for entry in entries)]
    inside = [entry for last, entry in zip(before, entries, strict=False) if last < end and entry["step"] > begin]
    for entry, following in itertools.pairwise(inside):
        if entry["config_sha256"] != following["config_sha256"]:
            changed = f"the configuration changed at step {entry['step']}; replay up to it, or from it on"
            raise ValueError(f"--from {begin} --to {end}: {changed}")
    config = read_config(run, inside[0]["config_sha256"], data)
    if config.schedule.unit == "minutes" and begin not in kept:
        needs = f"its rates follow the clock, so a replay needs a checkpoint before step {end}"
        raise ValueError(f"{run}: {needs}; kept: {', '.join(map(str, kept))}")
    return Interval(run, begin, end, inside, config)


def read_config(run: Path, sha256: str, data: str) -> Config:
    """The configuration with this digest, with `metrics.jsonl` as the only sink and without a mirror, which is the
    run's. Raises ValueError where it is not kept."""
    from megabert.config import from_dict

    for path in (run / CONFIG, *run.glob("checkpoints/step-*/manifest.json")):
        try:
            content = json.loads(path.read_bytes())
            tree = content.get("state", content)["config"]
            if from_dict(tree).digest() == sha256:
                break
        except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
            continue  # damaged: another file may have it
    else:
        raise ValueError(f"{run}: the configuration of these updates is in no checkpoint that is kept")
    tree["log"] |= {"tensorboard": False, "wandb": "", "to": []}
    tree["checkpoint"]["mirror"] = ""
    tree["data"]["path"] = data or tree["data"]["path"]
    return from_dict(tree)


def train_again(of: Interval, folder: Path, ranks: Session, deepspeed_config: str = "") -> int:
    """Repeat the updates in the `folder` of rank 0; returns the exit code."""
    import torch

    from megabert.agreement import UNREAD
    from megabert.config import read_deepspeed, replace
    from megabert.distributed.ranks import RankError, on_main
    from megabert.distributed.signals import UNSAVED
    from megabert.metrics import update_metrics
    from megabert.objectives import extras
    from megabert.open_run import open_run

    stop = ranks.join(notice=UNSAVED)
    # as many as in the run, since sums are divided among them
    torch.set_num_threads(of.entries[-1]["threads"])
    folder = Path(ranks.world.broadcast(str(folder)))
    on_main(ranks.world, lambda: copy_start(of, folder))
    config = replace(of.config, "log.seconds", 0.0)
    watchdog = ranks.watch(folder, config.watchdog.timeout_seconds)
    # `extend`: the run may have been finished at `begin` and extended from there
    trainer = open_run(
        folder,
        config,
        ranks.world,
        stop,
        watchdog,
        stop_after=of.end,
        extend=True,
        deepspeed_extra=read_deepspeed(deepspeed_config),
        extras=extras(),
    )
    ranks.errors_may_differ = True
    try:
        for _ in trainer:
            if trainer.stopping == UNREAD:
                raise RankError("Broken pipe: stdout or stderr is closed", FAILED)
            if trainer.stopping:
                return INTERRUPTED
        if not trainer.finished:
            return INTERRUPTED
        done = trainer.newest
        assert done is not None and done.step == of.end
        if ranks.world.is_main:
            place = {"step": done.step, "cursor": done.cursor, "epoch": done.epoch, "skipped": done.result.skipped}
            print(as_json(place | update_metrics(done.result, trainer.engine.terms)))
        return OK
    finally:
        trainer.close()


def copy_start(of: Interval, folder: Path) -> None:
    """Copy the files that the updates start from: the checkpoint, learning rates by the clock."""
    from megabert.optim import rate_record

    start = Path("checkpoints", checkpoint_name(of.begin))
    if (of.run / start).exists():
        shutil.copytree(of.run / start, folder / start)
    if (of.run / rate_record.FILE).exists():
        shutil.copy(of.run / rate_record.FILE, folder)


def recorded(run: Path, of: Interval) -> dict[tuple[int, str], Any]:
    """The run's records of the updates, by step and name: metrics of log lines, and digests of weights. Means since the last log
    line are left out if that depended on the clock."""
    by_clock = of.config.log.seconds > 0
    lines = list(json_lines(run / METRICS))
    lines += [{"step": entry["step"], WEIGHTS: entry[WEIGHTS]} for entry in chain.read(run / "checkpoints")]
    inside = [(line.pop("step"), line) for line in lines if of.begin < line["step"] <= of.end]
    return {
        (step, name): value
        for step, line in inside
        for name, value in line.items()
        if not name.startswith(TIMES) and not (by_clock and name.startswith("train/") and name not in OF_THE_UPDATE)
    }


def compare(of: Interval, folder: Path) -> str:
    """In which sense the run and its repetition in `folder` are equal. Raises ValueError naming the first value that differs, or if
    the run has no record of the updates."""
    theirs, ours = recorded(of.run, of), recorded(folder, of)
    both = sorted(theirs.keys() & ours.keys())
    if not both:
        raise ValueError(f"{of.run}: has neither a log line nor a checkpoint of steps {of.begin + 1} to {of.end}")
    what = f"{len(both)} metrics and digests of weights of steps {both[0][0]} to {both[-1][0]} are equal"
    unequal = [(*key, theirs[key], ours[key]) for key in both if theirs[key] != ours[key]]
    if not unequal:
        return f"{what} bit for bit"
    reasons = differences_of_place(of, folder)
    how = "bit for bit, since machine and code are the same"
    if reasons:
        how = f"to rounding, since these differ from the run: {reasons}"
    saved = [step for step, name in both if name == WEIGHTS]
    distances = (distance_of_weights(of, folder, step) for step in reversed(saved))
    distance = next((value for value in distances if value is not None), None)
    weights_near = distance is None or distance <= ROUNDING[WEIGHTS]
    for step, name, was, now in unequal:
        if not reasons or not (weights_near if name == WEIGHTS else near(name, was, now)):
            raise ValueError(f"{of.run}: {name} of step {step} was {was} and is {now}, compared {how}")
    allowed = ", ".join(f"{name} {share:g}" for name, share in ROUNDING.items())
    if distance is not None:
        return f"{what} {how} ({allowed}); weights differ by {distance:.2g} of how far they moved"
    metrics, not_kept = len(both) - len(saved), "the weights were not compared, as their checkpoints are not kept"
    if not metrics:
        raise ValueError(f"{of.run}: {not_kept}, and there is no log line of steps {of.begin + 1} to {of.end}")
    return f"{metrics} metrics of steps {both[0][0]} to {both[-1][0]} are equal {how} ({allowed}); {not_kept}"


def near(name: str, was: Any, now: Any) -> bool:
    """Whether a value is equal to rounding; True for values that are neither of the data nor in ROUNDING."""
    shares = [share for end, share in ROUNDING.items() if name.endswith(end)]
    # False for NaN
    close = all(abs(float(was) - float(now)) <= share * abs(float(was)) for share in shares)
    return close and not name.startswith("data/")


def differences_of_place(of: Interval, folder: Path) -> str:
    """Differences between the repetition and the run besides data and configuration; "" without any."""
    import torch

    *_, replayed = chain.read(folder / "checkpoints")
    unlike = [name for name in chain.MACHINE if any(entry[name] != replayed[name] for entry in of.entries)]
    if torch.cuda.is_available() and not of.config.deterministic:
        unlike.append("deterministic=false on CUDA")
    return ", ".join(unlike)


def distance_of_weights(of: Interval, folder: Path, step: int) -> float | None:
    """|repeated - saved| / |saved - start| of all weights at a step; None if the run has no checkpoint there or at the start."""
    from megabert.checkpoint import load_weights

    of_runs = (folder, step), (of.run, step), (of.run, of.begin)
    places = [run / "checkpoints" / checkpoint_name(at) for run, at in of_runs]
    if not all(place.exists() for place in places):
        return None
    now, was, before = (load_weights(place)[0] for place in places)
    differ, moved = (sum(float((w - other[name]).square().sum()) for name, w in was.items()) for other in (now, before))
    if not moved:
        return math.inf if differ else 0.0
    return math.sqrt(differ / moved)


@command
def main(argv: list[str] | None = None) -> int:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("run", metavar="RUN", help="run folder, which is not modified")
    add("--from", type=int, metavar="A", dest="begin", help="step of a checkpoint, or 0; default: the newest before B")
    add("--to", type=int, metavar="B", dest="end", help="last step; default: that of the newest checkpoint")
    add("--data", default="", metavar="DIR", help="its dataset, if it was moved")
    add("--deepspeed_config", default="", metavar="FILE", help="JSON with additional DeepSpeed keys, as of the run")
    args = parser.parse_args(argv)
    of = interval(Path(args.run), args.begin, args.end, args.data)
    from megabert.checkpoint import run_lock
    from megabert.distributed import ranks, session

    with tempfile.TemporaryDirectory(prefix="megabert-replay-", ignore_cleanup_errors=True) as folder:
        again = partial(train_again, of, Path(folder), deepspeed_config=args.deepspeed_config)
        code = session.run(again, run_lock.release)
        if code == OK and ranks.discover().is_main:
            print(compare(of, Path(folder)))
    return code
