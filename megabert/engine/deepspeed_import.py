"""DeepSpeed without what it prints, and without what it loads or compiles for parts that nothing here uses."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from megabert.distributed.process_group import World


def quiet() -> contextlib.redirect_stdout[io.StringIO]:
    """Hides what DeepSpeed prints past its own logger; errors are exceptions and come through."""
    return contextlib.redirect_stdout(io.StringIO())


def import_deepspeed(world: World) -> Any:
    """DeepSpeed without its remarks, and without what it would load or compile for parts that nothing here uses.

    On the CPU its shared-memory collective, which only inference uses, takes a minute to compile on a fresh machine. MLflow
    is for its search of settings, takes longer to load than all of DeepSpeed, and starts a thread. Its own Muon is looked at
    wherever ZeRO starts, and decorated for torch.compile, whose compiler is then loaded.
    """
    os.environ.setdefault("DS_ACCELERATOR", world.device.type)
    with hidden("mlflow"):
        import deepspeed

    communication = importlib.import_module("deepspeed.comm.torch")
    compiler = importlib.import_module("deepspeed.runtime.compiler")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    setattr(communication, "build_shm_op", lambda: None)  # noqa: B010
    with replaced(compiler, "compile", lambda *_, **__: lambda function: function):
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    return deepspeed


@contextlib.contextmanager
def hidden(name: str) -> Iterator[None]:
    """A package that is not loaded yet can't be imported inside."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]


@contextlib.contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, the module has another value by this name."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)
