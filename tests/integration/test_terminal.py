"""Commands at a terminal: Ctrl-C with and without `| tee`, a reader that ends first, a terminal that is closed."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.survival.life import in_sessions
from tests.integration.conftest import ROOT, SMALL, output_of, saved_step, train

# Key that the line discipline turns into SIGINT for the whole foreground group.
CTRL_C = b"\x03"
# The shell: leader of the terminal's session, which starts the job as the foreground group, passes SIGHUP on to it, waits, and writes
# the exit codes to a file. Arguments: the file, where stderr goes ("terminal" or "pipe"), the command, the reader or "".
SHELL = """
import json, os, signal, subprocess, sys
codes, errors, command, reader = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4])
signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # or setting the foreground group would stop this process
output = subprocess.PIPE if reader else None
job = [subprocess.Popen(command, process_group=0, stdout=output, stderr=output and errors == "pipe" and subprocess.STDOUT or None)]
group = job[0].pid
signal.signal(signal.SIGHUP, lambda *_: os.killpg(group, signal.SIGHUP))
os.tcsetpgrp(0, group)
if reader:
    job.append(subprocess.Popen(reader, process_group=group, stdin=job[0].stdout))
    job[0].stdout.close()
text = json.dumps([process.wait() for process in job])
open(codes + ".new", "w").write(text)
os.rename(codes + ".new", codes)
"""


class Terminal:
    """`program words… [| reader]` at a terminal. `shown` is what the terminal has shown so far."""

    def __init__(
        self,
        folder: Path,
        words: Sequence[object],
        reader: str = "",
        all_output: bool = False,
        program: str = sys.executable,
    ) -> None:
        """`all_output`: `2>&1` before the pipe. The exit codes are written to `folder`."""
        self._codes, self.shown = folder / "codes.json", ""
        command = json.dumps([program, *map(str, words)])
        arguments = [str(self._codes), "pipe" if all_output else "terminal", command, json.dumps(reader.split())]
        self.pid, self._master = pty.fork()
        if not self.pid:
            os.chdir(ROOT)
            os.environ.update(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
            os.environ.pop("PYTHONUNBUFFERED", None)
            os.execv(sys.executable, [sys.executable, "-c", SHELL, *arguments])

    def wait_for(self, text: str, timeout: float = 120) -> None:
        """Read until the terminal has shown `text`."""
        end = time.monotonic() + timeout
        while text not in self.shown:
            assert time.monotonic() < end, f"no {text!r} in {timeout} s:\n{self.shown}"
            self._read(0.1)

    def press(self, key: bytes) -> None:
        os.write(self._master, key)

    def close(self) -> None:
        """Close the terminal, as by its window's button."""
        os.close(self._master)
        self._master = -1

    def codes(self, timeout: float = 120) -> list[int]:
        """Exit codes of the command and of its reader, negative for a signal."""
        end = time.monotonic() + timeout
        try:
            while not self._codes.exists():
                assert time.monotonic() < end, f"still running after {timeout} s:\n{self.shown}"
                self._read(0.1)
        finally:
            self._kill()
        while self._read(5.0):  # until no process has the terminal open
            pass
        codes: list[int] = json.loads(self._codes.read_text())
        return codes

    def _read(self, seconds: float) -> bool:
        """Append to `shown` what comes within some seconds; whether anything did."""
        if self._master < 0:
            time.sleep(seconds)
            return False
        if not select.select([self._master], [], [], seconds)[0]:
            return False
        try:
            data = os.read(self._master, 1 << 16)
        except OSError:  # EIO: every process at the terminal has ended
            data = b""
        self.shown += data.decode(errors="replace").replace("\r\n", "\n")
        return bool(data)

    def _kill(self) -> None:
        """End what is left of the session, and its shell."""
        for pid in in_sessions({self.pid}):
            if pid != self.pid and not self._codes.exists():
                os.kill(pid, signal.SIGKILL)
        if not self._codes.exists():
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


ENDLESS = (*SMALL[3:], "schedule.total_steps=100000")
NOTICE = "stopping: the run is saved after this update; Ctrl-C again ends it at once"
STOPPED = "stopped: saved at step {}; the same command resumes"
BROKEN = "error: Broken pipe: stdout or stderr is closed; saved at step {}; the same command resumes"
HOW = {  # the reader, and exit codes; tee ends by the signal that it gets too
    "alone": ("", [85]),
    "pipe": ("tee {}/log", [85, -2]),
    "reader": ("grep -q loss", [4, 0]),
    "closed": ("", [85]),
}


def end(terminal: Terminal, how: str, sign: str = "  lr ") -> None:
    """Press Ctrl-C, or close the terminal, once it has shown a sign of work; a reader ends by itself."""
    if how != "reader":
        terminal.wait_for(sign)
    if how == "closed":
        terminal.close()
    elif how != "reader":
        terminal.press(CTRL_C)


@pytest.fixture(scope="module")
def trained(dataset, tmp_path_factory):
    """A run of two updates, and a task of two labels as GLUE's SST-2."""
    folder = tmp_path_factory.mktemp("trained")
    train(dataset, folder / "run", "--stop-after", 2)
    (folder / "glue/SST-2").mkdir(parents=True)
    rows = [f"the film number {i} is {('bad', 'good')[i % 2]}\t{i % 2}\n" for i in range(64)]
    for name in ("train", "dev"):
        (folder / f"glue/SST-2/{name}.tsv").write_text("".join(["sentence\tlabel\n", *rows]))
    return folder


def words_of(name: str, trained: Path, dataset: Path, output: Path) -> list[object]:
    """A command that trains longer than a test waits."""
    if name == "train":
        return [name, "--config", "tiny", "--data", dataset, "--run", output, *SMALL[:3], *ENDLESS]
    model = [name, "--model", trained / "run"]
    if name == "distill":
        return [*model, "--layers", 1, "--data", dataset, "--run", output, *ENDLESS]
    tuned = ["--output", output, "--lr", "1e-4", "--epochs", 9999, "--log-interval", 1, "--seeds", 1]
    if name == "glue":
        return [*model, "--data", trained / "glue", *tuned]
    files = [word for split in ("train", "dev") for word in (f"--{split}", trained / f"glue/SST-2/{split}.tsv")]
    return [*model, "--task", "sst2", *files, *tuned]


COMMANDS = [(name, how) for name in ("finetune", "glue", "distill") for how in ("pipe", "reader", "closed")]
COMMANDS += [("train", how) for how in HOW]


@pytest.mark.parametrize(
    ("name", "how"),
    [pytest.param(*case, marks=() if case == ("train", "pipe") else pytest.mark.slow) for case in COMMANDS],
)
def test_training_saves(name, how, dataset, tmp_path, request):
    trained = tmp_path if name == "train" else request.getfixturevalue("trained")
    output, (reader, codes) = tmp_path / "out", HOW[how]
    words = ["-m", "megabert", *words_of(name, trained, dataset, output)]
    terminal = Terminal(tmp_path, words, reader.format(tmp_path), all_output=how == "pipe")
    end(terminal, how)
    assert terminal.codes() == codes, terminal.shown
    (pointer,) = output.rglob("pointer.json")
    step, lines = saved_step(pointer.parents[1]), terminal.shown.splitlines()
    assert step >= 1 and "Traceback" not in terminal.shown
    if how == "reader":
        assert lines[0 if name == "train" else -1 :] == [BROKEN.format(step)]
    if how == "alone":
        assert lines[-1] == STOPPED.format(step) and NOTICE in lines


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("how", ["alone", "pipe", "closed"])
def test_keep_shields_a_launcher_from_ctrl_c(how, dataset, tmp_path):
    """torchrun would end its ranks after 30 s."""
    reader, codes = HOW[how]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2, "--", "megabert/train.py"]
    words = [*torchrun, *words_of("train", tmp_path, dataset, tmp_path / "run")[1:]]
    terminal = Terminal(tmp_path, words, reader.format(tmp_path), all_output=True, program="launch/keep.sh")
    end(terminal, how)
    assert terminal.codes() == codes, terminal.shown
    assert saved_step(tmp_path / "run") >= 1
    assert "death signal" not in terminal.shown and "KeyboardInterrupt" not in terminal.shown


@pytest.mark.slow
@pytest.mark.parametrize(("how", "codes"), [("alone", [130]), ("pipe", [130, -2]), ("closed", [-1])])
def test_a_build_ends_and_resumes(how, codes, tmp_path):
    """With its documented code, though the bar is drawn where nobody reads."""
    out, corpus = tmp_path / "out", tmp_path / "corpus.txt"
    text = (
        "The quick brown fox {0} jumps over the lazy dog near the river bank.\nShe sells {0} shells by the shore.\n\n"
    )
    corpus.write_text("".join(text.format(n) for n in range(20_000)))
    options = ("--seq-len", 64, "--workers", 2, "--vocab-size", 300)
    words = ["prep", "build", "--input", corpus, "--output", out, *options]
    terminal = Terminal(tmp_path, ["-m", "megabert", *words], HOW[how][0].format(tmp_path), all_output=True)
    end(terminal, how, "sample ")
    assert terminal.codes() == codes, terminal.shown
    if how == "alone":
        kept = "error: interrupted: finished parts are kept, the same command resumes"
        assert terminal.shown.splitlines()[-1] == kept
    assert "Traceback" not in terminal.shown and not (out / "manifest.json").exists()
    output_of(*words)
    assert not (out / ".work").exists()
