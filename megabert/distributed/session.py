"""Session of a command's ranks: the process group, signals, the watchdog, exit codes."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from megabert.common import errors, logs
from megabert.common.environment import raise_descriptor_limit
from megabert.common.errors import BadTraining
from megabert.common.logs import log
from megabert.distributed import ranks, run_lock
from megabert.distributed.ranks import RankRefused, World
from megabert.distributed.signals import Stop
from megabert.distributed.watchdog import Watchdog

# how the RuntimeError begins that torch raises, wherever a process is, when a worker of its loader dies
DEAD_WORKER = "DataLoader worker"
# Python's own exit code of an exception that nothing expected
UNEXPECTED = 1


class Session:
    """This process among the ranks of one command."""

    def __init__(self) -> None:
        """Raises ValueError where the environment describes no world."""
        self.world: World = ranks.discover()
        self.watchdog: Watchdog | None = None
        # An error may be one rank's alone, so that each rank prints its own.
        self.apart = False
        logs.setup(self.world.rank, self.world.size)

    @property
    def speaks(self) -> bool:
        """Whether this rank prints its error: while a run opens, when most are those of all ranks, one rank of each node."""
        return self.world.is_main or self.apart or (self.watchdog is not None and self.world.local_rank == 0)

    def join(self, ends: float | None = None) -> Stop:
        """Meet the other ranks; signals, and the moment `ends` (seconds of the epoch), then ask to stop. A collective.
        Raises ValueError on a machine whose GPU torch does not see, which would train on its CPU."""
        if problem := ranks.unused_gpu():
            raise ValueError(problem)
        raise_descriptor_limit()
        self.world = ranks.init(self.world)
        return Stop(ends)

    def watch(self, folder: Path, timeout_seconds: float) -> Watchdog:
        """From here on no rank leaves alone; stacks of ranks that hang go to `folder`. A collective."""
        watchdog = Watchdog(self.world, folder, timeout_seconds)
        self.watchdog = watchdog  # before the ranks meet in it, where one that is missing is named
        watchdog.start()
        return watchdog


def run(command: Callable[[Session], int]) -> int:
    """The exit code of `command`, with mistakes and faults printed in one line; ends the process group and the watchdog.

    Where one rank of several fails, its process ends at once: the others may be waiting for it in a collective, and NCCL's
    process group cannot be left before that has ended.
    """
    session, good = None, False
    try:
        logs.setup()
        session = Session()
        code = command(session)
        run_lock.release()
        good = True
        return code
    except (BadTraining, RankRefused) as error:  # on every rank
        if session is not None and session.world.is_main:
            log.error(errors.describe(error))
        return errors.exit_code(error)
    except KeyboardInterrupt:
        log.error("interrupted")
        return errors.INTERRUPTED
    except Exception as error:
        try:
            code = _report(error, session)
        except RuntimeError as fault:  # of a loader process that died: raised wherever this process is
            code = _report(fault, session)
        if session is not None and session.world.size > 1 and dist.is_initialized():
            _end_process(code)
        if code == UNEXPECTED:
            raise
        return code
    finally:
        if session is not None and session.watchdog is not None:
            session.watchdog.stop(good)
        ranks.shutdown()


def _report(error: Exception, session: Session | None) -> int:
    """The exit code of an error that may be this rank's alone, which is printed in one line unless nothing expected it. Ends
    the process where it is another rank that failed."""
    if isinstance(error, ValueError | OSError):
        if session is None or session.speaks:
            log.error(errors.describe(error))
        return errors.exit_code(error)
    if not isinstance(error, RuntimeError) or session is None:
        return UNEXPECTED
    first = (str(error).splitlines() or [""])[0]
    if first.startswith(DEAD_WORKER):  # SIGBUS: a mapped file cannot be read
        log.error(f"a loader process died: {first}")
        return errors.FAILED
    if isinstance(error, torch.OutOfMemoryError):
        log.error(f"rank {session.world.rank} is out of memory; set a smaller batch.micro_size: {first}")
        return errors.FAILED
    if session.watchdog is None or session.world.size == 1:
        return UNEXPECTED
    if not session.watchdog.started:
        log.error(f"another rank left before rank {session.world.rank} met it: {first}")
        return errors.FAILED
    session.watchdog.explain()  # a collective fails when another rank is gone
    return UNEXPECTED


def _end_process(code: int) -> None:
    """End this process, whatever its other threads and its process group wait for."""
    if code == UNEXPECTED:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(errors.leave_exit_code(code))
