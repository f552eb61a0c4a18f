"""Opening a run in six steps: data, config, run folder, model and engine, resume, record.

All ranks take each step together; what one rank finds wrong is refused on all of them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megabert import ops
from megabert.checkpoint import (
    Checkpoints,
    check_compatible,
    check_not_finished,
    cursor_after,
    log_changes,
    mirror,
    refuse_other_tokenizer,
    refuse_other_vocabulary,
    run_lock,
    start_engine,
)
from megabert.common import environment, errors
from megabert.common.files import canonical, write_atomically
from megabert.common.logs import duration, log
from megabert.common.run_files import CONFIG, STARTS, append_line
from megabert.config import Config, DataConfig, ModelConfig, fit_micro_size, list_phases, replace
from megabert.data import mixture
from megabert.data.mixture import AnyDataset, check_data_fits, members, token_counts
from megabert.data.shards import Cache, Manifest
from megabert.data.tokenizer import Tokenizer
from megabert.distributed.ranks import World, on_every_rank, on_main, raise_on_all_ranks
from megabert.distributed.signals import Stop
from megabert.distributed.watchdog import Watchdog
from megabert.engine import Engine, precision
from megabert.inplace import kept_rank
from megabert.inplace.copies import Copies, NewestCopy, copies_of_keeper
from megabert.model import BertForPreTraining
from megabert.trainer import Trainer
from megabert.workload import NO_EXTRAS, Extras, Pretraining


@dataclass(frozen=True)
class ResumePoint:
    """What a run resumes from: its newest checkpoint, or a newer copy in memory."""

    checkpoints: Checkpoints
    path: Path | None  # the newest checkpoint; None without one
    # with --in-place: the copies in memory, and the newest copy if it is newer than the checkpoint
    copies: Copies | None
    copy: NewestCopy | None
    state: Mapping[str, Any]  # state of the copy or the checkpoint; {} for a new run


def open_run(
    run_dir: Path,
    config: Config,
    world: World,
    stop: Stop,
    watchdog: Watchdog,
    *,
    stop_after: int | None = None,
    extend: bool = False,
    deepspeed_extra: Mapping[str, Any] | None = None,
    profile: tuple[int, int] = (0, 0),
    extras: Extras = NO_EXTRAS,
) -> Trainer:
    """Open data, model and engine, and resume from the newest complete checkpoint of the run folder. A collective.

    `extend`: a finished run may continue by another schedule. `profile`: the first and the last update to profile on this rank.
    `extras`: what the settings ask for beyond pre-training.
    Raises ValueError naming the setting, file or folder that does not fit.
    """
    extras.check(config)
    datasets, tokenizer = open_data(config, world)
    watchdog.progress()  # each step may take minutes
    config = resolve_config(config, datasets)
    resume_point = open_run_folder(config, run_dir, world, watchdog.progress, stop.record_upload)
    saved = resume_point.state["config"]["precision"] if resume_point.state else ""
    config = replace(config, "precision", precision.choose(config.precision, world, saved))
    watchdog.progress()
    engine = build_engine(config, datasets, tokenizer, resume_point, world, deepspeed_extra, extras)
    watchdog.progress()
    provenance = describe(config, datasets, tokenizer, engine)
    cursor = resume(engine, config, datasets[0].manifest, provenance, resume_point, extend)
    watchdog.progress()
    workload = Pretraining(config, engine, datasets, tokenizer, extras)
    workload.open_evaluation()
    record(resume_point, provenance, tokenizer)
    watchdog.progress()
    return Trainer(
        config=config,
        engine=engine,
        workload=workload,
        checkpoints=resume_point.checkpoints,
        copies=resume_point.copies,
        stop=stop,
        watchdog=watchdog,
        provenance=provenance,
        saved=resume_point.state or None,
        cursor=cursor,
        stop_after=stop_after,
        profile=profile,
    )


# -- 1. data ---------------------------------------------------------------------------------------------------------


def open_data(config: Config, world: World) -> tuple[list[AnyDataset], Tokenizer]:
    """The dataset or mixture of each phase, one object for equal data, and the tokenizer that they were built with. A collective.
    Raises ValueError naming a dataset with another tokenizer."""
    opened: dict[str, AnyDataset] = {}
    datasets = []
    for phase in list_phases(config):
        data = phase.config.data
        name = f"{data.path} {data.mix}"
        if name not in opened:
            opened[name] = open_dataset(data, world)
        datasets.append(opened[name])
    first = datasets[0]
    for dataset in datasets:
        if dataset.manifest.tokenizer["sha256"] != first.manifest.tokenizer["sha256"]:
            raise ValueError(
                f"{dataset.folder}: built with another tokenizer than {first.folder}; rebuild it with --tokenizer"
            )
    return datasets, on_every_rank(world, lambda: Tokenizer.load(first.tokenizer_path))


def open_dataset(data: DataConfig, world: World) -> AnyDataset:
    """Open a dataset or mixture. The first rank of each node reads the manifests and checks that all shards are there; rank 0
    broadcasts the manifests to the other ranks. A collective. Raises RankError if a rank cannot open the dataset or finds another
    one."""
    cache, reads = Cache(data.cache_dir, data.cache_gib), world.local_rank == 0
    dataset = on_every_rank(world, lambda: mixture.open_mixture(data.path, data.mix, cache=cache) if reads else None)
    if world.size == 1:
        assert dataset is not None
        return dataset
    content = world.broadcast(mixture.to_json(dataset) if world.is_main and dataset is not None else None)
    rank_0_dataset = mixture.from_json(content, data.mix, cache)
    for part in members(rank_0_dataset):
        part.fetches = False  # the node's first rank downloads shards for all
    problem = ""
    if dataset is not None and dataset.manifest.fingerprint != rank_0_dataset.manifest.fingerprint:
        problem = f"{dataset.folder}: differs from the dataset that rank 0 reads there; use a shared folder"
    raise_on_all_ranks(world, problem, errors.USER_ERROR * bool(problem))
    return dataset or rank_0_dataset


# -- 2. config -------------------------------------------------------------------------------------------------------


def resolve_config(config: Config, datasets: Sequence[AnyDataset]) -> Config:
    """The config with `model.vocab_size` from the data. Raises ValueError naming a field that does not fit the data."""
    refuse_other_vocabulary(config, datasets[0].manifest)
    for phase, dataset in zip(list_phases(config), datasets, strict=True):
        check_data_fits(phase.config, dataset.manifest)
    for name, value in (("eval.patience", config.eval.patience), ("eval.pairs", config.eval.pairs)):
        first = members(datasets[0])[0]
        if value and first.held_out_path is None:
            raise ValueError(f"{name}={value}: {first.place} has no held-out split; build it with --held-out SHARE")
    return replace(config, "model.vocab_size", datasets[0].manifest.vocab_size)


# -- 3. run folder ---------------------------------------------------------------------------------------------------


def open_run_folder(
    config: Config, run_dir: Path, world: World, progress: Callable[[], None], uploaded: Callable[[float], None]
) -> ResumePoint:
    """Lock the run folder and its mirror, and find the newest state. `progress` and `uploaded`: see `mirror.Mirror`.

    A collective. Raises ValueError if another job owns the run, or if there are checkpoints but none is usable.
    """
    kept_rank.save_owner_token(run_lock.acquire(run_dir, world, kept_rank.load_owner_token()))
    copied = mirror.open_mirror(config.checkpoint, run_dir, world, progress, uploaded)
    checkpoints = Checkpoints(run_dir, world, config.checkpoint, copied)
    copies = copies_of_keeper(run_dir, world, config.checkpoint.copy_every)
    path, damage = None, None
    try:
        path = checkpoints.latest()
    except ValueError as error:  # on every rank
        damage = error
    if copied is not None:
        copied.request_upload()  # the previous job may have ended before its upload was complete
    state = {} if path is None else checkpoints.state
    saved = on_main(world, checkpoints.steps)
    copy = None if copies is None else copies.newest(state.get("cursor", -1), saved)
    if damage is not None and copy is None:
        raise damage
    return ResumePoint(checkpoints, path, copies, copy, state if copy is None else copy.state)


# -- 4. model and engine ---------------------------------------------------------------------------------------------


def build_engine(
    config: Config,
    datasets: Sequence[AnyDataset],
    tokenizer: Tokenizer,
    resume_point: ResumePoint,
    world: World,
    deepspeed_extra: Mapping[str, Any] | None,
    extras: Extras,
) -> Engine:
    """The engine with a new model, initialised from the seed or from a teacher. A collective."""
    config, counts = fit_micro_size(config, world.size), None
    if world.is_main and world.device.type == "cuda" and (problem := ops.missing_kernels("cuda")):
        log.warning(f"{problem}; training runs on torch's own kernels")
    if config.model.frequency_bias and not resume_point.state and not (config.init_from or config.distill.teacher):
        counts = on_main(world, lambda: token_counts(datasets[0], tokenizer.predicted(config.causal_updates)).tolist())
    torch.manual_seed(config.seed)

    def build() -> BertForPreTraining:
        refuse_above_memory(config.model)
        if config.distill.teacher:
            assert extras.build is not None, "see Extras.check"
            return extras.build(config, tokenizer.sha256, world.device)
        model = BertForPreTraining(config.model, config.ops, world.device.type, precision.DTYPES[config.precision])
        if counts is not None:
            model.init_decoder_bias(torch.tensor(counts))
        return model

    return Engine(config, lambda: on_every_rank(world, build), world, deepspeed_extra)


def refuse_above_memory(model: ModelConfig) -> None:
    """Raises ValueError for a model whose fp32 weights are larger than this machine's memory."""
    rows = model.vocab_size + (0 if model.gated else model.first_position + model.max_positions)
    needed, memory = (model.layer_weights + model.hidden * rows) / 2**28, environment.memory_gib()
    if needed > memory > 0:
        raise ValueError(
            f"the model's weights are {needed:,.0f} GiB in fp32, this machine's memory is {memory:g} GiB; lower model.layers, "
            "model.hidden, model.intermediate or model.max_positions"
        )


# -- 5. resume -------------------------------------------------------------------------------------------------------


def resume(
    engine: Engine,
    config: Config,
    manifest: Manifest,
    provenance: Mapping[str, Any],
    resume_point: ResumePoint,
    extend: bool,
) -> int:
    """Restore the engine from the run's newest state, or from `init_from`; returns the data cursor, the number of the
    first update to train on. A collective. Raises ValueError naming a field in which checkpoint and run differ."""
    checkpoints, copy, saved = resume_point.checkpoints, resume_point.copy, resume_point.state
    if not saved:
        return initialise(engine, config, manifest) if config.init_from else 0
    check_compatible(saved, provenance)
    log_changes(saved, config)
    check_not_finished(saved, config, extend)
    if copy is not None:
        if (interrupted_save := copy.interrupted_save) is not None:
            engine.restore(interrupted_save.tensors, interrupted_save.counters)
            checkpoints.save(engine, interrupted_save.state)
            checkpoints.finish()
            log.info(f"saved at step {interrupted_save.state['step']}: the save that was interrupted")
        engine.restore(copy.tensors, copy.counters)
    else:
        assert resume_point.path is not None
        checkpoints.load(engine, resume_point.path)
    place = resume_point.path if copy is None else "copies in memory"
    log.info(f"resuming from {place} at step {saved['step']}, {duration(saved['seconds'])} trained")
    return int(saved.get("cursor", 0))


def initialise(engine: Engine, config: Config, manifest: Manifest) -> int:
    """Load the weights, and with `init_moments` the moments, of the run `init_from`; returns the data cursor."""
    check = partial(refuse_other_tokenizer, config, manifest=manifest)
    source = start_engine(engine, config.init_from, config.init_moments, check)
    parts = "weights and moments" if config.init_moments else "the weights"
    log.info(f"starting from {parts} of {config.init_from} at step {source['step']}")
    return cursor_after(source, config, manifest)


def describe(config: Config, datasets: Sequence[AnyDataset], tokenizer: Tokenizer, engine: Engine) -> dict[str, Any]:
    """The provenance that every checkpoint has: config and its hash, fingerprints of data and tokenizer, backends, machine,
    versions, revision, command. A collective."""
    module: Any = engine.module
    # rank 0 only: it runs git and hashes the package's files
    of_program = ("versions", "revision", "source", "command")
    program = on_main(engine.world, lambda: {name: getattr(environment, name)() for name in of_program})
    cuda = engine.world.device.type == "cuda"
    backends = {role: choice.name for role, choice in module.backends._asdict().items()}
    return {
        "config": config.model_dump(),
        "config_sha256": config.digest(),
        **datasets[0].identity,
        "phase_datasets": [dataset.manifest.fingerprint for dataset in datasets],
        "tokenizer": tokenizer.sha256,
        "backends": backends | {"optimizer": engine.optimizer_kernels},
        "machine": torch.cuda.get_device_name(engine.world.device) if cuda else environment.processor(),
        "threads": torch.get_num_threads(),
        **program,
        **getattr(module, "provenance", {}),
    }


# -- 6. record -------------------------------------------------------------------------------------------------------


def record(resume_point: ResumePoint, provenance: Mapping[str, Any], tokenizer: Tokenizer) -> None:
    """Write config and tokenizer to the run folder, which makes it usable without the dataset, and a line to `starts.jsonl` with
    step, time and hardware of this start. Rank 0 only."""
    world, run_dir = resume_point.checkpoints.world, resume_point.checkpoints.run_dir
    if not world.is_main:
        return
    write_atomically(run_dir / CONFIG, canonical(provenance))
    for name, data in tokenizer.files().items():
        write_atomically(run_dir / name, data)
    line = {
        "step": resume_point.state.get("step", 0),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "ranks": world.size,
        "device": provenance["machine"],
        "cores": environment.cores(),
        "memory_gib": environment.memory_gib(),
        **{name: provenance[name] for name in ("revision", "versions", "command", "config_sha256")},
    }
    append_line(run_dir / STARTS, json.dumps(line))
