"""Processes of this machine, from /proc."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def pid_namespace() -> str:
    """Host, boot and PID namespace of this process: equal for two processes if and only if each sees the other's process id."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"  # containers have PID namespaces
    except OSError:
        return f"{socket.gethostname()} {os.getpid()}"  # unknown: different from every other process


def is_alive(pid: int) -> bool:
    """Whether a process of this PID namespace is running or stopped; a zombie is neither."""
    return read_status(pid)[0] not in "ZX"


def read_start_time(pid: int) -> str:
    """Start time of a process of this namespace in kernel ticks; "" if it has ended."""
    fields = read_status(pid)
    return "" if fields[0] in "ZX" else fields[19]


def is_hidden(pid: int) -> bool:
    """Whether /proc, mounted with `hidepid=2`, hides another user's running process of this namespace."""
    try:
        os.kill(pid, 0)
    except OSError as error:  # else there is no such process
        return isinstance(error, PermissionError) and not os.path.exists(f"/proc/{pid}")
    return False


def read_status(pid: int) -> list[str]:
    """The fields of a process from its state on (proc(5), field 3); the state of a dead one if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return ["X"]
