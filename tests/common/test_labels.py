"""One ignore index, wherever it is compared with."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import torch.nn.functional as F

from megabert.common.labels import IGNORE

ROOT = Path(__file__).resolve().parents[2]


def test_torch_and_the_native_operation_ignore_the_same_label() -> None:
    header = (ROOT / "csrc" / "mlm_loss" / "options.h").read_text()
    assert re.findall(r"kIgnore = (-?\d+);", header) == [str(IGNORE)]
    assert inspect.signature(F.cross_entropy).parameters["ignore_index"].default == IGNORE
