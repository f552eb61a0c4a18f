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
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def read_start_time(pid: int) -> str:
    """Start time of a process of this namespace in kernel ticks (proc(5), field 22); "" if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19] if is_alive(pid) else ""
    except (FileNotFoundError, ProcessLookupError):
        return ""
