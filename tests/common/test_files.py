"""Folders and files are whole or absent, and nothing that another program wrote is replaced."""

import os
import resource
import signal
from pathlib import Path

import pytest

from megabert.common import files
from megabert.common.files import atomic_file, atomic_folder, large_atomic_file, write_atomically
from megabert.common.run_files import json_lines


def filled(target: Path, text: str) -> None:
    """Replace `target` by a folder with this text."""
    with atomic_folder(target, "mark", overwrite=True) as folder:
        (folder / "mark").write_text(text)


def test_a_folder_appears_when_its_block_ends(tmp_path):
    target = tmp_path / "deep" / "new"
    with atomic_folder(target, "mark") as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "mark").write_text("1")
        assert not target.exists() and folder.parent == target.parent
    assert [p.name for p in target.parent.iterdir()] == ["new"]
    assert (target / "sub" / "mark").read_text() == "1"


@pytest.mark.parametrize("before", [False, True])
def test_an_error_changes_nothing(before, tmp_path):
    target = tmp_path / "new"
    if before:
        filled(target, "old")
    with pytest.raises(OSError, match="no space"), atomic_folder(target, "mark", overwrite=True) as folder:
        (folder / "mark").write_text("new")
        raise OSError("no space")
    assert [p.name for p in tmp_path.iterdir()] == ["new"] * before
    with pytest.raises(FileNotFoundError), atomic_folder(target, "mark", overwrite=True) as folder:
        folder.rename(tmp_path / "elsewhere")  # so that the last rename fails
    assert not before or (target / "mark").read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["elsewhere", *["new"] * before]


def test_folders_of_killed_processes_are_removed(tmp_path):
    target = tmp_path / "best"
    for kind in ("new", "old"):  # by a process with our number, as in a container every process may have
        left = tmp_path / f".best.{os.getpid()}.{kind}"
        left.mkdir()
        (left / "weights").write_text("half")
    filled(target, "1")
    with atomic_folder(target, "mark", overwrite=True) as first:
        (first / "mark").write_text("2")
        filled(tmp_path / "best2", "1")
        filled(target, "3")  # at the same time: neither removes the other's
        assert first.exists()
    assert (target / "mark").read_text() == "2"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best", "best2"]


def test_a_large_file_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "vectors.npy"
    for name in (".vectors.npy.1a2b3c4d.tmp", ".others.npy.1a2b3c4d.tmp"):
        (tmp_path / name).write_bytes(b"half")
    with large_atomic_file(path) as first:
        first.write(b"1")
        with large_atomic_file(path) as second:  # at the same time: neither removes the other's
            second.write(b"2")
        assert path.read_bytes() == b"2"
    assert path.read_bytes() == b"1"
    assert sorted(p.name for p in tmp_path.iterdir()) == [".others.npy.1a2b3c4d.tmp", "vectors.npy"]


def test_only_folders_of_the_same_command_are_replaced(tmp_path):
    target = tmp_path / "there"
    target.mkdir()  # an empty one is free
    with atomic_folder(target, "mark") as folder:
        (folder / "mark").write_text("1")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years")
    (tmp_path / "file").write_text("1")
    (tmp_path / "link").symlink_to(tmp_path / "home")
    for name, overwrite, message in (
        ("there", False, "is not empty"),
        ("home", True, "has no mark"),
        ("file", True, "is not a folder"),
        ("link", True, "is not a folder"),
    ):
        with pytest.raises(ValueError, match=message), atomic_folder(tmp_path / name, "mark", overwrite=overwrite):
            raise AssertionError("must not be entered")
    filled(target, "2")
    assert (target / "mark").read_text() == "2" and len(list(tmp_path.iterdir())) == 4
    assert (tmp_path / "home" / "thesis.txt").read_text() == "years"


@pytest.mark.parametrize("can", [True, False])
def test_a_folder_that_is_replaced_is_always_there(can, tmp_path, monkeypatch):
    """Also for a reader at the moment of a rename; a file system without an exchange restores it after an error."""
    target, rename, seen = tmp_path / "there", os.rename, []

    def renamed(source, goal):
        rename(source, goal)
        seen.append(target.exists())

    if not can:
        monkeypatch.setattr(files, "exchange", lambda *_: False)
    monkeypatch.setattr(os, "rename", renamed)
    filled(target, "1")
    filled(target, "2")
    assert (target / "mark").read_text() == "2" and os.listdir(tmp_path) == ["there"]
    assert seen == ([True, True] if can else [True, False, True])

    def refused(source, goal):
        if goal == target and ".new" in source.name:
            raise OSError("no")
        rename(source, goal)

    monkeypatch.setattr(os, "rename", refused)
    if not can:
        with pytest.raises(OSError, match="no"):
            filled(target, "3")
        assert (target / "mark").read_text() == "2"


def test_a_file_is_replaced_whole_or_not(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for data in (b"first", b"2"):
        write_atomically(path, data)
        assert path.read_bytes() == data and list(tmp_path.iterdir()) == [path]
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails instead
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
    try:
        for size in (5000, 50_000):  # below and above the buffer
            with pytest.raises(OSError, match="File too large") as caught:
                write_atomically(path, bytes(size))
            assert caught.value.filename == str(path)
        with pytest.raises(OSError, match="File too large") as caught, atomic_file(path, synced=False) as file:
            file.write(bytes(5000))  # which a buffer holds until the file is closed
        assert caught.value.filename == str(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == b"2" and list(tmp_path.iterdir()) == [path]


def test_partial_and_foreign_lines_are_left_out(tmp_path):
    """Of a run's logs."""
    log = tmp_path / "metrics.jsonl"
    log.write_bytes(b'{"step": 1, "a": 2}\n{"st\n[3]\n{"a": 4}\n{"step": 5}\n{"step": 6, "text": "\xc3')
    assert list(json_lines(log)) == [{"step": 1, "a": 2}, {"step": 5}]
    assert list(json_lines(tmp_path / "none")) == []
