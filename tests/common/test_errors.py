"""Exit codes say whether a restart may help; errors are one line in a user's words."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from data_prep.common.errors import BadInput, Unfinished, WorkerDied
from megabert.common.errors import BadTraining, Failed, command, describe, exit_code, record_exit_code, run_main

ROOT = Path(__file__).resolve().parents[2]


def os_error(number: int, path: str = "/data/file") -> OSError:
    return OSError(number, os.strerror(number), path)


@pytest.mark.parametrize(
    ("code", "errors"),
    [
        (4, [os_error(n) for n in (errno.EIO, errno.ESTALE, errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.ETIMEDOUT)]),
        (4, [WorkerDied("x"), Failed("x"), ConnectionError("x"), ConnectionResetError(errno.ECONNRESET, "x"), TimeoutError("x")]),
        (2, [os_error(n) for n in (errno.ENOENT, errno.EACCES, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.EROFS)]),
        (2, [ValueError("x"), BadInput("x"), Unfinished("x"), OSError("not a gzip file")]),
        (3, [BadTraining("x")]),
    ],
)  # fmt: skip
def test_exit_codes_by_class_of_failure(code: int, errors: list[Exception]) -> None:
    assert {exit_code(error) for error in errors} == {code}


def test_an_error_is_described_by_path_and_reason() -> None:
    assert describe(os_error(errno.ENOENT)) == "/data/file: No such file or directory"
    assert describe(OSError(errno.EIO, "Input/output error")) == "Input/output error"
    assert describe(os_error(errno.ENOSPC)).startswith("/data/file: the disk is full")
    assert describe(OSError("a library's words")) == "a library's words"
    assert describe(ValueError("--rows 0: at least 1")) == "--rows 0: at least 1"


UNREAD = """
import os, signal, sys
from megabert.common.errors import run_main, command
from megabert.common.logs import log
@command
def main(argv=None):
    %s
    return 0
sys.exit(run_main(main))"""


@pytest.mark.parametrize(
    ("words", "also", "code", "shown"),
    [
        ("print('text')", "", 4, b"error: Broken pipe: output is lost\n"),
        ("log.info('text'); log.warning('text')", "", 4, b"warning: text\nerror: Broken pipe: output is lost\n"),
        # flushed by print itself, as a line above the buffer's size is
        ("print('text', flush=True)", "", 4, b"error: Broken pipe\n"),
        ("print('text'); log.error('text')", "2>&1", 4, None),
        ("os.kill(os.getpid(), signal.SIGINT)", "2>&1", 130, None),
    ],
)
def test_a_command_that_nobody_reads_ends_with_4(words, also, code, shown):
    """Not with 120 and a traceback of the interpreter's own flush."""
    receiving, sending = os.pipe()
    os.close(receiving)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", UNREAD % words]
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=sending, stderr=sending if also else subprocess.PIPE)
    os.close(sending)
    assert (done.returncode, done.stderr) == (code, shown)


def test_no_file_gets_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(
        "import sys\nfrom megabert.common import errors\nfrom megabert.common.logs import log, setup\nsetup()\n"
        "def main():\n    log.warning('seen')\n    return open(sys.argv[1], 'w').fileno()\n"
        "sys.exit(errors.run_main(main))"
    )
    shell = 'exec "$0" main.py file <&- 2>&-'
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(["sh", "-c", shell, sys.executable], cwd=tmp_path, env=environment, stdout=subprocess.PIPE)
    assert done.returncode >= 3 and done.stdout == b""


def test_what_a_terminal_cannot_show_is_escaped() -> None:
    """A character, and a byte of a file name that is no text."""
    command = [sys.executable, "-c", UNREAD % r"print('\u2026'); log.info('caf\udce9.txt')"]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "\\u2026\ncaf\\udce9.txt\n", "")


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ValueError("--top 0"), 2, "error: --top 0\n"),
        (os_error(errno.ESTALE), 4, "error: /data/file: Stale file handle\n"),
        (BadTraining("the held-out loss did not fall"), 3, "error: the held-out loss did not fall\n"),
        # a line of its own: it may come in the middle of a progress line
        (KeyboardInterrupt(), 130, "\nerror: interrupted: nothing was written\n"),
    ],
)
def test_a_command_ends_with_a_line_and_code(error, code, line, capsys):
    @command
    def main(argv=None):
        raise error

    assert main([]) == code
    assert capsys.readouterr() == ("", line)
    with pytest.raises(KeyError):  # a defect keeps its traceback
        command(lambda argv: {}["a defect"])([])


def test_an_unknown_message_level_is_a_user_error(monkeypatch, capsys) -> None:
    monkeypatch.setenv("MEGABERT_LOG", "loud")
    assert command(lambda argv: 0)() == 2
    assert capsys.readouterr().err == "error: MEGABERT_LOG=loud: choose debug, info, warning, error\n"


@pytest.mark.parametrize(("end", "code"), [(SystemExit(2), 2), (SystemExit(None), 0), (SystemExit("why"), 1), (85, 85)])
def test_exit_codes_are_left_for_the_launch_script(end, code, tmp_path, monkeypatch):
    main = Mock(return_value=end) if isinstance(end, int) else Mock(side_effect=end)
    monkeypatch.setenv("MEGABERT_EXIT_DIR", str(tmp_path))
    assert run_main(main) == code
    assert [file.read_text() for file in tmp_path.iterdir()] == [f"{code}\n"]
    monkeypatch.setenv("MEGABERT_EXIT_DIR", str(tmp_path / "missing"))
    assert record_exit_code(code) == code


@pytest.mark.parametrize(
    "start",
    [("-m", "megabert", "train"), ("-m", "megabert.train"), ("megabert/train.py",), ("-m", "data_prep", "verify")],
    ids=" ".join,
)
def test_every_way_of_starting_leaves_the_same_code(start, tmp_path):
    """A mistyped option never reaches `main`'s own handling; a launcher would make 1 of its 2, and restart it."""
    env = os.environ | {"MEGABERT_EXIT_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *start, "--no-such-option"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: unknown option --no-such-option")
    assert [file.read_text() for file in tmp_path.iterdir()] == ["2\n"]
