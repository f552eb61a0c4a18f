"""Start of a run from a checkpoint: whether its own may continue it, and weights and moments taken from another run's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megabert.checkpoint.manifest import MANIFEST, WEIGHTS, file_name, has_moments, index_slices, seal
from megabert.checkpoint.store import SAVING, STEP, Checkpoints, committed_step
from megabert.checkpoint.tensors import StoredTensors, write_slices
from megabert.common import errors
from megabert.common.logs import log
from megabert.config import CheckpointConfig, Config, ScheduleConfig, flat, phase_at, phases_of
from megabert.distributed.ranks import RankRefused, World, discover
from megabert.engine.zero_layout import START, WEIGHT, ParameterSlice
from megabert.optim.schedule import finished, share_used

if TYPE_CHECKING:
    from megabert.engine import Engine

# Fields of the config that decide what the weights and moments mean, and which rows an update holds.
FIXED = ("batch.global_size", "optimizer.name", "precision", "seed")
# Of a phase that a run has been in.
FIXED_IN_PHASE = ("batch.global_size", "model.rope_theta", "model.local_rope_theta")
# Of the model section, which is fixed otherwise: they do not change what the weights compute.
FREE = ("dropout", "attention_dropout", "activation_checkpointing", "zero_init", "frequency_bias")
# May change during a run, but a causal model is another kind of model.
STRATEGY = "data.masking.strategy"


def check_compatible(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Refuse to continue a run on other data or as another model.

    Both hold "dataset", "tokenizer" (SHA-256) and "config", of a student also "teacher" (SHA-256 of its weights). Raises
    ValueError naming the field and both values.
    """
    _check_equal("dataset fingerprint", saved["dataset"], current["dataset"])
    _check_equal("tokenizer SHA-256", saved["tokenizer"], current["tokenizer"])
    _check_equal("distill.teacher's weights (SHA-256)", saved.get("teacher"), current.get("teacher"))
    old, new = saved["config"]["model"], current["config"]["model"]
    for field in sorted((old.keys() | new.keys()) - set(FREE)):
        _check_equal(f"model.{field}", old.get(field), new.get(field))
    for name in FIXED:
        _check_equal(name, _field(saved["config"], name), _field(current["config"], name))
    strategies = _field(saved["config"], STRATEGY), _field(current["config"], STRATEGY)
    if "causal" in strategies:
        _check_equal(STRATEGY, *strategies)
    _check_phases(saved, current)


def _check_phases(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Of the phases that the run has been in, the data and the batch must be the same, and it must not be back in one of them."""
    before, now = (Config.model_validate(of["config"]) for of in (saved, current))
    starts = saved.get("phase_starts", [0])
    if len(starts) > 1:
        used = share_used(now.schedule, saved["step"], saved["seconds"] / 60, saved["tokens"])
        number = phase_at(phases_of(now), used) + 1
        if number < len(starts):
            raise ValueError(
                f"cannot resume: the run is in phase {len(starts)}, and by the phases and the budget given it would be back in "
                f"phase {number}; give a budget or shares by which phase {len(starts) - 1} is over"
            )
    phases = list(zip(phases_of(before), phases_of(now), strict=False))[: len(starts)]
    for number, (old, new) in enumerate(phases):
        datasets = [of["phase_datasets"][number] for of in (saved, current)]
        _check_equal(f"phases.{number + 1}: dataset fingerprint", *datasets)
        for name in FIXED_IN_PHASE:
            values = (_field(phase.config.model_dump(), name) for phase in (old, new))
            _check_equal(f"phases.{number + 1}: {name}", *values)


def note_changes(saved: Mapping[str, Any], config: Config, extend: bool) -> None:
    """Log each setting that is not the one of the checkpoint's state. Raises ValueError where its run is finished and another
    schedule would begin it again, unless it may `extend` the run."""
    before, now = _settings(saved["config"]), _settings(config.model_dump())
    for name in before | now:
        if before.get(name) != now.get(name):
            log.info(f"{name} was {before.get(name)!r} and is {now.get(name)!r} from here on")
    used = saved["step"], saved["seconds"] / 60, saved["tokens"]
    over = finished(ScheduleConfig.model_validate(saved["config"]["schedule"]), *used)
    if over and not finished(config.schedule, *used) and not extend:
        raise ValueError("this run is finished, and the schedule given would train it on; with --extend it does")


def _settings(tree: Mapping[str, Any]) -> dict[str, Any]:
    """`section.key` -> value, and `phases.N.section.key` -> value of what phases change."""
    settings = flat(tree)
    phases = settings.pop("phases", [])
    return settings | flat({f"phases.{number}": phase for number, phase in enumerate(phases, 1)})


def _field(tree: Mapping[str, Any], name: str) -> Any:
    node: Any = tree
    for part in name.split("."):
        node = node[part]
    return node


def _check_equal(field: str, saved: Any, current: Any) -> None:
    if saved != current:
        raise ValueError(
            f"cannot resume: {field} is {current!r} but the checkpoint was made with {saved!r}; "
            "set it back or name a new run folder"
        )


def load_weights(source: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Verified fp32 weights by parameter name, and the saved state, of a run folder or one checkpoint folder.

    Each process reads for itself, and these files alone. Raises ValueError naming `source` when it holds no whole checkpoint.
    """
    checkpoints = Checkpoints(source, _lone_rank())
    path = _newest_of(checkpoints, weights_only=True)
    stored = StoredTensors.of_checkpoint(path, checkpoints.manifest, checkpoints.world)
    weights = {name: weight.view(stored.shapes[name]) for _, name, weight in stored.whole(WEIGHT)}
    return weights, checkpoints.state


def start_engine(engine: Engine, source: str | Path, world: World, moments: bool) -> dict[str, Any]:
    """Start `engine` with the weights, and the `moments` too, of a run folder's newest whole checkpoint, or of one checkpoint
    folder; the state saved with them. A collective. The bias correction of moments, which counts updates, restarts at zero.

    Raises ValueError naming `source` when it holds no whole checkpoint, or one without moments or with another optimizer's.
    """
    checkpoints = Checkpoints(source, world)
    try:
        path = _newest_of(checkpoints, weights_only=not moments)
    except ValueError as error:
        raise RankRefused(f"init_from={source}: {error}", errors.exit_code(error)) from error
    if moments:
        _check_moments(checkpoints.manifest, source, engine.config.optimizer.name)
    engine.restore(StoredTensors.of_checkpoint(path, checkpoints.manifest, world), START | {"primed": moments})
    world.barrier()
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
    """The manifest of each checkpoint of a run, the newest first, all its files compared. Raises ValueError naming the file that is
    not as it was saved."""
    checkpoints = Checkpoints(run_dir, _lone_rank())
    for step in checkpoints.steps():
        if problem := checkpoints.problem(checkpoints.folder / f"step-{step:08d}"):
            raise ValueError(f"{checkpoints.folder}: {problem}")
        yield checkpoints.manifest


def newest_step(run_dir: str | Path) -> int | None:
    """The step of the newest committed checkpoint of a run folder, which may be one that is being written to; or None."""
    return committed_step(Path(run_dir) / "checkpoints")


def write_start(run_dir: str | Path, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> Path:
    """Make whole fp32 `weights` the checkpoint of step 0 of a run folder that no other process writes; its folder.

    It has no moments, as after no update. `state` as in `Checkpoints.save`, without "step".
    """
    checkpoints = Checkpoints(run_dir, _lone_rank(), CheckpointConfig(asynchronous=False))
    folder = checkpoints.folder / f"{SAVING}{0:08d}"
    folder.mkdir(parents=True)
    file = file_name(WEIGHTS, 0, 1)
    slices = [ParameterSlice(name, 0, {WEIGHT: weight.reshape(-1)}) for name, weight in weights.items()]
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    fields = {
        "ranks": 1,
        "files": {file: write_slices(folder / file, slices)},
        "parameters": index_slices(shapes, [[(part.name, 0, part.length) for part in slices]]),
        "first_moment_only": [],
    }
    state = dict(state) | {"step": 0, "world_size": 1}
    checkpoints.commit(folder, 0, seal(fields, state, START))
    return checkpoints.folder / f"step-{0:08d}"


def _lone_rank() -> World:
    return World(0, 0, 1, discover({}).device, "gloo", "single")


def _newest_of(checkpoints: Checkpoints, weights_only: bool = False) -> Path:
    """The run's newest whole checkpoint, or the one whose own folder was named instead of a run's. A collective. Raises
    ValueError."""
    path = checkpoints.run_dir
    if (path / MANIFEST).is_file() and STEP.fullmatch(path.resolve().name):
        if problem := checkpoints.problem(path, weights_only):
            raise ValueError(problem)
        return path
    newest = checkpoints.latest(weights_only=weights_only)
    if newest is None:
        raise ValueError(f"{path}: no checkpoint in it; name a run folder or one of its checkpoints")
    return newest
