"""Pre-training and distillation: opening a run in six steps, and its workload, the updates of datasets and held-out evaluation."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megabert import distillation, evaluation, ops
from megabert.checkpoint import (
    Checkpoints,
    check_compatible,
    mirror,
    note_changes,
    refuse_other_tokenizer,
    refuse_other_vocabulary,
    run_lock,
    start_engine,
)
from megabert.common import environment, errors
from megabert.common.files import canonical, write_whole
from megabert.common.logs import duration, log
from megabert.common.run_files import CONFIG, STARTS
from megabert.config import Config, DataConfig, fit_micro_size, phases_of
from megabert.data import mixture
from megabert.data.batch import Batch
from megabert.data.loader import Loader
from megabert.data.masking import held_out_masking
from megabert.data.mixture import (
    AnyDataset,
    continue_data,
    fitted_to,
    members,
    names_of,
    token_counts,
    with_vocabulary_size,
)
from megabert.data.pairs import read_pairs
from megabert.data.shards import Cache, Dataset
from megabert.data.tokenizer import Tokenizer
from megabert.distributed.ranks import World, on_every_rank, on_main, refuse_together
from megabert.distributed.signals import Stop
from megabert.distributed.watchdog import Watchdog
from megabert.engine import Engine, precision
from megabert.engine.ceiling import find_ceiling
from megabert.evaluation import SAMPLE_ROWS, HeldOutSamples
from megabert.inplace import kept_rank
from megabert.inplace.copies import Copies, NewestCopy, copies_of_keeper
from megabert.metrics import PretrainingMeter, Shown, progress_line
from megabert.minimal_pairs import PairsWhileTraining, SentenceScorer
from megabert.model import BertForPreTraining
from megabert.trainer import Trainer

# seconds between lines about shards that are copied before training starts
PROGRESS_SECONDS = 5.0


@dataclass(frozen=True)
class Origin:
    """The state that a run folder has to resume from."""

    run_dir: Path
    checkpoints: Checkpoints
    # the newest checkpoint; None without one
    path: Path | None
    # with --in-place: the copies in memory, and the newest copy if it is newer than the checkpoint
    copies: Copies | None
    copy: NewestCopy | None
    # state of the copy or the checkpoint; {} for a new run
    state: Mapping[str, Any]


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
) -> Trainer:
    """Open data, model and engine, and resume from the newest complete checkpoint of the run folder. A collective.

    `extend`: a finished run may continue by another schedule. `profile`: the first and the last update to profile on this rank.
    Raises ValueError naming the setting, file or folder that does not fit.
    """
    datasets, tokenizer = open_data(config, world)
    watchdog.progress()  # each step may take minutes
    config, origin = complete_config(config, datasets, run_dir, world)
    watchdog.progress()
    engine = build_engine(config, datasets, tokenizer, origin, world, deepspeed_extra)
    watchdog.progress()
    provenance, saved, cursor = resume(engine, config, datasets, tokenizer, origin, world, extend)
    watchdog.progress()
    record(origin, provenance, tokenizer, saved, world)
    workload = Pretraining(config, world, engine, datasets, tokenizer)
    return Trainer(
        config=config,
        world=world,
        engine=engine,
        workload=workload,
        checkpoints=origin.checkpoints,
        copies=origin.copies,
        stop=stop,
        watchdog=watchdog,
        run_dir=run_dir,
        provenance=provenance,
        saved=saved,
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
    for phase in phases_of(config):
        data = phase.config.data
        name = f"{data.path} {data.mix}"
        if name not in opened:
            opened[name] = open_dataset(data, world)
        datasets.append(opened[name])
    first = datasets[0]
    for dataset in datasets:
        if dataset.manifest.tokenizer["sha256"] != first.manifest.tokenizer["sha256"]:
            raise ValueError(
                f"{dataset.folder}: its tokenizer is not that of {first.folder}; build it with that one, by --tokenizer"
            )
    return datasets, on_every_rank(world, lambda: Tokenizer.load(first.tokenizer_path))


def open_dataset(data: DataConfig, world: World) -> AnyDataset:
    """Open a dataset or mixture. The first rank of each node reads the manifests and checks that all shards are there; rank 0
    broadcasts the manifests to the other ranks. A collective. Raises RankRefused if a rank cannot open the dataset or finds another
    one."""
    dataset: AnyDataset | None = None
    problem, code, cache = "", errors.OK, Cache(data.cache_dir, data.cache_gib)
    if world.local_rank == 0:
        try:
            dataset = mixture.open_mixture(data.path, data.mix, cache=cache)
        except (ValueError, OSError) as error:
            problem, code = errors.describe(error), errors.exit_code(error)
    refuse_together(world, problem, code)
    if world.size == 1:
        assert dataset is not None
        return dataset
    content = world.broadcast(mixture.to_json(dataset) if world.is_main and dataset is not None else None)
    rank_0_dataset = mixture.from_json(content, data.mix, cache)
    for part in members(rank_0_dataset):
        part.fetches = False  # the first rank of the node does it
    if dataset is not None and dataset.manifest.fingerprint != rank_0_dataset.manifest.fingerprint:
        problem, code = f"{dataset.folder}: is not the dataset that rank 0 sees there", errors.USER_ERROR
    refuse_together(world, problem, code)
    return dataset or rank_0_dataset


# -- 2. config -------------------------------------------------------------------------------------------------------


def complete_config(
    config: Config, datasets: Sequence[AnyDataset], run_dir: Path, world: World
) -> tuple[Config, Origin]:
    """The config with the values that depend on data and device, and the state in the run folder, which is locked. A collective."""
    refuse_other_vocabulary(config, datasets[0].manifest)
    for phase, dataset in zip(phases_of(config), datasets, strict=True):
        fitted_to(phase.config, dataset.manifest)
    config = with_vocabulary_size(config, datasets[0].manifest.vocab_size)
    if config.eval.patience and members(datasets[0])[0].held_out_path is None:
        raise ValueError(
            f"eval.patience={config.eval.patience}: {config.data.path} has no held-out split; build it with --held-out SHARE"
        )
    kept_rank.remember_owner(run_lock.take(run_dir, world, kept_rank.known_owner()))
    copied = mirror.opened(config.checkpoint, run_dir, world)
    checkpoints = Checkpoints(run_dir, world, config.checkpoint, copied)
    path = checkpoints.latest()
    if copied is not None:
        copied.changed()  # the last job may have ended before
    state = {} if path is None else checkpoints.state
    copies = copies_of_keeper(run_dir, world, config.checkpoint.copy_every)
    saved = world.broadcast(checkpoints.steps() if world.is_main else None)
    copy = None if copies is None else copies.newest(state.get("cursor", -1), saved)
    state = state if copy is None else copy.state
    config = precision.with_precision(config, world, state["config"]["precision"] if state else "")
    return config, Origin(run_dir, checkpoints, path, copies, copy, state)


# -- 3. model and engine ---------------------------------------------------------------------------------------------


def build_engine(
    config: Config,
    datasets: Sequence[AnyDataset],
    tokenizer: Tokenizer,
    origin: Origin,
    world: World,
    deepspeed_extra: Mapping[str, Any] | None,
) -> Engine:
    """The engine with a new model, initialised from the seed or from a teacher. A collective."""
    config, counts = fit_micro_size(config, world.size), None
    if world.is_main and world.device.type == "cuda" and (problem := ops.missing_kernels("cuda")):
        log.warning(f"{problem}; training runs on torch's own kernels")
    if config.model.frequency_bias and not origin.state and not (config.init_from or config.distill.teacher):
        counts = token_frequencies(config, datasets[0], tokenizer, world)
    torch.manual_seed(config.seed)

    def build() -> BertForPreTraining:
        if not config.distill.teacher:
            return on_every_rank(world, lambda: new_model(config, world, counts))
        return on_every_rank(world, lambda: distillation.build(config, tokenizer.sha256, world.device))

    return Engine(config, build, world, deepspeed_extra)


def new_model(config: Config, world: World, counts: list[int] | None) -> BertForPreTraining:
    """BERT with fp32 weights. With `counts` of the vocabulary's ids, the decoder's bias is initialised from their frequencies."""
    dtype = precision.DTYPES[config.precision]
    model = BertForPreTraining(config.model, config.ops, world.device.type, dtype)
    if counts is not None:
        model.start_from_frequencies(torch.tensor(counts))
    return model


def token_frequencies(config: Config, dataset: AnyDataset, tokenizer: Tokenizer, world: World) -> list[int]:
    """Number of occurrences of each id that the run predicts, counted by rank 0. A collective. Raises ValueError if rows cannot be
    read."""
    counts: list[int] = []

    def count() -> None:
        predicted = np.ones(tokenizer.vocab_size, dtype=bool)
        predicted[list(tokenizer.special_ids.values())] = False
        predicted[tokenizer.special_ids["sep"]] = config.causal_updates
        counts.extend(token_counts(dataset, predicted).tolist())

    on_main(world, count)
    return world.broadcast(counts)


# -- 4. resume -------------------------------------------------------------------------------------------------------


def resume(
    engine: Engine,
    config: Config,
    datasets: Sequence[AnyDataset],
    tokenizer: Tokenizer,
    origin: Origin,
    world: World,
    extend: bool,
) -> tuple[dict[str, Any], dict[str, Any] | None, int]:
    """Restore the engine from the run's newest state, or from `init_from`. Returns the provenance, the restored state (None for a new
    run), and the update of the data at which a new run starts. A collective. Raises ValueError naming the field in which the
    checkpoint differs from the run."""
    state = origin.state
    provenance = describe(config, datasets, tokenizer, engine)
    if state:
        check_compatible(state, provenance)
        note_changes(state, config, extend)
        if origin.copy is not None:
            if (owed := origin.copy.owed) is not None:
                engine.restore(owed.tensors, owed.counters)
                origin.checkpoints.save(engine, owed.state)
                origin.checkpoints.finish()
                log.info(f"saved at step {owed.state['step']}: the save that was interrupted")
            engine.restore(origin.copy.tensors, origin.copy.counters)
        else:
            assert origin.path is not None
            origin.checkpoints.load(engine, origin.path)
        place = origin.path if origin.copy is None else "copies in memory"
        log.info(f"resuming from {place} at step {state['step']}, {duration(state['seconds'])} trained")
        return provenance, dict(state), 0
    if not config.init_from:
        return provenance, None, 0

    def check(source: Mapping[str, Any]) -> None:
        refuse_other_tokenizer(config, source, datasets[0].manifest)

    source = start_engine(engine, config.init_from, world, config.init_moments, check)
    parts = "weights and moments" if config.init_moments else "the weights"
    log.info(f"starting from {parts} of {config.init_from} at step {source['step']}")
    return provenance, None, cursor_after(source, config, datasets[0])


def cursor_after(source: Mapping[str, Any], config: Config, dataset: AnyDataset) -> int:
    """The update of the data at which a run starts that is initialised from another run, of state `source`: after all rows of that
    run if dataset and seed, and therefore order and masks, are the same; otherwise 0, also if that run had phases."""
    same = source.get("dataset") == dataset.manifest.fingerprint
    if not same or source["config"]["seed"] != config.seed or source["config"]["phases"]:
        return 0
    size = phases_of(config)[0].config.batch.global_size
    cursor = -(-source.get("cursor", 0) * source["config"]["batch"]["global_size"] // size)
    if cursor:
        log.info(f"the data is that run's: training continues after its rows, at update {cursor:,} of the data")
    return cursor


def describe(config: Config, datasets: Sequence[AnyDataset], tokenizer: Tokenizer, engine: Engine) -> dict[str, Any]:
    """The provenance that every checkpoint has: config and its hash, fingerprints of data and tokenizer, backends, machine,
    versions, revision, command. A collective."""
    module: Any = engine.module
    program: dict[str, Any] = {}
    if engine.world.is_main:  # of a thousand ranks one asks git and reads the package's files
        program = {
            "versions": environment.versions(),
            "revision": environment.revision(),
            "source": environment.source(),
            "command": environment.command(),
        }
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
        **engine.world.broadcast(program),
        **getattr(module, "provenance", {}),
    }


# -- 5. record -------------------------------------------------------------------------------------------------------


def record(
    origin: Origin, provenance: Mapping[str, Any], tokenizer: Tokenizer, saved: Mapping[str, Any] | None, world: World
) -> None:
    """Write config and tokenizer to the run folder, which makes it usable without the dataset, and a line to `starts.jsonl` with
    step, time and hardware of this start. Rank 0 only."""
    if not world.is_main:
        return
    write_whole(origin.run_dir / CONFIG, canonical(provenance))
    for name, data in tokenizer.files().items():
        write_whole(origin.run_dir / name, data)
    start = {
        "step": saved["step"] if saved else 0,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "ranks": world.size,
        "device": provenance["machine"],
        "cores": environment.cores(),
        "memory_gib": environment.memory_gib(),
        **{name: provenance[name] for name in ("revision", "versions", "command", "config_sha256")},
    }
    with open(origin.run_dir / STARTS, "a") as file:
        file.write(json.dumps(start) + "\n")


# -- 6. workload -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeldOut:
    """The held-out split of a dataset. `config` has the batch of the dataset's phase; `bytes_a_token` is 0 if the run has only one
    dataset."""

    name: str
    dataset: Dataset
    config: Config
    bytes_a_token: float


class Pretraining:
    """Workload of pre-training: the rows of each phase's dataset, and evaluation on the held-out splits."""

    def __init__(
        self, config: Config, world: World, engine: Engine, datasets: Sequence[AnyDataset], tokenizer: Tokenizer
    ) -> None:
        self.config, self.world, self.engine = fit_micro_size(config, world.size), world, engine
        self.dataset, self.datasets, self.tokenizer = datasets[0], datasets, tokenizer
        self.phases = [fit_micro_size(phase.config, world.size) for phase in phases_of(config)]
        ceiling = find_ceiling(world, engine.dtype, config.peak_tflops)
        self.meter = PretrainingMeter(world, config.model, engine.terms, ceiling.tflops)
        self.shown = Shown()
        # read at the first evaluation
        self._samples: HeldOutSamples | None = None
        log.info(
            f"{engine.describe()}; matrix-product ceiling {ceiling.tflops:.2f} TFLOP/s a device ({ceiling.origin})"
        )

    def updates(self, first: int, phase_starts: Sequence[int]) -> Loader:
        number, sizes = len(phase_starts) - 1, [phase.batch.global_size for phase in self.phases]
        config, position = self.phases[number], continue_data(self.datasets, sizes, phase_starts)
        self.engine.enter_phase(config)
        place = {"rank": self.world.rank, "world": self.world.size, "start_step": first}
        place["origin"] = position - phase_starts[-1] * sizes[number]
        at = place["origin"] + first * sizes[number]
        self.datasets[number].fetch_ahead(config.seed, at, _shown_every(PROGRESS_SECONDS))
        return Loader.from_config(config, self.datasets[number], self.tokenizer, **place)

    def evaluation_due(self, step: int) -> bool:
        interval = self.config.eval.interval
        return step == 0 or bool(interval and step % interval == 0)

    def checkpoint_due(self, step: int) -> bool:
        interval = self.config.checkpoint.interval
        return bool(interval and step % interval == 0)

    @cached_property
    def held_out(self) -> list[HeldOut]:
        """The held-out splits of the run's datasets, in order of first use; [] if the first one has none. A collective. Raises
        ValueError if rows cannot be read."""
        phases = zip(self.datasets, self.phases, strict=True)
        parts = {part.manifest.fingerprint: (part, phase.batch) for mix, phase in phases for part in members(mix)}
        names = names_of([part.place for part, _ in parts.values()])
        splits: list[HeldOut] = []
        for name, (part, batch) in zip(names, parts.values(), strict=True):
            if part.held_out_path is None:
                log.info(f"{part.place} has no held-out split: the run is not evaluated{' on it' if splits else ''}")
                if not splits:
                    break
                continue
            dataset = Dataset(part.held_out_path)
            size = self.bytes_a_token(dataset) if len(parts) > 1 else 0.0
            splits.append(HeldOut(name, dataset, self.config.model_copy(update={"batch": batch}), size))
        return splits

    def bytes_a_token(self, dataset: Dataset) -> float:
        """`evaluation.bytes_a_token`, computed on rank 0. A collective. Raises ValueError if rows cannot be read."""
        values: list[float] = []
        on_main(self.world, lambda: values.append(evaluation.bytes_a_token(dataset, self.tokenizer)))
        return self.world.broadcast(values)[0]

    @cached_property
    def pairs(self) -> PairsWhileTraining | None:
        """The minimal pairs of `eval.pairs`, read at the first evaluation. Raises ValueError naming file and line."""
        if not self.config.eval.pairs:
            return None
        scorer = SentenceScorer(self.engine.module, self.config, self.tokenizer, self.world.device, line=False)
        return PairsWhileTraining(read_pairs(self.config.eval.pairs, self.config.eval.pairs_each), scorer, self.world)

    def evaluate(self, step: int, progress: Callable[[], None]) -> dict[str, float]:
        """Held-out metrics of the first dataset, and with several datasets also loss and bits per byte of each."""
        figures: dict[str, float] = {}
        for split in self.held_out:
            summary = self.evaluate_on(split, progress)
            figures = figures or summary
            if split.bytes_a_token:
                figures |= evaluation.of_dataset(split.name, summary, split.bytes_a_token)
        if not figures:
            return {}
        if self.pairs is not None:
            figures |= self.pairs.figures(progress)
        hidden = ("eval/accuracy_by_source/", "eval/predictions_by_source/")
        shown = {k.removeprefix("eval/"): v for k, v in figures.items() if not v >= 1e4 and not k.startswith(hidden)}
        log.info(f"step {step:>7,}  held-out  {'  '.join(f'{k} {v:.4f}' for k, v in shown.items())}")
        self.shown = Shown(self.samples(self.held_out[0].dataset))
        return figures

    def evaluate_on(self, split: HeldOut, progress: Callable[[], None]) -> dict[str, float]:
        """`evaluation.summary` of a held-out split. A collective. Raises RankRefused if rows cannot be read."""
        batches = evaluation.fixed_batches(
            split.dataset, self.tokenizer, split.config, rank=self.world.rank, world=self.world.size
        )
        batches, sources = evaluation.with_sources(batches, split.dataset), split.dataset.source_names
        problems: list[Exception] = []
        try:
            sums = self.engine.eval_sums(_readable(batches, progress, problems), len(sources))
        except ValueError:
            # of all ranks: one of them has no batch, perhaps since it could not read its first
            self._refuse_unread(problems)
            raise
        self._refuse_unread(problems)
        return evaluation.summary(sums, sources)

    def _refuse_unread(self, problems: Sequence[Exception]) -> None:
        problem = (errors.describe(problems[0]), errors.exit_code(problems[0])) if problems else ("", errors.OK)
        refuse_together(self.world, *problem)

    def samples(self, held_out: Dataset) -> list[dict[str, Any]]:
        """The model's predictions for a few masked held-out rows. Rank 0 computes them; with ZeRO stage 3 all ranks take part."""
        if not self.world.is_main and self.config.zero.stage < 3:
            return []
        if self._samples is None:
            batches = evaluation.fixed_batches(held_out, self.tokenizer, self.config, rows=SAMPLE_ROWS)
            causal = held_out_masking(self.config).causal
            self._samples = HeldOutSamples(batches, self.tokenizer, causal)
        return self._samples.look(self.engine.module, self.world.device)

    def progress_line(self, values: Mapping[str, Any], eta_seconds: float) -> str:
        objective = values["train/objective"]
        if "train/phase" in values:
            objective = f"phase {values['train/phase']} of {len(self.phases)}  {objective}"
        return progress_line(values, self.config.schedule, objective, eta_seconds)

    def state(self) -> dict[str, Any]:
        return {}

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Nothing to restore: everything is a function of the update's number."""


def _shown_every(seconds: float) -> Callable[[int, int], None]:
    """Logs the number of shards that were copied, and of all that training waits for; nothing if that takes less than `seconds`."""
    last = time.monotonic()

    def show(done: int, of: int) -> None:
        nonlocal last
        if time.monotonic() - last > seconds:
            last = time.monotonic()
            log.info(f"{done} of {of} shards that the next updates need are copied here")

    return show


def _readable(batches: Iterable[Batch], progress: Callable[[], None], problems: list[Exception]) -> Iterator[Batch]:
    """`batches` up to one that cannot be read. Its error goes to `problems`, to be raised later: other ranks are in a collective."""
    try:
        for batch in batches:
            yield batch
            progress()
    except (ValueError, OSError) as error:
        problems.append(error)
