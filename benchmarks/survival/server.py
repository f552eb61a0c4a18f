"""Server that forks ranks of `megabert/train.py` in a tenth of a second, having imported everything they need.

A forked rank has its own session, environment, log file and exit code, and ends with this process. Requests come as JSON lines on stdin, each gets one JSON line back:

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
os.environ["OMP_NUM_THREADS"] = "1"  # and no pool of threads that a fork would lose
os.environ["DS_ACCELERATOR"] = "cpu"
sys.modules["mlflow"] = None  # type: ignore[assignment]  # where it is installed DeepSpeed imports it, and it starts a thread

from megabert import train  # noqa: E402

# What a run imports later, by itself or by the first use of an optimizer.
IMPORTED_LATER = (
    *("deepspeed.comm.torch", "torch._dynamo", "deepspeed.runtime.zero.muon.muon_optimizer"),
    *("torch.utils.tensorboard", "safetensors.torch"),
)
# PR_SET_PDEATHSIG of prctl(2)
DIE_WITH_PARENT = 1


def slow_down_the_first_write(seconds: float) -> None:
    """The first file of the first checkpoint of this process takes `seconds` longer to reach the disk."""
    fsync, waited = os.fsync, False

    def slow(file: Any) -> None:
        nonlocal waited
        if not waited and "/.saving-" in os.readlink(f"/proc/self/fd/{file}"):
            waited = True
            time.sleep(seconds)
        fsync(file)

    os.fsync = slow  # type: ignore[assignment]


def become_a_rank(request: dict[str, Any]) -> int:
    """What a new process would be by now; gives the exit code of the command."""
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
    gc.freeze()  # what was imported is not looked through again in every rank
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
