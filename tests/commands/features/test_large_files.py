"""Large files: what was stopped or killed goes on to the same bytes, and memory is flat."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megabert import hf as pretrained
from megabert.commands.features import __main__ as features
from megabert.commands.features.extraction import Extractor, encode
from tests.commands.features.test_features import TEXTS, command
from tests.conftest import ROOT
from tests.helpers import runs


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.make(tmp_path_factory.mktemp("model") / "run", "uncased", layers=4, max_positions=100)


@pytest.mark.parametrize("ending", [".npz", ".parquet", ".safetensors"])
@pytest.mark.parametrize("pool", ["none", "mean"])
def test_what_was_interrupted_goes_on_to_the_same_bytes(
    pool: str, ending: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 40 texts in parts of 16 tokens or one text, interrupted twice; no text is computed again whose part was whole."""
    lines, computed, enough = tmp_path / "lines.txt", 0, 10**9
    lines.write_text("".join(f"{text}\n" for text in TEXTS * 8))
    compute = Extractor._compute

    def counted(self: Extractor, job: Any) -> Any:
        nonlocal computed
        computed += len(job[1])
        if computed > enough:
            raise KeyboardInterrupt
        return compute(self, job)

    monkeypatch.setattr(Extractor, "_compute", counted)
    whole, output = tmp_path / f"whole{ending}", tmp_path / f"output{ending}"
    options = ["--pool", pool, "--batch-tokens", "2"]
    assert features.main(command(run, lines, whole, *options)) == 0
    assert computed == 40
    for enough in (16, 14, 10**9):
        computed = 0
        assert features.main(command(run, lines, output, *options)) == (130 if enough < 40 else 0)
        assert output.exists() == (enough == 10**9)
    assert computed <= 20 and output.read_bytes() == whole.read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {lines.name, whole.name, output.name}


def test_threads_are_as_before(run: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        encode(pretrained.load(run), TEXTS)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_a_killed_extraction_goes_on_to_the_same_bytes(run: Path, tmp_path: Path) -> None:
    """SIGKILL once a state is on the disk, while more is written."""
    (tmp_path / "lines.txt").write_text("".join(f"{text} {n}\n" for n in range(8_000) for text in TEXTS))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    args = ["--pool", "mean", "--batch-tokens", "256"]

    def start(output: str) -> subprocess.Popen[str]:
        argv = command(run, tmp_path / "lines.txt", tmp_path / output, *args)
        program = [sys.executable, "-m", "megabert.commands.features", *argv]
        return subprocess.Popen(program, env=environment, stdout=subprocess.PIPE, text=True)

    process, progress = start("killed.npz"), tmp_path / ".killed.npz.partial" / "progress.json"
    while not progress.exists():
        assert process.poll() is None, "finished before its first state; give it more texts"
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert not (tmp_path / "killed.npz").exists()
    for name in ("killed.npz", "whole.npz"):
        process = start(name)
        said = process.communicate()[0]
        assert process.returncode == 0 and ("goes on behind" in said) == (name == "killed.npz")
    assert (tmp_path / "killed.npz").read_bytes() == (tmp_path / "whole.npz").read_bytes()
    assert len(np.load(tmp_path / "whole.npz")["vectors"]) == 40_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["killed.npz", "lines.txt", "whole.npz"]


@pytest.mark.slow
def test_memory_does_not_grow_with_the_input(run: Path, tmp_path: Path) -> None:
    """260 MB of vectors more, once all threads are busy, take less than 25 MB of memory more."""
    program = (
        "import resource, sys\nfrom megabert.commands.features.__main__ import main\n"
        "for name in ('small', 'large'):\n"
        "    assert main([*sys.argv[1:], '--input', f'{name}.txt', '--output', f'{name}.npz']) == 0\n"
        "    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    for name, times in (("small", 1200), ("large", 3600)):
        (tmp_path / f"{name}.txt").write_text("".join(f"{text}\n" for text in TEXTS * times))
    args = ["--model", str(run), "--layers", "0,1,2,3,4", "--batch-tokens", "1024"]
    done = subprocess.run(
        [sys.executable, "-c", program, *args], capture_output=True, text=True, check=True, cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    before, after = (int(line) * 1024 for line in done.stdout.split("\n") if line.isdecimal())
    assert (tmp_path / "large.npz").stat().st_size > 390e6 and after - before < 25e6
