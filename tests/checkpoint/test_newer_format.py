"""Files of a later version are refused by name, and stay as they are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megabert.checkpoint import Checkpoints, load_weights
from megabert.checkpoint.format import SCHEMA, SEAL
from megabert.common.files import sealed
from megabert.config import CheckpointConfig
from megabert.data.shards import Dataset
from megabert.distributed.ranks import World
from tests.checkpoint.test_store import steps
from tests.conftest import ROOT
from tests.helpers import runs
from tests.helpers.ranks import run_ranks

GOLDEN = ROOT / "tests/data/golden/dataset"
TEXT = f"has format {SCHEMA + 1}, which a later version of MegaBERT wrote; this one reads {SCHEMA}: update it"


def made_newer(folder: Path) -> Path:
    """A run whose checkpoint is of the next format."""
    run = runs.make(folder)
    file = run / "checkpoints/step-00000000/manifest.json"
    file.write_bytes(sealed(json.loads(file.read_bytes()) | {"schema": SCHEMA + 1}, SEAL))
    return run


def newest(world: World, run: str) -> str:
    try:
        Checkpoints(run, world, CheckpointConfig()).latest()
    except ValueError as error:
        return str(error)
    return "read"


def test_a_newer_checkpoint_is_refused_on_every_rank(tmp_path: Path) -> None:
    run = made_newer(tmp_path / "run")
    found = run_ranks(2, newest, str(run))
    assert found[0] == found[1] and TEXT in found[0], found
    assert steps(run) == [0]  # nothing is renamed
    with pytest.raises(ValueError, match="later version of MegaBERT"):
        load_weights(run)


def test_a_newer_dataset_is_refused(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path / "data")
    file = tmp_path / "data/manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"schema": 2}))
    with pytest.raises(ValueError, match=r"manifest\.json: has format 2, which a later version .* reads 1: update it"):
        Dataset(tmp_path / "data")
