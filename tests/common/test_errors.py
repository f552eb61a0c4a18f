"""Exit codes say whether starting a command again may help; errors are one line in a user's words."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from data_prep.common.errors import BadInput, Unfinished, WorkerDied
from megabert.common import logs
from megabert.common.errors import BadTraining, Failed, code_of, command, describe, exit_code, leave_exit_code

ROOT = Path(__file__).resolve().parents[2]


def os_error(number: int, path: str = "/data/file") -> OSError:
    return OSError(number, os.strerror(number), path)


@pytest.mark.parametrize("name", ["EIO", "ESTALE", "ENOSPC", "EDQUOT", "EFBIG", "ESHUTDOWN", "ENOMEM", "ETIMEDOUT"])
def test_io_that_failed_is_worth_another_start(name: str) -> None:
    assert exit_code(os_error(getattr(errno, name))) == 4


@pytest.mark.parametrize("name", ["ENOENT", "EACCES", "EPERM", "EISDIR", "ENOTDIR", "EEXIST", "ENAMETOOLONG", "EROFS"])
def test_a_path_named_wrongly_is_a_mistake(name: str) -> None:
    assert exit_code(os_error(getattr(errno, name))) == 2


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("x"), 2),
        (json.JSONDecodeError("x", "", 0), 2),
        (BadInput("x"), 2),
        (Unfinished("x"), 2),
        (OSError("not a gzip file"), 2),
        (WorkerDied("x"), 4),
        (Failed("x"), 4),
        (ConnectionError("nobody is there"), 4),
        (ConnectionResetError(errno.ECONNRESET, "x"), 4),
        (TimeoutError("x"), 4),
        (BadTraining("x"), 3),
    ],
)
def test_codes_by_class(error: Exception, code: int) -> None:
    assert exit_code(error) == code


def test_an_error_is_described_by_path_and_reason() -> None:
    assert describe(os_error(errno.ENOENT)) == "/data/file: No such file or directory"
    assert describe(os_error(errno.EIO)) == "/data/file: Input/output error"
    assert describe(OSError(errno.EIO, "Input/output error")) == "Input/output error"
    assert describe(os_error(errno.ENOSPC)).startswith("/data/file: the disk is full")
    assert describe(OSError("a library's words")) == "a library's words"
    assert describe(ValueError("--rows 0: at least 1")) == "--rows 0: at least 1"


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ValueError("--top 0"), 2, "error: --top 0\n"),
        (os_error(errno.ESTALE), 4, "error: /data/file: Stale file handle\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
    ],
)
def test_a_command_ends_with_one_line_and_its_code(error: BaseException, code: int, said: str, capsys) -> None:
    @command
    def main(argv: list[str] | None = None) -> int:
        raise error

    assert main([]) == code
    assert capsys.readouterr() == ("", said)


def test_a_defect_keeps_its_traceback() -> None:
    @command
    def main(argv: list[str] | None = None) -> int:
        raise KeyError("nobody expected this")

    with pytest.raises(KeyError):
        main([])


def test_an_unknown_level_of_messages_is_a_mistake_like_any_other(monkeypatch, capsys) -> None:
    monkeypatch.setenv("MEGABERT_LOG", "loud")
    assert command(lambda argv: 0)() == 2
    assert capsys.readouterr().err == "error: MEGABERT_LOG=loud: choose debug, info, warning, error\n"


def test_an_exit_code_is_left_where_a_launching_script_asked_for_it(tmp_path, monkeypatch, capsys) -> None:
    logs.setup()
    monkeypatch.delenv("MEGABERT_EXIT_DIR", raising=False)
    assert leave_exit_code(85) == 85
    monkeypatch.setenv("MEGABERT_EXIT_DIR", str(tmp_path))
    assert leave_exit_code(85) == 85
    (file,) = tmp_path.iterdir()
    assert file.read_text() == "85\n"
    monkeypatch.setenv("MEGABERT_EXIT_DIR", str(tmp_path / "missing"))
    assert leave_exit_code(2) == 2 and "warning: MEGABERT_EXIT_DIR" in capsys.readouterr().err


@pytest.mark.parametrize(("end", "code"), [(SystemExit(2), 2), (SystemExit(None), 0), (SystemExit("why"), 1)])
def test_what_argparse_ends_with_is_left_too(end: SystemExit, code: int, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("MEGABERT_EXIT_DIR", str(tmp_path))

    def main() -> int:
        raise end

    assert code_of(main) == code
    assert [file.read_text() for file in tmp_path.iterdir()] == [f"{code}\n"]


@pytest.mark.parametrize(
    "start",
    [("-m", "megabert", "train"), ("-m", "megabert.train"), ("megabert/train.py",), ("-m", "data_prep", "verify")],
    ids=" ".join,
)
def test_every_way_of_starting_leaves_the_same_code(start: tuple[str, ...], tmp_path) -> None:
    """A mistyped option never reaches `main`'s own handling; a launcher would make 1 of its 2, and start it again."""
    environment = os.environ | {"MEGABERT_EXIT_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *start, "--no-such-option"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 2 and "usage: " in done.stderr
    assert [file.read_text() for file in tmp_path.iterdir()] == ["2\n"]
