"""A spool goes on behind its last state, byte for byte, and belongs to one command."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from megabert.common import ahead, logs, retry
from megabert.common.spool import PROGRESS, Spool, folder_of


def test_what_was_written_behind_the_last_state_is_cut_off(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt), Spool(output, {"a": 1}, ["x", "y"]) as spool:
        spool.files["x"].write(b"one")
        spool.files["y"].write(b"1")
        spool.advance({"n": 1})
        spool.files["x"].write(b"tw")
        raise KeyboardInterrupt
    with Spool(output, {"a": 1}, ["x", "y"]) as spool:
        assert spool.resumed and spool.state == {"n": 1}
        assert [spool.files[name].tell() for name in "xy"] == [3, 1]
        spool.files["x"].write(b"two")
        spool.files["x"].seek(0)
        assert spool.files["x"].read() == b"onetwo"
        spool.finish()
    assert list(tmp_path.iterdir()) == []


def interrupted(output: Path, error: BaseException, **facts: int) -> None:
    with pytest.raises(type(error)), Spool(output, facts, ["x"]) as spool:
        spool.files["x"].write(b"one")
        spool.advance({"n": 1})
        raise error


def test_another_command_begins_anew(tmp_path: Path) -> None:
    interrupted(tmp_path / "out", OSError("no room"), a=1)
    with Spool(tmp_path / "out", {"a": 2}, ["x"]) as spool:
        assert not spool.resumed and not spool.state and spool.files["x"].tell() == 0


def test_a_file_that_lost_bytes_begins_anew(tmp_path: Path) -> None:
    interrupted(tmp_path / "out", OSError("no room"), a=1)
    (folder_of(tmp_path / "out") / "x").write_bytes(b"on")
    with Spool(tmp_path / "out", {"a": 1}, ["x"]) as spool:
        assert not spool.resumed and spool.files["x"].tell() == 0


def test_a_mistake_of_the_users_leaves_nothing(tmp_path: Path) -> None:
    interrupted(tmp_path / "out", ValueError("line 3"), a=1)
    assert list(tmp_path.iterdir()) == []


def test_one_process_writes(tmp_path: Path) -> None:
    with Spool(tmp_path / "out", {}, ["x"]):
        with pytest.raises(ValueError, match="another process is writing it"), Spool(tmp_path / "out", {}, ["x"]):
            raise AssertionError
        assert folder_of(tmp_path / "out").is_dir()


def test_results_of_threads_come_in_order_and_errors_in_their_place() -> None:
    def slow(n: int) -> int:
        if n == 30:
            raise ValueError("thirty")
        return n * n

    found = []
    taken = []
    with pytest.raises(ValueError, match="thirty"):
        for value in ahead.in_order(slow, (taken.append(n) or n for n in range(1000)), 3, 4):
            found.append(value)
            assert len(taken) <= len(found) + 4
    assert found == [n * n for n in range(30)] and len(taken) <= 35


def test_without_locks_it_goes_on_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none(*_: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", none)
    logs.setup()
    with Spool(tmp_path / "out", {}, ["x"]) as spool:
        spool.finish()
    said = capsys.readouterr().err
    assert "lock: this file system has no locks (Function not implemented); let no second command" in said


def test_a_state_that_cannot_be_read_is_not_thrown_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt), Spool(output, {}, ["x"]) as spool:
        spool.files["x"].write(b"one")
        spool.advance({"n": 1})
        raise KeyboardInterrupt
    read = Path.read_bytes

    def broken(path: Path) -> bytes:
        if path.name == PROGRESS:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return read(path)

    monkeypatch.setattr(retry, "WAITS", (0.0,))
    monkeypatch.setattr(Path, "read_bytes", broken)
    with pytest.raises(OSError, match="Input/output error"), Spool(output, {}, ["x"]):
        pass
    monkeypatch.undo()
    with Spool(output, {}, ["x"]) as spool:
        assert spool.resumed and spool.state == {"n": 1}
