"""What is done stays unless the user is the one who must change something."""

from pathlib import Path

import pytest

from data_prep.common.errors import BadInput, Unfinished
from data_prep.executor import output_folder
from data_prep.executor.output_folder import opened
from megabert.data.shards import MANIFEST

ACCOUNT = {"options": {}, "input files": {"digest": "d"}, "reading version": 2}


@pytest.mark.parametrize("error", [ValueError, ArithmeticError, Unfinished, OSError, KeyboardInterrupt])
def test_an_error_that_nobody_foresaw_keeps_the_work_of_twenty_hours(error, tmp_path):
    """numpy and pyarrow raise ValueError for what is no mistake of the user."""
    output = tmp_path / "out"
    with pytest.raises(error), opened(output, ACCOUNT, (128,), False) as work:
        (work / "read-0000000.tokens").write_bytes(b"tokens")
        raise error("cannot reshape array of size 5 into shape (2,)")
    with opened(output, ACCOUNT, (128,), False) as work:
        assert (work / "read-0000000.tokens").read_bytes() == b"tokens"


def test_a_mistake_in_the_options_leaves_nothing(tmp_path):
    with pytest.raises(BadInput), opened(tmp_path / "out", ACCOUNT, (128,), False):
        raise BadInput("--vocab-size: too many")
    assert not (tmp_path / "out").exists()


def test_a_whole_dataset_of_before_there_were_reading_versions_is_left_alone(tmp_path):
    files = {"count": 3, "bytes": 7, "digest": "of another kind"}
    old = {"options": {"seed": 1}, output_folder.FILES: files}
    output_folder.write_json(tmp_path / "build.json", old)
    (tmp_path / "manifest.json").write_text("{}")
    now = {**old, output_folder.FILES: {**files, "digest": "d"}, output_folder.VERSION: 2}
    with opened(tmp_path, now, (128,), False) as work:
        assert work is None
    changed = {**now, output_folder.FILES: {**files, "digest": "d", "bytes": 8}}
    with (
        pytest.raises(BadInput, match="input files: bytes was 7, is 8"),
        opened(tmp_path, changed, (128,), False),
    ):
        pass


@pytest.mark.parametrize("files", range(4))
def test_a_build_killed_while_its_work_folder_is_removed_is_done(files, tmp_path, monkeypatch):
    """Whatever files went before the kill, in whatever order: nobody goes on with the rest."""

    class Killed(BaseException):
        pass

    def removed(folder: Path) -> None:
        for path in sorted((path for path in folder.rglob("*") if path.is_file()), reverse=True)[:files]:
            path.unlink()
        raise Killed

    def build(work: Path) -> None:
        for name in ("read.json", "same documents.json", "read-0000000.tokens"):
            (work / name).write_text("{}")
        output_folder.write_json(tmp_path / output_folder.ACCOUNT, ACCOUNT)
        (tmp_path / MANIFEST).write_text("{}")

    with monkeypatch.context() as patched:
        patched.setattr(output_folder.shutil, "rmtree", removed)
        with pytest.raises(Killed), opened(tmp_path, ACCOUNT, (128,), False) as work:
            build(work)
    assert (tmp_path / output_folder.WORK).exists() and output_folder.account(tmp_path) == ACCOUNT
    with opened(tmp_path, ACCOUNT, (128,), False) as work:
        assert work is None
    assert not (tmp_path / output_folder.WORK).exists()
