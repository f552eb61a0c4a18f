"""Every example runs as it is, on a small dataset, and does what its first line says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = "model.hidden=32 schedule.total_steps=8 schedule.warmup_steps=2 log.interval=4 eval.rows=64 batch.global_size=32"


def run(*command: object, **env: str) -> str:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "OMP_NUM_THREADS": "2"} | env
    done = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_every_example_is_run_here() -> None:
    own = Path(__file__).read_text()
    for path in sorted((ROOT / "examples").iterdir()):
        assert path.suffix not in (".py", ".sh") or f'"examples/{path.name}"' in own, path.name


def test_read_shards(dataset) -> None:
    shown = run(sys.executable, "examples/read_shards.py", dataset)
    rows = re.search(r"([\d,]+) rows of 64 tokens", shown)
    assert rows and int(rows[1].replace(",", "")) > 500, shown
    assert re.search(r"input_ids +int32 +\[4, 64\]", shown)
    assert shown.count("->") == 1 + shown.count("' ->") + shown.count("[MASK] ->"), shown
    assert shown.count("[MASK] ->") >= 2, "of nine or ten predictions about eight are shown as [MASK]"


@pytest.mark.slow
def test_train_loop(dataset) -> None:
    shown = run(sys.executable, "examples/train_loop.py", dataset, 20)
    losses = [float(loss) for loss in re.findall(r"update +\d+  loss (\d+\.\d+)", shown)]
    assert len(losses) == 3 and losses[-1] < losses[0] - 0.8, losses


@pytest.mark.dist
def test_own_text(corpus, tmp_path) -> None:
    sizes = {"VOCAB": "600", "SEQ_LEN": "64", "EXTRA": SMALL}
    shown = run("examples/own_text.sh", tmp_path / "out", corpus, **sizes)
    assert '"step": 8' in shown
    vectors = np.load(tmp_path / "out/vectors.npz")
    assert len(vectors.files) >= 1 and any(32 in vectors[name].shape for name in vectors.files)
    assert (tmp_path / "out/hf/model.safetensors").is_file()
