"""Random-number state of one rank as JSON: torch, NumPy, Python and the rank's CUDA device; nothing is pickled."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def state(device: torch.device) -> dict[str, Any]:
    """All generators that training draws from, as JSON values."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    version, internal, gauss_next = random.getstate()
    found = {
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "numpy": [kind, np.asarray(keys).tolist(), int(position), int(has_gauss), float(gauss)],
        "python": [version, list(internal), gauss_next],
    }
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device).numpy().tobytes().hex()
    return found


def restore(found: dict[str, Any], device: torch.device) -> None:
    """Put every generator back to what `state` gave."""
    torch.set_rng_state(_tensor(found["torch"]))
    kind, keys, *rest = found["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    version, internal, gauss_next = found["python"]
    random.setstate((version, tuple(internal), gauss_next))
    if "cuda" in found and device.type == "cuda":
        torch.cuda.set_rng_state(_tensor(found["cuda"]), device)


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
