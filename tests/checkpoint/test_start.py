"""Weights from elsewhere become a whole checkpoint of step 0, and the newest step is known without a lock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megabert.checkpoint import Checkpoints, load_weights, newest_step, write_start
from megabert.config import CheckpointConfig
from megabert.distributed.process_group import World
from tests.checkpoint.test_store import WEIGHTS_FILE
from tests.helpers import tiny

ALONE = World(0, 0, 1, torch.device("cpu"), "gloo", "single")


def start(run: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    cfg = tiny.config()
    weights = tiny.model(cfg).state_dict()
    state = {"config": cfg.model_dump(), "dataset": "none", "tokenizer": "t" * 64}
    assert write_start(run, weights, state) == run / "checkpoints" / "step-00000000"
    return weights, state


def test_a_start_is_a_checkpoint_of_step_0(tmp_path: Path) -> None:
    weights, state = start(tmp_path)
    found, saved = load_weights(tmp_path)
    assert found.keys() == weights.keys() and all(found[name].equal(weights[name]) for name in weights)
    assert saved == state | {"step": 0, "world_size": 1}
    assert Checkpoints(tmp_path, ALONE).latest() == tmp_path / "checkpoints" / "step-00000000"
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["pointer.json", "step-00000000"]


def test_a_start_is_verified_like_any_checkpoint(tmp_path: Path) -> None:
    start(tmp_path)
    with (tmp_path / "checkpoints" / "step-00000000" / WEIGHTS_FILE).open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(ValueError, match="no checkpoint is whole"):
        load_weights(tmp_path)


def test_the_newest_step_is_the_committed_one(tmp_path: Path) -> None:
    assert newest_step(tmp_path) is None and newest_step(tmp_path / "nowhere") is None
    start(tmp_path)
    (tmp_path / "checkpoints" / ".saving-00000009").mkdir()
    assert newest_step(tmp_path) == 0
    saving = Checkpoints(tmp_path, ALONE, CheckpointConfig(asynchronous=False))
    from tests.checkpoint.test_store import FakeEngine

    saving.save(FakeEngine(), {"step": 12, "config": {}})  # type: ignore[arg-type]
    assert newest_step(tmp_path) == 12
    (tmp_path / "checkpoints" / "pointer.json").write_text("{")
    assert newest_step(tmp_path) is None
