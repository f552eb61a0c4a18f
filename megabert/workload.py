"""Workloads of the Trainer: the interface, and pre-training on each phase's dataset with held-out evaluation.

Fine-tuning is another workload of the same Trainer.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import torch

from megabert import evaluation
from megabert.common import errors
from megabert.common.logs import log, log_progress_every
from megabert.config import Config, fit_micro_size, list_phases, replace
from megabert.data.loader import Loader
from megabert.data.masking import held_out_masking
from megabert.data.mixture import AnyDataset, distinct_names, members, skip_rows_of_earlier_phases
from megabert.data.shards import Dataset
from megabert.data.tokenizer import Tokenizer
from megabert.distributed.ranks import World, on_every_rank, on_main, raise_on_all_ranks
from megabert.engine import Engine
from megabert.engine.ceiling import find_ceiling
from megabert.evaluation import SAMPLE_ROWS, HeldOutSamples
from megabert.metrics import Meter, PretrainingMeter, progress_line
from megabert.model import BertForPreTraining

PROGRESS_SECONDS = 5.0  # seconds between lines about shards that are copied before training starts


class Workload(Protocol):
    """Data and evaluation of a run. All methods are called on every rank in the same order.

    An update has `step` (its number in the data, from 0), `epoch`, `batches` for the engine, `row_ids` and `epochs` (int64 [n]) of
    their rows, `tokens` (of this rank, without padding), `objective`, and `problem` with `problem_code`: see
    `megabert.data.batch.Update`.
    """

    @property
    def samples(self) -> Sequence[dict[str, Any]]:
        """Samples of the last evaluation (`megabert.evaluation.HeldOutSamples`); empty for workloads without
        samples."""

    @property
    def meter(self) -> Meter:
        """Metrics of the updates between two log lines."""

    def updates(self, first: int, phase_starts: Sequence[int]) -> Iterator[Any]:
        """Endless iterator over this rank's updates from number `first` of the data on; `close` ends its workers. `phase_starts`: the
        number of the first update of each phase so far; the updates are of the last of these phases."""

    def evaluation_due(self, step: int) -> bool:
        """Whether to evaluate after `step` updates (0: before the first). At the end of the schedule the Trainer always does."""

    def checkpoint_due(self, step: int) -> bool:
        """Whether to save after `step` updates. At the end of the run the Trainer always does."""

    def evaluate(self, step: int, progress: Callable[[], None]) -> dict[str, float]:
        """Evaluate the model after `step` updates, log the metrics and return them; {} without evaluation data. Samples go to
        `samples`. Calls `progress` from time to time, for the watchdog."""

    def progress_line(self, values: Mapping[str, Any], eta_seconds: float) -> str:
        """One line for the terminal from the values of a log line."""

    def state(self) -> dict[str, Any]:
        """JSON state of the workload, for a checkpoint."""

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Continue from a checkpoint's state."""


@dataclass(frozen=True)
class Extras:
    """Optional parts of a run that this module must not import (`megabert.objectives.extras`)."""

    # the model to train in place of a new BERT, for `distill.teacher`: from config, the tokenizer's SHA-256 and the device
    build: Callable[[Config, str, torch.device], BertForPreTraining] | None = None
    # an evaluation beside the held-out one, for `eval.pairs`: called with a progress function it returns metrics
    pairs: Callable[[Config, Engine, Tokenizer, World], Callable[[Callable[[], None]], dict[str, float]]] | None = None

    def check(self, config: Config) -> None:
        """Raises ValueError for a setting whose part is missing."""
        for setting, value, part in (
            ("distill.teacher", config.distill.teacher, self.build),
            ("eval.pairs", config.eval.pairs, self.pairs),
        ):
            if value and part is None:
                raise ValueError(f"{setting}={value}: open the run with extras=megabert.objectives.extras()")


NO_EXTRAS = Extras()


@dataclass(frozen=True)
class HeldOut:
    """The held-out split of a dataset. `config` has the batch of the dataset's phase; `bytes_per_token` is 0 if the run has only one
    dataset."""

    name: str
    dataset: Dataset
    config: Config
    bytes_per_token: float


class Pretraining:
    """Workload of pre-training: the rows of each phase's dataset, and evaluation on the held-out splits."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        datasets: Sequence[AnyDataset],
        tokenizer: Tokenizer,
        extras: Extras = NO_EXTRAS,
    ) -> None:
        world = engine.world
        self.config, self.world, self.engine, self.extras = fit_micro_size(config, world.size), world, engine, extras
        self.datasets, self.tokenizer = datasets, tokenizer
        self.phases = [fit_micro_size(phase.config, world.size) for phase in list_phases(config)]
        ceiling = find_ceiling(world, engine.dtype, config.peak_tflops)
        self.meter = PretrainingMeter(world, config.model, engine.terms, ceiling.tflops)
        self.samples: list[dict[str, Any]] = []
        self._node_ranks = world.gather(socket.gethostname()).count(socket.gethostname())
        self._samples: HeldOutSamples | None = None  # read at the first evaluation
        log.info(f"{engine.describe()}; matmul peak {ceiling.tflops:.2f} TFLOP/s per device ({ceiling.origin})")

    def updates(self, first: int, phase_starts: Sequence[int]) -> Loader:
        number, sizes = len(phase_starts) - 1, [phase.batch.global_size for phase in self.phases]
        config, position = self.phases[number], skip_rows_of_earlier_phases(self.datasets, sizes, phase_starts)
        self.engine.enter_phase(config)
        sharding = {"rank": self.world.rank, "world": self.world.size, "node_ranks": self._node_ranks}
        sharding |= {"start_step": first, "origin": position - phase_starts[-1] * sizes[number]}
        first_position = sharding["origin"] + first * sizes[number]
        show = log_progress_every(PROGRESS_SECONDS, "shards for the next updates are downloaded")

        def fetched(done: int, total: int) -> None:
            self.engine.progress()
            show(done, total)

        # on every rank, so that a missing shard is an error on all of them
        on_every_rank(self.world, lambda: self.datasets[number].fetch_ahead(config.seed, first_position, fetched))
        return Loader.from_config(config, self.datasets[number], self.tokenizer, **sharding)

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
        names = distinct_names([part.place for part, _ in parts.values()])
        splits: list[HeldOut] = []
        for name, (part, batch) in zip(names, parts.values(), strict=True):
            if part.held_out_path is None:
                log.info(f"{part.place} has no held-out split: the run is not evaluated{' on it' if splits else ''}")
                if not splits:
                    break
                continue
            dataset = on_every_rank(self.world, partial(Dataset, part.held_out_path))
            causal = held_out_masking(self.config).causal
            measure = partial(evaluation.bytes_per_token, dataset, self.tokenizer, causal)
            size = on_main(self.world, measure) if len(parts) > 1 else 0.0
            splits.append(HeldOut(name, dataset, replace(self.config, "batch", batch), size))
        return splits

    @cached_property
    def evaluate_pairs(self) -> Callable[[Callable[[], None]], dict[str, float]] | None:
        """The evaluation of `eval.pairs`. Raises ValueError naming file and line."""
        if not self.config.eval.pairs:
            return None
        assert self.extras.pairs is not None, "see Extras.check"
        return self.extras.pairs(self.config, self.engine, self.tokenizer, self.world)

    def open_evaluation(self) -> None:
        """Open the files of evaluations now, so that an error in them is raised before the first update. A collective.
        Raises ValueError."""
        _ = self.held_out, self.evaluate_pairs

    def evaluate(self, step: int, progress: Callable[[], None]) -> dict[str, float]:
        """Held-out metrics of the first dataset, and with several datasets also loss and bits per byte of each."""
        metrics: dict[str, float] = {}
        for split in self.held_out:
            summary = self.evaluate_on(split, progress)
            metrics = metrics or summary
            if split.bytes_per_token:
                metrics |= evaluation.dataset_metrics(split.name, summary, split.bytes_per_token)
        if not metrics:
            return {}
        if self.evaluate_pairs is not None:
            metrics |= self.evaluate_pairs(progress)
        # the terminal shows no counts (large values) and no table by source; NaN is shown
        hidden = ("eval/accuracy_by_source/", "eval/predictions_by_source/")
        shown = {k.removeprefix("eval/"): v for k, v in metrics.items() if not v >= 1e4 and not k.startswith(hidden)}
        log.info(f"step {step:>7,}  held-out  {'  '.join(f'{k} {v:.4f}' for k, v in shown.items())}")
        self.samples = self.predict_samples(self.held_out[0])
        return metrics

    def evaluate_on(self, split: HeldOut, progress: Callable[[], None]) -> dict[str, float]:
        """`evaluation.summary` of a held-out split. A collective. Raises RankError if rows cannot be read."""
        batches = evaluation.fixed_batches(
            split.dataset, self.tokenizer, split.config, rank=self.world.rank, world=self.world.size
        )
        batches, sources = evaluation.with_sources(batches, split.dataset), split.dataset.source_names
        problems: list[Exception] = []
        try:
            sums = self.engine.eval_sums(evaluation.readable(batches, progress, problems), len(sources))
        except ValueError:
            # raised on all ranks if one has no batch; that rank may have failed to read its first one
            self._refuse_unread(problems)
            raise
        self._refuse_unread(problems)
        return evaluation.summary(sums, sources)

    def _refuse_unread(self, problems: Sequence[Exception]) -> None:
        problem = (errors.describe(problems[0]), errors.exit_code(problems[0])) if problems else ("", errors.OK)
        raise_on_all_ranks(self.world, *problem)

    def predict_samples(self, split: HeldOut) -> list[dict[str, Any]]:
        """The model's predictions for a few masked held-out rows. Rank 0 computes them; with ZeRO stage 3 all ranks take part."""
        if not self.world.is_main and self.config.zero.stage < 3:
            return []
        if self._samples is None:
            batches = evaluation.fixed_batches(split.dataset, self.tokenizer, split.config, rows=SAMPLE_ROWS)
            causal = held_out_masking(self.config).causal
            self._samples = HeldOutSamples(batches, self.tokenizer, causal)
        return self._samples.predict(self.engine.module, self.world.device)

    def progress_line(self, values: Mapping[str, Any], eta_seconds: float) -> str:
        objective = values["train/objective"]
        if "train/phase" in values:
            objective = f"phase {values['train/phase']} of {len(self.phases)}  {objective}"
        return progress_line(values, self.config.schedule, objective, eta_seconds)

    def state(self) -> dict[str, Any]:
        return {}

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Nothing to restore: everything is a function of the update's number."""
