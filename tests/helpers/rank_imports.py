"""What every rank of a test needs, imported once by the server that the ranks are forked from."""

from __future__ import annotations

import importlib
import os
import sys

# Read when the libraries load. One thread a rank: several ranks share the machine.
os.environ.update(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
sys.modules["mlflow"] = None  # type: ignore[assignment]  # where it is installed DeepSpeed imports it, and it starts a thread

for name in ("deepspeed", "megabert.open_run", "megabert.ops", "pytest"):
    importlib.import_module(name)
