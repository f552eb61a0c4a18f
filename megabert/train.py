"""Pre-train BERT: batch, step, meter, log, evaluate, agree to stop, save.

    deepspeed megabert/train.py --config large_phase1 --data DIR --run DIR [section.key=value …]
    megabert train …                      the same; also under srun and mpirun, which start it once a rank

Exit codes:
    0   the run is finished, or reached --stop-after
    2   a mistake in the command, configuration or data, said in one line
    3   training went wrong: updates that could not be applied, or spikes, again and again
    4   a rank died, stopped or hangs: it is named, and every other rank ended itself; or I/O failed
    85  stopped by TERM, USR1, USR2 or for want of time, with everything saved: start the same command again
    128 + n   a second signal n ended the process at once
"""

from __future__ import annotations

import os
import sys

if __package__ in (None, ""):  # run as a script: the package's parent, not the package, belongs on the path
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if __name__ == "__main__":
    from megabert.cli import start

    sys.exit(start("train"))  # before the slow imports

import argparse
import json
import time

from megabert import config as configuration
from megabert.common import logs
from megabert.common.arguments import Parser, called_as
from megabert.common.errors import OK, BadTraining, describe, exit_code
from megabert.common.malloc import keep_freed_memory
from megabert.distributed import process_group
from megabert.distributed.preemption import REQUEUE, Stop, end_of_time
from megabert.distributed.watchdog import LOST_RANK, Watchdog
from megabert.training import dry_run
from megabert.training.run import Run, build
from megabert.training.steps import (
    Refused,
    account,
    complete,
    finish,
    judge,
    log,
    next_update,
    over,
    refuse,
    replay,
    save,
    validate,
)


def train(run: Run) -> int:
    """Runs updates until the schedule ends, `stop_after` is reached or the ranks agree to stop."""
    config, first = run.config, run.step
    if run.saved_step < 0:
        validate(run)
        if config.spikes.policy == "rollback":
            save(run)  # somewhere to go back to
    started = time.perf_counter()  # waiting for data is training time, evaluating and saving are not
    while not over(run):
        update, lr, result = next_update(run)
        elapsed = time.perf_counter() - started
        behind = run.checkpoints.pending and not run.checkpoints.ready
        flags = [elapsed * 1e9, run.stop.requested, behind, bool(update.problem)]
        nanoseconds, stop, writing, damaged = run.world.max_ints([int(flag) for flag in flags])
        if damaged:
            refuse(run, update.problem)
        account(run, update, result, nanoseconds / 1e9)
        if run.checkpoints.pending and not writing:
            finish(run)
        went_back = judge(run, update, result)
        if not went_back:
            if run.step % config.log.interval == 0 or complete(run):
                log(run, lr)
            if config.eval.interval and run.step % config.eval.interval == 0 and not complete(run):
                validate(run)
        run.stop.updated(time.perf_counter() - started)
        if stop and not over(run):
            save(run)
            finish(run)
            return REQUEUE
        if not went_back and run.step % config.checkpoint.interval == 0:
            save(run)
        started = time.perf_counter()
    if complete(run) and run.step > first:
        validate(run)
    if run.saved_step != run.step:
        save(run)
    finish(run)
    return OK


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog=called_as("megabert.train"), description=__doc__)
    configuration.add_arguments(parser)
    add = parser.add_argument
    add(
        "--run",
        default="",
        metavar="DIR",
        help="run folder: checkpoints, metrics.jsonl, …; resumed if it holds any",
    )
    add("--stop-after", type=int, metavar="STEP", help="save and exit 0 at this step; the schedule stays")
    add(
        "--max-time",
        default="",
        metavar="TIME",
        help="save and exit 85 in time: 90 (minutes), 45s, 2h, 1:30:00, 1-12:00:00; SLURM's own limit counts too",
    )
    add(
        "--replay",
        type=int,
        metavar="STEP",
        help="repeat exactly this update of the run, print its losses as JSON and write nothing",
    )
    add("--print-config", action="store_true", help="print the resolved configuration and exit")
    add(
        "--dry-run",
        action="store_true",
        help="as megabert plan: print what the run needs, do one fake update, exit",
    )
    dry_run.add_arguments(parser)
    return parser.parse_intermixed_args(argv)


def main(argv: list[str] | None = None) -> int:
    started, args = time.time(), parse(argv)
    world, run, watchdog, met, good = None, None, None, False, False
    try:
        logs.setup()
        world = process_group.discover()
        logs.setup(world.rank, world.size)
        config = configuration.from_arguments(args)
        if args.print_config:
            print(json.dumps(config.model_dump(), indent=2))
            return OK
        if args.dry_run:
            dry_run.dry_run(
                config,
                world,
                args.world_size,
                args.tokens_per_sec,
                args.mfu,
                deepspeed_file=args.deepspeed_config,
            )
            return OK
        for name, value in (("--data", config.data.path), ("--run", args.run)):
            if not value:
                raise ValueError(f"{name} is missing: name a folder")
        if args.replay is not None and args.replay < 1:
            raise ValueError(f"--replay {args.replay}: the first update is 1")
        ends = end_of_time(args.max_time, os.environ, started)
        keep_freed_memory()
        world = process_group.init(world)
        stop = Stop(ends)
        config = configuration.fit_micro_size(config, world.size)
        configuration.accumulation(config, world.size)
        watchdog = Watchdog(world, args.run, config.watchdog.timeout_seconds)
        watchdog.start()
        met = True  # from here on no rank leaves alone when it is signalled
        run = build(args, config, world, stop, watchdog)
        if world.agree_any(stop.requested):
            code = REQUEUE  # before the first update: nothing is lost
        elif args.replay is not None:
            replay(run, args.replay)
            code = OK
        else:
            code = train(run)
        good = True
        if code == OK and world.is_main and config.log.tensorboard and run.last_eval:
            run.sinks[-1].hparams(run.last_eval)
        return code
    except (BadTraining, ValueError, OSError) as error:
        on_every_rank = run is None or isinstance(error, BadTraining | Refused)  # others: an unreadable file
        if world is None or world.is_main or not on_every_rank:
            logs.log.error(describe(error))
        return exit_code(error)
    except RuntimeError as error:  # a collective fails when another rank is gone
        if watchdog is None or world is None or world.size == 1:
            raise
        if not met:
            reason = str(error).splitlines()[0]
            logs.log.error(f"another rank left before rank {world.rank} met it: {reason}")
            return LOST_RANK
        watchdog.explain()
        raise
    finally:
        if watchdog is not None:
            watchdog.stop(good)
        if run is not None:
            run.close()
        process_group.shutdown()
