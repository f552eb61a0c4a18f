"""What ends a command decides whether it is started again."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from megabert.common.errors import FAILED
from megabert.data.loader import Loader
from megabert.data.shards import Dataset
from megabert.training import session
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
