"""What every rank of a test needs, imported once by the server that the ranks are forked from."""

from __future__ import annotations

import os

# Read when the libraries load. One thread a rank: several ranks share the machine.
os.environ.update(
    CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1"
)

import deepspeed  # noqa: F401
import pytest  # noqa: F401
import torch  # noqa: F401

import megabert.training.pretraining  # noqa: F401
from megabert.model import ops  # noqa: F401
