"""Signs of life of a process: where its main thread is, and whether another process still runs."""

from __future__ import annotations

import os
import socket
import sys
import sysconfig
import threading
from pathlib import Path
from types import FrameType

OURS = str(Path(__file__).parents[1]) + os.sep  # it may be installed among the libraries
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
WAITING = "wait_for_ranks"  # the function of ours that waits for a collective begun earlier, wherever it was
COLLECTIVES = (f"torch{os.sep}distributed{os.sep}", f"deepspeed{os.sep}comm{os.sep}")  # where ranks wait


def main_thread() -> tuple[str, bool]:
    """(file:line in function, whether it waits for other ranks there) of the main thread's innermost own code."""
    identity = threading.main_thread().ident
    frame: FrameType | None = sys._current_frames().get(identity or 0)
    if frame is None:
        return "gone", False
    code = frame.f_code
    waiting = code.co_name == WAITING or any(part in code.co_filename for part in COLLECTIVES)
    innermost = frame
    while frame is not None and not _is_own(frame.f_code.co_filename):
        frame = frame.f_back
    shown = frame or innermost
    path = Path(shown.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{shown.f_lineno} in {shown.f_code.co_name}", waiting


def _is_own(file: str) -> bool:
    return file.startswith(OURS) or not file.startswith((*LIBRARIES, "<"))


def pid_namespace() -> str:
    """A text that is equal for two processes exactly when each can see the other by its process id."""
    parts = [socket.gethostname()]
    for path, read in (
        ("/proc/sys/kernel/random/boot_id", lambda p: Path(p).read_text().strip()),
        ("/proc/self/ns/pid", os.readlink),  # containers have process ids of their own
    ):
        try:
            parts.append(read(path))
        except OSError:
            parts.append(f"{os.getpid()}")  # not known: a text that no other process has
    return " ".join(parts)


def is_alive(pid: int) -> bool:
    """Whether a process that can be seen from here still runs or is stopped; one that only waits to be reaped is not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"
