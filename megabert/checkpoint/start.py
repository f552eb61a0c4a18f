"""What a checkpoint is read for besides going on with its run: weights, another run's start, the step of the newest."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megabert.checkpoint.index import build
from megabert.checkpoint.manifest import MANIFEST, WEIGHTS, Damaged, file_name, has_moments, read_manifest, seal
from megabert.checkpoint.store import SAVING, STEP, Checkpoints, committed_step
from megabert.checkpoint.tensors import Stored, write_pieces
from megabert.config import CheckpointConfig
from megabert.distributed.process_group import World, discover
from megabert.engine.zero_layout import WEIGHT, Piece

if TYPE_CHECKING:
    from megabert.engine.deepspeed_engine import Engine


def _is_checkpoint(path: Path) -> bool:
    """Whether a path is one checkpoint's folder and not a run's."""
    return (path / MANIFEST).is_file() and STEP.fullmatch(path.resolve().name) is not None


def load_weights(source: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Verified fp32 weights by parameter name, and the saved state, of a run folder or one checkpoint folder.

    Every rank reads for itself, and these files alone; an earlier layout's too. Raises ValueError naming `source` when it holds
    no whole checkpoint.
    """
    path = Path(source)
    alone = World(0, 0, 1, discover({}).device, "gloo", "single")
    checkpoints = Checkpoints(path, alone)
    if _is_checkpoint(path):
        if problem := checkpoints.problem(path, weights_only=True):
            raise Damaged(problem)
    else:
        newest = checkpoints.newest(None, weights_only=True)
        if newest is None:
            raise ValueError(f"{source}: no checkpoint in it; name a run folder or one of its checkpoints")
        path = newest
    manifest = read_manifest(path, weights_only=True)
    return Stored(path, manifest).whole(WEIGHT), manifest["state"]


def start_engine(engine: Engine, source: str | Path, world: World) -> dict[str, Any]:
    """Begin `engine` with the weights and moments of a run folder's newest whole checkpoint, or of one checkpoint folder;
    the state saved with them. A collective.

    Raises ValueError naming `source` when it holds no whole checkpoint, or one without moments or with another optimizer's.
    """
    path = Path(source)
    checkpoints = Checkpoints(path, world)
    if _is_checkpoint(path):
        if problem := checkpoints.problem(path):
            raise ValueError(f"init_from={source}: {problem}")
    else:
        newest = checkpoints.latest()
        if newest is None:
            raise ValueError(f"init_from={source}: no checkpoint in it; name a run folder or one of its checkpoints")
        path = newest
    manifest = read_manifest(path)
    if not has_moments(manifest["engine"]):
        raise ValueError(f"init_from={source} holds no moments; set init_moments=false to start from its weights alone")
    name, ours = manifest["state"]["config"]["optimizer"]["name"], engine.config.optimizer.name
    if name != ours:
        raise ValueError(
            f"init_from={source} holds the moments of optimizer.name={name} and this run's is {ours}; set init_moments=false "
            "to start from its weights alone"
        )
    stored = Stored(path, manifest)
    engine.load_weights(stored.whole(WEIGHT))
    engine.take_moments(stored.read)
    world.barrier()
    return manifest["state"]


def newest_step(run_dir: str | Path) -> int | None:
    """The step of the newest committed checkpoint of a run folder, which may be one that is being written to; or None."""
    return committed_step(Path(run_dir) / "checkpoints")


def write_start(run_dir: str | Path, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> Path:
    """Make whole fp32 `weights` the checkpoint of step 0 of a run folder that nobody else writes; its folder.

    It has no moments, as after no update. `state` as in `Checkpoints.save`, without "step".
    """
    alone = World(0, 0, 1, discover({}).device, "gloo", "single")
    checkpoints = Checkpoints(run_dir, alone, CheckpointConfig(asynchronous=False))
    folder = checkpoints.folder / f"{SAVING}{0:08d}"
    folder.mkdir(parents=True)
    name = file_name(WEIGHTS, 0, 1)
    pieces = [Piece(n, 0, {WEIGHT: weight.reshape(-1)}) for n, weight in weights.items()]
    shapes = {n: tuple(weight.shape) for n, weight in weights.items()}
    layout = {
        "ranks": 1,
        "files": {name: write_pieces(folder / name, pieces)},
        "parameters": build(shapes, [[(piece.name, 0, piece.length) for piece in pieces]]),
        "first_moment_only": [],
    }
    state = dict(state) | {"step": 0, "world_size": 1}
    checkpoints.commit(folder, 0, seal(layout, state, {"optimizer_steps": 0}))
    return checkpoints.folder / f"step-{0:08d}"
