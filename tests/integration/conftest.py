"""One small real dataset a test session: Python's own documentation, built by the real command."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import forked, once

ROOT = Path(__file__).resolve().parents[2]


def command(*args: object, ranks: int = 1, timeout: int = 300, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs `python args…` from the repository's root; a command of ours is forked where its imports are done, on `ranks`."""
    words = [str(word) for word in args]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | env
    if forked_as := _forked_as(words):
        return forked.run(forked_as, environment, timeout, ranks)
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout
    )


def _forked_as(words: list[str]) -> list[str]:
    """The arguments of `megabert` that stand for `python words…`; [] for anything else."""
    match words:
        case ["megabert/train.py", *rest]:
            return ["train", *rest]
        case ["-m", "megabert", *rest]:
            return rest
        case ["-m", "megabert.finetune", *rest]:
            return ["finetune", *rest]
        case ["-m", "data_prep", *rest]:
            return ["prep", *rest]
    return []


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 600 KB of English: the topics of Python's language reference, one a document."""

    def make(folder: Path) -> None:
        from pydoc_data.topics import topics

        documents = [re.sub(r"[*`\\]+", "", text) for _, text in sorted(topics.items())]
        folder.mkdir()
        (folder / "topics.jsonl").write_text("".join(json.dumps({"text": d}) + "\n" for d in documents))

    return once.folder(tmp_path_factory, "corpus", make)


@pytest.fixture(scope="session")
def dataset(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    def make(folder: Path) -> None:
        done = command(
            *("-m", "data_prep", "build", "--input", corpus, "--output", folder, "--seq-len", 64),
            *("--vocab-size", 2000, "--workers", 2, "--held-out", 0.05, "--nsp"),
        )
        assert done.returncode == 0, done.stderr

    return once.folder(tmp_path_factory, "topics", make)
