"""Memory of mapped work files, and files of two attempts at an item."""

from pathlib import Path

import numpy as np
import pytest

from data_prep.executor import work_files


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="no /proc on this system")
def test_copied_pages_are_released(job, tmp_path):
    (tmp_path / "items").write_bytes(np.arange(1 << 20, dtype=np.uint64).tobytes())
    items = work_files.mapped(job, "items", np.uint64)

    def resident() -> int:
        """KB of the file."""
        lines = iter(Path("/proc/self/smaps").read_text().splitlines())
        assert any(line.endswith(f"{tmp_path}/items") for line in lines)
        return next(int(line.split()[1]) for line in lines if line.startswith("Rss:"))

    assert int(items[::512].sum()) and resident() >= 8 << 10
    copy = work_files.copy_items(items, slice(1000, 5000))
    assert resident() == 0 and copy.tolist() == list(range(1000, 5000))
    assert work_files.copy_items(items, np.array([7, 5])).tolist() == [7, 5] and resident() == 0
    assert work_files.copy_items(np.arange(3), slice(1, None)).tolist() == [1, 2]


def test_failed_attempt_leaves_the_file_of_another(job, tmp_path):
    one, other = work_files.ItemResult(), work_files.ItemResult()
    with pytest.raises(SystemExit), work_files.appending(job, "items", one) as append:
        append(np.arange(3))
        work_files.write(job, "items", np.arange(5), other)
        raise SystemExit
    assert work_files.read(job, "items", np.int64).tolist() == [0, 1, 2, 3, 4]
    assert [path.name for path in tmp_path.iterdir()] == ["items"]
    assert work_files.files_intact(str(tmp_path), other.files)
