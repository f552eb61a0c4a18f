"""What is done stays unless the user is the one who must change something."""

import errno
import fcntl
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from data_prep.common.errors import BadInput, Unfinished
from data_prep.executor import output_folder
from data_prep.executor.output_folder import opened
from megabert.data.shards import MANIFEST
from tests.helpers.prep_reading import write, write_all

ACCOUNT = {"options": {"seq_len": [128]}, "input files": {"digest": "d"}, "reading version": 2}
OTHER = {**ACCOUNT, "options": {"seq_len": [128], "seed": 1}}


class Killed(BaseException):
    pass


def begin_and_stop(folder, *names, error=OSError):
    """A build that leaves files of these names in its work folder and ends with an error."""
    with pytest.raises(error), opened(folder, ACCOUNT) as work:
        write_all(work, dict.fromkeys(names, "{}"))
        raise error("cannot reshape array of size 5 into shape (2,)")


def finish(folder: Path, account: dict = ACCOUNT) -> None:
    """What a build does last."""
    output_folder.write_json(folder / output_folder.ACCOUNT, account)
    (folder / MANIFEST).write_text("{}")


def is_refused(message, build):
    with pytest.raises(BadInput, match=message), build:
        pytest.fail("the build began")


@pytest.mark.parametrize("error", [ValueError, ArithmeticError, Unfinished, OSError, KeyboardInterrupt])
def test_unexpected_error_keeps_the_work(error, tmp_path):
    """numpy and pyarrow raise ValueError for what is not a mistake of the user."""
    left = ("../.sources.csv.1a2b.tmp", ".read-0000001.tokens.3c4d.tmp", "journal/read/.0000001.json.5e6f.tmp")
    begin_and_stop(tmp_path / "out", "read-0000000.tokens", *left, error=error)
    with opened(tmp_path / "out", ACCOUNT) as work:
        assert (work / "read-0000000.tokens").read_text() == "{}" and not list(work.rglob(".*"))
        assert [path.name for path in work.parent.iterdir()] == [output_folder.WORK]
    begin_and_stop(tmp_path / "mistake", error=BadInput)
    assert not (tmp_path / "mistake").exists()
    begin_and_stop(tmp_path / "mistake", "../held_out/a", "../mine/a.txt", error=BadInput)  # `mine` came meanwhile
    assert [path.name for path in (tmp_path / "mistake").iterdir()] == ["mine"]


def test_resume_with_other_files_removes_manifests(tmp_path):
    """Of a build that was killed before its work folder was removed."""
    begin_and_stop(tmp_path / "out", f"../{MANIFEST}", f"../seq64/{MANIFEST}")
    with opened(tmp_path / "out", ACCOUNT | {"input files": {"digest": "e"}}):
        assert not list(tmp_path.rglob(MANIFEST))


def test_clear_removes_a_dataset_before_its_held_out_part(tmp_path, monkeypatch):
    """Else one without it would be complete after a kill."""

    def killed(path: Path) -> None:
        raise Killed(path)

    write_all(tmp_path, dict.fromkeys((MANIFEST, f"held_out/{MANIFEST}"), "{}"))
    monkeypatch.setattr(Path, "unlink", killed)
    with pytest.raises(Killed) as error:
        output_folder.clear(tmp_path)
    assert error.value.args == (tmp_path / MANIFEST,)


@pytest.mark.parametrize("files", range(4))
def test_killed_while_removing_work_is_complete(files, tmp_path, monkeypatch):
    """Whatever files were removed before the kill, in whatever order: no build resumes with the rest."""

    def removed(folder: Path) -> None:
        for path in sorted((path for path in folder.rglob("*") if path.is_file()), reverse=True)[:files]:
            path.unlink()
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(output_folder.shutil, "rmtree", removed)
        with pytest.raises(Killed), opened(tmp_path, ACCOUNT) as work:
            write_all(work, dict.fromkeys(("read.json", "same documents.json", "read-0000000.tokens"), "{}"))
            finish(tmp_path)
    assert (tmp_path / output_folder.WORK).exists()
    with opened(tmp_path, ACCOUNT) as work:
        assert work is None
    assert not (tmp_path / output_folder.WORK).exists()


def test_work_folder_kept_by_nfs_warns(tmp_path, monkeypatch, capsys):
    kept = OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), f"{tmp_path}/.work")
    monkeypatch.setattr(output_folder.shutil, "rmtree", Mock(side_effect=kept))
    with opened(tmp_path, ACCOUNT):
        finish(tmp_path)
    with opened(tmp_path, ACCOUNT) as work:
        assert work is None
    message = f"the dataset is complete, but {tmp_path}/.work: Directory not empty: remove {tmp_path}/.work by hand"
    assert capsys.readouterr().err.count(message) == 2


def test_foreign_files_of_similar_names_are_kept(tmp_path):
    """A folder that no build was in is the user's, whatever lies in it."""
    names = ("mine.tmp/a.txt", "held_out/mine.txt", "tokenizer.model", "shard-000000.tar", "report.json")
    for name in names:
        write(tmp_path / name, "mine")
        for overwrite in (False, True):
            is_refused(r"holds .*, which no build wrote", opened(tmp_path, ACCOUNT, overwrite))
    assert [(tmp_path / name).read_text() for name in names] == ["mine"] * len(names)


def test_sources_in_the_output_are_refused(tmp_path):
    output = write_all(tmp_path / "out", dict.fromkeys((output_folder.ACCOUNT, "tokenizer.model"), "{}"))
    (tmp_path / "link").symlink_to(output)
    (tmp_path / "a.txt").symlink_to(output / "tokenizer.model")
    (tmp_path / "beside.txt").touch()
    for source in (f"{output}/tokenizer.model", f"{tmp_path}/link/held_out/a.txt", f"{tmp_path}/a.txt"):
        build = opened(output, ACCOUNT, overwrite=True, sources=[source])
        is_refused(f"would replace {source}, which it reads", build)
    assert (output / "tokenizer.model").read_text() == "{}"
    with opened(output, ACCOUNT, overwrite=True, sources=[f"{tmp_path}/beside.txt"]) as work:
        assert work.is_dir()
    with pytest.raises(BadInput, match=r"would replace gcs://shelf/out/a.txt, which it reads"):  # another name of gs
        output_folder._refuse_sources("gs://shelf/out", ["gs://shelf/outer", "gcs://shelf/out/a.txt"])


@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("call", ["shutil.rmtree", "pathlib.Path.unlink"])
def test_folder_killed_while_clearing_is_recognised(call, part, tmp_path, monkeypatch):
    begin_and_stop(tmp_path, "read.json", "journal/read/0000000.json", "../shard-000000.tar")
    with monkeypatch.context() as patched:
        patched.setattr(call, Mock(side_effect=Killed))
        with pytest.raises(Killed), opened(tmp_path, OTHER, overwrite=True):
            pytest.fail("the build began")
    with opened(tmp_path, ACCOUNT, part=part) as work:
        left = {path.relative_to(work).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
        assert left == ({"build.json", "lock"} if part else {"build.json"})


def test_overwriting_goes_on_with_an_upload(tmp_path):
    with opened(tmp_path, ACCOUNT):
        finish(tmp_path, ACCOUNT)
        (tmp_path / "report.json").write_text("{}")
    for account, is_uploaded in ((ACCOUNT, True), (OTHER, False)):
        with opened(tmp_path, account, overwrite=True, url="s3://texts/out") as work:
            assert (work is None) == is_uploaded


@pytest.mark.parametrize("removed", range(4))
def test_what_a_kill_leaves_of_an_uploaded_folder_is_not_uploaded_again(removed, tmp_path, monkeypatch):
    left = iter(range(removed))

    def unlink(path, *rest, real=Path.unlink, **more):
        if next(left, None) is None:
            raise Killed
        real(path, *rest, **more)

    write_all(tmp_path, dict.fromkeys(("report.json", "shard-000000.tar"), "{}"))
    finish(tmp_path)
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(Path, "unlink", unlink)
        output_folder.remove_uploaded(tmp_path)
    with opened(tmp_path, ACCOUNT, overwrite=True, url="s3://texts/out") as work:
        assert (work is None) == (not removed)


def test_overwriting_goes_on_with_what_it_began(tmp_path):
    """A job that is requeued gives `--overwrite` again each time."""
    with opened(tmp_path, OTHER):
        finish(tmp_path, OTHER)
    for started in (False, True):
        with pytest.raises(OSError), opened(tmp_path, ACCOUNT, overwrite=True) as work:
            assert (work / "read.json").exists() == started and not (tmp_path / MANIFEST).exists()
            (work / "read.json").write_text("{}")
            raise OSError(28, "No space left on device")
    (tmp_path / output_folder.WORK / output_folder.ACCOUNT).write_text("{")  # damaged
    with opened(tmp_path, ACCOUNT, overwrite=True) as work:
        assert not (work / "read.json").exists()


def test_other_code_does_not_resume_a_build(tmp_path, monkeypatch):
    finished = "journal/read/0000000.json"
    begin_and_stop(tmp_path, finished)
    with monkeypatch.context() as patched:
        patched.setattr(output_folder, "version", lambda package: "0.1")
        for part in (False, True):
            changed = r"other options or code \(.*code: sentencepiece was .*, is 0\.1"
            is_refused(changed, opened(tmp_path, ACCOUNT, part=part))
    with opened(tmp_path, ACCOUNT) as work:
        assert (work / finished).exists()
        finish(tmp_path)
    monkeypatch.setattr(output_folder, "version", lambda package: "0.1")
    with opened(tmp_path, ACCOUNT) as work:
        assert work is None  # a complete dataset is left as it is


def test_missing_locks_only_warn(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))))
    for part in (True, False):
        with opened(tmp_path / "out", ACCOUNT, part=part) as work:
            assert work is not None
    assert "no locks (Function not implemented); do not start a second build there" in capsys.readouterr().err


@pytest.mark.parametrize("unpacked", [False, True])
def test_a_build_without_results_gives_way_to_other_options(unpacked, tmp_path):
    kept = ["journal/unpack/0000000.json", "journal/unpack.json"] * unpacked
    begin_and_stop(tmp_path, "read-0000000.tokens", *kept, error=Unfinished)
    is_refused("unfinished build", opened(tmp_path, OTHER, part=True))
    with opened(tmp_path, OTHER) as work:
        assert not (work / "read-0000000.tokens").exists() and (work / "journal/unpack").exists() == unpacked
