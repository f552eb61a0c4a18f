"""Pre-train BERT: batch, step, meter, log, evaluate, agree to stop, save.

    deepspeed megabert/train.py --config large_phase1 --data DIR --run DIR [section.key=value …]

Exit codes:
    0   the run is finished, or reached --stop-after
    2   a mistake in the command, configuration or data, said in one line
    3   training went wrong: updates that could not be applied, or spikes, again and again
    4   a rank died, stopped or hangs; it is named, and every other rank ended itself
    85  stopped by TERM, USR1, USR2 or for want of time, with everything saved: start the same command again
    128 + n   a second signal n ended the process at once
"""

from __future__ import annotations

import os
import sys

if __package__ in (None, ""):  # run as a script: the package's parent, not the package, belongs on the path
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if __name__ == "__main__":
    from megabert.distributed.preemption import leave_when_signalled

    leave_when_signalled()  # before the slow imports

import argparse
import json
import time

from megabert import config as configuration
from megabert.common.malloc import keep_freed_memory
from megabert.distributed import process_group
from megabert.distributed.preemption import REQUEUE, Stop, end_of_time, ignore_signals
from megabert.distributed.watchdog import LOST_RANK, Watchdog
from megabert.training import dry_run
from megabert.training.run import Run, build
from megabert.training.steps import (
    BadTraining,
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

OK, USER_ERROR, BAD_TRAINING = 0, 2, 3


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
    parser = argparse.ArgumentParser(
        prog="megabert/train.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--config", default="", help=f"preset ({', '.join(configuration.presets())}) or TOML file")
    add("--data", default="", help="dataset folder written by data_prep")
    add("--run", default="", help="run folder: checkpoints, metrics.jsonl, …; resumed if it holds any")
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
    add("--dry-run", action="store_true", help="print what the run needs, do one update on random ids, exit")
    add("--world-size", type=int, metavar="N", help="ranks that --dry-run plans for")
    add("--tokens-per-sec", type=float, metavar="X", help="speed of all ranks for --dry-run")
    add("--mfu", type=float, metavar="X", help="or its share of peak_tflops, e.g. 0.4")
    add("--deepspeed", action="store_true", help="accepted for DeepSpeed's launcher; always on")
    add("--deepspeed_config", default="", help="JSON with further DeepSpeed keys")
    add("--local_rank", type=int, default=-1, help="set by launchers")
    add("overrides", nargs="*", metavar="section.key=value", help="configuration overrides")
    return parser.parse_intermixed_args(argv)


def main(argv: list[str] | None = None) -> int:
    started, args = time.time(), parse(argv)
    world, run, watchdog, met, good = None, None, None, False, False
    try:
        world = process_group.discover()
        data = [f"data.path={args.data}"] if args.data else []
        config = configuration.load(args.config, data + args.overrides)
        if args.print_config:
            print(json.dumps(config.model_dump(), indent=2))
            return OK
        if args.dry_run:
            dry_run.dry_run(
                *(config, world, args.world_size, args.tokens_per_sec, args.mfu, args.deepspeed_config)
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
    except (BadTraining, Refused) as error:  # on every rank
        if world is None or world.is_main:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return BAD_TRAINING if isinstance(error, BadTraining) else USER_ERROR
    except (ValueError, OSError) as error:  # it may be this rank's alone: an unreadable file
        if world is None or world.is_main:
            print(f"error: {error}", file=sys.stderr, flush=True)
        elif run is not None:
            print(f"rank {world.rank}: error: {error}", file=sys.stderr, flush=True)
        return USER_ERROR
    except RuntimeError as error:  # a collective fails when another rank is gone
        if watchdog is None or world is None or world.size == 1:
            raise
        if not met:
            reason = str(error).splitlines()[0]
            print(
                f"error: another rank left before rank {world.rank} met it: {reason}",
                file=sys.stderr,
                flush=True,
            )
            return LOST_RANK
        watchdog.explain()
        raise
    finally:
        if watchdog is not None:
            watchdog.stop(good)
        if run is not None:
            run.close()
        process_group.shutdown()


if __name__ == "__main__":
    code = process_group.leave_exit_code(main())
    ignore_signals()
    sys.exit(code)
