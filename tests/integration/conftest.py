"""One small real dataset a test session: Python's own documentation, built by the real command."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def command(*args: object, ranks: int = 0, timeout: int = 300, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs `python args…` (with `ranks`: through the deepspeed launcher) from the repository's root."""
    head = [sys.executable]
    if ranks:
        head = [
            str(Path(sys.executable).with_name("deepspeed")),
            "--num_gpus",
            str(ranks),
            "--master_port",
            str(free_port()),
        ]
    environment = os.environ | {"OMP_NUM_THREADS": "1" if ranks > 1 else "2"} | env
    return subprocess.run(
        head + [str(a) for a in args], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """About 600 KB of English: the topics of Python's language reference, one a document."""
    import re
    from pydoc_data.topics import topics

    folder = tmp_path_factory.mktemp("corpus")
    documents = [re.sub(r"[*`\\]+", "", text) for _, text in sorted(topics.items())]
    (folder / "topics.jsonl").write_text("".join(json.dumps({"text": d}) + "\n" for d in documents))
    return folder


@pytest.fixture(scope="session")
def dataset(corpus, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "topics"
    done = command(
        *("-m", "data_prep", "build", "--input", corpus, "--output", folder, "--seq-len", 64),
        *("--vocab-size", 2000, "--workers", 2, "--held-out", 0.05),
    )
    assert done.returncode == 0, done.stderr
    return folder
