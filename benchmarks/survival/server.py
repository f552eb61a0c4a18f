"""Server that forks ranks of `megabert/train.py` in a tenth of a second, since it has imported all modules.

A forked rank has its own session, environment, log file and exit code, and ends with this process. With `--in-place` in its
arguments the forked process is a keeper, which forks its rank. Requests are JSON lines on stdin, each answered by a JSON line:

    {"argv": [...], "env": {...}, "log": PATH, "slow": SECONDS}   -> {"pid": N}    slow: its first write of a checkpoint
    {"poll": PID}                                                 -> {"code": null | exit code | -signal}
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ["OMP_NUM_THREADS"] = "1"  # no pool of threads, which a fork would lose
os.environ["DS_ACCELERATOR"] = "cpu"
sys.modules["mlflow"] = None  # type: ignore[assignment]  # where it is installed DeepSpeed imports it, and it starts a thread

from benchmarks.survival.life import Forked  # noqa: E402
from megabert import train  # noqa: E402
from megabert.__main__ import start  # noqa: E402
from megabert.common.environment import end_with_parent  # noqa: E402
from megabert.distributed import signals  # noqa: E402
from megabert.inplace import keeper  # noqa: E402

# Modules that a run imports later and `train.load_all` does not. The last one would be by a thread that looks up an address, whose
# lock a fork at that instant keeps.
IMPORTED_LATER = ("torch.utils.tensorboard", "safetensors.torch", "encodings.idna")


def slow_down_the_first_write(seconds: float) -> None:
    """Delay the sync of the first file of this process' first checkpoint by `seconds`."""
    fsync, pauses = os.fsync, [seconds]

    def slow(file: Any) -> None:
        if pauses and "/.saving-" in os.readlink(f"/proc/self/fd/{file}"):
            time.sleep(pauses.pop())
        fsync(file)

    os.fsync = slow  # type: ignore[assignment]


def become_a_rank(request: dict[str, Any]) -> int:
    """Set up the forked process like a new one; returns the exit code of the command."""
    end_with_parent()
    os.setsid()
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for old, new in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(old, new)
    os.environ.update(request["env"])
    sys.argv = ["megabert/train.py", *request["argv"]]
    if request["slow"]:
        slow_down_the_first_write(request["slow"])
    keeper.Keeper = ForkingKeeper  # type: ignore[misc]
    return start("train", request["argv"])


def reap(child: int) -> int | None:
    """The exit code of a child process; None while it runs."""
    pid, status = os.waitpid(child, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if pid else None


class ForkingKeeper(keeper.Keeper):
    """A keeper that has imported what a rank needs, and forks it."""

    def _spawn(self) -> tuple[Any, int]:
        read_end, write_end = os.pipe()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals.SIGNALS)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = self._become_the_rank(read_end)
            finally:
                sys.stdout.flush()
                os._exit(code)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(read_end)
        return Forked(pid, reap), write_end

    def _become_the_rank(self, pipe: int) -> int:
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor > 2 and descriptor != pipe:
                with contextlib.suppress(OSError):  # that of the listing
                    os.close(descriptor)
        os.setsid()
        for number in signals.SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        importlib.reload(signals)  # as in a new process: no `Stop` has taken over
        os.environ.update(self.env | self._child_variables(pipe))
        try:
            return start("train", sys.argv[1:])
        except BaseException:
            traceback.print_exc()
            raise


def main() -> None:
    train.load_all()
    for name in IMPORTED_LATER:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the garbage collector does not scan imported objects in every rank
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose threads"
    signal.pthread_sigmask(signal.SIG_BLOCK, signals.SIGNALS)  # a forked process unblocks them once it handles them
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        if "poll" in request:
            answer = {"code": reap(request["poll"])}
        else:
            pid = os.fork()
            if pid == 0:
                sys.exit(become_a_rank(request))
            answer = {"pid": pid}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
