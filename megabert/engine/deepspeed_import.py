"""DeepSpeed without what it prints and without the compile of an operation that nothing here uses."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import warnings
from typing import Any

from megabert.distributed.process_group import World


def quiet() -> contextlib.redirect_stdout[io.StringIO]:
    """Hides what DeepSpeed prints past its own logger; errors are exceptions and come through."""
    return contextlib.redirect_stdout(io.StringIO())


def import_deepspeed(world: World) -> Any:
    """DeepSpeed without its remarks, and without the compile of its shared-memory collective on the CPU: a minute on a
    fresh machine for an operation that only inference uses."""
    os.environ.setdefault("DS_ACCELERATOR", world.device.type)
    import deepspeed

    communication = importlib.import_module("deepspeed.comm.torch")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    setattr(communication, "build_shm_op", lambda: None)  # noqa: B010
    return deepspeed
