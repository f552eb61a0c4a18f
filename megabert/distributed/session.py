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
from megabert.distributed import ranks, signals
from megabert.distributed.ranks import RankError, World
from megabert.distributed.signals import NOTICE, Stop
from megabert.distributed.watchdog import Watchdog

# prefix of the RuntimeError that torch's signal handler raises anywhere in the main thread when a loader worker dies
DEAD_WORKER = "DataLoader worker"
CPU_ALLOCATOR = "DefaultCPUAllocator"  # in the RuntimeError of torch where it finds no memory
UNEXPECTED = 1  # Python's exit code for an uncaught exception
_joined: list[Session] = []  # the session of this process that has started the process group


class Session:
    """This process among the ranks of one command."""

    def __init__(self) -> None:
        """Raises ValueError if the environment is inconsistent, or if another session of this process is not closed: it
        would lose the process group, its signal handlers and the lock of its run."""
        if _joined:
            raise ValueError(
                "another run is open in this process: leave its `with` block first, or use another process"
            )
        self.world: World = ranks.discover()
        self.watchdog: Watchdog | None = None
        self.errors_may_differ = False  # if they may, every rank prints its error
        self.joins = False  # from `join` on
        logs.setup(self.world.rank)

    @property
    def prints_errors(self) -> bool:
        """Whether this rank prints its error. Before `join` errors are the same on all ranks; while a run is being opened most are, and
        only the first rank of each node prints."""
        return self.world.is_main or self.errors_may_differ or (self.joins and self.world.local_rank == 0)

    def join(self, deadline: float | None = None, notice: bytes = NOTICE) -> Stop:
        """Start the process group. From then on a signal, or the `deadline` (seconds since the epoch), requests a stop; Ctrl-C prints
        the `notice`.

        A collective. Raises ValueError if torch does not see this machine's GPU, rather than train on the CPU.
        """
        self.joins = True
        if problem := ranks.explain_unused_gpu():
            raise ValueError(problem)
        raise_descriptor_limit()
        self.world = ranks.init(self.world)
        _joined.append(self)
        return Stop(deadline, notice)

    def watch(self, folder: Path, timeout_seconds: float) -> Watchdog:
        """Start the watchdog, which writes stacks of hanging ranks to `folder`. A collective."""
        watchdog = Watchdog(self.world, folder, timeout_seconds)
        self.watchdog = watchdog  # set first: `_report` needs it if `start` fails because a rank is missing
        watchdog.start()
        return watchdog

    def close(self, good: bool) -> None:
        """Stop the watchdog, destroy the process group, and restore the signal handlers. `good`: see
        `Watchdog.stop`."""
        if self.watchdog is not None:
            self.watchdog.stop(good)
        ranks.shutdown()
        signals.restore_handlers()
        _joined.clear()


def run(command: Callable[[Session], int], finish: Callable[[], object] = lambda: None) -> int:
    """Run `command(session)`, then `finish()` if it returned normally; returns the exit code.

    Known errors are printed in one line. If one of several ranks fails, its process exits at once: the others may be
    waiting for it in a collective, and NCCL's process group cannot be destroyed before that has ended. Otherwise
    watchdog and process group are shut down.
    """
    session, good = None, False
    try:
        logs.setup()
        session = Session()
        code = command(session)
        finish()
        # srun --wait kills rank 0 some seconds after the others ended, though it may still close its sinks
        if dist.is_initialized():
            session.world.barrier()
        good = True
        return code
    except (BadTraining, RankError) as error:
        good = True  # raised on every rank: none is reported as dead while another one still closes its sinks
        if session is not None and session.world.is_main:
            log.error(errors.describe(error))
        return errors.exit_code(error)
    except KeyboardInterrupt:
        log.error("interrupted")
        return errors.INTERRUPTED
    except Exception as error:
        try:
            code = _report(error, session)
        except RuntimeError as fault:  # of a loader process that died, raised anywhere
            code = _report(fault, session)
        if session is not None and session.world.size > 1 and dist.is_initialized():
            # without waiting for other threads and the process group
            if code == UNEXPECTED:
                logs.write(traceback.format_exc(), sys.stderr)
            logs.flush()
            os._exit(errors.record_exit_code(code))
        if code == UNEXPECTED:
            raise
        return code
    finally:
        if session is not None:
            session.close(good)


def _report(error: Exception, session: Session | None) -> int:
    """Print an error of this rank in one line if its type is known; returns its exit code. Exits the process if the
    watchdog finds that another rank has failed."""
    if isinstance(error, ValueError | OSError):
        if session is None or session.prints_errors:
            log.error(errors.describe(error))
        return errors.exit_code(error)
    first = (str(error).splitlines() or [""])[0]
    out_of_memory = isinstance(error, torch.OutOfMemoryError | MemoryError) or CPU_ALLOCATOR in first
    if session is None or not (out_of_memory or isinstance(error, RuntimeError)):
        return UNEXPECTED
    if first.startswith(DEAD_WORKER):  # SIGBUS: a mapped file cannot be read
        log.error(f"a loader process died: {first}")
        return errors.FAILED
    if out_of_memory:
        log.error(f"rank {session.world.rank} is out of memory; set a smaller batch.micro_size: {first}")
        return errors.FAILED
    if session.watchdog is None or session.world.size == 1:
        return UNEXPECTED
    if not session.watchdog.started:
        log.error(f"another rank exited before rank {session.world.rank} connected to it: {first}")
        return errors.FAILED
    session.watchdog.exit_if_rank_died()  # a collective also fails when another rank has died
    return UNEXPECTED
