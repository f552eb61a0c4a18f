"""The GPU suite runs from end to end without a GPU: its stages, its file, and what it says when one fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megabert.model import ops

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(bool(ops.MISSING), reason=ops.MISSING or "-")


def suite(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/gpu_suite.py", "--device", "cpu", "--small", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.dist
@pytest.mark.slow
def test_a_small_run_on_the_cpu(corpus: Path, tmp_path: Path) -> None:
    target = tmp_path / "gpu.json"
    done = suite("--only", "tests", "ops", "step 128 ours", "--corpus", str(corpus), "--json", str(target))
    report = json.loads(target.read_text())
    assert done.returncode == 0, done.stdout + done.stderr + json.dumps(report["stages"], indent=1)[-3000:]
    assert set(report["stages"]) >= {"tests", "ops", "step 128 ours"}
    assert " passed" in report["stages"]["tests"]["output"]
    timed = {case["op"]: case for case in report["stages"]["ops"]["result"]["results"]}
    assert set(timed) >= {"mlm_loss", "softmax_mask", "attention", "bias_gelu", "dropout_add_layer_norm"}
    for case in timed.values():
        assert all(side["p50"] > 0 for side in case["seconds"].values())
        assert all(comparison["ratio"] > 0 for comparison in case["comparisons"])
    (step,) = report["steps"]
    assert step["what"] == "step 128 ours" and step["rows_per_sec"] > 0
    assert step["backends"]["layer"] == "native (asked for)"


def test_a_stage_that_fails_is_named(tmp_path: Path) -> None:
    target = tmp_path / "gpu.json"
    done = suite("--only", "data", "--corpus", str(tmp_path / "missing"), "--json", str(target))
    assert done.returncode == 1 and "error: failed: data seq128" in done.stderr
    assert "missing" in json.loads(target.read_text())["stages"]["data seq128"]["output"]


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    command = [sys.executable, "benchmarks/gpu_suite.py", "--json", str(tmp_path / "gpu.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "torch sees no CUDA device" in done.stderr
    assert not (tmp_path / "gpu.json").exists()
