"""Pre-train BERT: batch, step, meter, log, evaluate, agree to stop, save.

    deepspeed megabert/train.py --config large_phase1 --data DIR --run DIR [section.key=value …]
    megabert train …                      the same; also under srun and mpirun, which start one process per rank
    deepspeed --module megabert.train …, torchrun -m -- megabert.train …        of an installed package

Exit codes:
    0   the run is finished, or reached --stop-after
    2   a mistake in the command, configuration or data, reported in one line
    3   training failed: too many updates could not be applied, or too many loss spikes
    4   a rank died, stopped or hangs: it is named, and all other ranks have exited; or I/O failed; or stdout or stderr
        was closed, and everything is saved
    85  stopped by Ctrl-C, TERM, HUP, USR1, USR2 or a time limit, with everything saved: run the same command again
    128 + n   a second signal n ended the process at once
"""

from __future__ import annotations

import os
import sys

if __package__ in (None, ""):  # run as a script: put the package's parent, not the package, on the path
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if __name__ == "__main__":
    from megabert.__main__ import start

    sys.exit(start("train"))  # before the slow imports

import argparse
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING

from megabert.common import errors
from megabert.common.arguments import Parser, add_config_options, called_as, parse_steps
from megabert.common.environment import launched
from megabert.common.errors import OK
from megabert.common.logs import log
from megabert.common.run_files import BEST

if TYPE_CHECKING:
    from megabert.config import Config
    from megabert.distributed.session import Session
    from megabert.trainer import Trainer


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog=called_as("megabert.train"), description=__doc__)
    add_config_options(parser)
    add = parser.add_argument
    add(
        "--run",
        default="",
        metavar="DIR",
        help="run folder: checkpoints, metrics.jsonl, …; resumed if it has a checkpoint",
    )
    add("--stop-after", type=int, metavar="STEP", help="save and exit 0 at this step; does not change the schedule")
    add(
        "--max-time",
        default="",
        metavar="TIME",
        help="save and exit 85 within this time: 90 (minutes), 45s, 2h, 1:30:00, 1-12:00:00; SLURM's time limit also applies",
    )
    add(
        "--in-place",
        action="store_true",
        help="if a rank dies, restart all ranks within this job, from copies in memory of the newest update",
    )
    add("--extend", action="store_true", help="continue a finished run by the schedule given")
    add(
        "--print-config",
        action="store_true",
        help="print the configuration as TOML with the source of each value, and exit",
    )
    add("--explain", default="", metavar="NAME", help="describe a section or key, e.g. schedule, and exit")
    add("--profile", default="", metavar="START:STOP", help="profile these updates; trace and table go to RUN/profile")
    add("--profile-rank", type=int, default=0, metavar="RANK", help="the rank that --profile profiles")
    add("--debug", action="store_true", help="deterministic algorithms, anomaly detection, debug messages; slow")
    return parser.parse_intermixed_args(argv)


def main(argv: list[str] | None = None) -> int:
    started, args = time.time(), parse(argv)
    # Check the arguments before the slow imports; with several ranks `run_training` does it, so that only one rank prints an error.
    if args.print_config or args.explain or not launched():
        code = print_or_check(args)
        if code != OK or args.print_config or args.explain:
            return code
    from megabert.inplace import keeper, kept_rank

    if args.in_place:
        if not kept_rank.follow():
            return errors.command(keeper.keep)(Path(args.run))
        load_all()
        kept_rank.wait_for_environment()
    from megabert.checkpoint import run_lock
    from megabert.distributed import session

    return session.run(lambda joined: run_training(args, joined, started), run_lock.release)


def load_all() -> None:
    """Import everything that a rank needs, including modules that are otherwise imported on first use."""
    import torch._dynamo  # noqa: F401  by the first optimizer

    from megabert import open_run  # noqa: F401
    from megabert.distributed import ranks
    from megabert.engine import import_deepspeed

    import_deepspeed(ranks.discover({}))


@errors.command
def print_or_check(args: argparse.Namespace) -> int:
    """Handle --explain and --print-config; otherwise check the arguments. Does not import torch."""
    from megabert import config as configuration
    from megabert.config import reference

    config = configuration.from_arguments(args)
    sources = configuration.value_sources(args.config, configuration.collect_overrides(args))
    if args.explain:
        print(reference.explain(args.explain, config, sources))
    elif args.print_config:
        print(reference.as_toml(config, sources))
    else:
        check(args, config, ranks=1)
    return OK


def run_training(args: argparse.Namespace, session: Session, started: float) -> int:
    """Open the run and train; returns the exit code. Raises the errors of `open_trainer`, and BadTraining."""
    from megabert.distributed.signals import REQUEUE

    trainer = open_trainer(args, session, started)
    session.errors_may_differ = True
    try:
        if not trainer.train():
            return REQUEUE
        trainer.sinks.hparams(trainer.last_eval)
        log.info(ending(trainer, args))
        return OK
    finally:
        trainer.close()


def open_trainer(args: argparse.Namespace, session: Session, started: float) -> Trainer:
    """Check the arguments, start the process group, and open the run. Raises ValueError, Failed and RankError."""
    from megabert import config as configuration
    from megabert.common.environment import disable_malloc_trimming
    from megabert.config import flat
    from megabert.distributed.ranks import check_same, on_main
    from megabert.distributed.signals import find_deadline
    from megabert.objectives import extras
    from megabert.open_run import open_run
    from megabert.sinks import check_packages

    config = configuration.from_arguments(args)
    profile = check(args, config, session.world.size)
    deadline = find_deadline(args.max_time, os.environ, started)
    disable_malloc_trimming()
    if args.debug:
        from megabert.engine.precision import make_debuggable

        make_debuggable()
        log.setLevel("DEBUG")
    stop = session.join(deadline)
    watchdog = session.watch(Path(args.run), config.watchdog.timeout_seconds)
    ends = {"--stop-after": args.stop_after, "--extend": args.extend}
    check_same(session.world, flat(config.model_dump()) | ends)
    on_main(session.world, lambda: check_packages(config))
    return open_run(
        Path(args.run),
        config,
        session.world,
        stop,
        watchdog,
        stop_after=args.stop_after,
        extend=args.extend,
        deepspeed_extra=configuration.read_deepspeed(args.deepspeed_config),
        profile=profile if session.world.rank == args.profile_rank else (0, 0),
        extras=extras(),
    )


def ending(trainer: Trainer, args: argparse.Namespace) -> str:
    """The last message of a run: its held-out loss, where it is saved, and commands that use it."""
    step, folder = trainer.state.step, str(Path(args.run))  # without a slash at its end
    run, saved = shlex.quote(folder), f"saved at step {step:,} in {folder}"
    if not trainer.schedule.limit:
        return f"--stop-after reached: {saved}; the same command without it resumes"
    metrics = trainer.last_eval
    best, loss = run, ""
    if trainer.state.best_step >= 0:
        best = shlex.quote(f"{folder}/{BEST}")
        loss = f"lowest held-out loss {trainer.state.best_loss:.4f} at step {trainer.state.best_step:,} ({best}); "
    elif metrics:
        loss = f"held-out loss {metrics['eval/mlm_loss']:.4f}, accuracy {metrics['eval/mlm_accuracy']:.2%}; "
    saved = f"ended by {trainer.schedule.limit}; {saved}"
    lines = [
        f"evaluate --model {best} --data {shlex.quote(trainer.config.data.path)}" if metrics else "",
        f'fill     --model {best} "The capital of France is [MASK]."',
        f"finetune --model {best} --task sst2 --train train.tsv --dev dev.tsv --output {run}-sst2",
        f"export   --model {best} --output {run}-hf",
    ]
    return "\n".join([f"finished: {loss}{saved}. Next:", *(f"  megabert {line}" for line in lines if line)])


def check(args: argparse.Namespace, config: Config, ranks: int) -> tuple[int, int]:
    """Check the arguments; returns the first and the last update to profile, or (0, 0). Raises ValueError naming an argument that is
    missing or invalid, or a folder without a dataset or checkpoint."""
    from megabert.common import storage
    from megabert.common.run_files import holds_checkpoint
    from megabert.config import list_phases, read_deepspeed
    from megabert.data.shards import MANIFEST
    from megabert.distributed.signals import find_deadline

    for name, value in (("--data", config.data.path), ("--run", args.run)):
        if not value:
            raise ValueError(f"{name} is missing: name a folder")
    for phase in list_phases(config):
        path, build = phase.config.data.path, "megabert prep build" + " --nsp" * config.model.nsp
        if not storage.is_url(path) and not Path(path, MANIFEST).is_file():
            option = "--data" if path == config.data.path else "data.path of a phase:"
            raise ValueError(f"{option} {path}: no dataset ({MANIFEST}) there; `{build} …` makes one for this model")
        if any(storage.public(each) != each for each in (path, *phase.config.data.mix, config.distill.teacher)):
            raise ValueError(
                "files of the run would show the password in a URL; write it to a netrc file, and set NETRC to its path"
            )
    if os.fsencode(args.run).decode(errors="ignore") != args.run:
        raise ValueError(f"--run {os.fsencode(args.run)!r}: its name is not UTF-8, in which files of the run have it")
    if Path(args.run).is_file() or storage.is_url(args.run):
        raise ValueError(f"--run {args.run}: is a {'URL' if storage.is_url(args.run) else 'file'}; name a folder")
    source = config.init_from
    # with a mirror the run itself may be downloaded later, and then `init_from` is not read
    if source and not (config.checkpoint.mirror or holds_checkpoint(Path(source)) or holds_checkpoint(Path(args.run))):
        raise ValueError(f"init_from={source}: no checkpoint in it; name a run folder or one of its checkpoints")
    if config.init_moments and not (source or config.checkpoint.mirror or holds_checkpoint(Path(args.run))):
        raise ValueError("init_moments=true: name the run whose weights and moments start this one, by init_from=RUN")
    if config.schedule.name == "budget" and config.schedule.by == "tokens":
        raise ValueError("schedule.name=budget counts minutes, schedule.by=tokens tokens; set schedule.name=linear")
    if args.stop_after is not None and args.stop_after < 1:
        raise ValueError(f"--stop-after {args.stop_after}: must be 1 or more")
    if not 0 <= args.profile_rank < ranks:
        raise ValueError(f"--profile-rank {args.profile_rank}: must be in [0, {ranks}), the ranks of this run")
    read_deepspeed(args.deepspeed_config)
    find_deadline(args.max_time, os.environ, time.time())
    return parse_steps(args.profile) if args.profile else (0, 0)
