"""Server that forks ranks of `megabert/train.py` in a tenth of a second, since it has imported all modules.

A forked rank has its own session, environment, log file and exit code, and ends with this process. Requests are JSON lines on
stdin, each answered by a JSON line:

    {"argv": [...], "env": {...}, "log": PATH, "slow": SECONDS}   -> {"pid": N}    slow: its first write of a checkpoint
    {"poll": PID}                                                 -> {"code": null | exit code | -signal}
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ["OMP_NUM_THREADS"] = "1"  # no pool of threads, which a fork would lose
os.environ["DS_ACCELERATOR"] = "cpu"
sys.modules["mlflow"] = None  # type: ignore[assignment]  # where it is installed DeepSpeed imports it, and it starts a thread

from megabert import train  # noqa: E402

# Modules that a run imports later, some of them with the first use of an optimizer.
IMPORTED_LATER = (
    *("deepspeed.comm.torch", "torch._dynamo", "deepspeed.runtime.zero.muon.muon_optimizer"),
    *("torch.utils.tensorboard", "safetensors.torch"),
)
# PR_SET_PDEATHSIG of prctl(2)
DIE_WITH_PARENT = 1


def slow_down_the_first_write(seconds: float) -> None:
    """Delay the sync of the first file of this process' first checkpoint by `seconds`."""
    fsync, waited = os.fsync, False

    def slow(file: Any) -> None:
        nonlocal waited
        if not waited and "/.saving-" in os.readlink(f"/proc/self/fd/{file}"):
            waited = True
            time.sleep(seconds)
        fsync(file)

    os.fsync = slow  # type: ignore[assignment]


def become_a_rank(request: dict[str, Any]) -> int:
    """Set up the forked process like a new one; returns the exit code of the command."""
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
    os.setsid()
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for old, new in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(old, new)
    os.environ.update(request["env"])
    sys.argv = ["megabert/train.py", *request["argv"]]
    if request["slow"]:
        slow_down_the_first_write(request["slow"])
    return train.main(request["argv"])


def main() -> None:
    for name in IMPORTED_LATER:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the garbage collector does not scan imported objects in every rank
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose threads"
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = {"code": os.waitstatus_to_exitcode(status) if pid else None}
        else:
            pid = os.fork()
            if pid == 0:
                sys.exit(become_a_rank(request))
            answer = {"pid": pid}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
