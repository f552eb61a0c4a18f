"""Loading weights and moments from another run's checkpoint, and writing the step-0 checkpoint of a converted model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megabert.checkpoint.format import MANIFEST, StoredTensors, has_moments
from megabert.checkpoint.store import Checkpoints, committed_step
from megabert.common import errors
from megabert.common.run_files import STEP, checkpoint_name
from megabert.config import CheckpointConfig
from megabert.distributed.ranks import RankError, discover, on_every_rank
from megabert.engine.zero_layout import START, WEIGHT, ParameterSlice, Snapshot

if TYPE_CHECKING:
    from megabert.engine import Engine


def load_weights(source: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Verified fp32 weights by parameter name, and the saved state, of a run folder or one checkpoint folder.

    Not a collective; the files of moments are not read. Raises ValueError naming `source` if it has no complete checkpoint.
    """
    checkpoints = Checkpoints(source, discover({}))
    path = _find_newest(checkpoints, weights_only=True)
    stored = StoredTensors.of_checkpoint(path, checkpoints.manifest, checkpoints.world)
    weights = {name: weight.view(stored.shapes[name]) for _, name, weight in stored.gather_all(WEIGHT)}
    return weights, checkpoints.state


def start_engine(
    engine: Engine, source: str | Path, moments: bool, check: Callable[[dict[str, Any]], None] = lambda state: None
) -> dict[str, Any]:
    """Load the weights, with `moments` also the moments, of a run folder's newest complete checkpoint or of one checkpoint folder
    into `engine`, after a `check` of the saved state; returns the state. A collective. The update count for the moments' bias
    correction restarts at zero.

    Raises ValueError naming `source` if it has no complete checkpoint, or one without moments or with those of another optimizer.
    """
    checkpoints = Checkpoints(source, engine.world)
    try:
        path = _find_newest(checkpoints, weights_only=not moments)
    except ValueError as error:
        raise RankError(f"init_from={source}: {error}", errors.exit_code(error)) from error
    if moments:
        _check_moments(checkpoints.manifest, source, engine.config.optimizer.name)
    check(checkpoints.state)
    # the run may be training, and remove the checkpoint
    open_files = partial(StoredTensors.of_checkpoint, path, checkpoints.manifest, engine.world)
    engine.restore(on_every_rank(engine.world, open_files), START | {"primed": moments})
    engine.world.barrier()
    return checkpoints.state


def _check_moments(manifest: Mapping[str, Any], source: str | Path, current: str) -> None:
    if not has_moments(manifest["engine"]):
        raise ValueError(f"init_from={source} holds no moments; set init_moments=false to start from its weights alone")
    name = manifest["state"]["config"]["optimizer"]["name"]
    if name != current:
        raise ValueError(
            f"init_from={source} holds the moments of optimizer.name={name} and this run's is {current}; set "
            "init_moments=false to start from its weights alone"
        )


def kept_manifests(run_dir: str | Path) -> Iterator[dict[str, Any]]:
    """The manifest of each checkpoint of a run, newest first, after verifying its files. Raises ValueError naming a file that was
    changed."""
    checkpoints = Checkpoints(run_dir, discover({}))
    for step in checkpoints.steps():
        if problem := checkpoints.verify(checkpoints.folder / checkpoint_name(step)):
            raise ValueError(f"{checkpoints.folder}: {problem}")
        yield checkpoints.manifest


def newest_step(run_dir: str | Path) -> int | None:
    """The step of the newest committed checkpoint of a run folder, or None. The run may be training."""
    return committed_step(Path(run_dir) / "checkpoints")


def write_start(run_dir: str | Path, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Write fp32 `weights` as the checkpoint of step 0 of a run folder, without moments.

    No other process may write to the run folder. `state` as in `Checkpoints.save`, without "step".
    """
    slices = [ParameterSlice(name, 0, {WEIGHT: weight.reshape(-1)}) for name, weight in weights.items()]
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    checkpoints = Checkpoints(run_dir, discover({}), CheckpointConfig(asynchronous=False))
    checkpoints.save_snapshot(Snapshot(shapes, slices, [], START), {**state, "step": 0}, time.perf_counter())


def _find_newest(checkpoints: Checkpoints, weights_only: bool = False) -> Path:
    """The newest complete checkpoint of a run folder, or the checkpoint whose folder was given instead. A collective. Raises
    ValueError."""
    path = checkpoints.run_dir
    if (path / MANIFEST).is_file() and STEP.fullmatch(path.resolve().name):
        if problem := checkpoints.verify(path, weights_only):
            raise ValueError(problem)
        return path
    newest = checkpoints.latest(weights_only=weights_only)
    if newest is None:
        raise ValueError(f"{path}: no checkpoint in it; name a run folder or one of its checkpoints")
    return newest
