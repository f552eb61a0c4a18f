"""What ends a command decides whether it is started again."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megabert.common.errors import FAILED, USER_ERROR
from megabert.data.loader import Loader
from megabert.data.shards import Dataset
from megabert.distributed import session
from megabert.distributed.watchdog import Watchdog
from tests.helpers.rows import make_dataset, vocabulary


def test_a_loader_process_that_died_is_a_fault_of_the_machine(tmp_path: Path, capsys) -> None:
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


@pytest.mark.parametrize(("local_rank", "watched", "printed"), [(0, True, 1), (1, True, 0), (0, False, 0)])
def test_a_mistake_while_a_run_opens_is_printed_once_a_node(local_rank, watched, printed, tmp_path, capsys) -> None:
    def command(ranks: session.Session) -> int:
        ranks.world = replace(ranks.world, rank=8, local_rank=local_rank, size=16)
        if watched:
            ranks.watchdog = Watchdog(ranks.world, tmp_path, 0)
        raise ValueError("init_from=here: no such folder")

    assert session.run(command) == USER_ERROR
    assert capsys.readouterr().err.count("init_from=here: no such folder") == printed
