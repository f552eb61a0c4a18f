"""Independent jobs that read a part of the input each, and one that merges: the bytes of a build that did it all."""

import gzip
import re
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import Mock

import pytest

from data_prep import build as building
from data_prep.build import BuildPlan, build, build_part
from data_prep.common.errors import BadInput
from data_prep.common.records import Corpus
from data_prep.executor import journal
from data_prep.executor.pool import Pool
from data_prep.options import BuildOptions
from data_prep.readers import tasks
from tests.helpers.prep_reading import contents, write_all


@pytest.fixture
def given(topics, tmp_path, monkeypatch):
    """Folder -> the plan of a small build of some ten tasks, one file of which is unpacked first."""
    monkeypatch.setattr(tasks, "RANGE_BYTES", 1 << 16)
    monkeypatch.setattr(tasks, "TASK_BYTES", (1 << 15, 1 << 16))
    folder = write_all(tmp_path / "in", {f"{i:02}.txt": text for i, text in enumerate(topics[:30])})
    large = "".join(f'<doc id="{i}">\nT\n\n{text}\n</doc>\n' for i, text in enumerate(topics[30:]))
    write_all(folder, {"large": gzip.compress(large.encode())})
    options = BuildOptions(vocab_size=600, model_type="bpe", sample_megabytes=1, held_out=0.05, rows_per_shard=256)
    return lambda output: BuildPlan([Corpus("input", (str(folder),))], output, options)


def test_parts_in_any_order_give_the_same_bytes(given, tmp_path):
    """Each keeps what another one is writing."""
    build(given(tmp_path / "at once"), Pool(1), progress=False)
    plan = given(tmp_path / "in parts")
    unfinished = plan.folder / ".work" / ".read-0000000.tokens.1a2b3c4d.tmp"
    for k in (3, 1):
        assert build_part(plan, Pool(1), (k, 3), progress=False)
        assert unfinished.exists() or k == 3
        unfinished.touch()
    summary = build(plan, Pool(1), progress=False)  # reads part 2 as well
    assert summary["resumed"] and contents(plan.folder) == contents(tmp_path / "at once")
    assert build_part(plan, Pool(1), (2, 3), progress=False) is False


@pytest.mark.parametrize("lost", [b"", None])
def test_lost_unpacked_text_is_no_damage_of_the_input(lost, given, tmp_path):
    plan = replace(given(tmp_path / "out"), on_error="skip")
    assert build_part(plan, Pool(1), (1, 99), progress=False)
    spool = max((plan.folder / ".work").glob("stream-*.zst"))
    spool.unlink() if lost is None else spool.write_bytes(lost)
    with pytest.raises(ValueError, match=rf"{spool}: .*unpacked text is lost") as error:
        build(plan, Pool(1), progress=False)
    Path(re.search("remove (.*), and", str(error.value))[1]).unlink()
    build(plan, Pool(1), progress=False)
    build(given(tmp_path / "fresh"), Pool(1), progress=False)
    assert contents(plan.folder) == contents(tmp_path / "fresh")


def test_part_reads_nothing_again_behind_reading(given, tmp_path, monkeypatch):
    """Resubmitted after the last job, which has deleted the files of reading, met its time limit."""
    plan = given(tmp_path / "out")
    monkeypatch.setattr(journal, "SWEEP_BYTES", 1)
    with monkeypatch.context() as patched:
        patched.setattr(building, "_commit", Mock(side_effect=OSError(28, "No space left on device")))
        with pytest.raises(OSError):
            build(plan, Pool(1), progress=False)
    work = plan.folder / ".work"
    assert (work / "journal/read.json").exists() and not (work / "journal/read").exists()
    assert build_part(plan, Pool(1), (1, 2), progress=False)
    assert not (work / "journal/read").exists()
    assert build(plan, Pool(1), progress=False)


def test_part_that_begins_meanwhile_is_of_the_build(given, tmp_path, monkeypatch):
    output, listed = tmp_path / "out", Path.iterdir

    def iterdir(folder):
        if folder == output:
            (output / ".work").mkdir(exist_ok=True)
        return listed(folder)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    assert build_part(given(output), Pool(1), (1, 2), progress=False)


def test_concurrent_parts_exclude_whole_builds(given, tmp_path):
    output = tmp_path / "out"
    processes = get_context("fork")
    entered = processes.Barrier(3, timeout=60)

    class Slow(Pool):
        def map(self, function, items, done):
            if "read" in function.args[2:]:  # the stage that is shared
                entered.wait()
                entered.wait()
            return super().map(function, items, done)

    def part(k):
        build_part(given(output), Slow(1), (k, 2), progress=False)

    jobs = [processes.Process(target=part, args=(k,)) for k in (1, 2)]
    for job in jobs:
        job.start()
    entered.wait()
    with pytest.raises(BadInput, match="another build is writing there"):
        build(given(output), Pool(1), progress=False)
    entered.wait()
    for job in jobs:
        job.join()
        assert job.exitcode == 0
    build(given(output), Pool(1), progress=False)
    build(given(tmp_path / "at once"), Pool(1), progress=False)
    assert contents(output) == contents(tmp_path / "at once")
