"""The list of dropped documents names each one's evaluation text, and looks for it alone."""

import json
from pathlib import Path

import pytest

from data_prep.executor.work_files import Job
from data_prep.filters.overlap import Match
from data_prep.options import BuildOptions
from data_prep.stages import decontaminate


def bytes_read():
    """By this process so far, from files of any kind."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="no /proc/self/io on this system")
def test_a_text_is_found_by_its_place_in_the_file(tmp_path):
    """100,000 dropped documents times 500,000 texts would be hours."""
    path = tmp_path / "dev.txt"
    path.write_text("".join(f"Évaluation text number {i} is {'long ' * (i % 8)}enough.\n" for i in range(2500)))
    job = Job(BuildOptions(decontaminate=(str(path),)), "", str(tmp_path), "stop")
    decontaminate.index(job, tuple(decontaminate.files((str(path),))))
    listed = decontaminate.listed(job, Match(0, 0), "a document")
    assert json.loads(listed)["evaluation"] == f"{path}, line 1"
    whole = (tmp_path / "evaluation.texts").stat().st_size
    for number in (2, 1500, 2499):
        before = bytes_read()
        listed = json.loads(decontaminate.listed(job, Match(7, number), "a document"))
        assert bytes_read() - before < 16_384 < whole // 10
        assert listed["text"] == f"Évaluation text number {number} is {'long ' * (number % 8)}enough."
        assert listed["evaluation"] == f"{path}, line {number + 1}"
