"""Updates of a run are repeated, also where its schedule was extended."""

from __future__ import annotations

from pathlib import Path

import pytest

from megabert import train
from megabert.commands import replay
from tests.test_held_out_by_dataset import SMALL, random_rows


def test_an_extended_run_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str], own_signals: None) -> None:
    data, run = str(random_rows(tmp_path / "data", 40, seed=1)), str(tmp_path / "run")
    words = ["--config", "tiny", "--data", data, "--run", run, *SMALL, "checkpoint.interval=1", "checkpoint.keep=5"]
    assert train.main(words) == 0
    assert train.main([*words, "--extend", "schedule.total_steps=3"]) == 0
    assert replay.main([run, "--from", "2", "--to", "3"]) == 0
    assert "digests of weights of steps 3 to 3 are equal bit for bit" in capsys.readouterr().out
    assert replay.main([run, "--from", "1", "--to", "3"]) == 2
    said = "--from 1 --to 3: the configuration changed at step 2; replay up to it, or from it on"
    assert said in capsys.readouterr().err
