"""Ctrl-C and TERM, which reach a command and all its workers: one line or none, never a traceback, and the same command resumes."""

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from data_prep.executor import pool
from tests.helpers import wordpiece
from tests.helpers.prep_reading import write
from tests.helpers.waiting import wait_until

ENTRY = "import sys; from megabert.__main__ import main; print(flush=True); sys.exit(main())"
KEPT = "error: interrupted: finished parts are kept, the same command resumes"
SENTENCE = "The quick brown fox {} jumps over the lazy dog near the river bank. She sells sea shells by the shore.\n"


def write_corpus(folder: Path, files: int, lines: int) -> Path:
    for file in range(files):
        text = (SENTENCE.format(f"{file} {line}") + "\n" * (line % 10 == 0) for line in range(lines))
        write(folder / f"{file:02}.txt", "".join(text))
    return folder


def build(corpus: Path, out: Path, *tokenizer: str) -> list[str]:
    options = ("--seq-len", "64", "--workers", "2", *tokenizer)
    return ["prep", "build", "--input", str(corpus), "--output", str(out), *options]


def started(command: list[str]) -> subprocess.Popen[str]:
    """A command in its own process group, after the imports with which every command starts."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", ENTRY, *command], start_new_session=True, text=True, **pipes)
    process.stdout.readline()
    return process


def send_after(command: list[str], seconds: float, number: int) -> None:
    """Send a signal to the command's group after some seconds, and check how it ends."""
    process = started(command)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, number)
    _, shown = process.communicate(timeout=60)
    assert "Traceback" not in shown and "Exception" not in shown, f"{seconds:.2f} s: {shown}"
    if process.returncode and number == signal.SIGINT:
        last = shown.strip().splitlines()[-1]
        assert process.returncode == 130 and last.startswith("error: interrupted"), f"{seconds:.2f} s: {shown}"
        assert shown.count("error:") == 1, shown
    else:
        assert process.returncode in (0, -number) and "error:" not in shown, f"{seconds:.2f} s: {shown}"


def test_ctrl_c_at_exit_leaves_the_code() -> None:
    late = "import atexit, os, signal, sys; atexit.register(os.kill, os.getpid(), signal.SIGINT)\n"
    code = late + "from megabert.__main__ import main; sys.exit(main(['prep', 'verify', 'nowhere']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and "Interrupt" not in done.stderr and done.stderr.startswith("error: ")


@pytest.mark.parametrize("send", [os.killpg, os.kill], ids=["group", "parent alone"])
def test_ctrl_c_ends_a_build_with_one_line(send, tmp_path) -> None:
    # of two workers one computes and the other waits
    out = tmp_path / "out"
    command = build(write_corpus(tmp_path / "corpus", 1, 20_000), out, "--vocab-size", "300")
    process = started(command)
    wait_until(lambda: process.poll() is not None or any(out.rglob("sample-*")), 60)
    send(process.pid, signal.SIGINT)
    _, shown = process.communicate(timeout=60)
    assert process.returncode == 130 and os.listdir(out) == [".work"], shown
    assert shown.strip().splitlines()[-1] == KEPT
    assert "Traceback" not in shown and shown.count("error:") == 1


def end_worker(item: int) -> int:
    if item:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    return item


def test_interrupt_and_dead_workers_leave_no_traceback(monkeypatch) -> None:
    """Items wait while the build is interrupted and its workers die."""
    shown: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", shown.append)
    with pytest.raises(KeyboardInterrupt), pool.opened(2) as executor:
        executor.map(end_worker, range(50), Mock(side_effect=KeyboardInterrupt))
    assert not shown


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
@pytest.mark.parametrize("instants", [pytest.param(2, id="some"), pytest.param(30, id="many", marks=pytest.mark.slow)])
def test_signal_at_any_instant_leaves_no_traceback(number: int, instants: int, tmp_path) -> None:
    # two tasks of reading, or four
    corpus, out = write_corpus(tmp_path / "corpus", 10 * min(instants, 4), 3500), tmp_path / "out"
    command = build(corpus, out, "--tokenizer", str(wordpiece.write(tmp_path / "vocab.txt")))
    longest = 3.0  # of a build on a quiet machine
    draw = random.Random(number)
    for instant in range(instants):
        shutil.rmtree(out, ignore_errors=True)
        send_after(command, draw.uniform(instant, instant + 1) / instants * longest, number)
    again = started(command)
    shown = again.communicate(timeout=120)
    assert again.returncode == 0, shown
    for _ in range(instants):
        send_after(["prep", "verify", "--workers", "2", str(out)], draw.uniform(0.05, 1.0), number)


def test_an_interrupt_of_another_thread_waits_too() -> None:
    """That of a library, which has not blocked it."""
    ended, reached = threading.Event(), []
    thread = threading.Thread(target=ended.wait)
    thread.start()
    with pytest.raises(KeyboardInterrupt), pool.interrupts_blocked():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        reached.append("the end")
    ended.set()
    thread.join()
    assert reached == ["the end"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler
