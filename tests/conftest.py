"""What cannot run here is skipped by name; test helpers are importable in spawned ranks too."""

from __future__ import annotations

import ctypes
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
# a shell starts `make test &` without Ctrl-C, and so would be what the tests start
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def messages() -> None:
    """Warnings go to stderr as those of a command do, whatever the test before made of the logger."""
    from megabert.common import logs

    logs.setup()


@pytest.fixture(autouse=True)
def freed_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a slow test has freed is returned to the system: glibc keeps up to 9 GB of the largest models, and later tests start
    ranks beside this process."""
    yield
    if request.node.get_closest_marker("slow") and sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Operations work on two threads, whatever OMP_NUM_THREADS says: `make test` gives each of its processes one."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def own_signals() -> Iterator[None]:
    """What the test makes of the signals that stop a run ends with it."""
    from megabert.distributed.signals import SIGNALS

    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def world() -> Iterator[Any]:
    """This process as a world of one rank."""
    from megabert.distributed import ranks

    yield ranks.init(ranks.discover({}))
    ranks.shutdown()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    missing = {
        "gpu": None if torch.cuda.is_available() else "no CUDA device on this machine",
        "slurm": None if shutil.which("sbatch") else "no SLURM on this machine (sbatch not found)",
    }
    for item in items:
        for name, reason in missing.items():
            if reason and item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))
