"""Loader workers: they end with their process, whichever way they start, and signals to stop a run pass them by."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch

from megabert.data.loader import Loader
from megabert.data.shards import Dataset
from megabert.distributed.watchdog import is_alive
from tests.helpers.pythons import other_pythons
from tests.helpers.rows import make_dataset, vocabulary

ROOT = Path(__file__).resolve().parents[2]
start_methods = pytest.mark.parametrize("start_method", ["fork", "forkserver"])


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return Dataset(make_dataset(tmp_path_factory.mktemp("workers"), 180))


@pytest.fixture
def no_fork_server():
    """A process has one fork server, and one that another test left may still receive the signals."""
    forkserver._forkserver._stop()  # what Python's own tests stop it with


@pytest.mark.usefixtures("no_fork_server")
@start_methods
def test_workers_ignore_signals_to_stop_a_run(dataset, start_method):
    """Nor does the server that forkserver keeps for them."""
    loader = Loader(dataset, vocabulary(), global_batch=48, micro_batch=8, seed=1, workers=2, start_method=start_method)
    next(loader)
    parents = {Path(f"/proc/{worker.pid}/stat").read_text().split()[3] for worker in loader._workers}
    servers = {int(parent) for parent in parents} - {os.getpid()}
    assert len(servers) == (start_method == "forkserver")
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
        for pid in (*(worker.pid for worker in loader._workers), *servers):
            os.kill(pid, number)
    assert [next(loader).step for _ in range(20)] == list(range(1, 21))
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert all(map(is_alive, servers))
    loader.close()


@pytest.mark.parametrize("start_method", ["fork", "forkserver", "spawn"])
@pytest.mark.parametrize("python", [pytest.param(sys.executable, id="this"), *other_pythons()])
def test_workers_end_with_a_killed_process(dataset, tmp_path, python, start_method):
    """On every Python of the machine; what they made before is what a loader without workers makes."""
    with open(tmp_path / "out", "w") as out, open(tmp_path / "err", "w") as err:
        done = subprocess.run(
            [python, "-m", "tests.helpers.orphans", str(dataset.folder), start_method],
            cwd=ROOT,
            stdout=out,
            stderr=err,  # files: a pipe would end when the workers do
            timeout=120,
        )
    assert done.returncode == -signal.SIGKILL, (tmp_path / "err").read_text()
    first, *batches = (tmp_path / "out").read_text().splitlines()
    workers = [int(pid) for pid in first.split()]
    assert len(workers) == 2
    deadline = time.monotonic() + 3  # torch's own look at its parent comes every 5 s
    while any(map(is_alive, workers)):
        assert time.monotonic() < deadline, "loader workers outlive their process"
        time.sleep(0.05)
    loader = Loader(dataset, vocabulary(), global_batch=48, micro_batch=8, seed=1)
    assert batches == [str(next(loader).batches[0].input_ids.tolist()) for _ in range(3)]


@start_methods
def test_close_ends_workers_and_keeps_the_global_generator(dataset, start_method):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    loader = Loader(dataset, vocabulary(), global_batch=48, micro_batch=8, seed=1, workers=2, start_method=start_method)
    workers = list(loader._workers)
    next(loader)
    assert torch.equal(torch.get_rng_state(), before), "the model's dropout must not depend on the loader"
    assert all(w.is_alive() for w in workers)
    loader.close()
    for worker in workers:
        worker.join(5)
    assert not any(w.is_alive() for w in workers) and next(loader, None) is None
