"""What a process reports of itself, on systems with /proc and without."""

import builtins
import io
import sys
from pathlib import Path

import numpy as np
import pytest

from data_prep.executor import work_files
from data_prep.options import BuildOptions


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


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="no /proc on this system")
def test_copied_pages_are_released(tmp_path):
    (tmp_path / "items").write_bytes(np.arange(1 << 20, dtype=np.uint64).tobytes())
    job = work_files.BuildJob(BuildOptions(), "", str(tmp_path), "stop")
    items = work_files.mapped(job, "items", np.uint64)

    def resident() -> int:
        """KB of the file."""
        lines = iter(Path("/proc/self/smaps").read_text().splitlines())
        assert any(line.endswith(f"{tmp_path}/items") for line in lines)
        return next(int(line.split()[1]) for line in lines if line.startswith("Rss:"))

    assert int(items[::512].sum()) and resident() >= 8 << 10
    copy = work_files.copy_of(items, slice(1000, 5000))
    assert resident() == 0 and copy.tolist() == list(range(1000, 5000))
    assert work_files.copy_of(items, np.array([7, 5])).tolist() == [7, 5] and resident() == 0
    assert work_files.copy_of(np.arange(3), slice(1, None)).tolist() == [1, 2]
