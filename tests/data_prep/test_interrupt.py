"""Ctrl-C, which reaches a build and all its workers: one line, and the same command resumes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path


def build(corpus: Path, out: Path) -> list[str]:
    sizes = ("--seq-len", "64", "--vocab-size", "300", "--workers", "2")
    return [sys.executable, "-m", "megabert", "prep", "build", "--input", str(corpus), "--output", str(out), *sizes]


def test_ctrl_c_ends_a_build_with_one_line(tmp_path) -> None:
    corpus, out = tmp_path / "corpus", tmp_path / "out"
    corpus.mkdir()
    text = "The quick brown fox jumps over the lazy dog near the river bank. She sells sea shells by the shore.\n"
    # of two workers one computes and the other waits
    (corpus / "one.txt").write_text("".join(text.replace("fox", f"fox {i}") for i in range(80_000)))
    # these tests may run in the background of a shell, which ignores SIGINT there
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(
        build(corpus, out), start_new_session=True, stderr=subprocess.PIPE, text=True, preexec_fn=heed
    )
    end = time.monotonic() + 60
    while process.poll() is None and not list(out.rglob("sample-*")) and time.monotonic() < end:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    _, shown = process.communicate(timeout=60)
    assert process.returncode == 130, shown
    assert shown.strip().splitlines()[-1] == "error: interrupted: finished parts are kept, the same command resumes"
    assert "Traceback" not in shown and shown.count("error:") == 1
