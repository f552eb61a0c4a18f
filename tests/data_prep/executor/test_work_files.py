"""What a process reports of itself, on systems with /proc and without."""

import builtins
import io
import sys
from pathlib import Path

import pytest

from data_prep.executor import work_files


@pytest.mark.parametrize(("platform", "unit"), [("darwin", 1), ("freebsd14", 1024)])
def test_peak_memory_without_proc(platform, unit, monkeypatch):
    """macOS reports bytes where others report KB."""

    def gone(path, *_, **__):
        raise FileNotFoundError(2, "No such file or directory", str(path))

    known = work_files.peak_memory()
    for module in (builtins, io):
        monkeypatch.setattr(module, "open", gone)
    monkeypatch.setattr(sys, "platform", platform)
    found = work_files.peak_memory() * 1024 // unit
    assert known / 4 < found < known * 20  # ru_maxrss may be that of the parent


def test_peak_memory_where_proc_does_not_say_it(monkeypatch):
    """gVisor's /proc/self/status has VmSize and VmRSS alone."""
    known = work_files.peak_memory()
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "Name:\tpython\nVmRSS:\t  4096 kB\n")
    assert known / 4 < work_files.peak_memory() < known * 20
