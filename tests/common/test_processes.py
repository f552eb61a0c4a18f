"""Processes by their entries in /proc."""

import ctypes
import os
from pathlib import Path

from megabert.common.processes import is_alive, read_start_time

PR_SET_NAME = 15


def test_a_process_of_any_name_is_alive() -> None:
    prctl, name = ctypes.CDLL(None).prctl, Path("/proc/self/comm").read_bytes().strip()
    started = read_start_time(os.getpid())
    try:
        prctl(PR_SET_NAME, b"\xff) Z")  # no UTF-8
        assert is_alive(os.getpid()) and read_start_time(os.getpid()) == started != ""
    finally:
        prctl(PR_SET_NAME, name)
