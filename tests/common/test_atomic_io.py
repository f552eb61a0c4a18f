"""A folder is whole or absent, and nothing that somebody else wrote is replaced."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import pytest

from megabert.common.atomic_io import appearing, write_whole


def test_a_folder_appears_when_its_block_ends(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "new"
    with appearing(target, "mark") as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "mark").write_text("1")
        assert not target.exists() and folder.parent == target.parent
    assert [p.name for p in target.parent.iterdir()] == ["new"]
    assert (target / "sub" / "mark").read_text() == "1"


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with appearing(tmp_path / "new", "mark") as folder:
            (folder / "half").write_text("1")
            raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        fail()
    assert not list(tmp_path.iterdir())


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    target = tmp_path / "old"
    target.mkdir()
    (target / "mark").write_text("old")
    with pytest.raises(OSError, match="no space"), appearing(target, "mark", overwrite=True) as folder:
        (folder / "mark").write_text("new")
        raise OSError("no space")
    assert (target / "mark").read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_what_a_kill_left_is_in_nobodys_way_and_goes(tmp_path: Path) -> None:
    target = tmp_path / "best"
    for kind in ("new", "old"):  # by a process with our number, as in a container every process may have
        left = tmp_path / f".best.{os.getpid()}.{kind}"
        left.mkdir()
        (left / "weights").write_text("half")
    target.mkdir()
    (target / "mark").write_text("1")
    with appearing(target, "mark", overwrite=True) as first:
        (first / "mark").write_text("2")
        with appearing(tmp_path / "best2", "mark"):
            pass
        with appearing(target, "mark", overwrite=True) as second:  # at work at the same time: neither takes the other's
            (second / "mark").write_text("3")
            assert first.exists()
    assert (target / "mark").read_text() == "2"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best", "best2"]


def test_a_rename_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    target = tmp_path / "old"
    target.mkdir()
    (target / "mark").write_text("old")

    def lose_the_new_one() -> None:
        with appearing(target, "mark", overwrite=True) as folder:
            (folder / "mark").write_text("new")
            folder.rename(tmp_path / "elsewhere")

    with pytest.raises(FileNotFoundError):
        lose_the_new_one()
    assert (target / "mark").read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["elsewhere", "old"]


def test_an_empty_folder_is_free_and_a_full_one_needs_overwrite(tmp_path: Path) -> None:
    target = tmp_path / "there"
    target.mkdir()
    with appearing(target, "mark") as folder:
        (folder / "mark").write_text("1")
    with pytest.raises(ValueError, match="is not empty"), appearing(target, "mark"):
        raise AssertionError("must not be entered")
    with appearing(target, "mark", overwrite=True) as folder:
        (folder / "mark").write_text("2")
    assert (target / "mark").read_text() == "2" and len(list(tmp_path.iterdir())) == 1


def test_what_another_program_wrote_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years")
    (tmp_path / "file").write_text("1")
    (tmp_path / "link").symlink_to(tmp_path / "home")
    for name, said in (("home", "has no mark"), ("file", "is no folder"), ("link", "is no folder")):
        with pytest.raises(ValueError, match=said), appearing(tmp_path / name, "mark", overwrite=True):
            raise AssertionError("must not be entered")
    assert (tmp_path / "home" / "thesis.txt").read_text() == "years"


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for data in (b"first", b"2"):
        write_whole(path, data)
        assert path.read_bytes() == data and list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_leaves_no_draft(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(IsADirectoryError):
        write_whole(tmp_path / "taken", b"data")
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails instead
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, old[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_whole(path, bytes(5000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
