"""A spool resumes from its last state, byte for byte, and belongs to one command; threads keep the order of results."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from megabert.common import errors, logs, streaming
from megabert.common.streaming import PROGRESS, Spool, folder_of


def interrupted(output: Path, error: BaseException, **facts: int) -> None:
    with pytest.raises(type(error)), Spool(output, facts, ["x", "y"]) as spool:
        spool.files["x"].write(b"one")
        spool.files["y"].write(b"1")
        spool.advance({"n": 1})
        spool.files["x"].write(b"tw")
        raise error


def test_a_spool_resumes_from_its_last_state(tmp_path: Path) -> None:
    output = tmp_path / "out"
    interrupted(output, KeyboardInterrupt(), a=1)
    with Spool(output, {"a": 1}, ["x", "y"]) as spool:
        assert spool.resumed and spool.state == {"n": 1}
        assert [spool.files[name].tell() for name in "xy"] == [3, 1]
        spool.files["x"].write(b"two")
        spool.files["x"].seek(0)
        assert spool.files["x"].read() == b"onetwo"
        spool.finish()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("case", ["other facts", "lost bytes", "user error"])
def test_a_spool_that_does_not_fit_is_discarded(case: str, tmp_path: Path) -> None:
    interrupted(tmp_path / "out", ValueError("line 3") if case == "user error" else OSError("no room"), a=1)
    assert folder_of(tmp_path / "out").is_dir() == (case != "user error")
    if case == "lost bytes":
        (folder_of(tmp_path / "out") / "x").write_bytes(b"on")
    with Spool(tmp_path / "out", {"a": 2 if case == "other facts" else 1}, ["x", "y"]) as spool:
        assert not spool.resumed and not spool.state and spool.files["x"].tell() == 0


def test_one_process_writes_a_spool(tmp_path: Path) -> None:
    with Spool(tmp_path / "out", {}, ["x"]):
        with pytest.raises(ValueError, match="another process is writing it"), Spool(tmp_path / "out", {}, ["x"]):
            raise AssertionError
        assert folder_of(tmp_path / "out").is_dir()


def test_a_file_system_without_locks_gives_a_warning(tmp_path: Path, monkeypatch, capsys) -> None:
    def none(*_: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", none)
    logs.setup()
    with Spool(tmp_path / "out", {}, ["x"]) as spool:
        spool.finish()
    message = capsys.readouterr().err
    assert "lock: this file system has no locks (Function not implemented); let no second command" in message


def test_an_unreadable_state_is_not_discarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "out"
    interrupted(output, KeyboardInterrupt())
    read = Path.read_bytes

    def broken(path: Path) -> bytes:
        if path.name == PROGRESS:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return read(path)

    monkeypatch.setattr(errors, "WAITS", (0.0,))
    monkeypatch.setattr(Path, "read_bytes", broken)
    with pytest.raises(OSError, match="Input/output error"), Spool(output, {}, ["x", "y"]):
        pass
    monkeypatch.undo()
    with Spool(output, {}, ["x", "y"]) as spool:
        assert spool.resumed and spool.state == {"n": 1}


def test_results_of_threads_come_in_order() -> None:
    def square(n: int) -> int:
        if n == 30:
            raise ValueError("thirty")
        return n * n

    found, taken = [], []
    with pytest.raises(ValueError, match="thirty"):
        for value in streaming.in_order(square, (taken.append(n) or n for n in range(1000)), 3, 4):
            found.append(value)
            assert len(taken) <= len(found) + 4
    assert found == [n * n for n in range(30)] and len(taken) <= 35
