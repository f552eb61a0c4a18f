"""Starts: weights from elsewhere as a checkpoint of step 0, and what a resume may change."""

from __future__ import annotations

import json
import os
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import torch

from megabert.checkpoint import (
    Checkpoints,
    check_compatible,
    drop_incomparable,
    format,
    load_weights,
    log_changes,
    newest_step,
    store,
    write_start,
)
from megabert.config import from_dict, replace
from tests.checkpoint.test_store import WEIGHTS_FILE, saved_run, state, steps
from tests.helpers import tiny
from tests.helpers.simulated_ranks import ALONE


def start(run: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    cfg = tiny.config()
    weights = tiny.model(cfg).state_dict()
    start_state = {"config": cfg.model_dump(), "dataset": "none", "tokenizer": "t" * 64}
    write_start(run, weights, start_state)
    return weights, start_state


def test_a_start_is_a_verified_checkpoint_of_step_0(tmp_path: Path) -> None:
    weights, start_state = start(tmp_path)
    found, saved = load_weights(tmp_path)
    assert found.keys() == weights.keys() and all(found[name].equal(weights[name]) for name in weights)
    assert saved == start_state | {"step": 0, "world_size": 1}
    assert Checkpoints(tmp_path, ALONE).latest() == tmp_path / "checkpoints" / "step-00000000"
    assert steps(tmp_path) == [0]
    os.truncate(tmp_path / "checkpoints" / "step-00000000" / WEIGHTS_FILE, 1000)
    with pytest.raises(ValueError, match="no usable checkpoint"):
        load_weights(tmp_path)


def test_the_newest_step_is_the_committed_one(tmp_path: Path) -> None:
    assert newest_step(tmp_path) is None and newest_step(tmp_path / "nowhere") is None
    start(tmp_path)
    (tmp_path / "checkpoints" / ".saving-00000009").mkdir()
    assert newest_step(tmp_path) == 0
    for name in (
        ".config.json.1a2b3c4d.tmp",
        ".vocab.txt.1a2b3c4d.tmp",
        ".notes.tmp",
    ):  # of a killed start, and a user's
        (tmp_path / name).write_text("half")
    saved_run(tmp_path, (12,))
    assert newest_step(tmp_path) == 12 and [path.name for path in tmp_path.glob(".*")] == [".notes.tmp"]
    (tmp_path / "checkpoints" / "pointer.json").write_text("{")
    assert newest_step(tmp_path) is None


FIXED = [("model.layers", 3), ("batch.global_size", 16), ("precision", "bf16"), ("optimizer.name", "lamb"), ("seed", 1)]
FIXED += [("data.masking.strategy", "causal"), ("data.masking.strategy", "token")]  # from masked to causal and back
FIXED += [("dataset", "e" * 64), ("tokenizer", "u" * 64)]


@pytest.mark.parametrize(("key", "value"), FIXED)
def test_a_resume_on_something_else_names_the_field(key: str, value: Any) -> None:
    saved = state(1, tiny.config(data__masking__strategy="causal" if value == "token" else "token", model__nsp=False))
    check_compatible(saved, saved)
    current = json.loads(json.dumps(saved))
    *sections, leaf = key.split(".")
    node = reduce(getitem, sections, current if key in current else current["config"])
    old, node[leaf] = node[leaf], value
    with pytest.raises(ValueError, match="cannot resume") as caught:
        check_compatible(saved, current)
    name = {"dataset": "dataset fingerprint", "tokenizer": "tokenizer SHA-256"}.get(key, key)
    assert all(text in str(caught.value) for text in (name, repr(value), repr(old)))


def test_dropout_schedule_and_micro_batch_may_change_on_a_resume() -> None:
    free = {"batch__micro_size": 4, "model__dropout": 0.2, "schedule__total_steps": 20000, "optimizer__lr": 1.0}
    free |= {"checkpoint__keep": 9, "model__zero_init": True, "model__frequency_bias": True}
    masking = (("data__masking__strategy", strategy) for strategy in ("word", "span"))
    for key, value in (*free.items(), *masking):
        check_compatible(state(1, tiny.config()), state(5, tiny.config(**{key: value})))


def test_changes_of_phases_are_named_by_key(caplog: pytest.LogCaptureFixture) -> None:
    last = {"share": 0.5, "optimizer": {"lr": 0.1}}
    changed = {"share": 0.5, "optimizer": {"lr": 0.2}, "data": {"masking": {"rate": 0.4, "strategy": "word"}}}
    before, after = (tiny.config(phases=[{"share": 0.5}, phase], model__nsp=False) for phase in (last, changed))
    log_changes(state(1, before) | {"tokens": 0}, after)
    changes = {"optimizer.lr": "0.1 and is 0.2", "data.masking.rate": "None and is 0.4"}
    changes["data.masking.strategy"] = "None and is 'word'"
    expected = [f"phases.2.{key} was {change} from here on" for key, change in changes.items()]
    assert [record.getMessage() for record in caplog.records] == expected


def test_losses_that_do_not_compare_are_forgotten() -> None:
    config = from_dict({"eval": {"patience": 5}})
    state = {"config": config.model_dump(), "losses_by_objective": {"masked": [2.0]}, "best_step": 4, "since_best": 1}
    changes = {
        "data.masking.strategy": ("word", {}, 4),
        "data.masking.rate": (0.3, {}, -1),
        "model.dropout": (0.0, {}, 4),
    }
    changes |= {"eval.rate": (0.3, {"masked": [2.0]}, -1), "optimizer.lr": (1e-5, {"masked": [2.0]}, 4)}
    changes["eval.patience"] = (0, {"masked": [2.0]}, -1)
    for key, (value, losses, best) in changes.items():
        found = drop_incomparable(state, replace(config, key, value), {})
        assert (found["losses_by_objective"], found["best_step"]) == (losses, best), key
    timed = state | {"phase_datasets": ["a"], "evaluation_seconds": 9.0}
    for datasets, seconds in ((["a"], 9.0), (["a", "b"], 0.0)):  # a phase with other held-out rows was added
        assert drop_incomparable(timed, config, {"phase_datasets": datasets})["evaluation_seconds"] == seconds


def test_checkpoint_removed_while_read_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By the process that trains the run."""
    saved_run(tmp_path, (12,))
    verify_files = format.verify_files

    def verify(path: Path, files: Any) -> None:
        if path.name == "step-00000012":
            saved_run(tmp_path, (15,), keep=1)
        verify_files(path, files)

    monkeypatch.setattr(store, "verify_files", verify)
    assert load_weights(tmp_path)[1]["step"] == 15 and not caplog.records
    (tmp_path / "checkpoints/step-00000015" / WEIGHTS_FILE).unlink()
    with pytest.raises(ValueError, match=f"no usable checkpoint .*step-00000015/{WEIGHTS_FILE} is missing"):
        load_weights(tmp_path)
