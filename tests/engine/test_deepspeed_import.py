"""DeepSpeed is loaded without what takes longer than itself, and what was kept from it can be loaded afterwards."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = """
import importlib, importlib.util, sys, torch
from megabert.distributed.ranks import World
from megabert.engine.steps import import_deepspeed
import_deepspeed(World(0, 0, 1, torch.device("cpu"), "gloo", "single"))
assert "deepspeed.runtime.zero.muon.muon_optimizer" in sys.modules
print(*(name for name in ("mlflow", "torch._inductor") if name in sys.modules))
compiler = importlib.import_module("deepspeed.runtime.compiler")
assert compiler.compile() is torch.compile
if importlib.util.find_spec("mlflow"):
    importlib.import_module("mlflow")
"""


def test_neither_mlflow_nor_the_compiler_is_loaded() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
