"""Inference on the CPU: packed weights, and one batch a core.

A core that computes a batch of its own waits for no other core after every operation, keeps what it computes in its cache,
and gives the same values whatever the number of cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from megabert import ops as native
from megabert.model import Affine


def pack_weights(module: nn.Module) -> bool:
    """Make a module that will only be read from faster: its linear layers keep their weights packed, where they can be.

    To be called in eval mode, on the module's device and in its type; weights that change later are not seen. Whether it did.
    """
    linears = [m for m in module.modules() if isinstance(m, Affine)]
    able = bool(linears) and native.packs(linears[0].weight.device.type, linears[0].weight.dtype)
    for linear in linears if able else []:
        linear.packed = native.pack_weight(linear.weight)
    return able


def workers(device: torch.device) -> int:
    """Threads that compute a batch each: one a core, or one for a GPU."""
    return torch.get_num_threads() if device.type == "cpu" else 1


def one_thread() -> None:
    """What the calling thread computes is computed by it alone."""
    torch.set_num_threads(1)


@contextmanager
def threads_apart() -> Iterator[None]:
    """Threads may call `one_thread` in the block; behind it torch has as many as before, which it sets for the whole process."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)
