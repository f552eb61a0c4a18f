"""What ends a command decides whether it is started again."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megabert import train
from megabert.checkpoint import newest_step, run_lock
from megabert.common.errors import FAILED, OK, USER_ERROR
from megabert.data.loader import Loader
from megabert.data.shards import Dataset
from megabert.distributed import session
from tests.helpers.forked import ROOT, environments
from tests.helpers.job import SMALL
from tests.helpers.ranks import CONTEXT
from tests.helpers.rows import make_dataset, vocabulary


def test_dead_loader_process_is_a_fault(tmp_path: Path, capsys) -> None:
    """As by SIGBUS, when a mapped file cannot be read; torch has a RuntimeError for it."""

    def command(ranks: session.Session) -> int:
        dataset = Dataset(make_dataset(tmp_path, 64))
        loader = Loader(dataset, vocabulary(), global_batch=8, micro_batch=8, seed=1, workers=1)
        next(loader)
        os.kill(loader._workers[0].pid, signal.SIGKILL)
        try:
            time.sleep(20)
        finally:
            loader.close()
        raise AssertionError("not noticed")

    assert session.run(command) == FAILED
    assert "error: a loader process died: DataLoader worker" in capsys.readouterr().err


def test_a_process_trains_twice(tmp_path: Path, own_signals: None) -> None:
    """As in a notebook: the second run starts, and Ctrl-C afterwards is the program's again."""
    data, short = str(ROOT / "tests/data/golden/dataset"), ("schedule.total_steps=2", "schedule.warmup_steps=1")
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    for run in ("first", "second"):
        assert train.main(["--config", "tiny", "--data", data, "--run", str(tmp_path / run), *SMALL, *short]) == OK
        assert newest_step(tmp_path / run) == 2
        assert not dist.is_initialized()
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_open_run_is_refused(tmp_path: Path, own_signals: None, capsys) -> None:
    """It would take process group, signal handlers and run lock from the first one."""

    def command(ranks: session.Session) -> int:
        ranks.join()
        run_lock.acquire(tmp_path, ranks.world)
        handler = signal.getsignal(signal.SIGINT)
        with pytest.raises(ValueError, match="another run is open in this process"):
            session.Session()
        assert session.run(lambda inner: OK, run_lock.release) == USER_ERROR
        assert dist.is_initialized() and signal.getsignal(signal.SIGINT) is handler
        assert '"released": false' in next((tmp_path / "lock").iterdir()).read_text()
        return OK

    for _ in range(2):
        assert session.run(command, run_lock.release) == OK
    assert "error: another run is open in this process" in capsys.readouterr().err


@pytest.mark.parametrize(("local_rank", "joins", "printed"), [(0, True, 1), (1, True, 0), (0, False, 0)])
def test_mistake_at_the_opening_is_printed_once_a_node(local_rank, joins, printed, capsys) -> None:
    def command(ranks: session.Session) -> int:
        ranks.world = replace(ranks.world, rank=8, local_rank=local_rank, size=16)
        ranks.joins = joins
        raise ValueError("init_from=here: no such folder")

    assert session.run(command) == USER_ERROR
    assert capsys.readouterr().err.count("init_from=here: no such folder") == printed


def test_full_memory_of_the_cpu_is_named(capsys) -> None:
    for allocate in (lambda ranks: bytearray(1 << 60), lambda ranks: torch.empty(1 << 58)):
        assert session.run(allocate) == FAILED
        assert "error: rank 0 is out of memory; set a smaller batch.micro_size: " in capsys.readouterr().err


def one_of_two_ranks(rank: int, environment: dict[str, str], folder: Path) -> None:
    """Rank 1 runs out of memory while rank 0 waits as in a collective of NCCL's, whose group is not left before it ends."""
    os.environ.update(environment, MEGABERT_EXIT_DIR=str(folder))
    os.dup2(os.open(folder / f"stderr-{rank}", os.O_CREAT | os.O_WRONLY), 2)
    dist.destroy_process_group = lambda: time.sleep(600)

    def command(ranks: session.Session) -> int:
        ranks.join()
        ranks.watch(folder, 600)
        if rank == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the documentation.")
        time.sleep(600)
        return 0

    sys.exit(session.run(command))


def test_failing_rank_ends_the_job_at_once(tmp_path: Path) -> None:
    places = [*enumerate(environments(2))]
    ranks = [CONTEXT.Process(target=one_of_two_ranks, args=(*place, tmp_path), daemon=True) for place in places]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(40)
        process.kill()
    assert [process.exitcode for process in ranks] == [FAILED, FAILED]
    said = "rank 1 is out of memory; set a smaller batch.micro_size: CUDA out of memory"
    assert said in (tmp_path / "stderr-1").read_text()
    assert "error: rank 1 (host " in (tmp_path / "stderr-0").read_text()
