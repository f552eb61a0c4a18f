"""Session of a command's ranks: the process group, signals, the watchdog, exit codes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megabert.common import errors, logs
from megabert.common.errors import BadTraining
from megabert.common.logs import log
from megabert.distributed import ranks
from megabert.distributed.ranks import RankRefused, World
from megabert.distributed.signals import Stop
from megabert.distributed.watchdog import Watchdog

# how the RuntimeError begins that torch raises, wherever a process is, when a worker of its loader dies
DEAD_WORKER = "DataLoader worker"


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
        """Meet the other ranks; signals, and the moment `ends` (seconds of the epoch), then ask to stop. A collective."""
        self.world = ranks.init(self.world)
        return Stop(ends)

    def watch(self, folder: Path, timeout_seconds: float) -> Watchdog:
        """From here on no rank leaves alone; stacks of ranks that hang go to `folder`. A collective."""
        watchdog = Watchdog(self.world, folder, timeout_seconds)
        self.watchdog = watchdog  # before the ranks meet in it, where one that is missing is named
        watchdog.start()
        return watchdog


def run(command: Callable[[Session], int]) -> int:
    """The exit code of `command`, with mistakes and faults printed in one line; ends the process group and the watchdog."""
    try:
        return _run(command)
    except RuntimeError as error:  # raised wherever this process is, also while another error is printed
        if not str(error).startswith(DEAD_WORKER):
            raise
        log.error(f"a loader process died: {str(error).splitlines()[0]}")  # SIGBUS: a mapped file cannot be read
        return errors.FAILED


def _run(command: Callable[[Session], int]) -> int:
    session, good = None, False
    try:
        logs.setup()
        session = Session()
        code = command(session)
        good = True
        return code
    except (BadTraining, RankRefused) as error:  # on every rank
        if session is not None and session.world.is_main:
            log.error(errors.describe(error))
        return errors.exit_code(error)
    except (ValueError, OSError) as error:  # it may be this rank's alone: an unreadable file
        if session is None or session.speaks:
            log.error(errors.describe(error))
        return errors.exit_code(error)
    except RuntimeError as error:  # a collective fails when another rank is gone
        own = str(error).startswith(DEAD_WORKER)
        if own or session is None or session.watchdog is None or session.world.size == 1:
            raise
        if not session.watchdog.started:
            reason = str(error).splitlines()[0]
            log.error(f"another rank left before rank {session.world.rank} met it: {reason}")
            return errors.FAILED
        session.watchdog.explain()
        raise
    finally:
        if session is not None and session.watchdog is not None:
            session.watchdog.stop(good)
        ranks.shutdown()
